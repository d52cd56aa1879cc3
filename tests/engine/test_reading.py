"""Texts that are longer than their encoders read: told of each request, and nothing but told."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saggar.engine import Engine, EngineConfig, InvalidRequest, Output, Request
from saggar.engine.models.reading import Reading, most
from saggar.engine.models.tiny.parts import bpe_tokenizer, clip_tokenizer, gemma_tokenizer, t5_tokenizer
from saggar.engine.request import TextCut

from tests.engine.case import Case
from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME, CASES
from tests.engine.support import noop
from tests.engine.tiny_any import stable_diffusion

LONG = 3000
"""Letters, each a token of every tiny tokenizer, and more than any tiny model reads."""
READS_ALL = ("qwen-image-edit", "qwen-image-edit-plus")
"""Their pipelines cut nothing."""
REFUSES = "longcat-image-edit"
MODELS = [
    case
    for name, case in {case.tiny: case for case in CASES}.items()
    if name not in READS_ALL and name != REFUSES
]
"""A case of each model whose encoders cut."""


@pytest.fixture(scope="module", params=MODELS, ids=lambda case: case.tiny)
def served(request: pytest.FixtureRequest) -> Case:
    """One model after the other."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def engine(models: Callable[[str], Path], served: Case) -> Iterator[Engine]:
    """One for all tests of a model."""
    config = EngineConfig(
        model=str(models(served.tiny)),
        executor="local",
        max_batch=4,
        threads=1,
        warmup=(),
        prompt_cache_mb=64,
    )
    with Engine.make(config) as engine:
        yield engine


def asked(served: Case, name: str, letters: int, **fields: Any) -> Request:
    """A request whose prompt has so many letters."""
    params = {"num_inference_steps": 2, **served.small}
    if served.tiny == "longcat-image":
        params["enable_prompt_rewrite"] = False
    return served.request(name, "x" * letters, params=params, **fields)


def told(engine: Engine, *requests: Request) -> list[Mapping[str, TextCut]]:
    """What comes of requests that are there together."""
    handles = [engine.submit(request) for request in requests]
    return [handle.result(300).unread for handle in handles]


def cut_of(engine: Engine, served: Case) -> TextCut:
    """Of a prompt that is far too long."""
    (unread,) = told(engine, asked(served, "far", LONG))
    assert list(unread) == ["prompt"]
    return unread["prompt"]


def test_a_short_prompt_is_not_told(engine: Engine, served: Case) -> None:
    assert told(engine, asked(served, "short", 5)) == [{}]


def test_a_long_one_is_also_where_its_encoding_is_known(engine: Engine, served: Case) -> None:
    unread = cut_of(engine, served)
    assert unread.tokens // 10 == LONG // 10
    assert 0 < unread.read_tokens < unread.tokens
    encoded = engine.stats()["prompts.encoded"]
    assert cut_of(engine, served) == unread
    assert engine.stats()["prompts.encoded"] == encoded


def test_one_of_just_the_length_is_not(engine: Engine, served: Case) -> None:
    unread = cut_of(engine, served)
    marks = unread.tokens - LONG  # some tokenizers have one for the beginning of the first word
    fits = unread.read_tokens - marks
    found = told(engine, asked(served, "fits", fits), asked(served, "one-more", fits + 1))
    assert found == [{}, {"prompt": unread._replace(tokens=unread.read_tokens + 1)}]


def test_only_the_long_one_of_a_batch_is(engine: Engine, served: Case) -> None:
    requests = [
        asked(served, name, letters, seed=7) for name, letters in (("a", 4), ("b", LONG - 1), ("c", 6))
    ]
    assert [len(unread) for unread in told(engine, *requests)] == [0, 1, 0]


def test_a_long_negative_prompt_is_told_where_it_counts(engine: Engine, served: Case) -> None:
    one = asked(served, "negative", 5, negative_prompt="z" * LONG)
    if not served.negative:
        with pytest.raises(InvalidRequest, match="negative_prompt: this model takes none"):
            told(engine, one)
        return
    guided = replace(one, params={**one.params, served.scale: served.strength})
    assert list(told(engine, guided)[0]) == ["negative_prompt"]
    unguided = replace(one, params={**one.params, served.scale: 0.0 if served.tiny == "z-image" else 1.0})
    if not served.tiny.startswith("ltx2"):  # its sound is guided by itself
        assert told(engine, unguided) == [{}]


