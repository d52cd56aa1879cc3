"""HunyuanVideo-1.5 beyond parity: what must not share a forward, texts in full, guiders, kernels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from saggar.engine import InvalidRequest, LoadError, Request, open_family
from saggar.engine.attention.dispatch import find_sites, install
from saggar.engine.attention.select import kernel
from saggar.engine.attention.site import Site
from saggar.engine.media import Clip
from saggar.engine.models.common import pack_ragged
from saggar.engine.models.hunyuan_video15 import TEXTS
from saggar.engine.models.hunyuan_video15_parts import real
from saggar.engine.models.state import Row
from saggar.engine.platform.base import Placement

from tests.engine import video_made
from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME
from tests.engine.media_made import assert_same
from tests.engine.plain import ATOL

Models = Callable[[str], Path]
FLOATS = Placement("float32", "float32/cpu", torch.device("cpu"), torch.float32)
TEXT, PICTURE = BY_NAME["hunyuan-video15"], BY_NAME["hunyuan-video15-i2v"]


@pytest.fixture
def loaded(models: Models) -> Callable[[str], Any]:
    """A family with its weights, in this process, its attentions on a kernel of ours."""

    def load(model: str) -> Any:
        family = open_family(str(models(model)))
        family.load(FLOATS)
        for found in find_sites(family.denoisers()["transformer"]):
            assert found.reachable
            install(found, Site(found.name, found.role, kernel("torch_sdpa")()))
        return family

    return load


def prepared(family: Any, *requests: Request) -> list[Any]:
    states = [family.new_state(family.validate(request)) for request in requests]
    with torch.inference_mode():
        family.prepare_encode(states)
    return states


def bare(model: Path) -> Any:
    """diffusers' transformer as it is: no kernel, no hook of ours."""
    kind = diffusers.HunyuanVideo15Transformer3DModel
    return kind.from_pretrained(str(model), subfolder="transformer").eval()


def forward(transformer: Any, *states: Any) -> torch.Tensor:
    """Its prediction of first outputs, [states, ...]."""
    rows = [Row(state, 0) for state in states]
    (text, mask), (glyphs, glyph_mask) = (pack_ragged(rows, "cond", name) for name in TEXTS)
    latents = [torch.cat([state.latents[:1], state.extras["condition"]], dim=1) for state in states]
    predicted: torch.Tensor = transformer(
        torch.cat(latents),
        torch.stack([state.timesteps[0] for state in states]),
        text,
        real(text) if mask is None else mask,
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=real(glyphs) if glyph_mask is None else glyph_mask,
        image_embeds=torch.cat([state.extras["image"] for state in states]),
        return_dict=False,
    )[0]
    return predicted


@torch.inference_mode()
def test_with_and_without_a_picture_in_one_forward_would_go_wrong_in_silence(
    models: Models, loaded: Callable[[str], Any]
) -> None:
    """The bare transformer asks of the whole batch whether it has pictures: their keys keep them apart."""
    text, picture = loaded("hunyuan-video15"), loaded("hunyuan-video15-i2v")
    one, two = prepared(text, *(TEXT.request(f"text {n}", "clay and" * n, seed=n) for n in (1, 2)))
    other = prepared(picture, PICTURE.request("picture", "clay", {"image": [(64, 64)]}, seed=3))[0]
    assert text.batch_key(one.request) != picture.batch_key(other.request)

    transformer = bare(models("hunyuan-video15-i2v"))
    for state in (one, two):  # as many tokens as of a picture, all zero: the pipeline for text gives such
        state.extras["image"] = torch.zeros_like(other.extras["image"])
    alone = [forward(transformer, state) for state in (one, two, other)]
    torch.testing.assert_close(forward(transformer, one, two), torch.cat(alone[:2]), atol=ATOL, rtol=0)
    together = forward(transformer, one, other)
    torch.testing.assert_close(together[1:], alone[2], atol=ATOL, rtol=0)
    assert (together[:1] - alone[0]).abs().max() > 100 * ATOL


def test_a_picture_of_another_shape_has_a_key_of_its_own(models: Models) -> None:
    family = open_family(str(models("hunyuan-video15-i2v")))
    keys = {
        family.batch_key(family.validate(PICTURE.request("x", "x", {"image": [size]}, seed=seed)))
        for size in ((50, 70), (70, 50))
        for seed in (1, 2)
    }
    assert len(keys) == 2


def test_texts_in_quotes_go_to_both_encoders_and_nothing_hangs_on_padding(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_made, "SHORT", 0)  # the plain pipeline fills up all texts in full
    engine = make_engine("hunyuan-video15", pixels="float32", max_batch=4, warmup=())
    pipeline = diffusers.HunyuanVideo15Pipeline.from_pretrained(str(models("hunyuan-video15")))
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
    prompts = ['a sign "KILN" and “Ofen”', "a sign", 'a sign "OTHER"']
    requests = [
        Request(f"r{n}", prompt, n, "t2v", 'no "signs"' if n else None, size)
        for n, prompt in enumerate(prompts)
    ]
    outputs = engine.generate(requests)
    assert {output.batch_size for output in outputs} == {3}
    for request, output in zip(requests, outputs, strict=True):
        made = video_made.by_guider(
            pipeline,
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            generator=torch.Generator().manual_seed(request.seed),
            output_type="np",
            **size,
        )
        assert_same(output.media, [Clip(frames, 24.0) for frames in made.frames], ATOL, request.id)


