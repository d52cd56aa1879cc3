"""The kinds of request that a worker tries before it serves, as its settings write them.

`height=1024,width=1024,rows=4;height=512`: kinds by semicolons, of each the parameters, `rows` and `negative_prompt`,
values as JSON or text. `none`: nothing is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from saggar.jobs.errors import ConfigError
from saggar.jobs.runs.plan import parse_pairs, parse_value

NONE = "none"
_OWN = ("rows", "negative_prompt")
_ALLOWED = (
    f"NAME=VALUE by commas, such as height=1024,width=1024,rows=4, several kinds by semicolons; or {NONE}"
)


class Kind(BaseModel):
    """One kind; what is not said is the model's default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    params: dict[str, bool | int | float | str] = Field(default_factory=dict)
    rows: int = Field(default=1, ge=1)
    negative_prompt: str | None = None


def parse_kinds(value: object) -> object:
    """One text or several as Kind's fields; anything else as it is. ValueError says what is allowed."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        return value
    found = [text.strip() for text in texts]
    if found == [NONE]:
        return ()
    return tuple(_kind(part) for text in found for part in text.split(";"))


def _kind(text: str) -> dict[str, object]:
    try:
        pairs = parse_pairs([part.strip() for part in text.split(",")], "warmup")
    except ConfigError:
        raise ValueError(f"{text[:100]!r} is no kind of request (allowed: {_ALLOWED})") from None
    values: dict[str, object] = {name: parse_value(value) for name, value in pairs.items()}
    if "negative_prompt" in pairs:
        values["negative_prompt"] = pairs["negative_prompt"]
    for name, value in values.items():
        if not isinstance(value, bool | int | float | str):
            raise ValueError(
                f"{name[:100]} is {pairs[name][:100]} (allowed: a number, true, false or a text)"
            )
    kind: dict[str, object] = {name: values.pop(name) for name in _OWN if name in values}
    return {**kind, "params": values}


Kinds = Annotated[tuple[Kind, ...], BeforeValidator(parse_kinds)]
