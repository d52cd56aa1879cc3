"""Processors in place of diffusers' old ones, which call torch themselves: the same arithmetic around our sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.embeddings import apply_rotary_emb
from saggar.engine.attention.site import Site, attend
from saggar.engine.errors import Unsupported
from saggar.engine.parallel.mesh import Axis


class _AtSite:
    """What all of them are made with."""

    def __init__(self, site: Site) -> None:
        self.site = site


class Plain(_AtSite):
    """Attention to itself or to another sequence: UNets, PixArt, Sana's texts. `attn` is diffusers' Attention."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, L, C], or [B, C, h, w] for UNets, to the same shape."""
        residual, shape = hidden_states, hidden_states.shape
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if hidden_states.ndim == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        keys = encoder_hidden_states
        if keys is None:
            keys = hidden_states
        elif attn.norm_cross:
            keys = attn.norm_encoder_hidden_states(keys)
        q, k, v = _heads(attn, attn.to_q(hidden_states), attn.to_k(keys), attn.to_v(keys))
        q, k = _normed(q, attn.norm_q), _normed(k, attn.norm_k)
        out = attend(self.site, q, k, v, attention_mask).flatten(2).to(q.dtype)
        out = attn.to_out[1](attn.to_out[0](out))
        if len(shape) == 4:
            out = out.transpose(-1, -2).reshape(shape)
        out = out + residual if attn.residual_connection else out
        scaled: torch.Tensor = out / attn.rescale_output_factor
        return scaled


