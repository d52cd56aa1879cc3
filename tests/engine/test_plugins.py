"""Families of other packages: the example installs from its own folder and passes, and broken plug-ins say so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saggar.engine import LoadError, Unsupported, families, open_family
from saggar.engine.models import packages
from saggar.engine.models.noop import Noop
from saggar.engine.models.packages import import_plugins, need, package_of
from saggar.engine.models.registry import serves
from saggar.engine.models.source.own_module import load_own
from saggar.engine.models.tiny import make_tiny
from saggar.engine.platform.base import Placement

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_model"


@pytest.mark.procs
@pytest.mark.timeout(900)
def test_the_example_installs_from_its_own_folder_and_passes(tmp_path: Path) -> None:
    clutter = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*")
    source = shutil.copytree(EXAMPLE, tmp_path / "source", ignore=clutter)
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    # torch brings a setuptools that builds it without a network; an older one needs a newer from the registry.
    builds = int(version("setuptools").partition(".")[0]) >= 77
    offline = ["--no-index", "--no-build-isolation"] if builds else []
    flags = [*offline, "--no-deps", "--target", str(target)]
    installed = subprocess.run([*pip, *flags, str(source)], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(source)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout[-5000:] + tested.stderr[-2000:]
    assert " passed" in tested.stdout


def plug_in(folder: Path, code: str) -> None:
    """An installed package `brush`, version 2.0, whose module is `brush`."""
    (folder / "brush.py").write_text(code)
    (folder / "brush-2.0.dist-info").mkdir()
    (folder / "brush-2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: brush\nVersion: 2.0\n"
    )
    (folder / "brush-2.0.dist-info" / "entry_points.txt").write_text("[saggar.models]\nbrush = brush\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "brush", raising=False)
    return tmp_path


def test_a_plug_in_that_cannot_be_imported_is_named(site: Path) -> None:
    plug_in(site, "import bristle")
    says = "the plug-in brush of brush 2.0 cannot be imported: ModuleNotFoundError: .*'bristle'.*pip uninstall brush"
    with pytest.raises(Unsupported, match=says):
        import_plugins()


def test_a_pipeline_is_served_by_one_family(site: Path) -> None:
    before = families()["NoopPipeline"]
    plug_in(
        site,
        "from saggar.engine.plugin import serves\n"
        "from saggar.engine.models.noop import Noop\n"
        "@serves('NoopPipeline')\nclass Brush(Noop): name = 'brush'\n",
    )
    with pytest.raises(
        Unsupported, match=r"NoopPipeline is served by saggar\S+\.Noop, and brush\.Brush wants it too"
    ):
        import_plugins()
    assert families()["NoopPipeline"] is before
    assert serves("NoopPipeline")(Noop) is before  # a module that is imported anew


def test_a_family_knows_its_package(site: Path) -> None:
    plug_in(site, "from saggar.engine.models.noop import Noop\nclass Brush(Noop): name = 'brush'\n")
    import_plugins()
    assert package_of(sys.modules["brush"].Brush) == "brush 2.0"
    assert package_of(Noop) == ""
    assert packages.GROUP == "saggar.models"


def test_what_is_needed_and_absent_is_an_error_that_helps() -> None:
    assert need("json", "json", "all") is sys.modules["json"]
    with pytest.raises(
        LoadError, match=r"a brush needs the package bristle>=2: pip install 'bristle>=2' \(Mod"
    ):
        need("bristle", "bristle>=2", "a brush")


class Small(torch.nn.Module):
    """One float, one count, and a table that may be computed."""

    def __init__(self, saved: bool) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 3, bias=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.arange(2.0), persistent=saved)


def test_a_module_of_ones_own_is_filled_on_the_device_in_the_wanted_dtype(tmp_path: Path) -> None:
    values = {"line.weight": torch.rand(3, 2), "count": torch.tensor(7), "table": torch.rand(2)}
    save_file(values, path := tmp_path / "w.safetensors")
    half = Placement("uint8", "", torch.device("cpu"), torch.bfloat16)
    module = load_own(lambda: Small(True), {path: lambda name: name}, half)
    assert torch.equal(module.line.weight, values["line.weight"].bfloat16())
    assert module.get_buffer("count").item() == 7
    assert module.get_buffer("table").dtype == torch.bfloat16
    assert not module.training
    assert not module.line.weight.requires_grad
    with pytest.raises(LoadError, match="table is computed, not loaded: register it as persistent"):
        load_own(lambda: Small(False), {path: lambda name: None if name == "table" else name}, half)
    with pytest.raises(LoadError, match=r"line\.weight is 3×2 and should be a single value"):
        load_own(lambda: Small(True), {path: lambda name: "table" if name == "table" else "count"}, half)


def test_whole_numbers_are_no_weights_of_a_module_of_ones_own(tmp_path: Path) -> None:
    values = {
        "line.weight": torch.ones(3, 2).to(torch.int8),
        "count": torch.tensor(7),
        "table": torch.rand(2),
    }
    save_file(values, path := tmp_path / "w.safetensors")
    half = Placement("uint8", "", torch.device("cpu"), torch.bfloat16)
    with pytest.raises(LoadError, match=r"line\.weight is I8 and should be floating"):
        load_own(lambda: Small(True), {path: lambda name: name}, half)


def test_files_that_an_index_names_lie_inside_its_folder(tmp_path: Path) -> None:
    checkpoint = open_family(str(make_tiny("noop", tmp_path / "noop"))).checkpoint
    assert checkpoint.read("model_index.json") == checkpoint.index
    for name, says in {
        "": "'' is not the name of a file",
        "../noop/model_index.json": "is not inside the folder",
        "/etc/hostname": "is not inside the folder",
        "w.safetensors": r"noop: w\.safetensors is missing, and model_index\.json names it",
    }.items():
        with pytest.raises(LoadError, match=says):
            checkpoint.file(name)
    with pytest.raises(LoadError, match="None is not the name of a file"):
        checkpoint.read(None)
