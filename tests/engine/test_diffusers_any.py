"""Pipelines that no family serves, called as a whole, against plain diffusers: float32, at most 1e-4."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from saggar.engine import (
    Cancelled,
    Engine,
    EngineConfig,
    InvalidRequest,
    LoadError,
    Request,
    RowFailed,
    Unsupported,
    open_family,
)
from saggar.engine.models.capabilities import capabilities
from saggar.engine.models.diffusers_any.family import family_of

from tests.engine.support import Recorder, at_step, eventually, floats, settled
from tests.engine.tiny_any import BUILDERS

ATOL = 1e-4
STEPS = {"sd": 5, "ldm": 1, "amused": 4}
"""Steps that are told of a request for 4."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("any")

    def model(name: str) -> Path:
        path = folder / name
        if not path.exists():
            path.mkdir()
            BUILDERS[name](path)
        return path

    return model


@pytest.fixture(scope="module", params=BUILDERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path], name: str) -> Iterator[Engine]:
    with make(tiny(name)) as engine:
        yield engine


@pytest.fixture
def sd(tiny: Callable[[str], Path]) -> Iterator[Engine]:
    """An engine to be spoiled."""
    with make(tiny("sd")) as engine:
        yield engine


def make(folder: Path, **settings: Any) -> Engine:
    torch.set_num_threads(1)
    config = {"executor": "local", "pixels": "float32", "max_batch": 6, "threads": 1, **settings}
    return Engine.make(EngineConfig(model=str(folder), **config))


@cache
def _pipeline(folder: Path) -> Any:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def plain(folder: Path, request: Request) -> np.ndarray:
    """What the plain pipeline makes of it: one call for each output."""
    params = {"height": 64, "width": 64, **request.params}
    if request.negative_prompt is not None:
        params["negative_prompt"] = request.negative_prompt
    pictures = [
        _pipeline(folder)(
            request.prompt,
            generator=torch.Generator("cpu").manual_seed(request.seed + index),
            output_type="np",
            **params,
        ).images
        for index in range(request.num_outputs)
    ]
    return np.concatenate(pictures)


def unlike(name: str) -> list[Request]:
    """Three that share their parameters and nothing else."""
    params = {"num_inference_steps": 4, "guidance_scale": 3.0}
    negative = None if name == "ldm" else "ugly, blurred"
    return [
        Request("a", "a red fox that runs over the snow", seed=3, params=params),
        Request("b", "blue", negative_prompt=negative, seed=40, num_outputs=2, params=params),
        Request("c", "", seed=11, params=params),
    ]


def loaded(engine: Engine) -> Any:
    return engine._loops[0].executor._runner.family._pipe  # type: ignore[attr-defined]


def denoiser(engine: Engine) -> Any:
    pipe = loaded(engine)
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def watched(engine: Engine) -> list[int]:
    """The rows of each forward of the denoiser, from now on."""
    rows: list[int] = []
    denoiser(engine).register_forward_pre_hook(
        lambda _module, args, kwargs: rows.append(len(args[0] if args else kwargs["sample"])),
        with_kwargs=True,
    )
    return rows


def test_alone(engine: Engine, tiny: Callable[[str], Path], name: str) -> None:
    for request in unlike(name):
        expected = plain(tiny(name), request)
        assert expected.std() > 0.02
        np.testing.assert_allclose(floats(engine.submit(request).result(60)), expected, atol=ATOL, rtol=0)


def test_in_a_batch_of_three_unlike_rows(engine: Engine, tiny: Callable[[str], Path], name: str) -> None:
    requests = unlike(name)
    rows = watched(engine)
    outputs = engine.generate(requests)
    assert {output.batch_size for output in outputs} == {4}
    for request, output in zip(requests, outputs, strict=True):
        np.testing.assert_allclose(floats(output), plain(tiny(name), request), atol=ATOL, rtol=0)
    # With guidance the pipeline doubles its rows. Only rows with a negative prompt of their own go apart.
    assert set(rows) == {"sd": {4}, "ldm": {8}, "amused": {2}}[name]


def test_more_outputs_than_rows_of_a_forward(engine: Engine, tiny: Callable[[str], Path], name: str) -> None:
    request = replace(unlike(name)[0], num_outputs=8)
    expected = plain(tiny(name), request)
    np.testing.assert_allclose(floats(engine.submit(request).result(60)), expected, atol=ATOL, rtol=0)