class Joint(_AtSite):
    """Picture and text in one sequence, the picture first: Stable Diffusion 3."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[B, L, C] each, to the same shapes; without a text to one."""
        q, k, v = _heads(attn, attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        q, k = _normed(q, attn.norm_q), _normed(k, attn.norm_k)
        length, text = hidden_states.shape[1], encoder_hidden_states
        if text is not None:
            added = _of_text(attn, text)
            q, k, v = (torch.cat(pair, dim=1) for pair in zip((q, k, v), added, strict=True))
        out = attend(self.site, q, k, v, attention_mask).flatten(2).to(q.dtype)
        picture, rest = out[:, :length], out[:, length:]
        projected: torch.Tensor = attn.to_out[1](attn.to_out[0](picture))
        if text is None:
            return projected
        return projected, rest if attn.context_pre_only else attn.to_add_out(rest)


class Turned(_AtSite):
    """Attention to itself, the first channels of each head turned by position, or to another sequence, which is not
    turned and may have fewer heads: Stable Audio.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[B, L, C] to the same shape; `rotary_emb`: cosines and sines [L, turned channels]."""
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q = torch.unflatten(attn.to_q(hidden_states), 2, (attn.heads, -1))
        k, v = (torch.unflatten(x, 2, (-1, q.shape[-1])) for x in (attn.to_k(keys), attn.to_v(keys)))
        q, k = _normed(q, attn.norm_q), _normed(k, attn.norm_k)
        if rotary_emb is not None:
            q = _turned(q, rotary_emb)
            k = k if attn.is_cross_attention else _turned(k, rotary_emb)
        out = attend(self.site, q, k, v, attention_mask).flatten(2).to(q.dtype)
        projected: torch.Tensor = attn.to_out[1](attn.to_out[0](out))
        return projected


class Padded(_AtSite):
    """Video and text in one sequence, the video first, texts filled up: HunyuanVideo-1.5.

    Keys alone are masked. diffusers masks queries too, for which it makes a mask of the sequence's length squared; what
    a token sees that only fills up goes nowhere.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L, C] each, to the same shapes; the mask [B, L] is the text's, None where no token is masked."""
        length, text = hidden_states.shape[1], encoder_hidden_states
        q, k, v = _heads(attn, attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        q, k = (
            apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) if length else x
            for x in (_normed(q, attn.norm_q), _normed(k, attn.norm_k))
        )
        q, k, v = (torch.cat(pair, dim=1) for pair in zip((q, k, v), _of_text(attn, text), strict=True))
        mask = attention_mask
        if mask is not None:
            mask = torch.nn.functional.pad(mask.bool(), (length, 0), value=True)
        out = attend(self.site, q, k, v, mask).flatten(2).to(q.dtype)
        return attn.to_out[1](attn.to_out[0](out[:, :length])), attn.to_add_out(out[:, length:])


class Apart(_AtSite):
    """Text and picture in one sequence, the text first, each turned by positions of its own: Qwen-Image.

    diffusers' own cannot turn a part of no tokens, which a rank has of a picture or text of fewer tokens than ranks.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L, C] each, to the same shapes; `encoder_hidden_states_mask` [B, L] is the text's, complex numbers
        [L, D / 2] turn the picture and the text. Unsupported: another mask.
        """
        if attention_mask is not None:
            raise Unsupported("Qwen-Image's attention takes a mask of the text alone")
        of_picture, of_text = image_rotary_emb
        q, k, v = _heads(attn, attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        text_q, text_k, text_v = _of_text(attn, encoder_hidden_states)
        q, k = (_turned_around(x, of_picture) for x in (_normed(q, attn.norm_q), _normed(k, attn.norm_k)))
        text_q, text_k = _turned_around(text_q, of_text), _turned_around(text_k, of_text)
        mask, length = encoder_hidden_states_mask, encoder_hidden_states.shape[1]
        if mask is not None:
            mask = torch.nn.functional.pad(mask.bool(), (0, hidden_states.shape[1]), value=True)
        q, k, v = (torch.cat(pair, dim=1) for pair in ((text_q, q), (text_k, k), (text_v, v)))
        out = attend(self.site, q, k, v, mask).flatten(2).to(q.dtype)
        return attn.to_out[1](attn.to_out[0](out[:, length:])), attn.to_add_out(out[:, :length])


class Linear:
    """Linear attention whose sum over the keys goes over all ranks of an axis: Sana (Xie et al., arXiv 2410.10629).

    A rank sums over its own keys; the sums, of the size of a head squared, are added up.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, own length, C] to the same shape. Unsupported: a mask."""
        if attention_mask is not None:
            raise Unsupported("linear attention over ranks takes no mask")
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k = _normed(attn.to_q(hidden_states), attn.norm_q), _normed(attn.to_k(keys), attn.norm_k)
        q, k, v = (x.float() for x in _heads(attn, q.relu(), k.relu(), attn.to_v(keys)))  # [B, L, H, D]
        sums = torch.einsum("blhd,blhe->bhde", k, v)
        norm = k.sum(1)  # [B, H, D]
        both = torch.cat((sums, norm.unsqueeze(-1)), dim=-1).contiguous()
        dist.all_reduce(both, group=self.axis.group)
        weighed = torch.einsum("blhd,bhde->blhe", q, both)
        out = (weighed[..., :-1] / (weighed[..., -1:] + 1e-15)).flatten(2).to(hidden_states.dtype)
        projected: torch.Tensor = attn.to_out[1](attn.to_out[0](out))
        return projected.clip(-65504, 65504) if hidden_states.dtype == torch.float16 else projected


def _heads(attn: Any, *projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.unflatten(x, 2, (attn.heads, -1)) for x in projected)


def _of_text(attn: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [B, L, H, D] of the text beside a picture."""
    q, k, v = _heads(attn, attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text))
    return _normed(q, attn.norm_added_q), _normed(k, attn.norm_added_k), v


def _turned_around(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Heads [B, L, H, D], pairs of channels times the table's complex numbers [L, D / 2], in float32."""
    if not x.shape[1]:
        return x
    turned: torch.Tensor = apply_rotary_emb(x, table[None], use_real=False)
    return turned


def _turned(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Heads [B, L, H, D], their first channels turned in float32."""
    if not x.shape[1]:
        return x
    channels = table[0].shape[-1]
    first, rest = x[..., :channels].float(), x[..., channels:].float()
    turned: torch.Tensor = apply_rotary_emb(
        first, table, use_real=True, use_real_unbind_dim=-2, sequence_dim=1
    )
    return torch.cat((turned, rest), dim=-1).to(x.dtype)


def _normed(x: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
    return x if norm is None else norm(x)


REPLACED: Mapping[str, Callable[[Site], Any]] = {
    "AttnProcessor2_0": Plain,
    "SanaAttnProcessor2_0": Plain,
    "JointAttnProcessor2_0": Joint,
    "StableAudioAttnProcessor2_0": Turned,
    "HunyuanVideo15AttnProcessor2_0": Padded,
    "QwenDoubleStreamAttnProcessor2_0": Apart,
}
SEAMLESS = {"SanaLinearAttnProcessor2_0"}
"""Linear attention: a sum over the keys, for which there is no kernel to choose."""
