"""Carries out plans on a loaded family: encode, step, decode. One request's failure stays its own.

A verb that fails for a list is tried again by halves, so that only the culprits end in error; verbs
therefore bear being called again for the same states. With several ranks the others may wait in a collective for one
that failed: it tries again only if all failed alike, else the group ends (team.py). At each border they agree on what
has failed and what is cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from saggar.engine.config import WarmUp
from saggar.engine.errors import EngineError, LoadError, OutOfMemory, RowFailed, Unsupported
from saggar.engine.media import Media
from saggar.engine.models.base import Family
from saggar.engine.models.state import RequestState
from saggar.engine.worker.extension import Extension
from saggar.engine.worker.limits import RowLimits
from saggar.engine.worker.plan import Call, Plan, Reply, Report, RowReport, RowStatus
from saggar.engine.worker.pulse import Activity
from saggar.engine.worker.team import GROUP_ENDS, Trouble

if TYPE_CHECKING:
    import numpy as np

State: TypeAlias = RequestState[Any, Any, Any]
Border: TypeAlias = Callable[[Collection[str]], Collection[str]]
"""Asked at each border of a plan with the requests that have failed: those to end now."""
OnStep: TypeAlias = Callable[[Sequence[RowReport]], None]


class Runner:
    """Holds the states of the requests that this rank works on, by id.

    `max_rows` bounds one forward; `memory_errors` are the exceptions that mean "out of memory", after which
    `free_memory` is called, the forward is tried again in halves, and the smaller limit is kept for its key. `close` is
    called when the rank ends as it should.
    """

    def __init__(
        self,
        family: Family[Any, Any, Any],
        max_rows: int,
        memory_errors: tuple[type[BaseException], ...] = (MemoryError,),
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        extension: Extension | None = None,
        free_memory: Callable[[], None] = lambda: None,
        activity: Activity | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.family = family
        self.limits = RowLimits(max_rows)
        self.free_memory = free_memory
        self.close = close
        self._memory_errors = memory_errors
        self._context = context
        self.states: dict[str, State] = {}
        self.extension = extension or Extension(family, 0)
        self.activity = activity or Activity()
        self.alike: Callable[[Trouble], None] = lambda trouble: None
        """Called before anything is tried again; raises when other ranks did not fail in the same way."""

    def __len__(self) -> int:
        return len(self.states)

    def execute(self, plan: Plan, border: Border, on_step: OnStep) -> Report:
        """One turn; see Plan. `border` is asked before each step, `on_step` told after each but the last."""
        with self._context():
            turn = _Turn(self, plan, border, on_step)
            turn.encode()
            turn.denoise()
            turn.decode()
            return turn.report()

    def call(self, call: Call) -> Reply:
        """A method of the extension; whatever it raises is the reply."""
        method = None if call.method.startswith("_") else getattr(self.extension, call.method, None)
        if not callable(method):
            return Reply(error=Unsupported(f"the ranks have no method {call.method!r}"))
        try:
            with self.activity.doing("call", call.method):
                return Reply(method(*call.args))
        except Exception as error:  # noqa: BLE001  (it is the caller's answer)
            return Reply(error=self.failure(error))

    def warm_up(self, kind: WarmUp) -> None:
        """One step and decode of a request of that kind. LoadError: it fails."""
        try:
            with self._context():
                state = self.family.new_state(self.family.warmup_request(kind))
                key = self.family.batch_key(state.request)
                shape = shape_of(key, [state])
                with self.activity.doing("encode", shape):
                    self.family.prepare_encode([state])
                with self.activity.doing("denoise", shape):
                    noise = self.family.denoise_step([state], self.limits.of(key))[state.id]
                self.family.step_scheduler(state, noise)
                state.finite.append(self.family.finite(state))
                _require_finite(state)
                with self.activity.doing("decode", shape):
                    self.family.post_decode([state])
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            folder = self.family.checkpoint.folder
            raise LoadError(
                f"the warm-up failed: {why}: if {folder} is at fault, its parts are damaged or not of one model"
            ) from error
        self.family.counters.clear()

    def failure(self, error: Exception) -> EngineError:
        """The engine's error for whatever a verb raised."""
        if isinstance(error, EngineError):
            return error
        if self.means_memory(error):
            return OutOfMemory(str(error))
        return RowFailed(f"{type(error).__name__}: {error}")

    def means_memory(self, error: Exception) -> bool:
        """Whether a smaller forward could go through."""
        return isinstance(error, self._memory_errors) or "out of memory" in str(error).lower()


