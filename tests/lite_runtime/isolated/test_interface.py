"""Both kinds of runtime do what ModelRuntime says, with the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_overloads

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Phase
from archipel.lite_runtime import IsolatedRuntime, ModelRuntime, Runtime, load
from archipel.lite_runtime.isolated.messages import Fit, Fitted, LocalRound, Reply, Request, Rounded
from archipel.lite_runtime.isolated.runtime import load_isolated
from archipel.lite_runtime.training.options import FitOptions, RoundOptions
from tests.support.text_bundles import Roles

MEMBERS = sorted(name for name in vars(ModelRuntime) if not name.startswith("_"))
METHODS = [name for name in MEMBERS if inspect.isfunction(getattr(ModelRuntime, name))]
# How the calls are carried out, which is no business of callers.
INSIDE = {"run_fit", "run_round"}

W = np.ones(3, np.float32)
SCALE = "predict (float[n, 3] x, float[3] w) => (float[n, 3] y) { y = Mul(x, w) }"
TRAIN = """train (float[n, 3] x, float[3] w, float lr) => (float[3] w_new, float loss) {
    v = Mul(w, lr) \n w_new = Add(w, v) \n loss = ReduceMean <keepdims = 0> (x)
}"""
FINISH = "finish (float[3] w, float[3] w0) => (float[3] delta) { delta = Sub(w, w0) }"
X = np.ones((2, 3), np.float32)

Isolated = Callable[..., tuple[IsolatedRuntime, list[Request]]]


@pytest.fixture
def folder(make_bundle: Callable[..., Path], r: type[Roles]) -> Path:
    w = r.parameter("w")
    programs = {
        "predict": ("predict", SCALE, {"x": r.example, "w": w, "y": r.output}),
        "train": (
            "train", TRAIN, {"x": r.example, "w": w, "lr": r.hyper(0.5), "w_new": w, "loss": r.metric()},
        ),
        "finish": ("finish", FINISH, {"w": w, "w0": r.start("w"), "delta": r.update("w")}),
    }  # fmt: skip
    return make_bundle(programs, {"w": W}, {}, [Phase(program="train", epochs=1, batch_size=2)])


@pytest.fixture
def isolated(folder: Path, key: Ed25519PrivateKey, stand_in: Callable[..., None]) -> Iterator[Isolated]:
    """(answers): a runtime whose child gives them, and the requests that it was sent."""
    made: list[IsolatedRuntime] = []

    def start(*answers: tuple[Reply, dict[str, np.ndarray]]) -> tuple[IsolatedRuntime, list[Request]]:
        stand_in(*answers)
        runtime = load_isolated(folder, [key.public_key().public_bytes_raw()], seconds=30.0)
        made.append(runtime)
        sent: list[Request] = []
        ask = runtime._requests.ask

        def spy(what: str, body: Any, *more: Any) -> Any:
            sent.append(body)
            return ask(what, body, *more)

        runtime._requests.ask = spy  # type: ignore[method-assign]
        return runtime, sent

    yield start
    for runtime in made:
        runtime.close()


@pytest.mark.parametrize("kind", [Runtime, IsolatedRuntime])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_there_with_the_same_signature(kind: type, name: str) -> None:
    declared, there = getattr(ModelRuntime, name), getattr(kind, name)
    assert inspect.signature(there) == inspect.signature(declared)
    assert [inspect.signature(one) for one in get_overloads(there)] == [
        inspect.signature(one) for one in get_overloads(declared)
    ]
    assert inspect.getdoc(there), f"{kind.__name__}.{name} has no docstring"


def test_what_both_have_is_in_the_interface(folder: Path, key: Ed25519PrivateKey, isolated: Isolated) -> None:
    here = load(folder, [key.public_key().public_bytes_raw()])
    there, _ = isolated()
    common = {name for name in {*dir(here)} & {*dir(there)} if not name.startswith("_")}
    assert sorted(common - INSIDE) == MEMBERS
    assert here.bundle.digest == there.bundle.digest
    assert here.state.state == there.state.state == {}


def test_a_childs_options_are_the_struct_that_its_parent_checked(isolated: Isolated, tmp_path: Path) -> None:
    loss = {"loss": np.ones(1), "metric/loss": np.ones(1)}
    update = {"loss": np.ones(1), "update/delta": W, "trained/w": W}
    runtime, sent = isolated(
        (Fitted(validation=[], steps=1, examples=2, stopped=False), loss),
        (Rounded(metrics={}, steps=1, examples=2), update),
    )
    runtime.fit(
        X, epochs=2, batch_size=np.int64(7), shuffle=False, seed=3, hyperparameters={"lr": np.float32(0.25)},
        program="train", moves=["w"], checkpoint=tmp_path / "c", checkpoint_every=5, feature_cache=False,
    )  # fmt: skip
    runtime.local_round(X, seed=9, hyperparameters={"lr": 1})
    options = FitOptions(
        epochs=2, batch_size=7, shuffle=False, seed=3, hyperparameters={"lr": 0.25}, program="train", moves=("w",),
        checkpoint=str(tmp_path / "c"), checkpoint_every=5.0, feature_cache=False,
    )  # fmt: skip
    # With a time limit the child tells of every step, so that it is known to be alive.
    assert sent[0] == Fit(options=options, validation=False, report=False, between=True)
    assert sent[1] == LocalRound(options=RoundOptions(seed=9, hyperparameters={"lr": 1.0}), report=True, given=False)
