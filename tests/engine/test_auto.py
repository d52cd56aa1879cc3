"""`auto`: kernels chosen by trying them on the shapes of the warm-up; the clock is the test's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saggar.engine import Unsupported
from saggar.engine.attention.auto import Auto, Calibration, Shape, calibrate, nearest
from saggar.engine.attention.base import Backend, Need
from saggar.engine.attention.select import kernel
from saggar.engine.choices import Choice, checked
from saggar.engine.config import WarmUp
from saggar.engine.errors import LoadError

from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME
from tests.engine.support import floats

NEED = Need("cpu", torch.float32, 8)
LONG, SHORT = Shape(1, 64, 64, 2, 8, False), Shape(1, 4, 4, 2, 8, False)


def made() -> Auto:
    return Auto.beside(kernel("torch_sdpa")(), NEED)


def attended(auto: Auto, shape: Shape) -> torch.Tensor:
    q = torch.randn(shape.batch, shape.queries, shape.heads, shape.width)
    k = torch.randn(shape.batch, shape.keys, shape.heads, shape.width)
    return auto.run(q, k, k)


def flex_is_fast_for_long(backend: Backend, shape: Shape) -> float:
    return 1.0 if (backend.name == "flex") == (shape == LONG) else 2.0


def test_each_shape_gets_its_fastest_kernel() -> None:
    auto = made()
    assert set(auto.candidates) == {"torch_sdpa", "flex"}  # what is installed here, exact, and serves a CPU
    for shape in (LONG, SHORT, LONG):
        attended(auto, shape)
    table = calibrate([auto], {}, flex_is_fast_for_long)
    assert table == {str(LONG): "flex", str(SHORT): "torch_sdpa"}


def test_what_is_known_is_not_tried_again() -> None:
    auto = made()
    attended(auto, LONG)

    def never(backend: Backend, shape: Shape) -> float:
        raise AssertionError(f"{backend.name} was tried for {shape}")

    known = {str(LONG): "flex", "1x9x9x2x8": "torch_sdpa"}  # and what another model's start has left there
    assert calibrate([auto], known, never) == {str(LONG): "flex"}


def test_a_kernel_that_fails_where_it_says_it_serves_is_named() -> None:
    auto = made()
    attended(auto, SHORT)

    def broken(backend: Backend, shape: Shape) -> float:
        if backend.name == "flex":
            raise NotImplementedError("heads of 8\nand more")
        return 1.0

    with pytest.raises(
        Unsupported, match="attention auto: flex failed on 1x4x4x2x8: heads of 8; name the kernels"
    ):
        calibrate([auto], {}, broken)


def test_the_tables_kernel_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, ran = made(), []
    for name, backend in auto.candidates.items():
        usual = backend.attend
        monkeypatch.setattr(backend, "attend", lambda *given, n=name, f=usual: (ran.append(n), f(*given))[1])
    auto.serve_by({str(LONG): "flex", str(SHORT): "torch_sdpa"})
    attended(auto, LONG)
    attended(auto, SHORT)
    attended(auto, Shape(1, 60, 60, 2, 8, False))  # never seen: as the nearest
    assert ran == ["flex", "torch_sdpa", "flex"]
    assert auto.label.startswith("auto(flex,torch_sdpa)#")


def test_the_nearest_has_heads_as_wide_and_a_mask_alike() -> None:
    table = {"1x64x64x2x8": "flex", "1x64x64x2x8m": "torch_sdpa"}
    assert nearest(Shape(2, 9, 9, 2, 8, True), table) == "torch_sdpa"
    assert nearest(Shape(2, 9, 9, 2, 16, False), table) is None
    assert Shape.read(str(LONG)) == LONG


def test_without_a_warm_up_there_is_nothing_to_choose_by(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="auto is calibrated on the warm-up's requests"):
        make_engine(
            "flux", attention={"default": "auto"}, warmup=(), calibration_file=str(tmp_path / "a.json")
        )


def test_auto_has_no_options() -> None:
    with pytest.raises(Unsupported, match="attention self: auto has no options, not version"):
        checked({"self": Choice("auto", {"version": 3})})


def test_approximations_are_no_candidates() -> None:
    assert kernel("torch_sdpa").approximates is False
    from saggar.engine.attention.backends.sage import Sage

    assert Sage.approximates


def test_files_keep_each_machines_table(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "attention.json"
    one, other = Calibration(path, "one"), Calibration(path, "other")
    assert one.read() == {}
    one.add({str(LONG): "flex"})
    other.add({str(SHORT): "torch_sdpa"})
    assert (one.read(), other.read()) == ({str(LONG): "flex"}, {str(SHORT): "torch_sdpa"})
    one.add({"1x9x9x2x8": "torch_sdpa"})
    assert one.read() == {str(LONG): "flex", "1x9x9x2x8": "torch_sdpa"}
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_table_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        Calibration(tmp_path / "table.json", "one").add({})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"one": 3}', '{"one": {"x": "flex"}}'])
def test_a_file_of_something_else_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "attention.json"
    path.write_text(text)
    with pytest.raises(LoadError, match="holds no calibration of attention: delete it"):
        Calibration(path, "one").read()


@pytest.mark.procs
def test_an_engine_calibrates_once_and_names_what_it_chose(
    make_engine: MakeEngine, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two ranks share each sequence: rank 0 tells the other, and the next start takes the file's word."""
    file = tmp_path / "attention.json"
    settings: dict[str, Any] = {
        "attention": {"default": "auto"}, "calibration_file": str(file), "pixels": "float32", "max_batch": 6,
        "warmup": (WarmUp(params={"num_inference_steps": 1}),),
    }  # fmt: skip
    requests = BY_NAME["flux"].requests()
    expected = make_engine("flux", pixels="float32", max_batch=6, warmup=()).generate(requests)
    together = make_engine("flux", executor="multiproc", ulysses=2, **settings)
    for output, one in zip(together.generate(requests), expected, strict=True):
        np.testing.assert_allclose(floats(output), floats(one), atol=1e-4, rtol=0)
    (written,) = json.loads(file.read_text()).values()
    assert written
    before = file.stat().st_mtime_ns
    again = make_engine("flux", executor="multiproc", ulysses=2, **settings)
    assert again.info.numerics == together.info.numerics
    assert "=auto(" in together.info.numerics or "/auto(" in together.info.numerics
    assert file.stat().st_mtime_ns == before
