"""On real GPUs: what the CPU's tests cannot show. `pytest -m gpu`, and with two of them `pytest -m gpu2`.

Both sides of a comparison run on the same card, so that its kernels cancel out where numbers must agree.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from saggar.engine import Request, open_family
from saggar.engine.attention.base import Need
from saggar.engine.attention.select import backends, kernel
from saggar.engine.config import WarmUp
from saggar.engine.errors import Unsupported
from saggar.engine.worker.extension import Extension

from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME
from tests.engine.media_made import assert_same, mean_distance, spread
from tests.engine.parallel_cases import Way, batches
from tests.engine.plain import plain_pipeline
from tests.engine.support import at_step, floats

FAMILIES = sorted(name for name, case in BY_NAME.items() if not case.once)
SHARED = [Way(ulysses=2), Way(ring=2), Way(cfg=2)]
PAIRS = [
    (name, way)
    for name in FAMILIES
    for way in SHARED
    if way == SHARED[0] or not BY_NAME[name].brief or BY_NAME[name].task == "t2v"
]
"""Those that run another one's code share its sequences alone."""
GPU = {"device": "cuda", "executor": "multiproc", "mode": "step_batch", "warmup": ()}
FLOAT32 = GPU | {"dtype": "float32", "pixels": "float32", "max_batch": 6}


class OnCard(Extension):
    """What a test asks of a rank about its GPU."""

    def leave(self, free_bytes: int) -> None:
        """Only so much more memory than is held now may be taken."""
        card = torch.cuda.current_device()
        total = torch.cuda.get_device_properties(card).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + free_bytes) / total, card)

    def card(self) -> int:
        """The current GPU's number."""
        return torch.cuda.current_device()


EXTENSION = f"{__name__}.OnCard"


@pytest.mark.gpu
def test_the_engines_own_process_never_touches_the_gpu(models: Callable[[str], Path]) -> None:
    code = (
        "import sys\nfrom saggar.engine import Engine, EngineConfig, Request\n"
        "with Engine.make(EngineConfig(model=sys.argv[1], device='cuda')) as engine:\n"
        "    assert engine.submit(Request('a', 'x', params={'num_inference_steps': 2})).result(120).images\n"
        "assert 'torch' not in sys.modules or not sys.modules['torch'].cuda.is_initialized()\n"
    )
    command = [sys.executable, "-c", f"if __name__ == '__main__':\n{_indented(code)}", str(models("flux"))]
    subprocess.run(command, check=True, timeout=240)


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_unlike_rows_is_each_row_alone_and_what_plain_diffusers_makes(
    make_engine: MakeEngine, models: Callable[[str], Path], name: str
) -> None:
    requests = BY_NAME[name].requests()
    engine = make_engine(BY_NAME[name].tiny, **FLOAT32)
    device = "cpu" if BY_NAME[name].noise_of_the_device else "cuda"
    plain = plain_pipeline(models(BY_NAME[name].tiny), name, device)
    for request, output in zip(requests, engine.generate(requests), strict=True):
        alone, expected = engine.submit(request).result(120), plain(request)
        assert spread(output.media) > 1e-3
        assert_same(output.media, alone.media, 1e-3, request.id)
        assert_same(alone.media, expected, 1e-3, request.id)
    assert engine.info.numerics.startswith("float32/cuda/")


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", backends())
def test_a_kernel_attends_as_float32_does(name: str, masked: bool) -> None:
    """Its error, its log-sum-exp where it gives one, and with a mask of keys; what is asked stays as it was."""
    try:
        backend = kernel(name)()
    except Unsupported as missing:
        assert "is not installed" in str(missing)
        return
    q, k, v = (torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    kept = torch.arange(256, device="cuda") < torch.tensor([[200], [256]], device="cuda")
    mask = kept[:, None, None] if masked else None
    need = Need("cuda", torch.bfloat16, 64, "keys" if masked else "none")
    exact, total = kernel("torch_sdpa")().run_lse(q.float(), k.float(), v.float(), mask)
    if backend.traits.refusal(need) is not None:
        with pytest.raises(Unsupported):
            backend.run(q, k, v, mask)
        return
    before = [x.clone() for x in (q, k, v)]
    assert _error(backend.run(q, k, v, mask), exact) < 2e-2
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))
    if backend.traits.masked_lse if masked else backend.traits.lse:
        out, lse = backend.run_lse(q, k, v, mask)
        assert _error(out, exact) < 2e-2
        torch.testing.assert_close(lse, total, atol=2e-2, rtol=0)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


