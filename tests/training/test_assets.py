"""What ships with the package: complete, small, and in the form that plain diffusers reads."""

from __future__ import annotations

import json

import torch
from diffusers import FluxPipeline

from training import models, references
from training.fetch import EXPECTED, STYLES
from training.score import MODEL
from training.tokens import LENGTH

MEGABYTE = 1_000_000


def test_the_folder_is_small() -> None:
    files = [file for file in MODEL.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 25 * MEGABYTE
    assert (MODEL / "references.zip").stat().st_size <= 4 * MEGABYTE
    assert (MODEL / "contact-sheet.webp").stat().st_size <= 300_000


def test_card_and_notice_are_there() -> None:
    assert "cannot" in (MODEL / "README.md").read_text()
    notice = (MODEL / "NOTICE").read_text()
    assert "Noto" in notice
    assert "Fluent" in notice


def test_no_path_of_another_machine_is_in_a_configuration() -> None:
    for file in MODEL.rglob("*.json"):
        assert "_name_or_path" not in json.loads(file.read_text()), file


def test_references_hold_every_emoji_in_every_style() -> None:
    known = references.read(MODEL / "references.zip")
    assert known.styles == list(STYLES)
    assert len(set(known.names)) == EXPECTED
    assert known.pixels_RCHW.shape == (EXPECTED * len(STYLES), 4, 32, 32)


def test_plain_diffusers_loads_float32_modules_and_fixed_lengths() -> None:
    pipeline = FluxPipeline.from_pretrained(str(MODEL))
    parts = (pipeline.vae, pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2)
    assert {part.dtype for part in parts} == {torch.float32}
    assert pipeline.tokenizer_max_length == LENGTH
    assert pipeline.vae_scale_factor == 4
    assert not pipeline.transformer.config.guidance_embeds
    assert not pipeline.scheduler.config.use_dynamic_shifting


def test_packing_and_positions_are_those_of_flux() -> None:
    latents = torch.randn(2, 8, 16, 16)
    packed = FluxPipeline._pack_latents(latents, 2, 8, 16, 16)
    assert torch.equal(models.pack(latents), packed)
    assert torch.equal(models.unpack(packed, 16, 16), latents)
    ids = FluxPipeline._prepare_latent_image_ids(1, 8, 8, torch.device("cpu"), torch.float32)
    assert torch.equal(models.image_ids(16, 16, torch.device("cpu")), ids)
