"""Engines whose ranks share work give the pictures of one process: within 1e-4, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saggar.engine import Engine, Output, Request, Unsupported, open_family
from saggar.engine.attention.site import Streams
from saggar.engine.config import EngineConfig
from saggar.engine.degrees import Degrees
from saggar.engine.models.sdxl import SDXL
from saggar.engine.parallel.attach import Attachment
from saggar.engine.parallel.hooks import apply_plan
from saggar.engine.parallel.mesh import Axis, Mesh
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.platform.base import Placement

from tests.engine.case import Case
from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME
from tests.engine.media_made import arrays, assert_same
from tests.engine.parallel_cases import WAYS, Way, batches
from tests.engine.support import at_step, eventually

ATOL = 1e-4
PAIRS = [
    ("flux-kontext-edit", Way(ulysses=3)),  # 2 heads and odd lengths on 3 ranks, and a reference
    ("qwen-image-edit-plus", Way(ring=2)),  # a mask, and references
    ("longcat-image-edit", Way(ulysses=2)),  # a plan of our own with a reference
    ("sd3", Way(ulysses=2, ring=2)),
    ("z-image", Way(ulysses=2, cfg=2)),
    ("sdxl", Way(ulysses=3)),  # levels of unlike length, and whole convolutions
    ("ltx2", Way(ulysses=2)),  # a cut video and a whole sound
    ("wan-5b-i2v", Way(ulysses=2)),  # a timestep a token
    ("hunyuan-video15", Way(ring=2)),  # texts of unlike length
]
MATRIX = [(name, way) for name in sorted(BY_NAME) for way in WAYS]


def matrix() -> list[Any]:
    """Pairs run in CI, all others once for a release."""
    return [
        pytest.param(name, way, id=f"{name}-{way}", marks=() if (name, way) in PAIRS else pytest.mark.soak)
        for name, way in [*PAIRS, *(pair for pair in MATRIX if pair not in PAIRS)]
    ]


@pytest.fixture
def start(make_engine: MakeEngine) -> Callable[..., Engine]:
    """An engine of one process, or one whose ranks share work; both with step batches and floats."""

    def make(name: str, way: Way | None = None, **settings: Any) -> Engine:
        own = {"mode": "step_batch", "pixels": "float32", "max_batch": 6, "warmup": ()}
        spread = {"executor": "multiproc", **way.settings} if way else {}
        return make_engine(name, **own | spread | settings)

    return make


def compare(requests: list[Request], outputs: list[Output], expected: list[Output]) -> None:
    for request, output, one in zip(requests, outputs, expected, strict=True):
        assert max(float(array.std()) for array in arrays(one.media)) > 1e-3, request.id
        assert_same(output.media, one.media, ATOL, request.id)


@pytest.mark.procs
@pytest.mark.parametrize(("name", "way"), matrix())
def test_ranks_that_share_work_give_the_pictures_of_one_process(
    start: Callable[..., Engine], name: str, way: Way
) -> None:
    case = BY_NAME[name]
    alone, together = start(case.tiny), start(case.tiny, way)
    for requests in batches(case):
        compare(requests, together.generate(requests), alone.generate(requests))
    joined_midway(alone, together, case)
    assert together.health().ok


def joined_midway(alone: Engine, together: Engine, case: Case) -> None:
    """Two requests come while a third has made two steps."""
    a, b, c = case.requests()
    later: list[Any] = []
    first = together.submit(
        b, on_event=at_step("b", 2, lambda: later.extend([together.submit(a), together.submit(c)]))
    )
    first.wait()
    eventually(lambda: len(later) == 2)
    outputs = [later[0].result(60), first.result(60), later[1].result(60)]
    assert outputs[0].batch_id == outputs[1].batch_id
    compare([a, b, c], outputs, [alone.submit(request).result(60) for request in (a, b, c)])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ranks": 3, "ulysses": 2}, ["ranks=3", "ulysses=2, which makes 2", "ulysses=3", "ring=3", "cfg=3"]),
        ({"ranks": 4, "ring": 3}, ["ulysses=2 × cfg=2"]),
        ({"cfg": 0}, ["cfg must be at least 1, not 0"]),
        ({"cfg": 2, "executor": "local"}, ["the local executor has one rank, not 2", "executor=local"]),
    ],
)
def test_a_world_that_does_not_fit_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Unsupported) as caught:
        EngineConfig(model="x", **settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("noop", {"cfg": 2}, "noop: its steps cannot be shared over cfg=2"),
        ("sd3", {"ranks": 2}, "set ulysses, ring or cfg so that they make 2"),
    ],
)
def test_a_family_that_cannot_be_spread_so_is_refused_before_any_process_starts(
    make_engine: MakeEngine, family: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unsupported, match=words) as caught:
        make_engine(family, executor="multiproc", **settings)
    assert "What goes together:" in str(caught.value)


def test_a_family_without_a_plan_shares_no_sequence(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SDXL, "sequence_plan", None)
    words = "sdxl has no sequence plan and cannot share a sequence over ulysses=2: cfg can"
    with pytest.raises(Unsupported, match=words) as caught:
        make_engine("sdxl", executor="multiproc", ulysses=2)
    assert "What goes together:" in str(caught.value)


def test_ranks_are_as_many_as_the_degrees_make() -> None:
    assert EngineConfig(model="x").ranks == 1
    assert EngineConfig(model="x", ulysses=2, ring=3, cfg=2).ranks == 12


class Block(torch.nn.Module):
    """Takes x, and nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Denoiser(torch.nn.Module):
    """One block, no attention, no plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block()])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (SequencePlan({}, splits={"layers.0": {"x": Split(1)}}), "Denoiser has no module 'layers.0'"),
        (SequencePlan({}, splits={"blocks.*": {"y": Split(1)}}), "blocks.0 takes no y"),
        (SequencePlan({}, gathers={"out": Gather(1)}), "Denoiser has no module 'out'"),
        (SequencePlan({}, wholes={"blocks.*": {"y": Gather(1)}}), "blocks.0 takes no y"),
        (SequencePlan({}, theirs=True), "Denoiser has none of its own"),
    ],
)
def test_a_plan_that_does_not_apply_is_refused(plan: SequencePlan, words: str) -> None:
    axis = Axis("sp", 2, 0)
    with pytest.raises(Unsupported, match=f"the sequence plan does not apply: {words}"):
        apply_plan(Denoiser(), plan.of(Denoiser()), axis, Streams())


def test_a_plan_that_forgets_an_attention_is_refused(models: Callable[[str], Path]) -> None:
    family = open_family(str(models("sd3")))
    family.load(Placement("float32", "float32/cpu", torch.device("cpu"), torch.float32))
    mesh = Mesh.of(Degrees(ulysses=2), 0, lambda ranks: None)
    attachment = Attachment({}, ("torch_sdpa",), mesh, SequencePlan({"blocks.*.attn": ("image",)}), {})
    with pytest.raises(Unsupported, match=r"it says nothing of the attention transformer_blocks\.0\.attn"):
        attachment.put_on(family.denoisers()["transformer"])


def test_the_long_matrix_has_every_family_and_every_way() -> None:
    assert {name for name, _ in MATRIX} == set(BY_NAME)
    assert {(name, str(way)) for name, way in MATRIX} == {(name, str(w)) for name in BY_NAME for w in WAYS}
    assert set(PAIRS) <= set(MATRIX)
