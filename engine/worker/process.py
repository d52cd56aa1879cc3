"""A rank: its process loads the model, carries out plans and ends when its parent does.

Started as `python -m saggar.engine.worker.process CONTROL PULSE [LINK ...]`, each the number of a descriptor: its
ends of the channel to the parent, of the socket for pulses, and of the channels to other ranks. A thread of its
own receives, so that a cancel is never behind a running forward, and that the parent's end is noticed at once.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Sequence
from typing import cast

from saggar.engine.errors import EngineError, LoadError, RowFailed, Unsupported, WorkerDied
from saggar.engine.worker.channel import Channel, ChannelClosed
from saggar.engine.worker.loader import load
from saggar.engine.worker.plan import Call, Cancel, Failed, Plan, Reply, Report, RowReport, Start, Stepped
from saggar.engine.worker.pulse import Activity, send_pulses
from saggar.engine.worker.runner import OnStep, Runner
from saggar.engine.worker.team import Team
from saggar.engine.worker.world import World

_LOOK_MS = 1000


class Inbox:
    """Plans in order, and what to cancel of them; filled by the receiving thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._work: queue.SimpleQueue[Plan | Call | None] = queue.SimpleQueue()
        self._cancelled: dict[int, frozenset[str]] = {}
        threading.Thread(target=self._receive, name="saggar-inbox", daemon=True).start()

    def next(self) -> Plan | Call | None:
        """Wait for work; None: shut down. A plan forgets the cancels of earlier ones."""
        work = self._work.get()
        if isinstance(work, Plan):
            for plan_id in list(self._cancelled):
                if plan_id < work.id:
                    del self._cancelled[plan_id]
        return work

    def cancelled(self, plan_id: int) -> Collection[str]:
        """The requests of this plan for which a cancel has come."""
        return self._cancelled.get(plan_id, frozenset())

    def _receive(self) -> None:
        poll, parent = select.poll(), os.getppid()
        poll.register(self._channel.fileno(), select.POLLIN)
        while True:
            try:
                while not poll.poll(_LOOK_MS):
                    if os.getppid() != parent:  # a fork of the parent may hold its end of the channel open
                        raise ChannelClosed("the parent has gone")
                message = self._channel.receive()
            except ChannelClosed:
                os._exit(0)  # nobody wants the rest, and a forward cannot be interrupted
            except Exception:  # noqa: BLE001  (whatever unpickling raises: without this thread nothing more is heard)
                traceback.print_exc()
                os._exit(1)
            if isinstance(message, Plan | Call):
                self._work.put(message)
            elif isinstance(message, Cancel):
                # Replaced, never changed: the other thread may be reading it.
                before = self._cancelled.get(message.plan_id, frozenset())
                self._cancelled[message.plan_id] = before | set(message.request_ids)
            else:
                self._work.put(None)
                return


_HARMLESS = (
    "Should have t[ab]",  # torchsde, of times that differ by a rounding: Stable Audio's sampler, at each request
    "`torch.nn.utils.weight_norm` is deprecated",  # diffusers' VAE of sounds, at each load
)
"""Warnings of libraries about themselves, which nobody here can do anything about."""


def main(control: int, pulse: int, *links: int) -> int:
    """The rank's life; returns the exit status."""
    # Stopping is the parent's decision: a signal for the whole group must not take a running batch along.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message=message)
    channel = Channel(socket.socket(fileno=control))
    try:
        path = cast("list[str] | None", channel.receive())
        if path is not None:  # None: the engine lives on another machine
            sys.path[:] = path
        start = cast(Start, channel.receive())
    except ChannelClosed:  # who started it was interrupted
        return 0
    activity = Activity()
    send_pulses(socket.socket(fileno=pulse), activity, start.config.patience.pulse_s)
    channels = [Channel(socket.socket(fileno=link)) for link in links]
    team = Team(start.rank, channels, start.slot, start.config.patience.silence_s)
    inbox = Inbox(channel)
    started = False
    try:
        with World(start.config, team) as world:
            runner, ready = load(start.config, team, activity, start.row_limits, world.mesh)
            channel.send(ready)
            started = True
            _serve(runner, inbox, channel, team)
            runner.close()
    except ChannelClosed:
        return 0
    except BaseException as error:  # noqa: BLE001  (the parent is told, and the process ends)
        if not isinstance(error, Unsupported | LoadError):  # a wrong setting or model: its line says it all
            traceback.print_exc()
        channel.send(Failed(_telling(error, started)))
        return 1
    return 0


def _telling(error: BaseException, started: bool) -> EngineError:
    if isinstance(error, EngineError):
        return error
    kind = WorkerDied if started else LoadError
    return kind(f"{type(error).__name__}: {error}")


def _serve(runner: Runner, inbox: Inbox, channel: Channel, team: Team) -> None:
    def on_step(rows: Sequence[RowReport]) -> None:
        if team.leads:
            channel.send(Stepped(tuple(rows)))

    while (work := inbox.next()) is not None:
        if isinstance(work, Plan):
            channel.send(_execute(work, runner, inbox, team, on_step))
        else:
            _answer(channel, runner.call(work))


def _answer(channel: Channel, reply: Reply) -> None:
    """A value that cannot travel is the extension's fault, and no reason to end."""
    try:
        channel.send(reply)
    except ChannelClosed:
        raise
    except Exception as error:  # noqa: BLE001  (whatever pickling raises: nothing was sent yet)
        channel.send(Reply(error=RowFailed(f"its value cannot be sent: {type(error).__name__}: {error}")))


def _execute(plan: Plan, runner: Runner, inbox: Inbox, team: Team, on_step: OnStep) -> Report:
    """The report of a rank that does not lead has no rows: what there is to tell, rank 0 tells."""
    report = runner.execute(plan, lambda failed: team.agree(failed, inbox.cancelled(plan.id)), on_step)
    return report if team.leads else Report(plan.id, ())


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