def test_progress_is_real(engine: Engine, name: str) -> None:
    recorder = Recorder()
    request = unlike(name)[0]
    calls: list[int] = []
    hook = denoiser(engine).register_forward_hook(lambda *_: calls.append(1))
    seen: list[int] = []
    engine.submit(request, on_event=lambda event: (recorder(event), seen.append(len(calls)))).result(60)
    hook.remove()
    assert recorder.steps("a") == list(range(1, STEPS[name] + 1))
    assert {event.steps for event in recorder.events if event.kind == "step"} == {STEPS[name]}
    told = [count for event, count in zip(recorder.events, seen, strict=True) if event.kind == "step"]
    assert told == (list(range(1, STEPS[name] + 1)) if STEPS[name] > 1 else [4]), "told before it was made"


def test_defaults_and_parameters_are_the_pipelines(tiny: Callable[[str], Path], name: str) -> None:
    family = open_family(str(tiny(name)))
    call = inspect.signature(getattr(diffusers, family.checkpoint.class_name).__call__).parameters
    for field, default in ((field, call[field].default) for field in family.batch_fields):
        assert getattr(family.Params, field) == default
    assert {"height", "width", "num_inference_steps", "guidance_scale"} <= set(family.batch_fields)
    assert not {"prompt", "generator", "output_type", "callback_steps", "return_dict"} & set(
        family.batch_fields
    )
    for params in ({"sharpness": 3}, {"output_type": "pil"}, {"height": 64.5}, {"num_inference_steps": 0}):
        with pytest.raises(InvalidRequest, match=next(iter(params))):
            family.validate(Request("x", "x", params=params))


def test_its_capabilities_say_what_it_cannot(tiny: Callable[[str], Path], name: str) -> None:
    family = open_family(str(tiny(name)))
    can = capabilities(type(family), (family.checkpoint.class_name,))
    assert (can.batches, can.own, can.previews) == ("by request", (), False)
    assert can.steps == (name != "ldm")
    with pytest.raises(Unsupported, match="is called as a whole: mode must be request_batch"):
        make(tiny(name), mode="step_batch")


def test_a_cancel_takes_effect_at_the_next_step(tiny: Callable[[str], Path]) -> None:
    params = {"num_inference_steps": 50}
    with make(tiny("sd")) as engine:
        rows = watched(engine)
        victim = Request("victim", "gone", seed=9, params=params)
        handle = engine.submit(victim, on_event=at_step("victim", 2, lambda: engine.cancel("victim")))
        with pytest.raises(Cancelled):
            handle.result(60)
        settled(engine)
        assert len(rows) in (2, 3)
        eventually(lambda: not pipelines(), 10)


def test_neighbours_of_a_cancelled_row_are_unchanged(sd: Engine, tiny: Callable[[str], Path]) -> None:
    first, *_, last = unlike("sd")
    victim = replace(first, id="victim", seed=77)
    sd.pause()
    lost = sd.submit(victim, on_event=at_step("victim", 2, lambda: sd.cancel("victim")))
    handles = [sd.submit(request) for request in (first, last)]
    sd.resume()
    for request, handle in zip((first, last), handles, strict=True):
        np.testing.assert_allclose(floats(handle.result(60)), plain(tiny("sd"), request), atol=ATOL, rtol=0)
    with pytest.raises(Cancelled):
        lost.result(60)


def pipelines() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "saggar-pipeline"]


def test_no_thread_outlives_its_requests(sd: Engine) -> None:
    for request in unlike("sd"):
        sd.submit(request).result(60)
    settled(sd)
    eventually(lambda: not pipelines(), 10)


