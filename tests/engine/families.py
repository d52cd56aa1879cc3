"""The families whose pictures are compared with plain diffusers: one row each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tests.engine.case import Case
from tests.engine.families_in_time import HUNYUAN, LTX2, LTX2_PICTURE, STABLE_AUDIO, WAN, WAN_I2V
from tests.engine.media_made import (
    as_pil_of_its_size,
    as_rgba,
    as_waves,
    at_resolution,
    keeping_references,
    layers_of,
    smaller_references,
)
from tests.engine.video_made import as_ends

SDXL = Case(
    "sdxl",
    "StableDiffusionXLPipeline",
    empty_is_none=False,
    unlike={"guidance_scale": 1.0, "eta": 0.5},
    options=(
        {"guidance_rescale": 0.7},
        {"original_size": [32, 48], "crops_coords_top_left": [3, 5], "target_size": [96, 64]},
        {
            "negative_original_size": [16, 24],
            "negative_crops_coords_top_left": [1, 2],
            "negative_target_size": [8, 9],
        },
        {"clip_skip": 1},
    ),
    samplers=(
        {"_class_name": "DDIMScheduler", "clip_sample": False},
        {"_class_name": "PNDMScheduler", "skip_prk_steps": True},
        {"_class_name": "UniPCMultistepScheduler"},
        {"_class_name": "EulerAncestralDiscreteScheduler"},
    ),
    stochastic={"_class_name": "EulerAncestralDiscreteScheduler"},
)
PIXART = Case(
    "pixart",
    "PixArtSigmaPipeline",
    unlike={"guidance_scale": 1.0, "clean_caption": False},
    options=({"use_resolution_binning": True, "height": 40, "width": 72, "num_inference_steps": 2},),
    samplers=(
        {"algorithm_type": "sde-dpmsolver++"},
        {"solver_order": 3, "use_karras_sigmas": True},
        {"_class_name": "DDIMScheduler"},
    ),
    stochastic={"algorithm_type": "sde-dpmsolver++"},
)
SANA = Case(
    "sana",
    "SanaPipeline",
    wide=(32, 96),
    own_defaults=("complex_human_instruction",),
    unlike={"guidance_scale": 1.0, "complex_human_instruction": []},
    options=(
        {"use_resolution_binning": True, "height": 32, "width": 96, "num_inference_steps": 2},
        {"complex_human_instruction": []},
        {"complex_human_instruction": ["Paint what is said:", "Prompt: "]},
    ),
    samplers=(
        {"algorithm_type": "sde-dpmsolver++"},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
    ),
    stochastic={"algorithm_type": "sde-dpmsolver++"},
)
FLUX = Case("flux", "FluxPipeline", scale="true_cfg_scale", strength=3.5, empty_is_none=False)
SD3 = Case("sd3", "StableDiffusion3Pipeline")
QWEN_IMAGE = Case(
    "qwen-image",
    "QwenImagePipeline",
    scale="true_cfg_scale",
    other_scale="true_cfg_scale",
    empty_is_none=False,
    unlike={"true_cfg_scale": 1.0, "max_sequence_length": 4},
    fewest=2,
)
Z_IMAGE = Case(
    "z-image",
    "ZImagePipeline",
    mixed_sizes=True,
    unlike={
        "height": 32,
        "width": 72,
        "guidance_scale": 3.0,
        "cfg_truncation": 0.5,
        "cfg_normalization": True,
    },
    options=({"cfg_truncation": 0.3}, {"cfg_normalization": True}),
)


def begun(case: Case, class_name: str, task: str = "i2i", **fields: Any) -> Case:
    """The case's model, beginning with a picture."""
    usual: dict[str, Any] = {
        "name": f"{case.name}-{task}",
        "class_name": class_name,
        "model": case.name,
        "task": task,
        "inputs": {"image": ((64, 64),)},
        "others": ({"image": ((48, 80),)}, {"image": ((30, 33, 4),)}),
        "resized": True,
        "brief": True,
        "unlike": {**case.unlike, "strength": 0.3},
        "options": ({"strength": 1.0}, {"strength": 0.2}),
    }
    return replace(case, **(usual | fields))


