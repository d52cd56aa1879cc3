"""`saggar run MANIFEST`: prompts from start to files, on this machine or on a cluster's queue."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from saggar.jobs.cards import ModelCard
from saggar.jobs.client import JobClient
from saggar.jobs.errors import ConfigError
from saggar.jobs.runs import Controller, Run, RunLedger, RunSpec
from saggar.jobs.schema import Job
from saggar.jobs.settings import connect
from saggar.storage.base import Storage, open_storage
from saggar.workers.runs.drive import drive
from saggar.workers.runs.finish import RunFinisher
from saggar.workers.runs.folder import RunFolder
from saggar.workers.runs.follow import progress_line, trouble
from saggar.workers.runs.launch import Flags, check_flags, estimate, register
from saggar.workers.runs.manifest import Manifest
from saggar.workers.runs.options import run_options
from saggar.workers.runs.place import CardDesk, Place, open_place
from saggar.workers.runs.readers import Columns, check_manifest
from saggar.workers.runs.report import HTML_NAME as REPORT
from saggar.workers.runs.sheet import NAME as SHEET
from saggar.workers.runs.unread import in_words
from saggar.workers.signals import StoppedBySignal, stopped_by_signals
from saggar.workers.uploads import workers_store


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@run_options
def run(manifest: Path, **options: object) -> None:
    """Make the pictures, videos or sounds of MANIFEST: JSON lines, CSV, Parquet, a .txt file with a prompt a line, or a
    folder that `datasets` reads.

    Without --cluster everything runs here: a private Redis, one worker, and a folder for the files. The same command
    again makes only what is missing. A model that makes no pictures of prompts needs its task: --set task=t2v.
    """
    ask = Ask.of(manifest, options)
    check_manifest(manifest)
    ask.flags.expansion(ask.name, "")  # what is wrong with flags is told before anything starts
    console = Console(stderr=True)
    try:
        with stopped_by_signals(), ExitStack() as stack:
            place = stack.enter_context(
                open_place(ask.redis_url, ask.target, ask.model, ask.data, ask.worker)
            )
            session = Session(console, ask, place, stack)
            registered = session.plan()
            if registered is None:
                return
            if ask.detach:
                console.print(
                    f"run {ask.name} goes on without this command; saggar runs show {ask.name} says how it stands"
                )
                return
            began = time.monotonic()
            ended = session.follow(registered)
            session.report(registered, ended, time.monotonic() - began)
    except KeyboardInterrupt as interrupt:
        console.print(f"stopped; {_after_interrupt(ask)}")
        sys.exit(128 + (interrupt.number if isinstance(interrupt, StoppedBySignal) else signal.SIGINT))
    sys.exit(0 if ended.state == "done" and not (ended.failed or ended.cancelled) else 1)


def _after_interrupt(ask: Ask) -> str:
    if ask.redis_url is None:
        return "the same command goes on where it was"
    return f"what is queued stays queued: the same command goes on, saggar runs cancel {ask.name} ends it"


@dataclass(frozen=True)
class Ask:
    """What was asked for on the command line."""

    manifest: Path
    target: str
    name: str
    flags: Flags
    columns: dict[str, str]
    settings: dict[str, object]
    worker: dict[str, object]
    model: str | None = None
    redis_url: str | None = None
    data: Path | None = None
    detach: bool = False
    extend: bool = False
    skip_bad: bool = False
    dry: bool = False

    @classmethod
    def of(cls, manifest: Path, options: dict[str, object]) -> Ask:
        """Raises ConfigError."""
        from saggar.workers.runs.options import ask_values

        return cls(manifest=manifest, **ask_values(manifest, options))  # type: ignore[arg-type]


class Session:
    """One call of the command, over an open place."""

    def __init__(self, console: Console, ask: Ask, place: Place, stack: ExitStack) -> None:
        self._console, self._ask, self._place, self._stack = console, ask, place, stack
        self._redis = connect(place.settings)
        stack.callback(self._redis.close)
        self._client = stack.enter_context(JobClient(place.settings))
        self._runs = RunLedger(self._redis, place.settings)
        self._target: Storage = open_storage(ask.target)
        stack.callback(self._target.close)
        self._folder = RunFolder(self._target, ask.name)
        self._store: Storage | None = None

    def plan(self) -> Run | None:
        """Reads, checks and registers; None: it was only to be looked at. Raises ConfigError, RunChanged, RunBusy."""
        ask, desk = self._ask, CardDesk(self._place.settings)
        card = desk.wait_for(self._console, self._place)
        expansion = ask.flags.expansion(ask.name, self._place.model, str(ask.settings.get("prefix", "")))
        check_flags(expansion, desk)
        params = {name for model in expansion.models for name in _params(desk.get(model))}
        with Manifest() as manifest:
            with self._console.status(f"checking {ask.manifest} ..."):
                columns = Columns(ask.columns, frozenset(params))
                manifest.read(ask.manifest, expansion, columns, desk, self._uploads)
            self._refuse_bad(manifest, card)
            spec = RunSpec(
                name=ask.name,
                target=self._target.url,
                model=self._place.model,
                digest=manifest.digest,
                planned=manifest.planned,
                detached=ask.detach,
                seed_stride=expansion.seed_stride,
                **ask.settings,  # type: ignore[arg-type]
            )
            if ask.dry:
                self._tell(manifest, None, card)
                return None
            with self._console.status("uploading input files ..."):
                manifest.upload()
            registered = register(self._runs, self._folder, manifest, spec, extend=ask.extend)
            self._tell(manifest, registered, card)
            return registered

    def _uploads(self) -> Storage:
        """Where the workers look for input files: the target of the embedded one, else what SAGGAR_STORE names."""
        if self._place.embedded:
            return self._target
        if self._store is None:
            self._store = workers_store(None)
            self._stack.callback(self._store.close)
        return self._store

    def follow(self, registered: Run) -> Run:
        """Controls the run, or watches whoever does, until it stands still."""
        controller = Controller(registered.name, self._client, self._redis, self._folder)
        if self._place.embedded:
            controller.claim(force=True)  # the folder's lock says that nobody else lives
        finisher = RunFinisher(registered.spec, self._client, controller, self._target, self._folder)
        self._stack.callback(finisher.close)
        controller.finisher = finisher
        with progress_line(self._console, registered) as show:
            return drive(controller, show, self._place.alive)

    def report(self, before: Run, ended: Run, seconds: float) -> None:
        """How it ended, and what to do next."""
        made = ended.settled - ended.cancelled - (before.settled - before.cancelled)
        counts = ", ".join(part for part in (f"{ended.done} succeeded", trouble(ended)) if part)
        how = (
            f"; mean batch {ended.mean_batch:.1f}; {made / max(seconds, 1e-3):.1f} jobs/s"
            if made
            else "; nothing to make"
        )
        self._console.print(counts + how)
        if ended.state == "paused":
            self._console.print(
                f"[yellow]paused: {ended.why}; the same command goes on[/yellow]", highlight=False
            )
        for n, text in list(self._runs.failures(ended.name)[1].items())[:3]:
            self._console.print(f"[red]row {n}: {text}[/red]", highlight=False)
        self._warn()
        if ended.done and ended.complete and ended.spec.sheet:
            self._show(ended)

    def _warn(self) -> None:
        """Of texts that are longer than the model reads."""
        unread = self._folder.unread
        if rows := unread.rows():
            text = f"{in_words(rows)}, and the rest is not seen: {self._shown(unread.key)}"
            self._console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _refuse_bad(self, manifest: Manifest, card: ModelCard) -> None:
        if not manifest.bad:
            return
        complaint = manifest.complaint()
        if not manifest.planned:
            untold = f"task: '{Job.model_fields['task'].default}' is not served" in complaint
            hint = f" (--set task={card.tasks[0]} says what rows do not)" if untold else ""
            raise ConfigError(f"every row is bad, nothing was queued{hint}:\n{complaint}")
        if not self._ask.skip_bad:
            raise ConfigError(
                f"{manifest.bad} bad rows, nothing was queued (--skip-bad leaves them out):\n{complaint}"
            )
        self._console.print(f"[yellow]{manifest.bad} bad rows left out:[/yellow]")
        self._console.print(complaint, markup=False, highlight=False, soft_wrap=True)

    def _tell(self, manifest: Manifest, registered: Run | None, card: ModelCard) -> None:
        """The plan, in a line or three."""
        planned = registered.planned if registered else manifest.planned
        done = registered.done if registered else 0
        folded = f", {manifest.folded} repeated rows folded" if manifest.folded else ""
        self._console.print(
            f"{planned} jobs, {done} done before{folded}; model {card.model}, run {self._ask.name}"
        )
        if manifest.columns.unused:
            self._console.print(
                f"columns that mean nothing to a job: {', '.join(manifest.columns.unused)}", markup=False
            )
        if (left := planned - done) and (known := estimate(self._runs, self._place.model, left)):
            self._console.print(
                f"about {_duration(known.seconds)} and {known.bytes / 1e6:,.1f} MB, by what run {known.name} took"
            )

    def _show(self, ended: Run) -> None:
        """The contact sheet, and what to do next."""
        if self._target.head(SHEET) is None:
            self._console.print("[yellow]no contact sheet: it could not be made[/yellow]")
            return
        self._say(f"Look at [bold]{self._shown(SHEET)}[/bold]")
        report = f"{self._folder.base}/{REPORT}"
        if self._target.head(report) is not None:
            self._say(f"The report is {self._shown(report)}")
        if self._place.embedded and self._is_folder and ended.spec.format == "objects":
            _, first = next(iter(self._folder.rows(0)))
            extension = str(first.output.format).replace("jpeg", "jpg")
            self._say(
                f"The files are {self._ask.target}/ID/a1/0-....{extension}, each with a .json beside it. "
                "Try next:"
            )
            for line in next_steps(self._ask.model, self._place.model, first):
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @property
    def _is_folder(self) -> bool:
        return self._target.url.startswith("file:")

    def _shown(self, key: str) -> str:
        """An object of the target as one would type it."""
        target = self._ask.target
        return str(Path(target) / key) if self._is_folder and "://" not in target else self._target.uri(key)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def next_steps(asked: str | None, name: str, first: Job) -> list[str]:
    """Commands to try, each with what it is for. `asked`: the model as it was typed, if it was; `name`: as jobs say."""
    model = shlex.quote(asked or name)
    flags = f" --model {model}" if asked else ""
    flags += "" if first.task == "t2i" else f" --set task={first.task}"
    saggar = _program()
    steps = (
        (f"{saggar} run my-prompts.txt --to out/mine{flags}", "one prompt a line"),
        (f"{saggar} models inspect {model}", "what --set can change"),
        ("README.md, 'A cluster'", "workers in shells of their own"),
    )
    width = max(len(command) for command, _ in steps)
    return [f"  {command:<{width}}  {what}" for command, what in steps]


def _program() -> str:
    """This command as the shell finds it: by its name, or as it was called from an environment that is not active."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "saggar" and shutil.which("saggar") is None else "saggar"


def _params(card: ModelCard | None) -> Sequence[str]:
    return list(card.checker.allowed) if card else []


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
