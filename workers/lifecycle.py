"""The worker's process: the engine first, then the Celery worker, and an orderly end of both.

`python -m saggar.workers.lifecycle` with SAGGAR_WORKER_SETTINGS; started by the supervisor, whose end it notices by its
standard input closing.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import redis
from saggar.engine.engine import Engine
from saggar.engine.errors import EngineError, LoadError, Unsupported
from saggar.jobs.cards import Cards, ModelCard
from saggar.jobs.errors import ConfigError
from saggar.jobs.lanes import Lanes, LateAppetite, lane_name, lanes_of
from saggar.jobs.ledger import Ledger, cancel_channel
from saggar.jobs.record import JobError
from saggar.jobs.settings import connect
from saggar.storage.base import Storage
from saggar.storage.errors import (
    Conflict,
    InvalidKey,
    NotFound,
    StorageConfigError,
    StorageRefused,
    StorageUnavailable,
)
from saggar.storage.retry import Backoff, retrying
from saggar.storage.seldom import Seldom
from saggar.workers.app import make_app
from saggar.workers.appetite import EngineAppetite
from saggar.workers.assembly import check, engine_config, lane_settings, open_store, own_spool
from saggar.workers.attempts import Attempts
from saggar.workers.chores import ChoresWorker
from saggar.workers.group import GroupPublisher
from saggar.workers.housekeeping import Housekeeper
from saggar.workers.inputs.fetch import Fetcher
from saggar.workers.inputs.load import InputLoader
from saggar.workers.line import Line
from saggar.workers.model_source import is_remote, local_model
from saggar.workers.pool import pool_on
from saggar.workers.publish import Origin, Publisher
from saggar.workers.runs.keeper import MODEL_EVERY_S, RunKeeper
from saggar.workers.service import Service
from saggar.workers.settings import WorkerSettings
from saggar.workers.supervisor import CANNOT_START, LOG_FORMAT, REFUSED, watch_parent
from saggar.workers.tasks import register_generate, register_revoke
from saggar.workers.translate import to_card
from saggar.workers.versions import versions

if TYPE_CHECKING:
    from celery import Celery
    from celery.apps.worker import Worker

log = logging.getLogger(__name__)

_TELL_TOO_MUCH = {
    "celery.pool": logging.INFO,
    "boto3": logging.INFO,
    "botocore": logging.INFO,
    "s3transfer": logging.INFO,
    "urllib3": logging.INFO,
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
}
"""The levels below which they log bodies of messages and objects, session tokens, signatures and signed URLs."""
CARD_REFRESH_S = 60.0
REDIS_PAUSE_S = 2.0
ENGINE_LOST = 3
ENGINE_LOOK_S = 1.0


class ModelWorker:
    """One engine, one lane, one store. `run` blocks until the worker has ended; its exit status."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        self._lost = threading.Event()

    def run(self) -> int:
        """Raises Unsupported, LoadError, StorageConfigError and ConfigError when it cannot start."""
        with ExitStack() as stack:
            worker = self._start(stack)
            worker.start()
        # Celery answers an unrecoverable error by stopping in order, and only its exit code tells.
        return ENGINE_LOST if self._lost.is_set() else worker.exitcode or 0

    def _start(self, stack: ExitStack) -> Worker:
        settings = self._settings
        check(settings)
        client = connect(settings.jobs)
        stack.callback(client.close)
        _wait_for(client)
        storage = open_store(settings)
        stack.callback(storage.close)
        self._wait_for_store(storage)
        engine = stack.enter_context(self._make_engine(self._fetch_model(stack)))
        card = to_card(engine.info, settings.name, settings.max_batch)

        stack.callback(Housekeeper(client, settings.jobs, storage).close)
        stack.callback(RunKeeper(settings.jobs, MODEL_EVERY_S).close)

        late = LateAppetite()
        app = make_app(settings.jobs, late)
        app.conf.broker_transport_options["lane_heartbeat_s"] = settings.heartbeat_s
        lanes = lanes_of(app)
        lane = lane_name(card.model)
        ledger = Ledger(client, settings.jobs)
        attempts = Attempts(ledger)
        stack.callback(attempts.close)
        publisher = Publisher(
            storage, own_spool(settings, storage, stack), Origin(card.model, card.revision, versions())
        )
        appetite = EngineAppetite(engine, settings.max_batch, publisher.has_room)

        def engine_lost() -> None:
            if engine.health().over:  # otherwise it starts its ranks anew, and goes on
                appetite.close()  # at once: interactive jobs are fetched without asking the engine for a seat
                self._on_engine_lost()

        inputs = InputLoader(
            Fetcher(settings.input_policy(storage.url), settings.input_limits), engine.info.alpha_tasks
        )
        stack.callback(inputs.close)
        service = Service(ledger, attempts, engine, publisher, card, lanes.owner, engine_lost, inputs)
        group = GroupPublisher(ledger, attempts, publisher, service)
        line = Line(service, group, lanes.started, appetite.take)
        register_generate(app, line)
        register_revoke(ledger)

        lanes.on_lost(attempts.lost)
        lanes.on_dead(lambda _lane, job_id: _bury(ledger, job_id))
        engine.on_room(lanes.wake)
        self._listen_for_cancels(client, attempts)
        cards = Cards(client, settings.jobs)
        self._keep_card(cards, card, lanes, lane)
        self._watch_engine(engine, engine_lost)
        late.fill(appetite)
        self._drain_on_shutdown(lambda: self._drain(appetite, attempts, lanes, service))
        stack.callback(_leave_quietly, cards, card.model, lanes.owner)
        log.info("serving %s from %s, batches of %d, into %s", card.model, lane, card.max_batch, storage.url)
        return self._celery_worker(app, line, lane, lanes.owner)

    def _celery_worker(self, app: Celery, line: Line, lane: str, owner: str) -> Worker:
        worker: Worker = app.Worker(
            pool=pool_on(line),
            concurrency=self._settings.in_hand,
            queues=[lane],
            hostname=f"{lane}@{owner.replace(':', '-')}",
            without_gossip=True,
            without_mingle=True,
            loglevel=self._settings.log_level.upper(),
            redirect_stdouts=False,
        )
        return worker

    def _make_engine(self, model: str) -> Engine:
        """Raises as Engine.make; of a model that was fetched the error says from where."""
        try:
            return Engine.make(engine_config(self._settings, model))
        except LoadError as error:
            if not is_remote(self._settings.model):
                raise
            raise LoadError(
                f"{self._settings.model} is not whole or damaged; of what was fetched: {error}"
            ) from error

    def _wait_for_store(self, storage: Storage) -> None:
        """Until it answers: it may come up after its workers. Refusals are raised."""
        telling = Seldom()

        def probe() -> None:
            try:
                storage.probe()
            except StorageUnavailable as error:
                if telling.due():
                    log.warning("the store cannot be reached, trying again: %s", error)
                raise

        retrying(probe, lambda _: True, backoff=Backoff(), stop=self._stopping)

    def _fetch_model(self, stack: ExitStack) -> str:
        """The model as the engine takes it; what S3 has is fetched first, however long S3 is away, and stays in the
        cache until the stack ends."""
        cache, limit = self._settings.model_cache, self._settings.model_cache_bytes
        telling = Seldom()

        def go_on(failures: int) -> bool:
            if telling.due():
                log.warning("%s cannot be fetched now, trying again", self._settings.model)
            return True

        return retrying(
            lambda: stack.enter_context(local_model(self._settings.model, cache, limit=limit)),
            go_on,
            backoff=Backoff(),
            stop=self._stopping,
        )

    def _drain(self, appetite: EngineAppetite, attempts: Attempts, lanes: Lanes, service: Service) -> None:
        """SIGTERM: fetch nothing, give back what does not execute, let the rest finish; after the grace time, leave."""
        self._stopping.set()
        appetite.close()
        deadline = threading.Timer(self._settings.grace_s, _leave, [attempts, lanes, service])
        deadline.daemon = True
        deadline.start()  # first, for a Redis that is frozen holds up all that follows
        attempts.drain()
        lanes.give_back()

    def _drain_on_shutdown(self, drain: Callable[[], None]) -> None:
        from celery.signals import worker_shutting_down

        def on_shutdown(**_: object) -> None:
            # The signal handler's thread may hold any lock: the work is another thread's.
            if not self._stopping.is_set():
                threading.Thread(target=drain, name="saggar-drain", daemon=True).start()

        worker_shutting_down.connect(on_shutdown, weak=False)

    def _watch_engine(self, engine: Engine, lost: Callable[[], None]) -> None:
        """An idle worker meets its engine's end nowhere else."""

        def watch() -> None:
            while not self._stopping.wait(ENGINE_LOOK_S):
                lost()

        threading.Thread(target=watch, name="saggar-engine-watch", daemon=True).start()

    def _on_engine_lost(self) -> None:
        if not self._lost.is_set():
            self._lost.set()
            log.error("the engine is lost: this worker ends, its supervisor starts another")
            os.kill(os.getpid(), signal.SIGTERM)

    def _listen_for_cancels(self, client: redis.Redis, attempts: Attempts) -> None:
        """Cancels are pushed; the pulse's look at the ledger is the net."""
        channel = cancel_channel(self._settings.jobs)

        def listen() -> None:
            while not self._stopping.is_set():
                try:
                    with client.pubsub(ignore_subscribe_messages=True) as inbox:  # type: ignore[no-untyped-call]
                        inbox.subscribe(channel)
                        while not self._stopping.is_set():
                            if message := inbox.get_message(timeout=1.0):
                                attempts.cancel(message["data"])
                except redis.RedisError as error:
                    log.warning("cancels are not heard for a moment: %s", error)
                    self._stopping.wait(1.0)

        threading.Thread(target=listen, name="saggar-cancels", daemon=True).start()

    def _keep_card(self, cards: Cards, card: ModelCard, lanes: Lanes, lane: str) -> None:
        """The card and the lane's settings, again and again: somebody may have flushed them away."""

        def publish() -> None:
            lanes.store.configure(lane, lane_settings(self._settings))
            cards.publish(card, lanes.owner)

        publish()

        def refresh() -> None:
            while not self._stopping.wait(CARD_REFRESH_S):
                try:
                    publish()
                except Exception:  # whatever it is, the next round may find it mended
                    log.warning("the model card could not be refreshed", exc_info=True)

        threading.Thread(target=refresh, name="saggar-card", daemon=True).start()


