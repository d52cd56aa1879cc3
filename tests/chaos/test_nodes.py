"""A worker whose ranks live on two nodes, through the command line as a user of two machines would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import until
from tests.support.site import MARK, ROOT, Site

pytestmark = [pytest.mark.e2e, pytest.mark.procs]


def node(site: Site, address: str, key: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "saggar.workers.cli", "node", "--address", address, "--nodes", "2"]
    command += ["--node-rank", "1", "--key-file", str(key)]
    with (site.folder / "node.log").open("ab") as sink:
        child = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {MARK: site.mark}, stdout=sink, stderr=sink
        )
    site.alone.append(child)
    return child


def test_a_worker_over_two_nodes_outlives_the_loss_of_one(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    key = site.folder / "key"
    key.write_text("0123456789abcdef\n")
    flags = ("--nodes", "2", "--node-address", address, "--node-key-file", str(key))
    first = node(site, address, key)
    site.worker(*flags, executor="multiproc", SAGGAR_RANKS="2")  # a family without branches to share
    site.serving(1)
    assert len(site.ranks()) == 2
    ids = site.submit(8, params={"sleep_s": 0.05, "steps": 20})
    until(lambda: any(record.progress for record in site.client.list(state="running").records), 60)
    first.kill()
    first.wait(10)
    until(lambda: not site.ranks(), 30, "the end of the group")
    second = node(site, address, key)
    ids += site.submit(8, first=8)
    records = site.wait(ids)
    assert {record.suspicions for record in records} == {0}
    site.check(records)
    second.terminate()
    assert second.wait(20) == 0
    site.nothing_is_left()
