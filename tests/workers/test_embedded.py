"""`saggar run FILE` on one machine: pictures, nothing left running, and the same command again after a crash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
from PIL import Image
from saggar.engine.models.tiny import make_tiny
from saggar.workers.servers import RedisServer
from saggar.workers.signals import StoppedBySignal, stopped_by_signals

from tests.support.cluster import until

pytestmark = pytest.mark.e2e

SAGGAR = [sys.executable, "-m", "saggar.workers.cli"]


def prompts(path: Path, count: int, **params: object) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "params": params}) + "\n" for i in range(count)))
    return path


def run(file: Path, noop: Path, to: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        *SAGGAR,
        "run",
        str(file),
        "--model",
        str(noop),
        "--to",
        str(to),
        "--executor",
        "local",
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def pictures(folder: Path) -> dict[str, int]:
    """Path of each picture -> its time of writing."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.glob("*/a*/*.png")}


def left_running(folder: Path) -> list[str]:
    """A Redis server writes its own command line, so it is known by where it runs."""
    mentioned = []
    for process in psutil.process_iter(["cmdline", "pid", "cwd"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in f"{line} {process.info['cwd']}" and process.info["pid"] != os.getpid():
            mentioned.append(line)
    return mentioned


def test_a_file_becomes_pictures_and_nothing_is_left_running(tmp_path: Path, noop: Path) -> None:
    out = tmp_path / "out"
    done = run(prompts(tmp_path / "p.jsonl", 20), noop, out)
    assert done.returncode == 0, done.stderr
    assert "20 succeeded" in done.stderr
    assert f"saggar models inspect {noop} " in done.stderr  # a command that works: the folder, not its name
    assert len(pictures(out)) == 20
    with Image.open(out / "contact-sheet.png") as sheet:
        assert sheet.width > 128
    first = next(out.glob("*/a1/*.json"))
    assert json.loads(first.read_text())["request"]["prompt"].startswith("p")
    assert left_running(out) == []


def test_the_same_command_again_makes_only_what_is_missing(tmp_path: Path, noop: Path) -> None:
    out = tmp_path / "out"
    assert run(prompts(tmp_path / "p.jsonl", 5), noop, out).returncode == 0
    before = pictures(out)
    longer = prompts(tmp_path / "p.jsonl", 8)
    refused = run(longer, noop, out)
    assert refused.returncode == 2
    assert "planned from another manifest" in refused.stderr
    again = run(longer, noop, out, "--extend")
    assert again.returncode == 0, again.stderr
    assert "8 jobs, 5 done before" in again.stderr
    after = pictures(out)
    assert len(after) == 8
    assert before.items() <= after.items()
    third = run(longer, noop, out)
    assert "8 jobs, 8 done before" in third.stderr
    assert "nothing to make" in third.stderr
    assert pictures(out) == after
    success = json.loads((out / "_runs/p/_SUCCESS").read_text())
    assert (success["planned"], success["done"]) == (8, 8)


def test_a_target_whose_queue_is_gone_is_not_made_again(tmp_path: Path, noop: Path) -> None:
    out, file = tmp_path / "out", prompts(tmp_path / "p.jsonl", 6)
    assert run(file, noop, out).returncode == 0
    before = pictures(out)
    shutil.rmtree(out / ".saggar")
    shutil.rmtree(next(path for path in out.iterdir() if (path / "result.json").exists()))
    again = run(file, noop, out)
    assert again.returncode == 0, again.stderr
    assert "6 jobs, 5 done before" in again.stderr
    assert pictures(out).keys() == before.keys()
    assert sum(before[name] == when for name, when in pictures(out).items()) == 5


def test_what_failed_is_made_again_by_the_same_command(tmp_path: Path, noop: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "p.jsonl"
    rows = [{"prompt": f"p{i}", "params": {"fail_at": "predict"} if i % 4 == 3 else {}} for i in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):
        done = run(file, noop, out)
        assert done.returncode == 1
        assert "9 succeeded, 3 failed" in done.stderr
        assert "row 3: row_failed: " in done.stderr
    assert len(pictures(out)) == 9


def test_too_many_failures_pause_the_run(tmp_path: Path, noop: Path) -> None:
    out = tmp_path / "out"
    done = run(
        prompts(tmp_path / "p.jsonl", 40, fail_at="predict"),
        noop,
        out,
        "--max-failures",
        "2",
        "--window",
        "4",
    )
    assert done.returncode == 1
    assert "paused: " in done.stderr
    assert "the same command goes on" in done.stderr


def test_rows_are_multiplied_and_bad_ones_left_out_on_request(tmp_path: Path, noop: Path) -> None:
    file, out = tmp_path / "p.csv", tmp_path / "out"
    file.write_text("caption,height\na,16\nb,0\n")
    flags = ("--column", "prompt=caption", "--seeds", "0..2", "--matrix", "steps=1,2")
    planned = run(file, noop, out, *flags, "--skip-bad", "--plan")
    assert planned.returncode == 0, planned.stderr
    assert "6 jobs, 0 done before" in planned.stderr
    assert pictures(out) == {}
    done = run(file, noop, out, *flags, "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert "line 3: params.height" in done.stderr
    assert "6 succeeded" in done.stderr
    assert len(pictures(out)) == 6


def test_it_goes_on_after_everything_was_killed(tmp_path: Path, noop: Path) -> None:
    out, file = tmp_path / "out", prompts(tmp_path / "p.jsonl", 60, sleep_s=0.03)
    command = [*SAGGAR, "run", str(file), "--model", str(noop), "--to", str(out), "--executor", "local"]
    first = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until(lambda: len(pictures(out)) >= 8, what="the first pictures")
    everything = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    for process in everything:
        process.send_signal(signal.SIGKILL)
    first.wait(10)
    done = run(file, noop, out)
    assert done.returncode == 0, done.stderr
    assert "60 succeeded" in done.stderr
    results = [json.loads(path.read_text()) for path in out.glob("*/result.json")]
    assert len(results) == 60
    for result in results:
        for output in result["outputs"]:
            assert (out / output["key"]).stat().st_size == output["size"]
    assert left_running(out) == []


