"""What families over a diffusers pipeline share: samplers, noise, pixels. Imported in a rank only: it imports torch."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from saggar.engine.config import Pixels
from saggar.engine.errors import RowFailed
from saggar.engine.media import Media
from saggar.engine.models.state import RequestState, Row
from saggar.engine.request import Request

_PROBE = "a saggar, 2 kilns & naïve glazes: 釉"
_PROBE_SEED = 20_260
Rows = Sequence[Row[torch.Tensor, Any, Any]]


def set_timesteps(
    state: RequestState[torch.Tensor, Any, Any], template: Any, steps: int, sigmas: Any = None, **shift: float
) -> None:
    """Give the request a sampler of its own, with the checkpoint's settings, and its timesteps.

    They stay on the CPU: a step reads single values of them, which on a device would each wait for it.
    """
    sampler = type(template).from_config(template.config)
    if sigmas is None:
        sampler.set_timesteps(steps, device="cpu", **shift)
    else:
        sampler.set_timesteps(sigmas=sigmas, device="cpu", **shift)
    if hasattr(sampler, "set_begin_index"):
        sampler.set_begin_index(0)
    state.sampler, state.timesteps = sampler, sampler.timesteps


def step(state: RequestState[torch.Tensor, Any, Any], noise: torch.Tensor, **options: Any) -> None:
    """One step of the request's sampler over all of its outputs; noise it adds is drawn row by row. Samplers
    that do not know an option go without it.
    """
    sampler: Any = state.sampler
    known = inspect.signature(sampler.step).parameters
    options["generator"] = state.generators
    extra = {name: value for name, value in options.items() if name in known}
    timestep = state.timesteps[state.step_index]
    state.latents = sampler.step(noise, timestep, state.latents, return_dict=False, **extra)[0]


def generators(request: Request) -> list[torch.Generator]:
    """One CPU generator an output, seeded `seed + i`: noise depends on neither batch nor device."""
    return [torch.Generator("cpu").manual_seed(request.seed + index) for index in range(request.num_outputs)]


def probe(pipe: Any) -> dict[str, str]:
    """Digests of what a pipeline's tokenizers make of a prompt, and of a generator's noise."""
    tokens = {
        name: part(_PROBE)["input_ids"]
        for name, part in sorted(pipe.components.items())
        if "tokenizer" in name and part
    }
    noise = torch.randn(16, generator=torch.Generator("cpu").manual_seed(_PROBE_SEED))
    return {"tokens": _digest(repr(tokens).encode()), "noise": _digest(noise.numpy().tobytes())}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def pack(rows: Rows, branch: str, name: str) -> torch.Tensor:
    """The rows' conditioning tensors of one name, [rows, ...]."""
    return torch.cat([row.cond(branch, name) for row in rows])


def first_noise(state: RequestState[torch.Tensor, Any, Any], *shape: int, like: torch.Tensor) -> torch.Tensor:
    """Latents [outputs, *shape] from the outputs' generators, as strong as the request's sampler begins:
    with some that depends on the number of steps.
    """
    state.generators = generators(state.request)
    noise = randn_tensor(
        (state.request.num_outputs, *shape), generator=state.generators, device=like.device, dtype=like.dtype
    )
    sampler: Any = state.sampler
    strong: torch.Tensor = noise * getattr(sampler, "init_noise_sigma", 1.0)
    return strong


