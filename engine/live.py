"""A request between its submit and its end: where its events and its outcome go. Used by the engine's loop
only.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from saggar.engine.errors import EngineError, RowFailed
from saggar.engine.handle import Stream
from saggar.engine.request import EngineEvent, EventKind, Output
from saggar.engine.sched.base import Entry
from saggar.engine.worker.plan import RowReport

OnEvent = Callable[[EngineEvent], None]
_SLACK = 64


class Deadlines:
    """Requests by the time at which they must have ended. Those that ended before are forgotten in bulk."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def add(self, entry: Entry) -> None:
        """Watch an entry that has a deadline."""
        if entry.deadline is not None:
            heapq.heappush(self._heap, (entry.deadline, entry.seq, entry.id))

    def next(self) -> float | None:
        """The nearest one."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float, lives: Mapping[str, Live]) -> list[Live]:
        """Those that have passed, each once; `lives` are the requests that have not ended."""
        if len(self._heap) > 2 * len(lives) + _SLACK:
            self._heap = [item for item in self._heap if _is_live(item, lives)]
            heapq.heapify(self._heap)
        found = []
        while self._heap and self._heap[0][0] <= now:
            item = heapq.heappop(self._heap)
            if _is_live(item, lives):
                found.append(lives[item[2]])
        return found


def _is_live(item: tuple[float, int, str], lives: Mapping[str, Live]) -> bool:
    live = lives.get(item[2])
    return live is not None and live.entry.seq == item[1]


class Live:
    """`replica`: whose ranks know the request. `stopping`: why it is to end at the next border. `deaths`: how
    often ranks failed while it ran.
    """

    def __init__(self, entry: Entry, stream: Stream, on_event: OnEvent | None) -> None:
        self.entry = entry
        self.future: Future[Output] = Future()
        self.replica: int | None = None
        self.deaths = 0
        self.stopping: EngineError | None = None
        self._stream = weakref.ref(stream)
        self._on_event = on_event

    def started(self) -> None:
        """Its first turn begins; so it is told again of a request that is run again."""
        self._tell("started")

    def advance(self, row: RowReport) -> None:
        """Take over how far it is; tells of new steps and previews."""
        for step, picture in row.previews:
            self._publish(EngineEvent("preview", self.entry.id, step, row.steps, preview=picture))
        if row.step > self.entry.step:
            self.entry.step, self.entry.steps = row.step, row.steps
            self._tell("step")
        for step, media in row.chunks:
            self._publish(EngineEvent("chunk", self.entry.id, step, row.steps, media=tuple(media)))

    def finish(self, outcome: Output | EngineError) -> None:
        """The last event, and the result for whoever waits."""
        if isinstance(outcome, EngineError):
            self._tell("error", str(outcome))
            self.future.set_exception(outcome)
        else:
            self._tell("output")
            self.future.set_result(outcome)

    def output(self, row: RowReport, numerics: str) -> Output:
        """The request's output from the rank's last report."""
        request = self.entry.request
        each = len(row.media) // request.num_outputs
        return Output(
            request_id=request.id,
            media=list(row.media),
            seeds=[request.seed + index for index in range(request.num_outputs) for _ in range(each)],
            batch_id=self.entry.batch_id,
            batch_size=self.entry.batch_size,
            steps=row.steps,
            timings=row.timings,
            numerics=numerics,
            unread=row.unread,
        )

    def _tell(self, kind: EventKind, error: str = "") -> None:
        entry = self.entry
        self._publish(
            EngineEvent(
                kind, entry.id, entry.step, entry.steps, entry.batch_id, entry.batch_size, entry.cut, error
            )
        )

    def _publish(self, event: EngineEvent) -> None:
        stream = self._stream()
        if stream is not None:
            stream.put(event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (a listener's failure ends its own request, not the engine)
                self._on_event = None
                self.stopping = RowFailed(f"its listener failed: {type(error).__name__}: {error}")
