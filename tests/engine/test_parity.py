"""Pictures, videos and sounds against plain diffusers: float32, tiny random weights, at most 1e-4 on pixels of 0..1.

Each case runs in both modes in this process, and in a rank's process.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from saggar.engine import Cancelled, Engine, EngineConfig, InvalidRequest, Output, families
from saggar.engine.models.base import Family
from saggar.engine.models.capabilities import parameters
from saggar.engine.request import INTERACTIVE

from tests.engine.case import Case
from tests.engine.conftest import MakeEngine
from tests.engine.families import CASES
from tests.engine.media_made import arrays, assert_same, distance
from tests.engine.plain import ATOL, Plain, assert_equal, plain_pipeline
from tests.engine.support import Recorder, at_step, eventually, settled

WAYS = [
    ("local", "request_batch"),
    ("local", "step_batch"),
    pytest.param(("multiproc", "request_batch"), marks=pytest.mark.procs),
    pytest.param(("multiproc", "step_batch"), marks=pytest.mark.procs),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    """One family after the other."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def family(case: Case) -> str:
    """The tiny model's name."""
    return case.tiny


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Executor and mode."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def engine(models: Callable[[str], Path], family: str, way: tuple[str, str]) -> Iterator[Engine]:
    """One engine for many cases: a rank takes seconds to start."""
    torch.set_num_threads(1)
    executor, mode = way
    config = EngineConfig(
        model=str(models(family)), executor=executor, mode=mode, pixels="float32", max_batch=6, threads=1  # type: ignore[arg-type]
    )  # fmt: skip
    with Engine.make(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(models: Callable[[str], Path], case: Case) -> Plain:
    """What the plain pipeline makes of a request: one call for each output."""
    return plain_pipeline(models(case.tiny), case.name)


def bits(output: Output) -> list[bytes]:
    """All numbers of its media."""
    return [array.tobytes() for array in arrays(output.media)]


def test_alone(engine: Engine, plain: Plain, case: Case) -> None:
    for request in case.requests():
        assert_equal(engine.submit(request).result(60), plain(request))


def test_alone_twice_is_bit_equal(engine: Engine, case: Case) -> None:
    request = case.requests()[1]
    first, second = (engine.submit(request).result(60) for _ in range(2))
    assert bits(first) == bits(second)


def test_in_a_batch_of_three_unlike_rows(engine: Engine, plain: Plain, case: Case) -> None:
    requests = case.requests()
    outputs = engine.generate(requests)
    assert {output.batch_size for output in outputs} == {4}
    for request, output in zip(requests, outputs, strict=True):
        assert_equal(output, plain(request))
    assert len({bits(output)[0] for output in outputs}) == 3


def test_other_inputs_have_keys_of_their_own_and_come_out_right(
    engine: Engine, plain: Plain, case: Case
) -> None:
    usual = case.request("usual", "a kiln", seed=4, params={"num_inference_steps": 3})
    keys = {engine.batch_key(engine.validate(usual))}
    for index, shapes in enumerate(case.others):
        requests = [
            case.request(
                f"{index}-{n}", text, shapes, seed=n, num_outputs=n, params={"num_inference_steps": 3}
            )
            for n, text in enumerate(("a kiln", "a large kiln of clay"), 1)
        ]
        outputs = engine.generate(requests)
        assert {output.batch_size for output in outputs} == {3}
        for request, output in zip(requests, outputs, strict=True):
            assert_equal(output, plain(request))
        keys.add(engine.batch_key(engine.validate(requests[0])))
    assert len(keys) == (1 if case.resized else 1 + len(case.others))


def test_n_outputs_are_right_in_order_and_seed(engine: Engine, plain: Plain, case: Case) -> None:
    request = case.request("n", "four of them", seed=100, num_outputs=4, params={"num_inference_steps": 3})
    output = engine.submit(request).result(60)
    each = len(output.media) // 4
    assert output.seeds == [100 + index for index in range(4) for _ in range(each)]
    for index in range(4):
        single = plain(replace(request, seed=100 + index, num_outputs=1))
        assert_same(output.media[index * each : (index + 1) * each], single, ATOL)
    assert len(set(bits(output))) == len(bits(output))


def test_each_seed_makes_its_own_noise_inside_a_batch(engine: Engine, plain: Plain, case: Case) -> None:
    requests = [
        case.request(f"s{seed}", "same", seed=seed, params={"num_inference_steps": 2}) for seed in (0, 1, 2)
    ]
    for request, output in zip(requests, engine.generate(requests), strict=True):
        assert_equal(output, plain(request))


def test_more_outputs_than_rows_of_a_forward(engine: Engine, plain: Plain, case: Case) -> None:
    request = case.request("many", "a herd", seed=5, num_outputs=8, params={"num_inference_steps": 2})
    assert_equal(engine.submit(request).result(60), plain(request))


def test_each_size_has_the_right_picture_and_its_own_key_unless_they_mix(
    engine: Engine, plain: Plain, case: Case
) -> None:
    wide = case.request("wide", "wide", seed=1, params={**case.other_size, "num_inference_steps": 3})
    usual = case.request("usual", "usual", seed=1, params={"num_inference_steps": 3})
    assert (engine.batch_key(wide) == engine.batch_key(usual)) == case.mixed_sizes
    outputs = engine.generate([wide, usual])
    assert (outputs[0].batch_id == outputs[1].batch_id) == case.mixed_sizes
    if case.another is None:
        assert arrays(outputs[0].media)[0].shape[-3:-1] == case.wide
    for request, output in zip([wide, usual], outputs, strict=True):
        assert_equal(output, plain(request))


def test_zero_and_empty_are_values(engine: Engine, plain: Plain, case: Case) -> None:
    bad, empty = ("bad", "") if case.negative else (None, None)
    asked: dict[str, tuple[str | None, dict[str, Any]]] = {
        "zero": (bad, {case.other_scale: 0}),
        "off": (bad, {case.scale: 0.0}),
        "empty": (empty, {case.scale: 3.0}),
        "none": (None, {case.scale: 3.0}),
    }
    requests = [
        case.request(
            name, "fox", negative_prompt=negative, seed=2, params={"num_inference_steps": 2, **params}
        )
        for name, (negative, params) in asked.items()
    ]
    outputs = engine.generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        assert_equal(output, plain(request))
    same = distance(outputs[2].media, outputs[3].media) <= ATOL
    assert same == case.empty_is_none


def test_a_negative_prompt_is_refused_where_the_pipeline_takes_none(engine: Engine, case: Case) -> None:
    request = case.request("x", "x", negative_prompt="bad")
    if case.negative:
        assert engine.validate(request).negative_prompt == "bad"
    else:
        with pytest.raises(InvalidRequest) as caught:
            engine.validate(request)
        assert caught.value.field == "negative_prompt"


def test_long_prompts_are_cut_as_plain_diffusers_cuts_them(engine: Engine, plain: Plain, case: Case) -> None:
    tale = "a very long tale of clay " * 20
    request = case.request("long", tale, seed=2, params={"num_inference_steps": 2})
    assert_equal(engine.submit(request).result(60), plain(request))


def test_neighbours_of_an_abort_are_unchanged(engine: Engine, plain: Plain, case: Case) -> None:
    a, b, _ = case.requests()
    victim = case.request("victim", "gone", seed=9, params={"num_inference_steps": 50})
    engine.pause()
    lost = engine.submit(victim, on_event=at_step("victim", 2, lambda: engine.cancel("victim")))
    handles = [engine.submit(request) for request in (a, b)]
    engine.resume()
    for request, handle in zip((a, b), handles, strict=True):
        assert_equal(handle.result(60), plain(request))
    with pytest.raises(Cancelled):
        lost.result(60)


def test_joined_midway_and_left_early(engine: Engine, plain: Plain, case: Case, way: tuple[str, str]) -> None:
    a, b, c = case.requests()
    later: list[Any] = []
    first = engine.submit(
        b, on_event=at_step("b", 2, lambda: later.extend([engine.submit(a), engine.submit(c)]))
    )
    assert_equal(first.result(60), plain(b))
    eventually(lambda: len(later) == 2)
    for request, handle in zip((a, c), later, strict=True):
        assert_equal(handle.result(60), plain(request))
    together = later[0].result(0).batch_id == first.result(0).batch_id
    assert together == (way[1] == "step_batch")


def _in_the_way(case: Case, max_batch: int) -> int:
    """Outputs of a request of another size that a running one must be parked for: where sizes mix, all seats."""
    return max_batch if case.mixed_sizes else 1


def test_preempted_and_resumed(engine: Engine, plain: Plain, case: Case, way: tuple[str, str]) -> None:
    bulk = case.requests()[1]
    urgent = case.request(
        "urgent",
        "now",
        seed=5,
        num_outputs=_in_the_way(case, 6),
        priority=INTERACTIVE,
        params={**case.small, "num_inference_steps": 2},
    )
    recorder = Recorder(at_step("b", 3, lambda: engine.submit(urgent, on_event=recorder)))
    before = engine.stats().get("preempted", 0)
    assert_equal(engine.submit(bulk, on_event=recorder).result(60), plain(bulk))
    eventually(lambda: recorder.kinds("urgent")[-1:] == ["output"])
    order = [event.request_id for event in recorder.events if event.kind == "output"]
    if way[1] == "step_batch":
        assert order == ["urgent", "b"]
        assert engine.stats()["preempted"] == before + 1
    else:
        assert order == ["b", "urgent"]


def test_a_preempted_picture_is_bit_equal_to_one_left_alone(
    make_engine: MakeEngine, family: str, case: Case
) -> None:
    engine = make_engine(family, mode="step_batch", pixels="float32")
    bulk = case.requests()[0]
    alone = engine.submit(bulk).result(60)
    urgent = case.request(
        "urgent",
        "now",
        num_outputs=_in_the_way(case, engine.config.max_batch),
        priority=INTERACTIVE,
        params={**case.small, "num_inference_steps": 2},
    )
    interrupted = engine.submit(bulk, on_event=at_step("a", 2, lambda: engine.submit(urgent))).result(60)
    settled(engine)
    assert engine.stats()["preempted"] == 1
    assert bits(alone) == bits(interrupted)


def test_stochastic_samplers_are_reproducible_row_by_row(
    make_engine: MakeEngine, models: Callable[[str], Path], family: str, tmp_path: Path, case: Case
) -> None:
    folder = with_sampler(models(family), case.stochastic, tmp_path / "stochastic")
    engine = make_engine(model=str(folder), pixels="float32")
    requests = case.requests()
    alone = [engine.submit(request).result(60) for request in requests]
    for request, single, output in zip(requests, alone, engine.generate(requests), strict=True):
        assert_same(output.media, single.media, ATOL, request.id)


def with_sampler(model: Path, words: dict[str, Any], folder: Path) -> Path:
    """A copy of the model whose scheduler has these words in its configuration, its class among them."""
    shutil.copytree(model, folder)
    path = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(path.read_text()) | words
    path.write_text(json.dumps(config))
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", config["_class_name"]]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_each_sampler_draws_as_in_the_plain_pipeline(
    make_engine: MakeEngine, models: Callable[[str], Path], family: str, tmp_path: Path, case: Case
) -> None:
    for index, words in enumerate(case.samplers):
        folder = with_sampler(models(family), words, tmp_path / str(index))
        engine = make_engine(model=str(folder), pixels="float32", warmup=())
        requests = case.requests()
        for request, output in zip(requests, engine.generate(requests), strict=True):
            assert output.batch_size == 4
            assert_equal(output, plain_pipeline(folder, case.name)(request))


