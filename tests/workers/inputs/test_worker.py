"""Real workers and all that they may be sent: one clear error each, while neighbours finish and the worker lives."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from click.testing import CliRunner
from PIL import Image
from saggar.engine.models.noop import colour
from saggar.engine.models.registry import open_family
from saggar.engine.models.tiny import make_tiny
from saggar.jobs.cards import Cards
from saggar.jobs.client import JobClient
from saggar.jobs.errors import InvalidJob
from saggar.jobs.record import JobRecord
from saggar.jobs.settings import connect
from saggar.storage.base import Storage, open_storage
from saggar.workers.cli import cli
from saggar.workers.translate import to_card

from tests.support.cluster import WorkerProcess, until
from tests.support.inputs import (
    BAD_IMAGES,
    BAD_SOUNDS,
    BAD_VIDEOS,
    RED,
    image,
    sound,
    tone,
    turned_jpeg,
    video,
)
from tests.support.web import TRUST, WebServer
from tests.support.weed import S3Server
from tests.workers.conftest import StartWorker

pytestmark = pytest.mark.e2e

BLUE = (20, 40, 210)


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        server.files["/good.png"] = image(color=BLUE)
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "store"))


@pytest.fixture
def start(
    start_worker: StartWorker, client: JobClient, web: WebServer, tmp_path: Path
) -> Callable[..., WorkerProcess]:
    """A worker of `noop`, `noop-video` or `noop-audio` that may read from the test's own host too."""

    def start(name: str = "noop", *flags: str, store: str | None = None, **environ: str) -> WorkerProcess:
        model = make_tiny(name, tmp_path / name)
        connection = connect(client.settings)
        Cards(connection, client.settings).publish(
            to_card(open_family(str(model)).info(name, 8, ""), name, 8), "nobody"
        )
        Cards(connection, client.settings).leave(name, "nobody")
        connection.close()
        sources = ("--inputs-from", web.url(""), "--inputs-from", f"https://127.0.0.1:{web.port}")
        worker = start_worker(
            *sources,
            "--inputs-private-host",
            "localhost",
            *flags,
            store=store,
            model=str(model),
            environ={"SSL_CERT_FILE": TRUST, **environ},
        )
        return worker.ready(name)

    return start


def put(store: Storage, name: str, data: bytes) -> str:
    store.put(f"uploads/{name}", data, content_type="application/octet-stream")
    return store.uri(f"uploads/{name}")


def submit(client: JobClient, model: str, task: str, inputs: dict[str, list[str]], **fields: object) -> str:
    job = {"model": model, "task": task, "prompt": "p", "seed": 1, "inputs": inputs, **fields}
    return client.submit(job).id


def ended(client: JobClient, job_id: str) -> JobRecord:
    until(lambda: client.status(job_id).ended, 60, f"the end of {job_id}")
    return client.status(job_id)


def pixel(store: Storage, record: JobRecord, index: int = 0) -> tuple[int, ...]:
    assert record.state == "succeeded", record.error
    assert record.result is not None
    key = record.result.outputs[index].uri.removeprefix(f"{store.url}/")
    with Image.open(io.BytesIO(store.get(key))) as picture:
        value = picture.getpixel((0, 0))
    assert isinstance(value, tuple)
    return value


