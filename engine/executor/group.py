"""The ranks of one world: started together, sent the same, and lost together."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from saggar.engine.config import EngineConfig
from saggar.engine.errors import WorkerDied
from saggar.engine.executor.away import AwayRank
from saggar.engine.executor.rank import Member, Rank, is_loopback, same_machine
from saggar.engine.executor.watch import Watch
from saggar.engine.worker.plan import Failed, Ready, RowReport, Start, Stepped
from saggar.engine.worker.pulse import Slowest

_TICK_S = 0.25
_M = TypeVar("_M")


Away: TypeAlias = Sequence[tuple[AwayRank, socket.socket]]
"""The ranks of other nodes in their order, each with the socket of its link to rank 0."""


class Group:
    """Used by one thread at a time, but for `exit_text` and `send`. `row_limits`: see plan.Start. `away` is the group's
    own from now on.
    """

    def __init__(
        self,
        config: EngineConfig,
        replica: int,
        slowest: Slowest,
        row_limits: Mapping[str, int],
        away: Away = (),
    ) -> None:
        self.ranks: list[Member] = []
        self._away = [rank for rank, _ in away]
        self._poll = select.poll()
        self._by_fd: dict[int, Member] = {}
        starts = [_start(config, replica, number, row_limits) for number in range(config.ranks)]
        try:
            local = self._spawn(starts[: config.ranks_per_node], [link for _, link in away])
            self._watch = Watch(local, config.patience, slowest)
        except BaseException:
            for rank in [*self.ranks, *(rank for rank, _ in away)]:
                rank.kill()
            raise
        for rank, _ in away:
            self._add(rank)
        with contextlib.suppress(WorkerDied):  # `gather` finds the same
            for member, start in zip(self.ranks, starts, strict=True):
                member.begin(start)

    def _spawn(self, starts: Sequence[Start], away: Sequence[socket.socket]) -> list[Rank]:
        pairs = [socket.socketpair() for _ in starts[1:]]
        # Several machines find each other by their names; the library's own choice of interface then is right.
        environ = same_machine() if _is_one_machine(starts[0].config) else {}
        ranks = []
        try:
            for start in starts:
                leads = start.rank == 0
                mine = [*(pair[0] for pair in pairs), *away] if leads else [pairs[start.rank - 1][1]]
                ranks.append(Rank(start, mine, environ))
                self._add(ranks[-1])
        finally:
            for end in [*(end for pair in pairs for end in pair), *away]:
                end.close()
        return ranks

    def _add(self, rank: Member) -> None:
        self.ranks.append(rank)
        self._by_fd[rank.fileno()] = rank
        self._poll.register(rank.fileno(), select.POLLIN)

    def wait_ready(self, idle: Callable[[], None]) -> Ready:
        """Wait until all have loaded, found that they agree, and warmed up. Raises what stopped one of them."""
        ready = self.gather(Ready, idle)[0]
        self._watch.serving()
        for rank in self.ranks:
            rank.serving()
        return ready

    def send(self, message: object, only: int | None = None) -> None:
        """To every rank, or to one. WorkerDied."""
        for rank in self._addressed(only):
            try:
                rank.send(message)
            except WorkerDied as error:
                raise self._lost(error) from None

    def gather(
        self,
        kind: type[_M],
        idle: Callable[[], None],
        on_step: Callable[[Sequence[RowReport]], None] = lambda rows: None,
        only: int | None = None,
    ) -> list[_M]:
        """One message of that kind from every rank in their order, or from one. `idle` is called now and then.

        Raises WorkerDied, or what a rank says that stopped it.
        """
        answers: dict[int, _M] = {}
        asked = self._addressed(only)
        while len(answers) < len(asked):
            for rank in self._readable(idle):
                message = self._receive(rank)
                if isinstance(message, kind):
                    answers[rank.number] = message
                elif isinstance(message, Stepped):
                    on_step(message.rows)
                elif isinstance(message, Failed):
                    raise message.error
                else:
                    raise AssertionError(f"a rank sent {type(message).__name__}")
        return [answers[rank.number] for rank in asked]

    def exit_text(self) -> str | None:
        """How a rank of the group ended, None while all live; of several the one that did not just follow."""
        texts = [(not rank.guilty, text) for rank in self.ranks if (text := rank.exit_text()) is not None]
        return min(texts)[1] if texts else None

    def kill(self) -> None:
        """End all now."""
        self._watch.close()
        for rank in self.ranks:
            rank.kill()

    def close(self) -> None:
        """Ask all to end, and kill those that do not within a few seconds."""
        for rank in self.ranks:
            rank.dismiss()
        self._watch.close()
        for rank in self.ranks:
            rank.end()

    def _addressed(self, only: int | None) -> Sequence[Member]:
        return self.ranks if only is None else [self.ranks[only]]

    def _readable(self, idle: Callable[[], None]) -> Iterator[Member]:
        ready = self._poll.poll(_TICK_S * 1000)
        text = self._lost_node() if ready else self.exit_text()
        if text is not None:
            raise WorkerDied(text)
        if not ready:
            idle()
        for fd, _ in ready:
            yield self._by_fd[fd]

    def _lost_node(self) -> str | None:
        """Its ranks may live, and rank 0 go on telling of their steps."""
        return next((rank.exit_text() for rank in self._away if rank.lost), None)

    def _receive(self, rank: Member) -> object:
        try:
            return rank.receive()
        except WorkerDied as error:
            raise self._lost(error) from None

    def _lost(self, error: WorkerDied) -> WorkerDied:
        return WorkerDied(self.exit_text() or str(error))


def _start(config: EngineConfig, replica: int, number: int, row_limits: Mapping[str, int]) -> Start:
    """The device is the rank's place among those of its machine."""
    slot = replica * config.ranks + number if config.nodes is None else number % config.ranks_per_node
    return Start(config, number, slot, dict(row_limits))


def _is_one_machine(config: EngineConfig) -> bool:
    return config.nodes is None or is_loopback(config.nodes.host)