# -- what families have of their own


@pytest.mark.parametrize("name", READS_ALL)
def test_where_nothing_is_cut_nothing_is_told(make_engine: MakeEngine, name: str) -> None:
    assert told(make_engine(name, warmup=()), asked(BY_NAME[name], "far", LONG)) == [{}]


def test_what_the_pipeline_cannot_cut_is_refused_by_its_field(make_engine: MakeEngine) -> None:
    engine, case = make_engine(REFUSES, warmup=()), BY_NAME[REFUSES]
    with pytest.raises(InvalidRequest, match=r"^prompt: 513 tokens are too many \(allowed: at most 512"):
        told(engine, asked(case, "far", 513))
    with pytest.raises(InvalidRequest, match=r"^negative_prompt: 3000 tokens"):
        told(engine, asked(case, "negative", 5, negative_prompt="z" * LONG))
    assert told(engine, asked(case, "near", 512)) == [{}]


def test_a_prompt_that_is_written_anew_is_read_whole(make_engine: MakeEngine) -> None:
    engine, case = make_engine("longcat-image", warmup=()), BY_NAME["longcat-image"]
    request = asked(case, "rewritten", 600)
    params = {**request.params, "enable_prompt_rewrite": True}
    assert told(engine, replace(request, id="anew", params=params), request) == [
        {},
        {"prompt": TextCut(512, 600)},
    ]


