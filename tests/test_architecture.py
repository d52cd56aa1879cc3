"""The arrows between the packages, and between the engine's floors, as the imports really are."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jobs", "engine", "storage", "workers")
OURS = {f"saggar.{name}" for name in PACKAGES}
FORBIDDEN = {
    "jobs": {
        "torch",
        "diffusers",
        "transformers",
        "boto3",
        "saggar.engine",
        "saggar.workers",
        "saggar.storage",
    },
    "engine": {"celery", "kombu", "redis", "boto3", "saggar.jobs", "saggar.workers", "saggar.storage"},
    "storage": {
        "torch",
        "diffusers",
        "celery",
        "kombu",
        "redis",
        "saggar.jobs",
        "saggar.engine",
        "saggar.workers",
    },
    "workers": set[str](),
}
FLOORS = [
    {
        "request",
        "media",
        "config",
        "errors",
        "checks",
        "choices",
        "degrees",
        "params",
        "batch_key",
        "platform",
    },
    {"sched", "parallel.mesh"},
    {"attention"},
    {"parallel", "cache", "memory"},
    {"models"},
    {"worker"},
    {"executor"},
    {"handle", "live", "book", "hub", "loop", "progress", "engine", "plugin", "plugin_torch", ""},
]


def sources(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "assets" not in path.parts)


def imports(path: Path, with_types: bool = True) -> Iterator[tuple[int, str]]:
    """Line and full name of every import of a file, those inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not with_types and node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.lineno, str(node.module)
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


def within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_what_it_must_not_know(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources(package)
        for line, name in imports(path, with_types=False)
        if any(within(name, forbidden) for forbidden in FORBIDDEN[package])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_typing_alone_crosses_no_package_either(package: str) -> None:
    others = OURS - {f"saggar.{package}"} if package != "workers" else set()
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources(package)
        for line, name in imports(path)
        if any(within(name, other) for other in others)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_family_imports_no_other_family() -> None:
    """What two share is a file of its own."""
    models = ROOT / "engine" / "models"
    served = {path for path in models.glob("*.py") if "\n@serves(" in path.read_text(encoding="utf-8")}
    names = {f"saggar.engine.models.{path.stem}" for path in served}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(served)
        for line, name in imports(path)
        if name in names
    ]
    assert len(served) > 10
    assert not wrong, "\n".join(wrong)


def test_boto3_is_named_by_the_store_of_s3_alone() -> None:
    ours = {ROOT / "storage" / name for name in ("s3.py", "s3_errors.py")}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for package in PACKAGES
        for path in sources(package)
        for line, name in imports(path, with_types=False)
        if (within(name, "boto3") or within(name, "botocore")) and path not in ours
    ]
    assert not wrong, "\n".join(wrong)


def test_requests_are_made_of_jobs_in_one_file() -> None:
    """`workers/translate.py` alone knows both vocabularies: elsewhere in workers nobody builds a request."""
    makers = {
        path.name
        for path in sources("workers")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Request"
    }
    assert makers <= {"translate.py"}


def floor(module: str) -> int:
    """The floor of a module of the engine; those that stand in a folder have the folder's."""
    head = module.partition(".")[0]
    for index, names in enumerate(FLOORS):
        if module in names or head in names:
            return index
    raise AssertionError(f"engine/{module} stands on no floor: give it one")


def test_the_engine_imports_only_from_floors_below_or_its_own() -> None:
    wrong = []
    for path in sources("engine"):
        own = (
            ".".join(path.relative_to(ROOT / "engine").with_suffix("").parts)
            .removesuffix("__init__")
            .rstrip(".")
        )
        for line, name in imports(path):
            inner = name.removeprefix("saggar.engine").removeprefix(".")
            if not within(name, "saggar.engine") or own == "" or inner == "":
                continue
            if (ROOT / "engine" / Path(*inner.split("."))).with_suffix(".py").exists() and floor(
                inner
            ) > floor(own):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


def test_a_family_imports_no_sibling() -> None:
    families = family_files()
    assert {"flux", "sd3", "sdxl", "pixart", "sana", "noop"} <= families.keys()
    wrong = []
    for path in (ROOT / "engine" / "models").glob("*.py"):
        for line, name in imports(path):
            sibling = name.removeprefix("saggar.engine.models.").split(".")[0]
            if within(name, "saggar.engine.models") and sibling in families and sibling != path.stem:
                wrong.append(f"{path.name}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


def test_a_family_is_one_thin_file() -> None:
    lines = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in family_files().items()
    }
    assert {name: count for name, count in lines.items() if not 60 <= count <= 300} == {}
    assert median(lines.values()) <= 220  # many do several tasks


def family_files() -> dict[str, Path]:
    """The files of engine/models that serve a pipeline's class, by module."""
    found = {path.stem: path for path in (ROOT / "engine" / "models").glob("*.py")}
    return {name: path for name, path in found.items() if "\n@serves(" in path.read_text(encoding="utf-8")}


def test_torch_cuda_is_named_in_the_platforms_files_alone() -> None:
    wrong = []
    for folder in (*PACKAGES, "benchmarks", "examples", "scripts"):
        for path in sources(folder):
            if path.parent == ROOT / "engine" / "platform" and path.name.startswith("cuda"):
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            named = [
                node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_cuda(node)
            ]
            named += [line for line, name in imports(path) if within(name, "torch.cuda")]
            wrong += [f"{path.relative_to(ROOT)}:{line}" for line in named]
    assert not wrong, "\n".join(wrong)


def _is_cuda(node: ast.Attribute) -> bool:
    return node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch"


@pytest.mark.parametrize(
    "part", ["request", "media", "config", "choices", "degrees", "errors", "params", "batch_key", "sched"]
)
def test_the_lower_floors_never_import_torch(part: str) -> None:
    paths = [
        path
        for path in sources("engine")
        if path.relative_to(ROOT / "engine").with_suffix("").parts[0] == part
    ]
    assert paths
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        for line, name in imports(path, with_types=False)
        if within(name, "torch") or within(name, "diffusers") or within(name, "numpy")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("saggar.jobs", ["torch", "numpy", "celery", "kombu", "saggar.engine"]),
        ("saggar.engine", ["torch", "diffusers", "celery", "redis"]),
        ("saggar.engine.plugin", ["torch", "diffusers", "celery", "redis"]),
        ("saggar.storage", ["torch", "boto3", "celery", "redis"]),
        ("saggar.workers.cli", ["torch", "celery", "boto3"]),
    ],
)
def test_what_an_import_brings_along(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_published(package: str) -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert (ROOT / package / "py.typed").exists()
    assert "py.typed" in setup["package-data"][f"saggar.{package}"]
