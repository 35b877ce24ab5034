"""Two model slots, as for system updates of phones: one for a new model on trial, one for the last good model.

    install    verifies a bundle and copies it to the slot that is not in use: "staged"
    switch     loads it beside the running model, tests it with its own vectors, and makes it active: "trying"
    confirm    ends the trial, when called or after enough requests without an error: "good"
    rollback   goes back to the last good model, when called or when the model on trial fails: "bad"

Each load of a model on trial is counted on disk before it happens. So a model that crashes the process is given up
after a few starts. A new bundle starts from its own published parameters, or those that it is installed with; what the
device learned on top of the old bundle stays in the old slot.
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
from archipel.lite_runtime.slots.folder import MAX_ATTEMPTS, SlotFolder, SlotName, SlotState, mark_bad, other
from archipel.lite_runtime.slots.loading import Loader, OwnState, Serving

if TYPE_CHECKING:
    from archipel.lite_runtime.engines.delegates import Delegates
    from archipel.lite_runtime.interface import ModelRuntime

_FAILURES = (RuntimeProgramError, RuntimeLimitError)


class Slots:
    """Answers requests with the active slot's model. `predict` and `runtime` may be used from any thread at any time.

    A request keeps the model that it began with, so a switch neither delays nor breaks a request.

    Example:
        with Slots("slots", trusted_keys) as slots:
            slots.install("digits.bundle")
            slots.switch()
            answers = slots.predict(x)
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
        allow_development: bool = False,
    ) -> None:
        """Own `folder` and load its active slot, or the last good one if that fails.

        Arguments:
            folder: made if it is not there; one process owns it at a time.
            trusted_keys, threads, memory_limit, delegates, allow_development: as for `load`.
            isolated: run the models in child processes, so that a model that crashes does not end this one (Linux).
            seconds: most time for one request of such a process.
            attempts: loads of a model on trial, without a confirmation, after which it is given up.
            confirm_after: requests without an error that confirm a model; None: only `confirm` does.
            load: whether to load now; False: the first request does.
            own: returns the personal tensors and state that the device keeps elsewhere, for the bundle of a slot.

        Raises SlotError if another process owns the folder, its state is damaged, or neither slot can be loaded.
        """
        if not 1 <= attempts <= MAX_ATTEMPTS or (confirm_after is not None and confirm_after < 1):
            got = f"got {attempts} and {confirm_after}"
            raise SlotError(f"attempts must be from 1 to {MAX_ATTEMPTS} and confirm_after at least 1, {got}")
        self._keys = list(trusted_keys)
        self._loader = Loader(
            trusted_keys=self._keys, threads=threads, memory_limit=memory_limit, delegates=delegates,
            isolated=isolated, seconds=seconds, own=own, allow_development=allow_development,
        )  # fmt: skip
        self._attempts = attempts
        self._confirm_after = confirm_after
        self._changing = threading.RLock()
        self._serving: Serving | None = None
        self._last_good: Serving | None = None
        self._folder = SlotFolder(folder)
        if load and self._folder.state.active:
            try:
                self._load_active()
            except BaseException:
                self._folder.close()
                raise

    # --- use ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SlotState:
        """The contents of the state file."""
        return self._folder.state

    @property
    def runtime(self) -> ModelRuntime:
        """The active slot's runtime. Raises SlotError if no slot is active or none can be loaded."""
        return self._need_serving().runtime

    def predict(self, x: Any) -> Any:
        """As `Runtime.predict`, by the active slot's model.

        If a model on trial fails on the request, or its answer is not finite, the last good model gets the request
        too. If that one does better, its answer is returned and the model on trial is given up. Batches from an
        iterator are answered one by one, each by the model that is active then.
        """
        if isinstance(x, Iterator):
            return map(self.predict, x)
        # Read once and without the lock: a switch replaces the object, so this request keeps model and trial together.
        serving = self._serving or self._need_serving()
        if not serving.trying:
            return serving.runtime.predict(x)
        try:
            answer = serving.runtime.predict(x)
        except _FAILURES as error:
            return self._ask_last_good(serving, x, error, None)
        if not _is_finite(answer):
            return self._ask_last_good(serving, x, None, answer)
        if self._confirm_after is not None and serving.count() >= self._confirm_after:
            self._confirm_now(serving)
        return answer

    def save(self) -> None:
        """Write what the active runtime has learned to its slot, durably. Raises SlotError if `own` was given."""
        # Two copies of the same tensors would disagree after the next round.
        if self._loader.own is not None:
            raise SlotError(f"{self._folder.folder}: what the device learns is kept elsewhere, not in these slots")
        with self._changing:
            serving = self._need_serving()
            serving.runtime.save(self._folder.path(serving.name))

    def renew(self) -> None:
        """Restore what `own` returns now in the loaded models."""
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
        """Verify a bundle and copy it to the slot that is not in use.

        Arguments:
            bundle: a folder or a `.bundle` file.
            parameters: all parameters by name, to run with instead of the bundle's own.
            version: the caller's number of this model, at least 0, kept in the slot's entry.
            weights: hex SHA-256 of the file that the parameters came from, kept there too.

        Returns the slot's name. Raises the BundleError that says what is wrong, RuntimeLimitError for a bundle that
        needs more memory than allowed, RuntimeInputError for parameters that are not this bundle's, SlotError while a
        model is on trial that could still return to the other slot.
        """
        with self._changing:

            def learned(opened: Bundle) -> Mapping[str, np.ndarray]:
                return self._loader.learned(opened, parameters)

            return self._folder.install(
                bundle, self._keys, self._attempts, learned, version=version, weights=weights,
                allow_development=self._loader.allow_development,
            )  # fmt: skip

    def switch(self) -> SelfTestReport:
        """Load the staged slot beside the running one, test it, and make it active. Returns the self-test's report.

        Raises SlotError if nothing is staged, SelfTestError or what loading raises: then that slot is bad and the
        running model goes on.
        """
        with self._changing:
            name = self._find_staged()
            before = self.state.active
            try:
                serving = self._load(name, trying=True)
            except ArchipelError as error:
                self._folder.update(name, mark_bad(self.state.slot(name), str(error)))
                raise
            # A model that was never confirmed is nothing to return to, so the new one's trial has no way back.
            rest = None
            if before and self.state.slot(before).status == "trying":
                rest = mark_bad(self.state.slot(before), f"slot {name} replaced it before it was confirmed")
            # The load above used an attempt for the case of a crash. The trial itself begins with all of them.
            tried = msgspec.structs.replace(self.state.slot(name), status="trying", attempts=self._attempts)
            self._folder.update(name, tried, active=name, rest=rest)
            # On disk first: after an error there the running model is still the active one.
            self._last_good = self._serving if rest is None else None
            self._serving = serving
            assert serving.tested is not None
            return serving.tested

    def confirm(self) -> None:
        """End the trial of the active slot and mark it good. Raises SlotError if no slot is active."""
        with self._changing:
            name = self._need_active()
            slot = self.state.slot(name)
            if slot.status == "trying":
                self._folder.update(name, msgspec.structs.replace(slot, status="good", attempts=0))
            if self._serving is not None:
                self._serving.trying = False
            self._last_good = None

    def rollback(self, reason: str = "rolled back") -> SlotName:
        """Go back to the last good slot, whose name is returned, and mark the active one bad for `reason`.

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
                    f"{self._folder.folder}: slot {other(name)} cannot be loaded, so {name} stays active: {error}"
                ) from None
            self._return_to(serving, reason)
            return serving.name

    def close(self) -> None:
        """Release the folder. A model on trial gets the attempt of this start back, because it has not crashed."""
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

    def _need_serving(self) -> Serving:
        with self._changing:
            if self._serving is None:
                self._need_active()
                self._load_active()
            assert self._serving is not None
            return self._serving

    def _need_active(self) -> SlotName:
        self._folder.check_open()
        if not self.state.active:
            raise SlotError(f"{self._folder.folder}: no slot is active; install a bundle, then switch")
        return self.state.active

    def _find_staged(self) -> SlotName:
        names: tuple[SlotName, ...] = ("a", "b")
        for name in names:
            slot = self.state.slot(name)
            if slot.status == "staged":
                # Loads of a staged slot are counted before they begin, so these have ended in a crash.
                if slot.attempts == 0:
                    reason = "every attempt to load it ended the process"
                    self._folder.update(name, mark_bad(slot, reason))
                    raise SlotError(f"{self._folder.folder}: slot {name} is given up: {reason}; install another bundle")
                return name
        raise SlotError(f"{self._folder.folder}: no slot is staged; install a bundle first")

    def _load_active(self) -> None:
        """Load the active slot, or else the last good one. Raises SlotError with both reasons if neither works."""
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

    def _load(self, name: SlotName, trying: bool) -> Serving:
        """Load a slot's model, with a self-test and a counted attempt if it is on trial."""
        slot, path = self.state.slot(name), self._folder.path(name)
        bundle = self._loader.open(path, slot.digest)
        if not trying:
            return Serving(name, self._loader.make(path, bundle))
        # After verifying, so that a damaged bundle costs no attempt; before making sessions, which may crash.
        self._folder.update(name, msgspec.structs.replace(slot, attempts=slot.attempts - 1))
        return Serving(name, *self._loader.make_tested(path, bundle))

    def _return_to(self, serving: Serving, reason: str) -> None:
        failed = other(serving.name)
        self._folder.update(failed, mark_bad(self.state.slot(failed), reason), active=serving.name)
        self._serving = serving
        self._last_good = None

    def _ask_last_good(self, serving: Serving, x: Any, error: ArchipelError | None, answer: Any) -> Any:
        """The last good model's answer, or its own, to a request on which a model on trial failed or was not finite."""
        with self._changing:
            if self._serving is serving:
                good = self._find_last_good()
                if good is None:
                    return _return_or_raise(answer, error)
                try:
                    better = good.runtime.predict(x)
                except RuntimeInputError:
                    # The old model has other inputs. The trial ends all the same, with the new model's answer or error.
                    better = None
                except _FAILURES:
                    return _return_or_raise(answer, error)
                # Both models fail on this request, so its data are at fault and the trial goes on.
                if better is not None and not _is_finite(better):
                    return _return_or_raise(answer, error)
                reason = str(error) if error else "it answered a request with numbers that are not finite"
                with suppress(SlotError):  # where that cannot be written, the request is answered all the same
                    self._return_to(good, reason)
                return better if better is not None else _return_or_raise(answer, error)
        # Another request has rolled back already; the model that is active now answers this one.
        return self.predict(x)

    def _confirm_now(self, serving: Serving) -> None:
        # No request waits here: if a change is going on, or the disk is full, the next request confirms.
        if self._changing.acquire(blocking=False):
            try:
                if self._serving is serving:
                    with suppress(SlotError):
                        self.confirm()
            finally:
                self._changing.release()

    def _find_last_good(self) -> Serving | None:
        active = self.state.active
        if self._last_good is None and active and self.state.slot(other(active)).status == "good":
            try:
                self._last_good = self._load(other(active), trying=False)
            except ArchipelError:
                # No good model can be loaded, so the caller gets the error of the model on trial.
                return None
        return self._last_good


def _return_or_raise(answer: Any, error: ArchipelError | None) -> Any:
    if error is not None:
        raise error
    return answer


def _is_finite(answer: np.ndarray | Mapping[str, np.ndarray]) -> bool:
    arrays = answer.values() if isinstance(answer, Mapping) else (answer,)
    return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays)
