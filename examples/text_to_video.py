"""Text to video, Wan or HunyuanVideo-1.5: by the engine alone, or with --queued by a worker that serves the model.

    python examples/text_to_video.py "a red fox in the snow" --to out/video
    saggar worker --model out/video/tiny-wan &
    python examples/text_to_video.py "a red fox in the snow" --model tiny-wan --queued

Alone it needs no server, and writes an MP4 file for each prompt; a queue's is named by SAGGAR_REDIS_URL, the worker
writes the files, and their places are printed. Without --model a tiny model is made, whose videos are noise; real ones
are Wan-AI/Wan2.1-T2V-1.3B-Diffusers and hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from saggar.engine import Engine, EngineConfig, Request
from saggar.engine.models.tiny import make_tiny
from saggar.jobs import Job, JobClient, JobSettings
from saggar.workers.encode_media import encode_media
from saggar.workers.told import one_line_errors


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a video of each prompt.")
    parser.add_argument("prompts", nargs="*", default=["a red fox in the snow"])
    parser.add_argument("--model", help="instead of a tiny one that is made")
    parser.add_argument("--queued", action="store_true", help="by a worker that serves the model")
    parser.add_argument(
        "--to", type=Path, default=Path("out/video"), help="where files go that are made here"
    )
    parser.add_argument(
        "--frames", type=int, help="instead of the model's default: 1 more than a multiple of 4"
    )
    parser.add_argument("--steps", type=int, help="instead of the model's default")
    wish = parser.parse_args()
    given = {"num_frames": wish.frames, "num_inference_steps": wish.steps}
    params = {name: value for name, value in given.items() if value is not None}
    (queued if wish.queued else alone)(wish, params)


def alone(wish: argparse.Namespace, params: dict[str, int]) -> None:
    """All prompts in one batch, in a process of its own."""
    tiny = wish.to / "tiny-wan"
    model = wish.model or (tiny if tiny.exists() else make_tiny("wan", tiny))
    requests = [
        Request(id=str(index), prompt=prompt, task="t2v", seed=index, params=params)
        for index, prompt in enumerate(wish.prompts)
    ]
    wish.to.mkdir(parents=True, exist_ok=True)
    with Engine.make(EngineConfig(model=str(model))) as engine:
        for request, output in zip(requests, engine.generate(requests, progress=True), strict=True):
            clip, path = output.clips[0], wish.to / f"{request.id}.mp4"
            told = {"prompt": request.prompt, "seed": request.seed}
            (file,) = encode_media(clip, "mp4", None, told)
            path.write_bytes(file.data)
            print(f"{path}: {request.prompt!r}, {len(clip.frames)} frames, {output.steps} steps")


def queued(wish: argparse.Namespace, params: dict[str, int]) -> None:
    """A job for each prompt, and where its file is."""
    with JobClient(JobSettings.from_env()) as client:
        jobs = [
            client.submit(
                Job(model=wish.model or "tiny-wan", task="t2v", prompt=prompt, seed=index, params=params)
            )
            for index, prompt in enumerate(wish.prompts)
        ]
        for job in jobs:
            for output in client.result(job.id).outputs:
                print(output.uri, f"seed {output.seed}, {output.frames} frames")


if __name__ == "__main__":  # the engine's processes import this file anew
    with one_line_errors():
        main()
