"""A web backend that sells pictures one at a time, as a plain ASGI application: any ASGI server runs it.

    pip install uvicorn
    SAGGAR_REDIS_URL=redis://localhost:6379/0 SAGGAR_STORE=s3://bucket/results uvicorn examples.web_backend:app

in the root of the checkout. Links to pictures need the workers' store, SAGGAR_STORE, and leave to read it; without it
customers see URIs.

POST /jobs              {"prompt": ...}  -> 202 with the job's id; the header Idempotency-Key makes a repeat harmless
GET  /jobs/ID           its state, its place in the queue, links to its pictures that hold for an hour
GET  /jobs/ID/events    what has happened and what happens, as server-sent events; Last-Event-ID goes on behind one
DELETE /jobs/ID         cancel
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping

from redis import RedisError
from saggar.jobs import AsyncJobClient, Conflict, InvalidJob, JobRecord, JobSettings, QueueFull, UnknownJob
from saggar.storage import Storage, key_of, open_storage

Message = dict[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
MODEL = os.environ.get("SAGGAR_MODEL") or "saggar/emoji"
MOST_BYTES = 16 * 1024
CURSOR = re.compile(r"\d{1,20}-\d{1,20}")


class Backend:
    """One client for all requests, and the workers' store to make links."""

    def __init__(self, client: AsyncJobClient, store: Storage | None = None) -> None:
        self._client, self._store = client, store

    async def __call__(self, scope: Mapping[str, object], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        method, path = str(scope["method"]), str(scope["path"]).strip("/").split("/")
        try:
            match method, path:
                case "POST", ["jobs"]:
                    await self._submit(scope, receive, send)
                case "GET", ["jobs", job_id]:
                    await reply(send, 200, await self._shown(await self._client.status(job_id)))
                case "GET", ["jobs", job_id, "events"]:
                    await self._events(scope, job_id, send)
                case "DELETE", ["jobs", job_id]:
                    await reply(send, 202, {"outcome": (await self._client.cancel(job_id)).outcome})
                case _:
                    await reply(send, 404, {"error": "no such page"})
        except InvalidJob as error:
            await reply(send, 422, {"error": str(error), "field": error.field})
        except Conflict as error:
            await reply(send, 409, {"error": str(error)})
        except UnknownJob as error:
            await reply(send, 404, {"error": str(error)})
        except QueueFull as error:
            await reply(send, 503, {"error": str(error)}, {"retry-after": f"{error.retry_after_s:.0f}"})
        except RedisError:  # away, or starting: the job was not taken, or the same Idempotency-Key finds it
            await reply(send, 503, {"error": "the queue cannot be reached"}, {"retry-after": "5"})

    async def _submit(self, scope: Mapping[str, object], receive: Receive, send: Send) -> None:
        wish = await body(receive)
        if unknown := sorted(wish.keys() - {"prompt"}):
            raise InvalidJob(unknown[0][:64], "unknown name", "prompt")
        job: dict[str, object] = {"model": MODEL, "prompt": wish.get("prompt"), "priority": "interactive"}
        if key := header(scope, b"idempotency-key"):
            job["idempotency_key"] = key
        submitted = await self._client.submit(job)
        await reply(send, 202, {"id": submitted.id, "state": submitted.state})

    async def _events(self, scope: Mapping[str, object], job_id: str, send: Send) -> None:
        record = await self._client.status(job_id)  # an unknown job is a 404, before the stream begins
        after = header(scope, b"last-event-id")
        if after is not None and not CURSOR.fullmatch(after):
            raise InvalidJob("last-event-id", "is no id of an event", "the last one that came")
        if after and record.ended and not await self._has_more(job_id, after):
            await reply(send, 204)  # a browser that has seen the end does not come again
            return
        await send(start(200, "text/event-stream"))
        try:
            async for event in self._client.events(job_id, after=after):
                line = f"id: {event.cursor}\nevent: {event.kind}\ndata: {event.to_json()}\n\n"
                await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
        except (RedisError, UnknownJob) as error:
            # The status is sent already. A browser comes again with Last-Event-ID, and is told then.
            print(f"events of {job_id} are cut short: {error}", file=sys.stderr)
        await send({"type": "http.response.body", "body": b""})

    async def _has_more(self, job_id: str, after: str) -> bool:
        events = self._client.events(job_id, after=after, follow=False)
        return any([event.kind != "gap" async for event in events])

    async def _shown(self, record: JobRecord) -> dict[str, object]:
        """What a customer sees of a job."""
        uris = [output.uri for output in record.result.outputs] if record.result else []
        pictures = await asyncio.to_thread(self._links, uris)  # credentials may have to be fetched to sign
        return {"id": record.id, "state": record.state, "position": record.position, "pictures": pictures}

    def _links(self, uris: list[str]) -> list[str]:
        store = self._store
        return uris if store is None else [store.presign(key_of(store, uri), 3600) for uri in uris]

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await self._client.close()
        await send({"type": "lifespan.shutdown.complete"})


async def body(receive: Receive) -> dict[str, object]:
    """The request's JSON object. Raises InvalidJob."""
    data, more = b"", True
    while more:
        message = await receive()
        data += bytes(message.get("body", b""))  # type: ignore[call-overload]
        more = bool(message.get("more_body"))
        if len(data) > MOST_BYTES:
            raise InvalidJob("body", "is too large", f"at most {MOST_BYTES} bytes")
    try:
        wish = json.loads(data)
    except ValueError:
        wish = None
    if not isinstance(wish, dict):
        raise InvalidJob("body", "is not a JSON object", '{"prompt": "..."}')
    return wish


def header(scope: Mapping[str, object], name: bytes) -> str | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]  # type: ignore[assignment]
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


def start(status: int, content_type: str, extra: Mapping[str, str] | None = None) -> Message:
    headers = {"content-type": content_type, "cache-control": "no-store", **(extra or {})}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


async def reply(
    send: Send, status: int, content: object = None, extra: Mapping[str, str] | None = None
) -> None:
    await send(start(status, "application/json", extra))
    await send(
        {"type": "http.response.body", "body": b"" if content is None else json.dumps(content).encode()}
    )


def __getattr__(name: str) -> Backend:
    if name != "app":
        raise AttributeError(name)
    store = os.environ.get("SAGGAR_STORE")
    return Backend(AsyncJobClient(JobSettings.from_env()), open_storage(store) if store else None)


if __name__ == "__main__":
    sys.exit("web_backend.py is served by an ASGI server: uvicorn examples.web_backend:app")
