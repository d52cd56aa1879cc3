"""The ranks of one group among themselves: what they must decide alike, each at the same border of a plan.

Rank 0 decides, since a cancel reaches the ranks at different moments. Each other rank first says what failed in its
own hands: ranks that do not see the same have parted, and nothing they compute together would be right. A rank that
fails in the middle of a verb asks at once whether the others failed in the same way, for they may sit in a collective
and wait for it: only then may it try again.
"""

from __future__ import annotations

import select
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from saggar.engine.errors import LoadError, RanksParted, WorkerDied
from saggar.engine.worker.agreement import differences
from saggar.engine.worker.channel import Channel, ChannelClosed

GROUP_ENDS = (RanksParted, ChannelClosed)
"""What a rank hears of the others that ends it too."""


@dataclass(frozen=True)
class Trouble:
    """A verb failed. Ranks whose `what` is the same go on together; `text` is for people. `memory` and `row_limits`
    as in RanksParted.
    """

    what: str
    text: str = field(compare=False)
    memory: bool = False
    row_limits: dict[str, int] = field(default_factory=dict)

    def alone(self, rank: int, other: int) -> RanksParted:
        """`rank` has it and `other` has not."""
        return RanksParted(
            f"rank {rank} failed and rank {other} did not: {self.text}", self.memory, self.row_limits
        )


class Team:
    """`links` are rank 0's channels to all others in their order, or another rank's one channel to rank 0. `slot`
    is this rank's place among the ranks of all replicas: the number of its device. A rank that has failed waits
    `wait_s` for the others to say that they have too.
    """

    def __init__(self, rank: int, links: Sequence[Channel] = (), slot: int = 0, wait_s: float = 10.0) -> None:
        self.rank = rank
        self.slot = slot
        self._links = links
        self._wait_s = wait_s

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
            if isinstance(theirs, Trouble):
                raise theirs.alone(number, 0)
            if theirs != mine:
                raise WorkerDied(f"the ranks have parted: {mine} failed in rank 0, {theirs} in rank {number}")
        for link in self._links:
            link.send(list(cancelled))
        return cancelled

    def alike(self, trouble: Trouble) -> None:
        """Returns when all ranks have failed like this one, each in the same call. RanksParted. ChannelClosed."""
        if not self._links:
            return
        if not self.leads:
            self._links[0].send(trouble)
            if self._within(self._links[0]) != trouble:
                raise trouble.alone(self.rank, 0)
            return
        for number, link in enumerate(self._links, start=1):
            if self._within(link) != trouble:
                raise trouble.alone(0, number)
        for link in self._links:
            link.send(trouble)

    def _within(self, link: Channel) -> object:
        """The next message, None when none comes in time: that rank waits in a collective, or computes."""
        poll = select.poll()
        poll.register(link.fileno(), select.POLLIN)
        return link.receive() if poll.poll(self._wait_s * 1000) else None

    def tell(self, what: object) -> None:
        """Rank 0 tells all others something, which they `hear`."""
        for link in self._links:
            link.send(what)

    def hear(self) -> object:
        """What rank 0 tells."""
        return self._links[0].receive()