def bad_uris(web: WebServer, store: Storage, tmp_path: Path) -> dict[str, tuple[str, str]]:
    """URI and what the error says, by what is wrong."""
    (tmp_path / "secret.png").write_bytes(image())
    (tmp_path / "store" / "uploads" / "link.png").symlink_to(tmp_path / "secret.png")
    web.redirect("/to-http", "http://localhost/a.png")
    web.redirect("/to-elsewhere", "https://evil.example/a.png")
    web.redirect("/to-loopback", f"https://127.0.0.1:{web.port}/good.png")
    web.redirect("/to-metadata", "https://169.254.169.254/latest/meta-data")
    web.redirect("/to-file", "file:///etc/passwd")
    return {
        "a file outside": ("file:///etc/passwd", "lies outside"),
        "a neighbour's result": (f"{store.url}/other-job/a1/0-00000000.png", "lies outside"),
        "a link out": (f"{store.url}/uploads/link.png", "cannot be opened"),
        "no such file": (f"{store.url}/uploads/none.png", "no such file"),
        "encoded dots": (f"{store.url}/uploads/%2e%2e/x.png", "is not a URI that can be read"),
        "another bucket": ("s3://somebody-else/a.png", "lies outside"),
        "another host": ("https://evil.example/a.png", "lies outside"),
        "the metadata service": ("https://169.254.169.254/latest/meta-data", "lies outside"),
        "an allowed name on loopback": (
            web.url("/good.png", "127.0.0.1"),
            "no address that may be connected to",
        ),
        "redirected to http": (web.url("/to-http"), "a redirect is not a URI"),
        "redirected elsewhere": (web.url("/to-elsewhere"), "a redirect lies outside"),
        "redirected to loopback": (web.url("/to-loopback"), "no address that may be connected to"),
        "redirected to metadata": (web.url("/to-metadata"), "a redirect lies outside"),
        "redirected to a file": (web.url("/to-file"), "a redirect lies outside"),
        "redirected for ever": (web.url("/loop"), "is redirected too often"),
        "not there": (web.url("/missing"), "the host answers 404"),
        "without end": (web.url("/endless"), "has too many bytes"),
        "a terabyte, it says": (web.url("/claims"), "has too many bytes"),
        "compressed": (web.url("/packed"), "comes compressed"),
        "cut short": (web.url("/short"), "cannot be fetched"),
        "away": (web.url("/broken"), "cannot be fetched: localhost answers 503"),
        "silent": (web.url("/silent"), "cannot be fetched"),
    }


def test_every_bad_picture_fails_its_job_alone(
    start: Callable[..., WorkerProcess], client: JobClient, store: Storage, web: WebServer, tmp_path: Path
) -> None:
    worker = start("noop", "--inputs-max-bytes", "1000000", SAGGAR_INPUTS_TIMEOUT_S="3")
    child = worker.child().pid
    good = put(store, "good.png", image())
    files = {
        name: (put(store, f"{number}.bin", make()), says)
        for number, (name, (make, says)) in enumerate(BAD_IMAGES.items())
    }
    bad = files | bad_uris(web, store, tmp_path)
    assert len(bad) >= 38
    jobs = {name: submit(client, "noop", "i2i", {"image": [uri]}) for name, (uri, _) in bad.items()}
    second = submit(client, "noop", "i2i", {"image": [good, files["svg"][0]]})
    mask = submit(client, "noop", "i2i", {"image": [good], "mask": [files["html"][0]]})
    neighbours = [
        submit(client, "noop", "i2i", {"image": [uri]})
        for uri in [good, web.url("/good.png")]
        for _ in range(4)
    ]
    plain = submit(client, "noop", "t2i", {})

    for name, job_id in jobs.items():
        record = ended(client, job_id)
        assert record.state == "failed" and record.error is not None, name
        kind = "input_unavailable" if name in ("cut short", "away", "silent") else "invalid"
        assert (record.error.kind, record.attempt) == (kind, 1), name
        assert re.match(r"inputs\.image\[0\]: .+ \(allowed: .+\)$", record.error.message), (
            record.error.message
        )
        assert bad[name][1] in record.error.message
        assert "\n" not in record.error.message
    for job_id, field in ((second, "inputs.image[1]: "), (mask, "inputs.mask[0]: ")):
        error = ended(client, job_id).error
        assert error is not None and error.message.startswith(field)
    for index, job_id in enumerate(neighbours):
        assert pixel(store, ended(client, job_id)) == (RED if index < 4 else BLUE)
    assert pixel(store, ended(client, plain)) == tuple(map(int, colour("p", 1)))
    assert worker.child().pid == child, "the worker was not started anew"
    assert "Traceback" not in worker.log.read_text()


