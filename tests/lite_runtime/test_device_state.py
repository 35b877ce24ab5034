from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.bundle import write_weights
from archipel.errors import TensorLayoutError
from archipel.lite_runtime import DeviceState

STATE = DeviceState(personal={"head": np.arange(6, dtype=np.float32).reshape(2, 3)}, state={"c": np.array(7, np.int64)})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "state"
    assert DeviceState.load(path).personal == {}
    STATE.save(path)
    for back in (DeviceState.load(path), DeviceState.decode(STATE.encode())):
        np.testing.assert_array_equal(back.personal["head"], STATE.personal["head"])
        np.testing.assert_array_equal(back.state["c"], 7)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_a_copy_does_not_follow() -> None:
    copy = STATE.copy()
    copy.personal.clear()
    assert list(STATE.personal) == ["head"]


def test_saving_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    STATE.save(path)
    mapped = DeviceState.load(path)
    DeviceState().save(path)
    # The old file lives on for those who map it.
    assert mapped.personal["head"].sum() == 15
    assert DeviceState.load(path).personal == {}


def test_foreign_tensors_are_refused() -> None:
    with pytest.raises(TensorLayoutError, match="neither personal/"):
        DeviceState.decode(write_weights({"other": np.zeros(1, np.float32)}))


def test_size_is_limited() -> None:
    with pytest.raises(TensorLayoutError, match="limit"):
        DeviceState.decode(STATE.encode(), max_bytes=10)


@settings(max_examples=300)
@given(at=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 400))
@pytest.mark.sampled(every=4)
def test_damaged_bytes_give_a_state_or_the_documented_error(at: int, value: int, cut: int) -> None:
    data = bytearray(STATE.encode())
    data[at % len(data)] = value
    for damaged in (bytes(data), bytes(data[: cut % len(data)])):
        with contextlib.suppress(TensorLayoutError):
            DeviceState.decode(damaged)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "corpus").glob("state-*.safetensors")), ids=lambda p: p.stem
)
def test_kept_damaged_states(path: Path) -> None:
    for source in (path, path.read_bytes()):
        with pytest.raises(TensorLayoutError):
            DeviceState.decode(source)
