"""The folder: assembling it, what is known of it without its weights, and what is said of one that is damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assemble
from safetensors.torch import load_file, save_file
from saggar.engine import Engine, InvalidRequest, LoadError, Request, open_family
from saggar.engine.plugin import needed

Start = Callable[..., Engine]


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())
    change(content)
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        path.write_text(json.dumps(content))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """To be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "doodle"))


def a_weight_less(folder: Path) -> None:
    changed(folder / "doodle.safetensors", lambda weights: weights.pop("model.layers.1.attn.k_proj.bias"))


def a_weight_more(folder: Path) -> None:
    changed(
        folder / "parts/text.safetensors", lambda weights: weights.update({"lm_head.weight": torch.zeros(2)})
    )


def a_weight_twice(folder: Path) -> None:
    changed(
        folder / "parts/ends.safetensors",
        lambda weights: weights.update({"blocks.0.feed.0.bias": torch.zeros(64)}),
    )


def another_shape(folder: Path) -> None:
    changed(folder / "doodle.json", lambda config: config.update(longest=65))


def another_version(folder: Path) -> None:
    changed(folder / "doodle.json", lambda config: config.update(experts=8))


def no_number(folder: Path) -> None:
    changed(folder / "doodle.json", lambda config: config.update(width="wide"))


def cut_off(folder: Path) -> None:
    path = folder / "doodle.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def a_pickle(folder: Path) -> None:
    torch.save({"a": torch.zeros(2)}, folder / "doodle.safetensors")


def a_missing_file(folder: Path) -> None:
    (folder / "parts/text.safetensors").unlink()


def a_file_outside(folder: Path) -> None:
    changed(folder / "model_index.json", lambda index: index["weights"].update(text="../text.safetensors"))


def no_weights(folder: Path) -> None:
    changed(folder / "model_index.json", lambda index: index.pop("weights"))


def no_vae(folder: Path) -> None:
    (folder / "vae/diffusion_pytorch_model.safetensors").unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"no such model")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (a_weight_less, r"parts/ends\.safetensors: .* blocks\.1\.attention\.key\.bias is missing"),
        (a_weight_more, r"parts/text\.safetensors: .* lm_head\.weight is unknown"),
        (
            a_weight_twice,
            r"parts/ends\.safetensors: .* blocks\.0\.feed\.0\.bias is in \S+doodle\.safetensors too",
        ),
        (another_shape, r"parts/text\.safetensors: .* wpe\.weight is 64×32 and should be 65×32"),
        (another_version, "its configuration is of another version: .*experts"),
        (no_number, "the configuration is not one of whole numbers"),
        (cut_off, r"doodle\.safetensors: \d+ bytes, and it should have \d+"),
        (a_pickle, r"doodle\.safetensors: a pickle under another name, which is never loaded"),
        (a_missing_file, r"parts/text\.safetensors is missing, and model_index\.json names it"),
        (a_file_outside, r"\.\./text\.safetensors is not inside the folder"),
        (no_weights, r"model_index\.json: weights is missing"),
        (no_vae, "vae: there are no weights in safetensors"),
        (no_tokenizer, r"tokenizer\.model: not a model of SentencePiece"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(
    start: Start, copy: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(copy)
    with pytest.raises(LoadError, match=says) as caught:
        start(model=str(copy))
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named_with_how_to_install_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        LoadError, match="Doodle's tokenizer needs the package sentencepiece: pip install 'sentencepiece'"
    ):
        start()


def test_weights_take_the_dtype_that_is_asked_for(start: Start, folder: Path) -> None:
    output = (
        start(dtype="bfloat16", pixels="uint8").submit(Request("a", "a fox", params={"steps": 2})).result(60)
    )
    assert output.images[0].shape == (64, 64, 3)
    assert output.numerics.startswith("bfloat16/")


def test_what_it_takes_is_known_without_weights_and_without_torch(folder: Path) -> None:
    code = (
        "import sys; from saggar.engine import Request, open_family;"
        f"family = open_family({str(folder)!r}); family.batch_key(family.validate(Request('a', 'x')));"
        "print([name for name in ('torch', 'diffusers', 'sentencepiece') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("params", "field"),
    [({"height": 60}, "params.height"), ({"steps": 0}, "params.steps"), ({"mood": 1}, "params.mood")],
)
def test_bad_parameters_are_refused(folder: Path, params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_family(str(folder)).validate(Request("a", "x", params=params))
    assert caught.value.field == field


def saggar(*words: str) -> str:
    command = [sys.executable, "-m", "saggar.workers.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_saggar_knows_where_it_comes_from(folder: Path) -> None:
    found = json.loads(saggar("models", "inspect", str(folder), "--json"))
    assert found["capabilities"]["package"] == "saggar-doodle 0.1.0"
    assert found["capabilities"]["step_batches"]
    assert {part["name"] for part in found["components"]} == {
        "vae", "doodle.safetensors", "parts/ends.safetensors", "parts/text.safetensors"
    }  # fmt: skip
    assert "From plug-ins: doodle (saggar-doodle 0.1.0)" in saggar("models")


def test_a_worker_that_fetches_the_folder_takes_all_of_it(folder: Path) -> None:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    index = json.loads((folder / "model_index.json").read_text())
    assert set(needed(index, [*names, "training.bin", "other.safetensors"])) == names


def test_assembling(sources: Path, folder: Path, tmp_path: Path) -> None:
    linked = assemble(sources, tmp_path / "linked", "--link")
    assert linked.stdout == f"wrote {tmp_path / 'linked'}\n"
    assert os.path.samefile(tmp_path / "linked" / "doodle.safetensors", sources / "blocks.safetensors")
    assert (
        open_family(str(tmp_path / "linked")).checkpoint.revision
        == open_family(str(folder)).checkpoint.revision
    )
    again = assemble(sources, tmp_path / "linked")
    assert (again.returncode, again.stderr) == (1, f"{tmp_path / 'linked'} exists: name a new folder\n")
    lost = assemble(sources, tmp_path / "lost", text=tmp_path / "nothing.safetensors")
    assert (lost.returncode, lost.stderr) == (1, f"no such file: {tmp_path / 'nothing.safetensors'}\n")
