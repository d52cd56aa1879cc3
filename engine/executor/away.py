"""A node of a group seen from the engine's: the connection to its agent, and its ranks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from saggar.engine.config import Patience
from saggar.engine.errors import WorkerDied
from saggar.engine.executor.keyed import Gone, Line, Lines
from saggar.engine.worker.channel import Channel, ChannelClosed
from saggar.engine.worker.plan import Shutdown, Start

_END_S = 5.0


@dataclass
class Launch:
    """What a node's agent said of one group: its ranks' processes, or why it has none; how each of them ended, and
    whether that was more than following the others.
    """

    pids: dict[int, int] = field(default_factory=dict)
    failed: str | None = None
    ended: dict[int, tuple[str, bool]] = field(default_factory=dict)


class Node:
    """Beats each second both ways, in a thread of its own; the node is lost when its agent ends or falls silent.

    `model`: where that machine has the weights, None for the same place. `changed` is notified of all news.
    """

    def __init__(
        self,
        number: int,
        lines: Lines,
        model: str | None,
        patience: Patience,
        changed: threading.Condition,
        on_lost: Callable[[Node, str], None],
    ) -> None:
        self.number = number
        self.model = model
        self.lost: str | None = None
        self._lines = lines
        self._patience = patience
        self._changed = changed
        self._on_lost = on_lost
        self._launches: dict[int, Launch] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name=f"saggar-node-{number}", daemon=True)
        self._thread.start()

    def launch(self, group: int, ranks: Sequence[int]) -> None:
        """Ask for the ranks of a new group; those of an older one end. WorkerDied: the node is lost."""
        with self._changed:
            self._launches = {group: Launch()}
        self._send(do="launch", group=group, ranks=list(ranks))

    def serving(self, group: int) -> None:
        """The group is ready: the agent's watch may now find verbs that hang."""
        self._send(do="serving", group=group)

    def kill(self, group: int) -> None:
        """End what is left of the group; nothing happens where the node is lost."""
        with contextlib.suppress(WorkerDied):
            self._send(do="kill", group=group)

    def said(self, group: int) -> Launch:
        """Under `changed`: what is known of the group."""
        return self._launches.get(group) or Launch(failed="another group took its place")

    def close(self) -> None:
        """End the connection: its agent ends its ranks, and waits for another engine."""
        self._closing = True
        self._thread.join()

    def _send(self, **line: object) -> None:
        try:
            self._lines.send(**line)
        except Gone as gone:
            raise WorkerDied(f"node {self.number} is lost: {self.lost or gone}") from None

    def _listen(self) -> None:
        heard, beaten = time.monotonic(), 0.0
        tick = min(self._patience.pulse_s, 0.25)
        reason = "the engine was closed"
        try:
            while not self._closing:
                line, now = self._lines.receive(tick), time.monotonic()
                if line is not None:
                    heard = now
                    self._take(line)
                elif now - heard > self._patience.silence_s:
                    reason = f"no sign of life for {now - heard:.0f} s"
                    break
                if now - beaten >= self._patience.pulse_s:
                    self._lines.send(do="beat")
                    beaten = now
        except Gone as gone:
            reason = str(gone)
        self._lines.close()
        with self._changed:
            self.lost = reason
            self._changed.notify_all()
        if not self._closing:
            self._on_lost(self, reason)

    def _take(self, line: Line) -> None:
        group = line.get("group")
        with self._changed:
            launch = self._launches.get(group) if isinstance(group, int) else None
            if launch is None:  # a beat, or news of a group that is no more
                return
            if line["kind"] == "launched":
                pids = cast("dict[str, int]", line["pids"])
                launch.pids = {int(rank): pid for rank, pid in pids.items()}
            elif line["kind"] == "failed":
                launch.failed = str(line["error"])
            elif line["kind"] == "ended":
                launch.ended[cast(int, line["rank"])] = (str(line["text"]), bool(line["guilty"]))
            self._changed.notify_all()


class AwayRank:
    """See rank.Member. Its process belongs to the node's agent, which watches it; its channel comes straight here."""

    def __init__(
        self,
        number: int,
        node: Node,
        group: int,
        pid: int,
        control: socket.socket,
        changed: threading.Condition,
    ) -> None:
        self.number = number
        self.pid = pid
        self._node = node
        self._group = group
        self._changed = changed
        self._channel = Channel(control)

    def fileno(self) -> int:
        """For waiting for its messages."""
        return self._channel.fileno()

    def begin(self, start: Start) -> None:
        """Tell it what to be: its interpreter has its own machine's path, and the weights may lie elsewhere there."""
        config = replace(start.config, model=self._node.model or start.config.model)
        self.send(None)
        self.send(replace(start, config=config))

    def serving(self) -> None:
        """Tell its agent's watch."""
        self._node.serving(self._group)

    def send(self, message: object) -> None:
        """WorkerDied."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            raise WorkerDied(self._ended()) from None

    def receive(self) -> object:
        """The next message. WorkerDied."""
        try:
            return self._channel.receive()
        except ChannelClosed:
            raise WorkerDied(self._ended()) from None

    def exit_text(self) -> str | None:
        """How it ended, None while it lives as far as is known."""
        with self._changed:
            ended = self._node.said(self._group).ended.get(self.number)
            if ended is not None:
                return f"{ended[0]} on node {self._node.number}"
            return f"node {self._node.number} is lost: {self._node.lost}" if self._node.lost else None

    @property
    def lost(self) -> bool:
        """Whether its node is."""
        return self._node.lost is not None

    @property
    def guilty(self) -> bool:
        """Whether it, or its node, ended otherwise than because the others did."""
        with self._changed:
            ended = self._node.said(self._group).ended.get(self.number)
            return ended[1] if ended is not None else self._node.lost is not None

    def kill(self) -> None:
        """End it now; frees what this side has."""
        self._channel.close()
        self._node.kill(self._group)

    def dismiss(self) -> None:
        """Ask it to end; `end` waits for that."""
        with contextlib.suppress(ChannelClosed):  # it may have ended already
            self._channel.send(Shutdown())

    def end(self) -> None:
        """Wait until its agent says that it has ended, and have it killed if that takes too long."""
        self._ended()
        self.kill()

    def _ended(self) -> str:
        with self._changed:
            self._changed.wait_for(lambda: self.exit_text() is not None, _END_S)
        return self.exit_text() or f"the channel to rank {self.number} on node {self._node.number} has closed"
