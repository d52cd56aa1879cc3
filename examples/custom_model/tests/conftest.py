"""A tiny Doodle with random weights, first as its authors would publish it, then as Saggar loads it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from diffusers import AutoencoderKL
from plain import Plain
from safetensors.torch import save_file
from saggar.engine import Engine, EngineConfig
from saggar_doodle.model import Config, Denoiser, TextEncoder

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Config()
TALE = [
    "a red fox runs over the snow, quick and bright",
    "blue kilns: a vase, a jug, seven boxes of glazed clay",
]


def published(name: str) -> tuple[str, str]:
    """The file and the name under which the authors keep a tensor of model.py."""
    for ours, theirs in {"first.": "x_embedder.", "time.": "t_embedder.", "last.": "final."}.items():
        if name.startswith(ours):
            return "ends", name.replace(ours, theirs, 1)
    theirs = "model." + name.replace("blocks.", "layers.").replace(".feed.", ".mlp.").replace(
        ".modulation.", ".ada."
    )
    for word in ("query", "key", "value", "out"):
        theirs = theirs.replace(f".attention.{word}.", f".attn.{word[0]}_proj.")
    return "blocks", theirs


def randomised(module: torch.nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.normal_(generator=generator)
            value.div_(value[0].numel() ** 0.5) if value.ndim > 1 else value.mul_(0.1)
            value.add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return module.eval()


@pytest.fixture(scope="session")
def plain() -> Plain:
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=1.5,
    )
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TALE * 9),
        model_writer=model,
        vocab_size=CONFIG.vocabulary,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return Plain(
        randomised(TextEncoder(CONFIG), 1), randomised(Denoiser(CONFIG), 2), randomised(vae, 3), tokenizer
    )


@pytest.fixture(scope="session")
def sources(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of three projects."""
    folder = tmp_path_factory.mktemp("sources")
    files: dict[str, dict[str, torch.Tensor]] = {"blocks": {"training.step": torch.tensor(9000)}, "ends": {}}
    for name, value in plain.denoiser.state_dict().items():
        file, theirs = published(name)
        files[file][theirs] = value
    words = {"token.": "wte.", "place.": "wpe.", "norm.": "ln_f.", "out.": "proj."}
    files["text"] = {
        words[(first := name.partition(".")[0] + ".")] + name.removeprefix(first): value
        for name, value in plain.text.state_dict().items()
    }
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "doodle.json").write_text(json.dumps(asdict(CONFIG)))
    (folder / "tokenizer.model").write_bytes(plain.tokenizer.serialized_model_proto())
    plain.vae.save_pretrained(folder / "pipeline" / "vae")
    return folder


def assemble(sources: Path, folder: Path, *options: str, **files: Path) -> subprocess.CompletedProcess[str]:
    places: Mapping[str, Path] = {
        **{name: sources / f"{name}.safetensors" for name in ("blocks", "ends", "text")},
        "tokenizer": sources / "tokenizer.model",
        "config": sources / "doodle.json",
        "vae": sources / "pipeline",
        "to": folder,
    } | files
    words = [word for name, path in places.items() for word in (f"--{name}", str(path))]
    command = [sys.executable, str(ROOT / "assemble.py"), *words, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="session")
def folder(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Saggar loads."""
    folder = tmp_path_factory.mktemp("assembled") / "doodle"
    done = assemble(sources, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Engine]]:
    """Engines over the folder, in this process unless another executor is named."""
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        config = {
            "model": str(folder),
            "executor": "local",
            "pixels": "float32",
            "max_batch": 6,
            "threads": 1,
        }
        engines.append(Engine.make(EngineConfig(**(config | settings))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
