"""Doodle's tokenizer: a SentencePiece model, for which the package sentencepiece is needed."""

from __future__ import annotations

from pathlib import Path

from saggar.engine.plugin import LoadError, need


class Tokenizer:
    """Of at most `longest` tokens, the one that begins each text among them. LoadError: no sentencepiece, or a file
    that is not its model.
    """

    def __init__(self, path: Path, longest: int) -> None:
        library = need("sentencepiece", "sentencepiece", "Doodle's tokenizer")
        try:
            self._model = library.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise LoadError(f"{path}: not a model of SentencePiece: {error}") from error
        self._longest = longest

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Token numbers; those that are too many are cut off, which `count` finds."""
        tokens = [self._model.bos_id(), *self._model.encode(text)]
        return {"input_ids": tokens[: self._longest]}

    def count(self, text: str) -> tuple[int, int]:
        """How many tokens of a text are read, and how many it has."""
        tokens = len(self._model.encode(text))
        return min(tokens, self._longest - 1), tokens