def with_guider(model: Path, folder: Path, **words: Any) -> Path:
    """A copy whose guider has these words in its configuration, its class among them."""
    shutil.copytree(model, folder)
    path = folder / "guider" / "guider_config.json"
    config = json.loads(path.read_text()) | words
    path.write_text(json.dumps(config))
    index = json.loads((folder / "model_index.json").read_text())
    index["guider"] = ["diffusers", config["_class_name"]]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        {"start": 0.3, "stop": 0.8, "guidance_scale": 3.0},
        {"guidance_rescale": 0.7},
        {"use_original_formulation": True},
        {"enabled": False},
        {"_class_name": "ClassifierFreeZeroStarGuidance", "zero_init_steps": 1},
        {"_class_name": "TangentialClassifierFreeGuidance"},
    ],
    ids=lambda words: next(iter(words)) + str(next(iter(words.values()))),
)
def test_each_guider_guides_as_in_the_plain_pipeline(
    make_engine: MakeEngine, models: Models, tmp_path: Path, words: dict[str, Any]
) -> None:
    folder = with_guider(models("hunyuan-video15"), tmp_path / "guided", **words)
    engine = make_engine(model=str(folder), pixels="float32", max_batch=4, warmup=())
    pipeline = diffusers.HunyuanVideo15Pipeline.from_pretrained(str(folder))
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": 32, "width": 32, "num_frames": 1}
    requests = [
        Request("a", "clay", 1, "t2v", params={**size, "num_inference_steps": 5}),
        Request("b", "fire", 2, "t2v", "smoke", {**size, "num_inference_steps": 3}),
    ]
    outputs = engine.generate(requests)
    assert {output.batch_size for output in outputs} == {2}
    for request, output in zip(requests, outputs, strict=True):
        made = video_made.by_guider(
            pipeline,
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            generator=torch.Generator().manual_seed(request.seed),
            output_type="np",
            guidance_scale=words.get("guidance_scale", video_made.SCALE),
            **request.params,
        )
        assert_same(output.media, [Clip(frames, 24.0) for frames in made.frames], ATOL, request.id)


def test_a_guider_that_changes_the_transformer_is_refused(models: Models, tmp_path: Path) -> None:
    folder = with_guider(models("hunyuan-video15"), tmp_path / "x", _class_name="SkipLayerGuidance")
    with pytest.raises(LoadError, match="guider: SkipLayerGuidance is not supported: ClassifierFreeGuidance"):
        open_family(str(folder)).load(FLOATS)


def test_the_guiders_strength_is_the_default(models: Models) -> None:
    family = open_family(str(models("hunyuan-video15")))
    request = family.validate(Request("x", "x", task="t2v"))
    assert request.params["guidance_scale"] == video_made.SCALE
    weak = family.validate(Request("x", "x", task="t2v", params={"guidance_scale": 1.0}))
    assert family.cost(request) == 2 * family.cost(weak)


def test_one_side_alone_is_refused(models: Models) -> None:
    family = open_family(str(models("hunyuan-video15")))
    with pytest.raises(InvalidRequest) as caught:
        family.validate(Request("x", "x", task="t2v", params={"height": None}))
    assert (caught.value.field, caught.value.allowed) == ("params.height", "both or none")


@torch.inference_mode()
def test_masking_keys_alone_gives_what_masking_pairs_does(
    models: Models, loaded: Callable[[str], Any]
) -> None:
    """diffusers' own processors against ours, of texts of unlike length."""
    family = loaded("hunyuan-video15")
    rows = [Row(state, 0) for state in prepared(family, *TEXT.requests())]
    ours = family.predict(rows, "cond")
    family._pipe.transformer = bare(models("hunyuan-video15"))
    torch.testing.assert_close(ours, family.predict(rows, "cond"), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_where_no_token_is_masked_blocks_get_no_mask(loaded: Callable[[str], Any]) -> None:
    family = loaded("hunyuan-video15")
    masked: list[bool] = []
    family._pipe.transformer.transformer_blocks[-1].register_forward_pre_hook(
        lambda _, args: masked.append(args[3] is not None)
    )
    prompts = ['one "A"', 'two "B"', "long, long"]
    states = prepared(family, *(TEXT.request(text, text, seed=n) for n, text in enumerate(prompts)))
    rows = [Row(state, 0) for state in states]
    alone = torch.cat([family.predict([row], "cond") for row in rows])
    torch.testing.assert_close(family.predict(rows[:2], "cond"), alone[:2], atol=1e-5, rtol=0)
    torch.testing.assert_close(family.predict(rows, "cond"), alone, atol=1e-5, rtol=0)
    assert masked == [False, False, False, False, True]
