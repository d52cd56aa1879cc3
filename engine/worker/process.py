"""A rank: its process loads the model, carries out plans and ends when its parent does.

Started as `python -m saggar.engine.worker.process FD`, FD being its end of a socket pair. A thread of its
own receives, so that a cancel is never behind a running forward, and that the parent's end is noticed at
once.
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
from collections.abc import Sequence
from functools import partial
from typing import cast

from saggar.engine.errors import EngineError, LoadError, WorkerDied
from saggar.engine.worker.channel import Channel, ChannelClosed
from saggar.engine.worker.loader import load
from saggar.engine.worker.plan import Call, Cancel, Failed, Plan, RowReport, Start, Stepped
from saggar.engine.worker.runner import Runner

_LOOK_MS = 1000


class Inbox:
    """Plans in order, and what to cancel of them; filled by the receiving thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._work: queue.SimpleQueue[Plan | Call | None] = queue.SimpleQueue()
        self._cancelled: dict[int, set[str]] = {}
        threading.Thread(target=self._receive, name="saggar-inbox", daemon=True).start()

    def next(self) -> Plan | Call | None:
        """Wait for work; None: shut down. A plan forgets the cancels of earlier ones."""
        work = self._work.get()
        if isinstance(work, Plan):
            for plan_id in list(self._cancelled):
                if plan_id < work.id:
                    del self._cancelled[plan_id]
        return work

    def cancelled(self, plan_id: int, request_id: str) -> bool:
        """Whether a cancel has come for this request of this plan."""
        return request_id in self._cancelled.get(plan_id, ())

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
            if isinstance(message, Plan | Call):
                self._work.put(message)
            elif isinstance(message, Cancel):
                self._cancelled.setdefault(message.plan_id, set()).update(message.request_ids)
            else:
                self._work.put(None)
                return


def main(fd: int) -> int:
    """The rank's life; returns the exit status."""
    # Stopping is the parent's decision: a signal for the whole group must not take a running batch along.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=fd))
    sys.path[:] = cast("list[str]", channel.receive())
    start = cast(Start, channel.receive())
    inbox = Inbox(channel)
    kind: type[EngineError] = LoadError
    try:
        runner, ready = load(start.config, start.rank)
        channel.send(ready)
        kind = WorkerDied
        _serve(runner, inbox, channel)
    except ChannelClosed:
        return 0
    except BaseException as error:  # noqa: BLE001  (the parent is told, and the process ends)
        traceback.print_exc()
        channel.send(
            Failed(error if isinstance(error, EngineError) else kind(f"{type(error).__name__}: {error}"))
        )
        return 1
    return 0


def _serve(runner: Runner, inbox: Inbox, channel: Channel) -> None:
    def on_step(rows: Sequence[RowReport]) -> None:
        channel.send(Stepped(tuple(rows)))

    while (work := inbox.next()) is not None:
        if isinstance(work, Plan):
            channel.send(runner.execute(work, partial(inbox.cancelled, work.id), on_step))
        else:
            channel.send(runner.call(work))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
