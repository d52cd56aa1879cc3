"""The settings of what an engine tries and finds before it serves: read, refused, handed to the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from saggar.engine.config import EngineConfig, WarmUp
from saggar.jobs.errors import ConfigError
from saggar.workers import assembly
from saggar.workers.cli import cli
from saggar.workers.settings import WorkerSettings
from saggar.workers.supervisor import REFUSED

from tests.support.cluster import WorkerProcess


def engine_config(flags: dict[str, object], **environ: str) -> EngineConfig:
    """As the worker's process makes it, from what its supervisor hands on."""
    settings = WorkerSettings.load(flags, environ)
    handed = WorkerSettings.from_parent({"SAGGAR_WORKER_SETTINGS": settings.handed_on})
    assert handed == settings
    return assembly.engine_config(handed, "saggar/emoji")


def test_the_defaults_are_the_engines() -> None:
    config, own = engine_config({}), EngineConfig("saggar/emoji")
    assert (config.warmup, config.calibration_file) == (own.warmup, own.calibration_file)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("height=1024,width=1024,rows=4", (WarmUp({"height": 1024, "width": 1024}, rows=4),)),
        (
            " height=512 , guidance_scale=4.5; rows=2,negative_prompt= ",
            (WarmUp({"height": 512, "guidance_scale": 4.5}), WarmUp(rows=2, negative_prompt="")),
        ),
        ("key=a b,flag=true,negative_prompt=null", (WarmUp({"key": "a b", "flag": True}, 1, "null"),)),
        ("none", ()),
    ],
)
def test_kinds_are_written_as_one_text_or_several(text: str, kinds: tuple[WarmUp, ...]) -> None:
    assert engine_config({}, SAGGAR_WARMUP=text).warmup == kinds
    assert engine_config({"warmup": (text,)}, SAGGAR_WARMUP="rows=3").warmup == kinds
    if text != "none":
        assert engine_config({"warmup": ("rows=8", text)}).warmup == (WarmUp(rows=8), *kinds)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1024x1024", "--warmup: '1024x1024' is no kind of request (allowed: NAME=VALUE by commas, such as "),
        ("height=1,height=2", "--warmup: 'height=1,height=2' is no kind"),
        ("height=1;", "--warmup: '' is no kind"),
        ("rows=2;none", "--warmup: 'none' is no kind"),
        ("rows=0", "--warmup[0].rows: 0 is too small (allowed: >= 1)"),
        ("height=1;rows=many", "--warmup[1].rows: has the wrong type (allowed: an integer)"),
        ("height=null", "--warmup: height is null (allowed: a number, true, false or a text)"),
    ],
)
def test_other_kinds_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WorkerSettings.load({"warmup": (text,)}, {})
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)


def test_a_calibration_file_is_a_file(tmp_path: Path) -> None:
    there, new = tmp_path / "there.json", tmp_path / "no" / "folder" / "yet.json"
    there.write_text("{}")
    for path in (there, new):
        assert engine_config({"calibration_file": str(path)}).calibration_file == str(path)
        assert engine_config({}, SAGGAR_CALIBRATION_FILE=str(path)).calibration_file == str(path)
    for wrong, says in ((str(tmp_path), "is a folder"), ("new/", "is a folder"), ("", "at least 1 char")):
        with pytest.raises(ConfigError, match=f"^--calibration-file: .*{says}"):
            WorkerSettings.load({"calibration_file": wrong}, {})


def test_the_commands_refuse_what_says_nothing(tmp_path: Path) -> None:
    runner = CliRunner()
    said = runner.invoke(cli, ["worker", "--warmup", "big", "--calibration-file", str(tmp_path / "a.json")])
    assert isinstance(said.exception, ConfigError)
    assert str(said.exception).startswith("--warmup: 'big' is no kind of request")
    (tmp_path / "p.txt").write_text("a fox\n")
    arguments = ["run", str(tmp_path / "p.txt"), "--to", str(tmp_path / "out")]
    said = runner.invoke(cli, [*arguments, "--warmup", "big"])
    assert str(said.exception).startswith("--warmup: 'big' is no kind of request")
    for flags in (["--warmup", "rows=2"], ["--calibration-file", "a.json"]):
        said = runner.invoke(cli, [*arguments, "--redis", "redis://127.0.0.1:1", *flags])
        assert str(said.exception) == f"{flags[0]} is the worker's: it says nothing with --cluster"


@pytest.mark.e2e
def test_a_worker_tries_what_it_was_told(start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker("--warmup", "height=32,rows=2", "--warmup", "key=other").ready("noop")
    refused = start_worker(environ={"SAGGAR_WARMUP": "height=0"})
    assert refused.process.wait(60) == REFUSED
    (line,) = [line for line in refused.log.read_text().splitlines() if "cannot start" in line]
    assert "cannot start: warmup: params.height: " in line
    failing = start_worker("--warmup", "fail_at=decode")
    assert failing.process.wait(60) == REFUSED
    assert "the warm-up failed: ValueError: asked to fail" in failing.log.read_text()
