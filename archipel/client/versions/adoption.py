"""The models that a device runs, in the versions that it is offered: FOLDER/models/NAME are their slots.

    offered     signed by the server's key, of this population, not older than one that was seen
    fetched     within the owner's limits, the bundle signed by a pinned publisher
    compared    with the version that runs, on the device's own examples; one that is worse is kept out
    adopted     installed beside the running version, tested, and switched to: the old one stays to return to

Whether a version is better here is a fact about this device's examples, and a server that could see which version a
device runs would learn one such fact with each offer. So nothing that leaves the device depends on it. Offers are dealt
with in two steps: *fetching* asks the server for what it offers, by what was offered and fetched before and by nothing
else; *looking* decides, on this device alone, and only then. Check-ins tell what was fetched. How long a look took is
hidden, too: until `look_seconds` after it began, or a multiple of that, the device is silent (`rest`), and it looks as
often where there is nothing to decide.

A version that takes back the one that runs is not compared. What is killed in between is begun again; the slots alone
say which version runs.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np

from archipel.bundle import Bundle, open_bundle
from archipel.client.conditions.owner_limits import check_memory
from archipel.client.connection.identity import DeviceRecord
from archipel.client.connection.session import DeviceSession
from archipel.client.device import Device
from archipel.client.downloads.pieces import PieceDownload
from archipel.client.downloads.publisher_book import PublisherBook
from archipel.client.rounds.exchange import LATER
from archipel.client.rounds.work import state_name
from archipel.client.versions.comparing import Content, ExamplesError, Verdict, compare
from archipel.client.versions.offer_book import MAX_REASON, MAX_STARTS, OfferBook, Standing
from archipel.errors import (
    ArchipelError,
    BundleError,
    ClientError,
    MessageError,
    OwnerRefusalError,
    ProtocolError,
    RefusedError,
    RoundAbandonedError,
    SlotError,
    UnreachableError,
)
from archipel.lite_runtime import DeviceState, Slots
from archipel.lite_runtime.learned import BUNDLE_FOLDER, read_learned
from archipel.lite_runtime.slots.folder import Slot, SlotState, other, read_state
from archipel.lite_runtime.slots.loading import changed_parameters
from archipel.protocol.messages import Offer
from archipel.protocol.sealed import Sealed, unseal

FOLDER = "models"
WITHDRAWN = "the server took it back"
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}

Parameters = Mapping[str, np.ndarray] | None
"""None: the bundle's own."""


