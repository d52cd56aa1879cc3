"""What examples say that cannot do what they are asked, or are stopped: a line, and no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from PIL import Image
from pydantic import JsonValue
from saggar.engine.models.tiny import make_tiny
from saggar.jobs import JobSettings, connect
from saggar.jobs.cards import Cards, ModelCard

from tests.support.cluster import noop_model, until

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("gone.png", "No such file"), ("text.png", "neither a picture"), ("tone.wav", "WAV is no file")],
)
@pytest.mark.parametrize("flags", [["edit_picture.py", "--prompt", "it burns"], ["image_to_video.py"]])
def test_what_is_no_picture_is_told_in_a_line(
    tmp_path: Path, flags: list[str], name: str, wrong: str
) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "tone.wav").write_bytes(b"RIFF\x24\0\0\0WAVEfmt ")
    script, *more = flags
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), str(tmp_path / name), *more, "--to", str(tmp_path)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"error: {tmp_path / name}: {wrong}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("offline_t2i.py --model nothing", "no model 'nothing'"),
        (
            "offline_t2i.py --steps 0",
            "params.num_inference_steps: 0 is out of range (allowed: integer, 1 to 200)",
        ),
        ("text_to_video.py --model nothing", "no model 'nothing'"),
        (
            "text_to_video.py --model {noop}",
            "task: 't2v' is not a task of this model (allowed: t2i, i2i, layers)",
        ),
        ("text_to_sound.py --model {noop}", "task: 't2a' is not a task of this model"),
        ("image_to_video.py {red} --model {noop}", "task: 'i2v' is not a task of this model"),
        ("edit_picture.py {red} --prompt snow --model {noop}", "task: 'edit' is not a task of this model"),
        ("edit_picture.py {red} --prompt snow --queued", "SAGGAR_STORE"),
        ("submit.py", "Redis, which SAGGAR_REDIS_URL names, cannot be used: Error 111"),
        ("text_to_video.py --queued", "Redis cannot be reached: Error 111"),
        ("text_to_sound.py --queued", "Redis cannot be reached: Error 111"),
    ],
)
def test_what_an_example_cannot_do_is_told_in_a_line(tmp_path: Path, command: str, said: str) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    noop = noop_model(tmp_path / "noop")
    script, *arguments = command.format(noop=noop, red=tmp_path / "red.png").split()
    environment = {name: value for name, value in os.environ.items() if name != "SAGGAR_STORE"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        env=environment | {"SAGGAR_REDIS_URL": "redis://127.0.0.1:1/0"},
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("script", "model", "said"),
    [
        ("offline_t2i.py", "noop", "offline_t2i: stopped\n"),
        ("text_to_video.py", "noop-video", "saggar: stopped\n"),
    ],
)
def test_ctrl_c_ends_an_example_in_a_line(tmp_path: Path, script: str, model: str, said: str) -> None:
    folder = make_tiny(model, tmp_path / model)
    words = {"steps": {"default": 100_000}, "sleep_s": {"default": 0.01}}
    (folder / "saggar.json").write_text(json.dumps({"params": words}))
    command = [
        sys.executable,
        str(ROOT / "examples" / script),
        "x",
        "--model",
        str(folder),
        "--to",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: psutil.Process(process.pid).children(), 60, "the rank")
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, said)


def test_ctrl_c_ends_the_wait_for_a_job_in_a_line(redis_url: str) -> None:
    schema: dict[str, JsonValue] = {"type": "object", "properties": {}}
    with closing(connect(JobSettings(redis_url=redis_url))) as client:
        card = ModelCard(model="noop", family="noop", tasks=["t2i"], params_schema=schema)
        Cards(client, JobSettings()).publish(card, "w")
    with subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "examples/submit.py"), "a cat", "--model", "noop"],
        env=os.environ | {"SAGGAR_REDIS_URL": redis_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "submitted" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, "submit: stopped; a job that was submitted goes on\n")


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "examples").glob("[!_]*.py")))
def test_each_example_explains_itself(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), "--help"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert script in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
