"""What may share a forward does, and what must not has keys that differ.

What would go wrong in silence is forced into one forward, to show that it does: the keys are there for a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from saggar.engine import Request

from tests.engine.conftest import MakeEngine
from tests.engine.media_made import distance
from tests.engine.plain import ATOL, assert_equal, plain_pipeline
from tests.engine.support import settled

Models = Callable[[str], Path]
POSITIONS_OF_THE_FIRST_ROW = ["qwen-image", "flux2", "flux2-klein"]
"""Their transformers read the positions of all rows from the first: an equal number of tokens is not enough."""


def sized(name: str, height: int, width: int) -> Request:
    params = {"height": height, "width": width, "num_inference_steps": 3}
    return Request(name, f"a {name} kiln", seed=len(name), params=params)


@pytest.mark.parametrize("family", POSITIONS_OF_THE_FIRST_ROW)
def test_another_aspect_ratio_of_as_many_tokens_would_go_wrong_in_silence_and_has_its_own_key(
    make_engine: MakeEngine, models: Models, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(family, pixels="float32", max_batch=2, warmup=())
    plain = plain_pipeline(models(family), family)
    requests = [sized("square", 64, 64), sized("wide", 32, 128)]
    assert engine.batch_key(requests[0]) != engine.batch_key(requests[1])
    outputs = engine.generate(requests)
    assert [output.batch_size for output in outputs] == [1, 1]
    for request, output in zip(requests, outputs, strict=True):
        assert_equal(output, plain(request))

    monkeypatch.setattr(engine._family, "batch_fields", ("max_sequence_length",))
    first, second = engine.generate(requests)
    assert [output.batch_size for output in (first, second)] == [2, 2]
    assert_equal(first, plain(requests[0]))
    assert distance(second.media, plain(requests[1])) > 100 * ATOL


def test_texts_of_unlike_length_share_a_forward_under_a_mask(make_engine: MakeEngine, models: Models) -> None:
    engine = make_engine("qwen-image", pixels="float32", max_batch=3, warmup=())
    texts = {"": 512, "fox": 512, "a very long tale of clay and of fire": 20}
    requests = [
        Request(f"t{n}", text, seed=n, params={"num_inference_steps": 2, "max_sequence_length": length})
        for n, (text, length) in enumerate(texts.items())
    ]
    outputs = engine.generate(requests)
    settled(engine)
    assert (engine.stats()["forwards.cond"], engine.stats()["rows.cond"]) == (2, 6)
    plain = plain_pipeline(models("qwen-image"), "qwen-image")
    for request, output in zip(requests, outputs, strict=True):
        assert_equal(output, plain(request))


def test_sizes_share_the_forwards_of_z_image_whatever_fits_into_one(
    make_engine: MakeEngine, models: Models
) -> None:
    engine = make_engine("z-image", pixels="float32", max_batch=3, warmup=())
    plain = plain_pipeline(models("z-image"), "z-image")
    requests = [sized("small", 32, 32), sized("square", 64, 64), sized("wide", 40, 104)]
    assert len({engine.batch_key(request) for request in requests}) == 1
    limits = engine._loops[0].executor._runner.limits  # type: ignore[attr-defined]
    forwards = 0
    for rows in (3, 2, 1):
        if rows < 3:  # as after an out-of-memory: the forwards of one step have other largest sizes
            limits.halve(engine.batch_key(requests[0]), 2 * rows)
        outputs = engine.generate(requests)
        settled(engine)
        forwards += 3 * -(-3 // rows)
        assert engine.stats()["forwards.cond"] == engine.stats()["forwards.uncond"] == forwards
        for request, output in zip(requests, outputs, strict=True):
            assert output.batch_size == 3
            assert output.images[0].shape == (request.params["height"], request.params["width"], 3)
            assert_equal(output, plain(request))


def test_truncated_guidance_pays_for_no_forward_that_it_does_not_use(make_engine: MakeEngine) -> None:
    engine = make_engine("z-image", max_batch=2, warmup=())
    params = {"num_inference_steps": 8, "cfg_truncation": 0.3}
    engine.generate([Request("a", "fox", params=params), Request("b", "owl", params={"guidance_scale": 0.0})])
    settled(engine)
    assert engine.stats()["rows.cond"] == 8 + 50
    assert 0 < engine.stats()["rows.uncond"] < 8


def test_a_batch_of_unlike_sizes_costs_as_much_as_its_longest_row(make_engine: MakeEngine) -> None:
    small, large = sized("small", 32, 32), sized("large", 128, 128)
    family = make_engine("z-image", warmup=())._family
    costs = {request.id: family.cost(family.validate(request)) for request in (small, large)}
    assert costs == {"small": 2 * (32 + 64), "large": 2 * (256 + 64)}
    for limit, together in ((2 * costs["large"], True), (2 * costs["large"] - 1, False)):
        engine = make_engine("z-image", max_batch=2, max_cost=limit, warmup=())
        outputs = engine.generate([small, large])
        assert [output.batch_size for output in outputs] == ([2, 2] if together else [1, 1])