def test_bad_videos_and_sounds_fail_their_jobs_alone(
    start: Callable[..., WorkerProcess], client: JobClient, store: Storage
) -> None:
    for model, task, kind, bad, good in (
        ("noop-video", "v2v", "video", BAD_VIDEOS, video()),
        ("noop-audio", "a2a", "audio", BAD_SOUNDS, sound()),
    ):
        worker = start(model)
        child = worker.child().pid
        uris = {name: put(store, f"{kind}-{n}", make()) for n, (name, (make, _)) in enumerate(bad.items())}
        jobs = {name: submit(client, model, task, {kind: [uri]}) for name, uri in uris.items()}
        neighbour = submit(client, model, task, {kind: [put(store, f"{kind}-good", good)]})
        for name, job_id in jobs.items():
            error = ended(client, job_id).error
            assert error is not None and error.kind == "invalid", name
            assert error.message.startswith(f"inputs.{kind}[0]: ") and bad[name][1] in error.message
        assert ended(client, neighbour).state == "succeeded"
        assert worker.child().pid == child
        assert worker.terminate() == 0


def test_what_can_be_told_without_fetching_is_told_at_submit(
    start: Callable[..., WorkerProcess], client: JobClient
) -> None:
    start("noop")
    for inputs, task, says in (
        ({"image": ["http://cdn.example/a.png"]}, "i2i", "inputs.image[0]: is not a URI that can be read"),
        ({"image": ["/etc/passwd"]}, "i2i", "inputs.image[0]: is not a URI that can be read"),
        ({"image": []}, "i2i", "inputs.image: 0 were given for i2i (allowed: 1 to 4)"),
        ({"image": ["s3://b/k"] * 5}, "i2i", "inputs.image: 5 were given for i2i (allowed: 1 to 4)"),
        ({"video": ["s3://b/k"]}, "i2i", "inputs.video: is not taken by noop"),
        ({"image": ["s3://b/k"]}, "t2i", "inputs.image: 1 were given for t2i (allowed: 0)"),
    ):
        with pytest.raises(InvalidJob) as refused:
            submit(client, "noop", task, inputs)  # type: ignore[arg-type]
        assert says in str(refused.value)


def test_media_go_in_and_come_out(
    start: Callable[..., WorkerProcess], client: JobClient, store: Storage
) -> None:
    """A layered picture, a video with the sound of the one that it was made from, frames, a sound."""
    start("noop")
    start("noop-video")
    start("noop-audio")
    transparent = put(store, "rgba.png", image("RGBA", color=(*RED, 90)))
    turned = put(store, "turned.jpg", turned_jpeg(6))
    clip = put(store, "clip.mp4", video(10, sound=tone(1.0)))
    noise = put(store, "noise.wav", sound(tone(0.25)))

    record = ended(client, submit(client, "noop", "layers", {"image": [transparent]}, num_outputs=2))
    assert record.result is not None, record.error
    assert [(one.index, one.part, one.seed) for one in record.result.outputs] == [
        (0, 0, 1), (0, 1, 1), (1, 0, 2), (1, 1, 2),
    ]  # fmt: skip
    assert [pixel(store, record, index) for index in range(2)] == [(*RED, 255), (0, 0, 0, 0)]
    near = pixel(store, ended(client, submit(client, "noop", "i2i", {"image": [turned]})))
    assert np.abs(np.subtract(near, RED)).max() <= 3

    made = ended(client, submit(client, "noop-video", "v2v", {"video": [clip]}, output={"quality": 95}))
    assert made.result is not None, made.error
    (ref,) = made.result.outputs
    assert (ref.content_type, ref.width, ref.height, ref.frames, ref.fps) == ("video/mp4", 64, 64, 9, 8.0)
    assert (ref.sample_rate, ref.channels, ref.duration_s) == (48_000, 2, 1.125)
    with av.open(io.BytesIO(store.get(ref.uri.removeprefix(f"{store.url}/")))) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(container.streams.audio) == 1
    assert len(frames) == 9
    assert np.abs(frames[8][5, 5].astype(int) - np.add(RED, 8)).max() <= 8

    pictures = ended(
        client, submit(client, "noop-video", "t2v", {}, output={"format": "png"}, params={"sound_hz": 440})
    )
    assert pictures.result is not None, pictures.error
    assert [one.part for one in pictures.result.outputs] == list(range(10))
    assert [one.content_type for one in pictures.result.outputs] == ["image/png"] * 9 + ["audio/wav"]
    first = np.array(colour("p", 1)).astype(int)
    assert pixel(store, pictures, 3) == tuple(np.minimum(first, 252) + 3)

    heard = ended(client, submit(client, "noop-audio", "a2a", {"audio": [noise]}, output={"format": "flac"}))
    assert heard.result is not None, heard.error
    samples, rate = soundfile.read(
        io.BytesIO(store.get(heard.result.outputs[0].uri.removeprefix(f"{store.url}/")))
    )
    assert rate == 48_000
    np.testing.assert_allclose(samples, tone(0.25), atol=1e-4)


