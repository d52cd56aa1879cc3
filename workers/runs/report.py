"""The report of a run that has ended: `report.json` for programs, `report.html` for people, in one file each.

The page needs nothing from elsewhere and allows no script: pictures are embedded, charts are SVG, and every text that
came from outside is escaped, since prompts and error messages are anybody's.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image
from pydantic import JsonValue
from saggar.storage.base import Storage
from saggar.workers.runs.unread import UnreadRow

VERSION = 1
JSON_NAME, HTML_NAME = "report.json", "report.html"

_TEMPLATE = "report.html.j2"
_SHEET_WIDTH = 2400
_BINS = 60
_PLOT = (720, 160)


@dataclass(frozen=True)
class Failure:
    """A row that failed, as an example: its id, the kind of its error, and the message."""

    row: str
    kind: str
    message: str


@dataclass(frozen=True)
class RunSummary:
    """What a run came to. Rows: done + failed + rejected + cancelled = planned.

    `pictures` made and kept, `size` in bytes; `drawn` pictures in all, those that gates refused too.
    `failures`: failed rows by kind. `rejections`: refused pictures by gate. `batches`: how many by their size.
    `timeline`: (seconds since `began`, rows ended by then), growing in both. `parameters` of all rows; `versions` of
    packages; `output` is where the pictures are. `unread`: rows with a text that is longer than the model reads, and
    some of them. Times are aware.
    """

    run: str
    model: str
    revision: str
    numerics: str
    output: str
    began: datetime
    ended: datetime
    planned: int
    done: int
    failed: int
    rejected: int
    cancelled: int
    pictures: int
    drawn: int
    size: int
    failures: Mapping[str, int] = field(default_factory=dict)
    rejections: Mapping[str, int] = field(default_factory=dict)
    batches: Mapping[int, int] = field(default_factory=dict)
    timeline: Sequence[tuple[float, int]] = ()
    parameters: Mapping[str, JsonValue] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    examples: Sequence[Failure] = ()
    unread: int = 0
    unread_examples: Sequence[UnreadRow] = ()

    def __post_init__(self) -> None:
        """Raises ValueError when the counts do not add up."""
        ends = self.done + self.failed + self.rejected + self.cancelled
        if ends != self.planned:
            raise ValueError(f"{ends} rows ended and {self.planned} were planned")
        if sum(self.failures.values()) != self.failed:
            raise ValueError(f"{sum(self.failures.values())} failures by kind, {self.failed} in all")

    @property
    def seconds(self) -> float:
        return (self.ended - self.began).total_seconds()

    @property
    def pictures_per_s(self) -> float:
        return self.pictures / self.seconds if self.seconds > 0 else 0.0

    @property
    def mean_batch(self) -> float:
        """Rows in a batch, on average; 0 without batches."""
        count = sum(self.batches.values())
        return sum(size * number for size, number in self.batches.items()) / count if count else 0.0


def report_json(summary: RunSummary) -> bytes:
    """ASCII JSON: the summary's fields and what follows from them."""
    content = {
        "version": VERSION,
        **asdict(summary),
        "began": summary.began.isoformat(),
        "ended": summary.ended.isoformat(),
        "seconds": summary.seconds,
        "pictures_per_s": summary.pictures_per_s,
        "mean_batch": summary.mean_batch,
        "unread_examples": [
            {"row": f"row {row.row}", **text.model_dump()}
            for row in summary.unread_examples
            for text in row.unread
        ],
    }
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def report_html(summary: RunSummary, sheet: bytes | None) -> bytes:
    """One self-contained page in UTF-8. `sheet`: an encoded picture, such as `contact_sheet` makes, or None."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"text": _text, "bytes": _bytes, "duration": _duration}
    page = environment.get_template(_TEMPLATE).render(
        run=summary,
        counts=_counts(summary),
        plot=_plot(rates(summary.timeline, _BINS)),
        bars=_bars(summary.batches),
        sheet=_embedded(sheet) if sheet else None,
    )
    return page.encode("utf-8", "replace")


def write_report(storage: Storage, prefix: str, summary: RunSummary, sheet: bytes | None) -> str:
    """Puts both files under a prefix; the URI of the page. Raises what a store raises."""
    base = f"{prefix}/" if prefix else ""
    storage.put(f"{base}{JSON_NAME}", report_json(summary), content_type="application/json")
    page = report_html(summary, sheet)
    storage.put(f"{base}{HTML_NAME}", page, content_type="text/html; charset=utf-8")
    return storage.uri(f"{base}{HTML_NAME}")


def rates(timeline: Sequence[tuple[float, int]], bins: int) -> list[tuple[float, float]]:
    """Rows a second in so many equal spans of time: (the span's end in seconds, rate). Empty without time."""
    points = {0.0: 0} | dict(timeline)  # of several counts at one time the last holds
    end = max(points)
    if end <= 0 or bins < 1:
        return []
    borders = np.linspace(0, end, bins + 1)
    counts = np.interp(borders, list(points), list(points.values()))
    return [
        (float(border), float(rate))
        for border, rate in zip(borders[1:], np.diff(counts) / np.diff(borders), strict=True)
    ]


@dataclass(frozen=True)
class Plot:
    """An area chart's numbers: the outline in the plot's units, the highest rate and the last time."""

    width: int
    height: int
    line: str
    area: str
    top: float
    seconds: float


def _plot(found: Sequence[tuple[float, float]]) -> Plot | None:
    if not found:
        return None
    width, height = _PLOT
    top = max(rate for _, rate in found) or 1.0
    points: list[str] = []
    for number, (_, rate) in enumerate(found):
        y = height - rate / top * height
        points += [f"{x * width / len(found):.1f},{y:.1f}" for x in (number, number + 1)]
    line = " ".join(points)
    return Plot(width, height, line, f"0,{height} {line} {width},{height}", top, found[-1][0])


@dataclass(frozen=True)
class Bar:
    """A line of a bar chart; `share` of the largest, in percent."""

    label: str
    number: int
    share: float


def _bars(numbers: Mapping[int, int]) -> list[Bar]:
    most = max(numbers.values(), default=0) or 1
    return [Bar(str(size), number, 100 * number / most) for size, number in sorted(numbers.items())]


def _counts(summary: RunSummary) -> list[Bar]:
    names = ("done", "failed", "rejected", "cancelled")
    numbers = (summary.done, summary.failed, summary.rejected, summary.cancelled)
    return [
        Bar(name, number, 100 * number / summary.planned if summary.planned else 0.0)
        for name, number in zip(names, numbers, strict=True)
    ]


def _embedded(sheet: bytes) -> str:
    """A data URI of at most 2400 pixels' width, as WebP: a page is mailed around."""
    with Image.open(io.BytesIO(sheet)) as image:
        picture = image.convert("RGB")
    if picture.width > _SHEET_WIDTH:
        picture = picture.resize((_SHEET_WIDTH, max(1, picture.height * _SHEET_WIDTH // picture.width)))
    target = io.BytesIO()
    picture.save(target, "WEBP", quality=88)
    return "data:image/webp;base64," + base64.b64encode(target.getvalue()).decode()


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 20 s` or `4.5 s`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
