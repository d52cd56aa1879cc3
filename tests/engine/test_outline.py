"""A model that lies elsewhere is inspected by its outline: the same answer as of the whole, for a few bytes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from saggar.engine.errors import LoadError
from saggar.engine.models.inspection import inspect_model
from saggar.engine.models.source.outline import write_outline

from tests.support.hub import Hub

INSPECT = """
import json, sys
from saggar.engine.errors import EngineError
from saggar.engine.models.inspection import inspect_model
try:
    print(json.dumps(inspect_model(sys.argv[1]).to_dict()))
except EngineError as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""
SAMPLE = 1 << 16


def inspected(model: str, home: Path, **environ: str) -> Any:
    """By a process of its own: huggingface_hub reads its environment once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", INSPECT, model],
        env=kept | {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Large weights, some with a header longer than a sample, and small ones; none that could be loaded."""
    folder = tmp_path / "repository"
    parts = ("unet", "vae", "text_encoder", "tokenizer")
    index: dict[str, object] = {name: ["diffusers", "Part"] for name in parts}
    index["tokenizer"] = ["transformers", "SomeTokenizer"]
    for name in parts:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps({"of": name}))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "NoopPipeline", **index}))
    dice = np.random.default_rng(0)
    many = {
        f"blocks.{number}.a_long_name_of_a_tensor": dice.random(200, np.float32) for number in range(2000)
    }
    save_file({"w": dice.random((1000, 700), np.float32)}, folder / "unet" / "model.safetensors")
    save_file(many, folder / "vae" / "model.safetensors")
    save_file({"w": np.zeros(100, np.float16)}, folder / "text_encoder" / "model.safetensors")
    (folder / "unet" / "model.bin").write_bytes(b"a pickle")
    return folder


def without_place(told: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in told.items() if name not in ("folder", "model")}


def test_of_a_hub_id_the_weights_are_not_fetched(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (repository / "unet" / "model.bin").unlink()
    whole = without_place(inspect_model(str(repository)).to_dict())
    with Hub({"org/paint": repository}) as hub:
        told = inspected("org/paint", home, HF_ENDPOINT=hub.url)
        assert told["folder"] is None
        assert without_place(told) == whole, "revision, components and their memory as of the whole"
        assert sorted(hub.served) == [
            "model_index.json", *(f"{name}/config.json" for name in ("text_encoder", "tokenizer", "unet", "vae"))
        ]  # fmt: skip
        asked = [size for name, size in hub.parts if name == "unet/model.safetensors"]
        assert asked == [SAMPLE, SAMPLE], "its header with the start, and its end"
        assert len([name for name, _ in hub.parts if name == "vae/model.safetensors"]) == 3
        assert {path.suffix for path in home.rglob("snapshots/**/*") if path.is_file()} == {".json"}
        assert not list(tmp_path.glob("saggar-outline-*"))
        # What is cached whole is looked at there.
        command = "from saggar.engine.models.registry import resolve; print(resolve('org/paint'))"
        environ = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        subprocess.run([sys.executable, "-c", command], env=environ, check=True, timeout=120)
        hub.parts.clear()
        told = inspected("org/paint", home, HF_ENDPOINT=hub.url)
        assert told["folder"].endswith(hub.commit("org/paint"))
        assert (hub.parts, without_place(told)) == ([], whole)
    assert inspected("org/paint", home, HF_HUB_OFFLINE="1") == told


def test_damage_is_seen_in_an_outline_too(repository: Path, tmp_path: Path) -> None:
    weights = repository / "unet" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    (repository / "vae" / "model.safetensors").write_bytes(b"\xff" * (2 << 20))
    with Hub({"org/paint": repository}) as hub:
        told = inspected("org/paint", tmp_path / "home", HF_ENDPOINT=hub.url)
    troubles = {part["name"]: part["trouble"] for part in told["components"]}
    assert "bytes, and it should have" in troubles["unet"]
    assert "cut off in its header" in troubles["vae"]
    assert troubles["vae"].startswith("org/paint/vae/model.safetensors: "), "not where its outline lay"
    assert troubles["text_encoder"] is None


def test_a_hub_without_ranges_is_one_clear_error(repository: Path, tmp_path: Path) -> None:
    with Hub({"org/paint": repository}) as hub:
        hub.ranges = False
        told = inspected("org/paint", tmp_path / "home", HF_ENDPOINT=hub.url)
    assert told == "Unsupported: org/paint: this hub gives no parts of files (status 200)"


@pytest.mark.parametrize("name", ["../x.json", "/x.json", "a/../../x.json", "a\0.json"])
def test_no_name_leads_out_of_an_outline(name: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="is not the name of a file in a model's folder"):
        write_outline(tmp_path / "in", {"fine.json": 2, name: 2}, lambda *_: b"{}")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    def fail(*_: object) -> bytes:
        raise OSError("the line is cut")

    with pytest.raises(OSError, match="the line is cut"):
        write_outline(tmp_path, {"a.json": 2}, fail)
