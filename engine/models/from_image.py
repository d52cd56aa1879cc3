"""Tasks that begin with a picture: i2i draws it anew as far as `strength` says, inpaint only what a mask shows.

One loaded checkpoint serves them beside t2i: for each there is a pipeline of diffusers over the same parts, whose own
methods cut the timesteps, encode the picture, add the first noise and make the mask. Pictures and masks are resized
to the request's height and width, so that rows may be given pictures of unlike sizes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from pydantic import Field
from saggar.engine.errors import InvalidRequest
from saggar.engine.media import Counts
from saggar.engine.models.state import RequestState
from saggar.engine.models.torch_family import DrawnParams, TorchFamily
from saggar.engine.request import Request

if TYPE_CHECKING:
    import torch
    from saggar.engine.platform.base import Placement


class BegunParams(DrawnParams, Protocol):
    """The parameters that such tasks need."""

    @property
    def strength(self) -> float: ...


B = TypeVar("B", bound=BegunParams)


def strength_of(*tasks: str) -> Any:
    """Schema words of `strength`: at 1 nothing is left of the picture."""
    return Field(gt=0, le=1, json_schema_extra={"x-tasks": list(tasks)})


class FromImage(TorchFamily[B]):
    """`pipelines`: for each task that begins with a picture the pipeline of diffusers whose parts it uses."""

    pipelines: ClassVar[Mapping[str, str]]
    inputs: ClassVar[Mapping[str, Counts]] = {
        "i2i": {"image": (1, 1)},
        "inpaint": {"image": (1, 1), "mask": (1, 1)},
    }

    def preprocess(self, request: Request) -> Request:
        """InvalidRequest: a strength that leaves no step."""
        request = super().preprocess(request)
        params: B = self.params_of(request)
        if request.task in self.pipelines and self.steps_of(params) < 1:
            steps = params.num_inference_steps
            raise InvalidRequest(
                "params.strength", f"{params.strength} leaves none of {steps} steps", f"{1 / steps:.4g} to 1"
            )
        return request

    def steps_of(self, params: B) -> int:
        """The steps that strength leaves, as most pipelines count them."""
        steps = params.num_inference_steps
        return steps - int(max(steps - min(steps * params.strength, steps), 0))

    def fits_inputs(self, task: str) -> bool:
        """All pictures are brought to the request's size."""
        return task in self.pipelines

    def keep(self, parts: Any, placement: Placement) -> None:
        """Also the other tasks' pipelines, over the same parts."""
        super().keep(parts, placement)
        self._of_task = {task: over(parts, name) for task, name in self.pipelines.items()}

    def first_latents(
        self, state: RequestState[torch.Tensor, B, Any], channels: int, dtype: torch.dtype
    ) -> Any:
        """What the `prepare_latents` of the task's pipeline returns; the sampler has its timesteps."""
        from saggar.engine.models import common

        if state.request.task in self.pipelines:
            return self.begin(state, channels, dtype)
        state.generators = common.generators(state.request)
        return self._pipe.prepare_latents(
            state.request.num_outputs,
            channels,
            state.params.height,
            state.params.width,
            dtype,
            self._placement.device,
            state.generators,
        )

    def begin(
        self, state: RequestState[torch.Tensor, B, Any], channels: int, dtype: torch.dtype, **more: Any
    ) -> Any:
        """First latents of a request whose sampler has all its timesteps: they are cut, the picture is encoded and
        noise added. Returns what the pipeline's `prepare_latents` does; `more` are arguments of its own.
        """
        from saggar.engine.models import common

        request, params = state.request, state.params
        pipe = with_sampler(self._of_task[request.task], state.sampler)
        state.generators = common.generators(request)
        state.timesteps, _ = pipe.get_timesteps(params.num_inference_steps, params.strength, "cpu")
        picture = _as_pil(request, "image").convert("RGB")
        # One for each output: each draws its own sample of what the VAE encodes.
        image = pipe.image_processor.preprocess(picture, height=params.height, width=params.width)
        image = image.float().repeat(request.num_outputs, 1, 1, 1)
        given = {
            "batch_size": request.num_outputs,
            "num_images_per_prompt": 1,
            "num_channels_latents": channels,
            "height": params.height,
            "width": params.width,
            "dtype": dtype,
            "device": self._placement.device,
            "generator": state.generators,
        }
        drawn = _call(
            pipe.prepare_latents,
            given,
            image=image,
            timestep=state.timesteps[:1].repeat(request.num_outputs),  # type: ignore[union-attr]
            **more,
        )
        if "mask" in request.inputs:
            self._keep_mask(state, pipe, image, given)
        return drawn

    def _keep_mask(
        self,
        state: RequestState[torch.Tensor, B, Any],
        pipe: Any,
        image: torch.Tensor,
        given: Mapping[str, Any],
    ) -> None:
        """The mask, 1 where it is painted anew, and what the VAE makes of the rest of the picture."""
        mask = pipe.mask_processor.preprocess(
            _as_pil(state.request, "mask"), height=state.params.height, width=state.params.width
        )
        state.extras["mask"], state.extras["unmasked"] = _call(
            pipe.prepare_mask_latents,
            {**given, "do_classifier_free_guidance": False},
            mask=mask,
            masked_image=image * (mask < 0.5),
        )

    def step_scheduler(self, state: RequestState[torch.Tensor, B, Any], noise: torch.Tensor) -> None:
        """The request's own sampler; what the mask does not show is then the picture's."""
        super().step_scheduler(state, noise)
        self.blend(state)

    def blend(self, state: RequestState[torch.Tensor, B, Any]) -> None:
        """Puts the picture back where there is no mask, as noisy as the next step expects it. `extras` hold its
        latents as `origin`, and `noise`.
        """
        if "origin" not in state.extras:
            return
        sampler: Any = state.sampler
        assert state.latents is not None
        origin, mask, noise = (state.extras[name] for name in ("origin", "mask", "noise"))
        if state.step_index + 1 < state.steps:
            after: Any = state.timesteps[state.step_index + 1 : state.step_index + 2]
            if hasattr(sampler, "scale_noise"):
                origin = sampler.scale_noise(origin, after, noise)
            else:
                origin = sampler.add_noise(origin, noise, after)
        state.latents = (1 - mask) * origin + mask * state.latents


def over(parts: Any, class_name: str) -> Any:
    """Another pipeline of diffusers over the parts of a loaded one."""
    import diffusers

    kind = getattr(diffusers, class_name)
    takes = inspect.signature(kind).parameters
    words = {**dict(parts.config), "add_watermarker": False, **parts.components}
    return kind(**{name: value for name, value in words.items() if name in takes})


def with_sampler(pipe: Any, sampler: Any) -> Any:
    """A copy of the pipeline, with the same parts but for its sampler: a request has its own."""
    own = copy.copy(pipe)
    own.scheduler = sampler
    return own


def _call(method: Any, given: Mapping[str, Any], **more: Any) -> Any:
    """With those arguments that the method takes, for pipelines differ in them."""
    takes = inspect.signature(method).parameters
    return method(**{name: value for name, value in given.items() if name in takes}, **more)


def _as_pil(request: Request, kind: str) -> Any:
    from PIL import Image

    pixels: Any = request.inputs[kind][0]
    return Image.fromarray(pixels)
