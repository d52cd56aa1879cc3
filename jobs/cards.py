"""Model cards: what a model takes, said by the workers that serve it, and the check of a job against one.

Cards stay after their worker has left, so that jobs can be checked and queued while nothing runs. This
module does not know the engine: a card is what the engine's ModelInfo says, as JSON.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from functools import cached_property
from secrets import randbits
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from saggar.jobs.errors import InvalidCard, InvalidJob, UnknownModel
from saggar.jobs.invalid import one_line, shown, unknown_name
from saggar.jobs.params import ParamsChecker
from saggar.jobs.schema import LOSSLESS, Job, ParamValue

if TYPE_CHECKING:
    import redis
    from saggar.jobs.settings import JobSettings

DAY_S = 24 * 3600
log = logging.getLogger(__name__)

SEED_BITS = 32  # of a seed chosen for a job that has none: short enough to be typed again


class Limits(BaseModel):
    """Limits across fields; None is no limit. `max_pixels` is height x width. A worker may publish further
    ones for people to read: they are kept, and not checked here."""

    model_config = ConfigDict(frozen=True, extra="allow")

    max_prompt_chars: int | None = Field(default=None, ge=0)
    max_outputs: int | None = Field(default=None, ge=1)
    max_pixels: int | None = Field(default=None, ge=1)


class ModelCard(BaseModel):
    """What one served model takes. `model` is the public name; `batch_fields` are the params that rows of
    one batch must share; `formats` in order of preference, the first is the default; `task_inputs` says how many
    files of each kind a task takes, at least and at most."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(min_length=1, max_length=128)
    family: str
    tasks: list[str] = Field(min_length=1)
    params_schema: dict[str, JsonValue]
    limits: Limits = Limits()
    batch_fields: list[str] = []
    max_batch: int = Field(default=1, ge=1)
    revision: str = ""
    formats: list[str] = ["png"]
    inputs: list[str] = []  # the kinds of files it takes: image, mask, audio, video
    task_inputs: dict[str, dict[str, tuple[int, int]]] = {}
    loras: bool = False
    numerics: str = ""

    @cached_property
    def checker(self) -> ParamsChecker:
        """The params' rules, built once a card. Raises InvalidCard."""
        checker = ParamsChecker.from_schema(self.params_schema)
        missing = sorted(set(self.batch_fields) - set(checker.allowed))
        if missing:
            raise InvalidCard(f"batch_fields: {missing[0]!r} is not in params_schema")
        return checker

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self:
        """A copy builds rules of its own: the update may have changed them."""
        copy = super().model_copy(update=update, deep=deep)
        copy.__dict__.pop("checker", None)
        return copy

    def __getstate__(self) -> dict[Any, Any]:
        """Without the rules, which another process builds again from the schema."""
        state = super().__getstate__()
        fields = {name: value for name, value in state["__dict__"].items() if name != "checker"}
        return {**state, "__dict__": fields}


def parse_card(text: str) -> ModelCard:
    """A published card, its rules built. Fields that are not known here come from a newer worker and are left out.

    Raises InvalidCard.
    """
    try:
        card = ModelCard.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        raise InvalidCard(str(one_line(error, {"": ModelCard.model_fields}))) from None
    _ = card.checker
    return card


def check_job(job: Job, card: ModelCard) -> Job:
    """The job with the card's defaults, a format and a seed filled in. Raises InvalidJob.

    Idempotent: the checked job passes again and comes back equal.
    """
    if job.task not in card.tasks:
        raise InvalidJob("task", f"{shown(job.task)} is not served by {card.model}", ", ".join(card.tasks))
    _check_extras(job, card)
    params = card.checker.check(job.params, job.task)
    _check_limits(job, params, card.limits)
    output = job.output
    if output.format is None:
        output = output.model_copy(update={"format": card.formats[0]}) if card.formats else output
    elif output.format not in card.formats:
        raise InvalidJob(
            "output.format", f"{output.format} is not made by {card.model}", ", ".join(card.formats)
        )
    if output.quality is not None and output.format in LOSSLESS:
        lossy = ", ".join(name for name in card.formats if name not in LOSSLESS) or "none"
        raise InvalidJob(
            "output.quality", f"says nothing to {output.format}, which loses nothing", f"with {lossy}"
        )
    return with_seed(job.model_copy(update={"params": params, "output": output}))


def completed(job: Job, card: ModelCard | None) -> Job:
    """The job as it is queued: checked against its card, or, queued without one, with a seed at least.

    Raises InvalidJob.
    """
    return check_job(job, card) if card else with_seed(job)


def with_seed(job: Job) -> Job:
    """The job with a seed chosen at random if it has none, so that every attempt makes the same."""
    return job if job.seed is not None else job.model_copy(update={"seed": randbits(SEED_BITS)})


def _check_extras(job: Job, card: ModelCard) -> None:
    """What a model cannot use is refused, never ignored."""
    taken = ", ".join(card.inputs) or "none"
    for kind, uris in job.inputs:
        if uris and kind not in card.inputs:
            raise InvalidJob(f"inputs.{kind}", f"is not taken by {card.model}", f"inputs: {taken}")
    if card.task_inputs:  # a card of an older worker has none
        _check_counts(job, card.task_inputs.get(job.task, {}))
    if job.loras and not card.loras:
        raise InvalidJob("loras", f"are not taken by {card.model}", "none")


