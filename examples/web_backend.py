"""A web backend that sells pictures one at a time, as a plain ASGI application: any ASGI server runs it.

SAGGAR_REDIS_URL=redis://localhost:6379/0 uvicorn examples.web_backend:app

POST /jobs              {"prompt": ...}  -> 202 with the job's id; the header Idempotency-Key makes a repeat harmless
GET  /jobs/ID           its state, its place in the queue, its pictures
GET  /jobs/ID/events    what has happened and what happens, as server-sent events
DELETE /jobs/ID         cancel
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping

from saggar.jobs import AsyncJobClient, Conflict, InvalidJob, JobRecord, JobSettings, QueueFull, UnknownJob

Message = dict[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
MODEL = os.environ.get("SAGGAR_MODEL", "saggar/emoji")
MOST_BYTES = 16 * 1024


class Backend:
    """One client for all requests."""

    def __init__(self, client: AsyncJobClient) -> None:
        self._client = client

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
                    await reply(send, 200, shown(await self._client.status(job_id)))
                case "GET", ["jobs", job_id, "events"]:
                    await self._events(job_id, send)
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

    async def _submit(self, scope: Mapping[str, object], receive: Receive, send: Send) -> None:
        wish = await body(receive)
        job: dict[str, object] = {"model": MODEL, "prompt": wish.get("prompt"), "priority": "interactive"}
        if key := header(scope, b"idempotency-key"):
            job["idempotency_key"] = key
        submitted = await self._client.submit(job)
        await reply(send, 202, {"id": submitted.id, "state": submitted.state})

    async def _events(self, job_id: str, send: Send) -> None:
        await self._client.status(job_id)  # an unknown job is a 404, before the stream begins
        await send(start(200, "text/event-stream"))
        async for event in self._client.events(job_id):
            line = f"id: {event.cursor}\nevent: {event.kind}\ndata: {event.to_json()}\n\n"
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await self._client.close()
        await send({"type": "lifespan.shutdown.complete"})


def shown(record: JobRecord) -> dict[str, object]:
    """What a customer sees of a job."""
    pictures = [output.uri for output in record.result.outputs] if record.result else []
    return {"id": record.id, "state": record.state, "position": record.position, "pictures": pictures}


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


async def reply(send: Send, status: int, content: object, extra: Mapping[str, str] | None = None) -> None:
    await send(start(status, "application/json", extra))
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def __getattr__(name: str) -> Backend:
    if name != "app":
        raise AttributeError(name)
    return Backend(AsyncJobClient(JobSettings.from_env()))
