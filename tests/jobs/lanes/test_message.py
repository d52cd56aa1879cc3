"""Names, places and shapes of messages; and that importing the package costs little."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from saggar.jobs.lanes import LaneMessage, Tag, celery_message, lane_base, lane_name
from saggar.jobs.lanes.message import inflate, lane_message


def test_lane_name_is_readable():
    assert lane_name("saggar/emoji") == "gen.saggar--emoji"
    assert lane_base("saggar:", lane_name("sdxl")) == "saggar:gen.sdxl"


def test_different_models_never_share_a_lane():
    models = ["a/b", "a--b", "a-b", "a b", "a_b", "a:b", "A/b", "a/b ", "a/b/", "ä/b", "a.b", "", "--", "/"]
    assert len({lane_name(model) for model in models}) == len(models)


def test_a_tag_survives_its_text():
    tag = Tag("gen.m", "job~1", 3)
    assert Tag.parse(str(tag)) == tag


def test_celery_message_is_small():
    job = "0192f1d6-7b1c-7c31-b5a4-3a6d3c5e8f10"
    message = celery_message("saggar.generate", job, "gen.m", priority_class=2, batch_key="k", rows=2)
    assert len(message.body) < 200
    assert message.args() == (job, message.uuid, 2, "k", 2, 0, message.body)
    assert json.loads(json.loads(message.body)["body"]) == [[job], {}, {}]


def test_links_and_headers_go_along():
    message = celery_message(
        "t",
        "j",
        "gen.m",
        priority_class=0,
        batch_key="k",
        rows=1,
        headers={"parent_id": "p"},
        embed={"callbacks": [{"task": "x"}]},
    )
    payload = json.loads(message.body)
    assert payload["headers"]["parent_id"] == "p"
    assert json.loads(payload["body"])[2] == {"callbacks": [{"task": "x"}]}


def test_each_publication_has_its_own_uuid():
    one, two = (celery_message("t", "j", "gen.m", priority_class=2, batch_key="k", rows=1) for _ in range(2))
    assert one.uuid != two.uuid


@pytest.mark.parametrize(
    "change",
    [
        {"tag": ""},
        {"tag": "a\x1fb"},
        {"batch_key": ""},
        {"batch_key": "k\x1f"},
        {"lane": ""},
        {"uuid": ""},
        {"priority_class": -1},
        {"priority_class": 10},
        {"rows": 0},
        {"eta_us": -1},
    ],
)
def test_what_could_not_be_stored_faithfully_is_refused(change):
    good = {
        "lane": "gen.m",
        "tag": "j",
        "uuid": "u",
        "priority_class": 2,
        "batch_key": "k",
        "rows": 1,
        "eta_us": 0,
        "body": "{}",
    }
    LaneMessage(**good)
    with pytest.raises(ValueError):
        LaneMessage(**(good | change))


def published(**headers):
    payload = {"headers": {"id": "j", "task": "t", **headers}, "properties": {"delivery_tag": "u"}}
    return lane_message("gen.m", payload, "{}")


def test_a_message_of_celery_is_placed_by_its_headers():
    message = published(lane_class="interactive", lane_key="k", lane_rows=4, eta="2026-01-01T00:00:00.5")
    assert (message.priority_class, message.batch_key, message.rows) == (0, "k", 4)
    assert message.eta_us == 1767225600_500000
    assert published(eta="2026-01-01T02:00:00+02:00").eta_us == 1767225600_000000


def test_without_headers_it_is_bulk_and_keyed_by_its_task():
    message = published()
    assert (message.tag, message.uuid) == ("j", "u")
    assert (message.priority_class, message.batch_key, message.rows, message.eta_us) == (2, "t", 1, 0)
    assert published(lane_class=0).priority_class == 0


@pytest.mark.parametrize("headers", [{"lane_class": "urgent"}, {"lane_rows": "x"}, {"eta": "soon"}])
def test_wrong_headers_are_refused_when_published(headers):
    with pytest.raises(ValueError):
        published(**headers)


def test_delivery_adds_what_was_left_out_and_drops_the_eta():
    payload = {"body": "[]", "headers": {"id": "j", "task": "t", "eta": "2026-01-01T00:00:00"}}
    inflate(payload, Tag("gen.m", "j", 2), 2, "k", 1)
    assert payload["headers"]["eta"] is None
    assert payload["properties"]["delivery_tag"] == str(Tag("gen.m", "j", 2))
    assert payload["properties"]["delivery_info"] == {
        "exchange": "",
        "routing_key": "gen.m",
        "redelivered": True,
    }
    # Headers of ours are kept, so that Task.retry puts the message in the same place.
    assert (payload["headers"]["lane_class"], payload["headers"]["lane_key"]) == (2, "k")


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, saggar.jobs.lanes as lanes\n"
        "heavy = {'redis', 'kombu', 'celery'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert callable(lanes.register) and lanes.Lanes\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
