"""How plain pipelines of videos are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import diffusers.pipelines.wan.pipeline_wan_i2v as wan_i2v
from saggar.engine import Request

from tests.engine.media_made import as_pil

SCALE = 6.0
"""Of the tiny model's guider."""
SHORT = 60
PADDED = {
    "tokenizer_max_length": (1000, 150),
    "tokenizer_2_max_length": (256, 40),
    "vision_num_semantic_tokens": (729, 5),
}
"""HunyuanVideo-1.5 fills up its texts to so many tokens. All that fills up is masked, and takes most of the time: short
texts are filled up less here; `test_hunyuan_video15` compares one that is filled up in full.
"""


def as_ends(request: Request) -> dict[str, Any]:
    """The first picture as `image`, a second one as `last_image`."""
    pictures = as_pil(request)["image"]
    if not isinstance(pictures, list):
        return {"image": pictures}
    first, last = pictures
    return {"image": first, "last_image": last}


def without_ftfy(pipeline: Any, **arguments: Any) -> Any:
    """Wan's pipeline for pictures wants the package ftfy even for texts in which there is nothing to mend."""
    whole = SimpleNamespace(fix_text=lambda text: text)
    with patch.object(wan_i2v, "ftfy", whole, create=True):
        return pipeline(**arguments)


def by_guider(pipeline: Any, **arguments: Any) -> Any:
    """The strength of guidance is its guider's; a new one for each call, for they remember where the last one ended."""
    pipeline.guider = pipeline.guider.new(guidance_scale=arguments.pop("guidance_scale", SCALE))
    short = len(arguments["prompt"] + (arguments.get("negative_prompt") or "")) < SHORT
    for name, lengths in PADDED.items():
        setattr(pipeline, name, lengths[short])
    if "image" in arguments:
        arguments = {name: value for name, value in arguments.items() if name not in ("height", "width")}
    return pipeline(**arguments)