def _check_counts(job: Job, taken: Mapping[str, tuple[int, int]]) -> None:
    for kind, uris in job.inputs:
        least, most = taken.get(kind, (0, 0))
        if not least <= len(uris) <= most:
            allowed = str(least) if least == most else f"{least} to {most}"
            raise InvalidJob(f"inputs.{kind}", f"{len(uris)} were given for {job.task}", allowed)


def _check_limits(job: Job, params: dict[str, ParamValue], limits: Limits) -> None:
    longest = limits.max_prompt_chars
    for field, text in (("prompt", job.prompt), ("negative_prompt", job.negative_prompt or "")):
        if longest is not None and len(text) > longest:
            raise InvalidJob(field, f"has {len(text)} characters", f"at most {longest} characters")
    if limits.max_outputs is not None and job.num_outputs > limits.max_outputs:
        raise InvalidJob("num_outputs", f"{job.num_outputs} is too large", f"1 to {limits.max_outputs}")
    height, width = params.get("height"), params.get("width")
    pixels = height * width if isinstance(height, int) and isinstance(width, int) else 0
    if limits.max_pixels is not None and pixels > limits.max_pixels:
        allowed = f"height x width of at most {limits.max_pixels} pixels"
        raise InvalidJob("params.height", f"{height} x width {width} is too large", allowed)


def batch_key(job: Job, card: ModelCard | None) -> str:
    """What rows of one batch must share, as canonical JSON: equal keys may run together.

    Of a checked job. Without a card only the task and the adapters are known to matter.
    """
    key: dict[str, object] = {"task": job.task}
    if job.loras:
        key["loras"] = [{"name": lora.name, "scale": lora.scale} for lora in job.loras]
    for field in card.batch_fields if card else ():
        key[field] = job.params.get(field)
    return json.dumps(key, sort_keys=True, separators=(",", ":"))


def unknown_model(model: str, known: Iterable[str]) -> UnknownModel:
    """The error for a model without a card, with the nearest name that has one."""
    names = list(known)
    if not names:
        start = (
            f"start one: saggar worker --model {model}"
            if len(model) <= 64
            else "start one: saggar worker --model ..."
        )
        return UnknownModel("model", f"no worker has served {shown(model)} here yet", f"none yet; {start}")
    hint = unknown_name("model", model, names)
    return UnknownModel("model", f"{shown(model)} has no card: {hint.message}", hint.allowed)


class Cards:
    """The published cards in Redis: one hash of all cards, and for each model the workers last seen."""

    def __init__(self, client: redis.Redis, settings: JobSettings) -> None:
        self._redis = client
        self._key = settings.key_prefix + "cards"

    def publish(self, card: ModelCard, worker_id: str) -> None:
        """Says that this worker serves the card; call again every minute or so to stay among `workers_of`.
        The newest card of a model counts. Raises InvalidCard."""
        _ = card.checker
        self._redis.hset(self._key, card.model, card.model_dump_json())
        seconds, _micros = self._time()
        self._redis.zadd(self._workers(card.model), {worker_id: seconds})
        self._redis.zremrangebyscore(self._workers(card.model), "-inf", seconds - DAY_S)

    def leave(self, model: str, worker_id: str) -> None:
        """The worker no longer serves the model; the card stays."""
        self._redis.zrem(self._workers(model), worker_id)

    def forget(self, model: str) -> None:
        """The model has no card any more, and jobs for it are refused, once clients that know the card look again;
        those that wait stay. A worker that serves it publishes it again.

        UnknownModel: it has none.
        """
        if not self._redis.hdel(self._key, model):
            raise unknown_model(model, cast("list[str]", self._redis.hkeys(self._key)))
        self._redis.delete(self._workers(model))

    def get(self, model: str) -> ModelCard | None:
        """Raises InvalidCard for a card that cannot be read."""
        text = cast("str | None", self._redis.hget(self._key, model))
        return parse_card(text) if text is not None else None

    def workers_of(self, model: str, within_s: int = 180) -> list[str]:
        """Workers that published within this time, on Redis's clock."""
        seconds, _micros = self._time()
        return cast("list[str]", self._redis.zrangebyscore(self._workers(model), seconds - within_s, "+inf"))

    def list(self) -> list[ModelCard]:
        """All cards ever published, by model. One that cannot be read is left out, and the log says so."""
        texts = cast("dict[str, str]", self._redis.hgetall(self._key))
        cards = []
        for model, text in sorted(texts.items()):
            try:
                cards.append(parse_card(text))
            except InvalidCard as error:
                log.warning("the card of %s cannot be read: %s", model, error)
        return cards

    def _workers(self, model: str) -> str:
        return f"{self._key}:workers:{model}"

    def _time(self) -> tuple[int, int]:
        return self._redis.time()


__all__ = [
    "Cards",
    "Limits",
    "ModelCard",
    "batch_key",
    "check_job",
    "completed",
    "parse_card",
    "unknown_model",
    "with_seed",
]
