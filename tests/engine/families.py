"""The families whose pictures are compared with plain diffusers: one row each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from saggar.engine import Request


@dataclass(frozen=True)
class Case:
    """`name` is the tiny model's, `class_name` the pipeline's.

    guided: parameters that ask for classifier-free guidance. scale: the parameter that is its strength.
    empty_is_none: whether a missing negative prompt means an empty one to this pipeline.
    negative: whether the pipeline takes a negative prompt at all.
    wide: another size than the usual one. plain: what the plain pipeline's call needs besides.
    unlike: what a third row has that differs from the others.
    """

    name: str
    class_name: str
    scale: str = "guidance_scale"
    strength: float = 4.5
    empty_is_none: bool = True
    negative: bool = True
    wide: tuple[int, int] = (40, 72)
    plain: dict[str, Any] = field(default_factory=dict)
    unlike: dict[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})

    def requests(self) -> list[Request]:
        """Three that differ in all that rows may differ in: texts, steps, guidance, seeds, outputs."""
        return [
            Request("a", "a red fox that runs over the snow", seed=3, params={"num_inference_steps": 4}),
            Request(
                "b",
                "blue",
                negative_prompt="ugly, blurred" if self.negative else None,
                seed=40,
                num_outputs=2,
                params={"num_inference_steps": 7, self.scale: self.strength},
            ),
            Request("c", "", seed=11, params={"num_inference_steps": 3, **self.unlike}),
        ]


CASES = [
    Case("flux", "FluxPipeline", scale="true_cfg_scale", strength=3.5, empty_is_none=False),
    Case("sd3", "StableDiffusion3Pipeline"),
]
BY_NAME = {case.name: case for case in CASES}
