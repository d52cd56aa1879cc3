"""Jobs, cards and helpers that the tests of jobs share."""

from __future__ import annotations

import redis
from saggar.jobs import Job, JobResult, JobSettings, Ledger, ModelCard, OutputRef, Submitted, reconcile
from saggar.jobs.lanes import LaneSettings, LaneStore, lane_name
from saggar.jobs.lanes.store import Outcome
from saggar.jobs.ledger import Reconciled, job_message

MODEL = "saggar/emoji"
SETTINGS = JobSettings.make()
CARD = ModelCard(
    model=MODEL,
    family="noop",
    tasks=["t2i", "i2i"],
    params_schema={
        "type": "object",
        "properties": {
            "height": {"type": "integer", "minimum": 16, "maximum": 1024, "multipleOf": 16, "default": 256},
            "width": {"type": "integer", "minimum": 16, "maximum": 1024, "multipleOf": 16, "default": 256},
            "steps": {"type": "integer", "minimum": 1, "maximum": 100, "default": 4},
            "guidance": {"type": "number", "minimum": 0, "maximum": 30, "default": 3},
            "true_cfg": {
                "anyOf": [{"type": "number", "exclusiveMinimum": 1}, {"type": "null"}],
                "default": None,
            },
            "sampler": {"enum": ["euler", "heun"], "default": "euler"},
            "sigmas": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
            "tiling": {"type": "boolean", "default": False},
            "label": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
        },
    },
    limits={"max_prompt_chars": 200, "max_outputs": 4, "max_pixels": 512 * 512},
    batch_fields=["height", "width"],
    max_batch=8,
    formats=["png", "webp"],
)


def make_job(**values: object) -> Job:
    return Job.model_validate({"model": MODEL, "prompt": "a cat", "seed": 1, **values})


def submit(ledger: Ledger, job: Job, extras: str = "") -> Submitted:
    """Past the client: into the ledger as it is."""
    return ledger.submit(job, job_message(job, None, extras=extras), job.digest(), extras)


def make_result(attempt: int, outputs: int = 1) -> JobResult:
    output = OutputRef(
        index=0, uri="s3://b/k.png", sha256="0" * 64, bytes=9, content_type="image/png", seed=1
    )
    refs = [output.model_copy(update={"index": i}) for i in range(outputs)]
    return JobResult(
        outputs=refs, manifest="s3://b/result.json", attempt=attempt, batch_id="b1", batch_size=2
    )


def scan(ledger: Ledger) -> Reconciled:
    """A whole turn of the reconciler, whoever had the last one and whenever that was."""
    ledger.runner.client.delete("saggar:reconciler", "saggar:reconciler:scan")
    done = reconcile(ledger, SETTINGS, lambda _: CARD)
    assert done is not None
    return done


def bury_letter(client: redis.Redis, tag: str) -> None:
    """A waiting message of the model's lane becomes a dead letter."""
    store = LaneStore(client, "saggar:")
    lane = lane_name(MODEL)
    store.configure(lane, LaneSettings(max_deliveries=1))
    batch = store.fetch(lane, "w", rows=1, seats=1)
    assert batch is not None
    assert batch.deliveries[0].tag.id == tag
    assert store.requeue(batch.deliveries[0].tag) is Outcome.DEAD
    assert [letter.tag for letter in store.dead_letters(lane)] == [tag]


def lane_messages(client: redis.Redis) -> set[str]:
    """Tags of all messages of the model's lane."""
    return {str(tag) for tag in client.hkeys("saggar:gen.saggar--emoji:m")}  # type: ignore[union-attr]


def event_kinds(client: redis.Redis, job_id: str) -> list[str]:
    entries = client.xrange(f"saggar:events:job:{job_id}")
    return [fields["type"] for _, fields in entries]  # type: ignore[union-attr]
