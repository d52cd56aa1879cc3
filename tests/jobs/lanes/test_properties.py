"""Random sequences of everything a lane can do: nothing is lost, nothing is in two hands, the indexes agree."""

from __future__ import annotations

import fakeredis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from saggar.jobs.lanes import LaneSettings, LaneStore, Tag, celery_message
from saggar.jobs.lanes.store import Outcome

from tests.jobs.lanes.invariants import snapshot

LANE = "gen.m"
OWNERS = st.sampled_from(["v", "w"])
KEYS = st.sampled_from(["a", "b", "c"])


class LaneMachine(RuleBasedStateMachine):
    """The model: which messages exist (by stored tag), and which delivery of each is the latest."""

    tags = Bundle("tags")

    @initialize(limit=st.integers(2, 4), age_bound=st.sampled_from([0, 60]))
    def start(self, limit, age_bound):
        self.store = LaneStore(fakeredis.FakeRedis(decode_responses=True))
        self.store.configure(LANE, LaneSettings(max_batch=3, max_deliveries=limit, age_bound_s=age_bound))
        self.delivery: dict[str, int] = {}  # stored tag -> number of its latest delivery
        self.hands: dict[str, str] = {}  # stored tag -> who holds a lease
        self.returned: set[str] = set()  # given back on purpose since their latest delivery

    @rule(
        id_=st.integers(0, 6).map(str),
        key=KEYS,
        c=st.integers(0, 2),
        rows=st.integers(1, 3),
        twice=st.booleans(),
    )
    def put(self, id_, key, c, rows, twice):
        message = celery_message("t", id_, LANE, priority_class=c, batch_key=key, rows=rows)
        assert self.store.put(message)
        if twice:
            assert not self.store.put(message)
        self.delivery[f"{id_}~{message.uuid}" if id_ in self.delivery else id_] = 0

    @rule(target=tags, owner=OWNERS, rows=st.integers(1, 4), open_key=st.none() | KEYS, twice=st.booleans())
    def fetch(self, owner, rows, open_key, twice):
        arguments = {"rows": rows, "seats": 3, "open_key": open_key, "room": 2, "token": None}
        if twice:
            arguments["token"] = f"t{len(self.delivery)}{self.store.client.incr('token')}"
        before = snapshot(self.store, LANE)
        batch = self.store.fetch(LANE, owner, **arguments)
        if twice:
            assert self.store.fetch(LANE, owner, **arguments) == batch
        assert (batch is None) == (not before.waiting)
        if batch is None:
            return Tag(LANE, "nobody", 1)
        assert batch.priority_class == min(int(before.records[tag]["class"]) for tag in before.waiting)
        room = 2 if batch.key == open_key else rows
        assert batch.rows <= max(room, batch.deliveries[0].rows)
        for delivery in batch.deliveries:
            assert delivery.tag.id not in self.hands
            assert delivery.tag.delivery == self.delivery[delivery.tag.id] + 1
            self.delivery[delivery.tag.id] += 1
            self.hands[delivery.tag.id] = owner
            self.returned.discard(delivery.tag.id)
        return batch.deliveries[-1].tag

    @rule(tag=tags)
    def ack(self, tag):
        outcome = self.store.ack(tag)
        if tag.id not in self.delivery:
            assert outcome is Outcome.GONE
        elif self.delivery[tag.id] != tag.delivery or tag.id in self.returned:
            assert outcome is Outcome.STALE
        else:
            assert outcome is Outcome.DONE
            del self.delivery[tag.id]
            self.hands.pop(tag.id, None)

    @rule(tag=tags, counted=st.booleans())
    def requeue(self, tag, counted):
        outcome = self.store.requeue(tag, counted=counted)
        current = self.delivery.get(tag.id) == tag.delivery
        assert (outcome in (Outcome.DONE, Outcome.DEAD)) == current
        if current:
            self.hands.pop(tag.id, None)
            self.returned.add(tag.id)

    @rule(tag=tags, owner=OWNERS)
    def extend(self, tag, owner):
        before = snapshot(self.store, LANE)
        lost = self.store.extend(LANE, owner, [tag])
        mine = self.delivery.get(tag.id) == tag.delivery and before.records[tag.id]["owner"] == owner
        assert lost == ([] if mine else [tag])
        if mine:
            self.hands[tag.id] = owner

    @rule(tag=tags)
    def expire(self, tag):
        if self.delivery.get(tag.id) == tag.delivery and tag.id in self.hands:
            self.store.client.zadd(f"{LANE}:l", {tag.id: 1})
            self.store.client.hset(f"{LANE}:s", "hold", 0)
            self.store.sweep(LANE)
            del self.hands[tag.id]

    @rule(owner=OWNERS)
    def die(self, owner):
        self.store.sweep(LANE, owner)
        self.hands = {tag: who for tag, who in self.hands.items() if who != owner}

    @rule(id_=st.integers(0, 6).map(str))
    def expedite(self, id_):
        if self.store.expedite(LANE, id_):
            assert self.store.position(LANE, id_) is not None

    @rule()
    def revive(self):
        for letter in self.store.dead_letters(LANE):
            assert self.store.revive(LANE, letter.tag)
            self.returned.add(letter.tag)  # whoever had it last has it no more

    @rule(max_batch=st.integers(1, 4))
    def configure(self, max_batch):
        self.store.configure(LANE, LaneSettings(max_batch=max_batch))

    @invariant()
    def nothing_lost_or_doubled(self):
        if not hasattr(self, "store"):
            return
        lane = snapshot(self.store, LANE)
        assert lane.records.keys() == self.delivery.keys()
        assert lane.leased == self.hands.keys()
        assert all(lane.records[tag]["owner"] == who for tag, who in self.hands.items())


LaneMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLane = LaneMachine.TestCase