@pytest.mark.parametrize("at", [1, 3])
def test_what_does_not_fit_is_made_in_halves_from_the_start(
    sd: Engine, tiny: Callable[[str], Path], at: int
) -> None:
    """The memory gives out at the first or at the third step of four rows, eight with guidance."""
    tries: list[int] = []

    def full(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        tries.append(len(args[0]))
        if len(args[0]) > 4 and len(tries) >= at:
            raise MemoryError("full")

    denoiser(sd).register_forward_pre_hook(full)
    requests = [replace(request, negative_prompt=None) for request in unlike("sd")]
    for request, output in zip(requests, sd.generate(requests), strict=True):
        np.testing.assert_allclose(floats(output), plain(tiny("sd"), request), atol=ATOL, rtol=0)
    assert sd.stats()["memory.halved"] >= 1
    assert set(tries[at:]) <= {2, 4}


def test_a_row_that_fails_takes_no_other_along(sd: Engine, tiny: Callable[[str], Path]) -> None:
    good, _, bad = unlike("sd")
    encoder = loaded(sd).text_encoder
    empty = loaded(sd).tokenizer("poison", padding="max_length", return_tensors="pt").input_ids

    def refuse(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        if any(torch.equal(ids, empty[0]) for ids in args[0]):
            raise ValueError("bad words")

    encoder.register_forward_pre_hook(refuse)
    handles = [sd.submit(good), sd.submit(replace(bad, prompt="poison"))]
    np.testing.assert_allclose(floats(handles[0].result(60)), plain(tiny("sd"), good), atol=ATOL, rtol=0)
    with pytest.raises(RowFailed, match="ValueError: bad words"):
        handles[1].result(60)


def test_a_picture_that_is_not_finite_is_an_error(sd: Engine) -> None:
    decode = loaded(sd).vae.decode
    loaded(sd).vae.decode = lambda *args, **kwargs: (decode(*args, **kwargs)[0] * float("nan"),)
    with pytest.raises(RowFailed, match="the picture is not finite"):
        sd.submit(unlike("sd")[0]).result(60)


def test_stochastic_samplers_draw_row_by_row(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(tiny("sd"), tmp_path / "sd"))
    path = folder / "scheduler" / "scheduler_config.json"
    ancestral = {"_class_name": "EulerAncestralDiscreteScheduler"}
    path.write_text(json.dumps(json.loads(path.read_text()) | ancestral))
    index = folder / "model_index.json"
    scheduler = {"scheduler": ["diffusers", "EulerAncestralDiscreteScheduler"]}
    index.write_text(json.dumps(json.loads(index.read_text()) | scheduler))
    with make(folder) as engine:
        requests = unlike("sd")
        for request, output in zip(requests, engine.generate(requests), strict=True):
            np.testing.assert_allclose(floats(output), plain(folder, request), atol=ATOL, rtol=0)


def test_pictures_are_bytes_by_default(tiny: Callable[[str], Path]) -> None:
    request = unlike("amused")[0]
    with make(tiny("amused"), pixels="uint8") as engine:
        output = engine.submit(request).result(60)
    assert output.images[0].dtype == np.uint8
    expected = plain(tiny("amused"), request)
    assert np.abs(floats(output) / 255 - expected).max() <= 0.5 / 255 + ATOL


def test_a_negative_prompt_is_refused_where_there_is_none(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidRequest, match="negative_prompt: LDMTextToImagePipeline takes none"):
        open_family(str(tiny("ldm"))).validate(Request("x", "x", negative_prompt="y"))


@pytest.mark.parametrize(
    ("class_name", "says"),
    [
        ("StableDiffusionImageVariationPipeline", "it takes no prompt"),
        ("IFImg2ImgSuperResolutionPipeline", "it needs image too"),
        ("DDPMPipeline", "it takes no prompt"),
    ],
)
def test_what_needs_more_than_a_prompt_is_refused_at_start(
    tmp_path: Path, class_name: str, says: str
) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    with pytest.raises(Unsupported, match=f"{class_name} cannot be called as a whole here: {says}"):
        open_family(str(tmp_path))


def test_what_gives_no_pictures_fails_at_the_warm_up(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = diffusers.StableDiffusionPipeline.__call__

    def frames(self: Any, *args: Any, **kwargs: Any) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(frames=call(self, *args, **kwargs).images)

    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "__call__", frames)
    with pytest.raises(LoadError, match="gives no pictures, and only pictures are served"):
        make(tiny("sd"))


def test_a_family_of_its_own_goes_first(tiny: Callable[[str], Path]) -> None:
    assert family_of("FluxPipeline") is not None
    assert family_of("NoSuchPipeline") is None
    from saggar.engine import families

    assert type(open_family(str(tiny("sd")))) is family_of("StableDiffusionPipeline")
    assert "StableDiffusionPipeline" not in families()


def test_the_engines_process_imports_neither_torch_nor_diffusers(tiny: Callable[[str], Path]) -> None:
    code = (
        "import sys; from saggar.engine import open_family, Request;"
        f"f = open_family({str(tiny('sd'))!r}); r = f.validate(Request('a', 'b')); f.batch_key(r); f.cost(r);"
        "print([name for name in ('torch', 'diffusers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.procs
def test_in_a_ranks_process(tiny: Callable[[str], Path]) -> None:
    with make(tiny("sd"), executor="multiproc") as engine:
        for request, output in zip(unlike("sd"), engine.generate(unlike("sd")), strict=True):
            np.testing.assert_allclose(floats(output), plain(tiny("sd"), request), atol=ATOL, rtol=0)