@pytest.mark.gpu
def test_auto_tries_the_kernels_on_the_card_and_the_next_start_knows(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Shapes large enough for all kernels of the card; the file has the card's name."""
    params = {"num_inference_steps": 1, "height": 256, "width": 256}
    file = tmp_path / "attention.json"
    settings = FLOAT32 | {
        "dtype": "bfloat16",
        "attention": {"default": "auto"},
        "warmup": (WarmUp(params),),
        "calibration_file": str(file),
    }
    first = make_engine("sd3", **settings)
    found = json.loads(file.read_text())
    assert any("NVIDIA" in key for key in found), found.keys()
    assert "auto(" in first.info.numerics
    request = Request("a", "x", seed=1, params=params)
    second = make_engine("sd3", **settings)
    assert json.loads(file.read_text()) == found
    assert second.info.numerics == first.info.numerics
    assert_same(second.submit(request).result(120).media, first.submit(request).result(120).media, 0.0)


@pytest.mark.gpu
def test_memory_that_runs_out_halves_the_batch_and_nothing_is_lost(make_engine: MakeEngine) -> None:
    engine = make_engine("sdxl", **FLOAT32 | {"max_batch": 16, "worker_extension": EXTENSION})
    params = {"num_inference_steps": 2, "height": 1024, "width": 1024}
    requests = [Request(f"r{i}", "x", seed=i, params=params) for i in range(16)]
    alone = engine.submit(requests[0]).result(120)
    engine.call("leave", 700 << 20)
    outputs = engine.generate(requests)
    assert engine.stats()["memory.halved"] > 0
    assert np.abs(floats(outputs[0]) - floats(alone)).mean() < 1e-3


@pytest.mark.gpu
def test_a_killed_rank_comes_back_and_its_requests_are_made(make_engine: MakeEngine) -> None:
    engine = make_engine("flux", **GPU)
    request = Request("long", "x", params={"num_inference_steps": 200})
    kill = at_step("long", 20, lambda: os.kill(engine.health().pids[0], signal.SIGKILL))
    assert engine.submit(request, on_event=kill).result(240).steps == 200
    assert engine.health().ok


@pytest.mark.gpu2
@pytest.mark.parametrize(("name", "way"), PAIRS, ids=str)
def test_two_gpus_give_the_pictures_of_one(make_engine: MakeEngine, name: str, way: Way) -> None:
    alone, together = (
        make_engine(BY_NAME[name].tiny, **FLOAT32),
        make_engine(BY_NAME[name].tiny, **FLOAT32 | way.settings),
    )
    for requests in batches(BY_NAME[name]):
        for output, one in zip(together.generate(requests), alone.generate(requests), strict=True):
            assert_same(output.media, one.media, 2e-3)


@pytest.mark.gpu2
@pytest.mark.parametrize("way", SHARED, ids=str)
@pytest.mark.parametrize("name", ["flux", "qwen-image", "sdxl", "wan"])
def test_two_gpus_record_compile_and_share_tiles(make_engine: MakeEngine, name: str, way: Way) -> None:
    wide = {"height": 128, "width": 128, "num_inference_steps": 3}
    requests = [replace(one, params={**one.params, **wide}) for one in BY_NAME[name].requests()]
    usual = FLOAT32 | {"vae_tiling": True}
    alone = make_engine(BY_NAME[name].tiny, **usual)
    together = make_engine(
        BY_NAME[name].tiny, **usual | way.settings | {"cuda_graphs": True, "compile": True}
    )
    expected = alone.generate(requests)
    for _ in range(2):
        for output, one in zip(together.generate(requests), expected, strict=True):
            assert mean_distance(output.media, one.media) < 5e-3


@pytest.mark.gpu2
def test_replicas_have_a_gpu_each(make_engine: MakeEngine) -> None:
    engine = make_engine("flux", **GPU | {"replicas": 2, "worker_extension": EXTENSION})
    assert sorted(map(str, engine.call("card"))) == ["0", "1"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_and_compiled_forwards_give_the_same_pictures(
    make_engine: MakeEngine, models: Callable[[str], Path], name: str
) -> None:
    """Requests come and go, so that graphs of several shapes are played again in turns."""
    requests, recorded = BY_NAME[name].requests(), open_family(str(models(BY_NAME[name].tiny))).graphs
    usual, quick = (
        make_engine(BY_NAME[name].tiny, **FLOAT32),
        make_engine(BY_NAME[name].tiny, **FLOAT32 | {"cuda_graphs": recorded, "compile": True}),
    )
    expected = usual.generate(requests)
    for _ in range(2):
        for output, one in zip(quick.generate(requests), expected, strict=True):
            assert mean_distance(output.media, one.media) < 5e-3
    assert quick.info.numerics.endswith("/compiled")
