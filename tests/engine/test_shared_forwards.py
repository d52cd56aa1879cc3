"""What may share a forward does, and what must not has keys that differ.

What would go wrong in silence is forced into one forward, to show that it does: the keys are there for a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from saggar.engine import Request

from tests.engine.conftest import MakeEngine
from tests.engine.support import floats, settled
from tests.engine.test_parity import ATOL, _plain, assert_equal

Models = Callable[[str], Path]
POSITIONS_OF_THE_FIRST_ROW = ["qwen-image"]
"""Their transformers read the positions of all rows from the first: an equal number of tokens is not enough."""


def sized(name: str, height: int, width: int) -> Request:
    params = {"height": height, "width": width, "num_inference_steps": 3}
    return Request(name, f"a {name} kiln", seed=len(name), params=params)


@pytest.mark.parametrize("family", POSITIONS_OF_THE_FIRST_ROW)
def test_another_aspect_ratio_of_as_many_tokens_would_go_wrong_in_silence_and_has_its_own_key(
    make_engine: MakeEngine, models: Models, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(family, pixels="float32", max_batch=2, warmup=())
    plain = _plain(models(family), family)
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
    assert np.abs(floats(second) - plain(requests[1])).max() > 100 * ATOL


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
    plain = _plain(models("qwen-image"), "qwen-image")
    for request, output in zip(requests, outputs, strict=True):
        assert_equal(output, plain(request))