def test_a_fetch_that_hangs_can_be_cancelled_and_drained(
    start: Callable[..., WorkerProcess], client: JobClient, web: WebServer, store: Storage
) -> None:
    worker = start("noop")
    hanging = [submit(client, "noop", "i2i", {"image": [web.url("/silent")]}) for _ in range(2)]
    until(lambda: web.asked["/silent"] == 2)
    good = put(store, "good.png", image())
    assert pixel(store, ended(client, submit(client, "noop", "i2i", {"image": [good]}))) == RED
    client.cancel(hanging[0])
    assert ended(client, hanging[0]).state == "cancelled"
    assert worker.terminate() == 0
    assert client.status(hanging[1]).state == "queued"


def test_a_worker_killed_amid_its_fetches_loses_no_job(
    start: Callable[..., WorkerProcess], client: JobClient, web: WebServer, store: Storage
) -> None:
    """Some are being fetched, some wait for that, some are done: the next worker makes what is left."""
    good = put(store, "good.png", image())
    worker = start("noop", "--lease", "2")
    hanging = [submit(client, "noop", "i2i", {"image": [web.url("/silent")]}) for _ in range(12)]
    until(lambda: web.asked["/silent"] == 8)
    done = submit(client, "noop", "i2i", {"image": [good]})
    assert pixel(store, ended(client, done)) == RED
    worker.kill()
    del web.habits["/silent"]
    web.files["/silent"] = image(color=BLUE)
    start("noop", "--lease", "2")
    for job_id in hanging:
        assert pixel(store, ended(client, job_id)) == BLUE
    assert client.counts()["succeeded"] == 13


def test_a_store_that_is_away_delays_a_job_and_fails_none(
    start: Callable[..., WorkerProcess],
    client: JobClient,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.bucket}/inputs-away"
    store = open_storage(url)
    uri = put(store, "good.png", image())
    worker = start("noop", store=url, **s3_server.env)
    s3_server.kill()
    try:
        job_id = submit(client, "noop", "i2i", {"image": [uri]})
        until(lambda: client.status(job_id).state == "running")
    finally:
        s3_server.start()
    assert pixel(store, ended(client, job_id)) == RED
    assert worker.terminate() == 0
    store.close()


def test_local_files_of_a_submit_are_uploaded_first(
    start: Callable[..., WorkerProcess], client: JobClient, store: Storage, redis_url: str, tmp_path: Path
) -> None:
    start("noop")
    (tmp_path / "mine.png").write_bytes(image())
    (tmp_path / "mask.png").write_bytes(image("L", color=255))
    (tmp_path / "notes.txt").write_text("no picture")
    arguments = [
        "submit",
        "p",
        "--model",
        "noop",
        "--task",
        "i2i",
        "--redis",
        redis_url,
        "--store",
        store.url,
    ]
    files = ["--image", str(tmp_path / "mine.png"), "--mask", str(tmp_path / "mask.png")]
    said = CliRunner().invoke(cli, [*arguments, *files, "--id", "mine", "--wait"])
    assert said.exit_code == 0, said.output
    record = client.status("mine")
    assert pixel(store, record) == RED
    assert record.job.inputs.image[0].startswith(f"{store.url}/uploads/")
    refused = CliRunner().invoke(cli, [*arguments, "--image", str(tmp_path / "notes.txt")])
    assert refused.exit_code != 0
    assert "neither a picture nor a video nor a sound" in str(refused.exception)
    (tmp_path / "noise.wav").write_bytes(sound(tone()))
    refused = CliRunner().invoke(cli, [*arguments, "--image", str(tmp_path / "noise.wav")])
    assert refused.exit_code != 0
    assert "noise.wav: WAV is no file for inputs.image (allowed: PNG, " in str(refused.exception)
