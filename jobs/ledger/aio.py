"""The runner of ledger operations for asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

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
        self._scripts = Scripts(settings)

    async def run(self, op: Op[T]) -> T:
        """Raises what the operation's reader raises, and redis.RedisError."""
        from redis.exceptions import NoScriptError

        try:
            reply = await self.client.evalsha(self._scripts.hashes[op.script], 0, *op.args)
        except NoScriptError:
            reply = await self.client.eval(self._scripts.texts[op.script], 0, *op.args)
        return op.parse(cast("Reply", reply))

    async def run_many(self, ops: Sequence[Op[T]]) -> list[T | Exception]:
        """As ledger.Runner.run_many."""
        for name in {op.script for op in ops}:
            await self.client.script_load(self._scripts.texts[name])
        pipe = self.client.pipeline(transaction=False)
        for op in ops:
            pipe.evalsha(self._scripts.hashes[op.script], 0, *op.args)
        replies = cast("list[Reply | Exception]", await pipe.execute(raise_on_error=False))
        return [outcome(op, reply) for op, reply in zip(ops, replies, strict=True)]
