"""The model in processes of its own: the engine's process stays free of torch and outlives the model's end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from saggar.engine.config import EngineConfig
from saggar.engine.errors import EngineError, RanksParted, Unsupported, WorkerDied
from saggar.engine.executor.base import Health
from saggar.engine.executor.group import Away, Group
from saggar.engine.executor.head import Head
from saggar.engine.worker.plan import Call, Cancel, Plan, Ready, Reply, Report
from saggar.engine.worker.pulse import Slowest
from saggar.engine.worker.runner import OnStep


class MultiprocExecutor:
    """See executor.base.Executor."""

    def __init__(self, config: EngineConfig, replica: int = 0) -> None:
        self._config = config
        self._replica = replica
        self._slowest = Slowest()
        self._row_limits: dict[str, int] = {}
        self._group: Group | None = None
        self._head: Head | None = None

    def start(self, idle: Callable[[], None] = lambda: None) -> Ready:
        """Start the ranks and wait until all are ready, however long they load. Raises what stopped one."""
        self.abort()
        away = self._launch_away(idle)
        self._group = Group(self._config, self._replica, self._slowest, self._row_limits, away)
        try:
            return self._group.wait_ready(idle)
        except BaseException:
            self.abort()
            raise

    def execute(self, plan: Plan, on_step: OnStep) -> Report:
        """Send the plan, pass on its steps, return rank 0's report once all have one. WorkerDied."""
        group = self._started()
        group.send(plan)
        try:
            with _any_failure_is_a_death():
                return group.gather(Report, lambda: on_step(()), on_step)[0]
        except RanksParted as error:
            self._row_limits |= error.row_limits  # never above what the group was told
            raise

    def cancel(self, plan_id: int, request_ids: Iterable[str]) -> None:
        """A message of its own, which the ranks read during a forward."""
        ids, group = tuple(request_ids), self._group
        if ids and group is not None and group.exit_text() is None:
            with contextlib.suppress(WorkerDied):  # `execute` finds the same and tells every request
                group.send(Cancel(plan_id, ids))

    def call(self, call: Call, idle: Callable[[], None] = lambda: None) -> list[Reply]:
        """One message each way."""
        group = self._started()
        try:
            group.send(call, call.rank)
        except WorkerDied:
            raise
        except Exception as error:  # noqa: BLE001  (whatever pickling raises, before anything is sent)
            why = (
                f"the arguments of {call.method} cannot be sent to the ranks: {type(error).__name__}: {error}"
            )
            return [Reply(error=Unsupported(why))]
        with _any_failure_is_a_death():
            return group.gather(Reply, idle, only=call.rank)

    def health(self) -> Health:
        """Whether all ranks' processes live."""
        group = self._group
        if group is None:
            return Health(False, (), "not started")
        text = group.exit_text()
        return Health(text is None, tuple(rank.pid for rank in group.ranks), text or "")

    def abort(self) -> None:
        """Kill what is left of the ranks."""
        if self._group is not None:
            self._group.kill()

    def close(self) -> None:
        """Ask the ranks to end, and kill those that do not within a few seconds."""
        if self._group is not None:
            self._group.close()
        if self._head is not None:
            self._head.close()
            self._head = None

    def _launch_away(self, idle: Callable[[], None]) -> Away:
        """The ranks of other nodes, which are waited for."""
        nodes = self._config.nodes
        if nodes is None:
            return ()
        self._head = self._head or Head(nodes, self._config.ranks_per_node, self._config.patience)
        return self._head.launch(idle)

    def _started(self) -> Group:
        assert self._group is not None, "start first"
        return self._group


@contextlib.contextmanager
def _any_failure_is_a_death() -> Iterator[None]:
    """Whatever stopped a rank outside of a row ended its process too."""
    try:
        yield
    except WorkerDied:
        raise
    except EngineError as error:
        raise WorkerDied(str(error)) from error
