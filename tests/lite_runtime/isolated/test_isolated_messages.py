"""What the two sides say to each other, and that neither believes what it cannot check."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import RuntimeInputError, RuntimeLimitError, RuntimeProgramError
from archipel.lite_runtime.isolated.messages import (
    MAX_HEADER_BYTES,
    Between,
    Channel,
    Done,
    Failed,
    Fitted,
    Open,
    Predict,
    Proceed,
    Reply,
    Report,
    Request,
    Rounded,
)
from archipel.lite_runtime.isolated.runtime import IsolatedRuntime, load_isolated
from tests.support.text_bundles import Roles

FLOATS = np.array([[1.5, np.nan], [-np.inf, 0.0]], np.float32)
ARRAYS = {
    "x/a": FLOATS,
    "scalar": np.array(7, np.int64),
    "none": np.empty((0, 3), np.uint8),
    "yes": np.array([True, False]),
    "half": np.arange(6, dtype=np.float16)[::2],
    "large": np.arange(100_000, dtype=np.float64),
}


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = socket.socketpair()
    with first, second:
        yield Channel(first, 1 << 20), Channel(second, 1 << 20)


Answer = tuple[Reply, dict[str, np.ndarray]]


def header(body: object = None, arrays: Sequence[object] = ()) -> bytes:
    """A message by hand, from the documentation of the format."""
    data = msgspec.msgpack.encode([list(arrays), {"type": "Done"} if body is None else body])
    return struct.pack("<I", len(data)) + data


def test_messages_and_arrays_arrive_as_they_were_sent(ends: tuple[Channel, Channel]) -> None:
    fitted = Fitted(validation=[{"error": float("nan"), "rate": 0.1}], steps=3, examples=9, stopped=False)
    bodies: list[Request | Reply] = [Predict(), Proceed(stop=True), Report(phase=1, epoch=2, step=3, loss=None), fitted]
    sender = threading.Thread(target=lambda: [ends[0].send(body, ARRAYS, 10.0) for body in bodies])
    sender.start()
    for body in bodies:
        found, arrays = ends[1].receive(10.0)
        assert repr(found) == repr(body)  # NaN is not equal to itself
        assert list(arrays) == list(ARRAYS)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, ARRAYS[name])
            assert array.dtype == ARRAYS[name].dtype
            assert not array.flags.writeable
    sender.join()


def test_the_format_on_the_wire(ends: tuple[Channel, Channel]) -> None:
    ends[0]._socket.sendall(header(arrays=[["y", "float32", [1, 2]]]) + struct.pack("<2f", 1.0, 2.0))
    body, arrays = ends[1].receive(5.0)
    assert body == Done()
    np.testing.assert_array_equal(arrays["y"], [[1.0, 2.0]])


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (struct.pack("<I", MAX_HEADER_BYTES + 1), "a header of 16777217 bytes"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "not a message"),
        (header({"type": "Done", "more": 1}), "not a message"),
        (header({"type": "Exec", "code": "1"}), "not a message"),
        (header({"type": "LocalRound", "options": {"seed": -1}, "report": True, "given": False}), "not a message"),
        (header({"type": "LocalRound", "options": {"seed": 1, "x": 1}, "report": True, "given": False}), "not a mess"),
        (header({"type": "Fitted", "validation": [], "steps": -1, "examples": 0, "stopped": False}), "not a message"),
        (header(arrays=[["y", "object", [1]]]), "not a message"),
        (header(arrays=[["y", "float32", [-1]]]), "not a message"),
        (header(arrays=[["y", "float32", [1] * 17]]), "not a message"),
        (header(arrays=[["", "float32", [1]]]), "not a message"),
        (header(arrays=[["y", "float32", [1], 5]]), "not a message"),
        (header(arrays=[["y", "float32", [1 << 40, 1 << 40]]]), "the limit is 1048576"),
        (header(arrays=[["y", "float64", [1 << 16]], ["z", "float64", [1 << 17]]]), "the limit is 1048576"),
        (header(arrays=[["y", "int8", [1]], ["y", "int8", [1]]]) + b"\1\1", "'y' is there twice"),
        (header(arrays=[["y", "bool", [2]]]) + b"\1\2", "neither 0 nor 1"),
        (header(arrays=[["y", "float32", [b"\xff"]]]), "not a message"),
        (struct.pack("<I", 90_000) + b"\x91" * 90_000, "not a message"),
    ],
)
def test_what_is_not_a_message_is_refused(ends: tuple[Channel, Channel], data: bytes, error: str) -> None:
    ends[0]._socket.sendall(data)
    with pytest.raises(RuntimeProgramError, match=error):
        ends[1].receive(5.0)


@pytest.mark.parametrize(
    "data", [b"", b"\1", struct.pack("<I", 10) + b"abc", header(arrays=[["y", "int8", [9]]]) + b"x"]
)
def test_a_message_that_is_cut_off(ends: tuple[Channel, Channel], data: bytes) -> None:
    ends[0]._socket.sendall(data)
    ends[0].close()
    assert ends[1].has_hung_up()
    with pytest.raises(EOFError):
        ends[1].receive(5.0)


@pytest.mark.sampled(every=3)
def test_the_time_counts_for_the_whole_message(ends: tuple[Channel, Channel]) -> None:
    assert not ends[1].has_hung_up()
    stop = threading.Event()

    def drip() -> None:
        for byte in header({"type": "Done", "metrics": {"m" * 200: 1.0}}):
            ends[0]._socket.send(bytes([byte]))
            if stop.wait(0.02):
                return

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        ends[1].receive(0.3)
    assert time.monotonic() - start < 3
    stop.set()
    thread.join()
    with pytest.raises(TimeoutError):  # and for sending to one that does not read
        ends[0].send(Predict(), {"x": np.zeros(1 << 24, np.uint8)}, 0.2)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.booleans())
@pytest.mark.sampled(every=4)
def test_any_bytes_are_a_message_or_an_error(data: bytes, framed: bool) -> None:
    first, second = socket.socketpair()
    with first, second:
        first.sendall(struct.pack("<I", len(data)) + data if framed else data)
        first.close()
        try:
            Channel(second, 1 << 16).receive(5.0)
        except (RuntimeProgramError, EOFError):
            return


# --- a child that has been taken over -----------------------------------------------------------------------------

W = np.ones(3, np.float32)
SCALE = "predict (float[n, 3] x, float[3] w) => (float[n, 3] y) { y = Mul(x, w) }"
TRAIN = """train (float[n, 3] x, float[3] w) => (float[3] w_new, float loss) {
    w_new = Add(w, w) \n loss = ReduceMean <keepdims = 0> (x)
}"""
X = np.ones((2, 3), np.float32)


@pytest.fixture
def taken_over(
    make_bundle: Callable[..., Path], r: type[Roles], key: Ed25519PrivateKey, stand_in: Callable[..., None]
) -> Iterator[Callable[..., IsolatedRuntime]]:
    w = r.parameter("w")
    folder = make_bundle(
        {
            "predict": ("predict", SCALE, {"x": r.example, "w": w, "y": r.output}),
            "train": ("train", TRAIN, {"x": r.example, "w": w, "w_new": w, "loss": r.metric()}),
        },
        {"w": W},
    )
    made: list[IsolatedRuntime] = []

    def start(*script: tuple[Reply, dict[str, np.ndarray]]) -> IsolatedRuntime:
        stand_in(*script)
        made.append(load_isolated(folder, [key.public_key().public_bytes_raw()]))
        return made[-1]

    yield start
    for runtime in made:
        runtime.close()


def history(steps: int = 1, validation: Sequence[dict[str, float]] = (), **arrays: np.ndarray) -> Answer:
    body = Fitted(validation=list(validation), steps=steps, examples=2, stopped=False)
    return body, {"loss": np.ones(1), "metric/loss": np.ones(1), **arrays}


def test_the_stand_in_is_believed_where_it_keeps_to_the_rules(taken_over: Callable[..., IsolatedRuntime]) -> None:
    runtime = taken_over((Done(), {"y": X * 5}), history(**{"parameter/w": W * 2}))
    np.testing.assert_array_equal(runtime.predict(X), X * 5)
    assert runtime.fit(X).losses == [1.0]
    np.testing.assert_array_equal(runtime.parameters()["w"], W * 2)


@pytest.mark.parametrize(
    ("reply", "arrays"),
    [
        (Done(), {}),
        (Done(), {"z": X}),
        (Done(), {"y": X, "z": X}),
        (Fitted(validation=[], steps=1, examples=1, stopped=False), {"y": X}),
        (Rounded(metrics={}, steps=1, examples=1), {"y": X}),
        (Predict(), {"y": X}),
        (Open(folder="/", keys=(), threads=1, memory_limit=1, allowance=1, delegates=None), {}),
    ],
)
def test_wrong_answers_to_predict(
    taken_over: Callable[..., IsolatedRuntime], reply: Reply | Request, arrays: dict[str, np.ndarray]
) -> None:
    runtime = taken_over((reply, arrays))
    with pytest.raises(RuntimeProgramError, match="predict: the isolated process gave an invalid answer and was ended"):
        runtime.predict(X)
    assert runtime._requests._child is None  # ended


def test_an_answer_of_another_shape_than_the_manifest_says(taken_over: Callable[..., IsolatedRuntime]) -> None:
    for array in (X[:, :2].copy(), X.astype(np.float64), np.float32(1)):
        with pytest.raises(RuntimeProgramError, match="graph's answer is not as the manifest declares"):
            taken_over((Done(), {"y": np.asarray(array)})).predict(X)


@pytest.mark.parametrize(
    "reply",
    [
        history(steps=4),
        history(**{"parameter/w": np.ones(4, np.float32)}),
        history(**{"parameter/w": np.ones(3, np.float64)}),
        history(**{"parameter/v": W}),
        history(**{"personal/w": W}),
        history(nonsense=W),
        history(**{"metric/secret": np.ones(1)}),
        history(loss=np.ones(1, np.float32)),
        history(validation=[{"secret": 1.0}]),
        (Done(), {}),
    ],
)
def test_wrong_answers_to_fit_teach_nothing(taken_over: Callable[..., IsolatedRuntime], reply: Answer) -> None:
    runtime = taken_over(reply)
    with pytest.raises(RuntimeProgramError, match="fit: the isolated process gave an invalid answer and was ended"):
        runtime.fit(X)
    assert runtime._requests._child is None
    np.testing.assert_array_equal(runtime.parameters()["w"], W)
    assert runtime.state.personal == {}


def test_more_bytes_than_the_model_could_have(taken_over: Callable[..., IsolatedRuntime]) -> None:
    runtime = taken_over((Done(), {"y": np.zeros((30 << 20) // 12 * 3, np.float32).reshape(-1, 3)}))
    assert runtime.allowance < 30 << 20
    with pytest.raises(RuntimeProgramError, match="isolated: arrays of"):
        runtime.predict(X)
    assert runtime._requests._child is None


@pytest.mark.parametrize("kind", ["SystemExit", "ApiError", "annotations", "_MessageError", "Exception", ""])
def test_only_errors_that_can_be_raised_are_raised(taken_over: Callable[..., IsolatedRuntime], kind: str) -> None:
    runtime = taken_over((Failed(kind=kind, text="bad\x1b[31m\n news"), {}))
    with pytest.raises(RuntimeProgramError, match=r"predict: the isolated process failed: bad \[31m  news"):
        runtime.predict(X)


def test_errors_by_their_name(taken_over: Callable[..., IsolatedRuntime]) -> None:
    runtime = taken_over(
        (Failed(kind="RuntimeInputError", text="no"), {}), (Failed(kind="RuntimeLimitError", text="m"), {})
    )
    with pytest.raises(RuntimeInputError, match=r"^no$"):
        runtime.predict(X)
    with pytest.raises(RuntimeLimitError, match="needs more memory"):
        runtime.predict(X)


def test_a_fit_without_end_can_be_left(taken_over: Callable[..., IsolatedRuntime]) -> None:
    report = (Report(phase=0, epoch=0, step=0, loss=1.0), {})
    runtime = taken_over(*[report] * 5, (Between(), {}), history())
    steps: list[int] = []
    runtime.fit(X, callbacks=[lambda p: steps.append(p.step)])
    assert steps == [0] * 5
