"""The kernel that is fastest here for a shape, found by trying all that can serve it.

While a rank warms up, an Auto notes the shapes that come and lets the platform's own kernel serve them. Then rank 0
times the candidates on tensors of these shapes, tells the others what it found, and keeps it in a file under the card's
name and the versions of what was timed, so that the next start, and the next rank, choose the same. A shape that was
not seen gets the kernel of the nearest one that was. Kernels that approximate are no candidates: who wants one names
it.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from saggar.engine.attention.base import Backend, Need, Traits
from saggar.engine.attention.select import backends, kernel
from saggar.engine.errors import LoadError, Unsupported

Table = Mapping[str, str]
"""The name of the kernel by shape, as `Shape` is written."""
Measure = Callable[[Backend, "Shape"], float]
"""Seconds of one call."""


@dataclass(frozen=True)
class Shape:
    """What a kernel's speed depends on: q [batch, queries, heads, width], and as many keys."""

    batch: int
    queries: int
    keys: int
    heads: int
    width: int
    masked: bool

    def __str__(self) -> str:
        return "x".join(map(str, list(vars(self).values())[:-1])) + ("m" if self.masked else "")

    @classmethod
    def read(cls, text: str) -> Shape:
        """From its written form."""
        batch, queries, keys, heads, width = map(int, text.removesuffix("m").split("x"))
        return cls(batch, queries, keys, heads, width, text.endswith("m"))

    @property
    def work(self) -> float:
        """Of both products, on a logarithmic scale."""
        return math.log(max(1, self.batch * self.heads * self.queries * self.keys))


@dataclass(frozen=True)
class AutoOptions:
    """Which Auto it is: diffusers knows kernels by name and options, and each Auto chooses among its own candidates."""

    number: int = 0


class Auto(Backend):
    """`usual` serves until there is a table, and where the log-sum-exp is asked for; `candidates` by name, it among
    them.
    """

    name = "auto"
    Options = AutoOptions
    traits: Traits  # type: ignore[misc]

    def __init__(self, usual: Backend, candidates: Mapping[str, Backend]) -> None:
        super().__init__({"number": id(self)})
        self.traits = usual.traits
        self.seen: dict[Shape, None] = {}
        self.candidates = candidates
        self._usual = usual
        self._chosen: dict[Shape, Backend] = {}
        self._table: Table = {}

    @classmethod
    def beside(cls, usual: Backend, need: Need) -> Auto:
        """With all kernels that are installed, exact, and serve the need; the log-sum-exp is the usual one's."""
        plainly = replace(need, lse=False)
        others = (name for name in backends() if name != usual.name and _serves(name, plainly))
        return cls(usual, {usual.name: usual, **{name: kernel(name)() for name in others}})

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """By the table's kernel for this shape."""
        shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], mask is not None)
        if not self._table:
            self.seen[shape] = None
            return self._usual.attend(q, k, v, mask, causal, scale)
        if shape not in self._chosen:
            name = nearest(shape, self._table)
            self._chosen[shape] = self.candidates.get(name or "", self._usual)
        return self._chosen[shape].attend(q, k, v, mask, causal, scale)

    def attend_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By the usual kernel."""
        return self._usual.attend_lse(q, k, v, mask, scale)

    def serve_by(self, table: Table) -> None:
        """From now on by this table."""
        self._table = table
        self._chosen.clear()

    @property
    def label(self) -> str:
        """The kernels of its table and a digest of it: `auto(cudnn,flash_attn)#1a2b3c4d`."""
        if not self._table:
            return self.name
        digest = hashlib.sha256(json.dumps(dict(self._table), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.name}({','.join(sorted(set(self._table.values())))})#{digest}"


def nearest(shape: Shape, table: Table) -> str | None:
    """The kernel of the shape that is most like this one, of those with heads as wide and a mask or none alike."""
    known = {Shape.read(text): name for text, name in table.items()}
    alike = [one for one in known if (one.width, one.masked) == (shape.width, shape.masked)]
    if not alike:
        return None
    return known[min(alike, key=lambda one: (abs(one.work - shape.work), str(one)))]


def calibrate(autos: list[Auto], known: Table, measure: Measure) -> dict[str, str]:
    """The table of the shapes that were seen, and of no other: what another model's start has tried must not change
    how this one's results are named. Unsupported: none was seen, so that there is nothing to choose by, or a kernel
    that says it can serve one cannot.
    """
    table: dict[str, str] = {}
    for auto in autos:
        for shape in auto.seen:
            if (name := str(shape)) not in table:
                table[name] = known.get(name) or _fastest(auto, shape, measure)
    if not table:
        raise Unsupported(
            "attention auto is calibrated on the warm-up's requests: name at least one in warmup"
        )
    return table


def _fastest(auto: Auto, shape: Shape, measure: Measure) -> str:
    taken = {}
    for name, backend in auto.candidates.items():
        try:
            taken[name] = measure(backend, shape)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Unsupported(
                f"attention auto: {name} failed on {shape}: {reason}; name the kernels instead of auto"
            ) from error
    return min(taken, key=lambda name: taken[name])


def timer(
    device: torch.device, dtype: torch.dtype, settle: Callable[[], None], clock: Callable[[], float]
) -> Measure:
    """Times a kernel on random tensors: the best of five runs of three calls, after one that does not count."""

    def measure(backend: Backend, shape: Shape) -> float:
        q = torch.randn(shape.batch, shape.queries, shape.heads, shape.width, device=device, dtype=dtype)
        k, v = (
            torch.randn(shape.batch, shape.keys, shape.heads, shape.width, device=device, dtype=dtype)
            for _ in "kv"
        )
        mask = (
            torch.ones(shape.batch, 1, 1, shape.keys, dtype=torch.bool, device=device)
            if shape.masked
            else None
        )
        taken = []
        for _ in range(6):
            settle()
            start = clock()
            for _ in range(3):
                backend.run(q, k, v, mask)
            settle()
            taken.append(clock() - start)
        return min(taken[1:]) / 3

    return measure


class Calibration:
    """A file of tables, by machine: the card, the versions of what was timed, the dtype."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path = path
        self._machine = machine

    def read(self) -> dict[str, str]:
        """This machine's table, empty where there is none. LoadError: the file is not what was written."""
        return dict(self._all().get(self._machine, {}))

    def add(self, table: Table) -> None:
        """To this machine's, beside those of others; the file appears whole or not at all."""
        everything = {**self._all(), self._machine: {**self.read(), **table}}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._path.parent, prefix=".calibration-") as folder:
            written = Path(folder) / "table.json"
            written.write_text(json.dumps(everything, indent=2, sort_keys=True))
            written.replace(self._path)

    def _all(self) -> dict[str, dict[str, str]]:
        if not self._path.exists():
            return {}
        try:
            found = json.loads(self._path.read_text())
            for table in found.values():
                for shape in table:
                    Shape.read(shape)
        except (ValueError, AttributeError, TypeError) as error:
            raise LoadError(
                f"{self._path} holds no calibration of attention: delete it to have a new one"
            ) from error
        return cast("dict[str, dict[str, str]]", found)


def _serves(name: str, need: Need) -> bool:
    try:
        found = kernel(name)()
    except Unsupported:  # not installed
        return False
    return not found.approximates and found.traits.refusal(need) is None
