"""The shapes of the model, built fresh: a small Flux transformer, its two text encoders and its VAE."""

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from training.tokens import LENGTH


@dataclass(frozen=True)
class Shape:
    """Sizes of everything; heads are 32 wide throughout."""

    heads: int = 7
    double_blocks: int = 2
    single_blocks: int = 4
    t5_width: int = 192
    t5_layers: int = 2
    clip_width: int = 192
    clip_layers: int = 1
    latent_channels: int = 8
    vae_channels: tuple[int, int, int] = (24, 48, 64)


def build_vae(shape: Shape) -> AutoencoderKL:
    """An autoencoder that makes one latent of 4×4 pixels."""
    levels = len(shape.vae_channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=shape.vae_channels,
        layers_per_block=1,
        latent_channels=shape.latent_channels,
        norm_num_groups=8,
        sample_size=64,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_transformer(shape: Shape) -> FluxTransformer2DModel:
    """The transformer, started so that every block is the identity and the output is zero."""
    model = FluxTransformer2DModel(
        in_channels=shape.latent_channels * 4,
        num_layers=shape.double_blocks,
        num_single_layers=shape.single_blocks,
        attention_head_dim=32,
        num_attention_heads=shape.heads,
        joint_attention_dim=shape.t5_width,
        pooled_projection_dim=shape.clip_width,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    quiet = [module.linear for name, module in model.named_modules() if _modulates(name, module)]
    for linear in [*quiet, model.proj_out]:
        nn.init.zeros_(linear.weight)
    return model


def _modulates(name: str, module: nn.Module) -> bool:
    """True for the adaLN layers that scale, shift and gate the blocks."""
    return hasattr(module, "linear") and ("norm" in name.rsplit(".", 1)[-1])


def build_t5(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> T5EncoderModel:
    """The encoder whose states the transformer attends to; padding is attended to as well, as Flux does."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=shape.t5_width,
        d_kv=32,
        d_ff=512,
        num_heads=shape.t5_width // 32,
        num_layers=shape.t5_layers,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="eager",  # 32 tokens: nothing to gain, and its backward pass is plain
    )
    return T5EncoderModel(config)


def build_clip(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> CLIPTextModel:
    """The encoder whose last state is the one summary vector of a prompt."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.clip_width,
        intermediate_size=512,
        num_hidden_layers=shape.clip_layers,
        num_attention_heads=shape.clip_width // 32,
        max_position_embeddings=LENGTH,
        projection_dim=shape.clip_width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    return CLIPTextModel(config)


def build_scheduler(shift: float = 1.0) -> FlowMatchEulerDiscreteScheduler:
    """Euler steps over straight paths; the shift is fixed, the same for every picture size."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift, use_dynamic_shifting=False)


def count(*modules: nn.Module) -> int:
    """Parameters of the modules together."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def pack(latents_BCHW: torch.Tensor) -> torch.Tensor:
    """Flux's order of tokens: ``[B, H/2 * W/2, 4C]``, each token a 2×2 patch."""
    b, c, h, w = latents_BCHW.shape
    patches = latents_BCHW.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, (h // 2) * (w // 2), c * 4)


def unpack(tokens_BLC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of ``pack`` for latents of ``height`` × ``width``."""
    b, _, c = tokens_BLC.shape
    patches = tokens_BLC.view(b, height // 2, width // 2, c // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(b, c // 4, height, width)


def image_ids(height: int, width: int, device: torch.device) -> torch.Tensor:
    """Positions (0, row, column) of the tokens of latents of ``height`` × ``width``: ``[L, 3]``."""
    rows = torch.arange(height // 2, device=device)[:, None].expand(-1, width // 2)
    columns = torch.arange(width // 2, device=device)[None, :].expand(height // 2, -1)
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).float()