def test_parameters_of_one_family_alone(
    make_engine: MakeEngine, family: str, plain: Plain, case: Case
) -> None:
    usual = replace(case.requests()[1], id="usual", num_outputs=1)
    requests = [
        replace(usual, id=str(index), params={**usual.params, **option})
        for index, option in enumerate(case.options)
    ]
    engine = make_engine(family, pixels="float32", max_batch=6)
    first, *others = engine.generate([usual, *requests])
    for request, output in zip(requests, others, strict=True):
        assert_equal(output, plain(request))
        shapes = [[array.shape for array in arrays(one.media)] for one in (output, first)]
        assert shapes[0] != shapes[1] or distance(output.media, first.media) > 1e-3, request.params


def test_previews_come_from_the_latents_and_never_from_the_vae(
    make_engine: MakeEngine, family: str, case: Case
) -> None:
    engine = make_engine(family)
    vae = engine._loops[0].executor._runner.family._pipe.vae  # type: ignore[attr-defined]
    decoded: list[int] = []
    decode = vae.decode

    def counted(*args: Any, **kwargs: Any) -> Any:
        decoded.append(1)
        return decode(*args, **kwargs)

    vae.decode = counted
    recorder = Recorder()
    request = case.request("p", "preview", params={"num_inference_steps": 7}, preview_every=3)
    output = engine.submit(request, on_event=recorder).result(60)
    previews = [event for event in recorder.events if event.kind == "preview"]
    if families()[case.served].preview is Family.preview:
        assert not previews
        return
    assert [event.step for event in previews] == list(range(3, output.steps + 1, 3))
    assert previews
    for event in previews:
        assert event.preview is not None
        coarse = 64 // event.preview.shape[0]
        assert coarse in (4, 8, 16)  # the factor of its VAE
        assert event.preview.shape == (64 // coarse, case.strip * 64 // coarse, 3)
        assert event.preview.dtype == np.uint8
    assert len(decoded) == 1


def test_pixels_are_bytes_by_default(make_engine: MakeEngine, family: str, case: Case, plain: Plain) -> None:
    request = case.requests()[0]
    output = make_engine(family).submit(request).result(60)
    medium = families()[case.served].medium
    assert arrays(output.media)[0].dtype == (np.float32 if medium == "audio" else np.uint8)
    assert_same(output.media, plain(request), ATOL)
    assert output.numerics == f"float32/cpu/{case.kernels}"


def test_every_default_equals_the_pipelines_own(case: Case) -> None:
    family = families()[case.served]
    call = inspect.signature(getattr(diffusers, case.class_name).__call__).parameters
    words = parameters(family)
    compared = 0
    for field in fields(family.Params):
        if field.name not in words:  # no task of this family takes it
            continue
        if case.task not in words[field.name].get("x-tasks", [case.task]):  # type: ignore[operator]
            continue
        if field.name in case.added:
            continue
        assert field.name in call, f"{field.name} is not an argument of the pipeline"
        if field.name in case.own_defaults:
            assert field.default is None
        elif call[field.name].default is not None:
            assert field.default is not MISSING
            of_task: Any = words[field.name].get("x-defaults", {})
            own = of_task.get(case.task, field.default)
            theirs = call[field.name].default
            assert _plain_value(own) == _plain_value(theirs), field.name
            compared += 1
    assert compared >= 2


def _plain_value(value: object) -> object:
    """Some defaults are lists, some tuples."""
    return list(value) if isinstance(value, tuple) else value


def test_parameters_off_the_checkpoints_grid_are_refused(
    make_engine: MakeEngine, family: str, case: Case
) -> None:
    engine = make_engine(family, warmup=())
    for params, field in case.refused:
        with pytest.raises(InvalidRequest) as caught:
            engine.validate(case.request("x", "x", params=params))
        assert caught.value.field == field
        assert caught.value.allowed
