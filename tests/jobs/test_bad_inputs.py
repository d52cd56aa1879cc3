"""Whatever is wrong with a job is refused at submit, in one line that names the field and what is allowed."""

from __future__ import annotations

import json

import pytest
import redis
from saggar.jobs import Conflict, InvalidJob, JobClient, SaggarError, UnknownModel

from tests.jobs.samples import MODEL

SECRET = "a very private prompt"
NAN, INF = float("nan"), float("inf")
BIG = 2**63


def uri(text: str) -> dict[str, object]:
    return {"inputs": {"image": [text]}}


def params(**values: object) -> dict[str, object]:
    return {"params": values}


# what is put into a good job -> the field that is named, words of what is allowed
CASES: list[tuple[dict[str, object], str, str]] = [
    # fields and types
    ({"sed": 1}, "sed", "did you mean 'seed'"),
    ({"a\x1b[2J\n": 1}, "'a\\x1b[2J\\n'", "allow_unserved"),
    ({"version": 2}, "version", "1"),
    ({"version": "1"}, "version", "1"),
    ({"prompt": None}, "prompt", "a string"),
    ({"prompt": 5}, "prompt", "a string"),
    ({"prompt": ["a"]}, "prompt", "a string"),
    ({"prompt": "\ud800"}, "prompt", "without lone surrogates"),
    ({"prompt": "a\0b"}, "prompt", "text without it"),
    ({"negative_prompt": "\0"}, "negative_prompt", "text without it"),
    ({"params": {"label": "\0"}}, "params.label", "text without it"),
    ({"negative_prompt": 1}, "negative_prompt", "a string"),
    ({"prompt": "x" * 100_000}, "prompt", "at most 200 characters"),
    ({"prompt": "x" * 201}, "prompt", "at most 200 characters"),
    ({"negative_prompt": "x" * 201}, "negative_prompt", "at most 200 characters"),
    ({"task": "Paint"}, "task", "t2i"),
    ({"task": "t2v"}, "task", "t2i, i2i"),
    ({"priority": "urgent"}, "priority", "'interactive', 'normal' or 'bulk'"),
    ({"priority": 0}, "priority", "'interactive', 'normal' or 'bulk'"),
    ({"allow_unserved": "yes"}, "allow_unserved", "true or false"),
    ({"allow_unserved": 1}, "allow_unserved", "true or false"),
    # model
    ({"model": "saggar/emojy"}, "model", "saggar/emoji"),
    ({"model": ""}, "model", "saggar/emoji"),
    ({"model": "../etc"}, "model", "saggar/emoji"),
    ({"model": None}, "model", "saggar/emoji"),
    # id, run, tenant, tags, idempotency key
    ({"id": ""}, "id", "1 to 128 letters"),
    ({"id": "../x"}, "id", "1 to 128 letters"),
    ({"id": ".hidden"}, "id", "begin with a letter or digit"),
    ({"id": "a/b"}, "id", "1 to 128 letters"),
    ({"id": "a\\b"}, "id", "1 to 128 letters"),
    ({"id": "a\n"}, "id", "1 to 128 letters"),
    ({"id": "a\x00b"}, "id", "1 to 128 letters"),
    ({"id": "x" * 129}, "id", "1 to 128 letters"),
    ({"id": 7}, "id", "1 to 128 letters"),
    ({"run": "a b"}, "run", "1 to 128 letters"),
    ({"run": ""}, "run", "1 to 128 letters"),
    ({"tenant": "../t"}, "tenant", "1 to 128 letters"),
    ({"tags": "cat"}, "tags", "a list"),
    ({"tags": ["a b"]}, "tags[0]", "1 to 64 letters"),
    ({"tags": ["a", 1]}, "tags[1]", "1 to 64 letters"),
    ({"tags": ["a", "a"]}, "tags", "different tags"),
    ({"tags": [f"t{i}" for i in range(17)]}, "tags", "at most 16"),
    ({"idempotency_key": ""}, "idempotency_key", "printable"),
    ({"idempotency_key": "a b"}, "idempotency_key", "printable"),
    ({"idempotency_key": "k" * 129}, "idempotency_key", "1 to 128"),
    # seeds and outputs
    ({"seed": -1}, "seed", ">= 0"),
    ({"seed": BIG}, "seed", f"<= {BIG - 1}"),
    ({"seed": 10**40}, "seed", f"<= {BIG - 1}"),
    ({"seed": BIG - 1, "num_outputs": 2}, "seed", f"0 to {BIG - 2}"),
    ({"seed": 1.5}, "seed", "an integer"),
    ({"seed": "1"}, "seed", "an integer"),
    ({"seed": True}, "seed", "an integer"),
    ({"seed": NAN}, "seed", "an integer"),
    ({"num_outputs": 0}, "num_outputs", ">= 1"),
    ({"num_outputs": 5}, "num_outputs", "1 to 4"),
    ({"num_outputs": 10**9}, "num_outputs", "<= 1024"),
    ({"num_outputs": None}, "num_outputs", "an integer"),
    # parameters of the family
    ({"params": []}, "params", "names with scalars"),
    ({"params": None}, "params", "names with scalars"),
    (params(heigth=512), "params.heigth", "did you mean 'height'"),
    (params(cfg=3), "params.cfg", "guidance, height"),
    ({"params": {"a b": 1}}, "params", "identifiers"),
    ({"params": {f"p{i}": i for i in range(129)}}, "params", "at most 128"),
    (params(height=250), "params.height", "a multiple of 16"),
    (params(height=0), "params.height", ">= 16"),
    (params(height=-16), "params.height", ">= 16"),
    (params(width=2048), "params.width", "<= 1024"),
    (params(height=256.0), "params.height", "an integer"),
    (params(height="256"), "params.height", "an integer"),
    (params(height=True), "params.height", "an integer"),
    (params(height=None), "params.height", "an integer"),
    (params(height=1024, width=1024), "params.height", "at most 262144 pixels"),
    (params(steps=0), "params.steps", ">= 1"),
    (params(guidance=NAN), "params.guidance", "no NaN"),
    (params(guidance=INF), "params.guidance", "no infinity"),
    (params(guidance=-INF), "params.guidance", "no infinity"),
    (params(guidance="3"), "params.guidance", "a number"),
    (params(guidance=30.5), "params.guidance", "<= 30"),
    (params(true_cfg=1), "params.true_cfg", "> 1 or null"),
    (params(sampler="ddim"), "params.sampler", '"euler", "heun"'),
    (params(sigmas=1), "params.sigmas", "a list"),
    (params(sigmas=[1, "a"]), "params.sigmas[1]", "a number"),
    (params(sigmas=[NAN]), "params.sigmas[0]", "no NaN"),
    (params(sigmas=[1, 2, 3, 4, 5]), "params.sigmas", "at most 4 items"),
    (params(sigmas=[[1]]), "params.sigmas[0]", "a number or a string"),
    (params(tiling=1), "params.tiling", "true or false"),
    (params(label="TOO"), "params.label", "matching"),
    (params(label="x" * 9), "params.label", "at most 8 characters"),
    (params(steps={"n": 1}), "params.steps", "a JSON scalar"),
    (params(steps=BIG), "params.steps", "63 bits"),
    # inputs
    ({"inputs": []}, "inputs", "an object"),
    ({"inputs": {"images": []}}, "inputs.images", "did you mean 'image'"),
    ({"inputs": {"image": "s3://b/k"}}, "inputs.image", "a list"),
    (uri("ftp://host/a.png"), "inputs.image[0]", "s3://bucket/key"),
    (uri("http://host/a.png"), "inputs.image[0]", "https://host/path"),
    (uri("javascript:alert(1)"), "inputs.image[0]", "s3://bucket/key"),
    (uri("a.png"), "inputs.image[0]", "s3://bucket/key"),
    (uri("s3:///key"), "inputs.image[0]", "s3://bucket/key"),
    (uri("s3://bucket"), "inputs.image[0]", "s3://bucket/key"),
    (uri("s3://bucket/../other/key"), "inputs.image[0]", "s3://bucket/key"),
    (uri("file:///data/../etc/passwd"), "inputs.image[0]", "file:///absolute/path"),
    (uri("file://host/share"), "inputs.image[0]", "file:///absolute/path"),
    (uri("https://user:pass@host/a"), "inputs.image[0]", "https://host/path"),
    (uri("https://host/a b"), "inputs.image[0]", "printable"),
    (uri("https://host/a\n"), "inputs.image[0]", "printable"),
    (uri("https://host/" + "a" * 2048), "inputs.image[0]", "at most 2048"),
    ({"inputs": {"image": ["s3://b/k"] * 17}}, "inputs.image", "at most 16"),
    # adapters
    ({"inputs": {"image": ["s3://bucket/a.png"]}}, "inputs.image", "inputs: none"),
    ({"loras": [{"name": "a"}]}, "loras", "none"),
    ({"loras": [{"name": "a", "scale": NAN}]}, "loras[0].scale", "no NaN"),
    ({"loras": [{"name": "a", "scale": INF}]}, "loras[0].scale", "no infinity"),
    ({"loras": [{"name": "a", "scale": 99}]}, "loras[0].scale", "<= 16"),
    ({"loras": [{"name": "../a"}]}, "loras[0].name", "at most 128 characters"),
    ({"loras": [{"name": "a"}, {"nam": "b"}]}, "loras[1].nam", "did you mean 'name'"),
    ({"loras": ["a"]}, "loras[0]", "an object"),
    # output
    ({"output": {"format": "gif"}}, "output.format", "'png', 'webp'"),
    ({"output": {"format": "jpeg"}}, "output.format", "png, webp"),
    ({"output": {"quality": 0}}, "output.quality", ">= 1"),
    ({"output": {"quality": 101}}, "output.quality", "<= 100"),
    ({"output": {"quality": 90}}, "output.quality", "with webp"),
    ({"output": {"quality": 90, "format": "png"}}, "output.quality", "with webp"),
    ({"output": {"prefix": "../up"}}, "output.prefix", "a relative path"),
    ({"output": {"prefix": "/abs"}}, "output.prefix", "a relative path"),
    ({"output": {"prefix": "a/./b"}}, "output.prefix", "a relative path"),
    ({"output": {"prefix": "a//b"}}, "output.prefix", "a relative path"),
    ({"output": {"prefix": "a\\b"}}, "output.prefix", "a relative path"),
    ({"output": {"prefix": "a/\x07"}}, "output.prefix", "a relative path"),
    ({"output": {"prefix": "a/"}}, "output.prefix", "a relative path"),
    ({"output": {"prefix": "p" * 257}}, "output.prefix", "at most 256"),
    ({"output": {"folder": "x"}}, "output.folder", "format, prefix, quality"),
    # times
    ({"deadline": 1_900_000_000}, "deadline", "ISO 8601"),
    ({"deadline": "tomorrow"}, "deadline", "ISO 8601"),
    ({"deadline": "2030-01-01T00:00:00"}, "deadline", "2030-01-31T12:00:00Z"),
    ({"deadline": "2001-01-01T00:00:00Z"}, "deadline", "a time to come"),
    ({"not_before": "2030-13-01T00:00:00Z"}, "not_before", "ISO 8601"),
    (
        {"deadline": "2030-01-01T00:00:00Z", "not_before": "2030-01-02T00:00:00Z"},
        "deadline",
        "after not_before",
    ),
]


