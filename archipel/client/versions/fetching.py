"""From an offer to its files in the cache: signed, for this population, within the owner's limits, in the weights log.

What the device fetches follows from what was offered and fetched before, and from nothing else (see adoption.py).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from archipel.bundle import Bundle
from archipel.client.conditions.owner_limits import check_memory
from archipel.client.connection.identity import DeviceRecord
from archipel.client.connection.session import DeviceSession
from archipel.client.device import Device
from archipel.client.downloads.pieces import PieceDownload
from archipel.client.downloads.publisher_book import PublisherBook
from archipel.client.rounds.exchange import LATER
from archipel.client.versions.comparing import Content, ExamplesError
from archipel.client.versions.offer_book import OfferBook
from archipel.client.versions.running import Parameters
from archipel.errors import (
    ArchipelError,
    ClientError,
    MessageError,
    OwnerRefusalError,
    ProtocolError,
    RefusedError,
    RoundAbandonedError,
    UnreachableError,
)
from archipel.lite_runtime.slots.loading import changed_parameters
from archipel.protocol.messages import Offer
from archipel.protocol.sealed import Sealed, unseal

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}


class OfferFetcher:
    """Fetches the offers of one device. `clock` gives Unix seconds; `on_kept_out(offer, reason)` is called for a
    version that cannot be fetched, or must not be."""

    def __init__(
        self, device: Device, book: OfferBook, clock: Callable[[], float], on_kept_out: Callable[[Offer, str], None]
    ) -> None:
        self._device = device
        self._book = book
        self._clock = clock
        self._on_kept_out = on_kept_out

    def fetch(self, offers: Sequence[Sealed], session: DeviceSession, record: DeviceRecord) -> None:
        """Fetch the offers that are genuine, new and due.

        Raises UnreachableError, RoundAbandonedError if the device may not work any more, and RefusedError if the
        session has ended or the server asks the device to come later.
        """
        for offer in self._read(offers, record):
            if self._accept(offer):
                self._fetch(offer, session, record)

    def open_cached(self, offer: Offer, record: DeviceRecord) -> tuple[Content, Parameters]:
        """The version from the cache, without a request. Raises ArchipelError if it is not there, or not allowed."""
        return self._open(offer, None, record)

    def _read(self, offers: Sequence[Sealed], record: DeviceRecord) -> list[Offer]:
        """The newest offer of each model, of those that the server's key has signed for this population."""
        newest: dict[str, Offer] = {}
        for sealed in offers:
            try:
                offer = unseal("offer", sealed, record.server_key, Offer)
                if offer.population != record.population:
                    raise MessageError(f"offer: for population {offer.population!r}, this is {record.population!r}")
            except ProtocolError as error:
                self._device.emit("refused", {"reason": str(error)})
                continue
            # A server may send several offers of a model; an older one must not be fetched, not even first.
            before = newest.get(offer.model)
            if before is None or before.serial < offer.serial:
                newest[offer.model] = offer
        return list(newest.values())

    def _accept(self, offer: Offer) -> bool:
        """Record the offer in the book; returns whether to fetch it now."""
        try:
            self._book.record_offer(offer)
            return self._book.is_fetch_due(offer.model)
        except (ArchipelError, OSError) as error:
            self._device.emit("refused", {"model": offer.model, "version": offer.version, "reason": str(error)})
            return False

    def _fetch(self, offer: Offer, session: DeviceSession, record: DeviceRecord) -> None:
        """Fetch an offer into the cache, whatever the slots have."""
        cache = self._device.cache
        self._device.emit("offered", {"model": offer.model, "version": offer.version})
        self._device.gate.pass_or_wait()
        try:
            new, weights = self._open(offer, PieceDownload(session, cache.index), record)
            if offer.weights is not None and weights is not None:
                # Here, because this check asks the server, and looking must not.
                of_log = record.of_log(new.bundle.manifest)
                self._device.origins.check(
                    new.bundle, offer.weights, weights, cache.find, session, of_log, self._device.config, use="adoption"
                )
            cache.prune(keep=[name for name in (offer.bundle, offer.weights) if name is not None])
            self._book.mark_fetched(offer)
        except (RoundAbandonedError, UnreachableError):
            raise
        except (ArchipelError, OSError) as error:
            if isinstance(error, RefusedError) and error.status in LATER:
                raise
            with suppress(OSError, ClientError):  # the book in memory delays the next attempt all the same
                self._book.retry_fetch(offer.model, str(error), soon=is_device_failure(error))
            self._on_kept_out(offer, str(error))

    def _open(self, offer: Offer, download: PieceDownload | None, record: DeviceRecord) -> tuple[Content, Parameters]:
        """Open the version from the cache, and fetch what is missing by `download` (None: raise ClientError).

        Raises what the cache raises, OwnerRefusalError, and RuntimeInputError for weights that are not the bundle's.
        """
        config, cache = self._device.config, self._device.cache
        limit = config.max_download_bytes
        bundle = cache.bundle(offer.bundle, record.publisher_keys, download or _refuse_download, limit)
        PublisherBook(config.folder / "rounds" / "publishers").check(bundle, record.population, self._clock())
        # Before the weights, which may be large.
        reason = check_memory(bundle.manifest, config)
        if reason:
            raise OwnerRefusalError("size", reason)
        weights = None
        if offer.weights is not None:
            for_weights = _refuse_download if download is None else download.for_weights(bundle.manifest)
            weights = cache.weights(offer.weights, for_weights, limit)
        return Content(offer.version, bundle, _learned(bundle, weights)), weights


def is_device_failure(error: BaseException | None) -> bool:
    """Whether an error is about the device's examples or disk, and so says nothing about the version."""
    # The cause may be wrapped in other errors on the way.
    while error is not None:
        if isinstance(error, ExamplesError) or (isinstance(error, OSError) and error.errno in _OF_THE_DISK):
            return True
        error = error.__context__
    return False


def _refuse_download(url: str, target: Path, limit: int) -> bool:
    raise ClientError("no longer in this device's cache")


def _learned(bundle: Bundle, weights: Parameters) -> Mapping[str, np.ndarray]:
    """The tensors of `weights` that differ from the bundle's. Raises RuntimeInputError unless names, dtypes and shapes
    are those of the bundle's parameters, which must be known before anything is computed with them."""
    return {} if weights is None else changed_parameters(bundle, weights)