MASKED: dict[str, Any] = {
    "task": "inpaint",
    "inputs": {"image": ((48, 80),), "mask": ((80, 48),)},
    "others": ({"image": ((64, 64),), "mask": ((64, 64),)},),
}
FLUX2 = Case("flux2", "Flux2Pipeline", negative=False)
KLEIN = Case("flux2-klein", "Flux2KleinPipeline", negative=False)


def edited(case: Case, **fields: Any) -> Case:
    """The case's model, with a reference picture; with two, and with one of another size."""
    usual: dict[str, Any] = {
        "name": f"{case.name}-edit",
        "model": case.name,
        "task": "edit",
        "inputs": {"image": ((64, 72),)},
        "others": ({"image": ((64, 72), (96, 64))}, {"image": ((128, 64),)}),
        "brief": True,
        "options": ({"height": None, "width": None, "num_inference_steps": 2},),
    }
    return replace(case, **(usual | fields))


SDXL_INPAINT = begun(
    SDXL,
    "StableDiffusionXLInpaintPipeline",
    **MASKED,
    unlike={"guidance_scale": 1.0, "eta": 0.5, "strength": 0.7},
    fewest=2,
    options=(
        {"strength": 1.0},
        {"strength": 0.3},
        {"guidance_rescale": 0.7},
        {"negative_original_size": [16, 24], "crops_coords_top_left": [3, 5]},
        {"negative_target_size": [8, 9]},
    ),
)
KONTEXT = replace(
    FLUX,
    name="flux-kontext",
    class_name="FluxKontextPipeline",
    wide=(128, 32),
    called=keeping_references,
    added=("auto_resize",),
    options=({"max_area": 2048, "num_inference_steps": 2},),
    brief=True,
)
QWEN_EDIT = edited(
    QWEN_IMAGE,
    model="",
    class_name="QwenImageEditPipeline",
    called=partial(smaller_references, "qwenimage.pipeline_qwenimage_edit"),
    unlike={"true_cfg_scale": 1.0},
    added=("reference_pixels",),
    inputs={"image": ((64, 72),)},
    others=({"image": ((128, 64),)},),
)
QWEN_EDIT_PLUS = replace(
    QWEN_EDIT,
    name="qwen-image-edit-plus",
    class_name="QwenImageEditPlusPipeline",
    called=partial(smaller_references, "qwenimage.pipeline_qwenimage_edit_plus"),
    others=({"image": ((64, 72), (96, 64))}, {"image": ((128, 64),)}),
)
LONGCAT = Case(
    "longcat-image",
    "LongCatImagePipeline",
    unlike={"guidance_scale": 3.0, "enable_cfg_renorm": False},
    options=(
        {"enable_cfg_renorm": False},
        {"cfg_renorm_min": 1.0},
        {"enable_prompt_rewrite": True, "num_inference_steps": 2},
    ),
    brief=True,
)
LONGCAT_EDIT = edited(
    LONGCAT,
    model="",
    class_name="LongCatImageEditPipeline",
    called=partial(smaller_references, "longcat_image.pipeline_longcat_image_edit"),
    added=("reference_pixels",),
    small={"reference_pixels": 2048},
    another={"reference_pixels": 2048},
    unlike={"guidance_scale": 1.0},
    options=(),
    inputs={"image": ((64, 64),)},
    others=({"image": ((128, 64),)}, {"image": ((64, 72),)}),
    refused=(
        ({"height": 64}, "params.height"),
        ({"reference_pixels": 8}, "params.reference_pixels"),
        ({"num_inference_steps": 0}, "params.num_inference_steps"),
        ({"guidance_scale": float("nan")}, "params.guidance_scale"),
    ),
)
LAYERED = replace(
    QWEN_IMAGE,
    name="qwen-image-layered",
    class_name="QwenImageLayeredPipeline",
    task="layers",
    inputs={"image": ((64, 64, 4),)},
    others=({"image": ((128, 64, 4),)}, {"image": ((64, 64, 3),)}),
    given=as_rgba,
    made=layers_of,
    called=at_resolution,
    small={"layers": 1},
    another={"resolution": 96},
    unlike={"true_cfg_scale": 1.0, "max_sequence_length": 20},
    options=({"cfg_normalize": True}, {"layers": 1}),
    refused=(
        ({"height": 64}, "params.height"),
        ({"resolution": 65}, "params.resolution"),
        ({"layers": 0}, "params.layers"),
        ({"num_inference_steps": 1}, "params.num_inference_steps"),
        ({"true_cfg_scale": float("nan")}, "params.true_cfg_scale"),
        ({"max_sequence_length": 513}, "params.max_sequence_length"),
    ),
    brief=True,
)
CASES = [
    LAYERED,
    Case("ovis-image", "OvisImagePipeline", brief=True),
    LONGCAT,
    LONGCAT_EDIT,
    FLUX,
    SD3,
    SDXL,
    PIXART,
    SANA,
    QWEN_IMAGE,
    Z_IMAGE,
    FLUX2,
    KLEIN,
    replace(KONTEXT, once=True),
    edited(
        KONTEXT,
        options=(*KONTEXT.options, {"height": 64, "width": 104, "num_inference_steps": 2}),
        others=({"image": ((72, 50),)},),
    ),
    QWEN_EDIT,
    QWEN_EDIT_PLUS,
    edited(FLUX2),
    edited(KLEIN),
    begun(FLUX, "FluxImg2ImgPipeline"),
    begun(FLUX, "FluxInpaintPipeline", **MASKED),
    SDXL_INPAINT,
    replace(SDXL_INPAINT, name="sdxl-painter", model="", once=True),
    begun(SD3, "StableDiffusion3Img2ImgPipeline"),
    begun(QWEN_IMAGE, "QwenImageImg2ImgPipeline"),
    begun(Z_IMAGE, "ZImageImg2ImgPipeline", given=as_pil_of_its_size),
    STABLE_AUDIO,
    replace(
        STABLE_AUDIO,
        name="stable-audio-a2a",
        model="stable-audio",
        task="a2a",
        inputs={"audio": [(3000, 2)]},
        others=({"audio": [(5000, 1)]},),
        resized=True,
        given=as_waves,
        brief=True,
    ),
    LTX2,
    LTX2_PICTURE,
    replace(
        LTX2_PICTURE,
        name="ltx2-i2v",
        model="",
        once=False,
        unlike={**LTX2.unlike, "decode_timestep": 0.05, "decode_noise_scale": 0.025},
        options=(
            {"use_cross_timestep": False},
            {"decode_timestep": 0.05},
            {"decode_timestep": 0.05, "decode_noise_scale": 0.3},
        ),
        refused=(({"image_crf": 52}, "params.image_crf"),),
    ),
    replace(
        LTX2, name="ltx2-2.0", model="ltx2-i2v", once=True, options=({"decode_noise_scale": 0.3},), refused=()
    ),
    WAN,
    WAN_I2V,
    replace(
        WAN_I2V,
        name="wan-5b-i2v",
        model="wan-5b",
        another={"height": 96, "width": 160, "num_frames": 9},
        options=({"num_frames": 1},),
        refused=(*WAN.refused, ({"guidance_scale_2": 2.0}, "params.guidance_scale_2")),
    ),
    HUNYUAN,
    replace(
        HUNYUAN,
        name="hunyuan-video15-i2v",
        class_name="HunyuanVideo15ImageToVideoPipeline",
        task="i2v",
        inputs={"image": [(64, 64)]},
        others=({"image": [(70, 50)]},),
        given=as_ends,
        small={"num_frames": 1},
        another={"num_frames": 9},
        options=({"num_frames": 1},),
        refused=(({"height": 64, "width": 64}, "params.height"), *HUNYUAN.refused[3:]),
    ),
]
VARIANTS = [
    replace(FLUX, name="flux-schnell"),
    replace(SDXL, name="sdxl-distilled"),
    replace(KLEIN, name="flux2-klein-distilled"),
    replace(WAN, name="wan"),
    replace(WAN, name="wan-5b", another={"height": 96, "width": 160, "num_frames": 9}),
    replace(WAN_I2V, name="wan-flf", inputs={"image": [(50, 70), (40, 40)]}, others=()),
    replace(WAN_I2V, name="wan-i2v-a14b"),
    replace(
        WAN_I2V, name="wan-flf-a14b", model="wan-i2v-a14b", inputs={"image": [(50, 70), (40, 40)]}, others=()
    ),
]
"""Other checkpoints of the same families: compared once, in a batch."""
BY_NAME = {case.name: case for case in CASES + VARIANTS}