def test_without_its_third_encoder_stable_diffusion_3_reads_less(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(models("sd3"), tmp_path / "sd3")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    long = asked(replace(BY_NAME["sd3"], small={"max_sequence_length": 256}), "long", LONG)
    for model, reads in ((models("sd3"), 255), (folder, 75)):
        config = EngineConfig(model=str(model), executor="local", threads=1, warmup=())
        with Engine.make(config) as engine:
            (unread,) = told(engine, replace(long, params={**long.params, "height": 32, "width": 32}))
        assert unread["prompt"].read_tokens == reads


def test_words_of_an_instruction_are_none_of_the_prompts(make_engine: MakeEngine) -> None:
    engine, case = make_engine("sana", warmup=()), BY_NAME["sana"]
    request = asked(case, "a", LONG, negative_prompt="y" * LONG)
    for instruction in ([], ["Paint what is said:", "x x x Prompt: "]):
        params = {**request.params, "complex_human_instruction": instruction}
        found = told(engine, replace(request, params=params))[0]
        assert [one.tokens for one in found.values()] == [LONG, LONG]


def test_a_text_in_quotes_does_not_count_as_a_reader(make_engine: MakeEngine) -> None:
    engine, case = make_engine("hunyuan-video15", warmup=()), BY_NAME["hunyuan-video15"]
    request = replace(asked(case, "a", 1), prompt='a sign "open" ' + "x" * LONG)
    assert list(told(engine, request)[0]) == ["prompt"]


def test_of_a_pipeline_called_as_a_whole(tmp_path: Path) -> None:
    stable_diffusion(tmp_path)
    config = EngineConfig(model=str(tmp_path), executor="local", threads=1, warmup=(), max_batch=4)
    with Engine.make(config) as engine:
        params: dict[str, Any] = {"num_inference_steps": 2}
        texts = [("x" * 75, None), ("x" * 76, "z" * 90), ("x" * 5, "z" * 5), ("", "z" * 90)]
        found = told(
            engine,
            *(
                Request(str(n), text, negative_prompt=negative, params=params)
                for n, (text, negative) in enumerate(texts)
            ),
        )
    negative = {"negative_prompt": TextCut(75, 90)}
    assert found == [{}, {"prompt": TextCut(75, 76), **negative}, {}, negative]


def test_noop_reads_so_many_words(make_engine: MakeEngine) -> None:
    engine = make_engine("noop")
    one = noop("a", prompt="one two three", negative_prompt="one two", reads=2)
    assert told(engine, one, noop("b", prompt="one two", reads=2), noop("c")) == [
        {"prompt": TextCut(2, 3)},
        {},
        {},
    ]


@pytest.mark.procs
def test_a_ranks_process_tells_too(make_engine: MakeEngine) -> None:
    engine = make_engine("noop", executor="multiproc")
    assert told(engine, noop("a", prompt="one two three", reads=2)) == [{"prompt": TextCut(2, 3)}]


def test_no_log_quotes_what_was_cut(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine("sdxl", warmup=())
    logging.getLogger("diffusers").addHandler(caplog.handler)
    try:
        assert told(engine, asked(BY_NAME["sdxl"], "a", LONG)) == [{"prompt": TextCut(75, LONG)}]
    finally:
        logging.getLogger("diffusers").removeHandler(caplog.handler)
    assert "xxx" not in caplog.text


# -- notes of tokenizers


def noted(tokenizer: Any, texts: Sequence[str], **options: Any) -> list[TextCut | None]:
    """What is found when these texts are encoded by it alone."""
    reading = Reading({"tokenizer": tokenizer})
    with reading.noting():
        tokenizer(list(texts), **{"truncation": True, "max_length": 10, **options})
    return reading.cuts(texts)


@pytest.mark.parametrize("make", [clip_tokenizer, t5_tokenizer, gemma_tokenizer, bpe_tokenizer])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_counts_are_those_of_the_whole_text(make: Callable[[], Any], padding: str) -> None:
    tokenizer = make()
    tokenizer.padding_side = padding
    texts = ["ab", "a b, c d; e f g h i j k l m n", " " * 3 + "naïve 釉 " * 5]
    whole = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    ends = tokenizer.num_special_tokens_to_add()
    cuts = noted(tokenizer, texts, padding="max_length")
    assert cuts == [None, *(TextCut(10 - ends, count) for count in whole[1:])]


def test_a_tokenizer_in_python_counts_once_more() -> None:
    from transformers import ByT5Tokenizer

    assert noted(ByT5Tokenizer(), ["x" * 9, "x" * 10]) == [None, TextCut(9, 10)]


def test_watching_changes_nothing_of_a_tokenizer() -> None:
    plain, watched = clip_tokenizer(), clip_tokenizer()
    kind = type(watched)
    Reading({"tokenizer": watched})
    text = ["x" * 200, "abc"]
    options: dict[str, Any] = {"truncation": True, "padding": "max_length", "max_length": 20}
    assert isinstance(watched, kind)
    assert type(watched).__name__ == kind.__name__
    assert watched(text, **options)["input_ids"] == plain(text, **options)["input_ids"]
    assert type(clip_tokenizer()) is kind


def test_what_is_not_noted_is_not_held() -> None:
    tokenizer = clip_tokenizer()
    reading = Reading({"tokenizer": tokenizer})
    tokenizer(["x" * 200], truncation=True, max_length=20)
    assert reading.cuts(["x" * 200]) == [None]


def test_whoever_reads_all_has_the_last_word() -> None:
    assert most([TextCut(1, 10), None]) is None
    assert most([TextCut(75, 300), TextCut(250, 310)]) == TextCut(250, 310)
    assert most([]) is None


def outputs_differ(first: Output, second: Output) -> bool:
    """Whether any picture does."""
    return any((a != b).any() for a, b in zip(first.images, second.images, strict=True))


def test_what_is_not_read_changes_nothing(make_engine: MakeEngine) -> None:
    """The promise behind the word: the picture is that of the part which is read."""
    engine, case = make_engine("sdxl", warmup=(), max_batch=1), BY_NAME["sdxl"]
    first, second, third = (
        engine.submit(replace(asked(case, name, 1), prompt=prompt)).result(300)
        for name, prompt in (
            ("a", "x" * 75 + "a" * 9),
            ("b", "x" * 75 + "b" * 30),
            ("c", "x" * 74 + "a"),
        )
    )
    assert outputs_differ(first, third)
    assert not outputs_differ(first, second)
