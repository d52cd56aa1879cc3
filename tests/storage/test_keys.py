"""Keys are pure functions, and nothing gets past their check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from saggar.storage.errors import InvalidKey
from saggar.storage.keys import (
    AttemptKey,
    attempt_prefix,
    check_key,
    check_prefix,
    job_prefix,
    output_key,
    parse_attempt,
    result_key,
    sidecar_key,
)

SHA = "0123456789abcdef" * 4

BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a/..",
    ".hidden",
    "a/.tmp/b",
    "-rf",
    "~root",
    "a\\b",
    "a b",
    "a\nb",
    "a\x00b",
    "ä",
    "a?b",
    "a#b",
    "a%2e",
    "x" * 201,
    "/".join(["x" * 100] * 11),
]


def test_the_keys_of_a_job() -> None:
    assert job_prefix("runs/x", "j1") == "runs/x/j1"
    assert attempt_prefix("runs/x/", "j1", 2) == "runs/x/j1/a2"
    assert output_key("runs/x", "j1", 2, 0, SHA, "png") == "runs/x/j1/a2/0-01234567.png"
    assert sidecar_key("", "j1", 1, 3, SHA) == "j1/a1/3-01234567.json"
    assert result_key("", "j1") == "j1/result.json"


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys(key: str) -> None:
    with pytest.raises(InvalidKey):
        check_key(key)


@pytest.mark.parametrize("prefix", [key for key in BAD_KEYS if key not in ("", "a/")])
def test_bad_prefixes(prefix: str) -> None:
    with pytest.raises(InvalidKey):
        check_prefix(prefix)
    with pytest.raises(InvalidKey):
        result_key(prefix, "job")


@pytest.mark.parametrize("job_id", [*BAD_KEYS, "a/b"])
def test_bad_job_ids(job_id: str) -> None:
    with pytest.raises(InvalidKey):
        job_prefix("p", job_id)


@pytest.mark.parametrize(
    ("attempt", "index", "sha256", "extension"),
    [
        (0, 0, SHA, "png"),
        (-1, 0, SHA, "png"),
        (1, -1, SHA, "png"),
        (1, 0, SHA[:8], "png"),
        (1, 0, SHA.upper(), "png"),
        (1, 0, "../" + SHA[3:], "png"),
        (1, 0, SHA, ".png"),
        (1, 0, SHA, "p/g"),
        (1, 0, SHA, ""),
    ],
)
def test_bad_outputs(attempt: int, index: int, sha256: str, extension: str) -> None:
    with pytest.raises(InvalidKey):
        output_key("p", "j", attempt, index, sha256, extension)


def test_parse_attempt_reads_what_was_written() -> None:
    assert parse_attempt(output_key("x/y", "j", 12, 0, SHA, "png")) == AttemptKey("x/y/j", "j", 12)
    assert parse_attempt(output_key("", "j", 1, 0, SHA, "png")) == AttemptKey("j", "j", 1)
    assert parse_attempt(sidecar_key("x", "j", 3, 11, SHA)) == AttemptKey("x/j", "j", 3)


NAME = "0-01234567.png"


@pytest.mark.parametrize(
    "other",
    [
        "x/j/result.json",
        f"a1/{NAME}",
        f"x/a01/{NAME}",
        f"x/a0/{NAME}",
        f"x/b1/{NAME}",
        f"x/a1/deep/{NAME}",
        "x/a1",
        "papers/a4/scan.pdf",
        "runs/a12/result.json",
        "x/a1/0-0123456.png",
        "x/a1/0-012345678.png",
        "x/a1/0-0123456G.png",
        "x/a1/0-01234567",
        "x/a1/0-01234567.tar.gz",
        "x/a1/0-01234567.png2345678901",
        "x/a1/-01234567.png",
        "x/a1/٣-01234567.png",
        f"my pictures/a1/{NAME}",
        f"/a1/{NAME}",
        f"x/../a1/{NAME}",
        f".x/a1/{NAME}",
        f"x/a1/{NAME}\n",
    ],
)
def test_a_key_of_another_s_is_no_attempt_s(other: str) -> None:
    assert parse_attempt(other) is None


@given(st.text(max_size=40))
def test_a_key_that_passes_stays_below_its_root(text: str) -> None:
    try:
        key = check_key(text)
    except InvalidKey:
        return
    assert key == text
    assert key.isascii()
    assert all(part and not part.startswith(".") for part in key.split("/"))
