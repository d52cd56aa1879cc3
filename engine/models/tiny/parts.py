"""The small parts that tiny checkpoints share, their random weights, and how a folder is written.

Tokenizers know single characters and are saved once: every process that loads the folder gets the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIZE = 64
"""Default height and width of a tiny model, in pixels."""
TEXT = 64
"""Default length of its text, in tokens."""
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template such as Qwen's."""
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'-"
_PAIRS = "e▁s▁d▁t▁,▁thineranreontiorenatalesarde"


def vae(**config: Any) -> Any:
    """A KL autoencoder, 4 pixels a latent pixel, without quantisation layers; `config` replaces words of that."""
    from diffusers import AutoencoderKL

    usual: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (8, 8, 16),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 1.5,
        "shift_factor": 0.06,
    }
    return AutoencoderKL(**(usual | config))


def video_vae(**config: Any) -> Any:
    """Qwen-Image's, 4 pixels a latent pixel; `config` replaces words of that."""
    from diffusers import AutoencoderKLQwenImage

    usual: dict[str, Any] = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True],
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [1.5, 0.8, 1.2, 1.0],
    }
    return AutoencoderKLQwenImage(**(usual | config))


def flux2_parts(text_encoder: Any, tokenizer: Any, seed: int, guidance_embeds: bool) -> dict[str, Any]:
    """The parts of FLUX.2: its VAE has 4 pixels a latent pixel, and means and variances that the seed decides."""
    import torch
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel

    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    generator = torch.Generator().manual_seed(seed)
    vae.bn.running_mean.normal_(0.0, 0.3, generator=generator)
    vae.bn.running_var.uniform_(0.5, 2.0, generator=generator)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=96,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


def clip(projection: bool) -> Any:
    """CLIP's text half, with or without its projection."""
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


def t5(width: int = 32, vocabulary: int | None = None) -> Any:
    """T5's encoder, for the tokenizer below unless it has another vocabulary."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=vocabulary or len(_t5_vocabulary()),
        d_model=width,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
    )
    return T5EncoderModel(config)


def umt5(width: int = 32) -> Any:
    """UMT5's encoder: each layer has positions of its own."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(_t5_vocabulary()),
        d_model=width,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
    )
    return UMT5EncoderModel(config)


def gemma() -> Any:
    """Gemma 2's decoder, which encodes texts."""
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=len(_gemma_vocabulary()),
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=4096,
    )
    return Gemma2Model(config)


def gemma3() -> Any:
    """Gemma 3 with eyes, as small as it goes: LTX-2 reads texts with it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={
            "vocab_size": len(_gemma_vocabulary()),
            "hidden_size": 32,
            "intermediate_size": 37,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "max_position_embeddings": 4096,
        },
        vision_config={
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 16,
            "patch_size": 8,
        },
        mm_tokens_per_image=4,
        image_token_index=4,
        boi_token_index=4,
        eoi_token_index=4,
    )
    return Gemma3ForConditionalGeneration(config)


def qwen3(vocabulary: int, layers: int = 2) -> Any:
    """Qwen3 with its language head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _clip_vocabulary() -> dict[str, int]:
    tokens = ["<|startoftext|>", "<|endoftext|>", *_CHARACTERS, *(f"{char}</w>" for char in _CHARACTERS)]
    return {token: index for index, token in enumerate(tokens)}


def clip_tokenizer() -> Any:
    """Of 77 tokens."""
    from transformers import CLIPTokenizer

    return CLIPTokenizer(vocab=_clip_vocabulary(), merges=[], model_max_length=77)


def _t5_vocabulary() -> list[tuple[str, float]]:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return special + [(char, -3.0 - 0.01 * index) for index, char in enumerate(_CHARACTERS)]


def t5_tokenizer() -> Any:
    """Of 512 tokens."""
    from transformers import T5Tokenizer

    return T5Tokenizer(vocab=_t5_vocabulary(), extra_ids=0, model_max_length=512)


def _gemma_vocabulary() -> dict[str, int]:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *_CHARACTERS, *map("".join, _gemma_merges())]
    return {token: index for index, token in enumerate(tokens)}


def _gemma_merges() -> list[tuple[str, str]]:
    return list(zip(_PAIRS[::2], _PAIRS[1::2], strict=True))


def gemma_tokenizer() -> Any:
    """Of 4096 tokens. It knows pairs of characters too: Sana puts a page of text before each prompt."""
    from transformers import GemmaTokenizer

    return GemmaTokenizer(vocab=_gemma_vocabulary(), merges=_gemma_merges(), model_max_length=4096)


def bpe_tokenizer(
    words: str = "",
    chat_template: str | None = None,
    padding_side: str = "right",
    special: Sequence[str] = (),
) -> Any:
    """Qwen's, of 512 tokens: bytes, and one token for each of `words` as they stand in that text; `special` are more
    that stand for themselves.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    pieces = [piece for piece, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(words)]
    merges = dict.fromkeys((piece[:end], piece[end]) for piece in pieces for end in range(1, len(piece)))
    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet()), *(first + last for first, last in merges)]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[*merges],
        model_max_length=512,
        chat_template=chat_template,
        padding_side=padding_side,
        additional_special_tokens=["<|im_start|>", "<|im_end|>", *special],
    )


def save(
    pipeline: Any,
    parts: dict[str, Any],
    folder: Path,
    seed: int,
    text: str | None = "max_sequence_length",
    defaults: Mapping[str, Any] | None = None,
    size: int | None = SIZE,
    index: Mapping[str, Any] | None = None,
    **config: Any,
) -> None:
    """Random weights for all parts, then the folder. Untouched, the output layers are near zero: one picture
    for all. `text` is the parameter that TEXT becomes the default of, `size` the default of height and width,
    `defaults` are others; `index` are words of model_index.json in place of those that the pipeline writes; `config`
    goes to the pipeline.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
            for name, value in part.named_parameters():
                _randomise(name, value, generator)
    pipeline(**parts, **config).save_pretrained(str(folder), safe_serialization=True)
    if index:
        path = folder / "model_index.json"
        write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **index})
    sizes = {} if size is None else {"height": size, "width": size}
    values = {**sizes, **({text: TEXT} if text else {}), **(defaults or {})}
    write_json(
        folder / "saggar.json", {"params": {name: {"default": value} for name, value in values.items()}}
    )


def _randomise(name: str, value: torch.Tensor, generator: torch.Generator) -> None:
    """Weights of unit gain; norms stay near one, or signals die out over the layers. Convolutions that keep their
    gain apart (`weight_g`) are many in a row, and with one of one each would make rounding heard.
    """
    import torch

    with torch.no_grad():
        value.normal_(generator=generator)
        if name.endswith("weight_g"):
            value.mul_(0.1).add_(0.55)
        elif value.ndim < 2:
            value.mul_(0.1).add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            value.div_(max(1.0, value[0].numel() ** 0.5))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As UTF-8, indented."""
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