def test_the_worker_and_its_server_end_when_their_parent_is_killed(tmp_path: Path, noop: Path) -> None:
    out, file = tmp_path / "out", prompts(tmp_path / "p.jsonl", 200, sleep_s=0.1)
    command = [*SAGGAR, "run", str(file), "--model", str(noop), "--to", str(out), "--executor", "local"]
    parent = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until(lambda: len(pictures(out)) >= 1, what="a picture")
    children = psutil.Process(parent.pid).children(recursive=True)
    workers = [child for child in children if "saggar.workers" in " ".join(child.cmdline())]
    assert len(workers) >= 2
    parent.kill()
    parent.wait(10)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
    server = RedisServer(out / ".saggar" / "redis").start()  # ends the orphan and takes its data over
    connection = redis.Redis.from_url(server.url)
    assert connection.dbsize() > 0
    connection.close()
    server.stop()


def test_the_end_says_where_files_and_report_are_and_what_to_try(tmp_path: Path) -> None:
    model, out = make_tiny("noop-video", tmp_path / "noop-video"), tmp_path / "out"
    refused = run(prompts(tmp_path / "p.jsonl", 2), model, out)
    assert "every row is bad, nothing was queued (--set task=t2v says what rows do not):\n" in refused.stderr
    done = run(prompts(tmp_path / "p.jsonl", 2), model, out, "--set", "task=t2v")
    assert done.returncode == 0, done.stderr
    assert f"Look at {out}/contact-sheet.png\nThe report is {out}/_runs/p/report.html\n" in done.stderr
    assert (out / "_runs/p/report.html").exists()
    assert f"The files are {out}/ID/a1/0-....mp4, each" in done.stderr
    assert len(list(out.glob("*/a1/0-*.mp4"))) == 2
    assert (
        f"  saggar run my-prompts.txt --to out/mine --model {model} --set task=t2v  one prompt a line\n"
        in done.stderr
    )
    assert "picture" not in done.stderr


