"""Analytics in the child process: what Runtime.analyze gives, and that the child is not believed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Phase
from archipel.errors import ArchipelError, RuntimeLimitError, RuntimeProgramError
from archipel.lite_runtime import ModelRuntime, Runtime, load
from archipel.lite_runtime.isolated.messages import Analyze, Analyzed, Done, Reply, Request
from archipel.lite_runtime.isolated.runtime import IsolatedRuntime, load_isolated
from tests.support.text_bundles import Roles

W = np.array([1.0, -2.0, 0.5], np.float32)
# Moves w by one, so that there is something learned for the sums to follow.
TRAIN = """train (float[n, 3] x, float[3] w) => (float[3] w_new, float loss) {
    one = Constant <value_float = 1.0> () \n w_new = Add(w, one) \n loss = ReduceMean <keepdims = 0> (x)
}"""
LOOK = """look (float[n, 3] x, float[n] age, float[3] w, float factor) => (float total, float[3] old, float count) {
    q = MatMul(x, w) \n s = ReduceSum <keepdims = 0> (q) \n total = Mul(s, factor)
    forty = Constant <value_float = 40.0> () \n above = Greater(age, forty) \n yes = Cast <to = 1> (above)
    old = MatMul(yes, x) \n count = ReduceSum <keepdims = 0> (yes)
}"""
OTHER = "other (float[n] age) => (float total) { total = ReduceSum <keepdims = 0> (age) }"

rng = np.random.default_rng(11)
FIELDS = {"x": rng.standard_normal((700, 3)).astype(np.float32), "age": rng.uniform(10, 80, 700).astype(np.float32)}


@pytest.fixture
def trusted(key: Ed25519PrivateKey) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


@pytest.fixture
def folder(make_bundle: Callable[..., Path], r: type[Roles]) -> Path:
    w = r.parameter("w")
    sums = {"total": r.update("t", "value"), "old": r.update("o", "value"), "count": r.update("c", "value")}
    look = {"x": r.example, "age": r.label, "w": w, "factor": r.hyper(2.0), **sums}
    programs = {
        "train": ("train", TRAIN, {"x": r.example, "w": w, "w_new": w, "loss": r.metric()}),
        "look": ("analyze", LOOK, look),
        "other": ("analyze", OTHER, {"age": r.label, "total": r.update("a", "value")}),
    }
    return make_bundle(programs, {"w": W}, schedule=[Phase(program="train", epochs=1, batch_size=700)])


@pytest.fixture
def here(folder: Path, trusted: list[bytes]) -> Runtime:
    return load(folder, trusted)


@pytest.fixture
def there(folder: Path, trusted: list[bytes]) -> Iterator[IsolatedRuntime]:
    with load_isolated(folder, trusted) as runtime:
        yield runtime


@pytest.mark.sampled(every=3)
def test_the_same_sums_as_in_this_process(here: Runtime, there: IsolatedRuntime) -> None:
    x, age = FIELDS["x"].astype(np.float64), FIELDS["age"]
    sums, count = there.analyze(FIELDS, program="look")
    assert count == 700
    np.testing.assert_allclose(sums["total"], (x @ W).sum() * 2, rtol=1e-5)
    np.testing.assert_allclose(sums["old"], x[age > 40].sum(0), rtol=1e-4)
    assert sums["count"] == (age > 40).sum()
    assert {name: array.dtype for name, array in sums.items()} == dict.fromkeys(("total", "old", "count"), np.float32)
    for options in ({}, {"batch_size": 7}, {"hyperparameters": {"factor": 0.25}}):
        ours, theirs = (rt.analyze(FIELDS, program="look", **options) for rt in (here, there))
        assert ours[1] == theirs[1]
        assert ours[0].keys() == theirs[0].keys()
        for name in ours[0]:
            np.testing.assert_array_equal(ours[0][name], theirs[0][name])
    np.testing.assert_allclose(there.analyze({"age": age}, program="other")[0]["total"], age.sum(), rtol=1e-5)


@pytest.mark.sampled(every=3)
def test_sums_follow_what_was_learned(here: Runtime, there: IsolatedRuntime) -> None:
    before = there.analyze(FIELDS, program="look")[0]["total"]
    for runtime in (here, there):
        runtime.fit(FIELDS["x"], batch_size=700)
    np.testing.assert_array_equal(there.parameters()["w"], W + 1)
    after = there.analyze(FIELDS, program="look")[0]["total"]
    np.testing.assert_allclose(after - before, FIELDS["x"].sum(dtype=np.float64) * 2, rtol=1e-3)
    np.testing.assert_array_equal(after, here.analyze(FIELDS, program="look")[0]["total"])


@pytest.mark.sampled(every=3)
def test_only_the_fields_that_the_program_reads_go_to_the_child(
    there: IsolatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []
    ask = there._requests.ask

    def spy(
        what: str, body: Request, arrays: Mapping[str, np.ndarray], *more: Any
    ) -> tuple[Reply, dict[str, np.ndarray]]:
        sent.append(sorted(arrays))
        return ask(what, body, arrays, *more)

    monkeypatch.setattr(there._requests, "ask", spy)
    there.analyze({**FIELDS, "secret": np.zeros(700, np.float32)}, program="other")
    assert sent == [["x/age"]]


@pytest.mark.sampled(every=3)
def test_the_callers_mistakes_have_the_same_words(here: Runtime, there: IsolatedRuntime) -> None:
    calls: list[Callable[[ModelRuntime], object]] = [
        lambda rt: rt.analyze({"x": FIELDS["x"]}, program="look"),
        lambda rt: rt.analyze({**FIELDS, "age": FIELDS["age"][:3]}, program="look"),
        lambda rt: rt.analyze({**FIELDS, "x": FIELDS["x"].astype(np.float64)}, program="look"),
        lambda rt: rt.analyze({**FIELDS, "x": FIELDS["x"].tolist()}, program="look"),
        lambda rt: rt.analyze({name: array[:0] for name, array in FIELDS.items()}, program="look"),
        lambda rt: rt.analyze(FIELDS["x"], program="look"),
        lambda rt: rt.analyze(FIELDS, program="look", batch_size=0),
        lambda rt: rt.analyze(FIELDS, program="look", hyperparameters={"factor": 1e9}),
        lambda rt: rt.analyze(FIELDS, program="look", hyperparameters={"nothing": 1.0}),
        lambda rt: rt.analyze(FIELDS, program="nothing"),
        lambda rt: rt.analyze(FIELDS),  # there are two
    ]
    for call in calls:
        with pytest.raises(ArchipelError) as ours:
            call(here)
        with pytest.raises(type(ours.value)) as theirs:
            call(there)
        assert str(ours.value) == str(theirs.value)


@pytest.mark.sampled(every=4)
def test_a_child_that_dies_is_replaced(here: Runtime, there: IsolatedRuntime) -> None:
    there.analyze(FIELDS, program="other")
    assert there.pid is not None
    os.kill(there.pid, signal.SIGSEGV)
    with pytest.raises(RuntimeLimitError, match=r"analyze: .*SIGSEGV"):
        there.analyze(FIELDS, program="other")
    ours, theirs = (rt.analyze(FIELDS, program="other")[0]["total"] for rt in (here, there))
    np.testing.assert_array_equal(ours, theirs)


SUMS = {"update/total": np.float32(1.0), "update/old": np.zeros(3, np.float32), "update/count": np.float32(3.0)}


@pytest.mark.parametrize(
    ("reply", "arrays", "why"),
    [
        (Analyzed(examples=699), SUMS, "of 699 examples"),
        (Analyzed(examples=700), {**SUMS, "update/total": np.float64(1.0)}, "'update/total' is float64"),
        (Analyzed(examples=700), {**SUMS, "update/old": np.zeros(4, np.float32)}, r"'update/old' is float32\[4\]"),
        (Analyzed(examples=700), {"update/total": SUMS["update/total"]}, "it made"),
        (Analyzed(examples=700), {**SUMS, "update/more": np.float32(0)}, "it made"),
        (Analyzed(examples=700), {**SUMS, "personal/w": W}, "it made"),
        (Done(), SUMS, "it answers Done"),
        (Analyze(program="look", hyperparameters={}, batch_size=1), SUMS, "it answers Analyze"),
    ],
)
def test_wrong_answers(
    folder: Path,
    trusted: list[bytes],
    stand_in: Callable[..., None],
    reply: Reply | Request,
    arrays: dict[str, npt.ArrayLike],
    why: str,
) -> None:
    stand_in((reply, {name: np.asarray(array) for name, array in arrays.items()}))
    with load_isolated(folder, trusted) as runtime:
        with pytest.raises(RuntimeProgramError, match=f"analyze: the isolated process gave an invalid answer.*{why}"):
            runtime.analyze(FIELDS, program="look")
        assert runtime.pid is None  # ended


def test_the_stand_in_is_believed_where_it_keeps_to_the_rules(
    folder: Path, trusted: list[bytes], stand_in: Callable[..., None]
) -> None:
    stand_in((Analyzed(examples=700), {name: np.asarray(array) for name, array in SUMS.items()}))
    with load_isolated(folder, trusted) as runtime:
        sums, count = runtime.analyze(FIELDS, program="look")
    assert (count, sums["count"]) == (700, 3.0)