def pack_ragged(rows: Rows, branch: str, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `pack`, of texts of unlike length: padded to the longest, and which of their tokens are real,
    [rows, tokens]; no mask where all are.
    """
    pieces = [row.cond(branch, name) for row in rows]
    lengths = torch.tensor([piece.shape[1] for piece in pieces])
    packed = join_padded(pieces)
    if bool((lengths == packed.shape[1]).all()):
        return packed, None
    mask = torch.arange(packed.shape[1]) < lengths[:, None]
    return packed, mask.to(packed.device, non_blocking=True)


def pack_latents(rows: Rows) -> torch.Tensor:
    """The rows' latents, [rows, ...]; whole requests are not cut up first."""
    return join([latents for _, latents in _pieces(rows)])


def pack_scaled_latents(rows: Rows) -> torch.Tensor:
    """The same as each request's sampler scales them for its present step."""
    scaled: list[torch.Tensor] = []
    for state, latents in _pieces(rows):
        sampler: Any = state.sampler
        scaled.append(sampler.scale_model_input(latents, state.timesteps[state.step_index]))
    return join(scaled)


def _pieces(rows: Rows) -> Iterator[tuple[RequestState[torch.Tensor, Any, Any], torch.Tensor]]:
    index = 0
    while index < len(rows):
        state, first = rows[index].state, rows[index].index
        count = 1
        while index + count < len(rows) and rows[index + count].state is state:
            count += 1
        assert state.latents is not None
        yield state, state.latents[first : first + count]
        index += count


def pack_extra(rows: Rows, name: str) -> torch.Tensor:
    """The rows' own lines of an extra [outputs, ...], [rows, ...]."""
    return join([row.state.extras[name][row.index : row.index + 1] for row in rows])


def pack_timesteps(rows: Rows, like: torch.Tensor) -> torch.Tensor:
    """Each row's present timestep, [rows], on the device of `like`."""
    values = torch.stack([torch.as_tensor(row.state.timesteps[row.state.step_index]) for row in rows])
    return values.to(like.device, non_blocking=True)


def floats(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """One number a row, [rows], in float32 whatever the model's dtype."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def guide(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance."""
    return uncond + scale * (cond - uncond)


def guided(predictions: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
    """The same of a request's branches; without an unconditional one the conditional prediction."""
    if "uncond" not in predictions:
        return predictions["cond"]
    return guide(predictions["cond"], predictions["uncond"], scale)


def to_pixels(images: torch.Tensor, pixels: Pixels) -> list[np.ndarray]:
    """Pictures [n, 3, H, W] in -1..1 to H×W×3 arrays: uint8, or float32 in 0..1. Rounds as diffusers does."""
    return list(pixel_array(images, pixels))


def pixel_array(images: torch.Tensor, pixels: Pixels) -> np.ndarray:
    """The same as one array [n, H, W, 3]: the frames of a video. RowFailed: see `require_finite`."""
    require_finite(images)
    scaled = (images * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float()
    if pixels == "uint8":
        scaled = (scaled * 255).round().to(torch.uint8)
    whole: np.ndarray = scaled.cpu().contiguous().numpy()
    return whole


def require_finite(decoded: torch.Tensor) -> torch.Tensor:
    """What a decoder has made. RowFailed: it holds a NaN or an infinity, which would come out as black or silence."""
    if not decoded.isfinite().all():
        raise RowFailed(
            "what was decoded is not finite: the decoder's weights are damaged, or its dtype is too narrow"
        )
    return decoded


def picture(array: Media) -> Any:
    """An input picture [H, W, 3 or 4] as PIL's RGB, which pipelines take; alpha is left out."""
    assert isinstance(array, np.ndarray)
    return Image.fromarray(array).convert("RGB")


def split(pictures: list[np.ndarray], counts: Sequence[int]) -> list[list[np.ndarray]]:
    """So many of the pictures for each state, in their order."""
    rest = iter(pictures)
    return [[next(rest) for _ in range(count)] for count in counts]


def join(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first axis; one piece is passed on as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def join_padded(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first axis; along all others a piece is filled up with zeros to the largest."""
    largest = [max(sizes) for sizes in zip(*(piece.shape[1:] for piece in pieces), strict=True)]
    padded = []
    for piece in pieces:
        missing = [size - own for size, own in zip(largest, piece.shape[1:], strict=True)]
        # torch counts from the last axis, a pair for each: before, behind.
        pairs = [number for size in reversed(missing) for number in (0, size)]
        padded.append(torch.nn.functional.pad(piece, pairs) if any(missing) else piece)
    return join(padded)


def unpack_cells(tokens: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """Tokens of 2×2 latent pixels [n, high·wide, c·4] to latents [n, c, 2·high, 2·wide]."""
    n, _, c4 = tokens.shape
    cells = tokens.view(n, high, wide, c4 // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return cells.reshape(n, c4 // 4, 2 * high, 2 * wide)


def rgb_preview(latents: torch.Tensor) -> np.ndarray:
    """A coarse uint8 picture h×w×3 from latents [c, h, w]: three fixed mixtures of the channels, stretched
    to 0..255.
    """
    channels = latents.float().cpu()
    mixed = torch.stack([channels[index::3].mean(0) for index in range(3)], dim=-1)
    low, high = mixed.amin(), mixed.amax()
    scaled = (mixed - low) / (high - low).clamp_min(1e-6)
    return (scaled * 255).round().to(torch.uint8).numpy()


def calculate_shift(tokens: int, config: Any, top: float = 1.15) -> float:
    """The flow sampler's shift for a number of image tokens, from its configuration's line; `top` is its
    default.
    """
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", top)
    return float(base + (top - base) * (tokens - low) / (high - low))
