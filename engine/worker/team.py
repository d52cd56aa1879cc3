"""The ranks of one group among themselves: what they must decide alike, each at the same border of a plan.

Rank 0 decides, since a cancel reaches the ranks at different moments. Each other rank first says what failed in its
own hands: ranks that do not see the same have parted, and nothing they compute together would be right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from saggar.engine.errors import LoadError, WorkerDied
from saggar.engine.worker.agreement import differences
from saggar.engine.worker.channel import Channel


class Team:
    """`links` are rank 0's channels to all others in their order, or another rank's one channel to rank 0. `slot`
    is this rank's place among the ranks of all replicas: the number of its device.
    """

    def __init__(self, rank: int, links: Sequence[Channel] = (), slot: int = 0) -> None:
        self.rank = rank
        self.slot = slot
        self._links = links

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def compare(self, mine: Mapping[str, str]) -> None:
        """Before anything is computed together. LoadError, in rank 0: another rank differs. ChannelClosed."""
        if not self.leads:
            self._links[0].send(dict(mine))
            return
        for number, link in enumerate(self._links, start=1):
            theirs = link.receive()
            assert isinstance(theirs, dict), theirs
            found = differences(mine, theirs)
            if found:
                raise LoadError(f"rank {number} differs from rank 0 in its {', '.join(found)}")

    def agree(self, failed: Collection[str], cancelled: Collection[str]) -> Collection[str]:
        """The requests that all ranks end at this border. WorkerDied: the ranks have parted. ChannelClosed."""
        if not self._links:
            return cancelled
        mine = sorted(failed)
        if not self.leads:
            self._links[0].send(mine)
            decided = self._links[0].receive()
            assert isinstance(decided, list), decided
            return decided
        for number, link in enumerate(self._links, start=1):
            theirs = link.receive()
            if theirs != mine:
                raise WorkerDied(f"the ranks have parted: {mine} failed in rank 0, {theirs} in rank {number}")
        for link in self._links:
            link.send(list(cancelled))
        return cancelled

    def tell(self, number: int) -> None:
        """Rank 0 tells all others a number, which they `hear`."""
        for link in self._links:
            link.send(number)

    def hear(self) -> int:
        """The number that rank 0 tells."""
        number = self._links[0].receive()
        assert isinstance(number, int), number
        return number
