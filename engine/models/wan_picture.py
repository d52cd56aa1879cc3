"""What Wan makes of the pictures that a video begins and ends with. Imported in a rank only: it imports torch.

`extras` of a request with pictures: `condition` [1, channels, frames, h, w], in latents' scale, with a mask before it
where it is one more input of the transformer; `image` [pictures, tokens, width], where the transformer reads those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from saggar.engine.models.common import join, pack_latents, picture
from saggar.engine.models.state import RequestState, Row

State = RequestState[torch.Tensor, Any, Any]
Rows = Sequence[Row[torch.Tensor, Any, Any]]


def see(pipe: Any, state: State, device: torch.device | None) -> dict[str, torch.Tensor]:
    """The extras of a request of `pipe`, a WanImageToVideoPipeline, whose first latents are drawn."""
    params, latents = state.params, state.latents
    assert latents is not None
    pictures = [picture(one) for one in state.request.inputs["image"]]
    extras = {}
    if pipe.transformer.config.image_dim is not None:
        extras["image"] = pipe.encode_image(pictures if len(pictures) > 1 else pictures[0], device)
    first, *last = (
        pipe.video_processor.preprocess(one, height=params.height, width=params.width).to(
            device, dtype=torch.float32
        )
        for one in pictures
    )
    # One for all outputs: with a list of generators the pipeline would encode it for each.
    made = pipe.prepare_latents(
        first,
        1,
        pipe.vae.config.z_dim,
        params.height,
        params.width,
        params.num_frames,
        torch.float32,
        device,
        None,
        latents,
        last[0] if last else None,
    )
    return {**extras, "condition": made[1]}


def pictured(rows: Rows, expands: bool) -> torch.Tensor:
    """Latents of the rows as the transformer takes them: with the first frame given, or the condition behind."""
    if expands:
        return join([with_picture(pack_latents([row]), row.state) for row in rows])
    latents = pack_latents(rows)
    if "condition" not in rows[0].state.extras:
        return latents
    return torch.cat([latents, join([row.state.extras["condition"] for row in rows])], dim=1)


def with_picture(latents: torch.Tensor, state: State) -> torch.Tensor:
    """Latents [n, channels, frames, h, w] with the picture's in place of the first frame's, if there is one."""
    if "condition" not in state.extras:
        return latents
    first = state.extras["condition"].expand(len(latents), -1, -1, -1, -1)
    return torch.cat([first, latents[:, :, 1:]], dim=2)


def token_timesteps(rows: Rows, timesteps: torch.Tensor) -> torch.Tensor:
    """[rows] to [rows, tokens] in float32: zero for the tokens of a given first frame. The patch is 2×2."""
    latents = rows[0].state.latents
    assert latents is not None
    frames, high, wide = latents.shape[2:]
    moving = torch.ones(len(rows), frames, device=timesteps.device)
    given = [index for index, row in enumerate(rows) if "condition" in row.state.extras]
    moving[given, 0] = 0
    tokens = moving.repeat_interleave(-(-high // 2) * -(-wide // 2), dim=1)
    return tokens * timesteps[:, None]
