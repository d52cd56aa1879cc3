"""Errors as people are told of them: one line with what is wrong and what to do, never a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What a caller, a file or a server that is away brings about ends the process with a line and status 2, Ctrl-C
    with one and 130. Anything else is a fault of ours and passes."""
    import redis

    try:
        yield
    except _ours() as error:
        _end(str(error).strip())
    except ModuleNotFoundError as error:
        _end(
            f"{str(error.name).partition('.')[0]} is not installed: pip install 'saggar[worker,embedded,s3]'"
        )
    except redis.AuthenticationError as error:
        _end(f"Redis refuses the user or the password of its URL: {error}")
    except (redis.ConnectionError, redis.TimeoutError) as error:
        _end(
            f"Redis cannot be reached: {str(error).rstrip('.')}; name yours in SAGGAR_REDIS_URL, or start one to try "
            "with: make cluster"
        )
    except redis.ResponseError as error:
        # Redis repeats the arguments of a command that it does not know, and a prompt may be among them.
        _end(f"Redis refuses a command: {str(error).partition(', with args')[0]}")
    except OSError as error:
        _end(str(error))
    except KeyboardInterrupt:
        _end("stopped", 128 + signal.SIGINT)


def _ours() -> tuple[type[Exception], ...]:
    """Of the engine and of servers only where they have been imported: a producer has not what they need."""
    from saggar.jobs.errors import SaggarError
    from saggar.storage.errors import StorageError

    found: list[type[Exception]] = [SaggarError, StorageError]
    for module, name in (("saggar.engine.errors", "EngineError"), ("saggar.workers.servers", "ServerError")):
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def _end(line: str, status: int = 2) -> NoReturn:
    click.secho(f"saggar: {line}", fg="red", err=True)
    sys.exit(status)
