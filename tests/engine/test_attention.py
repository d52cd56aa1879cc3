"""The attention seam: which kernel a site gets, what kernels bear, and that every site of a denoiser is reached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from saggar.engine import EngineConfig, Unsupported, open_family
from saggar.engine.attention.base import Backend, Need, mask_of
from saggar.engine.attention.dispatch import find_sites, install
from saggar.engine.attention.select import backends, choose, kernel
from saggar.engine.attention.site import Site
from saggar.engine.choices import Choice, parse_attention
from saggar.engine.models.state import Row
from saggar.engine.platform.base import Placement

from tests.engine.conftest import MakeEngine
from tests.engine.families import BY_NAME

Models = Callable[[str], Path]
NEED = Need("cpu", torch.float32, 8)


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2)


def qkv(keys: int = 7, heads: int = 3, width: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, heads, width, generator=made)
    return q, *(torch.randn(2, keys, heads, width, generator=made) for _ in range(2))


MASKS: Mapping[str, torch.Tensor | None] = {
    "none": None,
    "keys": mask_of(torch.arange(7).expand(2, 7) < torch.tensor([[7], [3]]), 7),
    "queries": torch.tril(torch.ones(5, 7, dtype=torch.bool))[None, None],
    "added": torch.linspace(-2, 2, 2 * 3 * 5 * 7).view(2, 3, 5, 7),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["torch_sdpa", "flex"])
def test_each_kernel_of_the_cpu_is_the_textbooks_attention(name: str, mask: str) -> None:
    backend = kernel(name)()
    given = MASKS[mask]
    expected = textbook(*qkv(), given)
    torch.testing.assert_close(backend.run(*qkv(), given), expected, atol=1e-5, rtol=0)
    out, lse = backend.run_lse(*qkv(), given)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert lse.shape == (2, 3, 5) and lse.dtype == torch.float32
    probabilities = textbook(qkv()[0], qkv()[1], torch.ones_like(qkv()[2]), given)
    assert torch.allclose(probabilities, torch.ones_like(probabilities), atol=1e-5)


def test_all_kernels_have_a_file_and_say_what_they_bear() -> None:
    assert backends() == ["cudnn", "flash_attn", "flex", "sage", "torch_sdpa", "xformers"]


@pytest.mark.parametrize(
    ("choices", "role", "expected"),
    [
        ({}, "joint", "torch_sdpa"),
        ({"default": Choice("flex")}, "joint", "flex"),
        ({"self": Choice("flex"), "default": Choice("torch_sdpa")}, "joint", "flex"),
        ({"joint": Choice("torch_sdpa"), "self": Choice("flex")}, "joint", "torch_sdpa"),
        ({"self": Choice("flex")}, "cross", "torch_sdpa"),
    ],
)
def test_role_then_category_then_default_then_platform(
    choices: dict[str, Choice], role: str, expected: str
) -> None:
    assert choose("site", role, NEED, choices, ("cudnn", "torch_sdpa")).name == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("self", "'self' is not ROLE=KERNEL"),
        ("selfish=flex", "'selfish' is no role; there are cross, default, image_cross, joint, refiner, self"),
        ("self=sage:smooth", "option 'smooth' is not NAME=VALUE"),
    ],
)
def test_a_choice_that_is_not_one_is_refused_before_any_process_starts(text: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        parse_attention(text)


def test_choices_as_text() -> None:
    assert parse_attention(" self=cudnn, cross=sage:smooth_k=false ") == {
        "self": Choice("cudnn"),
        "cross": Choice("sage", {"smooth_k": False}),
    }
    assert parse_attention("") == {}
    assert EngineConfig(model="x", attention={"self": "flex"}).kernels == {"self": Choice("flex")}


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice("magic"), "there is no kernel 'magic', but cudnn, flash_attn, flex"),
        (Choice("torch_sdpa", {"fast": True}), "torch_sdpa has no option 'fast'; there are none"),
        (Choice("cudnn"), r"cudnn cannot serve blocks\.3\.attn \(joint\): it runs on cuda, not on cpu"),
        (Choice("sage"), "sage is not installed: pip install sageattention"),
    ],
)
def test_an_explicit_choice_that_cannot_serve_is_an_error_that_names_the_site(
    choice: Choice, words: str
) -> None:
    with pytest.raises(Unsupported, match=words):
        choose("blocks.3.attn", "joint", NEED, {"joint": choice}, ("torch_sdpa",))


@pytest.mark.parametrize(
    ("name", "need", "words"),
    [
        ("cudnn", Need("cuda", torch.float32, 64), "bfloat16, float16, not float32"),
        ("cudnn", Need("cuda", torch.bfloat16, 256), "at most 128 wide"),
        ("sage", Need("cuda", torch.bfloat16, 64, "keys"), "masks are 'none' and the site's are 'keys'"),
        ("flash_attn", Need("cuda", torch.bfloat16, 64, "any"), "masks are 'keys' and the site's are 'any'"),
        ("flash_attn", Need("cuda", torch.bfloat16, 64, "keys", lse=True), "gives none under a mask"),
        ("flex", Need("cuda", torch.bfloat16, 8), "heads are at least 16 wide on a GPU, not 8"),
    ],
)
def test_what_a_kernel_does_not_bear(name: str, need: Need, words: str) -> None:
    module = __import__(f"saggar.engine.attention.backends.{name}", fromlist=["KERNEL"])
    assert words in str(module.KERNEL.traits.refusal(need))


def test_an_option_of_another_type_is_refused() -> None:
    from saggar.engine.attention.backends.sage import Sage

    assert Sage({"smooth_k": False}).options.smooth_k is False  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="smooth_k is a bool, not 3"):
        Sage({"smooth_k": 3})


def test_a_mask_is_never_left_out() -> None:
    from saggar.engine.attention.backends.flash_attn import FlashAttn
    from saggar.engine.attention.backends.sage import Sage

    with pytest.raises(Unsupported, match="sage cannot take a mask bool"):
        Sage().run(*qkv(), MASKS["keys"])
    with pytest.raises(Unsupported, match="flash_attn cannot take a mask float32"):
        FlashAttn().run(*qkv(), MASKS["added"])


def _flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attn 2.8's own signature."""
    assert q.is_contiguous() or q.stride(-1) == 1
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), scale=softmax_scale, is_causal=causal
    ).transpose(1, 2)
    scores = torch.einsum("blhd,bkhd->bhlk", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    return (out, scores.logsumexp(-1), None) if return_attn_probs else out


def _flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_k == int(cu_seqlens_k.diff().max()) and max_seqlen_q == int(cu_seqlens_q.diff().max())
    pieces = []
    for i in range(len(cu_seqlens_q) - 1):
        own, kept = slice(*cu_seqlens_q[i : i + 2].tolist()), slice(*cu_seqlens_k[i : i + 2].tolist())
        pieces.append(_flash_attn_func(q[None, own], k[None, kept], v[None, kept], 0.0, softmax_scale)[0])
    return torch.cat(pieces)


def test_flash_attn_is_called_as_its_signature_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no wheel of it: a stand-in with the same signature answers."""
    from saggar.engine.attention.backends.flash_attn import FlashAttn

    module: Any = ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = _flash_attn_func, _flash_attn_varlen_func
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert FlashAttn.missing() is None
    backend = FlashAttn({"version": 2})
    torch.testing.assert_close(backend.run(*qkv()), textbook(*qkv(), None), atol=1e-5, rtol=0)
    masked = backend.run(*qkv(), MASKS["keys"])
    torch.testing.assert_close(masked, textbook(*qkv(), MASKS["keys"]), atol=1e-5, rtol=0)
    out, lse = backend.run_lse(*qkv())
    expected = kernel("torch_sdpa")().run_lse(*qkv())
    torch.testing.assert_close((out, lse), expected, atol=1e-5, rtol=0)
    with pytest.raises(Unsupported, match="version 3 is not installed"):
        FlashAttn({"version": 3}).run(*qkv())


def _sageattn_1(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """Version 1's own signature, and what it does to the keys."""
    assert tensor_layout == "NHD"
    if smooth_k:
        k -= k.mean(1, keepdim=True)
    return kernel("torch_sdpa")().run(q, k, v, None, is_causal, sm_scale)


def test_version_1_of_sage_leaves_the_keys_alone_and_gives_no_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a GPU: it takes `return_lse`, and gives the output alone; it smooths the caller's keys in place."""
    from saggar.engine.attention.backends.sage import Sage

    module: Any = ModuleType("sageattention")
    module.sageattn = _sageattn_1
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("sageattention", None)
    monkeypatch.setitem(sys.modules, "sageattention", module)
    backend, (q, k, v) = Sage(), qkv()
    before = k.clone()
    torch.testing.assert_close(backend.run(q, k, v), textbook(q, before, v, None), atol=1e-5, rtol=0)
    assert torch.equal(k, before)
    for need, words in (
        (Need("cuda", torch.bfloat16, 64, lse=True), "Ring needs its log-sum-exp"),
        (Need("cuda", torch.bfloat16, 72), "heads are [64, 96, 128] wide, not 72"),
    ):
        assert words in str(backend.traits.refusal(need))


class Counting(Backend):
    """Counts its calls; each has a name of its own, by which processors find it that are given no site."""

    traits = kernel("torch_sdpa").traits

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.calls = 0

    def attend(self, *args: Any) -> torch.Tensor:
        self.calls += 1
        return kernel("torch_sdpa")().attend(*args)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_attention_of_a_denoiser_reaches_its_site(models: Models, name: str) -> None:
    family = open_family(str(models(BY_NAME[name].tiny)))
    family.load(Placement("float32", "float32/cpu", torch.device("cpu"), torch.float32))
    kernels: dict[str, Counting] = {}
    for part, denoiser in family.denoisers().items():
        for found in find_sites(denoiser):
            assert found.reachable, found.name
            one = kernels[f"{part}.{found.name}"] = Counting(f"{name} {part} {found.name}")
            install(found, Site(found.name, found.role, one))
    assert kernels
    request = family.validate(BY_NAME[name].requests()[0])
    state = family.new_state(request)
    with torch.inference_mode():
        family.prepare_encode([state])
        # A denoiser may have the begin or the end of the time alone.
        for step in (0, state.steps - 1):
            state.step_index = step
            family.predict([Row(state, 0)], "cond")
    assert [site for site, one in kernels.items() if not one.calls] == []


def test_a_choice_that_cannot_serve_stops_the_start(make_engine: MakeEngine) -> None:
    with pytest.raises(
        Unsupported, match=r"cudnn cannot serve .*attn2 \(cross\): it runs on cuda, not on cpu"
    ):
        make_engine("sdxl", attention={"cross": "cudnn"}, warmup=())


def test_results_name_their_kernels(make_engine: MakeEngine) -> None:
    engine = make_engine("sdxl", attention={"cross": "flex"}, warmup=())
    assert engine.info.numerics == "float32/cpu/cross=flex,self=torch_sdpa"


def test_compiled_blocks_pass_the_seam_without_a_graph_break(models: Models) -> None:
    family = open_family(str(models("flux")))
    family.load(Placement("float32", "float32/cpu", torch.device("cpu"), torch.float32))
    (transformer,) = family.denoisers().values()
    for found in find_sites(transformer):
        install(found, Site(found.name, found.role, kernel("torch_sdpa")()))
    block: Any = transformer.transformer_blocks[0]  # type: ignore[index]
    made = torch.Generator().manual_seed(0)
    width = transformer.inner_dim
    hidden, text = (torch.randn(1, length, width, generator=made) for length in (6, 4))  # type: ignore[call-overload]
    temb = torch.randn(1, width, generator=made)  # type: ignore[call-overload]
    rope = transformer.pos_embed(torch.zeros(10, 3))  # type: ignore[operator]
    given = {"hidden_states": hidden, "encoder_hidden_states": text, "temb": temb, "image_rotary_emb": rope}
    with torch.inference_mode():
        expected = block(**given)
        compiled = torch.compile(block, fullgraph=True, backend="eager")(**given)
    torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=0)
