"""The one file that knows both vocabularies: a job's and an engine request's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from saggar.engine.media import Media
from saggar.engine.request import ModelInfo, ParamValue, Request
from saggar.jobs.cards import Limits, ModelCard
from saggar.jobs.schema import Job
from saggar.workers.encode_media import FORMATS

# The lane's classes are the engine's, counted from the most urgent.
PRIORITY = {"interactive": 0, "normal": 1, "bulk": 2}


def to_request(job: Job, inputs: Mapping[str, Sequence[Media]] | None = None) -> Request:
    """The request of a checked job: its seed is chosen, its params are complete; `inputs` are its files, decoded."""
    assert job.seed is not None, "submit chooses the seed"
    return Request(
        id=job.id,
        task=job.task,
        prompt=job.prompt,
        negative_prompt=job.negative_prompt,
        inputs=inputs or {},
        params=cast(Mapping[str, ParamValue], job.params),  # checked against the engine's own schema
        seed=job.seed,
        num_outputs=job.num_outputs,
        priority=PRIORITY[job.priority],
    )


def to_card(info: ModelInfo, name: str, max_batch: int) -> ModelCard:
    """What this worker publishes of its model, so that jobs are checked before they are queued."""
    return ModelCard(
        model=name,
        family=info.family,
        tasks=list(info.tasks),
        params_schema=dict(info.params_schema),
        limits=Limits.model_validate(dict(info.limits)),
        batch_fields=list(info.batch_fields),
        max_batch=max_batch,
        revision=info.revision,
        numerics=info.numerics,
        formats=list(FORMATS[info.medium]),
        inputs=sorted({kind for kinds in info.task_inputs.values() for kind in kinds}),
        task_inputs={task: dict(kinds) for task, kinds in info.task_inputs.items()},
    )
