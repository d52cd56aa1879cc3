"""What is particular to models that hear: Stable Audio's inputs, LTX-2's first picture, and how long its sound is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saggar.engine import InvalidRequest, Request, open_family
from saggar.engine.media import Sound
from saggar.engine.platform.base import Placement

from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME

Models = Callable[[str], Path]


def silence(rate: int = 16_000, channels: int = 2) -> Sound:
    return Sound(np.zeros((1000, channels), np.float32), rate)


@pytest.mark.parametrize("sound", [silence(rate=44_100), silence(channels=3)], ids=["rate", "channels"])
def test_a_sound_that_does_not_fit_the_model_is_refused(models: Models, sound: Sound) -> None:
    family = open_family(str(models("stable-audio")))
    with pytest.raises(InvalidRequest) as refused:
        family.validate(Request("a", "x", task="a2a", inputs={"audio": [sound]}))
    assert refused.value.field == "inputs.audio[0]"
    assert refused.value.allowed == "one or two channels, 16000 Hz"


def test_a_sound_of_text_takes_none(models: Models) -> None:
    with pytest.raises(InvalidRequest, match="is not taken by this task"):
        open_family(str(models("stable-audio"))).validate(
            Request("a", "x", task="t2a", inputs={"audio": [silence()]})
        )


def test_sounds_are_cut_where_they_are_too_loud(make_engine: MakeEngine) -> None:
    engine = make_engine("stable-audio", warmup=())
    vae = engine._loops[0].executor._runner.family._pipe.vae  # type: ignore[attr-defined]
    decode = vae.decode

    def loud(*args: Any, **kwargs: Any) -> Any:
        decoded = decode(*args, **kwargs)
        decoded.sample = decoded.sample * 100
        return decoded

    vae.decode = loud
    (sound,) = (
        engine.submit(Request("a", "x", task="t2a", params={"num_inference_steps": 1})).result(60).sounds
    )
    assert (sound.samples.min(), sound.samples.max()) == (-1.0, 1.0)


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_first_picture_stays_as_it_is(models: Models, stochastic: bool) -> None:
    family: Any = open_family(str(models("ltx2")))
    family.load(Placement("float32", "float32/cpu", torch.device("cpu"), torch.float32))
    state = family.new_state(family.validate(BY_NAME["ltx2-i2v-2.3"].requests()[1]))
    with torch.inference_mode():
        family.prepare_encode([state])
        state.sampler.register_to_config(stochastic_sampling=stochastic)
        shape, first = family._shape(state.params), state.latents.clone()
        family.step_scheduler(state, family.denoise_step([state], 2)[state.id])
    kept = shape.high * shape.wide * shape.channels[0]
    assert torch.equal(state.latents[:, :kept], first[:, :kept])
    assert not torch.isclose(state.latents[:, kept:], first[:, kept:]).any(dim=1).all()


@pytest.mark.parametrize(
    ("frames", "rate", "latents"), [(121, 24.0, 126), (121, 25.0, 121), (1, 24.0, 1), (9, 24.0, 9)]
)
def test_the_sound_is_as_long_as_the_video(models: Models, frames: int, rate: float, latents: int) -> None:
    family: Any = open_family(str(models("ltx2")))
    request = family.validate(
        Request("a", "x", task="t2v", params={"num_frames": frames, "frame_rate": rate})
    )
    assert family._shape(family.new_state(request).params).sound == latents
