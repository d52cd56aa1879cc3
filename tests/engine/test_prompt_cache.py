"""Encoded prompts: kept by bytes, the least recently used go first, and nobody's changes reach another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from saggar.engine import EngineConfig, Request, Unsupported
from saggar.engine.cache.prompt import PromptCache

from tests.engine.conftest import MakeEngine
from tests.engine.support import settled


def entry(value: float = 0.0, numbers: int = 4) -> dict[str, torch.Tensor]:
    return {"text": torch.full((1, numbers), value)}


def test_a_hit_is_a_copy_and_so_is_what_is_kept() -> None:
    cache = PromptCache(1000)
    given = entry(1.0)
    cache.put("a", "", given)
    given["text"].zero_()
    first = cache.get("a", "")
    assert first is not None
    assert first.encoded["text"].tolist() == [[1.0] * 4]
    first.encoded["text"].zero_()
    second = cache.get("a", "")
    assert second is not None
    assert second.encoded["text"].tolist() == [[1.0] * 4]


def test_a_variant_is_another_entry() -> None:
    cache = PromptCache(1000)
    cache.put("a", "64", entry(1.0))
    assert cache.get("a", "128") is None
    assert cache.get("a", "64") is not None


def test_the_least_recently_used_goes_first_and_bytes_are_counted() -> None:
    cache = PromptCache(32)
    cache.put("a", "", entry())
    cache.put("b", "", entry())
    assert cache.bytes == 32
    assert cache.get("a", "") is not None
    cache.put("c", "", entry())
    assert (cache.get("b", ""), cache.bytes, len(cache)) == (None, 32, 2)
    assert cache.get("a", "") is not None


def test_a_view_does_not_keep_its_batch_and_what_is_too_large_is_not_kept() -> None:
    batch = torch.zeros(100, 4)
    cache = PromptCache(16)
    cache.put("a", "", {"text": batch[:1]})
    kept = cache.get("a", "")
    assert kept is not None
    assert kept.encoded["text"].untyped_storage().nbytes() == 16
    cache.put("b", "", entry(numbers=5))
    assert (cache.get("b", ""), cache.bytes) == (None, 16)


def test_none_is_kept_without_memory() -> None:
    cache = PromptCache(0)
    cache.put("a", "", entry())
    assert (cache.get("a", ""), len(cache)) == (None, 0)


def test_less_than_no_memory_is_refused() -> None:
    with pytest.raises(Unsupported, match="prompt_cache_mb"):
        EngineConfig(model="saggar/emoji", prompt_cache_mb=-1)


@pytest.mark.parametrize("megabytes", [256, 0])
def test_equal_texts_are_encoded_once_in_a_batch_and_once_in_a_run(
    make_engine: MakeEngine, megabytes: int
) -> None:
    engine = make_engine("sd3", prompt_cache_mb=megabytes, max_batch=4, warmup=())

    def run(name: str, length: int) -> list[Any]:
        params: dict[str, Any] = {"num_inference_steps": 2, "max_sequence_length": length}
        requests = [
            Request(f"{name}{i}", "fox", negative_prompt="bad", seed=i, params=params) for i in range(3)
        ]
        return engine.generate(requests)

    first, again = run("a", 32), run("b", 32)
    settled(engine)
    stats = engine.stats()
    hits = 2 if megabytes else 0
    assert (stats["prompts.encoded"], stats["prompts.cached"]) == (4 - hits, hits)
    for one, other in zip(first, again, strict=True):
        assert (one.images[0] == other.images[0]).all()
    run("c", 64)
    settled(engine)
    assert engine.stats()["prompts.encoded"] == 6 - hits