@pytest.mark.parametrize(
    ("change", "field", "allowed"), CASES, ids=[f"{i}-{c[1]}" for i, c in enumerate(CASES)]
)
def test_refused_and_nothing_queued(
    client: JobClient, fake: redis.Redis, change: dict[str, object], field: str, allowed: str
) -> None:
    before = set(fake.keys())
    with pytest.raises(InvalidJob) as caught:
        client.submit({"model": MODEL, "prompt": SECRET, "seed": 1, **change})
    line = str(caught.value)
    assert caught.value.field == field
    assert allowed in line
    assert "\n" not in line
    assert len(line) < 600
    assert SECRET not in line
    assert set(fake.keys()) == before


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "job"),
        ("[]", "job"),
        ('{"model": "saggar/emoji"}', "prompt"),
        ('{"prompt": "x"}', "model"),
        ('{"model": "saggar/emoji", "prompt": "x", "params": {"guidance": NaN}}', "params.guidance"),
        ('{"model": "saggar/emoji", "prompt": "x", "params": {"guidance": 1e999}}', "params.guidance"),
        ('{"model": "saggar/emoji", "prompt": "x", "seed": 1e3}', "seed"),
    ],
)
def test_bad_json_text(client: JobClient, fake: redis.Redis, text: str, field: str) -> None:
    before = set(fake.keys())
    with pytest.raises(InvalidJob) as caught:
        client.submit(text)
    assert caught.value.field == field
    assert set(fake.keys()) == before


