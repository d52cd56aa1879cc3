"""What the encoders of a text do not read of it: pipelines cut a text that is too long, and say so to nobody.

Tokenizers are watched while texts are encoded, so that nothing is tokenised for this: those of the package `tokenizers`
keep what they cut. Only tokens of the text itself count, neither marks at its ends nor the words of a template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from saggar.engine.request import TextCut

Span: TypeAlias = tuple[int, int]
_NOTES = "_saggar_notes"


@dataclass(frozen=True, slots=True)
class Note:
    """A text as a tokenizer was given it, template and all, and what came of it: `pieces` of the package `tokenizers`,
    of which the model gets the first, or, of a tokenizer in Python, how many `tokens` it has with and without a limit.
    """

    text: str
    truncated: bool
    pieces: tuple[Any, ...] = ()
    tokens: TextCut | None = None


@dataclass(eq=False)
class Watched:
    """A tokenizer's notes, taken while it is `on`."""

    on: bool = False
    notes: list[Note] = field(default_factory=list)

    def take(self, tokenizer: Any, plain: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Its answer, by the class's own call `plain`, with a note for each text."""
        made = plain(tokenizer, *args, **options)
        given = args[0] if args else options.get("text")
        texts = [given] if isinstance(given, str) else given
        if not self.on or not (
            isinstance(texts, list | tuple) and all(isinstance(one, str) for one in texts)
        ):
            return made
        truncated = bool(options.get("truncation"))
        found = getattr(made, "encodings", None)
        if found is None and truncated:
            self.notes += [_counted(plain, tokenizer, text, options.get("max_length")) for text in texts]
        elif found is not None and len(found) == len(texts):
            for text, encoding in zip(texts, found, strict=True):
                self.notes.append(Note(text, truncated, (encoding, *encoding.overflowing)))
        return made


class Reading:
    """The tokenizers `names` among a pipeline's parts; all that there are if none are named."""

    def __init__(self, parts: Mapping[str, Any], names: Sequence[str] = ()) -> None:
        kept = names or [name for name in parts if "tokenizer" in name]
        self._all = [watch(parts[name]) for name in kept if _is_tokenizer(parts.get(name))]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While texts are encoded. What was noted before is forgotten."""
        for one in self._all:
            one.notes, one.on = [], True
        try:
            yield
        finally:
            for one in self._all:
                one.on = False

    def cuts(self, texts: Sequence[str], kept: int | None = None) -> list[TextCut | None]:
        """Of each text that was encoded, in the order in which they were, what the reader that reads most of it leaves
        out; None where one reads all. `kept`: so many of all tokens reach the model, which the tokenizer has not cut.
        """
        found = []
        for one in self._all:
            notes = [note for note in one.notes if note.truncated or kept is not None]
            if len(notes) == len(texts):
                found.append([cut_of(note, text, kept) for note, text in zip(notes, texts, strict=True)])
            one.notes = []
        return [most(cuts) for cuts in zip(*found, strict=True)] if found else [None] * len(texts)

    def cut(self, text: str) -> TextCut | None:
        """The same of a text that stood anywhere among those that were encoded, as it is or in a template."""
        notes = [[note for note in one.notes if note.truncated and text in note.text] for one in self._all]
        # The shortest: a longer one may be another text, of which this is a part.
        return most([cut_of(min(some, key=lambda note: len(note.text)), text) for some in notes if some])


def watch(tokenizer: Any) -> Watched:
    """The notes of a tokenizer, which from now on calls itself by way of them: also where it is called by its own
    methods, such as that for chats.
    """
    kind: Any = type(tokenizer)
    vars(tokenizer)[_NOTES] = watched = Watched()
    # The class of this object alone: whoever else has one of the same class is not watched.
    tokenizer.__class__ = _watched(kind)
    return watched


@cache
def _watched(kind: Any) -> type[Any]:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        notes: Watched = vars(self)[_NOTES]
        return notes.take(self, kind.__call__, args, options)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def most(cuts: Sequence[TextCut | None]) -> TextCut | None:
    """That of the reader that reads most; None if one reads all."""
    found = [cut for cut in cuts if cut is not None]
    if not found or len(found) < len(cuts):
        return None
    return max(found, key=lambda cut: cut.read_tokens / cut.tokens)


def cut_of(note: Note, text: str, kept: int | None = None) -> TextCut | None:
    """What is not read of `text`, which stands somewhere in the note's; None: all is."""
    if not note.pieces:
        return note.tokens
    first, *rest = note.pieces
    if not rest and (kept is None or sum(first.attention_mask) <= kept):
        return None
    span = _span(text, note.text)
    read = sum(_own(first, span)[:kept])
    tokens = sum(sum(_own(piece, span)) for piece in note.pieces)
    return TextCut(read, tokens) if read < tokens else None


def _own(piece: Any, span: Span) -> list[bool]:
    """Of each token that is no padding, whether it stands for a part of the span."""
    return [
        not special and start < span[1] and max(end, start + 1) > span[0]
        for (start, end), special, real in zip(
            piece.offsets, piece.special_tokens_mask, piece.attention_mask, strict=True
        )
        if real
    ]


def _span(text: str, whole: str) -> Span:
    """Where a text stands in a template, the last place of several. The whole, where it was cleaned beyond what is
    known.
    """
    for known in (text, text.strip(), text.lower().strip(), " ".join(text.split())):
        place = whole.rfind(known) if known else -1
        if place >= 0:
            return place, place + len(known)
    return 0, len(whole)


def _counted(plain: Any, tokenizer: Any, text: str, limit: int | None) -> Note:
    """Of a tokenizer that keeps nothing of what it has cut."""
    tokens = len(plain(tokenizer, text, add_special_tokens=False)["input_ids"])
    longest = tokenizer.model_max_length if limit is None else limit
    read = max(0, longest - tokenizer.num_special_tokens_to_add())
    return Note(text, True, tokens=TextCut(read, tokens) if read < tokens else None)


def _is_tokenizer(part: object) -> bool:
    from transformers import PreTrainedTokenizerBase

    return isinstance(part, PreTrainedTokenizerBase)
