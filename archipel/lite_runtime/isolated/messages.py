"""The messages between a runtime and its child process over a socket: msgpack structs and the raw bytes of arrays.

One message is the length of the header (4 bytes, little-endian), the header, and the bytes of the arrays that it lists,
one after the other. Both sides decode strictly and check sizes before they allocate. The parent does not trust the
child, which has run graphs of others.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from archipel.bundle.manifest import ITEM_BYTES
from archipel.bundle.roles import DType
from archipel.errors import RuntimeInputError, RuntimeProgramError
from archipel.lite_runtime.confinement import Confinement
from archipel.lite_runtime.training.options import FitOptions, RoundOptions

MAX_HEADER_BYTES = 16 << 20
_MAX_RANK = 16
_LENGTH = struct.Struct("<I")
_PARTS = 64


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


# --- from the parent ----------------------------------------------------------------------------------------------


class Open(_Message, frozen=True, kw_only=True):
    """The first message: what to load, and `allowance`, the bytes of private memory that the process may add from now.

    `cpu_seconds` limits each request, `niceness` is added to the parent's. The process may write to the folder
    `scratch` only.
    """

    folder: str
    keys: tuple[bytes, ...]
    threads: int
    memory_limit: int
    allowance: int
    delegates: Any
    cpu_seconds: float | None = None
    niceness: int = 0
    scratch: str = ""
    allow_development: bool = False


class Learn(_Message, frozen=True, kw_only=True):
    """Replace all that was learned by these arrays: `parameter/NAME`, `personal/NAME`, `state/NAME`."""


class Predict(_Message, frozen=True, kw_only=True):
    """Arrays: `x` or `x/NAME`."""


class Evaluate(_Message, frozen=True, kw_only=True):
    """Arrays: `x` or `x/NAME`, and `y`."""

    batch_size: int


class Analyze(_Message, frozen=True, kw_only=True):
    """Arrays: `x/NAME`."""

    program: str
    hyperparameters: dict[str, float]
    batch_size: int


class Fit(_Message, frozen=True, kw_only=True):
    """Arrays: `x` or `x/NAME`, `y`, `broadcast/NAME`; with `validation` also `vx` or `vx/NAME`, and `vy`; and
    `checkpoint`, the bytes of that file, if there is one.

    `report` asks for a Report after every step, `between` for a Between whenever training can pause.
    """

    options: FitOptions
    validation: bool
    report: bool
    between: bool


class LocalRound(_Message, frozen=True, kw_only=True):
    """Arrays: `x` or `x/NAME`, `y`, `broadcast/NAME`, and with `given` also `parameter/NAME`."""

    options: RoundOptions
    report: bool
    given: bool


class Proceed(_Message, frozen=True, kw_only=True):
    """The answer to Report and Between: go on, stop and keep the result, or abort and discard it."""

    stop: bool = False
    abort: bool = False


class WriteCheckpoint(_Message, frozen=True, kw_only=True):
    """Comes before the answer to Between when training is about to pause."""


class Kept(_Message, frozen=True, kw_only=True):
    """The answer to KeepCheckpoint: the error, or "" for success."""

    error: str = ""


# --- from the child -----------------------------------------------------------------------------------------------


class Done(_Message, frozen=True, kw_only=True):
    """The reply to Predict, with the outputs as arrays, to Evaluate, with `metrics`, and to Learn."""

    metrics: dict[str, float] = {}


class Opened(_Message, frozen=True, kw_only=True):
    """The reply to Open: how the process is confined from now on."""

    confinement: Confinement


class Analyzed(_Message, frozen=True, kw_only=True):
    """Arrays: `update/NAME`."""

    examples: Annotated[int, msgspec.Meta(ge=0)]


class Fitted(_Message, frozen=True, kw_only=True):
    """The reply to Fit. Arrays: `loss` and `metric/NAME` (float64, one element a step), and all that was learned."""

    validation: list[dict[str, float]]
    steps: Annotated[int, msgspec.Meta(ge=0)]
    examples: Annotated[int, msgspec.Meta(ge=0)]
    stopped: bool


class Rounded(_Message, frozen=True, kw_only=True):
    """The reply to LocalRound. Arrays: `update/NAME`, `loss`, `trained/NAME`, `personal/NAME`, `state/NAME`."""

    metrics: dict[str, float]
    steps: Annotated[int, msgspec.Meta(ge=0)]
    examples: Annotated[int, msgspec.Meta(ge=0)]


class Report(_Message, frozen=True, kw_only=True):
    """The process has made a training step."""

    phase: int
    epoch: int
    step: int
    loss: float | None


class Between(_Message, frozen=True, kw_only=True):
    """Training may pause here, or end."""


class KeepCheckpoint(_Message, frozen=True, kw_only=True):
    """Asks the parent to write or remove the fit's checkpoint file. Arrays: `checkpoint`, the bytes to write."""

    remove: bool = False


