"""Text to sound, Stable Audio: by the engine alone, or with --queued by a worker that serves the model.

    python examples/text_to_sound.py "rain on a tin roof" --to out/sound
    saggar worker --model out/sound/tiny-stable-audio &
    python examples/text_to_sound.py "rain on a tin roof" --queued

Alone it needs no server, and writes a WAV file for each prompt; a queue's is named by SAGGAR_REDIS_URL, the worker
writes the files, and their places are printed. Without --model a tiny model is made, whose sounds are noise; the real
one is stabilityai/stable-audio-open-1.0. --end is the length in seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import soundfile
from saggar.engine import Engine, EngineConfig, Request
from saggar.engine.models.tiny import make_tiny
from saggar.jobs import Job, JobClient, JobSettings, OutputSpec
from saggar.workers.told import one_line_errors

TINY = "stable-audio"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a sound of each prompt.")
    parser.add_argument("prompts", nargs="*", default=["rain on a tin roof"])
    parser.add_argument("--model", help="instead of a tiny one that is made")
    parser.add_argument("--queued", action="store_true", help="by a worker that serves the model")
    parser.add_argument(
        "--to", type=Path, default=Path("out/sound"), help="where files go that are made here"
    )
    parser.add_argument("--format", default="wav", choices=["wav", "flac"], help="16 bits or 24")
    parser.add_argument("--end", type=float, help="seconds, instead of the longest that the model makes")
    parser.add_argument("--steps", type=int, help="instead of the model's default")
    wish = parser.parse_args()
    given = {"audio_end_in_s": wish.end, "num_inference_steps": wish.steps}
    params = {name: value for name, value in given.items() if value is not None}
    (queued if wish.queued else alone)(wish, params)


def alone(wish: argparse.Namespace, params: dict[str, float]) -> None:
    """All prompts in one batch, in a process of its own."""
    tiny = wish.to / f"tiny-{TINY}"
    model = wish.model or (tiny if tiny.exists() else make_tiny(TINY, tiny))
    requests = [
        Request(id=str(index), prompt=prompt, task="t2a", seed=index, params=params)
        for index, prompt in enumerate(wish.prompts)
    ]
    wish.to.mkdir(parents=True, exist_ok=True)
    with Engine.make(EngineConfig(model=str(model))) as engine:
        for request, output in zip(requests, engine.generate(requests, progress=True), strict=True):
            sound, path = output.sounds[0], wish.to / f"{request.id}.{wish.format}"
            soundfile.write(path, sound.samples, sound.rate)
            print(f"{path}: {request.prompt!r}, {sound.seconds:g} s, {output.steps} steps")


def queued(wish: argparse.Namespace, params: dict[str, float]) -> None:
    """A job for each prompt, and where its file is."""
    with JobClient(JobSettings.from_env()) as client:
        jobs = [
            client.submit(
                Job(
                    model=wish.model or f"tiny-{TINY}",
                    task="t2a",
                    prompt=prompt,
                    seed=index,
                    params=params,
                    output=OutputSpec(format=wish.format),
                )
            )
            for index, prompt in enumerate(wish.prompts)
        ]
        for job in jobs:
            for output in client.result(job.id).outputs:
                print(output.uri, f"seed {output.seed}, {output.duration_s:g} s")


if __name__ == "__main__":  # the engine's processes import this file anew
    with one_line_errors():
        main()
