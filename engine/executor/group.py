"""The ranks of one world: started together, sent the same, and lost together."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from saggar.engine.config import EngineConfig
from saggar.engine.errors import WorkerDied
from saggar.engine.executor.rank import Rank
from saggar.engine.executor.watch import Watch
from saggar.engine.worker.plan import Failed, Ready, RowReport, Start, Stepped
from saggar.engine.worker.pulse import Slowest

_TICK_S = 0.25
_M = TypeVar("_M")


class Group:
    """Used by one thread at a time, but for `exit_text` and `send`. `row_limits`: see plan.Start."""

    def __init__(
        self, config: EngineConfig, replica: int, slowest: Slowest, row_limits: Mapping[str, int]
    ) -> None:
        self.ranks: list[Rank] = []
        self._poll = select.poll()
        self._by_fd: dict[int, Rank] = {}
        starts = [
            Start(config, number, replica * config.ranks + number, dict(row_limits))
            for number in range(config.ranks)
        ]
        try:
            self._spawn(starts)
            self._watch = Watch(self.ranks, config.patience, slowest)
        except BaseException:
            for rank in self.ranks:
                rank.kill()
            raise
        with contextlib.suppress(WorkerDied):  # `gather` finds the same
            for rank, start in zip(self.ranks, starts, strict=True):
                rank.begin(start)

    def _spawn(self, starts: Sequence[Start]) -> None:
        pairs = [socket.socketpair() for _ in starts[1:]]
        try:
            for start in starts:
                mine = [pair[0] for pair in pairs] if start.rank == 0 else [pairs[start.rank - 1][1]]
                rank = Rank(start, mine)
                self.ranks.append(rank)
                self._by_fd[rank.fileno()] = rank
                self._poll.register(rank.fileno(), select.POLLIN)
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()

    def wait_ready(self, idle: Callable[[], None]) -> Ready:
        """Wait until all have loaded, found that they agree, and warmed up. Raises what stopped one of them."""
        ready = self.gather(Ready, idle)[0]
        self._watch.serving()
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

    def _addressed(self, only: int | None) -> Sequence[Rank]:
        return self.ranks if only is None else [self.ranks[only]]

    def _readable(self, idle: Callable[[], None]) -> Iterator[Rank]:
        ready = self._poll.poll(_TICK_S * 1000)
        if not ready:
            text = self.exit_text()
            if text is not None:
                raise WorkerDied(text)
            idle()
        for fd, _ in ready:
            yield self._by_fd[fd]

    def _receive(self, rank: Rank) -> object:
        try:
            return rank.receive()
        except WorkerDied as error:
            raise self._lost(error) from None

    def _lost(self, error: WorkerDied) -> WorkerDied:
        return WorkerDied(self.exit_text() or str(error))
