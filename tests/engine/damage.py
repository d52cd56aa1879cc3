"""Ways to damage the folder of a Stable Diffusion 3, for tests."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel


def weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def missing_component(folder: Path) -> None:
    shutil.rmtree(folder / "text_encoder_2")


def missing_configuration(folder: Path) -> None:
    (folder / "vae" / "config.json").unlink()


def truncated_weights(folder: Path) -> None:
    path = weights(folder / "transformer")
    path.write_bytes(path.read_bytes()[:-1000])


def wrong_shapes(folder: Path) -> None:
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"joint_attention_dim": 48}))


def wrong_text_shapes(folder: Path) -> None:
    path = folder / "text_encoder_3" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"d_ff": 41}))


def _rename_weight(folder: Path) -> None:
    path = weights(folder)
    content, data = header(path)
    name = next(name for name in content if name.endswith("weight"))
    content[f"{name}.renamed"] = content.pop(name)
    text = json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def a_missing_weight(folder: Path) -> None:
    _rename_weight(folder / "transformer")


def a_missing_text_weight(folder: Path) -> None:
    _rename_weight(folder / "text_encoder")


def a_pickle(folder: Path) -> None:
    weights(folder / "vae").rename(folder / "vae" / "diffusion_pytorch_model.bin")


def a_disguised_pickle(folder: Path) -> None:
    weights(folder / "vae").write_bytes(b"PK\x03\x04 as torch.save writes it" + b"\0" * 100)


def a_pointer(folder: Path) -> None:
    weights(folder / "vae").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")


def a_dangling_link(folder: Path) -> None:
    path = weights(folder / "vae")
    path.unlink()
    path.symlink_to("../../blobs/gone")


def an_empty_file(folder: Path) -> None:
    weights(folder / "transformer").write_bytes(b"")


def a_damaged_header(folder: Path) -> None:
    path = weights(folder / "transformer")
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(bytes(data))


def a_missing_shard(folder: Path) -> None:
    path = weights(folder / "text_encoder_3")
    path.rename(path.with_name("model-00001-of-00002.safetensors"))
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def a_damaged_index(folder: Path) -> None:
    (folder / "text_encoder_3" / "model.safetensors.index.json").write_text('{"weight_map": []}')


def a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text("{")


def a_damaged_scheduler(folder: Path) -> None:
    (folder / "scheduler" / "scheduler_config.json").write_text("not JSON")


def damaged_json(folder: Path) -> None:
    (folder / "transformer" / "config.json").write_text("{")


def unknown_component_class(folder: Path) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vae": ["diffusers", "AutoencoderXYZ"]}))


def a_module_of_its_own(folder: Path) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vae": ["antigravity", "AutoencoderKL"]}))


def a_part_that_is_not_named(folder: Path) -> None:
    path = folder / "model_index.json"
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "tokenizer"})
    )


def _component(folder: Path, name: str, *source: str) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: source}))


def an_auto_model(folder: Path) -> None:
    _component(folder, "vae", "diffusers", "AutoModel")
    a_pickle(folder)


def a_nested_pipeline(folder: Path) -> None:
    _component(folder, "scheduler", "diffusers", "DiffusionPipeline")


def a_tokenizer_with_code(folder: Path) -> None:
    _component(folder, "tokenizer", "transformers", "AutoTokenizer")
    (folder / "tokenizer" / "own.py").write_text("raise SystemExit('run')")
    path = folder / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}))


def a_component_elsewhere(folder: Path) -> None:
    _component(folder, "../vae", "diffusers", "AutoencoderKL")


def a_deep_index(folder: Path) -> None:
    (folder / "model_index.json").write_text("[" * 100_000)


def a_class_of_two_lines(folder: Path) -> None:
    _component(folder, "vae", "diffusers", "AutoencoderKL")
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": "A\nB"}))


def a_limit_that_is_none(folder: Path) -> None:
    (folder / "saggar.json").write_text('{"limits": {"max_outputs": "many"}}')


def a_parameter_that_is_none(folder: Path) -> None:
    (folder / "saggar.json").write_text('{"params": {"height": "x"}}')


def a_size_that_is_none(folder: Path) -> None:
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": "a", "sample_size": None}))


def _config(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def a_part_left_out(folder: Path) -> None:
    _config(folder / "model_index.json", vae=[None, None])


def layers_below_none(folder: Path) -> None:
    _config(folder / "transformer" / "config.json", num_layers=-1)


def fewer_text_layers(folder: Path) -> None:
    _config(folder / "text_encoder" / "config.json", num_hidden_layers=1)


def _rewritten(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The first weight that is a matrix, changed."""
    tensors = load_file(path)
    name = min(name for name, value in tensors.items() if value.dim() > 1)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


def whole_numbers(folder: Path) -> None:
    _rewritten(weights(folder / "transformer"), lambda value: (value * 100).to(torch.int8))


def whole_text_numbers(folder: Path) -> None:
    _rewritten(weights(folder / "text_encoder"), lambda value: (value * 100).to(torch.int32))


def nan_weights(folder: Path) -> None:
    _rewritten(weights(folder / "transformer"), lambda value: value * torch.nan)


def a_nan_decoder(folder: Path) -> None:
    path = weights(folder / "vae")
    tensors = load_file(path)
    tensors["decoder.conv_in.weight"] *= torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def a_text_encoder_of_another_width(folder: Path) -> None:
    config = T5Config.from_pretrained(folder / "text_encoder_3")
    config.d_model *= 2
    shutil.rmtree(folder / "text_encoder_3")
    T5EncoderModel(config).save_pretrained(folder / "text_encoder_3")


def an_empty_tokenizer(folder: Path) -> None:
    for path in (folder / "tokenizer").iterdir():
        path.unlink()


def a_tokenizer_without_vocabulary(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def an_index_without_metadata(folder: Path) -> None:
    path = weights(folder / "transformer")
    shard = path.rename(path.with_name("diffusion_pytorch_model-00001-of-00001.safetensors"))
    names = {name: shard.name for name in header(shard)[0] if name != "__metadata__"}
    index = path.with_name("diffusion_pytorch_model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": names}))
