"""Decoding in less memory: slices give the same picture, tiles that of the plain pipeline with tiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from saggar.engine import EngineConfig, Request, Unsupported
from saggar.engine.memory.decode import spare_memory

from tests.engine.conftest import MakeEngine
from tests.engine.support import floats

LARGE = {"height": 96, "width": 160, "num_inference_steps": 2}
SETTINGS = {"pixels": "float32", "warmup": ()}


def test_slices_give_the_same_pictures(make_engine: MakeEngine) -> None:
    request = Request("a", "x", num_outputs=3, seed=5, params=LARGE)
    usual = make_engine("flux", **SETTINGS).submit(request).result(60)
    sliced = make_engine("flux", vae_slicing=True, **SETTINGS).submit(request).result(60)
    np.testing.assert_allclose(floats(sliced), floats(usual), atol=1e-5, rtol=0)
    assert sliced.numerics == usual.numerics


def test_tiles_are_those_of_the_plain_pipeline(
    make_engine: MakeEngine, models: Callable[[str], Path]
) -> None:
    request = Request("a", "x", seed=5, params=LARGE)
    usual = make_engine("flux", **SETTINGS).submit(request).result(60)
    tiled = make_engine("flux", vae_tiling=True, **SETTINGS).submit(request).result(60)
    pipeline = diffusers.FluxPipeline.from_pretrained(str(models("flux")))
    pipeline.vae.enable_tiling()
    pipeline.set_progress_bar_config(disable=True)
    usually = json.loads((models("flux") / "saggar.json").read_text())["params"]
    params = {name: words["default"] for name, words in usually.items()} | LARGE
    generator = torch.Generator("cpu").manual_seed(5)
    expected = pipeline("x", generator=generator, output_type="np", **params).images
    np.testing.assert_allclose(floats(tiled), expected, atol=1e-4, rtol=0)
    assert np.abs(floats(tiled) - floats(usual)).max() > 1e-3  # there were tiles
    assert tiled.numerics == f"{usual.numerics}/tiled"


@pytest.mark.procs
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_share_the_tiles_of_a_decode(make_engine: MakeEngine, ranks: int) -> None:
    """Six tiles, those at the edges smaller; and a picture that is one tile."""
    requests = [
        Request("large", "x", seed=5, num_outputs=2, params=LARGE),
        Request("small", "y", seed=6, params={"height": 32, "width": 32, "num_inference_steps": 2}),
    ]
    settings = {"vae_tiling": True, **SETTINGS}
    alone = make_engine("flux", **settings)
    together = make_engine("flux", executor="multiproc", cfg=ranks, **settings)
    for request in requests:
        one, other = alone.submit(request).result(60), together.submit(request).result(60)
        np.testing.assert_allclose(floats(other), floats(one), atol=1e-5, rtol=0)


class Plain:
    """A family whose VAE knows no tiles."""

    name = "plain"

    def decoders(self) -> dict[str, torch.nn.Module]:
        return {"vae": torch.nn.Identity()}


@pytest.mark.parametrize("wish", ["vae_tiling", "vae_slicing"])
def test_a_vae_that_cannot_stops_the_start(wish: str) -> None:
    with pytest.raises(Unsupported, match=f"{wish}: plain has no VAE that does so"):
        spare_memory(EngineConfig(model="x", **{wish: True}), Plain())  # type: ignore[arg-type]
