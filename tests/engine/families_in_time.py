"""The families of videos and sounds, for families.py."""

from __future__ import annotations

from dataclasses import replace

from tests.engine.case import Case
from tests.engine.media_made import (
    clips_of,
    films_of,
    sounds_of,
)
from tests.engine.video_made import as_ends, by_guider, without_ftfy

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
    noise_of_the_device=True,
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
LTX2 = Case(
    "ltx2",
    "LTX2Pipeline",
    task="t2v",
    made=films_of,
    brief=True,
    strip=2,
    wide=(32, 96),
    fewest=2,
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
