"""Ways to spread a batch over ranks, and what is asked of each: shared by the tests in CI and the long matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from saggar.engine import Request

from tests.engine.case import Case


@dataclass(frozen=True)
class Way:
    """Degrees of one world."""

    ulysses: int = 1
    ring: int = 1
    cfg: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """Words of EngineConfig."""
        return {"ulysses": self.ulysses, "ring": self.ring, "cfg": self.cfg}

    @property
    def ranks(self) -> int:
        """The world's size."""
        return self.ulysses * self.ring * self.cfg

    @property
    def sequence(self) -> bool:
        """Whether ranks share sequences, which takes a plan."""
        return self.ulysses * self.ring > 1

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in vars(self).items() if value > 1)


WAYS = [
    Way(ulysses=2),
    Way(ulysses=3),
    Way(ulysses=4),
    Way(ring=2),
    Way(ring=3),
    Way(ring=4),
    Way(ulysses=2, ring=2),
    Way(cfg=2),
    Way(cfg=3),
    Way(cfg=4),
    Way(ulysses=2, cfg=2),
    Way(ring=2, cfg=2),
]


def batches(case: Case) -> list[list[Request]]:
    """Lists of requests that run together: unlike rows, rows of another size, one row without guidance, few tokens."""
    wide = {**case.other_size, "num_inference_steps": 2}
    usual = case.requests()
    return [
        usual,
        [
            replace(usual[1], id="wide", params={**usual[1].params, **wide}),
            case.request("longer", "a text of another length than the first one has", seed=8, params=wide),
        ],
        *(
            [case.request(f"others-{n}", "others", shapes, seed=n, params={"num_inference_steps": 2})]
            for n, shapes in enumerate(case.others)
        ),
        [replace(usual[0], id="alone", params={"num_inference_steps": 2, case.scale: 1.0})],
    ]
