"""`saggar` as a user calls it, and what a run leaves."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from saggar.storage.base import Storage
from saggar.storage.shard_index import ShardKeys, read_indexes
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


def attempts(storage: Storage, name: str) -> dict[str, int]:
    """Of each job in a run's WebDataset shards: the attempt that made it, as its sample says."""
    made: dict[str, int] = {}
    for index in read_indexes(storage, name):
        data = storage.get(ShardKeys(name).data + index.name)
        with tarfile.open(fileobj=io.BytesIO(data)) as shard:
            for member in shard:
                file = shard.extractfile(member) if member.name.endswith(".json") else None
                if file is not None:
                    side = json.load(file)
                    made[side["job_id"]] = side["attempt"]
    return made


def is_clean(storage: Storage) -> bool:
    found = verify(storage)
    assert found.findings == [], found.findings[:5]
    return found.clean
