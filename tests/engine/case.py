"""What is compared of a family with plain diffusers, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from saggar.engine import Request
from saggar.engine.media import Media

from tests.engine.media_made import (
    Given,
    Shapes,
    as_pil,
    made,
    pictures_of,
    plainly,
)

REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"height": 60}, "params.height"),
    ({"width": 10_000}, "params.width"),
    ({"num_inference_steps": 0}, "params.num_inference_steps"),
    ({"guidance_scale": float("nan")}, "params.guidance_scale"),
    ({"max_sequence_length": 513}, "params.max_sequence_length"),
    ({"warp": 0.5}, "params.warp"),
)


@dataclass(frozen=True)
class Case:
    """`name` is the tiny model's unless `model` is; `class_name` is the plain pipeline's.

    task: that of its requests. inputs: the shapes of what they are given, made of their seeds. others: further sets of
    inputs, such as another size or number, compared each for itself; resized: they share a key, for all are brought to
    one size. given: what the plain pipeline is called with for them. made: the media of one output, from what that call
    returns.
    called: how the plain pipeline is called with all that. added: parameters that are none of its arguments.
    strip: frames of a preview, side by side.
    brief: CI compares the main things alone, for another case of this code is compared in all; once: only one batch.
    guided: parameters that ask for classifier-free guidance. scale: the parameter that is its strength.
    empty_is_none: whether a missing negative prompt means an empty one to this pipeline.
    negative: whether the pipeline takes a negative prompt at all.
    mixed_sizes: whether rows of unlike sizes share a forward. fewest: the least steps.
    noise_of_the_device: whether the plain pipeline's sampler draws on its own device, where ours draws on the CPU.
    small: parameters of a small size. wide: another size than the usual one; another: parameters of another batch key
    where they are not height and width.
    plain: what the plain pipeline's call needs besides.
    own_defaults: parameters whose null stands for the pipeline's default, which is too long for a schema.
    unlike: what a third row has that differs from the others. options: parameters that only this family has, those
    of one dictionary together change the picture. samplers: words of the scheduler's configuration, or another class
    (`_class_name`), that the family must bear as the plain pipeline does.
    stochastic: such words that make the sampler draw noise in each step.
    refused: parameters that are off its grid, and the field that is then named.
    kernels: what its attention runs on, as the numerics of a result name it; "own" where the transformer calls no
    kernel of ours.
    """

    name: str
    class_name: str
    model: str = ""
    task: str = "t2i"
    inputs: Shapes = field(default_factory=dict)
    others: tuple[Shapes, ...] = ()
    resized: bool = False
    given: Given = as_pil
    made: Callable[[Any], list[Media]] = pictures_of
    called: Callable[..., Any] = plainly
    added: tuple[str, ...] = ()
    strip: int = 1
    brief: bool = False
    once: bool = False
    scale: str = "guidance_scale"
    other_scale: str = "guidance_scale"
    strength: float = 4.5
    empty_is_none: bool = True
    negative: bool = True
    mixed_sizes: bool = False
    fewest: int = 1
    noise_of_the_device: bool = False
    wide: tuple[int, int] = (40, 72)
    small: Mapping[str, Any] = field(default_factory=lambda: {"height": 32, "width": 32})
    another: Mapping[str, Any] | None = None
    plain: dict[str, Any] = field(default_factory=dict)
    own_defaults: tuple[str, ...] = ()
    unlike: dict[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})
    options: tuple[dict[str, Any], ...] = ()
    samplers: tuple[dict[str, Any], ...] = ()
    stochastic: dict[str, Any] = field(default_factory=lambda: {"stochastic_sampling": True})
    refused: tuple[tuple[dict[str, Any], str], ...] = REFUSED
    kernels: str = "torch_sdpa"

    def __str__(self) -> str:
        return self.name

    @property
    def tiny(self) -> str:
        """The tiny model's name."""
        return self.model or self.name

    @property
    def served(self) -> str:
        """The pipeline that the tiny model's folder names."""
        from tests.engine.families import BY_NAME

        return BY_NAME[self.tiny].class_name

    @property
    def other_size(self) -> dict[str, Any]:
        """Parameters of another size."""
        if self.another is not None:
            return dict(self.another)
        return {"height": self.wide[0], "width": self.wide[1]}

    def request(self, name: str, prompt: str, inputs: Shapes | None = None, **fields: Any) -> Request:
        """One of this case's task, with inputs made of its seed."""
        given = made(self.inputs if inputs is None else inputs, fields.get("seed", 0))
        return Request(name, prompt, task=self.task, inputs=given, **fields)

    def requests(self) -> list[Request]:
        """Three that differ in all that rows may differ in: texts, steps, guidance, seeds, outputs."""
        return [
            self.request("a", "a red fox that runs over the snow", seed=3, params={"num_inference_steps": 4}),
            self.request(
                "b",
                "blue",
                negative_prompt="ugly, blurred" if self.negative else None,
                seed=40,
                num_outputs=2,
                params={"num_inference_steps": 7, self.scale: self.strength},
            ),
            self.request("c", "", seed=11, params={"num_inference_steps": 3, **self.unlike}),
        ]
