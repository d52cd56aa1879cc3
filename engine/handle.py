"""What the caller of `submit` holds: the result to come and the stream of events.

A stream keeps at most `STREAM_EVENTS` events; a reader that falls behind loses steps and previews, never
the first or the last event. The engine refers to a stream weakly: who drops the handle frees the buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

from saggar.engine.errors import EngineError
from saggar.engine.request import EngineEvent, Output
from saggar.engine.sched.base import Announced

log = logging.getLogger(__name__)
STREAM_EVENTS = 64
_LAST = ("output", "error")
_LOSSY = ("step", "preview")


class Stream:
    """A bounded buffer of events between the engine's thread and one reader."""

    def __init__(self, limit: int = STREAM_EVENTS) -> None:
        self._limit = limit
        self._events: deque[EngineEvent] = deque()
        self._changed = threading.Condition()
        self._over = False
        self._wake: Callable[[], object] = lambda: None

    def put(self, event: EngineEvent) -> None:
        """Add an event; over the limit the oldest lossy one goes."""
        with self._changed:
            if len(self._events) >= self._limit:
                lossy = next((kept for kept in self._events if kept.kind in _LOSSY), None)
                if lossy is not None:
                    self._events.remove(lossy)
            self._events.append(event)
            self._over = self._over or event.kind in _LAST
            self._changed.notify_all()
            self._wake()

    def __iter__(self) -> Iterator[EngineEvent]:
        """Events in order, to the last one; waits for those to come."""
        while True:
            with self._changed:
                while not self._events and not self._over:
                    self._changed.wait()
                if not self._events:
                    return
                event = self._events.popleft()
            yield event

    async def __aiter__(self) -> AsyncIterator[EngineEvent]:
        """The same for a coroutine; no thread waits."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(
                RuntimeError
            ):  # the reader's event loop was closed: nobody reads any more
                loop.call_soon_threadsafe(news.set)

        self._wake = wake
        while True:
            news.clear()
            with self._changed:
                event = self._events.popleft() if self._events else None
                over = self._over
            if event is not None:
                yield event
            elif over:
                return
            else:
                await news.wait()

    def __len__(self) -> int:
        return len(self._events)


class Handle:
    """A submitted request. Thread-safe."""

    def __init__(
        self, request_id: str, future: Future[Output], stream: Stream, cancel: Callable[[str], bool]
    ) -> None:
        self.id = request_id
        self._future = future
        self._stream = stream
        self._cancel = cancel

    def events(self) -> Iterator[EngineEvent]:
        """The request's events, each once, to its last one. One reader."""
        return iter(self._stream)

    def aevents(self) -> AsyncIterator[EngineEvent]:
        """The same for a coroutine."""
        return aiter(self._stream)

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the output. Raises the request's EngineError, or TimeoutError after `timeout` seconds."""
        return self._future.result(timeout)

    def error(self) -> EngineError | None:
        """The error of a request that has ended, None after a success. TimeoutError: it has not ended."""
        error = self._future.exception(timeout=0)
        assert error is None or isinstance(error, EngineError), error
        return error

    def wait(self) -> EngineError | None:
        """Wait for the end: the error, None after a success."""
        error = self._future.exception()
        assert error is None or isinstance(error, EngineError), error
        return error

    def done(self) -> bool:
        """Whether the request has ended."""
        return self._future.done()

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call back once the request has ended, in the engine's thread: be brief. At once if it has. What it raises is
        logged.
        """

        def call(_: object) -> None:
            try:
                callback(self)
            except (Exception, SystemExit):  # a SystemExit of somebody's callback ends no engine
                log.exception("a callback of request %s failed", self.id)

        self._future.add_done_callback(call)

    def cancel(self) -> bool:
        """End the request before its next step. False if it has ended already."""
        return self._cancel(self.id)


class Reservation:
    """Seats for requests of one key that are on their way; hand it to `submit`, or release it."""

    def __init__(self, announced: Announced, release: Callable[[Announced], None]) -> None:
        self.announced = announced
        self._release = release

    @property
    def key(self) -> str:
        """The batch key."""
        return self.announced.key

    @property
    def rows(self) -> int:
        """Rows that have not arrived yet."""
        return self.announced.rows

    def release(self) -> None:
        """The rest will not come. Again, or after all have come: nothing happens."""
        if self.announced.rows:  # they only ever become fewer
            self._release(self.announced)
