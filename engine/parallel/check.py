"""What is refused before any process starts: worlds that a family cannot be spread over, graphs it cannot become."""

from __future__ import annotations

from typing import ClassVar, Protocol

from saggar.engine.config import EngineConfig
from saggar.engine.degrees import refuse
from saggar.engine.errors import Unsupported
from saggar.engine.parallel.plans import SequencePlan


class Spreadable(Protocol):
    """What there is to know of a family without its weights."""

    name: ClassVar[str]
    uses_torch: ClassVar[bool]
    spreads: ClassVar[bool]
    graphs: ClassVar[bool]
    sequence_plan: SequencePlan | None


def check_start(config: EngineConfig, family: Spreadable) -> None:
    """Unsupported says in one line what does not go together, and what does."""
    degrees = config.degrees
    if config.cuda_graphs and not family.graphs:
        raise Unsupported(
            f"cuda_graphs: {family.name}'s forward reads from the GPU what it decides by, and cannot be recorded: "
            "leave it out; compile works"
        )
    if degrees.size > 1 and not family.spreads:
        raise refuse(
            f"{family.name}: its steps cannot be shared over {degrees}, for they are not ours or not torch's"
        )
    if degrees.sequence > 1 and family.sequence_plan is None:
        raise refuse(
            f"{family.name} has no sequence plan and cannot share a sequence over {degrees}: cfg can"
        )
    if config.ranks > 1 and degrees.size == 1 and family.uses_torch:
        raise refuse(
            f"ranks={config.ranks} with no degree would do the same {config.ranks} times: set ulysses, ring or cfg "
            f"so that they make {config.ranks}"
        )
