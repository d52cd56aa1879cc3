"""The examples run as they are."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import av
import pytest
import soundfile
from PIL import Image
from saggar.engine.models.tiny import make_tiny
from saggar.jobs import AsyncJobClient, JobClient
from saggar.storage import open_storage

from examples import web_backend
from tests.support.cluster import WorkerProcess, noop_model

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def _worker(redis_url: str, tmp_path: Path):
    model, log = noop_model(tmp_path / "noop"), tmp_path / "log"
    flags = ("--executor", "local", "--spool", str(tmp_path / "spool"))
    with WorkerProcess(redis_url, str(tmp_path / "store"), str(model), log, flags).start() as worker:
        yield worker.ready("noop")


def test_pictures_are_made_offline(tmp_path: Path) -> None:
    prompts = ["a red apple, glossy", "a flat rocket"]
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples/offline_t2i.py"),
            *prompts,
            "--to",
            str(tmp_path),
            "--steps",
            "2",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.count("2 steps, batch of 2") == 2
    for index in (0, 1):
        with Image.open(tmp_path / f"{index}.png") as picture:
            assert picture.size == (64, 64)
            assert picture.convert("L").getextrema()[0] < picture.convert("L").getextrema()[1]


@pytest.mark.usefixtures("_worker")
def test_submit_follows_a_job_to_its_pictures(redis_url: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/submit.py"), "a cat", "--model", "noop"],
        env=os.environ | {"SAGGAR_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "submitted" in done.stdout
    assert "succeeded" in done.stdout
    assert "file://" in done.stdout


def test_sounds_are_made_offline(tmp_path: Path) -> None:
    flags = ("--to", str(tmp_path), "--steps", "2", "--end", "0.1")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/text_to_sound.py"), "rain", "a bell", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.count("0.1 s, 2 steps") == 2
    assert "Should have t" not in done.stderr
    rain, bell = (soundfile.read(tmp_path / f"{index}.wav")[0] for index in (0, 1))
    assert rain.shape == bell.shape == (1600, 2)
    assert rain.std() > 0.01 and (rain != bell).any()


def test_sounds_are_queued(redis_url: str, tmp_path: Path) -> None:
    model = make_tiny("noop-audio", tmp_path / "noop-audio")
    flags = ("--executor", "local", "--spool", str(tmp_path / "spool"))
    asked = ("--model", "noop-audio", "--queued", "--format", "flac")
    with WorkerProcess(
        redis_url, str(tmp_path / "store"), str(model), tmp_path / "log", flags
    ).start() as worker:
        worker.ready("noop-audio")
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples/text_to_sound.py"), "rain", "a bell", *asked],
            env=os.environ | {"SAGGAR_REDIS_URL": redis_url},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert done.stdout.count(".flac seed ") == 2
    files = list((tmp_path / "store").rglob("*.flac"))
    assert len(files) == 2
    assert all(soundfile.info(file).duration > 0 for file in files)


def frames_of(path: Path) -> int:
    with av.open(str(path)) as file:
        return sum(1 for _ in file.decode(video=0))


def test_videos_are_made_offline(tmp_path: Path) -> None:
    model = make_tiny("noop-video", tmp_path / "noop-video")
    flags = ("--to", str(tmp_path), "--model", str(model))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/text_to_video.py"), "a fox", "a bell", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for index in (0, 1):
        frames = frames_of(tmp_path / f"{index}.mp4")
        assert f"{index}.mp4: " in done.stdout and f", {frames} frames, " in done.stdout


@pytest.fixture
def _fox(tmp_path: Path) -> list[str]:
    """The command that makes a video of a red picture."""
    Image.new("RGB", (70, 50), "red").save(tmp_path / "red.png")
    return [sys.executable, str(ROOT / "examples/image_to_video.py"), str(tmp_path / "red.png"), "it burns"]


def test_a_picture_becomes_a_video_offline(_fox: list[str], tmp_path: Path) -> None:
    Image.new("RGB", (50, 70), "blue").save(tmp_path / "blue.png")
    done = subprocess.run(
        [*_fox, "--last", str(tmp_path / "blue.png"), "--steps", "2", "--to", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "5 frames, 2 steps" in done.stdout
    assert frames_of(tmp_path / "video.mp4") == 5


def test_a_picture_becomes_a_video_queued(_fox: list[str], redis_url: str, tmp_path: Path) -> None:
    model, store = make_tiny("noop-video", tmp_path / "noop-video"), tmp_path / "store"
    flags = ("--executor", "local", "--spool", str(tmp_path / "spool"))
    with WorkerProcess(redis_url, str(store), str(model), tmp_path / "log", flags).start() as worker:
        worker.ready("noop-video")
        done = subprocess.run(
            [*_fox, "--model", "noop-video", "--queued"],
            env=os.environ | {"SAGGAR_REDIS_URL": redis_url, "SAGGAR_STORE": str(store)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    (made,) = store.rglob("*.mp4")
    assert f"seed 0, {frames_of(made)} frames" in done.stdout


def edit(tmp_path: Path, *flags: str, **environment: str) -> str:
    """What the example prints for a red and a blue picture."""
    for name, size in (("red", (70, 50)), ("blue", (64, 64))):
        Image.new("RGB", size, name).save(tmp_path / f"{name}.png")
    pictures = [str(tmp_path / f"{name}.png") for name in ("red", "blue")]
    script = [sys.executable, str(ROOT / "examples/edit_picture.py"), "--prompt", "it burns"]
    done = subprocess.run(
        [*script, *flags, *pictures[: 1 if "i2i" in flags else 2]],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_pictures_are_edited_offline(tmp_path: Path) -> None:
    assert "2 steps" in edit(tmp_path, "--steps", "2", "--to", str(tmp_path))
    with Image.open(tmp_path / "edit.png") as picture:
        assert picture.size == (64, 64)
        assert picture.convert("L").getextrema()[0] < picture.convert("L").getextrema()[1]


@pytest.mark.usefixtures("_worker")
def test_a_job_that_is_refused_or_fails_is_told_in_a_line(redis_url: str) -> None:
    for flags, said in (
        (["--model", "nobody"], "submit: model: 'nobody' has no card"),
        (["a cat", "--model", "not a name"], "submit: model: has a form that is not allowed"),
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples/submit.py"), *flags],
            env=os.environ | {"SAGGAR_REDIS_URL": redis_url},
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )
        assert (done.returncode, len(done.stderr.strip().splitlines())) == (1, 1), done.stderr
        assert said in done.stderr


@pytest.mark.usefixtures("_worker")
def test_a_picture_is_edited_queued(redis_url: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    printed = edit(
        tmp_path,
        "--queued",
        "--model",
        "noop",
        "--task",
        "i2i",
        SAGGAR_REDIS_URL=redis_url,
        SAGGAR_STORE=str(store),
    )
    assert "file://" in printed and "seed 0" in printed


async def ask(app: web_backend.Backend, method: str, path: str, content: object = None, **headers: str):
    """One request; its status and whole body."""
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": json.dumps(content).encode()}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": method, "path": path, "headers": pairs}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


@pytest.mark.usefixtures("_worker")
def test_the_web_backend_sells_a_picture(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_backend, "MODEL", "noop")

    async def customer() -> None:
        app = web_backend.Backend(AsyncJobClient(redis_url), open_storage(str(tmp_path / "store")))
        status, text = await ask(app, "POST", "/jobs", {"prompt": "a cat"}, idempotency_key="order-1")
        assert status == 202
        job_id = json.loads(text)["id"]
        assert (
            json.loads((await ask(app, "POST", "/jobs", {"prompt": "a cat"}, idempotency_key="order-1"))[1])[
                "id"
            ]
            == job_id
        )
        status, stream = await ask(app, "GET", f"/jobs/{job_id}/events")
        assert status == 200
        assert stream.startswith("id: ")
        assert "event: succeeded" in stream
        status, text = await ask(app, "GET", f"/jobs/{job_id}")
        assert json.loads(text)["state"] == "succeeded"
        (link,) = json.loads(text)["pictures"]
        assert Path(link.removeprefix("file://")).read_bytes().startswith(b"\x89PNG")

        first, last = (
            line.removeprefix("id: ") for line in (stream.splitlines()[0], stream.split("\n\n")[-2])
        )
        again = await ask(app, "GET", f"/jobs/{job_id}/events", last_event_id=first)
        assert again[1] == stream.partition("\n\n")[2], "what came behind the first"
        seen = await ask(app, "GET", f"/jobs/{job_id}/events", last_event_id=last.splitlines()[0])
        assert seen == (204, ""), "nothing comes any more"
        assert (await ask(app, "GET", f"/jobs/{job_id}/events", last_event_id="x"))[0] == 422
        assert (await ask(app, "POST", "/jobs", {"prompt": "a dog", "size": 5})) == (
            422,
            '{"error": "size: unknown name (allowed: prompt)", "field": "size"}',
        )
        assert (await ask(app, "POST", "/jobs", {"prompt": "a dog"}, idempotency_key="order-1"))[0] == 409
        assert (await ask(app, "POST", "/jobs", {"prompt": 5}))[0] == 422
        assert (await ask(app, "GET", "/jobs/nobody"))[0] == 404

    asyncio.run(customer())


def test_the_web_backend_says_that_the_queue_is_away() -> None:
    async def customer() -> None:
        app = web_backend.Backend(AsyncJobClient("redis://127.0.0.1:1/0"))
        for method, path in (("POST", "/jobs"), ("GET", "/jobs/x"), ("GET", "/jobs/x/events")):
            status, text = await ask(app, method, path, {"prompt": "a cat"})
            assert (status, json.loads(text)) == (503, {"error": "the queue cannot be reached"})

    asyncio.run(customer())


def test_the_prompts_of_the_demo_are_jobs() -> None:
    rows = [json.loads(line) for line in (ROOT / "examples/prompts.jsonl").read_text().splitlines()]
    assert rows
    assert all(row["prompt"] for row in rows)


def test_the_packages_main_names_import_without_heavy_libraries() -> None:
    code = "import sys, saggar.jobs; print([m for m in ('torch', 'diffusers', 'boto3', 'celery') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert JobClient.__name__ == "JobClient"
