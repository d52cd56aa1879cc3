"""An edit of one picture or several: by the engine alone, or with --queued by a worker that serves the model.

    python examples/edit_picture.py fox.png hat.png --prompt "the fox wears the hat" --to out/edit
    saggar worker --model out/edit/tiny-qwen-image-edit-plus --store file:///tmp/results &
    SAGGAR_STORE=file:///tmp/results python examples/edit_picture.py fox.png --prompt "it snows" --queued

Alone it needs no server and writes a PNG file. A queue is named by SAGGAR_REDIS_URL, and pictures go up to the workers'
store, SAGGAR_STORE, unless they are URIs. Without --model a tiny model is made, whose pictures are noise; real ones are
Qwen/Qwen-Image-Edit-2509, black-forest-labs/FLUX.2-klein-4B and black-forest-labs/FLUX.1-Kontext-dev. With --task i2i a
model of texts begins with the picture.
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
from saggar.workers.told import one_line_errors
from saggar.workers.uploads import FileError, check_file, uri_of, workers_store

TINY = "qwen-image-edit-plus"


def main() -> None:
    parser = argparse.ArgumentParser(description="Edit pictures.")
    parser.add_argument("pictures", nargs="+", help="files, or with --queued URIs that the worker may read")
    parser.add_argument("--prompt", required=True, help="what shall be done")
    parser.add_argument("--model", help="instead of a tiny one that is made")
    parser.add_argument("--task", default="edit", choices=["edit", "i2i"], help="what the model does")
    parser.add_argument("--queued", action="store_true", help="by a worker that serves the model")
    parser.add_argument("--to", type=Path, default=Path("out/edit"), help="where files go that are made here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="instead of the model's default")
    wish = parser.parse_args()
    params = {} if wish.steps is None else {"num_inference_steps": wish.steps}
    try:
        for picture in wish.pictures:
            if not (wish.queued and "://" in picture):
                check_file(Path(picture), "image")
    except FileError as error:
        parser.error(str(error))
    (queued if wish.queued else alone)(wish, params)


def alone(wish: argparse.Namespace, params: dict[str, int]) -> None:
    """In a process of its own."""
    tiny = wish.to / f"tiny-{TINY}"
    model = wish.model or (tiny if tiny.exists() else make_tiny(TINY, tiny))
    pictures = [read(Path(picture)) for picture in wish.pictures]
    request = Request(
        "edit", wish.prompt, seed=wish.seed, task=wish.task, params=params, inputs={"image": pictures}
    )
    with Engine.make(EngineConfig(model=str(model))) as engine:
        output = engine.generate([request], progress=True)[0]
    path = wish.to / "edit.png"
    wish.to.mkdir(parents=True, exist_ok=True)
    Image.fromarray(output.images[0]).save(path)
    print(f"{path}: {output.steps} steps")


def read(path: Path) -> np.ndarray:
    """A picture as it is looked at."""
    with Image.open(path) as picture:
        return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))


def queued(wish: argparse.Namespace, params: dict[str, int]) -> None:
    """A job, and where its file is."""
    with closing(workers_store(None)) as store:
        uris = [uri_of(picture, store, "image") for picture in wish.pictures]
    job = {
        "model": wish.model or f"tiny-{TINY}",
        "task": wish.task,
        "prompt": wish.prompt,
        "seed": wish.seed,
        "params": params,
        "inputs": {"image": uris},
    }
    with JobClient(JobSettings.from_env()) as client:
        for output in client.result(client.submit(job).id).outputs:
            print(output.uri, f"seed {output.seed}")


if __name__ == "__main__":  # the engine's processes import this file anew
    with one_line_errors():
        main()
