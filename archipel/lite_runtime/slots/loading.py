"""Makes runtimes of the models in slots, and the tensors that a slot needs to run with given parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle import Bundle, open_bundle
from archipel.errors import SlotError
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.learned import BUNDLE_FOLDER, join_names, read_learned
from archipel.lite_runtime.present_model import PresentModel
from archipel.lite_runtime.runtime import Runtime
from archipel.lite_runtime.self_test import SelfTestReport, answer_zeros, run_self_test

if TYPE_CHECKING:
    from archipel.lite_runtime.engines.delegates import Delegates
    from archipel.lite_runtime.interface import ModelRuntime
    from archipel.lite_runtime.slots.folder import SlotName

OwnState = Callable[[Bundle], DeviceState]
"""Returns the personal tensors and state that the device keeps elsewhere for a bundle's model."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """How to run the models of slots; the fields are arguments of `Slots`."""

    trusted_keys: Sequence[bytes]
    threads: int
    memory_limit: int | None
    delegates: Delegates
    isolated: bool
    seconds: float | None
    own: OwnState | None
    allow_development: bool = False

    def learned(self, bundle: Bundle, parameters: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        """The tensors for a slot's learned file, so that the bundle runs with `parameters` (None: its own).

        Raises RuntimeLimitError or RuntimeProgramError for a bundle that cannot run here, RuntimeInputError as
        `changed_parameters` does.
        """
        # Refuses a bundle whose memory or noise this device does not support. No session is made yet.
        Runtime(bundle, memory_limit=self.memory_limit)
        return {} if parameters is None else changed_parameters(bundle, parameters)

    def open(self, slot: Path, digest: str) -> Bundle:
        """Open and verify the slot's bundle. Raises a BundleError, or SlotError if its digest is not `digest`."""
        bundle = open_bundle(slot / BUNDLE_FOLDER, self.trusted_keys, allow_development=self.allow_development)
        # The signature alone would also admit an older bundle that somebody put here.
        if bundle.digest != digest:
            raise SlotError(f"{slot}: holds bundle {bundle.digest}, the state says {digest}; install it again")
        return bundle

    def make(self, slot: Path, bundle: Bundle) -> ModelRuntime:
        """A runtime of the slot's bundle with the slot's learned tensors."""
        runtime = self._make_bare(bundle)
        self._restore_learned(runtime, read_learned(slot))
        return runtime

    def make_tested(self, slot: Path, bundle: Bundle) -> tuple[ModelRuntime, SelfTestReport]:
        """As `make`, after a self-test, whose report is returned too.

        The test vectors belong to the published parameters, so the self-test runs before the learned tensors are
        restored. Raises SelfTestError or what loading raises.
        """
        runtime = self._make_bare(bundle)
        # The self-test makes the first request, which makes the sessions: there a bad graph crashes.
        report = run_self_test(runtime)
        # The vectors say nothing about learned tensors; this request shows that they give finite answers.
        if self._restore_learned(runtime, read_learned(slot)):
            answer_zeros(runtime)
        return runtime, report

    def renew(self, runtime: ModelRuntime) -> None:
        """Restore the personal tensors and state that `own` returns now."""
        self._restore_learned(runtime, {})

    def _make_bare(self, bundle: Bundle) -> ModelRuntime:
        limit, delegates = self.memory_limit, self.delegates
        if not self.isolated:
            return Runtime(bundle, threads=self.threads, memory_limit=limit, delegates=delegates)
        from archipel.lite_runtime.isolated.runtime import IsolatedRuntime

        return IsolatedRuntime(
            bundle,
            self.trusted_keys,
            threads=self.threads,
            memory_limit=limit,
            delegates=delegates,
            seconds=self.seconds,
        )

    def _restore_learned(self, runtime: ModelRuntime, learned: Mapping[str, np.ndarray]) -> bool:
        """Restore the slot's tensors, then those of `own`, which win. Returns whether there were any."""
        if self.own is not None:
            state = self.own(runtime.bundle)
            learned = {**learned, **join_names({"personal": state.personal, "state": state.state})}
        if learned:
            runtime.restore(learned)
        return bool(learned)


def changed_parameters(bundle: Bundle, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters that differ from the bundle's own, in the form that `Runtime.restore` takes.

    Raises RuntimeInputError unless `parameters` are all of the bundle's, of its dtypes and shapes.
    """
    model = PresentModel(bundle, DeviceState())
    model.adopt(model.check_complete(parameters))
    return model.learned()


class Serving:
    """A loaded slot. Requests read `trying` and call `count` without the lock that changes of slots take."""

    def __init__(self, name: SlotName, runtime: ModelRuntime, tested: SelfTestReport | None = None) -> None:
        self.name = name
        self.runtime = runtime
        self.tested = tested
        self.trying = tested is not None
        self._served = 0
        self._counting = threading.Lock()

    def count(self) -> int:
        with self._counting:
            self._served += 1
            return self._served
