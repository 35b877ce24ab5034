"""`load`: a bundle to a runtime, in this process or in a child process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from archipel.errors import RuntimeInputError
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.runtime import Runtime, open_runtime

if TYPE_CHECKING:
    from archipel.lite_runtime.delegates import Delegates
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
    isolated: Literal[True],
    seconds: float | None = ...,
    cpu_seconds: float | None = ...,
    niceness: int = ...,
) -> IsolatedRuntime: ...
def load(
    path: Path | str,
    trusted_keys: Sequence[bytes],
    *,
    threads: int = 1,
    memory_limit: int | None = None,
    delegates: Delegates = "auto",
    cache: Path | str | None = None,
    state: DeviceState | None = None,
    isolated: bool = False,
    seconds: float | None = None,
    cpu_seconds: float | None = None,
    niceness: int = 0,
) -> Runtime | IsolatedRuntime:
    """Open a bundle (folder or file) whose manifest one of `trusted_keys` signed, or what `Runtime.save` wrote of one.

    `threads` run one operator together; `memory_limit` is in bytes, and a bundle that says it needs more is refused;
    `delegates` says what runs the graphs (docs/device.md); a file is unpacked below `cache`. `isolated` runs the graphs
    in a child process that cannot take more memory than allowed, nor more than `seconds` or `cpu_seconds` for one call,
    and is as nice as `niceness` says (docs/device.md). Raises the BundleError that says what is wrong,
    RuntimeLimitError, DelegateError, or RuntimeProgramError.
    """
    if isolated:
        from archipel.lite_runtime.isolated.runtime import load_isolated

        return load_isolated(
            path, trusted_keys, threads=threads, memory_limit=memory_limit, delegates=delegates, cache=cache,
            state=state, seconds=seconds, cpu_seconds=cpu_seconds, niceness=niceness,
        )  # fmt: skip
    for name, given in (("seconds", seconds), ("cpu_seconds", cpu_seconds), ("niceness", niceness or None)):
        if given is not None:
            raise RuntimeInputError(f"{name}: only a child process can be held to it; pass isolated=True too")
    return open_runtime(
        path, trusted_keys, threads=threads, memory_limit=memory_limit, delegates=delegates, cache=cache, state=state
    )
