"""Inputs made of a seed, how plain pipelines are given them, and media as arrays that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from saggar.engine import Request
from saggar.engine.media import Clip, Kind, Media, Sound

Shape: TypeAlias = tuple[int, ...]
"""Of an input: a picture's (H, W), or (H, W, 4) with alpha; a mask's (H, W); a sound's (samples, channels); a clip's
(frames, H, W)."""
Shapes: TypeAlias = Mapping[Kind, Sequence[Shape]]
Given: TypeAlias = Callable[[Request], dict[str, Any]]
"""What a plain pipeline is called with for a request's inputs."""
RATE = 16_000
FPS = 8.0


def made(shapes: Shapes, seed: int) -> dict[str, list[Media]]:
    """Inputs of these shapes, others for each seed."""
    draw = np.random.default_rng(seed)
    return {kind: [_one(kind, shape, draw) for shape in some] for kind, some in shapes.items()}


def _one(kind: Kind, shape: Shape, draw: np.random.Generator) -> Media:
    if kind == "audio":
        return Sound(draw.uniform(-1, 1, shape).astype(np.float32), RATE)
    if kind == "video":
        frames = [_picture((*shape[1:], 3), draw) for _ in range(shape[0])]
        return Clip(np.stack(frames), FPS)
    if kind == "mask":
        return _mask(shape, draw)
    return _picture(shape if len(shape) == 3 else (*shape, 3), draw)


def _picture(shape: Shape, draw: np.random.Generator) -> np.ndarray:
    """Coarse spots: of fine noise little is left when it is made smaller."""
    height, width, channels = shape
    coarse = draw.integers(0, 256, (6, 6, channels), np.uint8)
    planes = [
        Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC)
        for plane in np.moveaxis(coarse, -1, 0)
    ]
    return np.stack([np.asarray(plane) for plane in planes], axis=-1)


