"""Make the folder that Saggar loads Doodle from out of files of several sources. Needs Python alone.

    python assemble.py --blocks doodle.safetensors --ends ends.safetensors --text text.safetensors \\
        --tokenizer tokenizer.model --config doodle.json --vae FOLDER --to doodle [--link]

FOLDER is a VAE as diffusers saves it, or a pipeline's folder that has one. Weights keep their names: loading renames.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

PLACES = {
    "blocks": "doodle.safetensors",
    "ends": "parts/ends.safetensors",
    "text": "parts/text.safetensors",
    "tokenizer": "tokenizer.model",
    "config": "doodle.json",
}
"""Where each file goes."""
VAE = ("config.json", "diffusion_pytorch_model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the folder that Saggar loads Doodle from.")
    for name, place in PLACES.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"becomes {place}")
    parser.add_argument("--vae", type=Path, required=True, help="a folder")
    parser.add_argument("--to", type=Path, required=True, help="a new folder")
    parser.add_argument("--shift", type=float, default=1.5, help="of the noise levels (default: 1.5)")
    parser.add_argument(
        "--link", action="store_true", help="hard links where the file system allows them, no copies"
    )
    wish = parser.parse_args()
    vae = wish.vae / "vae" if (wish.vae / "vae").is_dir() else wish.vae
    files = {place: getattr(wish, name) for name, place in PLACES.items()}
    files |= {f"vae/{name}": vae / name for name in VAE}
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        sys.exit(f"no such file: {', '.join(missing)}")
    if wish.to.exists():
        sys.exit(f"{wish.to} exists: name a new folder")
    for place, path in files.items():
        put(path, wish.to / place, wish.link)
    (wish.to / "model_index.json").write_text(json.dumps(index(wish.shift), indent=1), encoding="utf-8")
    print(f"wrote {wish.to}")


def put(source: Path, target: Path, link: bool) -> None:
    """Copy a file, or link it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(source.resolve(), target)
        except OSError as error:
            print(f"{target.name} is copied: {error.strerror}")
        else:
            return
    shutil.copyfile(source, target)


def index(shift: float) -> dict[str, object]:
    """model_index.json. A list of two texts would be a component: files are named in an object."""
    return {
        "_class_name": "DoodlePipeline",
        "vae": ["diffusers", "AutoencoderKL"],
        "config": PLACES["config"],
        "tokenizer": PLACES["tokenizer"],
        "weights": {name: PLACES[name] for name in ("blocks", "ends", "text")},
        "shift": shift,
    }


if __name__ == "__main__":
    main()
