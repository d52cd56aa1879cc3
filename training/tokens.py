"""Trains the two tokenizers on captions, and turns captions into token rows.

A tokenizer is trained once and saved: merges that tie are broken differently in another process.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers, trainers
from transformers import CLIPTokenizer, T5Tokenizer

LENGTH = 32  # tokens of a prompt, for both encoders
CLIP_WORDS = 2600
T5_WORDS = 3400

Rows = NDArray[np.int16]


def train_clip(captions: Sequence[str]) -> CLIPTokenizer:
    """A lower-casing BPE tokenizer with CLIP's own splitting."""
    draft = CLIPTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=CLIP_WORDS,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    backend = draft.backend_tokenizer
    backend.train_from_iterator(captions, trainer)
    state = _model_state(backend.to_str())
    merges = [tuple(merge) for merge in state["merges"]]
    return CLIPTokenizer(vocab=state["vocab"], merges=merges, model_max_length=LENGTH)


def train_t5(captions: Sequence[str]) -> T5Tokenizer:
    """A Unigram tokenizer with T5's ids: padding 0, end 1, unknown 2."""
    draft = T5Tokenizer(extra_ids=0)
    trainer = trainers.UnigramTrainer(
        vocab_size=T5_WORDS, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend = draft.backend_tokenizer
    backend.train_from_iterator(captions, trainer)
    pieces = [(piece, score) for piece, score in _model_state(backend.to_str())["vocab"]]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=LENGTH)


def _model_state(text: str) -> dict[str, list[tuple[str, float]]]:
    state: dict[str, list[tuple[str, float]]] = json.loads(text)["model"]
    return state


def save(folder: Path, captions: Sequence[str]) -> None:
    """Trains both and saves them as ``tokenizer`` and ``tokenizer_2``."""
    train_clip(captions).save_pretrained(folder / "tokenizer")
    train_t5(captions).save_pretrained(folder / "tokenizer_2")


def load(folder: Path) -> tuple[CLIPTokenizer, T5Tokenizer]:
    """The CLIP and the T5 tokenizer of a folder."""
    clip = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    t5 = T5Tokenizer.from_pretrained(folder / "tokenizer_2")
    return clip, t5


def rows(tokenizer: CLIPTokenizer | T5Tokenizer, captions: Sequence[str]) -> Rows:
    """Padded token ids ``[captions, LENGTH]``, equal to those the pipeline makes, by a faster way."""
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(LENGTH)
    backend.enable_padding(length=LENGTH, pad_id=tokenizer.pad_token_id, pad_token=tokenizer.pad_token)
    made = np.empty((len(captions), LENGTH), dtype=np.int16)
    for start in range(0, len(captions), 10_000):
        encoded = backend.encode_batch_fast(list(captions[start : start + 10_000]))
        made[start : start + len(encoded)] = [one.ids for one in encoded]
    return made