class _Turn:
    """One plan under way."""

    def __init__(self, runner: Runner, plan: Plan, border: Border, on_step: OnStep) -> None:
        self._runner = runner
        self._family = runner.family
        self._plan = plan
        self._border = border
        self._on_step = on_step
        self._failed: dict[str, EngineError] = {}
        self._dropped: set[str] = set()
        self._media: dict[str, Sequence[Media]] = {}
        self._previews: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._chunks: dict[str, list[tuple[int, Sequence[Media]]]] = {}
        for request_id in plan.drop:
            runner.states.pop(request_id, None)
        self._fresh = [self._family.new_state(request) for request in plan.admit]
        runner.states.update({state.id: state for state in self._fresh})
        self._states = [runner.states[request_id] for request_id in plan.run]
        self._key = self._family.batch_key(self._states[0].request) if self._states else ""

    def encode(self) -> None:
        """Conditioning and first latents of the newcomers."""
        self._drop_cancelled()
        fresh = [state for state in self._fresh if self._alive(state)]
        self._timed("encode", fresh, self._family.prepare_encode)

    def denoise(self) -> None:
        """Steps until the plan's number, or until a row finishes, fails or is cancelled."""
        done = 0
        late = any(state.finished for state in self._states if self._alive(state) and state.steps)
        # What still waits to be decoded does not wait for a whole plan.
        limit = 1 if late else self._plan.steps
        while limit is None or done < limit:
            if done:
                self._on_step([self._line(state) for state in self._states if self._alive(state)])
            ended = self._drop_cancelled()
            moving = self._moving()
            if not moving or (ended and done):
                return
            before = len(self._failed)
            self._step(moving)
            done += 1
            if len(self._failed) > before or any(state.finished for state in moving):
                return

    def decode(self) -> None:
        """Pictures of what is finished; within the plan's budget while others still have steps to make."""
        self._drop_cancelled()
        waiting = [state for state in self._states if self._alive(state) and state.finished]
        while waiting:
            chunk = _first_rows(waiting, self._plan.decode_rows)
            waiting = waiting[len(chunk) :]
            self._timed("decode", chunk, self._decode_list)
            if self._moving():
                return

    def report(self) -> Report:
        """A line for each request of the plan; forgets those that have ended."""
        self._border(self._failed)  # the ranks part nowhere unseen
        lines = tuple(self._line(state) for state in self._states)
        for line in lines:
            if line.status in ("done", "failed", "dropped"):
                self._runner.states.pop(line.id, None)
        return Report(self._plan.id, lines, dict(self._family.counters))

    def _moving(self) -> list[State]:
        return [state for state in self._states if self._alive(state) and not state.finished]

    def _alive(self, state: State) -> bool:
        return state.id not in self._failed and state.id not in self._dropped

    def _drop_cancelled(self) -> bool:
        asked = self._border(self._failed)
        ended = {state.id for state in self._states if state.id in asked and self._alive(state)}
        self._dropped |= ended
        return bool(ended)

    def _step(self, states: list[State]) -> None:
        noise: dict[str, Any] = {}

        def predict(some: list[State]) -> None:
            noise.update(self._denoise_within_memory(some))

        def advance(some: list[State]) -> None:
            for state in some:
                self._family.step_scheduler(state, noise.pop(state.id))
                state.step_index += 1
                state.finite.append(self._family.finite(state))
                every = state.request.preview_every
                if every and state.step_index % every == 0:
                    self._preview(state)

        self._timed("denoise", states, predict)
        with self._doing("step", states):
            for state in states:
                if self._alive(state):
                    self._guarded([state], advance)
        if self._family.streaming:
            due = [state for state in self._moving() if state in states and self._family.chunk_due(state)]
            self._timed("decode", due, self._decode_chunk)

    def _denoise_within_memory(self, states: list[State]) -> dict[str, Any]:
        limits, key = self._runner.limits, self._key
        limit = min(limits.of(key), sum(state.request.rows for state in states))
        while True:
            try:
                return self._family.denoise_step(states, limit)
            except Exception as error:
                if limit == 1 or not self._runner.means_memory(error):
                    raise
                text = str(error)
            # Out of the handler: only now is what the failed forward held free.
            limit = limits.halve(key, limit)
            self._runner.free_memory()
            self._runner.alike(Trouble("a forward's memory", f"out of memory: {text}", True, {key: limit}))
            self._family.count("memory.halved", 1)

    def _preview(self, state: State) -> None:
        picture = self._family.preview(state)
        if picture is not None:
            self._previews.setdefault(state.id, []).append((state.step_index, picture))

    def _decode_chunk(self, states: list[State]) -> None:
        for state, media in zip(states, self._family.post_decode(states), strict=True):
            self._chunks.setdefault(state.id, []).append((state.step_index, media))

    def _decode_list(self, states: list[State]) -> None:
        for state in states:
            _require_finite(state)
        decoded = self._family.post_decode(states)
        if len(decoded) != len(states):
            raise RowFailed(f"{len(states)} requests were decoded to {len(decoded)} results")
        for state, media in zip(states, decoded, strict=True):
            asked = state.request.num_outputs * self._family.media_per_output(state.request)
            if len(media) != asked:
                raise RowFailed(f"{asked} outputs were asked for and {len(media)} came")
            self._media[state.id] = media

    def _doing(self, verb: str, states: list[State]) -> AbstractContextManager[None]:
        return self._runner.activity.doing(verb, shape_of(self._key, states))

    def _timed(self, verb: str, states: list[State], action: Callable[[list[State]], None]) -> None:
        if not states:
            return
        start, name = time.perf_counter(), f"{verb}_s"
        with self._doing(verb, states):
            self._guarded(states, action)
        took = time.perf_counter() - start
        for state in states:
            state.timings[name] = state.timings.get(name, 0.0) + took

    def _guarded(self, states: list[State], action: Callable[[list[State]], None]) -> None:
        try:
            action(states)
            return
        except GROUP_ENDS:
            raise
        except Exception as error:  # noqa: BLE001  (whatever a model raises is that row's error)
            failure, memory = self._runner.failure(error), self._runner.means_memory(error)
            what = f"{type(error).__name__} of {', '.join(state.id for state in states)}"
        # Out of the handler: only now is what the failed call held free.
        if memory:
            self._runner.free_memory()
        self._runner.alike(Trouble(what, str(failure), memory))
        if len(states) == 1:
            self._failed[states[0].id] = failure
            return
        middle = len(states) // 2
        self._guarded(states[:middle], action)
        self._guarded(states[middle:], action)

    def _line(self, state: State) -> RowReport:
        error, media = self._failed.get(state.id), self._media.get(state.id, ())
        status: RowStatus = "decoding" if state.finished else "running"
        if error is not None:
            status = "failed"
        elif state.id in self._dropped:
            status = "dropped"
        elif media:
            status = "done"
        return RowReport(
            id=state.id,
            status=status,
            step=state.step_index,
            steps=state.steps,
            media=media,
            previews=self._previews.pop(state.id, ()),
            chunks=self._chunks.pop(state.id, ()),
            error=error,
            timings=state.timings if status == "done" else {},
            unread=state.unread if status == "done" else {},
        )


def shape_of(key: str, states: Sequence[State]) -> str:
    """What decides how long a verb takes."""
    return f"{sum(state.request.rows for state in states)} rows of {key}"


def _require_finite(state: State) -> None:
    """RowFailed names the step after which the latents held a NaN or an infinity."""
    for index, finite in enumerate(state.finite):
        if not bool(finite):
            raise RowFailed(f"the latents are not finite after step {index + 1} of {state.steps}")


def _first_rows(states: list[State], rows: int) -> list[State]:
    """The first states of at most `rows` rows together, at least one."""
    chosen, total = [states[0]], states[0].request.rows
    for state in states[1:]:
        total += state.request.rows
        if total > rows:
            break
        chosen.append(state)
    return chosen
