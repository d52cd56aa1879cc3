"""A picture to video, Wan or HunyuanVideo-1.5: by the engine alone, or with --queued by a worker that serves the model.

    python examples/image_to_video.py fox.png "it turns its head" --to out/video
    saggar worker --model out/video/tiny-wan-i2v-a14b --store file:///tmp/results &
    SAGGAR_STORE=file:///tmp/results python examples/image_to_video.py fox.png "it turns its head" --queued

The video begins with the picture; with --last it ends with another one. Alone it needs no server and writes an MP4
file. A queue is named by SAGGAR_REDIS_URL, and pictures go up to the workers' store, SAGGAR_STORE, unless they are
URIs. Without --model a tiny model is made, whose videos are noise; real ones are Wan-AI/Wan2.2-I2V-A14B-Diffusers and
hunyuanvideo-community/HunyuanVideo-1.5-480p_i2v.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from saggar.engine import Engine, EngineConfig, Request
from saggar.engine.models.tiny import make_tiny
from saggar.jobs import JobClient, JobSettings
from saggar.workers.encode_media import encode_media
from saggar.workers.told import one_line_errors
from saggar.workers.uploads import FileError, check_file, uri_of, workers_store

TINY = "wan-i2v-a14b"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a video that begins with a picture.")
    parser.add_argument("picture", help="a file, or with --queued a URI that the worker may read")
    parser.add_argument("prompt", nargs="?", default="")
    parser.add_argument("--last", help="a picture that it ends with, for models that take one")
    parser.add_argument("--model", help="instead of a tiny one that is made")
    parser.add_argument("--queued", action="store_true", help="by a worker that serves the model")
    parser.add_argument(
        "--to", type=Path, default=Path("out/video"), help="where files go that are made here"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--frames", type=int, help="instead of the model's default: 1 more than a multiple of 4"
    )
    parser.add_argument("--steps", type=int, help="instead of the model's default")
    wish = parser.parse_args()
    given = {"num_frames": wish.frames, "num_inference_steps": wish.steps}
    params = {name: value for name, value in given.items() if value is not None}
    pictures = [wish.picture, *([wish.last] if wish.last else [])]
    try:
        for picture in pictures:
            if not (wish.queued and "://" in picture):
                check_file(Path(picture), "image")
    except FileError as error:
        parser.error(str(error))
    (queued if wish.queued else alone)(wish, pictures, params)


def alone(wish: argparse.Namespace, pictures: list[str], params: dict[str, int]) -> None:
    """In a process of its own."""
    tiny = wish.to / f"tiny-{TINY}"
    model = wish.model or (tiny if tiny.exists() else make_tiny(TINY, tiny))
    request = Request(
        "video",
        wish.prompt,
        seed=wish.seed,
        task="i2v",
        params=params,
        inputs={"image": [read(Path(picture)) for picture in pictures]},
    )
    with Engine.make(EngineConfig(model=str(model))) as engine:
        output = engine.generate([request], progress=True)[0]
    clip, path = output.clips[0], wish.to / "video.mp4"
    (file,) = encode_media(clip, "mp4", None, {"prompt": wish.prompt, "seed": wish.seed})
    wish.to.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.data)
    print(f"{path}: {len(clip.frames)} frames, {output.steps} steps")


def read(path: Path) -> np.ndarray:
    """A picture as it is looked at."""
    with Image.open(path) as picture:
        return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))


def queued(wish: argparse.Namespace, pictures: list[str], params: dict[str, int]) -> None:
    """A job, and where its file is."""
    with closing(workers_store(None)) as store:
        uris = [uri_of(picture, store, "image") for picture in pictures]
    job = {
        "model": wish.model or f"tiny-{TINY}",
        "task": "i2v",
        "prompt": wish.prompt,
        "seed": wish.seed,
        "params": params,
        "inputs": {"image": uris},
    }
    with JobClient(JobSettings.from_env()) as client:
        for output in client.result(client.submit(job).id).outputs:
            print(output.uri, f"seed {output.seed}, {output.frames} frames")


if __name__ == "__main__":  # the engine's processes import this file anew
    with one_line_errors():
        main()