def _mask(shape: Shape, draw: np.random.Generator) -> np.ndarray:
    """A white box with a grey border, somewhere in black."""
    height, width = shape
    mask = np.zeros(shape, np.uint8)
    top, left = (int(draw.integers(1, side // 3)) for side in shape)
    mask[top : top + height // 2, left : left + width // 2] = 160
    mask[top + 2 : top + height // 2 - 2, left + 2 : left + width // 2 - 2] = 255
    return mask


def as_pil(request: Request) -> dict[str, Any]:
    """Pictures as `image`, without alpha, a list where there are several; a mask as `mask_image`."""
    pictures = [Image.fromarray(_array(one)).convert("RGB") for one in request.inputs.get("image", ())]
    masks = [Image.fromarray(_array(one)) for one in request.inputs.get("mask", ())]
    given: dict[str, Any] = {}
    if pictures:
        given["image"] = pictures if len(pictures) > 1 else pictures[0]
    return {**given, "mask_image": masks[0]} if masks else given


def as_waves(request: Request) -> dict[str, Any]:
    """A sound as tensors of Stable Audio's names."""
    sounds = [one for one in request.inputs.get("audio", ()) if isinstance(one, Sound)]
    if not sounds:
        return {}
    wave = torch.from_numpy(sounds[0].samples.T[None])
    return {"initial_audio_waveforms": wave, "initial_audio_sampling_rate": sounds[0].rate}


def as_pil_of_its_size(request: Request) -> dict[str, Any]:
    """The picture in the request's size, as a pipeline would resize it that did."""
    height, width = (int(str(request.params.get(side, 64))) for side in ("height", "width"))
    picture = Image.fromarray(_array(request.inputs["image"][0])).convert("RGB")
    return {"image": picture.resize((width, height), Image.Resampling.LANCZOS)}


def smaller_references(module: str, pipeline: Any, reference_pixels: float = 64**2, **given: Any) -> Any:
    """What a pipeline returns that brings references to 1024×1024 pixels, were it so many."""
    found: Any = import_module(f"diffusers.pipelines.{module}")
    whole = found.calculate_dimensions
    found.calculate_dimensions = lambda area, ratio: whole(area * reference_pixels / 1024**2, ratio)
    try:
        return pipeline(**given)
    finally:
        found.calculate_dimensions = whole


def as_rgba(request: Request) -> dict[str, Any]:
    """The picture with its transparency."""
    return {"image": Image.fromarray(_array(request.inputs["image"][0])).convert("RGBA")}


def layers_of(result: Any) -> list[Media]:
    """The layers of one output."""
    return list(result.images[0])


def at_resolution(pipeline: Any, resolution: int = 64, **given: Any) -> Any:
    """What a pipeline returns that knows the resolution 640, were it another."""
    module = "qwenimage.pipeline_qwenimage_layered"
    pixels = resolution**2 * 1024**2 / 640**2
    return smaller_references(module, pipeline, reference_pixels=pixels, resolution=640, **given)


def keeping_references(pipeline: Any, auto_resize: bool = False, **given: Any) -> Any:
    """What Kontext returns for references that keep their sizes, unless told otherwise."""
    return pipeline(**given, _auto_resize=auto_resize)


def pictures_of(result: Any) -> list[Media]:
    """What a pipeline called with output_type="np" returns for one output: its pictures, float in 0..1."""
    return list(result.images)


def sounds_of(result: Any) -> list[Media]:
    """The same of one that makes sounds, of which what is beyond -1..1 is cut off."""
    return [Sound(np.clip(wave.T, -1, 1), RATE) for wave in result.audios]


def films_of(result: Any) -> list[Media]:
    """The same of one that makes videos with sound, as the tiny LTX-2 does."""
    films = zip(result.frames, result.audio, strict=True)
    return [
        Clip(frames, 24.0, Sound(wave.T.float().cpu().numpy().clip(-1, 1), 8000)) for frames, wave in films
    ]


def clips_of(fps: float) -> Callable[[Any], list[Media]]:
    """The same of one that makes videos, of which the pipeline does not say how fast they are shown."""
    return lambda result: [Clip(frames, fps) for frames in result.frames]


def plainly(pipeline: Any, **arguments: Any) -> Any:
    """Called as it is."""
    return pipeline(**arguments)


def arrays(media: Sequence[Media]) -> list[np.ndarray]:
    """Pictures, frames and samples, in order; a clip's sound behind its frames."""
    found: list[np.ndarray] = []
    for one in media:
        if isinstance(one, Clip):
            found += [one.frames, *([one.sound.samples] if one.sound else [])]
        else:
            found.append(one.samples if isinstance(one, Sound) else one)
    return found


def facts(media: Sequence[Media]) -> list[tuple[object, ...]]:
    """Whatever of them is not in an array."""
    return [
        ("clip", one.fps, one.sound and one.sound.rate)
        if isinstance(one, Clip)
        else ("sound", one.rate)
        if isinstance(one, Sound)
        else ("picture",)
        for one in media
    ]


def assert_same(found: Sequence[Media], expected: Sequence[Media], atol: float, name: str = "") -> None:
    """The same kinds, sizes and numbers within the tolerance; those of uint8 are compared as they would round."""
    assert facts(found) == facts(expected)
    for one, other in zip(arrays(found), arrays(expected), strict=True):
        assert one.shape == other.shape, name
        bytes_ = one.dtype == np.uint8 and other.dtype != np.uint8
        value, slack = (one / 255, 0.5 / 255) if bytes_ else (one.astype(np.float64), 0.0)
        np.testing.assert_allclose(value, other, atol=atol + slack, rtol=0, err_msg=name)


def distance(some: Sequence[Media], others: Sequence[Media]) -> float:
    """The largest difference of one number."""
    pairs = zip(arrays(some), arrays(others), strict=True)
    return max(float(np.abs(one.astype(np.float64) - other).max()) for one, other in pairs)


def mean_distance(some: Sequence[Media], others: Sequence[Media]) -> float:
    """The mean difference of the numbers of that medium which differs most."""
    pairs = zip(arrays(some), arrays(others), strict=True)
    return max(float(np.abs(one.astype(np.float64) - other).mean()) for one, other in pairs)


def spread(media: Sequence[Media]) -> float:
    """The standard deviation of that medium's numbers which has least."""
    return min(float(one.std()) for one in arrays(media))


def _array(one: Media) -> np.ndarray:
    assert isinstance(one, np.ndarray)
    return one