class Failed(_Message, frozen=True, kw_only=True):
    """An error; `kind` is the name of its class. Arrays, if `learned`: all that the fit has learned before it."""

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    text: Annotated[str, msgspec.Meta(max_length=8192)]
    learned: bool = False


Request = Open | Learn | Predict | Evaluate | Analyze | Fit | LocalRound | Proceed | WriteCheckpoint | Kept
Reply = Done | Opened | Analyzed | Fitted | Rounded | Report | Between | KeepCheckpoint | Failed
Arrays = Mapping[str, np.ndarray]


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    dtype: DType
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=_MAX_RANK)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    arrays: tuple[_Array, ...]
    body: Request | Reply


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)


class Channel:
    """One end of the socket. `allocate` makes the buffer for an incoming array of a number of bytes."""

    def __init__(self, connection: socket.socket, max_bytes: int, allocate: Callable[[int], Any] = bytearray) -> None:
        self.max_bytes = max_bytes
        self._socket = connection
        self._allocate = allocate
        # Whether the socket has a timeout now.
        self._timed = False

    def close(self) -> None:
        self._socket.close()

    def has_hung_up(self) -> bool:
        """Whether the other side has closed its end."""
        # POLLRDHUP comes even while replies wait unread, where recv() would return their bytes.
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, body: Request | Reply, arrays: Arrays = {}, seconds: float | None = None) -> None:  # noqa: B006
        """Send a message. Raises OSError if the peer is gone, TimeoutError if it does not read within `seconds`."""
        # C order, because the bytes of each array are sent as they lie in memory.
        solid = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        listed = tuple(_Array(name, array.dtype.name, array.shape) for name, array in solid.items())  # type: ignore[arg-type]
        header = _ENCODER.encode(_Header(listed, body))
        if len(header) > MAX_HEADER_BYTES:
            raise RuntimeInputError(
                f"isolated: a message of {len(header)} bytes beside its arrays; the limit is 16 MiB"
            )
        # Views, not copies: a batch of examples may be as large as the memory that is left.
        parts = [memoryview(_LENGTH.pack(len(header)) + header)]
        parts += [memoryview(array.reshape(-1).view(np.uint8).data) for array in solid.values() if array.nbytes]
        deadline = _deadline(seconds)
        while parts:
            self._set_timeout(deadline)
            # The kernel takes a limited number of parts (IOV_MAX), and may send only a piece of them.
            sent = self._socket.sendmsg(parts[:_PARTS])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def receive(self, seconds: float | None = None) -> tuple[Request | Reply, dict[str, np.ndarray]]:
        """The next message. Raises EOFError or OSError if the other side is gone, TimeoutError after `seconds`,
        RuntimeProgramError for bytes that are not a message, or that are larger than allowed.
        """
        deadline = _deadline(seconds)
        (length,) = _LENGTH.unpack(self._read(bytearray(_LENGTH.size), deadline))
        if length > MAX_HEADER_BYTES:
            raise RuntimeProgramError(f"isolated: a header of {length} bytes, the limit is {MAX_HEADER_BYTES}")
        try:
            header = _DECODER.decode(self._read(bytearray(length), deadline))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RuntimeProgramError(f"isolated: not a message ({error})") from None
        # The sum, before the first allocation: many arrays below the limit could exceed it together.
        total = sum(array.nbytes for array in header.arrays)
        if total > self.max_bytes:
            raise RuntimeProgramError(f"isolated: arrays of {total} bytes, the limit is {self.max_bytes}")
        arrays: dict[str, np.ndarray] = {}
        for spec in header.arrays:
            if spec.name in arrays:
                raise RuntimeProgramError(f"isolated: array {spec.name!r} is there twice")
            arrays[spec.name] = self._read_array(spec, deadline)
        return header.body, arrays

    def _read_array(self, spec: _Array, deadline: float | None) -> np.ndarray:
        buffer = self._read(self._allocate(spec.nbytes), deadline) if spec.nbytes else b""
        # NumPy's behaviour is undefined for such bytes.
        if spec.dtype == "bool" and spec.nbytes and np.frombuffer(buffer, np.uint8).max() > 1:
            raise RuntimeProgramError(f"isolated: array {spec.name!r} has truth values that are neither 0 nor 1")
        array = np.frombuffer(buffer, spec.dtype, math.prod(spec.shape)).reshape(spec.shape)
        # Learned tensors are replaced and never changed; the runtime compares them by identity.
        array.flags.writeable = False
        return array

    def _read(self, buffer: Any, deadline: float | None) -> Any:
        view = memoryview(buffer)
        while len(view):
            self._set_timeout(deadline)
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError("isolated: the other side has closed the connection")
            view = view[count:]
        return buffer

    # One deadline for a whole message, so that a peer cannot stretch it by sending a byte at a time. settimeout() is a
    # system call, hence the flag.
    def _set_timeout(self, deadline: float | None) -> None:
        if deadline is None:
            if self._timed:
                self._timed = False
                self._socket.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._timed = True
        self._socket.settimeout(left)


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds
