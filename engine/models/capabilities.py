"""What a family can do, read off its class: nothing here is kept by hand. No torch.

`make docs` writes docs/models.md with it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from saggar.engine.models.base import Family
from saggar.engine.models.packages import package_of
from saggar.engine.models.registry import AnyFamily, families
from saggar.engine.params import describe, schema_of
from saggar.engine.request import JsonValue

_OURS = "saggar.engine.models."
_SIZES = ("height", "width")
_GUIDANCE = re.compile(r"guidance|cfg")


@dataclass(frozen=True)
class Capabilities:
    """One family. `shared`: parameters that rows of one batch must share; `own`: those that each row has for itself.

    `steps`: it stands still between steps, so that progress is told and a cancel takes effect; `step_batches`:
    requests also join and leave there. `guidance`: those of its parameters that are about guidance. `package`: the
    plug-in that it comes from, "" for the engine's own.
    """

    family: str
    about: str
    pipelines: tuple[str, ...]
    tasks: tuple[str, ...]
    step_batches: bool
    steps: bool
    mixed_sizes: bool
    guidance: tuple[str, ...]
    shared: tuple[str, ...]
    own: tuple[str, ...]
    streaming: bool
    previews: bool
    package: str

    @property
    def batches(self) -> str:
        """In words."""
        return "by step, by request" if self.step_batches else "by request"


def capabilities(family: type[AnyFamily], pipelines: tuple[str, ...]) -> Capabilities:
    """What the family's class says of itself."""
    names = tuple(parameters(family))
    shared = tuple(name for name in names if name in family.batch_fields)
    return Capabilities(
        family=family.name,
        about=_about(family),
        pipelines=pipelines,
        tasks=family.tasks,
        step_batches=family.step_batching,
        steps=family.tells_steps,
        mixed_sizes=set(_SIZES) <= set(names) and not set(_SIZES) & set(shared),
        guidance=tuple(name for name in names if _GUIDANCE.search(name)),
        shared=shared,
        own=tuple(name for name in names if name not in shared),
        streaming=family.streaming,
        previews=family.preview is not Family.preview,
        package=package_of(family),
    )


def all_capabilities() -> list[Capabilities]:
    """Of every family, those of the same class together, in the order of their names."""
    pipelines: dict[type[AnyFamily], list[str]] = {}
    for name, family in families().items():
        pipelines.setdefault(family, []).append(name)
    found = [capabilities(family, tuple(names)) for family, names in pipelines.items()]
    return sorted(found, key=lambda one: one.family)


def parameters(family: type[AnyFamily]) -> dict[str, dict[str, JsonValue]]:
    """The family's parameters as its data class has them, before a checkpoint narrows them: name -> schema words.
    Those that say something to none of its tasks are left out."""
    found = cast("dict[str, dict[str, JsonValue]]", schema_of(family.Params).get("properties", {}))
    return {
        name: words
        for name, words in found.items()
        if set(cast("list[str]", words.get("x-tasks", family.tasks))) & set(family.tasks)
    }


def markdown() -> str:
    """docs/models.md: the families that come with the engine, whatever plug-ins are installed."""
    by_name = {kind.name: kind for kind in families().values() if kind.__module__.startswith(_OURS)}
    found = [one for one in all_capabilities() if one.family in by_name]
    lines = [_HEAD, _table(found)]
    for one in found:
        lines += [
            f"## {one.family}\n\n{one.about}.\n",
            _parameters_table(parameters(by_name[one.family]), one),
        ]
    return "\n".join(lines)


_HEAD = """# Models

Written by `make docs` from the families' code; a test fails when it is stale.

A checkpoint is served by the family of the pipeline that its `model_index.json` names; what it takes in particular
(sizes, defaults, limits, memory) says `saggar models inspect MODEL`. Rows of one batch share what the table says, and
may differ in all else: prompt, negative prompt, seed, number of outputs and every other parameter.

Of pictures, `i2i` begins with one and keeps of it what `strength` leaves, `inpaint` paints anew what a mask shows: both
bring their files to the size that is asked for. `edit` has reference pictures, and rows of one batch share their
sizes; `layers` takes a picture with transparency apart, and an output is all of its layers.

Any other pipeline of diffusers that makes pictures of a prompt alone is called as a whole, by the family
`diffusers-any`: request batches only, and rows share all parameters, which are the scalars of the pipeline's
`__call__`. Rows are one call where the pipeline takes lists of prompts and generators. Progress and cancels come at
each step where it has `callback_on_step_end` or the older `callback`; without one, a request that runs goes on to its
end. It has no previews.
"""


def _table(found: list[Capabilities]) -> str:
    lines = [
        "| family | pipelines | tasks | batches | rows share | sizes in a batch | previews | streaming |"
    ]
    lines.append("|---" * 8 + "|")
    for one in found:
        cells = (
            f"[{one.family}](#{one.family})",
            ", ".join(one.pipelines),
            ", ".join(one.tasks),
            one.batches,
            ", ".join(one.shared) or "nothing",
            "mixed" if one.mixed_sizes else "one",
            _yes(one.previews),
            _yes(one.streaming),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _parameters_table(words: Mapping[str, Mapping[str, JsonValue]], one: Capabilities) -> str:
    lines = ["| parameter | default | takes | in a batch |", "|---|---|---|---|"]
    for name, of_one in words.items():
        takes = describe(of_one).replace("|", "\\|")
        default = "" if "default" not in of_one else f"`{_json(of_one['default'])}`"
        for task, other in cast("dict[str, JsonValue]", of_one.get("x-defaults", {})).items():
            default += f", {task}: `{_json(other)}`"
        if tasks := cast("list[str]", of_one.get("x-tasks", [])):
            takes += f"; for {', '.join(tasks)}"
        lines.append(f"| `{name}` | {default} | {takes} | {'shared' if name in one.shared else 'own'} |")
    return "\n".join(lines) + "\n"


def _json(value: JsonValue) -> str:
    return json.dumps(value)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _about(family: type[AnyFamily]) -> str:
    """The first clause of its module's words."""
    text = inspect.cleandoc(getattr(inspect.getmodule(family), "__doc__", None) or family.name)
    return re.split(r"[:.](?=\s|$)", " ".join(text.split()))[0]
