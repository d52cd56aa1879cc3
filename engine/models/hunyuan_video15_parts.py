"""How a request of HunyuanVideo-1.5 begins: its texts without padding, its size, its picture. Imported in a rank only:
it imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from saggar.engine.cache.prompt import Encoded
from saggar.engine.models.common import generators, picture
from saggar.engine.models.state import RequestState

State = RequestState[torch.Tensor, Any, Any]


def without_padding(made: Mapping[str, torch.Tensor], count: int) -> list[Encoded]:
    """Tensors [count, tokens, ...] cut into texts behind each one's last own token: nothing attends to what follows.

    `made` has a text's tensor, then its mask [count, tokens], in pairs; of a text that is empty one token stays.
    """
    names = list(made)
    pairs = list(zip(names[::2], names[1::2], strict=True))
    ends = {mask: [_end(row) for row in made[mask].tolist()] for _, mask in pairs}
    return [
        {
            name: made[name][index : index + 1, : ends[mask][index]]
            for text, mask in pairs
            for name in (text, mask)
        }
        for index in range(count)
    ]


def _end(mask: list[float]) -> int:
    return max([place for place, one in enumerate(mask, 1) if one], default=1)


def begin(pipe: Any, state: State, device: torch.device | None) -> None:
    """First latents; `condition` [1, channels + 1, frames, h, w], the latents of the picture and where it stands; and
    `image` [1, tokens, width], what its encoder says of it. Without a picture all of them are zero.
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
        # Of its tokens, which are all masked, one.
        state.extras["image"] = one.new_zeros(1, 1, pipe.vision_states_dim)
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
