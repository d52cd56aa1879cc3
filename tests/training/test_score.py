"""The embedded model draws what it is asked for, and the score notices when it does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from diffusers import FluxPipeline

from training import references, score
from training.references import References
from training.score import Draw

QUICK = Draw(steps=8, batch=24)


@pytest.fixture(scope="module")
def known() -> References:
    return references.read(score.MODEL / "references.zip")


@pytest.fixture(scope="module")
def pipeline() -> FluxPipeline:
    return score.load()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make these tests five times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_pictures_are_nearest_to_what_was_asked_for(pipeline: FluxPipeline, known: References) -> None:
    found = score.score_plain(pipeline, known, count=24, how=QUICK)
    assert found["top1"] >= 0.90  # 200 of 200 when it was released
    assert found["style"] >= 0.90


def test_backgrounds_have_the_asked_colour(pipeline: FluxPipeline, known: References) -> None:
    found = score.score_background(pipeline, known, count=11, how=QUICK)
    assert found["border"] >= 0.90


def test_random_weights_score_nothing(known: References) -> None:
    pipeline = score.load()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in pipeline.transformer.parameters():
            parameter.normal_(std=0.05, generator=generator)
    found = score.score_plain(pipeline, known, count=8, how=Draw(steps=4, batch=8))
    assert found["top1"] == 0.0


def test_a_reference_is_nearest_to_itself(known: References) -> None:
    rows = torch.arange(0, len(known.pixels_RCHW), 97)
    assert torch.equal(score.nearest(known.on()[rows], known.on()), rows)


def test_border_colour_is_read_from_the_border_alone() -> None:
    picture = torch.ones(1, 3, 64, 64)
    picture[:, :] = torch.tensor([33, 110, 240]).view(3, 1, 1) / 255
    picture[:, :, 8:56, 8:56] = 0
    assert score.border_colours(picture) == ["blue"]
