"""Builds tiny checkpoints with random weights, for tests and for trying things out: their pictures are noise.

The parts are of the real classes, so that a tiny model takes the same paths as a large one. Tokenizers
know single characters and are saved once: every process that loads the folder gets the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saggar.engine.errors import Unsupported

if TYPE_CHECKING:
    import torch

SIZE = 64
"""Default height and width of a tiny model, in pixels."""
TEXT = 64
"""Default length of its T5 text."""
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'-"


def make_tiny(family: str, folder: Path | str, seed: int = 0) -> Path:
    """Write a tiny checkpoint of a family into `folder`. Unsupported lists the families that can be made."""
    if family not in _BUILDERS:
        raise Unsupported(f"no tiny model of {family!r}: there are {', '.join(_BUILDERS)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _BUILDERS[family](folder, seed)
    return folder


def _noop(folder: Path, seed: int) -> None:
    _write_json(folder / "model_index.json", {"_class_name": "NoopPipeline", "seed": seed})


def _noop_stream(folder: Path, seed: int) -> None:
    _write_json(folder / "model_index.json", {"_class_name": "NoopStreamPipeline", "seed": seed})


def _flux(folder: Path, seed: int) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": _vae(),
        "text_encoder": _clip(projection=False),
        "tokenizer": _clip_tokenizer(),
        "text_encoder_2": _t5(),
        "tokenizer_2": _t5_tokenizer(),
        "transformer": transformer,
    }
    _save(FluxPipeline, parts, folder, seed)


def _sd3(folder: Path, seed: int) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=SIZE // 4,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=32,
    )
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": _vae(),
        "text_encoder": _clip(projection=True),
        "tokenizer": _clip_tokenizer(),
        "text_encoder_2": _clip(projection=True),
        "tokenizer_2": _clip_tokenizer(),
        "text_encoder_3": _t5(width=64),
        "tokenizer_3": _t5_tokenizer(),
        "transformer": transformer,
    }
    _save(StableDiffusion3Pipeline, parts, folder, seed)


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5,
        shift_factor=0.06,
    )


def _clip(projection: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(_clip_vocabulary()),
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def _t5(width: int = 32) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(_t5_vocabulary()),
        d_model=width,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
    )
    return T5EncoderModel(config)


def _clip_vocabulary() -> dict[str, int]:
    tokens = ["<|startoftext|>", "<|endoftext|>", *_CHARACTERS, *(f"{char}</w>" for char in _CHARACTERS)]
    return {token: index for index, token in enumerate(tokens)}


def _clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer(vocab=_clip_vocabulary(), merges=[], model_max_length=77)


def _t5_vocabulary() -> list[tuple[str, float]]:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return special + [(char, -3.0 - 0.01 * index) for index, char in enumerate(_CHARACTERS)]


def _t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    return T5Tokenizer(vocab=_t5_vocabulary(), extra_ids=0, model_max_length=512)


def _save(pipeline: Any, parts: dict[str, Any], folder: Path, seed: int) -> None:
    """Random weights for all parts, then the folder. Untouched, the output layers are near zero: one picture
    for all.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
            for name, value in part.named_parameters():
                _randomise(name, value, generator)
    pipeline(**parts).save_pretrained(str(folder), safe_serialization=True)
    params = {name: {"default": SIZE} for name in ("height", "width")}
    _write_json(folder / "saggar.json", {"params": {**params, "max_sequence_length": {"default": TEXT}}})


def _randomise(name: str, value: torch.Tensor, generator: torch.Generator) -> None:
    """Weights of unit gain; norms stay near one, or signals die out over the layers."""
    import torch

    with torch.no_grad():
        value.normal_(generator=generator)
        if value.ndim < 2:
            value.mul_(0.1).add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            value.div_(max(1.0, value[0].numel() ** 0.5))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


_BUILDERS: dict[str, Callable[[Path, int], None]] = {
    "flux": _flux,
    "sd3": _sd3,
    "noop": _noop,
    "noop-stream": _noop_stream,
}
