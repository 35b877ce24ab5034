"""`load`: opens a bundle as a runtime, in this process or in a child process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from archipel.errors import RuntimeInputError
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.runtime import Runtime, open_runtime

if TYPE_CHECKING:
    from archipel.lite_runtime.engines.delegates import Delegates
    from archipel.lite_runtime.interface import ModelRuntime
    from archipel.lite_runtime.isolated.runtime import IsolatedRuntime


@overload
def load(
    path: Path | str,
    trusted_keys: Sequence[bytes],
    *,
    threads: int = ...,
    memory_limit: int | None = ...,
    delegates: Delegates = ...,
    cache: Path | str | None = ...,
    state: DeviceState | None = ...,
    allow_development: bool = ...,
    isolated: Literal[False] = ...,
) -> Runtime: ...
@overload
def load(
    path: Path | str,
    trusted_keys: Sequence[bytes],
    *,
    threads: int = ...,
    memory_limit: int | None = ...,
    delegates: Delegates = ...,
    cache: Path | str | None = ...,
    state: DeviceState | None = ...,
    allow_development: bool = ...,
    isolated: Literal[True],
    seconds: float | None = ...,
    cpu_seconds: float | None = ...,
    niceness: int = ...,
) -> IsolatedRuntime: ...
@overload
def load(
    path: Path | str,
    trusted_keys: Sequence[bytes],
    *,
    threads: int = ...,
    memory_limit: int | None = ...,
    delegates: Delegates = ...,
    cache: Path | str | None = ...,
    state: DeviceState | None = ...,
    allow_development: bool = ...,
    isolated: bool,
    seconds: float | None = ...,
    cpu_seconds: float | None = ...,
    niceness: int = ...,
) -> ModelRuntime: ...
def load(
    path: Path | str,
    trusted_keys: Sequence[bytes],
    *,
    threads: int = 1,
    memory_limit: int | None = None,
    delegates: Delegates = "auto",
    cache: Path | str | None = None,
    state: DeviceState | None = None,
    allow_development: bool = False,
    isolated: bool = False,
    seconds: float | None = None,
    cpu_seconds: float | None = None,
    niceness: int = 0,
) -> ModelRuntime:
    """Open a bundle whose manifest one of `trusted_keys` signed, or a model that `Runtime.save` wrote.

    Arguments:
        path: a bundle, a folder or a `.bundle` file, or the folder of a saved model.
        trusted_keys: publishers' public keys, 32 bytes each (`bundle.load_public_key`).
        threads: the number of threads that run one operator together.
        memory_limit: bytes; a bundle that says it needs more is refused.
        delegates: what runs the graphs (docs/device.md); "auto": what suits the machine, and the CPU.
        cache: the folder below which a `.bundle` file is unpacked; None: the user's cache folder.
        state: the device's own tensors for this model; None: none yet.
        allow_development: whether a development key may have signed it (`bundle.is_development_key`).
        isolated: run the graphs in a child process with enforced limits (Linux).
        seconds: most time for one prediction, evaluation, analysis or training step of that process.
        cpu_seconds: most CPU time of all its threads for one call, also of a whole fit or round.
        niceness: 0 to 19; a higher one gives other processes more CPU time.

    Returns a Runtime, or with `isolated` an IsolatedRuntime; both have the methods of ModelRuntime.

    Raises the BundleError that says what is wrong, RuntimeLimitError, RuntimeInputError, DelegateError, or
    RuntimeProgramError.

    Example:
        runtime = load("digits.bundle", [load_public_key("publisher.pub")], memory_limit=64 << 20)
    """
    if isolated:
        from archipel.lite_runtime.isolated.runtime import load_isolated

        return load_isolated(
            path, trusted_keys, threads=threads, memory_limit=memory_limit, delegates=delegates, cache=cache,
            state=state, allow_development=allow_development, seconds=seconds, cpu_seconds=cpu_seconds,
            niceness=niceness,
        )  # fmt: skip
    for name, given in (("seconds", seconds), ("cpu_seconds", cpu_seconds), ("niceness", niceness or None)):
        if given is not None:
            raise RuntimeInputError(f"{name}: has an effect only on a child process; pass isolated=True too")
    return open_runtime(
        path, trusted_keys, threads=threads, memory_limit=memory_limit, delegates=delegates, cache=cache, state=state,
        allow_development=allow_development,
    )  # fmt: skip