class Adoption:
    """`versions` and `consider` are for the agent's thread, `model` for any. `clock` gives Unix seconds."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.time) -> None:
        self._device = device
        self._folder = device.config.folder / FOLDER
        self._clock = clock
        self._book = OfferBook(device.config.folder, clock)
        self._lock = threading.RLock()
        self._open: dict[str, Slots] = {}
        self._silent_until = 0.0
        self._own: dict[Path, tuple[int, int]] = {}
        """The files of what the device keeps for itself that running models were given, as they were then."""

    def close(self) -> None:
        """End the models that were given out."""
        with self._lock:
            for slots in self._open.values():
                slots.close()
            self._open.clear()

    # --- what runs ------------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """The number of each model's version that runs; models whose slots are damaged, or all bad, are left out."""
        found: dict[str, int] = {}
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            with suppress(SlotError, OSError):
                running = _running(read_state(path))
                if running is not None and running.version:
                    found[path.name] = running.version
        return found

    def told(self) -> dict[str, int] | None:
        """What a check-in tells: the number of each model's version that was fetched last, whether it runs or not. None
        where the owner does not want to be offered versions."""
        self._renew()
        if not self._device.config.adopt:
            return None
        with suppress(ClientError):  # what is damaged is said when offers are read
            return {model: seen.fetched for model, seen in self._book.models().items() if seen.fetched}
        return {}

    def model(self, name: str, record: DeviceRecord) -> Slots:
        """The slots of a model, theirs is the version that runs now; the same object until `close`.

        Raises ClientError where no version was adopted yet, SlotError where another process owns the slots.
        """
        with self._lock:
            if name not in self._open:
                running = self.versions()
                if name not in running:
                    raise ClientError(
                        f"model {name!r}: this device runs no version of it; it runs: {', '.join(running) or 'none'}"
                    )
                self._open[name] = self._slots(name, record)
            return self._open[name]

    # --- what is offered: fetching ------------------------------------------------------------------------------

    def consider(self, offers: Sequence[Sealed], session: DeviceSession, record: DeviceRecord) -> None:
        """Fetch what is offered, then adopt it or keep what runs; the events say which.

        Raises UnreachableError and RefusedError as a check-in does, and what `device.examples` raises.
        """
        if not self._device.config.adopt:
            return
        try:
            for offer in self._read(offers, record):
                if self._accept(offer):
                    self._fetch(offer, session, record)
            self._look(record)
        except RoundAbandonedError as error:
            self._device.emit("paused", {"reason": str(error)})

    def rest(self) -> float:
        """For how many seconds nothing is to be asked of the server, whatever came of the last look."""
        return max(0.0, self._silent_until - time.monotonic())

    def _read(self, offers: Sequence[Sealed], record: DeviceRecord) -> list[Offer]:
        """Those that the server's key has signed for this population, the newest of each model."""
        found: dict[str, Offer] = {}
        for sealed in offers:
            try:
                offer = unseal("offer", sealed, record.server_key, Offer)
                if offer.population != record.population:
                    raise MessageError(f"offer: for population {offer.population!r}, this is {record.population!r}")
            except ProtocolError as error:
                self._device.emit("refused", {"reason": str(error)})
                continue
            before = found.get(offer.model)
            if before is None or before.serial < offer.serial:
                found[offer.model] = offer
        return list(found.values())

    def _accept(self, offer: Offer) -> bool:
        """Whether what is offered is to be fetched now."""
        try:
            self._book.see(offer)
            return self._book.to_fetch(offer.model)
        except (ArchipelError, OSError) as error:
            self._device.emit("refused", {"model": offer.model, "version": offer.version, "reason": str(error)})
            return False

    def _fetch(self, offer: Offer, session: DeviceSession, record: DeviceRecord) -> None:
        """Into the cache, whatever lies in the slots."""
        cache = self._device.cache
        self._device.emit("offered", {"model": offer.model, "version": offer.version})
        self._device.gate.pass_or_wait()
        try:
            new, weights = self._open_version(offer, PieceDownload(session, cache.index), record)
            if offer.weights is not None and weights is not None:
                # Here, where the server is asked: looking asks nobody.
                self._device.origins.check(
                    new.bundle, offer.weights, weights, cache.kept, session, record, self._device.config, use="adoption"
                )
            cache.prune(keep=[name for name in (offer.bundle, offer.weights) if name is not None])
            self._book.fetched(offer)
        except (RoundAbandonedError, UnreachableError):
            raise
        except (ArchipelError, OSError) as error:
            if isinstance(error, RefusedError) and error.status in {401, *LATER}:
                raise
            with suppress(OSError, ClientError):  # in memory it is not fetched again all the same
                self._book.fetch_again(offer.model, str(error), soon=_own_trouble(error))
            self._tell("kept", offer, self._runs(offer.model), Verdict(False, str(error)))

    def _open_version(
        self, offer: Offer, download: PieceDownload | None, record: DeviceRecord
    ) -> tuple[Content, Parameters]:
        """From the cache; what is not there by `download`. Raises what the cache raises, OwnerRefusalError,
        RuntimeInputError for parameters that are not the bundle's."""
        config, cache = self._device.config, self._device.cache
        limit = config.max_download_bytes
        bundle = cache.bundle(offer.bundle, record.publisher_keys, download or _not_here, limit)
        PublisherBook(config.folder / "rounds" / "publishers").check(bundle, record.population, self._clock())
        reason = check_memory(bundle.manifest, config)
        if reason:
            raise OwnerRefusalError("size", reason)
        weights = None
        if offer.weights is not None:
            for_weights = _not_here if download is None else download.for_weights(bundle.manifest)
            weights = cache.weights(offer.weights, for_weights, limit)
        return Content(offer.version, bundle, _learned(bundle, weights)), weights

    # --- what is offered: looking -------------------------------------------------------------------------------

    def _look(self, record: DeviceRecord) -> None:
        """Decide about what was fetched, where it is time to. The server is not asked anything."""
        try:
            standing = {model: seen.standing for model, seen in self._book.models().items()}
            due = [model for model in standing if self._book.to_look(model)]
        except ClientError:  # whoever offers something hears of it
            return
        for model, each in standing.items():
            if each is not None and model not in due:
                self._tell_of_failure(each)
        if not due:
            return
        began, seconds = time.monotonic(), self._device.config.look_seconds
        try:
            for model in due:
                seen = standing[model]
                assert seen is not None
                self._look_at(seen.offer, record)
        finally:
            taken = time.monotonic() - began
            self._silent_until = began + seconds * (1 + taken // seconds)

    def _look_at(self, offer: Offer, record: DeviceRecord) -> None:
        verdict = Verdict(False, "")
        running = None
        try:
            # First, and where it runs already, too: the cache is to know no difference.
            found = self._found(offer, record)
            if isinstance(found, ArchipelError) and self._book.lost(offer.model):
                raise found
            state = read_state(self._folder / offer.model)
            running = _running(state)
            if running is None or running.version != offer.version:
                verdict = self._decide(offer, state, found, record)
            self._looked(offer, verdict)
        except RoundAbandonedError:
            raise
        except _AfterVerdictError as error:
            self._keep(offer, running, str(error), soon=False)
        except (ArchipelError, OSError) as error:
            self._keep(offer, running, str(error), soon=_own_trouble(error))

    def _found(self, offer: Offer, record: DeviceRecord) -> tuple[Content, Parameters] | ArchipelError:
        try:
            return self._open_version(offer, None, record)
        except ArchipelError as error:
            return error

    def _decide(
        self, offer: Offer, state: SlotState, found: tuple[Content, Parameters] | ArchipelError, record: DeviceRecord
    ) -> Verdict:
        running, verdict = _running(state), None
        if running is None:
            verdict = Verdict(True, "the first version of this model on this device")
        elif _takes_back(offer, state):
            verdict = Verdict(True, f"in place of version {running.version}, which the server took back")
            if self._return(offer, record):
                self._tell("adopted", offer, running, verdict)
                return verdict
        if isinstance(found, ArchipelError):
            raise found
        new, weights = found
        self._device.gate.pass_or_wait()
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

    def _tell_of_failure(self, standing: Standing) -> None:
        """A version that was adopted and has been given up since, while it ran."""
        offer = standing.offer
        try:
            state = read_state(self._folder / offer.model)
            failed = _failed(state, offer)
            if failed and failed[:MAX_REASON] != standing.reason:
                self._book.told(offer.model, failed)
                self._tell("kept", offer, _running(state), Verdict(False, failed))
        except (SlotError, OSError) as error:
            self._device.emit("refused", {"model": offer.model, "version": offer.version, "reason": str(error)})

    def _looked(self, offer: Offer, verdict: Verdict) -> None:
        with suppress(OSError):  # in memory it was looked at all the same
            self._book.looked(offer.model, "" if verdict.adopt else verdict.reason)

    def _compare(self, new: Content, model: str, state: SlotState, record: DeviceRecord) -> Verdict:
        """With what runs now."""
        running, path = _running(state), self._folder / model / state.running
        assert running is not None
        try:
            bundle = open_bundle(path / BUNDLE_FOLDER, record.publisher_keys)
            present = Content(running.version, bundle, read_learned(path))
        except BundleError as error:
            return Verdict(True, f"version {running.version}, which ran, is damaged: {error}")
        return compare(self._device, record.publisher_keys, new, present)

    # --- the slots ------------------------------------------------------------------------------------------------

    def _return(self, offer: Offer, record: DeviceRecord) -> bool:
        """Go back to the version in the other slot, if it is the one offered and can be loaded."""
        with self._borrowed(offer.model, record) as slots:
            state = slots.state
            if not state.active or not _is(state.slot(other(state.active)), offer):
                return False
            try:
                slots.rollback(WITHDRAWN)
            except SlotError:
                return False
            return True

    def _switch(self, offer: Offer, new: Content, weights: Parameters, record: DeviceRecord) -> None:
        """Raises _AfterVerdictError where the self-test fails, or loading, or the disk is full: what runs goes on."""
        try:
            self._install(offer, new, weights, record)
        except (ArchipelError, OSError) as error:
            # When it is tried again must not tell that the version would have been adopted.
            raise _AfterVerdictError(str(error)) from error

    def _install(self, offer: Offer, new: Content, weights: Parameters, record: DeviceRecord) -> None:
        with self._borrowed(offer.model, record) as slots:
            running = _running(slots.state)
            if running is not None and slots.state.running == slots.state.active:
                # It has run until now without an error: what makes room is the one before it.
                slots.confirm()
            elif slots.state.active:
                with suppress(ArchipelError):
                    slots.runtime  # noqa: B018  (gives up the one that was never confirmed)
            slots.install(new.bundle.folder, weights, version=offer.version, weights=offer.weights or "")
            slots.switch()

    @contextmanager
    def _borrowed(self, name: str, record: DeviceRecord) -> Iterator[Slots]:
        """The slots that were given out, or else for this time: nobody waits for a model in memory then, and other
        processes may own them the rest of the time."""
        with self._lock:
            if name in self._open:
                yield self._open[name]
                return
            with self._slots(name, record) as slots:
                yield slots

    def _slots(self, name: str, record: DeviceRecord) -> Slots:
        config = self._device.config
        return Slots(
            self._folder / name,
            record.publisher_keys,
            threads=config.threads,
            memory_limit=config.max_peak_bytes,
            isolated=config.isolated,
            seconds=config.max_step_seconds if config.isolated else None,
            load=False,
            own=self._state,
        )

    def _state(self, bundle: Bundle) -> DeviceState:
        """What the device keeps for itself of the bundle's model."""
        path = self._device.state_folder / state_name(bundle)
        self._own[path] = _stamp(path)
        return self._device.state(path.name)

    def _renew(self) -> None:
        """A round may have changed what models that were given out predict with."""
        # A copy: a model may be loaded in another thread now.
        if all(_stamp(path) == before for path, before in list(self._own.items())):
            return
        with self._lock:
            for slots in self._open.values():
                with suppress(ArchipelError):  # the next round says what is wrong with it
                    slots.renew()

    # --- the owner ------------------------------------------------------------------------------------------------

    def _keep(self, offer: Offer, running: Slot | None, reason: str, *, soon: bool) -> None:
        with suppress(OSError, ClientError):  # in memory it was looked at all the same
            self._book.looked(offer.model, reason, soon=soon)
        self._tell("kept", offer, running, Verdict(False, reason))

    def _runs(self, model: str) -> Slot | None:
        with suppress(SlotError, OSError):
            return _running(read_state(self._folder / model))
        return None

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
    """The device decided for a version, and could not change to it."""


def _not_here(url: str, target: Path, limit: int) -> bool:
    raise ClientError("no longer in this device's cache")


def _learned(bundle: Bundle, weights: Parameters) -> Mapping[str, np.ndarray]:
    """What a version has beside its bundle. Its weights are checked here, before anything is computed with them: they
    are the bundle's parameters, by name, dtype and shape. Where else they must come from is asked here, too."""
    return {} if weights is None else changed_parameters(bundle, weights)


def _own_trouble(error: BaseException | None) -> bool:
    """Whether what failed is the device's own, whatever was made of it on the way: its examples, or its disk."""
    while error is not None:
        if isinstance(error, ExamplesError) or (isinstance(error, OSError) and error.errno in _OF_THE_DISK):
            return True
        error = error.__context__
    return False


def _running(state: SlotState) -> Slot | None:
    name = state.running
    return state.slot(name) if name else None


def _is(slot: Slot, offer: Offer) -> bool:
    """Whether that is what lies in the slot, and ran well."""
    content = (slot.version, slot.digest, slot.weights)
    return slot.status == "good" and content == (offer.version, offer.bundle, offer.weights or "")


def _takes_back(offer: Offer, state: SlotState) -> bool:
    """Whether the server has taken back the version that runs: what is for all devices is an older one, or the one that
    ran before."""
    running = _running(state)
    if offer.rollout is not None or running is None:
        return False
    return offer.version < running.version or any(_is(slot, offer) for slot in (state.a, state.b))


def _failed(state: SlotState, offer: Offer) -> str:
    """Why a version that was adopted was given up while it ran; empty where it was not."""
    for slot in (state.a, state.b):
        if (slot.version, slot.digest, slot.weights) == (offer.version, offer.bundle, offer.weights or ""):
            if slot.status == "bad" and slot.reason != WITHDRAWN:
                return slot.reason or "it failed while it ran"
            if slot.status == "trying" and not slot.attempts:
                return "it was started several times and never confirmed"
    return ""


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino
