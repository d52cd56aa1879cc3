"""The families whose pictures are compared with plain diffusers: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from saggar.engine import Request
from saggar.engine.media import Media

from tests.engine.media_made import (
    Given,
    Shapes,
    as_pil,
    as_pil_of_its_size,
    as_rgba,
    as_waves,
    at_resolution,
    clips_of,
    films_of,
    keeping_references,
    layers_of,
    made,
    pictures_of,
    plainly,
    smaller_references,
    sounds_of,
)
from tests.engine.video_made import as_ends, by_guider, without_ftfy

REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"height": 60}, "params.height"),
    ({"width": 10_000}, "params.width"),
    ({"num_inference_steps": 0}, "params.num_inference_steps"),
    ({"guidance_scale": float("nan")}, "params.guidance_scale"),
    ({"max_sequence_length": 513}, "params.max_sequence_length"),
    ({"warp": 0.5}, "params.warp"),
)


@dataclass(frozen=True)
class Case:
    """`name` is the tiny model's unless `model` is; `class_name` is the plain pipeline's.

    task: that of its requests. inputs: the shapes of what they are given, made of their seeds. others: further sets of
    inputs, such as another size or number, compared each for itself; resized: they share a key, for all are brought to
    one size. given: what the plain pipeline is called with for them. made: the media of one output, from what that call
    returns.
    called: how the plain pipeline is called with all that. added: parameters that are none of its arguments.
    strip: frames of a preview, side by side.
    brief: CI compares the main things alone, for another case of this code is compared in all; once: only one batch.
    guided: parameters that ask for classifier-free guidance. scale: the parameter that is its strength.
    empty_is_none: whether a missing negative prompt means an empty one to this pipeline.
    negative: whether the pipeline takes a negative prompt at all.
    mixed_sizes: whether rows of unlike sizes share a forward.
    small: parameters of a small size. wide: another size than the usual one; another: parameters of another batch key
    where they are not height and width.
    plain: what the plain pipeline's call needs besides.
    own_defaults: parameters whose null stands for the pipeline's default, which is too long for a schema.
    unlike: what a third row has that differs from the others. options: parameters that only this family has, those
    of one dictionary together change the picture. samplers: words of the scheduler's configuration, or another class
    (`_class_name`), that the family must bear as the plain pipeline does.
    stochastic: such words that make the sampler draw noise in each step.
    refused: parameters that are off its grid, and the field that is then named.
    kernels: what its attention runs on, as the numerics of a result name it; "own" where the transformer calls no
    kernel of ours.
    """

    name: str
    class_name: str
    model: str = ""
    task: str = "t2i"
    inputs: Shapes = field(default_factory=dict)
    others: tuple[Shapes, ...] = ()
    resized: bool = False
    given: Given = as_pil
    made: Callable[[Any], list[Media]] = pictures_of
    called: Callable[..., Any] = plainly
    added: tuple[str, ...] = ()
    strip: int = 1
    brief: bool = False
    once: bool = False
    scale: str = "guidance_scale"
    other_scale: str = "guidance_scale"
    strength: float = 4.5
    empty_is_none: bool = True
    negative: bool = True
    mixed_sizes: bool = False
    wide: tuple[int, int] = (40, 72)
    small: Mapping[str, Any] = field(default_factory=lambda: {"height": 32, "width": 32})
    another: Mapping[str, Any] | None = None
    plain: dict[str, Any] = field(default_factory=dict)
    own_defaults: tuple[str, ...] = ()
    unlike: dict[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})
    options: tuple[dict[str, Any], ...] = ()
    samplers: tuple[dict[str, Any], ...] = ()
    stochastic: dict[str, Any] = field(default_factory=lambda: {"stochastic_sampling": True})
    refused: tuple[tuple[dict[str, Any], str], ...] = REFUSED
    kernels: str = "torch_sdpa"

    def __str__(self) -> str:
        return self.name

    @property
    def tiny(self) -> str:
        """The tiny model's name."""
        return self.model or self.name

    @property
    def served(self) -> str:
        """The pipeline that the tiny model's folder names."""
        return BY_NAME[self.tiny].class_name

    @property
    def other_size(self) -> dict[str, Any]:
        """Parameters of another size."""
        if self.another is not None:
            return dict(self.another)
        return {"height": self.wide[0], "width": self.wide[1]}

    def request(self, name: str, prompt: str, inputs: Shapes | None = None, **fields: Any) -> Request:
        """One of this case's task, with inputs made of its seed."""
        given = made(self.inputs if inputs is None else inputs, fields.get("seed", 0))
        return Request(name, prompt, task=self.task, inputs=given, **fields)

    def requests(self) -> list[Request]:
        """Three that differ in all that rows may differ in: texts, steps, guidance, seeds, outputs."""
        return [
            self.request("a", "a red fox that runs over the snow", seed=3, params={"num_inference_steps": 4}),
            self.request(
                "b",
                "blue",
                negative_prompt="ugly, blurred" if self.negative else None,
                seed=40,
                num_outputs=2,
                params={"num_inference_steps": 7, self.scale: self.strength},
            ),
            self.request("c", "", seed=11, params={"num_inference_steps": 3, **self.unlike}),
        ]


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


STABLE_AUDIO = Case(
    "stable-audio",
    "StableAudioPipeline",
    task="t2a",
    made=sounds_of,
    empty_is_none=False,
    mixed_sizes=True,
    small={"audio_end_in_s": 0.05},
    another={"audio_start_in_s": 0.05, "audio_end_in_s": 0.1},
    unlike={"guidance_scale": 1.0, "audio_start_in_s": 0.1, "audio_end_in_s": 0.2},
    options=({"audio_start_in_s": 0.1}, {"audio_end_in_s": 0.1}),
    samplers=(
        {"solver_type": "heun", "sigma_schedule": "karras"},
        {"_class_name": "EDMDPMSolverMultistepScheduler"},
        {"_class_name": "DDIMScheduler", "clip_sample": False},
    ),
    stochastic={"solver_order": 1},
    refused=(
        ({"audio_end_in_s": 0.3}, "params.audio_end_in_s"),
        ({"audio_end_in_s": 0.0}, "params.audio_end_in_s"),
        ({"audio_start_in_s": 0.25, "audio_end_in_s": 0.3}, "params.audio_end_in_s"),
        ({"audio_start_in_s": 513.0}, "params.audio_start_in_s"),
        ({"num_inference_steps": 0}, "params.num_inference_steps"),
        ({"guidance_scale": float("nan")}, "params.guidance_scale"),
        ({"height": 64}, "params.height"),
    ),
)
SDXL_INPAINT = begun(
    SDXL,
    "StableDiffusionXLInpaintPipeline",
    **MASKED,
    unlike={"guidance_scale": 1.0, "eta": 0.5, "strength": 0.7},
    options=(
        {"strength": 1.0},
        {"strength": 0.3},
        {"guidance_rescale": 0.7},
        {"negative_original_size": [16, 24], "crops_coords_top_left": [3, 5]},
        {"negative_target_size": [8, 9]},
    ),
)
LTX2 = Case(
    "ltx2",
    "LTX2Pipeline",
    task="t2v",
    made=films_of,
    brief=True,
    strip=2,
    wide=(32, 96),
    unlike={
        "guidance_scale": 1.0,
        "audio_guidance_scale": 1.0,
        "stg_scale": 0.0,
        "audio_stg_scale": None,
        "motion_speed": 0.5,
        "guidance_rescale": 0.0,
        "audio_guidance_rescale": None,
    },
    options=(
        {"stg_scale": 0.0, "audio_stg_scale": 0.0},
        {"modality_scale": 1.0, "audio_modality_scale": 1.0},
        {"audio_guidance_scale": 2.0},
        {"guidance_rescale": 0.0},
        {"motion_speed": 0.5},
        {"spatio_temporal_guidance_blocks": [0, 1]},
        {"num_frames": 9},
    ),
    refused=(
        ({"height": 80}, "params.height"),
        ({"num_frames": 8}, "params.num_frames"),
        ({"num_frames": 1, "frame_rate": 240.0}, "params.frame_rate"),
        ({"spatio_temporal_guidance_blocks": [2]}, "params.spatio_temporal_guidance_blocks"),
        ({"spatio_temporal_guidance_blocks": []}, "params.spatio_temporal_guidance_blocks"),
        ({"max_sequence_length": 24}, "params.max_sequence_length"),
        ({"motion_speed": 0.0}, "params.motion_speed"),
        ({"warp": 0.5}, "params.warp"),
    ),
)
LTX2_PICTURE = replace(
    LTX2,
    name="ltx2-i2v-2.3",
    once=True,
    class_name="LTX2ImageToVideoPipeline",
    model="ltx2",
    task="i2v",
    inputs={"image": [(50, 70)]},
    others=({"image": [(64, 64, 4)]},),
    resized=True,
    options=({"image_crf": 0},),
)
ODD = {"height": 48, "width": 80, "num_frames": 9}
"""Another size of a video: of 45 tokens for Wan and HunyuanVideo-1.5."""
WAN = Case(
    "wan-a14b",
    "WanPipeline",
    task="t2v",
    made=clips_of(16.0),
    added=("fps",),
    strip=2,
    another=ODD,
    unlike={"guidance_scale": 1.0},
    options=({"guidance_scale_2": 1.5}, {"guidance_scale_2": 0.0}, {"num_frames": 1}),
    samplers=(
        {"flow_shift": 8.0},
        {"solver_order": 3},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0},
    ),
    stochastic={
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "stochastic_sampling": True,
    },
    refused=(
        ({"height": 60}, "params.height"),
        ({"width": 20_000}, "params.width"),
        ({"num_frames": 6}, "params.num_frames"),
        ({"num_frames": 0}, "params.num_frames"),
        ({"num_inference_steps": 0}, "params.num_inference_steps"),
        ({"guidance_scale": float("nan")}, "params.guidance_scale"),
        ({"max_sequence_length": 513}, "params.max_sequence_length"),
        ({"fps": 0}, "params.fps"),
        ({"warp": 0.5}, "params.warp"),
    ),
)
WAN_I2V = replace(
    WAN,
    name="wan-i2v",
    class_name="WanImageToVideoPipeline",
    task="i2v",
    inputs={"image": [(50, 70)]},
    others=({"image": [(64, 64)]},),
    resized=True,
    given=as_ends,
    called=without_ftfy,
    brief=True,
    options=(),
    refused=(
        *WAN.refused,
        ({"guidance_scale_2": 2.0}, "params.guidance_scale_2"),
        ({"max_sequence_length": 64}, "params.max_sequence_length"),
    ),
)
HUNYUAN = Case(
    "hunyuan-video15",
    "HunyuanVideo15Pipeline",
    task="t2v",
    made=clips_of(24.0),
    called=by_guider,
    added=("fps", "guidance_scale"),
    strip=2,
    brief=True,
    another=ODD,
    options=({"num_frames": 1}, {"height": None, "width": None}),
    refused=(
        ({"height": 60}, "params.height"),
        ({"width": 10_000}, "params.width"),
        ({"width": None}, "params.width"),
        ({"num_frames": 6}, "params.num_frames"),
        ({"num_inference_steps": 0}, "params.num_inference_steps"),
        ({"guidance_scale": float("nan")}, "params.guidance_scale"),
        ({"max_sequence_length": 64}, "params.max_sequence_length"),
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
