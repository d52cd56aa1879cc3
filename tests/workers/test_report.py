"""The report: numbers that add up, a page that stands alone, and nothing hostile that gets through."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from saggar.jobs.record import UnreadText
from saggar.storage.local import LocalStorage
from saggar.workers.contact_sheet import contact_sheet
from saggar.workers.runs.report import Failure, RunSummary, rates, report_html, report_json, write_report
from saggar.workers.runs.unread import UnreadRow

BEGAN = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`{{7*7}}\u202e\ud800&lt;"

SUMMARY = RunSummary(
    run="cats",
    model="saggar/emoji",
    revision="r1",
    numerics="float32/cpu/sdpa",
    output="s3://bucket/cats",
    began=BEGAN,
    ended=BEGAN + timedelta(minutes=30, seconds=5),
    planned=1000,
    done=950,
    failed=20,
    rejected=25,
    cancelled=5,
    pictures=950,
    drawn=1031,
    size=123_456_789,
    failures={"invalid": 12, "poison": 8},
    rejections={"black": 40, "near_duplicate": 41},
    batches={8: 110, 7: 9, 3: 2},
    timeline=[(60 * minute, 33 * minute + minute % 3) for minute in range(1, 31)],
    parameters={"num_inference_steps": 28, "height": 64, "note": None},
    versions={"torch": "2.13.0", "saggar": "0.1.0"},
    examples=[Failure("row-1", "invalid", "height: 7 is no multiple of 8")],
)


class Page(HTMLParser):
    """Elements with their attributes, all text, and whether every element is closed in order."""

    VOID = frozenset({"meta", "img", "i", "br"})

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page.decode())
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open and self.open.pop() == tag, f"{tag} closes {self.open[-3:]}"

    def handle_data(self, data) -> None:
        self.text += data

    def names(self) -> set[str]:
        return {name for name, _ in self.elements}


def sheet(count: int = 6) -> bytes:
    pictures = [np.full((40, 60, 3), 40 * number, np.uint8) for number in range(count)]
    return contact_sheet(pictures, [HOSTILE.replace("\ud800", "")] * count, 3)


def test_the_page_says_what_was() -> None:
    page = Page(report_html(SUMMARY, sheet()))
    assert not page.open
    for said in (
        "cats",
        "saggar/emoji",
        "1,000 rows planned",
        "950 done",
        "20 failed",
        "25 rejected",
        "5 cancelled",
        "near_duplicate",
        "num_inference_steps",
        "28",
        "2.13.0",
        "123 MB",
        "30 min 05 s",
        "7.84",
        "height: 7 is no multiple of 8",
    ):
        assert said in page.text, said
    assert {"svg", "polyline", "img"} <= page.names()


def test_it_stands_alone() -> None:
    page = report_html(SUMMARY, sheet())
    parsed = Page(page)
    assert not {"script", "link", "iframe", "a", "form", "object"} & parsed.names()
    sources = [attrs["src"] for _, attrs in parsed.elements if "src" in attrs]
    assert len(sources) == 1 and sources[0] is not None
    kind, _, data = sources[0].partition(",")
    assert kind == "data:image/webp;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == Image.open(io.BytesIO(sheet())).size
    assert b"http:" not in page and b"https:" not in page and b"url(" not in page
    assert "default-src 'none'" in str(parsed.elements)


def test_hostile_texts_stay_texts() -> None:
    summary = replace(
        SUMMARY,
        run=HOSTILE,
        model=HOSTILE,
        revision=HOSTILE,
        numerics=HOSTILE,
        output="javascript:" + HOSTILE,
        failures={HOSTILE: 20},
        rejections={HOSTILE: 1},
        parameters={HOSTILE: HOSTILE, "nested": [HOSTILE]},
        versions={HOSTILE: HOSTILE},
        examples=[Failure(HOSTILE, HOSTILE, HOSTILE)],
    )
    page = Page(report_html(summary, sheet()))
    assert not page.open
    assert page.names() == Page(report_html(SUMMARY, sheet())).names()
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") == 16 and "{{7*7}}" in page.text
    assert json.loads(report_json(summary))["parameters"][HOSTILE] == HOSTILE


def test_rows_whose_texts_are_too_long_are_shown() -> None:
    title = "rows with a text that is longer than the model reads"
    assert title not in Page(report_html(SUMMARY, None)).text
    text = UnreadText(field="prompt", read_tokens=75, tokens=1180)
    summary = replace(SUMMARY, unread=1234, unread_examples=[UnreadRow(row=7, job="j7", unread=(text,))])
    page = Page(report_html(summary, None))
    assert not page.open
    for said in (f"1,234 {title}", "row 7", "prompt", "75", "1,180"):
        assert said in page.text, said
    content = json.loads(report_json(summary))
    assert content["unread"] == 1234
    assert content["unread_examples"] == [
        {"row": "row 7", "field": "prompt", "read_tokens": 75, "tokens": 1180}
    ]


def test_counts_must_add_up() -> None:
    with pytest.raises(ValueError, match="999 rows ended and 1000 were planned"):
        replace(SUMMARY, done=949)
    with pytest.raises(ValueError, match="19 failures by kind, 20 in all"):
        replace(SUMMARY, failures={"invalid": 19})


def test_a_run_of_nothing_has_a_report() -> None:
    empty = RunSummary("r", "m", "", "", "out", BEGAN, BEGAN, 0, 0, 0, 0, 0, 0, 0, 0)
    page = Page(report_html(empty, None))
    assert "0 rows planned" in page.text and not {"svg", "img"} & page.names()
    assert json.loads(report_json(empty))["pictures_per_s"] == 0


def test_json_has_the_fields_and_what_follows_from_them() -> None:
    content = json.loads(report_json(SUMMARY))
    assert content["done"] + content["failed"] + content["rejected"] + content["cancelled"] == 1000
    assert content["mean_batch"] == pytest.approx((8 * 110 + 7 * 9 + 3 * 2) / 121)
    assert content["seconds"] == 1805 and content["timeline"][0] == [60, 34]
    assert content["began"] == "2030-01-02T03:04:05+00:00"


def test_rates_are_rows_a_second_in_equal_spans() -> None:
    assert rates([], 10) == []
    assert rates([(0.0, 5)], 10) == []
    assert rates([(10.0, 100)], 2) == [(5.0, 10.0), (10.0, 10.0)]
    assert rates([(5.0, 0), (10.0, 100)], 2) == [(5.0, 0.0), (10.0, 20.0)]
    assert rates([(4.0, 40), (4.0, 60), (8.0, 60)], 2) == [(4.0, 15.0), (8.0, 0.0)]
    uneven = [(1.0, 3), (2.5, 4), (2.6, 90), (9.0, 91)]
    found = rates(uneven, 7)
    assert sum(rate * 9 / 7 for _, rate in found) == pytest.approx(91)


def test_both_files_are_put(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    uri = write_report(storage, "runs/cats", SUMMARY, sheet())
    assert uri.endswith("runs/cats/report.html")
    assert sorted(info.key for info in storage.list("")) == ["runs/cats/report.html", "runs/cats/report.json"]
