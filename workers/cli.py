"""The `saggar` command. Each command's module is imported when it is called, so that `--help` is quick."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

# command -> (module, attribute, one line of help)
COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "run": ("saggar.workers.commands.run", "run", "Make what a manifest asks for: pictures, videos, sounds."),
    "runs": (
        "saggar.workers.commands.runs",
        "runs",
        "List runs; pause, resume, cancel, retry, compare them.",
    ),
    "worker": ("saggar.workers.commands.worker", "worker", "Serve one model: take jobs, store results."),
    "node": ("saggar.workers.commands.node", "node", "Lend this machine's ranks to a worker on another."),
    "submit": ("saggar.workers.commands.jobs", "submit", "Queue one job."),
    "watch": ("saggar.workers.commands.jobs", "watch", "Follow a job or a run as it happens."),
    "status": ("saggar.workers.commands.jobs", "status", "Show one job."),
    "list": ("saggar.workers.commands.jobs", "list_jobs", "List jobs by state, run or tag."),
    "cancel": ("saggar.workers.commands.jobs", "cancel", "Cancel jobs, waiting or running."),
    "retry": ("saggar.workers.commands.jobs", "retry", "Queue failed or cancelled jobs again."),
    "verify": ("saggar.workers.commands.verify", "verify", "Read stored results again and compare hashes."),
    "dead": ("saggar.workers.commands.dead", "dead", "Jobs set aside after too many crashes."),
    "models": ("saggar.workers.commands.models", "models", "What can be served, and what is."),
    "doctor": ("saggar.workers.commands.doctor", "doctor", "Check this machine, its Redis and its store."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="saggar")
def cli() -> None:
    """Pictures, videos and sounds by the hundred thousand: a durable queue in front of a diffusion engine.

    Start with:  saggar run examples/prompts.jsonl
    """


def main() -> None:
    """Entry point: an error of ours is one line on standard error, never a traceback."""
    from saggar.workers.told import one_line_errors

    with one_line_errors():
        cli(standalone_mode=True)


if __name__ == "__main__":
    main()
