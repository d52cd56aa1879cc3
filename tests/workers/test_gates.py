"""Gates: what each lets through, what it says, how `--gate` is read, and that nothing depends on chance."""

from __future__ import annotations

import io
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
from PIL import Image
from saggar.jobs.errors import ConfigError
from saggar.workers.runs import gates as module
from saggar.workers.runs.duplicates import BITS, NearDuplicates, fingerprint
from saggar.workers.runs.gates import Candidate, GateError, gate_names, parse_gates


def scene(seed: int, size: tuple[int, int] = (96, 64)) -> np.ndarray:
    """A smooth random picture: few coarse values, enlarged."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))


def flat(*colour: int) -> np.ndarray:
    return np.full((64, 96, 3), colour, np.uint8)


def judged(spec: str, array: np.ndarray, size: int = 10_000):
    return parse_gates([spec]).judge(Candidate("k", array, size)).verdicts[-1]


def one_light() -> np.ndarray:
    picture = flat(0, 0, 0)
    picture[10:20, 10:20] = 200
    return picture


@pytest.mark.parametrize(
    ("spec", "array", "passed"),
    [
        ("black", flat(0, 0, 0), False),
        ("black", flat(5, 7, 3), False),
        ("black", one_light(), True),
        ("black>=210", one_light(), False),
        ("black:level=210", one_light(), False),
        ("black", scene(1), True),
        ("blank", flat(200, 10, 30), False),
        ("blank", flat(0, 0, 0), False),
        ("blank", one_light(), True),
        ("blank", scene(1), True),
        ("blank:deviation=120", scene(1), False),
        ("nan", scene(1), True),
        ("nan", scene(1) / 255, True),
        ("min_bytes", scene(1), True),
        ("min_bytes>=10000", scene(1), True),
        ("min_bytes>=10001", scene(1), False),
        ("near_duplicate", scene(1), True),
    ],
)
def test_what_a_gate_lets_through(spec: str, array: np.ndarray, passed: bool) -> None:
    verdict = judged(spec, array)
    assert verdict.passed is passed
    assert verdict.name == spec.partition(":")[0].partition(">")[0]
    assert isinstance(verdict.value, int | float) and isinstance(verdict.threshold, int | float)


def test_nan_is_a_share_of_floats_and_black_to_the_others() -> None:
    array = (scene(1) / 255).astype(np.float32)
    array[0, 0, 0], array[0, 0, 1] = np.nan, np.inf
    verdict = judged("nan", array)
    assert not verdict.passed and verdict.value == pytest.approx(2 / array.size)
    assert not judged("black", np.full((8, 8, 3), np.nan)).passed


def test_the_first_gate_that_refuses_ends_it() -> None:
    gates = parse_gates(["min_bytes", "black", "blank"])
    judgement = gates.judge(Candidate("k", flat(0, 0, 0), 10_000))
    assert [verdict.name for verdict in judgement.verdicts] == ["min_bytes", "black"]
    assert judgement.rejected_by is judgement.verdicts[1] and not judgement.accepted
    assert gates.judge(Candidate("k", scene(1), 10_000)).accepted
    assert parse_gates([]).judge(Candidate("k", flat(0, 0, 0), 0)).accepted


def jpeg(array: np.ndarray, quality: int) -> bytes:
    target = io.BytesIO()
    Image.fromarray(array).save(target, "JPEG", quality=quality)
    return target.getvalue()


def test_near_duplicates_are_found_and_others_are_not() -> None:
    gates = parse_gates(["near_duplicate"])
    for seed in range(200):
        assert gates.judge(Candidate(f"row-{seed}", scene(seed), 1)).accepted, seed
    brighter = np.clip(scene(7).astype(int) + 6, 0, 255).astype(np.uint8)
    smaller = np.asarray(Image.fromarray(scene(9)).resize((72, 48), Image.Resampling.LANCZOS))
    cases = [
        ("row-3", Candidate("same", scene(3), 1)),
        ("row-5", Candidate.of_file("lossy", jpeg(scene(5), 60))),
        ("row-7", Candidate("brighter", brighter, 1)),
        ("row-9", Candidate("smaller", smaller, 1)),
    ]
    for like, candidate in cases:
        verdict = gates.judge(candidate).rejected_by
        assert verdict is not None and verdict.like == like
        assert verdict.value <= verdict.threshold == 10
    assert gates.judge(Candidate("row-3", scene(3), 1)).accepted, "a row is no duplicate of itself"


def test_a_rejected_picture_is_not_remembered_and_a_restart_forgets_nothing() -> None:
    gates = parse_gates(["near_duplicate", "min_bytes>=10"])
    assert not gates.judge(Candidate("small", scene(1), 5)).accepted
    first = gates.judge(Candidate("a", scene(1), 50))
    assert first.accepted and first.fingerprint is not None
    again = parse_gates(["near_duplicate", "min_bytes>=10"])
    again.restore("a", first.fingerprint)
    verdict = again.judge(Candidate("b", scene(1), 50)).rejected_by
    assert verdict is not None and (verdict.value, verdict.like) == (0, "a")


def test_distance_is_an_option() -> None:
    gates = parse_gates([f"near_duplicate:distance={BITS - 1}"])
    assert gates.judge(Candidate("a", scene(1), 1)).accepted
    assert not gates.judge(Candidate("b", scene(2), 1)).accepted


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    seen = NearDuplicates(distance=0, memory=2000)
    marks = [number.to_bytes(BITS // 8, "big") for number in range(5000)]
    for number, mark in enumerate(marks):
        seen.remember(str(number), mark)
    assert seen._hashes.shape == (2000, BITS // 64) and len(seen._keys) == len(seen._places) == 2000
    assert seen.nearest("new", marks[4999]) == (0, "4999")
    assert seen.nearest("new", marks[3000]) == (0, "3000")
    assert seen.nearest("new", marks[2999])[0] > 0


def test_verdicts_are_the_same_again() -> None:
    specs = ["nan", "black", "blank", "near_duplicate:distance=40"]
    rounds = []
    for _ in range(2):
        gates = parse_gates(specs)
        rounds.append([gates.judge(Candidate(str(seed), scene(seed), 1)) for seed in range(60)])
    assert rounds[0] == rounds[1]
    assert fingerprint(scene(4)) == fingerprint(scene(4).copy())


class Mean:
    def __init__(self, scale: float = 1.0, label: str = "") -> None:
        self.scale = scale
        if label == "broken":
            raise OSError("no weights")

    def __call__(self, picture: np.ndarray, prompt: str) -> float:
        if prompt == "secret":
            raise RuntimeError("secret")
        return float("nan") if prompt == "odd" else float(picture.mean()) * self.scale


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mean", f"{__name__}:Mean", "saggar.scorers")
    object.__setattr__(entry, "load", lambda: Mean)
    known = EntryPoints([entry])
    monkeypatch.setattr(module, "entry_points", known.select)


@pytest.mark.usefixtures("scorer")
def test_an_installed_scorer_is_a_gate() -> None:
    assert gate_names() == ["black", "blank", "mean", "min_bytes", "nan", "near_duplicate"]
    verdict = judged("mean>=50", flat(60, 60, 60))
    assert (verdict.name, verdict.passed, verdict.value, verdict.threshold) == ("mean", True, 60.0, 50.0)
    assert not judged("mean>=60.5", flat(60, 60, 60)).passed
    assert judged("mean<=60.5", flat(60, 60, 60)).passed
    assert judged("mean:scale=0.5,label=x>=30", flat(60, 60, 60)).value == 30
    gates = parse_gates(["mean>=0"])
    assert not gates.judge(Candidate("k", flat(1, 1, 1), 1, "odd")).accepted, "NaN passes nothing"
    with pytest.raises(GateError, match="gate mean: RuntimeError for k") as raised:
        gates.judge(Candidate("k", flat(1, 1, 1), 1, "secret"))
    assert "secret" not in str(raised.value), "no prompt in an error"


@pytest.mark.usefixtures("scorer")
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("min_bytes:bytes=-1", "--gate min_bytes:bytes=-1: bytes is 0 or more: nothing is less"),
        ("fuzzy", "no gate 'fuzzy'; there are black, blank, mean, min_bytes, nan, near_duplicate"),
        ("mean", "a scorer needs its threshold: mean>=number"),
        ("mean>=high", "'high' is no number"),
        ("mean>=nan", "'nan' is no number"),
        ("mean:label=broken>=1", "OSError: no weights"),
        ("mean:colour=1>=1", "TypeError"),
        ("black:colour=3", "black has no option 'colour'"),
        ("black:level=dark", "level is a number, not 'dark'"),
        ("black<=3", "black is written black>=number"),
        ("black:level", "'level' is not option=value"),
        ("nan>=1", "nan takes no threshold"),
        ("near_duplicate>=5", "near_duplicate:distance=N"),
        ("near_duplicate:distance=256", "distance is 0 to 255"),
        ("", "write it as NAME"),
        ("a b", "write it as NAME"),
        ("os.system>=1", "no gate 'os.system'"),
    ],
)
def test_a_wrong_gate_is_one_clear_error(spec: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_gates(["black", spec])
    assert said in str(raised.value) and f"--gate {spec}" in str(raised.value)
    assert "\n" not in str(raised.value)
