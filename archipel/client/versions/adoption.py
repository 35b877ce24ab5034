"""What a device does with the versions of models that the server offers. Each version passes these steps:

    offered     signed by the server's key, for this population, and not older than one that was seen
    fetched     within the owner's limits, the bundle signed by a pinned publisher        (fetching.py)
    compared    with the running version, on the device's own examples                    (comparing.py)
    adopted     installed beside the running version, tested, and switched to             (running.py)

Whether a version is better here is a fact about this device's examples, and a server that could see which version a
device runs would learn one such fact with each offer. So nothing that leaves the device depends on it. The agent
handles offers in two steps. *Fetching* asks the server for files; which ones follows from what was offered and fetched
before, and from nothing else. *Looking* then decides on this device alone, without requests. Check-ins report what was
fetched. How many devices adopted a version is known from secure sums alone, of answers that have noise already
(`memory/decisions.py`). The duration of a look is hidden, too: the device is silent until `look_seconds` after the look
began, or a multiple of that (`remaining_silence`), and it looks as often if there is nothing to decide.

A version with which the server takes back the running one is not compared. Work that a kill interrupts begins again;
the slots alone say which version runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from archipel.bundle import open_bundle
from archipel.client.connection.identity import DeviceRecord
from archipel.client.connection.session import DeviceSession
from archipel.client.device import Device
from archipel.client.memory.decisions import content_key
from archipel.client.versions.comparing import Content, Verdict, compare
from archipel.client.versions.fetching import OfferFetcher, is_device_failure
from archipel.client.versions.offer_book import MAX_REASON, MAX_STARTS, OfferBook, Standing
from archipel.client.versions.running import Parameters, RunningModels, current_slot, takes_back, why_given_up
from archipel.errors import ArchipelError, BundleError, ClientError, RoundAbandonedError, SlotError
from archipel.lite_runtime import Slots
from archipel.lite_runtime.learned import BUNDLE_FOLDER, read_learned
from archipel.lite_runtime.slots.folder import Slot, SlotState
from archipel.protocol.messages import Offer
from archipel.protocol.sealed import Sealed


class Adoption:
    """Handles the offers of one device. `fetched_versions` and `consider` are for the agent's thread; any thread may
    call the other methods. `clock` gives Unix seconds."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.time) -> None:
        self._device = device
        self._book = OfferBook(device.config.folder, clock)
        self._running = RunningModels(device)
        self._fetcher = OfferFetcher(device, self._book, clock, self._tell_kept_out)
        self._silent_until = 0.0

    def close(self) -> None:
        """Close the models that `model` returned."""
        self._running.close()

    def versions(self) -> dict[str, int]:
        """The number of the running version by model, without models whose slots are damaged, or all bad."""
        return self._running.versions()

    def model(self, name: str, record: DeviceRecord) -> Slots:
        """The slots of a model: see RunningModels.model."""
        return self._running.model(name, record)

    def fetched_versions(self) -> dict[str, int] | None:
        """What a check-in reports: by model the number of the version that was fetched last, whether it runs or not.
        None if the owner does not want offers."""
        self._running.renew()
        if not self._device.config.adopt:
            return None
        with suppress(ClientError):  # a damaged file is reported when the next offer is read
            return {model: seen.fetched for model, seen in self._book.models().items() if seen.fetched}
        return {}

    def remaining_silence(self) -> float:
        """For how many seconds the device must send nothing, whatever the last look decided."""
        return max(0.0, self._silent_until - time.monotonic())

    def consider(self, offers: Sequence[Sealed], session: DeviceSession, record: DeviceRecord) -> None:
        """Fetch the offered versions, then adopt each or keep the running one; the events say which.

        Raises UnreachableError and RefusedError as a check-in does, and what `device.examples` raises.
        """
        if not self._device.config.adopt:
            return
        try:
            self._fetcher.fetch(offers, session, record)
            self._look(record)
        except RoundAbandonedError as error:
            self._device.emit("paused", {"reason": str(error)})

    # --- looking --------------------------------------------------------------------------------------------------

    def _look(self, record: DeviceRecord) -> None:
        """Decide about each fetched version that is due, without a request to the server."""
        try:
            standing = {model: seen.standing for model, seen in self._book.models().items()}
            due = [model for model in standing if self._book.is_look_due(model)]
        except ClientError:  # `fetch` reports a damaged file with the next offer
            return
        for model, current in standing.items():
            if current is not None and model not in due:
                self._tell_of_failure(current)
        if not due:
            return
        began, seconds = time.monotonic(), self._device.config.look_seconds
        try:
            for model in due:
                seen = standing[model]
                assert seen is not None
                self._look_at(seen.offer, record)
        finally:
            # Counted from the beginning and in whole multiples, since a time from the end on would tell how long the
            # look took.
            taken = time.monotonic() - began
            self._silent_until = began + seconds * (1 + taken // seconds)

    def _look_at(self, offer: Offer, record: DeviceRecord) -> None:
        verdict = Verdict(False, "")
        running, cached = None, None
        try:
            # First, and also if the version runs already: opening marks it as used in the cache, and so decides what is
            # fetched later.
            cached = self._open_cached(offer, record)
            if isinstance(cached, ArchipelError) and self._book.mark_lost(offer.model):
                raise cached
            state = self._running.state(offer.model)
            running = current_slot(state)
            runs = running is not None and running.version == offer.version
            if not runs:
                verdict = self._decide(offer, state, cached, record)
            # Before the book records the look: after a kill in between, the device looks again and keeps this answer.
            self._record(offer, cached, runs or verdict.adopt)
            self._note_look(offer, verdict)
        except RoundAbandonedError:
            raise
        except (ArchipelError, OSError) as error:
            # A failure after the verdict is not retried soon, because that would tell that the version was to be
            # adopted.
            soon = not isinstance(error, _AfterVerdictError) and is_device_failure(error)
            if not soon:
                self._record(offer, cached, False)
            self._reject(offer, running, str(error), soon=soon)

    def _open_cached(self, offer: Offer, record: DeviceRecord) -> tuple[Content, Parameters] | ArchipelError:
        try:
            return self._fetcher.open_cached(offer, record)
        except ArchipelError as error:
            return error

    def _decide(
        self, offer: Offer, state: SlotState, cached: tuple[Content, Parameters] | ArchipelError, record: DeviceRecord
    ) -> Verdict:
        """Adopt the offered version or not. Raises what opening, comparing and installing it raise."""
        running, verdict = current_slot(state), None
        if running is None:
            verdict = Verdict(True, "the first version of this model on this device")
        elif takes_back(offer, state):
            verdict = Verdict(True, f"in place of version {running.version}, which the server took back")
            if self._running.go_back(offer, record):
                self._tell("adopted", offer, running, verdict)
                return verdict
        # Not needed above: a return to the other slot works without the cache.
        if isinstance(cached, ArchipelError):
            raise cached
        new, weights = cached
        self._device.gate.pass_or_wait()
        # The start is counted on disk first: a version that makes the process crash must not do so for ever.
        if self._book.begin(offer) > MAX_STARTS:
            with suppress(OSError):
                self._book.end(offer)
            raise SlotError(f"the agent ended {MAX_STARTS} times while it tried this version")
        try:
            if verdict is None:
                verdict = self._compare(new, offer.model, state, record)
                self._device.gate.pass_or_wait()
            if verdict.adopt:
                self._switch(offer, new, weights, record)
        finally:
            with suppress(OSError):
                self._book.end(offer)
        self._tell("adopted" if verdict.adopt else "kept", offer, running, verdict)
        return verdict

    def _compare(self, new: Content, model: str, state: SlotState, record: DeviceRecord) -> Verdict:
        """Compare the new version with the running one."""
        running, path = current_slot(state), self._running.folder(model) / state.running
        assert running is not None
        try:
            allowed = self._device.config.allow_development
            bundle = open_bundle(path / BUNDLE_FOLDER, record.publisher_keys, allow_development=allowed)
            present = Content(running.version, bundle, read_learned(path))
        except BundleError as error:
            return Verdict(True, f"version {running.version}, which ran, is damaged: {error}")
        return compare(self._device, record.publisher_keys, new, present)

    def _switch(self, offer: Offer, new: Content, weights: Parameters, record: DeviceRecord) -> None:
        """Install and run the new version. Raises _AfterVerdictError if self-test, loading or the disk fails; the
        running version then goes on."""
        try:
            self._running.install(offer, new, weights, record)
        except (ArchipelError, OSError) as error:
            raise _AfterVerdictError(str(error)) from error

    # --- what is remembered ---------------------------------------------------------------------------------------

    def _record(self, offer: Offer, cached: tuple[Content, Parameters] | ArchipelError | None, taken: bool) -> None:
        """Draw the answer for secure sums, unless the version is not in the cache, so that its content is unknown."""
        if isinstance(cached, tuple):
            new, _ = cached
            key = content_key(new.bundle.digest, offer.weights if new.learned else None)
            with suppress(OSError, ClientError):  # then the device counts as one that has not decided
                self._device.decisions.record(key, taken)

    def _note_look(self, offer: Offer, verdict: Verdict) -> None:
        with suppress(OSError):  # the book in memory has the look all the same
            self._book.mark_looked(offer.model, "" if verdict.adopt else verdict.reason)

    def _reject(self, offer: Offer, running: Slot | None, reason: str, *, soon: bool) -> None:
        with suppress(OSError, ClientError):  # the book in memory has the look all the same
            self._book.mark_looked(offer.model, reason, soon=soon)
        self._tell("kept", offer, running, Verdict(False, reason))

    # --- the owner ------------------------------------------------------------------------------------------------

    def _tell_of_failure(self, standing: Standing) -> None:
        """Report a version that was adopted, and that the slots have given up since, once for each reason."""
        offer = standing.offer
        try:
            state = self._running.state(offer.model)
            failed = why_given_up(state, offer)
            if failed and failed[:MAX_REASON] != standing.reason:
                self._book.note_reason(offer.model, failed)
                self._tell("kept", offer, current_slot(state), Verdict(False, failed))
        except (SlotError, OSError) as error:
            self._device.emit("refused", {"model": offer.model, "version": offer.version, "reason": str(error)})

    def _tell_kept_out(self, offer: Offer, reason: str) -> None:
        """Report a version that could not be fetched, or must not be."""
        running = None
        with suppress(SlotError, OSError):
            running = current_slot(self._running.state(offer.model))
        self._tell("kept", offer, running, Verdict(False, reason))

    def _tell(self, what: Literal["adopted", "kept"], offer: Offer, running: Slot | None, verdict: Verdict) -> None:
        detail: dict[str, str | float] = {
            "model": offer.model,
            "version": offer.version,
            "before" if what == "adopted" else "runs": 0 if running is None else running.version,
            "reason": verdict.reason,
        }
        if verdict.values:
            detail |= {"metric": verdict.metric, "offered": verdict.values[0], "running": verdict.values[1]}
        self._device.emit(what, detail)


class _AfterVerdictError(ArchipelError):
    """The device has decided to adopt a version, and could not install or run it."""
