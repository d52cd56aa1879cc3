"""A job's input files, fetched, checked and decoded: what the engine is given of them.

First all files are fetched and measured by their headers, then room for all of them is waited for at once (two jobs
that each held half would wait for ever), and only then they are decoded. Both in processes of their own (decoder.py).
Where there is room anyway, what turns out to be small is decoded as soon as it is measured: a question less for each.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

from saggar.engine.media import Clip, Media, Sound
from saggar.jobs.errors import InvalidJob
from saggar.jobs.schema import Job
from saggar.storage.errors import StorageUnavailable
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.budget import Budget
from saggar.workers.inputs.decoders import Decoders, Stopped
from saggar.workers.inputs.fetch import Fetcher, Ticket
from saggar.workers.inputs.measure import Memory, needed
from saggar.workers.inputs.policy import Limits
from saggar.workers.inputs.web import WebUnavailable

FETCHING = 8
"""Jobs whose files are fetched or decoded at a time; as many again over https."""
SMALL_BYTES = 24 << 20
"""What decoding a small file takes, at most: a picture of a million pixels."""
_LOOK_S = 0.1
Inputs = Mapping[str, Sequence[Media]]


class InputUnavailable(Exception):
    """A host does not give a file; another try later may succeed. The text names the field."""


@dataclass(frozen=True)
class _Found:
    """A fetched file."""

    kind: str
    index: int
    file: IO[bytes]
    alpha: bool


class InputLoader:
    """`alpha`: tasks that take pictures with their transparency. Threads share it. Close it."""

    def __init__(
        self, fetcher: Fetcher, alpha: Collection[str] = (), decoders: Decoders | None = None
    ) -> None:
        self._fetcher = fetcher
        self._limits = fetcher.limits
        self._decoders = decoders or Decoders()
        self._alpha = frozenset(alpha)
        self._budget = Budget(fetcher.limits.memory)
        self._seats = {from_web: threading.Semaphore(FETCHING) for from_web in (False, True)}

    @contextmanager
    def held(self, job: Job, ticket: Ticket) -> Iterator[Inputs]:
        """The job's inputs by kind, which count as held until the end; nothing for a job without any.

        Raises InvalidJob naming the file (`inputs.image[0]`), InputUnavailable, and Stopped.
        """
        if not job.has_inputs:
            yield {}
            return
        with ExitStack() as stack:
            with self._seat(job, ticket), ExitStack() as files:
                found = self._fetch_all(job, ticket, files)
                decoded = self._small(found, ticket, stack) or self._measured(found, ticket, stack)
            yield decoded

    def close(self) -> None:
        self._fetcher.close()
        self._decoders.close()

    @contextmanager
    def _seat(self, job: Job, ticket: Ticket) -> Iterator[None]:
        """Of those for https, where others' hosts may be slow, or of those for folders and buckets."""
        seats = self._seats[from_web(job)]
        while not seats.acquire(timeout=_LOOK_S):
            if ticket.over.is_set():
                raise Stopped
        try:
            yield
        finally:
            seats.release()

    def _fetch_all(self, job: Job, ticket: Ticket, files: ExitStack) -> list[_Found]:
        found = []
        alpha = job.task in self._alpha
        for kind, uris in job.inputs:
            for index, uri in enumerate(uris):
                if ticket.over.is_set():
                    raise Stopped
                with _named(kind, index, ticket, self._limits):
                    file = files.enter_context(self._fetcher.fetch(uri, ticket))
                found.append(_Found(kind, index, file, alpha))
        return found

    def _small(self, found: Sequence[_Found], ticket: Ticket, stack: ExitStack) -> Inputs | None:
        """Decoded at once, without asking how large they are first; None: one is not small, or there is no room now."""
        with ExitStack() as here:
            hold = here.enter_context(self._budget.hold_now(SMALL_BYTES * len(found)))
            decoded = hold and self._decode_all(found, ticket, SMALL_BYTES)
            if not hold or not decoded:
                return None
            hold.keep(_bytes_of(decoded))
            stack.push(here.pop_all())
        return decoded

    def _measured(self, found: Sequence[_Found], ticket: Ticket, stack: ExitStack) -> Inputs:
        measures: list[Memory] = []
        for one in found:
            with _named(one.kind, one.index, ticket, self._limits):
                measures.append(
                    self._decoders.measure(one.kind, one.file, one.alpha, self._limits, ticket.over)
                )
        size = needed(measures)
        if size > self._budget.limit:
            allowed = f"at most {self._budget.limit} bytes"
            raise InvalidJob(
                "inputs", f"take {size} bytes while they are decoded one after the other", allowed
            )
        hold = stack.enter_context(self._budget.hold(size, ticket.over))
        if hold is None:
            raise Stopped
        decoded = self._decode_all(found, ticket)
        assert decoded is not None
        hold.keep(_bytes_of(decoded))
        return decoded

    def _decode_all(self, found: Sequence[_Found], ticket: Ticket, most: int | None = None) -> Inputs | None:
        """None: one takes more than `most` bytes."""
        decoded: dict[str, list[Media]] = {}
        for one in found:
            with _named(one.kind, one.index, ticket, self._limits):
                media = self._decoders.read(one.kind, one.file, one.alpha, self._limits, ticket.over, most)
            if media is None:
                return None
            decoded.setdefault(one.kind, []).append(media)
        return decoded


def from_web(job: Job) -> bool:
    """Whether any of its files comes over https."""
    return any(uri.startswith("https:") for _, uris in job.inputs for uri in uris)


def _bytes_of(inputs: Inputs) -> int:
    return sum(_bytes(one) for media in inputs.values() for one in media)


def _bytes(one: Media) -> int:
    if isinstance(one, Clip):
        return one.frames.nbytes + (one.sound.samples.nbytes if one.sound else 0)
    return one.samples.nbytes if isinstance(one, Sound) else one.nbytes


@contextmanager
def _named(kind: str, index: int, ticket: Ticket, limits: Limits) -> Iterator[None]:
    """Errors of one file under the job's name for it."""
    try:
        yield
    except BadInput as error:
        raise InvalidJob(f"inputs.{kind}[{index}]", error.message, error.allowed) from error
    except WebUnavailable as error:
        if ticket.over.is_set():
            raise Stopped from error
        allowed = f"a host that gives it within {limits.timeout_s:g} s"
        raise InputUnavailable(
            f"inputs.{kind}[{index}]: cannot be fetched: {error} (allowed: {allowed})"
        ) from error
    except StorageUnavailable as error:
        raise Stopped from error
