"""Jobs: what they are, what becomes of them, and the client of a producer.

Cheap to import (pydantic and the standard library; redis is imported on connecting, celery and kombu never by
a producer): a web backend lives with it.

    from saggar.jobs import Job, JobClient
    client = JobClient("redis://localhost:6379/0")
    job = client.submit(Job(model="saggar/emoji", prompt="a cat"))
    print(client.result(job.id).outputs[0].uri)
"""

from saggar.jobs.cards import Cards, Limits, ModelCard, batch_key, check_job
from saggar.jobs.client import AsyncJobClient, JobClient
from saggar.jobs.errors import (
    ConfigError,
    Conflict,
    InvalidCard,
    InvalidJob,
    JobFailed,
    NotRetryable,
    QueueFull,
    SaggarError,
    UnknownJob,
    UnknownModel,
    WaitTimeout,
)
from saggar.jobs.events import Event
from saggar.jobs.ledger import Cancelled, Ledger, Page, Submitted, reconcile
from saggar.jobs.record import (
    TERMINAL,
    JobError,
    JobRecord,
    JobResult,
    OutputRef,
    Progress,
    State,
    Times,
    UnreadText,
)
from saggar.jobs.schema import Inputs, Job, Lora, OutputSpec, parse_job
from saggar.jobs.settings import JobSettings, connect, connect_async

__all__ = [
    "TERMINAL",
    "AsyncJobClient",
    "Cancelled",
    "Cards",
    "ConfigError",
    "Conflict",
    "Event",
    "Inputs",
    "InvalidCard",
    "InvalidJob",
    "Job",
    "JobClient",
    "JobError",
    "JobFailed",
    "JobRecord",
    "JobResult",
    "JobSettings",
    "Ledger",
    "Limits",
    "Lora",
    "ModelCard",
    "NotRetryable",
    "OutputRef",
    "OutputSpec",
    "Page",
    "Progress",
    "QueueFull",
    "SaggarError",
    "State",
    "Submitted",
    "Times",
    "UnknownJob",
    "UnknownModel",
    "UnreadText",
    "WaitTimeout",
    "batch_key",
    "check_job",
    "connect",
    "connect_async",
    "parse_job",
    "reconcile",
]
