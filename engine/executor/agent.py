"""The agent of another node than the engine's: starts the ranks that the head asks for, watches them, and ends them
when the connection to the head ends. It survives a group's restart and waits for an engine that is not there.

`saggar node`, or without the workers' package:
`python -m saggar.engine.executor.agent --address HOST:PORT --nodes 2 --node-rank 1 [--key-file FILE] [--model FOLDER]`
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from saggar.engine.config import Nodes, Patience
from saggar.engine.errors import Unsupported
from saggar.engine.executor.keyed import HANDSHAKE_S, Gone, Line, Lines, Refused, connect, read_key
from saggar.engine.executor.rank import RankProcess, is_loopback, same_machine
from saggar.engine.executor.watch import Watch
from saggar.engine.worker.pulse import Slowest

log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0
_TICK_S = 0.2


class Busy(Exception):
    """The head has such a node already: perhaps this one, before it was cut off."""


@dataclass(frozen=True)
class Place:
    """Which node this is, and where its machine has the weights (None: where the engine's has them)."""

    nodes: Nodes
    number: int
    model: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.number < self.nodes.count:
            raise Unsupported(f"node-rank must be from 1 to {self.nodes.count - 1}, not {self.number}")


class Local:
    """The ranks of one group on this machine, and the thread that watches them."""

    def __init__(
        self, group: int, ranks: Sequence[RankProcess], patience: Patience, slowest: Slowest
    ) -> None:
        self.group = group
        self.ranks = ranks
        self._told: set[int] = set()
        self.watch = Watch(ranks, patience, slowest)

    def news(self) -> list[Line]:
        """Ranks that have ended, each told once."""
        lines: list[Line] = []
        for rank in self.ranks:
            text = rank.exit_text() if rank.number not in self._told else None
            if text is not None:
                self._told.add(rank.number)
                line = {"kind": "ended", "group": self.group, "rank": rank.number, "text": text}
                lines.append({**line, "guilty": rank.guilty})
        return lines

    def kill(self) -> None:
        """End all."""
        self.watch.close()
        for rank in self.ranks:
            rank.kill()


class Agent:
    """`run` returns once `stop` was called, from a signal handler or another thread."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._key = read_key(place.nodes.key_file)
        self._slowest = Slowest()
        self._stopping = threading.Event()
        self._local: Local | None = None

    def stop(self) -> None:
        """End soon."""
        self._stopping.set()

    def run(self) -> None:
        """Refused: another key, or another number of nodes."""
        pause, waiting = _FIRST_PAUSE_S, False
        while not self._stopping.is_set():
            try:
                lines, patience = self._join()
            except (OSError, Gone, Busy) as error:
                if not waiting:
                    log.info("waiting for the engine at %s: %s", self._place.nodes.address, error)
                waiting = True
                self._stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            pause, waiting = _FIRST_PAUSE_S, False
            log.info("joined the engine at %s as node %d", self._place.nodes.address, self._place.number)
            try:
                self._serve(lines, patience)
            except Gone as gone:
                log.warning("the engine is gone (%s): its ranks here end", gone)
            finally:
                self._kill()
                lines.close()

    def _join(self) -> tuple[Lines, Patience]:
        place = self._place
        lines, answer = self._speak(
            kind="node", node=place.number, nodes=place.nodes.count, model=place.model
        )
        if "refused" in answer:
            lines.close()
            raise Refused(str(answer["refused"]))
        if "busy" in answer:
            lines.close()
            raise Busy(str(answer["busy"]))
        return lines, Patience(**cast("dict[str, float]", answer["patience"]))  # type: ignore[arg-type]

    def _speak(self, **line: object) -> tuple[Lines, Line]:
        """A new connection, its first line and the answer."""
        lines = Lines(connect((self._place.nodes.host, self._place.nodes.port), self._key))
        try:
            lines.send(**line)
            answer = lines.receive(HANDSHAKE_S)
            if answer is None:
                raise Gone("the head does not answer")
        except Gone:
            lines.close()
            raise
        return lines, answer

    def _serve(self, lines: Lines, patience: Patience) -> None:
        """Gone: the head has ended, or is silent."""
        heard, beaten = time.monotonic(), 0.0
        while not self._stopping.is_set():
            line, now = lines.receive(min(_TICK_S, patience.pulse_s)), time.monotonic()
            if line is not None:
                heard = now
                self._obey(lines, line, patience)
            elif now - heard > patience.silence_s:
                raise Gone(f"no sign of life for {now - heard:.0f} s")
            for news in self._local.news() if self._local else ():
                lines.send(**news)
            if now - beaten >= patience.pulse_s:
                lines.send(kind="beat")
                beaten = now

    def _obey(self, lines: Lines, line: Line, patience: Patience) -> None:
        do, group = line["do"], cast(int, line.get("group", 0))
        if do == "launch":
            self._kill()
            try:
                self._launch(group, cast("list[int]", line["ranks"]), patience)
            except (OSError, Refused, Gone) as error:
                lines.send(kind="failed", group=group, error=f"{type(error).__name__}: {error}")
                return
            assert self._local is not None
            pids = {str(rank.number): rank.pid for rank in self._local.ranks}
            lines.send(kind="launched", group=group, pids=pids)
        elif self._local is None or self._local.group != group:
            return  # a beat, or of a group that is no more
        elif do == "serving":
            self._local.watch.serving()
        elif do == "kill":
            self._kill()

    def _launch(self, group: int, numbers: Sequence[int], patience: Patience) -> None:
        ranks: list[RankProcess] = []
        try:
            for number in numbers:
                with contextlib.ExitStack() as stack:
                    control = stack.enter_context(self._dial("control", group, number))
                    link = stack.enter_context(self._dial("link", group, number))
                    ranks.append(RankProcess(number, control, [link], _environ(self._place.nodes)))
            self._local = Local(group, ranks, patience, self._slowest)
        except BaseException:
            for rank in ranks:
                rank.kill()
            raise

    def _dial(self, kind: str, group: int, rank: int) -> socket.socket:
        lines, _ = self._speak(kind=kind, group=group, rank=rank)
        return lines.release()

    def _kill(self) -> None:
        local, self._local = self._local, None
        if local is not None:
            local.kill()


def _environ(nodes: Nodes) -> dict[str, str]:
    return same_machine() if is_loopback(nodes.host) else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when told to end, 1 when it was refused or has no key."""
    parser = argparse.ArgumentParser(
        prog="saggar-node", description="Ranks of this machine for another's engine."
    )
    parser.add_argument("--address", required=True, help="host:port at which the engine's node listens")
    parser.add_argument("--nodes", type=int, required=True, help="how many nodes there are in all")
    parser.add_argument("--node-rank", type=int, required=True, help="which of them this is, from 1")
    parser.add_argument("--key-file", help="file with the nodes' shared key  [default: SAGGAR_NODE_KEY]")
    parser.add_argument("--model", help="where this machine has the weights  [default: as the engine's]")
    found = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        nodes = Nodes(found.nodes, found.address, found.key_file)
        return serve(Place(nodes, found.node_rank, found.model))
    except Unsupported as error:
        log.error("cannot start: %s", error)
        return 1


def serve(place: Place) -> int:
    """Until SIGTERM or Ctrl-C; the exit status. Unsupported: no key."""
    agent = Agent(place)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    try:
        agent.run()
    except Refused as refused:
        log.error("refused by %s: %s", place.nodes.address, refused)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
