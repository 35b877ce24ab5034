"""What a device remembers of the versions that it was offered: FOLDER/adoption.json.

Which version runs is not in here: the slots say that, so that it is true at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from archipel.errors import ClientError, MessageError
from archipel.lite_runtime.durable import write_durably
from archipel.protocol.messages import Name, Offer, VersionNumber, Whole
from archipel.protocol.sealed import decode, encode

FILE = "adoption.json"
RETRY_SECONDS = 86400.0
RETRY_SOON_SECONDS = 600.0
"""After what says nothing about the version: a full disk, examples that cannot be read."""
MAX_STARTS = 3
_MAX_KEPT_OUT = 8
_MAX_BYTES = 1 << 20
MAX_REASON = 500


class KeptOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version that was offered with `serial` and not adopted: `worse` here than what ran, or not fit to run.

    It is tried again at `until` (Unix seconds), or where it is offered with a greater serial.
    """

    version: VersionNumber
    serial: Whole
    until: float
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    worse: bool = False


class Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one model: the greatest serial, what was kept out, and the version that was begun `starts` times in a row and
    never came to an end (0: none)."""

    serial: Whole = 0
    kept_out: Annotated[tuple[KeptOut, ...], msgspec.Meta(max_length=_MAX_KEPT_OUT)] = ()
    begun: Annotated[int, msgspec.Meta(ge=0)] = 0
    starts: Annotated[int, msgspec.Meta(ge=0)] = 0

    def entry(self, version: int) -> KeptOut | None:
        return next((each for each in self.kept_out if each.version == version), None)


class _Book(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: dict[Name, Seen] = {}


class OfferBook:
    """The file, by model. Every change is durable when it returns. `clock` gives Unix seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._path = folder / FILE
        self._clock = clock
        self._models: dict[str, Seen] | None = None

    def of(self, model: str) -> Seen:
        """Raises ClientError where the file is damaged."""
        if self._models is None:
            self._models = self._read()
        return self._models.get(model, Seen())

    def see(self, offer: Offer) -> None:
        """From now on no older offer counts. Raises OSError, as all changes do."""
        if offer.serial > self.of(offer.model).serial:
            self._change(offer.model, serial=offer.serial)

    def begin(self, offer: Offer) -> int:
        """Count a start of what may take the process down with it; which one this is."""
        seen = self.of(offer.model)
        starts = seen.starts + 1 if seen.begun == offer.version else 1
        self._change(offer.model, begun=offer.version, starts=starts)
        return starts

    def end(self, offer: Offer, *, adopted: bool) -> None:
        """It came to an end. What kept the version out before does not count for one that was adopted."""
        entries = self.of(offer.model).kept_out
        left = tuple(each for each in entries if not adopted or each.version != offer.version)
        self._change(offer.model, kept_out=left, begun=0, starts=0)

    def keep_out(self, offer: Offer, reason: str, *, worse: bool = False, soon: bool = False) -> None:
        """`soon`: until RETRY_SOON_SECONDS from now."""
        seen = self.of(offer.model)
        entry = KeptOut(
            version=offer.version,
            serial=max(offer.serial, seen.serial),
            until=self._clock() + (RETRY_SOON_SECONDS if soon else RETRY_SECONDS),
            reason=reason[:MAX_REASON],
            worse=worse,
        )
        others = [each for each in seen.kept_out if each.version != offer.version]
        self._change(offer.model, kept_out=(*others, entry)[-_MAX_KEPT_OUT:], begun=0, starts=0)

    def kept_out(self, offer: Offer) -> KeptOut | None:
        """Why the version is not to be tried now; None where it is."""
        entry = self.of(offer.model).entry(offer.version)
        if entry is None or offer.serial > entry.serial:
            return None
        # A clock that was put back must not keep it out for longer.
        return entry if 0 < entry.until - self._clock() <= RETRY_SECONDS else None

    def _change(self, model: str, **changes: object) -> None:
        seen = msgspec.structs.replace(self.of(model), **changes)
        assert self._models is not None
        if seen == self._models.get(model):
            return
        # First here: on a full disk nothing is tried over and over in this process.
        self._models[model] = seen
        write_durably(self._path, encode(_Book(models=self._models)))

    def _read(self) -> dict[str, Seen]:
        try:
            with open(self._path, "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ClientError(f"{self._path}: cannot be read ({error.strerror})") from None
        try:
            if len(data) > _MAX_BYTES:
                raise MessageError(f"more than {_MAX_BYTES} bytes")
            return decode("adoption record", data, _Book).models
        except MessageError as error:
            raise ClientError(
                f"{self._path}: damaged ({error}); restore it, or remove it: every version is tried anew"
            ) from None
