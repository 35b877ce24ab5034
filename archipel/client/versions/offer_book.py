"""What a device remembers of offered versions, in FOLDER/adoption.json.

The file does not say which version runs: the slots do, so that it is true after any kill. Nothing in the file may make
the requests of a device that runs the offered version differ from those of another device (see adoption.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from archipel.client.memory.stored import read_stored
from archipel.durable import write_durably
from archipel.errors import ProtocolError
from archipel.protocol.messages import MAX_MODELS, Name, Offer, Whole
from archipel.protocol.sealed import encode

FILE = "adoption.json"
RETRY_SECONDS = 86400.0
RETRY_SOON_SECONDS = 600.0
"""After a failure that says nothing about the version, such as a full disk or examples that cannot be read."""
MAX_STARTS = 3
_MAX_BYTES = 1 << 20
MAX_REASON = 500


class Standing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The newest offer of a model, and what this device has done about it. Times are Unix seconds.

    fetched   all its files were here and verified
    again     when to try fetching again, while they are not
    look      when the device looks next whether to adopt it
    decided   the device has looked and decided, whatever the decision
    reason    why the version does not run, as the owner was told last
    """

    offer: Offer
    fetched: bool = False
    again: float = 0.0
    look: float = 0.0
    decided: bool = False
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


class Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of one model.

    standing   its newest offer
    fetched    the number of the version that was fetched last, which check-ins report (0: none)
    begun      the version whose trial began `starts` times in a row and never ended (0: none)
    """

    standing: Standing | None = None
    fetched: Whole = 0
    begun: Annotated[int, msgspec.Meta(ge=0)] = 0
    starts: Annotated[int, msgspec.Meta(ge=0)] = 0


class _Book(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: dict[Name, Seen] = {}


class OfferBook:
    """The book of one device, by model. Every change is durable when it returns. `clock` gives Unix seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._path = folder / FILE
        self._clock = clock
        self._models: dict[str, Seen] | None = None

    def models(self) -> Mapping[str, Seen]:
        """What is known, by model. Raises ClientError if the file is damaged, as all methods do."""
        if self._models is None:
            self._models = self._read()
        return self._models

    def get(self, model: str) -> Seen:
        return self.models().get(model, Seen())

    def record_offer(self, offer: Offer) -> None:
        """Record an offer: from now on no older one of its model counts, and the device looks at this one.

        Raises ProtocolError for an old offer and for one model too many, and OSError as all changes do.
        """
        if offer.model not in self.models() and len(self.models()) >= MAX_MODELS:
            raise ProtocolError(f"offer: one model more than the {MAX_MODELS} that a device remembers")
        before = self.get(offer.model).standing
        if before is None or not _is_same_version(before.offer, offer):
            if before is not None and offer.serial < before.offer.serial:
                raise _older_error(offer, before)
            self._change(offer.model, standing=Standing(offer=offer))
        # The same version under a newer serial: its files stay fetched, and it is looked at once more.
        elif offer.serial > before.offer.serial:
            self._change_standing(offer.model, offer=offer, again=0.0, look=0.0)
        elif offer.serial < before.offer.serial:
            raise _older_error(offer, before)

    def is_fetch_due(self, model: str) -> bool:
        """Whether to fetch the newest offer now."""
        standing = self.get(model).standing
        return standing is not None and not standing.fetched and self._is_due(standing.again)

    def is_look_due(self, model: str) -> bool:
        """Whether it is time to look at the newest offer, whose files are here."""
        standing = self.get(model).standing
        return standing is not None and standing.fetched and self._is_due(standing.look)

    def mark_fetched(self, offer: Offer) -> None:
        """The newest offer's files are here; check-ins report it from now on."""
        standing = self.get(offer.model).standing
        assert standing is not None
        # Due for a look at once; an earlier decision was about files that are lost.
        standing = msgspec.structs.replace(standing, fetched=True, look=0.0, decided=False)
        self._change(offer.model, standing=standing, fetched=offer.version)

    def retry_fetch(self, model: str, reason: str, *, soon: bool) -> None:
        """Fetching failed for `reason`; try it again in a day, or `soon`."""
        self._change_standing(model, again=self._retry_at(soon), reason=reason[:MAX_REASON])

    def mark_looked(self, model: str, reason: str = "", *, soon: bool = False) -> None:
        """The device has looked. `soon`: it could not decide, and looks again RETRY_SOON_SECONDS from now."""
        standing = self.get(model).standing
        # A look that could not decide leaves an earlier decision as it is.
        decided = not soon or (standing is not None and standing.decided)
        self._change_standing(model, look=self._retry_at(soon), decided=decided, reason=reason[:MAX_REASON])

    def mark_lost(self, model: str) -> bool:
        """The files are no longer here. Returns whether to fetch them again: until the device has decided."""
        seen = self.get(model)
        if seen.standing is None or seen.standing.decided:
            return False
        # Check-ins stop reporting the version, too: they report what is here.
        standing = msgspec.structs.replace(seen.standing, fetched=False, again=0.0)
        self._change(model, standing=standing, fetched=0)
        return True

    def note_reason(self, model: str, reason: str) -> None:
        """The owner was told this reason."""
        self._change_standing(model, reason=reason[:MAX_REASON])

    def begin(self, offer: Offer) -> int:
        """Count the start of a trial, which may crash the process; returns which one in a row this is."""
        seen = self.get(offer.model)
        starts = seen.starts + 1 if seen.begun == offer.version else 1
        self._change(offer.model, begun=offer.version, starts=starts)
        return starts

    def end(self, offer: Offer) -> None:
        """The trial has ended, whatever its result."""
        self._change(offer.model, begun=0, starts=0)

    def _retry_at(self, soon: bool) -> float:
        return self._clock() + (RETRY_SOON_SECONDS if soon else RETRY_SECONDS)

    def _is_due(self, at: float) -> bool:
        # A time further in the future than any retry was set before the clock was set back: it is due now.
        return not 0 < at - self._clock() <= RETRY_SECONDS

    def _change_standing(self, model: str, **changes: object) -> None:
        standing = self.get(model).standing
        if standing is not None:
            self._change(model, standing=msgspec.structs.replace(standing, **changes))

    def _change(self, model: str, **changes: object) -> None:
        seen = msgspec.structs.replace(self.get(model), **changes)
        assert self._models is not None
        if seen == self._models.get(model):
            return
        # Memory first: if the disk is full, this process at least does not try the same thing over and over.
        self._models[model] = seen
        write_durably(self._path, encode(_Book(models=self._models)))

    def _read(self) -> dict[str, Seen]:
        remedy = "restore it, or remove it: every version is tried anew"
        book = read_stored(self._path, _MAX_BYTES, "adoption record", _Book, remedy)
        return {} if book is None else book.models


def _is_same_version(one: Offer, other: Offer) -> bool:
    """Whether both offers are of the same files under the same number."""
    return (one.version, one.bundle, one.weights) == (other.version, other.bundle, other.weights)


def _older_error(offer: Offer, seen: Standing) -> ProtocolError:
    return ProtocolError(f"offer: serial {offer.serial} is older than {seen.offer.serial}, which was seen")
