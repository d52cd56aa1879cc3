"""How a request of HunyuanVideo-1.5 begins: its texts without padding, its size, its picture. Imported in a rank only:
it imports torch.
"""

from __future__ import annotations

from typing import Any

import torch
from saggar.engine.cache.prompt import Encoded
from saggar.engine.models.common import generators, picture
from saggar.engine.models.state import RequestState

State = RequestState[torch.Tensor, Any, Any]


def without_padding(**made: tuple[torch.Tensor, torch.Tensor]) -> list[Encoded]:
    """Of texts by name, [texts, tokens, width] and their masks [texts, tokens], each text's own tokens [1, own, width]:
    the transformer puts those that are masked behind the others, and nothing attends to them.
    """
    count = len(next(iter(made.values()))[0])
    return [
        {name: text[index : index + 1, mask[index].bool()] for name, (text, mask) in made.items()}
        for index in range(count)
    ]


def real(text: torch.Tensor) -> torch.Tensor:
    """The mask [rows, tokens] of texts in which no token is masked."""
    return torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)


class Masks:
    """Keeps the mask of a forward from the blocks of a transformer where it is not `needed`, for no token is masked:
    kernels are faster without, and more of them can serve.
    """

    def __init__(self, transformer: Any) -> None:
        self.needed = True
        for block in transformer.transformer_blocks:
            block.register_forward_pre_hook(self._before)

    def _before(self, block: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if self.needed else (*args[:3], None, *args[4:])


def begin(pipe: Any, state: State, device: torch.device | None) -> None:
    """First latents; `condition` [1, channels + 1, frames, h, w], the latents of the picture and where it stands; and
    `image` [1, tokens, width], what its encoder says of it. Without a picture the first is zero, the other empty.
    """
    params, dtype = state.params, pipe.transformer.dtype
    given = picture(state.request.inputs["image"][0]) if state.request.task == "i2v" else None
    high, wide = _size(pipe, params, given)
    state.generators = generators(state.request)
    state.latents = pipe.prepare_latents(
        state.request.num_outputs,
        pipe.num_channels_latents,
        high,
        wide,
        params.num_frames,
        dtype,
        device,
        state.generators,
    )
    assert state.latents is not None
    one = state.latents[:1]
    if given is None:
        made = pipe.prepare_cond_latents_and_mask(one, dtype, device)
        # All of its tokens would be masked.
        state.extras["image"] = one.new_zeros(1, 0, pipe.vision_states_dim)
    else:
        given = pipe.video_processor.resize(given, height=high, width=wide, resize_mode="crop")
        made = pipe.prepare_cond_latents_and_mask(one, given, 1, high, wide, dtype, device)
        state.extras["image"] = pipe.encode_image(given, 1, device, dtype)
    state.extras["condition"] = torch.cat(made, dim=1)


def _size(pipe: Any, params: Any, given: Any) -> tuple[int, int]:
    """Height and width: as asked for, else of the usual area, in the picture's shape or the pipeline's own."""
    if params.height is not None:
        return params.height, params.width
    wide, high = pipe.default_aspect_ratio if given is None else given.size
    high, wide = pipe.video_processor.calculate_default_height_width(high, wide, pipe.target_size)
    return int(high), int(wide)
