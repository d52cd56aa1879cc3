"""Where a model comes from: folders, built-in names, ids of a hub; and which of its files are fetched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from saggar.engine import EngineConfig, Unsupported, open_family
from saggar.engine.engine import Engine
from saggar.engine.models.registry import resolve
from saggar.engine.models.source.files import choose_weights, needed
from saggar.engine.models.source.huggingface import split_id

from tests.support.hub import Hub

CLOSED_PORT = "http://127.0.0.1:1"
LOOK_UP = """
import sys
from saggar.engine.errors import EngineError
from saggar.engine.models.registry import open_family
try:
    print(open_family(sys.argv[1]).checkpoint.folder)
except EngineError as error:
    print(type(error).__name__, error)
heavy = [name for name in ("torch", "diffusers") if name in sys.modules]
assert not heavy, heavy
"""


def look_up(model: str, home: Path, **environ: str) -> str:
    """What a process of its own finds: huggingface_hub reads its environment once, when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP, model],
        env=_environ(home, **environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _environ(home: Path, **environ: str) -> dict[str, str]:
    import os

    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return kept | {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | environ


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """As repositories of models look: pickles, variants and other frameworks' weights among what is needed."""
    folder = tmp_path / "repository"
    index = {
        "_class_name": "NoopPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "safety_checker": [None, None],
    }
    write(folder, "model_index.json", json.dumps(index))
    for name in (
        "README.md", "setup.py", "flux1-dev.safetensors", "v1-5.ckpt", "demo.json",
        "unet/config.json", "unet/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.bin",
        "unet/diffusion_pytorch_model.fp16.safetensors", "unet/model.onnx",
        "vae/config.json", "vae/diffusion_pytorch_model.fp16.safetensors",
        "tokenizer/vocab.json", "tokenizer/merges.txt", "tokenizer/tokenizer.pkl", "tokenizer/code.py",
        "safety_checker/config.json", "safety_checker/model.safetensors", "other/config.json",
    ):  # fmt: skip
        write(folder, name, f"{{}} of {name}")
    return folder


NEEDED = [
    "model_index.json",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.fp16.safetensors",
]


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_only_what_a_pipeline_is_loaded_from_is_needed(repository: Path) -> None:
    index = json.loads((repository / "model_index.json").read_text())
    assert needed(index, names(repository)) == NEEDED
    root = {"_class_name": "Mine", "_weights": {"model": "flux1-*.safetensors", "old": "v1-5.ckpt"}}
    assert needed(root, names(repository)) == ["flux1-dev.safetensors", "model_index.json"]


@pytest.mark.parametrize(
    ("found", "variant", "chosen"),
    [
        (["model.safetensors", "model.fp16.safetensors"], None, ["model.safetensors"]),
        (["model.fp16.safetensors", "pytorch_model.bin"], "fp16", ["model.fp16.safetensors"]),
        (["model.fp16.safetensors", "model.bf16.safetensors"], "bf16", ["model.bf16.safetensors"]),
        (["model.fp16-00001-of-00002.safetensors"], "fp16", ["model.fp16-00001-of-00002.safetensors"]),
        (["model-00001-of-00002.fp16.safetensors"], "fp16", ["model-00001-of-00002.fp16.safetensors"]),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"],
            None,
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (["diffusion_pytorch_model.non_ema.safetensors", "diffusion_pytorch_model.fp16.safetensors"], "fp16",
         ["diffusion_pytorch_model.fp16.safetensors"]),
        (["own.safetensors"], None, ["own.safetensors"]),
        (["model.bin", "model.safetensors.index.json"], None, []),
    ],
)  # fmt: skip
def test_a_variant_is_taken_only_where_there_is_nothing_else(
    found: list[str], variant: str | None, chosen: list[str]
) -> None:
    assert choose_weights(found) == (variant, chosen)


def test_the_form_of_a_hub_id() -> None:
    assert split_id("black-forest-labs/FLUX.1-dev") == ("black-forest-labs/FLUX.1-dev", None)
    assert split_id("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    for model in ("name", "a/b/c", "../models", "/models/flux", "org/name@", "s3://bucket/x", "./flux"):
        assert split_id(model) is None
    for revision in ("..", ".", "../../x", "refs/../../x", "/etc", "a//b"):
        assert split_id(f"org/name@{revision}") is None, "a revision becomes a path in the cache"


@pytest.mark.parametrize(
    "model",
    ["a/" + "b" * 300, "a/b..c", "a/b--c", "a/b.git", "a/b-", "x" * 5000, "a/" * 3000, "~nobody-here/x"],
)
def test_a_name_that_cannot_be_is_refused_in_one_line(model: str) -> None:
    with pytest.raises(Unsupported, match="no model '") as caught:
        resolve(model)
    assert len(str(caught.value)) < 300


def test_a_hub_id_is_fetched_once_and_without_pickles(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with Hub({"org/paint": repository}) as hub:
        environ = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret"}
        folder = Path(look_up("org/paint", home, **environ))
        assert names(folder) == NEEDED
        assert sorted(hub.served) == NEEDED
        assert "Bearer hf_secret" in hub.tokens
        assert folder.name == hub.commit("org/paint")
        assert look_up("org/paint", home, **environ) == str(folder)
        assert look_up(f"org/paint@{folder.name}", home, **environ) == str(folder)
        assert sorted(hub.served) == NEEDED, "a file was fetched again"
        write(repository, "tokenizer/vocab.json", "new")
        changed = Path(look_up("org/paint", home, **environ))
        assert changed != folder
        assert hub.served[len(NEEDED) :] == ["tokenizer/vocab.json"], "unchanged files were fetched again"
    # The hub is gone: what is cached serves, by name and by revision.
    for offline in ({"HF_ENDPOINT": hub.url}, {"HF_HUB_OFFLINE": "1"}):
        assert look_up("org/paint", home, **offline) == str(changed)
        assert look_up(f"org/paint@{folder.name}", home, **offline) == str(folder)


def test_a_cache_that_was_copied_here_serves_offline(models_folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--paint"
    snapshot = repository / "snapshots" / ("a" * 40)
    write(repository, "refs/main", "a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_bytes((models_folder / "model_index.json").read_bytes())
    assert look_up("org/paint", tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)
    assert look_up("org/paint@main", tmp_path, HF_ENDPOINT=CLOSED_PORT) == str(snapshot)


@pytest.fixture
def models_folder(tmp_path: Path) -> Path:
    write(tmp_path / "noop", "model_index.json", '{"_class_name": "NoopPipeline"}')
    return tmp_path / "noop"


def test_what_cannot_be_fetched_is_one_error_that_says_what_to_do(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"

    def said(model: str, **environ: str) -> str:
        text = look_up(model, home, **environ)
        assert text.startswith("Unsupported "), text
        assert "\n" not in text
        return text

    text = said("org/paint", HF_HUB_OFFLINE="1")
    assert "no model 'org/paint': it is no folder here and not in the hub's cache" in text
    assert "HF_HUB_OFFLINE is set: unset it, or fetch it elsewhere (hf download org/paint)" in text
    text = said("org/paint", HF_ENDPOINT=CLOSED_PORT)
    assert "the hub cannot be reached: check the network, or name a local folder" in text
    write(tmp_path / "bare", "config.json", "{}")
    with Hub({"org/paint": repository, "org/bare": tmp_path / "bare"}) as hub:
        assert "the hub has none of this name" in said("org/nothing", HF_ENDPOINT=hub.url)
        assert "org/paint has no revision v9" in said("org/paint@v9", HF_ENDPOINT=hub.url)
        assert "is no diffusers pipeline: it has no model_index.json" in said("org/bare", HF_ENDPOINT=hub.url)
        hub.refuse = (403, "GatedRepo")
        assert "accept the terms on the hub, then set HF_TOKEN" in said("org/gated", HF_ENDPOINT=hub.url)


def test_the_ranks_are_given_the_folder_that_the_engine_found(
    models_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from saggar.engine.models import registry

    asked: list[str] = []

    def found(model: str) -> Path:
        asked.append(model)
        return models_folder

    monkeypatch.setattr(registry, "fetch", found)
    with Engine.make(EngineConfig("org/paint", executor="local")) as engine:
        assert engine.info.model == "org/paint"
    assert asked == ["org/paint"], "a rank looked the id up again"


def test_the_engine_itself_fetches_nothing_from_s3() -> None:
    with pytest.raises(Unsupported, match=r"s3://bucket/x: the engine loads from folders: `saggar worker`"):
        open_family("s3://bucket/x")
    with pytest.raises(Unsupported, match=r"^https://\.\.\.: the engine loads from folders"):
        open_family("https://key:hunter2@host/model")
