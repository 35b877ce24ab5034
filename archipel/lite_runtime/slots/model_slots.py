"""Two model slots, as phones have for system updates: a new model is tried, and the old one stays to return to.

    install    a bundle is verified and copied to the slot that is not in use: "staged"
    switch     it is loaded beside the running model, tested with its own vectors, and becomes active: "trying"
    confirm    asked for, or after enough requests without an error: "good", and the next install may take the old slot
    rollback   asked for, or by itself when the model fails: "bad", and the last good one is active again

Each load of a model on trial is counted on disk before it happens, so that one that takes the process down with it is
given up after a few starts. A new bundle starts from its own published parameters, or those that it is installed with;
what was learned on top of the old one stays in the old slot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from archipel.bundle import Bundle
from archipel.errors import ArchipelError, RuntimeInputError, RuntimeLimitError, RuntimeProgramError, SlotError
from archipel.lite_runtime.self_test import SelfTestReport
from archipel.lite_runtime.slots.folder import MAX_ATTEMPTS, SlotFolder, SlotName, SlotState, bad, other
from archipel.lite_runtime.slots.loading import Loader, OwnState

if TYPE_CHECKING:
    from archipel.lite_runtime.delegates import Delegates
    from archipel.lite_runtime.interface import ModelRuntime

_FAILURES = (RuntimeProgramError, RuntimeLimitError)


class _Serving:
    """A loaded slot. `trying` is read and `served` counted without the lock of changes."""

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


class Slots:
    """Answers requests with the active slot's model. `predict` and `runtime` may be used from any thread at any time.

    A request keeps the model that it began with: during a switch none waits, is lost, or gets a mixture.
    """

    def __init__(
        self,
        folder: Path | str,
        trusted_keys: Sequence[bytes],
        *,
        threads: int = 1,
        memory_limit: int | None = None,
        delegates: Delegates = "auto",
        isolated: bool = False,
        seconds: float | None = None,
        attempts: int = 3,
        confirm_after: int | None = 100,
        load: bool = True,
        own: OwnState | None = None,
    ) -> None:
        """Own `folder` and load its active slot, or the last good one if that fails.

        A model on trial is given up when it was loaded `attempts` times without being confirmed; `confirm_after`
        requests without an error confirm it (None: only `confirm` does). `isolated` runs the models in child
        processes, one request of `seconds` at most (see `isolated.load_isolated`): then a model that crashes takes
        nothing down. `load=False` leaves loading to the first request. `own` gives the personal tensors and state that
        the device keeps elsewhere, for the bundle of a slot that is loaded. Raises SlotError.
        """
        if not 1 <= attempts <= MAX_ATTEMPTS or (confirm_after is not None and confirm_after < 1):
            raise SlotError(
                f"attempts must be from 1 to {MAX_ATTEMPTS} and confirm_after at least 1, got {attempts} and "
                f"{confirm_after}"
            )
        self._keys = list(trusted_keys)
        self._loader = Loader(
            trusted_keys=self._keys,
            threads=threads,
            memory_limit=memory_limit,
            delegates=delegates,
            isolated=isolated,
            seconds=seconds,
            own=own,
        )
        self._attempts = attempts
        self._confirm_after = confirm_after
        self._changing = threading.RLock()
        self._serving: _Serving | None = None
        self._last_good: _Serving | None = None
        self._folder = SlotFolder(folder)
        if load and self._folder.state.active:
            try:
                self._start()
            except BaseException:
                self._folder.close()
                raise

    # --- use ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SlotState:
        """What the state file says now."""
        return self._folder.state

    @property
    def runtime(self) -> ModelRuntime:
        """The active slot's runtime. Raises SlotError if no slot is active or none can be loaded."""
        return self._active().runtime

    def predict(self, x: Any) -> Any:
        """As `Runtime.predict`, by the active slot's model.

        A model on trial that fails on the request, or answers with numbers that are not finite, is given up if the
        last good one does better, and the request gets that one's answer. Batches from an iterator are answered one
        by one, each by the model that is active then.
        """
        if isinstance(x, Iterator):
            return map(self.predict, x)
        serving = self._serving or self._active()
        if not serving.trying:
            return serving.runtime.predict(x)
        try:
            answer = serving.runtime.predict(x)
        except _FAILURES as error:
            return self._instead(serving, x, error, None)
        if not _finite(answer):
            return self._instead(serving, x, None, answer)
        if self._confirm_after is not None and serving.count() >= self._confirm_after:
            self._confirm_now(serving)
        return answer

    def save(self) -> None:
        """Store what the active runtime has learned in its slot, durably. Raises SlotError where `own` is given."""
        if self._loader.own is not None:
            raise SlotError(f"{self._folder.folder}: what the device learns is kept elsewhere, not in these slots")
        with self._changing:
            serving = self._active()
            serving.runtime.save(self._folder.path(serving.name))

    def renew(self) -> None:
        """Give the running model what `own` says now."""
        with self._changing:
            for serving in (self._serving, self._last_good):
                if serving is not None:
                    self._loader.renew(serving.runtime)

    # --- changes --------------------------------------------------------------------------------------------------

    def install(
        self,
        bundle: Path | str,
        parameters: Mapping[str, np.ndarray] | None = None,
        *,
        version: int = 0,
        weights: str = "",
    ) -> SlotName:
        """Verify a bundle (folder or file) and copy it to the slot that is not in use; the slot's name.

        With `parameters` (all of them) it runs with these and not with its own. `version` is a number that the slot is
        known by, `weights` the digest of where the parameters came from. Raises the BundleError that says what is
        wrong, RuntimeLimitError for one that needs more memory than allowed, RuntimeInputError for parameters that are
        not this bundle's, SlotError while a model is on trial that could still return to the other slot.
        """
        with self._changing:

            def learned(opened: Bundle) -> Mapping[str, np.ndarray]:
                return self._loader.learned(opened, parameters)

            return self._folder.install(bundle, self._keys, self._attempts, learned, version=version, weights=weights)

    def switch(self) -> SelfTestReport:
        """Load the staged slot beside the running one, test it, and make it active; what the self-test found.

        Raises SlotError if nothing is staged, SelfTestError or what loading raises: then that slot is bad and the
        running model goes on.
        """
        with self._changing:
            name = self._staged()
            before = self.state.active
            try:
                serving = self._load(name, trying=True)
            except ArchipelError as error:
                self._folder.update(name, bad(self.state.slot(name), str(error)))
                raise
            rest = None
            if before and self.state.slot(before).status == "trying":
                rest = bad(self.state.slot(before), f"slot {name} replaced it before it was confirmed")
            tried = msgspec.structs.replace(self.state.slot(name), status="trying", attempts=self._attempts)
            self._folder.update(name, tried, active=name, rest=rest)
            self._last_good = self._serving if rest is None else None
            self._serving = serving
            assert serving.tested is not None
            return serving.tested

    def confirm(self) -> None:
        """End the trial of the active slot: it is good. Raises SlotError if no slot is active."""
        with self._changing:
            name = self._need_active()
            slot = self.state.slot(name)
            if slot.status == "trying":
                self._folder.update(name, msgspec.structs.replace(slot, status="good", attempts=0))
            if self._serving is not None:
                self._serving.trying = False
            self._last_good = None

    def rollback(self, reason: str = "rolled back") -> SlotName:
        """Go back to the last good slot, whose name is returned; the active one is bad for `reason`.

        Raises SlotError if there is no good slot, or it cannot be loaded: then nothing changes.
        """
        with self._changing:
            name = self._need_active()
            slot = self.state.slot(other(name))
            if slot.status != "good":
                raise SlotError(
                    f"{self._folder.folder}: nothing to return to: slot {other(name)} is {slot.status!r}"
                    f"{f' ({slot.reason})' if slot.reason else ''}"
                )
            try:
                serving = self._last_good or self._load(other(name), trying=False)
            except ArchipelError as error:
                raise SlotError(
                    f"{self._folder.folder}: slot {other(name)} cannot be loaded, so {name} stays: {error}"
                ) from None
            self._return_to(serving, reason)
            return serving.name

    def close(self) -> None:
        """Give the folder back. A start of a model on trial that ends like this does not count against it."""
        with self._changing:
            serving, self._serving, self._last_good = self._serving, None, None
            if serving is not None and serving.trying:
                slot = self.state.slot(serving.name)
                attempts = min(slot.attempts + 1, self._attempts)
                if attempts != slot.attempts:
                    self._folder.update(serving.name, msgspec.structs.replace(slot, attempts=attempts))
            self._folder.close()

    def __enter__(self) -> Slots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _active(self) -> _Serving:
        with self._changing:
            if self._serving is None:
                self._need_active()
                self._start()
            assert self._serving is not None
            return self._serving

    def _need_active(self) -> SlotName:
        self._folder.check_open()
        if not self.state.active:
            raise SlotError(f"{self._folder.folder}: no slot is active; install a bundle, then switch")
        return self.state.active

    def _staged(self) -> SlotName:
        names: tuple[SlotName, ...] = ("a", "b")
        for name in names:
            slot = self.state.slot(name)
            if slot.status == "staged":
                if slot.attempts == 0:
                    reason = "it never came to an end of being loaded"
                    self._folder.update(name, bad(slot, reason))
                    raise SlotError(f"{self._folder.folder}: slot {name} is given up: {reason}; install another bundle")
                return name
        raise SlotError(f"{self._folder.folder}: no slot is staged; install a bundle first")

    def _start(self) -> None:
        """Load the active slot, or else the last good one. Raises SlotError that says why neither will do."""
        active = self._need_active()
        trying = self.state.slot(active).status == "trying"
        reasons: list[str] = []
        if trying and self.state.slot(active).attempts == 0:
            reasons.append(f"slot {active}: it was started several times and never confirmed")
        else:
            try:
                self._serving = self._load(active, trying)
                return
            except ArchipelError as error:
                reasons.append(f"slot {active}: {error}")
        rest = self.state.slot(other(active))
        if rest.status == "good":
            try:
                self._return_to(self._load(other(active), trying=False), reasons[0])
                return
            except ArchipelError as error:
                reasons.append(f"slot {other(active)}: {error}")
        else:
            reasons.append(f"slot {other(active)}: {rest.status}{f' ({rest.reason})' if rest.reason else ''}")
        raise SlotError(
            f"{self._folder.folder}: no usable model; {'; '.join(reasons)}. Install a bundle and switch to it"
        )

    def _load(self, name: SlotName, trying: bool) -> _Serving:
        """A slot's model, tested if it is on trial: counted after the bundle was verified and before anything is made
        of it."""
        slot, path = self.state.slot(name), self._folder.path(name)
        bundle = self._loader.open(path, slot.digest)
        if not trying:
            return _Serving(name, self._loader.make(path, bundle))
        self._folder.update(name, msgspec.structs.replace(slot, attempts=slot.attempts - 1))
        return _Serving(name, *self._loader.make_tested(path, bundle))

    def _return_to(self, serving: _Serving, reason: str) -> None:
        failed = other(serving.name)
        self._folder.update(failed, bad(self.state.slot(failed), reason), active=serving.name)
        self._serving = serving
        self._last_good = None

    def _instead(self, serving: _Serving, x: Any, error: ArchipelError | None, answer: Any) -> Any:
        """The answer to a request on which a model on trial failed (`error`), or whose `answer` is not finite."""
        with self._changing:
            if self._serving is serving:
                good = self._find_last_good()
                if good is None:
                    return _give(answer, error)
                try:
                    better = good.runtime.predict(x)
                except RuntimeInputError:
                    # The old model does not take what the new one takes.
                    better = None
                except _FAILURES:
                    return _give(answer, error)
                if better is not None and not _finite(better):
                    return _give(answer, error)
                reason = str(error) if error else "it answered a request with numbers that are not finite"
                with suppress(SlotError):  # where that cannot be written, the request is answered all the same
                    self._return_to(good, reason)
                return better if better is not None else _give(answer, error)
        # Another request has returned to the last good model already.
        return self.predict(x)

    def _confirm_now(self, serving: _Serving) -> None:
        # A request waits for nobody: if something is changing, or the disk is full, the next request confirms.
        if self._changing.acquire(blocking=False):
            try:
                if self._serving is serving:
                    with suppress(SlotError):
                        self.confirm()
            finally:
                self._changing.release()

    def _find_last_good(self) -> _Serving | None:
        active = self.state.active
        if self._last_good is None and active and self.state.slot(other(active)).status == "good":
            try:
                self._last_good = self._load(other(active), trying=False)
            except ArchipelError:
                # There is nothing better than the model on trial then, so its own error is what the caller gets.
                return None
        return self._last_good


def _give(answer: Any, error: ArchipelError | None) -> Any:
    if error is not None:
        raise error
    return answer


def _finite(answer: np.ndarray | Mapping[str, np.ndarray]) -> bool:
    arrays = answer.values() if isinstance(answer, Mapping) else (answer,)
    return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays)