def test_bad_rows_are_left_out_a_line_each(tmp_path: Path, noop: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "good"}\n{"prompt": "bad", "[red]x": 0}\n')
    refused = run(file, noop, tmp_path / "out")
    assert "1 bad rows, nothing was queued (--skip-bad leaves them out):\n" in refused.stderr
    done = run(file, noop, tmp_path / "out", "--skip-bad", "--plan")
    assert done.returncode == 0, done.stderr
    head, line, plan, *_ = done.stderr.splitlines()
    assert head == "1 bad rows left out:"
    assert line.startswith("line 2: [red]x: unknown name (allowed: allow_unserved, ")
    assert line.endswith(", version)")
    assert plan.startswith("1 jobs, 0 done before")


def test_bad_rows_are_all_told_and_nothing_is_queued(tmp_path: Path, noop: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(
        '{"prompt": "good"}\n{"prompt": "bad", "params": {"steps": 0}}\nnot json\n{"prompt": "p", "colour": 1}\n'
    )
    out = tmp_path / "out"
    done = run(file, noop, out)
    assert done.returncode == 2
    for line in ("line 2: params.steps", "line 3: row: is not JSON", "line 4: colour"):
        assert line in done.stderr
    assert "Traceback" not in done.stderr
    assert pictures(out) == {}


def test_two_commands_cannot_share_a_data_folder(tmp_path: Path, noop: Path) -> None:
    out, file = tmp_path / "out", prompts(tmp_path / "p.jsonl", 200, sleep_s=0.1)
    command = [*SAGGAR, "run", str(file), "--model", str(noop), "--to", str(out), "--executor", "local"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(pictures(out)) >= 1, what="a picture")
    second = run(file, noop, out)
    assert second.returncode == 2
    assert "another saggar uses" in second.stderr
    first.send_signal(signal.SIGINT)
    first.wait(60)
    assert left_running(out) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("moment", [".saggar/redis/redis.conf", ".saggar/worker.log", "*/result.json"])
def test_whatever_signal_ends_it_leaves_no_server_running(
    tmp_path: Path, noop: Path, number: signal.Signals, moment: str
) -> None:
    """A terminal that is closed, a batch system that ends its job; nohup is heeded."""
    out, file = tmp_path / "out", prompts(tmp_path / "p.jsonl", 200, sleep_s=0.1)
    command = [*SAGGAR, "run", str(file), "--model", str(noop), "--to", str(out), "--executor", "local"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until(lambda: list(out.glob(moment)), what=moment)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    # Python itself ends by SIGINT where one came while a data class was being made.
    assert process.returncode in (128 + number, -signal.SIGINT)
    assert told.endswith("stopped; the same command goes on where it was\n")
    assert left_running(out) == []


def test_a_queue_that_ends_is_told_and_not_waited_for(tmp_path: Path, noop: Path) -> None:
    """Of a full disk: Redis ends when it cannot write. The same command goes on."""
    out, file = tmp_path / "out", prompts(tmp_path / "p.jsonl", 30, sleep_s=0.05)
    command = [*SAGGAR, "run", str(file), "--model", str(noop), "--to", str(out), "--executor", "local"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until(lambda: len(pictures(out)) >= 1, what="a picture")
    (server,) = (
        one for one in psutil.Process(process.pid).children() if one.cwd() == str(out / ".saggar/redis")
    )
    server.kill()
    _, told = process.communicate(timeout=120)
    assert process.returncode == 2
    assert f"saggar: the Redis server ended (its log is {out}/.saggar/redis/redis.log): " in told
    assert left_running(out) == []
    again = run(file, noop, out)
    assert again.returncode == 0, again.stderr
    assert "30 succeeded" in again.stderr


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(StoppedBySignal, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "what is stopped is not interrupted"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-file.jsonl"], "no such file"),
        (["{file}", "--set", "steps"], "write it as name=value"),
        (["{file}", "--seeds", "3..1"], "--seeds 3..1"),
        (["{file}", "--window", "0"], "--window"),
        (["{file}", "--detach"], "--detach needs a cluster"),
        (["{file}", "--model", "saggar/nothing"], "no model 'saggar/nothing'"),
        (["{file}", "--device", "tpu"], "worker.log): device must be auto, cpu, cuda or cuda:N, not 'tpu'\n"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    file = prompts(tmp_path / "p.jsonl", 1)
    command = [*SAGGAR, "run", *(part.format(file=file) for part in arguments), "--to", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
