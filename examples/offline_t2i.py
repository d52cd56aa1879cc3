"""Text to image with the engine alone, without a queue: one batch of all prompts, a PNG file for each.

    python examples/offline_t2i.py "a red apple, glossy" "a flat rocket" --to out/offline

Needs no server; the model runs in a process of its own. --model takes a folder, a hub id or a built-in name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from PIL import Image
from saggar.engine import Engine, EngineConfig, EngineError, Request


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a picture of each prompt.")
    parser.add_argument("prompts", nargs="*", default=["a red apple, glossy"])
    parser.add_argument("--model", default="saggar/emoji", help="a folder, a hub id or a built-in name")
    parser.add_argument("--to", type=Path, default=Path("out/offline"), help="where the files go")
    parser.add_argument("--steps", type=int, help="instead of the model's default")
    wish = parser.parse_args()
    params = {} if wish.steps is None else {"num_inference_steps": wish.steps}
    requests = [
        Request(id=str(index), prompt=prompt, seed=index, params=params)
        for index, prompt in enumerate(wish.prompts)
    ]
    wish.to.mkdir(parents=True, exist_ok=True)
    with Engine.make(EngineConfig(model=wish.model)) as engine:
        for request, output in zip(requests, engine.generate(requests, progress=True), strict=True):
            path = wish.to / f"{request.id}.png"
            Image.fromarray(output.images[0]).save(path)
            print(
                f"{path}: {request.prompt!r}, seed {request.seed}, {output.steps} steps, batch of {output.batch_size}"
            )


if __name__ == "__main__":  # the engine's processes import this file anew
    try:
        main()
    except EngineError as error:  # no such model, a parameter out of range: one line says what is allowed
        sys.exit(f"offline_t2i: {error}")
    except KeyboardInterrupt:
        print("offline_t2i: stopped", file=sys.stderr)
        sys.exit(130)
