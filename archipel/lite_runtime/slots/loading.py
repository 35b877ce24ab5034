"""Runtimes of what lies in slots, and what has to lie there for given parameters."""

from __future__ import annotations

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
    from archipel.lite_runtime.delegates import Delegates
    from archipel.lite_runtime.interface import ModelRuntime

OwnState = Callable[[Bundle], DeviceState]
"""What the device keeps for itself of a bundle's model."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """How the models of slots are run; see `Slots`."""

    trusted_keys: Sequence[bytes]
    threads: int
    memory_limit: int | None
    delegates: Delegates
    isolated: bool
    seconds: float | None
    own: OwnState | None

    def learned(self, bundle: Bundle, parameters: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        """What a slot holds beside the bundle to run with `parameters` (None: its own).

        Raises RuntimeLimitError or RuntimeProgramError for a bundle that cannot run here, and as `differing`.
        """
        Runtime(bundle, memory_limit=self.memory_limit)
        return {} if parameters is None else differing(bundle, parameters)

    def open(self, slot: Path, digest: str) -> Bundle:
        """The slot's bundle, verified. Raises the BundleError that says what is wrong, SlotError for another one."""
        bundle = open_bundle(slot / BUNDLE_FOLDER, self.trusted_keys)
        if bundle.digest != digest:
            raise SlotError(f"{slot}: holds bundle {bundle.digest}, the state says {digest}; install it again")
        return bundle

    def make(self, slot: Path, bundle: Bundle) -> ModelRuntime:
        """A runtime of what lies in the slot."""
        runtime = self._bare(bundle)
        self._teach(runtime, read_learned(slot))
        return runtime

    def make_tested(self, slot: Path, bundle: Bundle) -> tuple[ModelRuntime, SelfTestReport]:
        """As `make`, and what the self-test found.

        The vectors belong to the published parameters, so they come first, and what the slot holds beside the bundle
        afterwards. Raises SelfTestError or what loading raises.
        """
        runtime = self._bare(bundle)
        # Sessions are made with the first request, and what may crash is making them.
        report = run_self_test(runtime)
        if self._teach(runtime, read_learned(slot)):
            answer_zeros(runtime)
        return runtime, report

    def renew(self, runtime: ModelRuntime) -> None:
        """Give a runtime what the device has kept for itself by now."""
        self._teach(runtime, {})

    def _bare(self, bundle: Bundle) -> ModelRuntime:
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

    def _teach(self, runtime: ModelRuntime, learned: Mapping[str, np.ndarray]) -> bool:
        """Whether there was anything to learn."""
        if self.own is not None:
            state = self.own(runtime.bundle)
            learned = {**learned, **join_names({"personal": state.personal, "state": state.state})}
        if learned:
            runtime.restore(learned)
        return bool(learned)


def differing(bundle: Bundle, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of the parameters that are not the bundle's own, as `Runtime.restore` takes them.

    Raises RuntimeInputError unless they are all of the bundle's, of its dtypes and shapes.
    """
    model = PresentModel(bundle, DeviceState())
    model.adopt(model.complete(parameters))
    return model.learned()
