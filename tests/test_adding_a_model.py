"""docs/adding-a-model.md, followed in a fresh copy of the project: its files are written, its commands are run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from saggar.engine import plugin, plugin_torch
from saggar.engine.models import common

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
FAMILY, PLUGIN = TEXT.split("\n## A plug-in\n")
FILES = dict(re.findall(r"^`([\w/.]+)`:\n\n```python\n(.*?)^```", FAMILY, re.MULTILINE | re.DOTALL))
CASE = re.findall(
    r"^One more in the list `CASES` of .*?:\n\n```python\n(.*?)^```", FAMILY, re.MULTILINE | re.DOTALL
)
COMMANDS = re.findall(r"^\.venv/bin/.*$", FAMILY, re.MULTILINE)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the code and its tests, with the environment of this one."""
    clutter = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for name in ("engine", "jobs", "storage", "workers", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=clutter)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "paths" / "saggar").mkdir(parents=True)
    for name in ("engine", "jobs", "storage", "workers"):
        (tmp_path / "paths" / "saggar" / name).symlink_to(tmp_path / name)
    return tmp_path


def run(checkout: Path, command: str) -> str:
    done = subprocess.run(
        shlex.split(command),
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout / "paths"), str(checkout)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.procs
@pytest.mark.timeout(900)
def test_who_follows_the_page_has_a_family_that_is_right(checkout: Path) -> None:
    assert list(FILES) == ["engine/models/tiny/auraflow.py", "engine/models/auraflow.py"]
    where = run(checkout, ".venv/bin/python -c 'import saggar.engine; print(saggar.engine.__file__)'")
    assert where.startswith(str(checkout))
    tiny, family = FILES
    (checkout / tiny).write_text(FILES[tiny])
    make, inspect, parity, contracts = COMMANDS
    run(checkout, make)
    assert "called as a whole" in run(checkout, inspect)
    (checkout / family).write_text(FILES[family])
    assert "AuraFlowPipeline, served by the family auraflow: AuraFlow" in run(checkout, inspect)
    cases = checkout / "tests" / "engine" / "families.py"
    cases.write_text(cases.read_text().replace("CASES = [\n", f"CASES = [\n    {CASE[0].strip()},\n", 1))
    assert int(re.findall(r"(\d+) passed", run(checkout, parity))[0]) >= 30
    run(checkout, contracts)
    run(checkout, f".venv/bin/ruff check {tiny} {family}")
    run(checkout, f".venv/bin/ruff format --check {tiny} {family}")


def test_what_the_page_names_is_there() -> None:
    for name in re.findall(r"`(\w+)\(", FAMILY.split("| in `common` | does |")[1].split("### 4.")[0]):
        assert hasattr(common, name), name
    for name in re.findall(r"`(\w+)\(", PLUGIN.split("In `load`:")[1].split("\n\n", 2)[1]):
        assert hasattr(plugin, name) or hasattr(plugin_torch, name), name
    for path in re.findall(r"`((?:engine|tests|examples)/[\w/.]+)`", TEXT):
        assert (ROOT / path).exists() or path in FILES or "NAME" in path, path
    for link in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link


def test_the_index_on_the_page_is_the_examples(tmp_path: Path) -> None:
    shown = json.loads(re.findall(r"```json\n(.*?)```", PLUGIN, re.DOTALL)[0])
    code = "import assemble, json; print(json.dumps(assemble.index(1.5)))"
    example = ROOT / "examples" / "custom_model"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=example, env=os.environ, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == shown