def test_a_job_of_more_than_64_kib(client: JobClient, fake: redis.Redis) -> None:
    job = {"model": "other/model", "prompt": "é" * 33_000, "allow_unserved": True}
    with pytest.raises(InvalidJob, match=r"prompt: the job is too large .*65536 bytes"):
        client.submit(job)
    assert not fake.keys("saggar:job:*")


def test_unknown_model_names_the_known_ones(client: JobClient) -> None:
    with pytest.raises(UnknownModel, match=r"did you mean 'saggar/emoji'\? \(allowed: saggar/emoji\)"):
        client.submit({"model": "saggar/emojis", "prompt": "x"})


def test_the_same_id_with_another_spec(client: JobClient, fake: redis.Redis) -> None:
    job = {"model": MODEL, "prompt": "x", "id": "one"}
    assert client.submit(job).created
    before = fake.hgetall("saggar:job:one")
    with pytest.raises(Conflict, match=r"id: job one .*allowed: the same spec again, or another id"):
        client.submit({**job, "prompt": SECRET})
    assert not client.submit(job).created
    assert fake.hgetall("saggar:job:one") == before
    assert fake.hlen("saggar:gen.saggar--emoji:m") == 1


def test_the_same_idempotency_key_with_another_spec(client: JobClient, fake: redis.Redis) -> None:
    job = {"model": MODEL, "prompt": "x", "idempotency_key": "order-17"}
    first = client.submit(job)
    with pytest.raises(Conflict, match=r"idempotency_key: .*or another idempotency_key"):
        client.submit({**job, "params": {"steps": 5}})
    again = client.submit(job)
    assert (again.id, again.created) == (first.id, False)
    assert client.submit({**job, "tenant": "other"}).created  # keys are a tenant's own
    assert fake.hlen("saggar:gen.saggar--emoji:m") == 2


def test_bad_lines_among_good_ones(client: JobClient, fake: redis.Redis) -> None:
    lines = [json.dumps({"model": MODEL, "prompt": "x", "seed": seed}) for seed in (1, -1, 2)]
    outcomes = list(client.submit_many([*lines, "{"]))
    assert [isinstance(o, SaggarError) for o in outcomes] == [False, True, False, True]
    assert fake.hlen("saggar:gen.saggar--emoji:m") == 2