def _wait_for(client: redis.Redis) -> None:
    """Until Redis answers: it may come up after its workers. Refusals (a wrong password) are raised."""
    while True:
        try:
            client.ping()
            return
        except redis.AuthenticationError:
            raise
        except (redis.ConnectionError, redis.TimeoutError) as error:
            log.warning("Redis cannot be reached, the next try is in %.0f s: %s", REDIS_PAUSE_S, error)
            time.sleep(REDIS_PAUSE_S)


def _leave_quietly(cards: Cards, model: str, worker: str) -> None:
    """Nobody counts on this worker any more; if Redis is away, its entry grows old by itself."""
    try:
        cards.leave(model, worker)
    except redis.RedisError as error:
        log.info("the model card's worker could not be taken off: %s", error)


def _bury(ledger: Ledger, job_id: str) -> None:
    ledger.bury(job_id, JobError(kind="dead", message="delivered too often without an end"))


def _leave(attempts: Attempts, lanes: Lanes, service: Service) -> None:
    """The grace time is over, and Celery alone would wait for ever for a task that hangs or a Redis that is frozen.

    The supervisor waits two seconds more: with a frozen Redis it is the one that ends this.
    """
    log.error("the grace time is over: giving everything back and leaving")
    service.close()
    try:
        attempts.give_back()
        lanes.give_back(everything=True)
    except redis.RedisError as error:
        log.error("Redis does not answer, the leases will run out: %s", error)
    os._exit(1)


def main() -> int:
    """The exit status: REFUSED when starting again would end the same way."""
    settings = WorkerSettings.from_parent()
    logging.basicConfig(level=settings.log_level.upper(), format=LOG_FORMAT)
    for name, level in _TELL_TOO_MUCH.items():
        logging.getLogger(name).setLevel(level)
    watch_parent()
    try:
        return (ModelWorker if settings.role == "model" else ChoresWorker)(settings).run()
    except (Unsupported, LoadError, StorageConfigError, StorageRefused, InvalidKey, ConfigError) as error:
        log.error("%s%s", CANNOT_START, error)
        return REFUSED
    except (EngineError, Conflict, NotFound, redis.RedisError) as error:
        log.error("could not start: %s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
