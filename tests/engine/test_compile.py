"""Compiled blocks give the pictures of plain ones; what cannot be compiled or recorded stops the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from saggar.engine import Unsupported, open_family
from saggar.engine.memory.compile import blocks, compile_blocks
from saggar.engine.platform.base import Placement
from saggar.engine.worker.extension import Extension

from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME
from tests.engine.support import floats


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_blocks_give_the_same_pictures(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    """The engine asks for the default compiler, which takes minutes on a CPU: CI looks at what is traced."""
    by_default = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward: by_default(forward, backend=compiler))
    requests = BY_NAME["sd3"].requests()  # a transformer of which diffusers does not say what repeats
    settings = {"pixels": "float32", "max_batch": 6, "warmup": ()}
    usual, quick = make_engine("sd3", **settings), make_engine("sd3", compile=True, **settings)
    for one, other in zip(quick.generate(requests), usual.generate(requests), strict=True):
        np.testing.assert_allclose(floats(one), floats(other), atol=1e-4, rtol=0)
    assert quick.info.numerics == "float32/cpu/torch_sdpa/compiled"


class Compiler(Extension):
    """What a test asks of a rank about its compiler."""

    def graphs(self) -> int:
        """How many it has compiled."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])


@pytest.mark.soak
def test_ranks_that_share_a_step_compile_no_more_than_one_alone(make_engine: MakeEngine) -> None:
    """A plan's hooks change what goes into some blocks; compiled with them, those would be blocks of their own."""
    settings = {"pixels": "float32", "max_batch": 6, "warmup": (), "executor": "multiproc",
                "worker_extension": f"{__name__}.Compiler"}  # fmt: skip
    request = BY_NAME["qwen-image"].requests()[0]
    expected = make_engine("qwen-image", **settings).submit(request).result(60)
    counted = []
    for words in ({}, {"ulysses": 2}):
        engine = make_engine("qwen-image", compile=True, **settings, **words)
        output = engine.submit(request).result(240)
        np.testing.assert_allclose(floats(output), floats(expected), atol=1e-4, rtol=0)
        counted += [engine.call("graphs")[0]]
    assert counted[0] == counted[1] > 0


@pytest.mark.parametrize("name", sorted({case.tiny for case in BY_NAME.values()}))
def test_every_denoiser_has_blocks(models: Callable[[str], Path], name: str) -> None:
    family = open_family(str(models(name)))
    family.load(Placement("float32", "float32/cpu", torch.device("cpu"), torch.float32))
    for denoiser in family.denoisers().values():
        assert blocks(denoiser)


def test_a_denoiser_without_blocks_is_refused() -> None:
    with pytest.raises(Unsupported, match="compile: Linear has no repeated blocks"):
        compile_blocks(torch.nn.Linear(1, 1))


def test_there_are_no_graphs_on_a_cpu(make_engine: MakeEngine) -> None:
    with pytest.raises(Unsupported, match=r"cuda_graphs: this rank runs on the CPU.*device=cuda"):
        make_engine("flux", cuda_graphs=True)


def test_a_forward_that_reads_from_the_gpu_is_not_recorded(make_engine: MakeEngine) -> None:
    words = "cuda_graphs: hunyuan-video15's forward reads from the GPU what it decides by"
    with pytest.raises(Unsupported, match=words):
        make_engine("hunyuan-video15", executor="multiproc", cuda_graphs=True)


@pytest.mark.parametrize("wish", ["compile", "cuda_graphs", "vae_slicing", "vae_tiling"])
def test_a_family_without_torch_takes_none_of_it(make_engine: MakeEngine, wish: str) -> None:
    with pytest.raises(Unsupported, match=f"{wish} says nothing to noop, a family without torch"):
        make_engine("noop", **{wish: True})
