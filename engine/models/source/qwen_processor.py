"""Qwen's processor of texts with pictures, without its half for videos, which needs torchvision."""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin, Qwen2VLProcessor


class PictureProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """The parts of a processor are the arguments of its constructor: this one has no third."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: Any
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        ids = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        self.image_token_id, self.video_token_id = ids
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
