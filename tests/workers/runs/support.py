"""`saggar` as a user calls it, and what a run leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from saggar.storage.base import Storage
from saggar.storage.shard_index import read_indexes
from saggar.workers.runs.verify import verify

SAGGAR = [sys.executable, "-m", "saggar.workers.cli"]


def saggar(
    *arguments: object, environ: Mapping[str, str] | None = None, timeout: float = 120
) -> tuple[int, str]:
    """Exit status, and what it said on either stream."""
    done = subprocess.run(
        [*SAGGAR, *map(str, arguments)],
        env=os.environ | (environ or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stderr + done.stdout


def start(*arguments: object, environ: Mapping[str, str] | None = None, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as sink:
        return subprocess.Popen(
            [*SAGGAR, *map(str, arguments)],
            env=os.environ | (environ or {}),
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def manifest(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(path: Path, count: int, **params: object) -> Path:
    return manifest(path, [{"prompt": f"p{i}", "params": params} for i in range(count)])


def packed(storage: Storage, name: str) -> list[str]:
    """Keys of all samples in a run's shards, in order."""
    return [row for index in read_indexes(storage, name) for row in index.rows]


def is_clean(storage: Storage) -> bool:
    found = verify(storage)
    assert found.findings == [], found.findings[:5]
    return found.clean
