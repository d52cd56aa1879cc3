"""compose.yaml is accepted by Compose itself, and each of its services really starts, gets healthy and stops.

There is no container here: a service's resolved command runs as a local process with the service's environment. What
only a container has is translated: host names, port numbers, mounted paths, the address to listen on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from saggar.jobs.client import JobClient
from saggar.jobs.settings import JobSettings
from saggar.workers.health import answering
from saggar.workers.servers import find_binary

from tests.support.wait import until
from tests.support.weed import free_ports, remove_sockets

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sys.executable).parent
WORKERS = {"cpu": "worker", "gpu": "worker-gpu"}
PORTS = ("6379", "8333", "9333", "8080", "8888", "5555")
VALKEY_CLI = """#!{python}
# What the image's valkey-cli does with `-p PORT ping`.
import os, sys, redis
print("PONG" if redis.Redis(port=int(sys.argv[2]), password=os.environ["VALKEYCLI_AUTH"]).ping() else "")
"""


def resolved(profile: str = "cpu", env_file: Path = ROOT / ".env.example", **env: str) -> dict[str, Any]:
    """The configuration as Compose resolves it."""
    done = compose("config", "--format", "json", env_file=env_file, COMPOSE_PROFILES=profile, **env)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning is an error"
    return json.loads(done.stdout)


def compose(*arguments: str, env_file: Path, **env: str) -> subprocess.CompletedProcess[str]:
    spec = find_spec("compose")
    assert spec is not None
    assert spec.origin is not None
    binary = Path(spec.origin).with_name("docker-compose")
    command = [binary, "-f", ROOT / "compose.yaml", "--env-file", env_file, *arguments]
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return resolved(request.param) | {"profile": request.param}


def long_running(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in config["services"].items() if service["restart"] != "no"}


def test_each_profile_has_its_worker_and_the_rest(config: dict[str, Any]) -> None:
    always = {"redis", "s3", "bucket", "chores", "flower"}
    assert set(config["services"]) == always | {WORKERS[config["profile"]]}


def test_secrets_have_no_default(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("COMPOSE_PROFILES=cpu\n")
    done = compose("config", env_file=tmp_path / "env")
    assert done.returncode != 0
    assert "copy .env.example to .env" in done.stderr  # of the first that it meets, in no order
    assert not re.findall(r"\$\{\w+:?\?\}", (ROOT / "compose.yaml").read_text()), (
        "a variable without the hint"
    )


def test_the_example_names_every_setting() -> None:
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text()))
    told = re.findall(r"^(\w+)=", (ROOT / ".env.example").read_text(), flags=re.MULTILINE)
    assert sorted(told) == sorted({*used, "COMPOSE_PROFILES"})


def test_workers_can_be_scaled(config: dict[str, Any]) -> None:
    """No fixed name, no port, no address: what two replicas could not share."""
    for service in config["services"].values():
        assert "container_name" not in service
    worker = config["services"][WORKERS[config["profile"]]]
    assert not {"ports", "hostname", "mac_address"} & set(worker)
    assert worker["networks"] == {"default": None}


def test_services_restart_and_are_watched_and_stop_in_their_own_time(config: dict[str, Any]) -> None:
    for name, service in long_running(config).items():
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
        assert service["stop_grace_period"], name
    grace = config["services"][WORKERS[config["profile"]]]["stop_grace_period"]
    assert seconds(grace) > 30, "the worker's own grace time and what it needs after it"


def test_only_the_loopback_address_is_bound(config: dict[str, Any]) -> None:
    for service in config["services"].values():
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", []))


def test_redis_keeps_what_it_was_given(config: dict[str, Any]) -> None:
    command = " ".join(config["services"]["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--appendfsync always" in command, "with everysec a kill can lose what was accepted"
    assert "--maxmemory-policy noeviction" in command
    assert [volume["target"] for volume in config["services"]["redis"]["volumes"]] == ["/data"]


def test_models_are_downloaded_once(config: dict[str, Any]) -> None:
    volumes = config["services"][WORKERS[config["profile"]]]["volumes"]
    assert {volume["source"]: volume["target"] for volume in volumes}["model-cache"] == "/models"


def test_cards_are_chosen_in_the_environment() -> None:
    worker = resolved("gpu", WORKER_GPUS="2,3")["services"]["worker-gpu"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["device_ids"], device["capabilities"]) == ("nvidia", ["2,3"], ["gpu"])


def test_images_run_without_root() -> None:
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    final = {stage.split("\n")[0].split(" AS ")[1]: stage for stage in stages if " AS build" not in stage}
    assert set(final) == {"saggar", "s3"}
    for name, stage in final.items():
        assert re.findall(r"^USER (\w+)$", stage, flags=re.MULTILINE) == ["saggar"], name


def test_an_installation_holds_every_package() -> None:
    """An image is no editable checkout: a folder that pyproject.toml does not name would be missing there."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        file.parent for top in ("jobs", "engine", "storage", "workers") for file in (ROOT / top).rglob("*.py")
    }
    names = {".".join(("saggar", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert sorted(setup["packages"]) == sorted(names)


def seconds(text: str) -> float:
    """Compose's durations: 1m30s."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text))


@dataclass
class LocalStack:
    """The services of a resolved configuration as processes of this machine."""

    config: Mapping[str, Any]
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        self._bin = self.folder / "bin"
        self._bin.mkdir()
        (self._bin / "valkey-server").symlink_to(find_binary("valkey"))
        (self._bin / "valkey-cli").write_text(VALKEY_CLI.format(python=sys.executable))
        (self._bin / "valkey-cli").chmod(0o755)

    def translated(self, text: str, service: str) -> str:
        """A text of the configuration in terms of this machine."""
        text = re.sub(r"\b(redis|s3)(?=:\d)|\b0\.0\.0\.0\b", "127.0.0.1", text)
        text = re.sub(rf"(?<![\d.])({'|'.join(PORTS)})(?![\d.])", lambda port: self._ports[port[1]], text)
        places = [volume["target"] for volume in self._service(service).get("volumes", [])]
        places += [mounted["target"] for mounted in self._service(service).get("configs", [])]
        for place in sorted(places, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.]){re.escape(place)}(?=/|$)", str(self._mount(place, service)), text)
        return text

    def start(self, service: str, name: str | None = None) -> subprocess.Popen[bytes]:
        """Start a service's command; `name` tells replicas apart."""
        self._write_configs(service)
        for volume in self._service(service).get("volumes", []):
            self._mount(volume["target"], service).mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name or service}.log").open("ab") as log:
            process = subprocess.Popen(
                self._command(self._service(service)["command"], service),
                env=self.environment(service),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[name or service] = process
        return process

    def environment(self, service: str) -> dict[str, str]:
        """The service's own variables and nothing of this process but where programs and the home are."""
        own = self._service(service).get("environment", {})
        path = os.pathsep.join([str(self._bin), str(SCRIPTS), "/usr/bin", "/bin"])
        return {"PATH": path, "HOME": str(self.folder)} | {
            name: self.translated(value, service) for name, value in own.items()
        }

    def wait_healthy(self, service: str, name: str | None = None, timeout_s: float = 180.0) -> None:
        """Run the health check's command until it succeeds once."""
        kind, *test = self._service(service)["healthcheck"]["test"]
        if kind == "CMD-SHELL":
            test = ["sh", "-c", *test]
        deadline, last = time.monotonic() + timeout_s, b""
        while time.monotonic() < deadline:
            status = self.processes[name or service].poll()
            assert status is None, f"{service} ended with {status}: {self.log(name or service)}"
            done = subprocess.run(
                self._command(test, service),
                env=self.environment(service),
                capture_output=True,
                timeout=seconds(self._service(service)["healthcheck"]["timeout"]),
                check=False,
            )
            if done.returncode == 0:
                return
            last = done.stdout + done.stderr
        raise AssertionError(f"{service} is not healthy: {last!r}, its log: {self.log(name or service)}")

    def wait_healthy_even_if_it_spins(self, service: str) -> None:
        """For SeaweedFS, whose binary (4.48, Go 1.27.1) now and then spins for ever in its runtime's `unlock2`: one
        that has not got healthy in a minute is started a second time.
        """
        try:
            self.wait_healthy(service, timeout_s=60)
        except AssertionError as stuck:
            print(stuck)
            self.processes.pop(service).kill()
            self.start(service)
            self.wait_healthy(service)

    def stop(self, name: str, service: str | None = None) -> int:
        """SIGTERM, and the exit status; AssertionError when it takes longer than its grace period."""
        process = self.processes[name]
        process.send_signal(signal.SIGTERM)
        grace = seconds(self._service(service or name)["stop_grace_period"])
        try:
            status = process.wait(grace)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end within {grace} s: {self.log(name)}") from None
        del self.processes[name]
        return status

    def stop_unless_it_spins(self, service: str) -> None:
        """The same for SeaweedFS, which the same fault of its binary catches while it stops too: what does not end
        and keeps a core busy is killed later on, as Docker would."""
        process = psutil.Process(self.processes[service].pid)
        try:
            status = self.stop(service)
        except AssertionError as stuck:
            before = sum(process.cpu_times()[:2])
            until(lambda: sum(process.cpu_times()[:2]) > before + 1.0, 20, f"{stuck} - nor spin: its end")
            print(stuck)
        else:
            assert status in (0, -signal.SIGTERM), self.log(service)

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        remove_sockets(map(int, self._ports.values()))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def _service(self, name: str) -> dict[str, Any]:
        return self.config["services"][name]

    def _mount(self, place: str, service: str) -> Path:
        return self.folder / service / place.strip("/")

    def _write_configs(self, service: str) -> None:
        for mounted in self._service(service).get("configs", []):
            target = self._mount(mounted["target"], service)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self.config["configs"][mounted["source"]]["content"])

    def _command(self, command: Sequence[str], service: str) -> list[str]:
        program, *arguments = [self.translated(word, service) for word in command]
        return [str(next(p for p in self._programs(program) if p.exists())), *arguments]

    def _programs(self, program: str) -> Iterator[Path]:
        for folder in (self._bin, SCRIPTS, Path("/usr/bin"), Path("/bin")):
            yield folder / program


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    model = tmp_path / "noop"
    model.mkdir()
    (model / "model_index.json").write_text('{"_class_name": "NoopPipeline"}')
    services = LocalStack(resolved(SAGGAR_MODEL=str(model)), tmp_path)
    yield services
    services.kill()


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_every_service_starts_gets_healthy_and_stops(stack: LocalStack) -> None:
    for service in ("redis", "s3"):
        stack.start(service)
    stack.wait_healthy("redis")
    stack.wait_healthy_even_if_it_spins("s3")
    assert stack.start("bucket").wait(60) == 0, stack.log("bucket")
    stack.processes.pop("bucket")

    stack.start("flower")
    stack.start("chores")
    stack.wait_healthy("chores")
    stack.wait_healthy("flower")

    settings = JobSettings.from_env(stack.environment("worker"))
    replicas = ["worker-1", "worker-2"]
    for name in replicas:
        stack.start("worker", name)
        stack.wait_healthy("worker", name)
    # Containers have hosts of their own, these processes share one: ask until all three have answered.
    deadline = time.monotonic() + 90
    while len(answering(settings, socket.gethostname())) < 3:
        assert time.monotonic() < deadline, [stack.log(name) for name in replicas]

    with JobClient(settings) as client:
        submitted = client.submit({"model": "noop", "prompt": "a jar"})
        result = client.result(submitted.id, timeout_s=60)
    assert result.manifest.startswith("s3://saggar/results/")

    for name in replicas:
        assert stack.stop(name, "worker") == 0, stack.log(name)
    assert stack.stop("chores") == 0, stack.log("chores")
    assert stack.stop("flower") in (0, -signal.SIGTERM), stack.log("flower")
    stack.stop_unless_it_spins("s3")
    assert stack.stop("redis") in (0, -signal.SIGTERM), stack.log("redis")
