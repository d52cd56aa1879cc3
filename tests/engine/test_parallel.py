"""Engines whose ranks share work give the pictures of one process: within 1e-4, in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from saggar.engine import Engine, Output, Request, Unsupported, open_family
from saggar.engine.attention.site import Streams
from saggar.engine.config import EngineConfig
from saggar.engine.degrees import Degrees
from saggar.engine.executor import rank
from saggar.engine.models.registry import families
from saggar.engine.models.sdxl import SDXL
from saggar.engine.parallel.attach import Attachment
from saggar.engine.parallel.hooks import apply_plan
from saggar.engine.parallel.mesh import Axis, Mesh
from saggar.engine.parallel.plans import Gather, SequencePlan, Split
from saggar.engine.platform.base import Placement

from tests.engine import forked
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


@dataclass(frozen=True)
class Expected:
    """Of one process: outputs of each of a case's batches, and of its requests one after the other."""

    batches: list[list[Output]]
    singly: list[Output]


@pytest.fixture(scope="module")
def expected() -> dict[str, Expected]:
    """By case, what was made of it already: the same for all ways."""
    return {}


def of_one_process(alone: Engine, case: Case) -> Expected:
    """Made anew."""
    return Expected(
        [alone.generate(requests) for requests in batches(case)],
        [alone.submit(request).result(60) for request in case.requests()],
    )


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks with the libraries in them."""
    monkeypatch.setattr(rank, "subprocess", forked.INSTEAD)


@pytest.mark.procs
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("name", "way"), matrix())
def test_ranks_that_share_work_give_the_pictures_of_one_process(
    start: Callable[..., Engine], expected: dict[str, Expected], name: str, way: Way
) -> None:
    case = BY_NAME[name]
    if name not in expected:
        expected[name] = of_one_process(start(case.tiny), case)
    together = start(case.tiny, way)
    for requests, outputs in zip(batches(case), expected[name].batches, strict=True):
        compare(requests, together.generate(requests), outputs)
    joined_midway(together, case, expected[name].singly)
    assert together.health().ok


def joined_midway(together: Engine, case: Case, singly: list[Output]) -> None:
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
    compare([a, b, c], outputs, singly)


SMALLEST = {
    **dict.fromkeys(
        ("flux", "sd3", "qwen-image", "pixart", "flux2", "longcat-image", "ovis-image", "z-image"), 8
    ),
    "wan-a14b": 16,
    "hunyuan-video15": 16,
    "sdxl": 8,
    "sana": 32,
    "ltx2": 32,
}
"""Pixels a side of the least picture that a tiny model makes, mostly one token; LTX-2's is smaller in its sound too."""
FOUR = (Way(ulysses=4), Way(ring=4), Way(ulysses=2, ring=2))


@pytest.mark.procs
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            name, way, id=f"{name}-{way}", marks=() if (name, way) == ("flux", FOUR[2]) else pytest.mark.soak
        )
        for name in SMALLEST
        for way in FOUR
    ],
)
def test_a_picture_of_fewer_tokens_than_ranks_is_that_of_one_process(
    start: Callable[..., Engine], name: str, way: Way
) -> None:
    case, side = BY_NAME[name], SMALLEST[name]
    least = {"height": side, "width": side, "num_inference_steps": 2}
    if case.task == "t2v":
        least["num_frames"] = 1
    requests = [case.request("least", "a fox", seed=3, params=least), case.request("other", "", params=least)]
    compare(requests, start(name, way).generate(requests), start(name).generate(requests))


def with_three_heads(folder: Path, target: Path) -> str:
    """A copy of the tiny FLUX.1 whose transformer has three heads, of random weights again."""
    from diffusers import FluxTransformer2DModel

    shutil.copytree(folder, target)
    usual = FluxTransformer2DModel.load_config(folder / "transformer")
    torch.manual_seed(3)
    FluxTransformer2DModel.from_config({**usual, "num_attention_heads": 3}).save_pretrained(
        target / "transformer"
    )
    return str(target)


@pytest.mark.procs
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=str(way), marks=pytest.mark.soak if way.ranks > 2 else ())
        for way in (Way(ulysses=2), Way(ulysses=2, ring=2), Way(ulysses=2, cfg=2), Way(ulysses=4))
    ],
)
def test_three_heads_on_two_ranks_give_the_pictures_of_one_process(
    start: Callable[..., Engine], models: Callable[[str], Path], tmp_path: Path, way: Way
) -> None:
    folder = with_three_heads(models("flux"), tmp_path / "three")
    alone, together = start("flux", model=folder), start("flux", way, model=folder)
    for requests in batches(BY_NAME["flux"]):
        compare(requests, together.generate(requests), alone.generate(requests))


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


def test_a_unet_whose_projections_are_convolutions_shares_no_sequence(
    make_engine: MakeEngine, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models("sdxl"), tmp_path / "sdxl"))
    path = folder / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_linear_projection": False}))
    with pytest.raises(
        Unsupported, match="sdxl has no sequence plan and cannot share a sequence over ring=2"
    ):
        make_engine(model=str(folder), executor="multiproc", ring=2)


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
    ours = {name: one for name, one in families().items() if one.__module__.startswith("saggar.engine.")}
    served = {name: family for name, family in ours.items() if not name.startswith("Noop")}
    tasks = {name for family in served.values() for name in getattr(family, "pipelines", {}).values()}
    assert {case.class_name for case in BY_NAME.values()} == served.keys() | tasks, (
        "a task without a row here"
    )
    assert {(name, str(way)) for name, way in MATRIX} == {(name, str(w)) for name in BY_NAME for w in WAYS}
    assert set(PAIRS) <= set(MATRIX)
