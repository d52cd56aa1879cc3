"""The runner of ledger operations for asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from saggar.jobs.lanes.script import knows_flags
from saggar.jobs.ledger.ledger import outcome
from saggar.jobs.ledger.script import Op, Reply, Scripts

if TYPE_CHECKING:
    import redis.asyncio
    from saggar.jobs.settings import JobSettings

T = TypeVar("T")


class AsyncRunner:
    """As ledger.Runner."""

    def __init__(self, client: redis.asyncio.Redis, settings: JobSettings) -> None:
        self.client = client
        self._settings = settings
        self._known: Scripts | None = None

    async def _scripts(self) -> Scripts:
        from redis import ResponseError

        if self._known is None:
            try:
                info = cast("dict[str, object]", await self.client.info("server"))
            except ResponseError:  # a stand-in without INFO
                info = {}
            self._known = Scripts(self._settings, knows_flags=knows_flags(info))
        return self._known

    async def run(self, op: Op[T]) -> T:
        """As ledger.Runner.run."""
        from redis.exceptions import NoScriptError, OutOfMemoryError

        scripts = await self._scripts()
        try:
            try:
                reply = await self.client.evalsha(scripts.hashes[op.script], 0, *op.args)
            except NoScriptError:
                reply = await self.client.eval(scripts.texts[op.script], 0, *op.args)
        except OutOfMemoryError as full:
            raise (op.when_full or full) from full
        return op.parse(cast("Reply", reply))

    async def run_many(self, ops: Sequence[Op[T]]) -> list[T | Exception]:
        """As ledger.Runner.run_many."""
        scripts = await self._scripts()
        for name in {op.script for op in ops}:
            await self.client.script_load(scripts.texts[name])
        pipe = self.client.pipeline(transaction=False)
        for op in ops:
            pipe.evalsha(scripts.hashes[op.script], 0, *op.args)
        replies = cast("list[Reply | Exception]", await pipe.execute(raise_on_error=False))
        return [outcome(op, reply) for op, reply in zip(ops, replies, strict=True)]
