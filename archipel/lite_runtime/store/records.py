"""The sealed rows of an example store. Each is bound to its place and cannot be opened at another one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping

import numpy as np
from cryptography.exceptions import InvalidTag

from archipel.errors import StoreError, StoreRecordError
from archipel.lite_runtime.store.keys import StoreKeys
from archipel.lite_runtime.store.layout import MAX_LAYOUT_BYTES, Layout
from archipel.lite_runtime.store.sealing import NONCE_BYTES, OVERHEAD_BYTES, Sealer

_CHUNK_BYTES = 1 << 20
_LAYOUT = b"archipel/example-store/1/layout"
_EXAMPLE = b"archipel/example-store/1/example"

# A blob of the wrong size was not written here: SQLite does not even load it.
_READ = (
    "SELECT time, CASE WHEN typeof(sealed) = 'blob' AND length(sealed) = ? THEN sealed END FROM examples WHERE id = ?"
)


class Records:
    """Writes and reads the rows of one store inside its transactions. Not for several threads at once."""

    def __init__(self, keys: StoreKeys) -> None:
        self._store = keys.store
        self._sealer = Sealer(keys.data_key)

    def write_layout(self, database: sqlite3.Connection, layout: Layout) -> None:
        sealed = self._sealer.seal(os.urandom(NONCE_BYTES), layout.encoded, _LAYOUT + self._store)
        database.execute("UPDATE store SET layout = ?", (sealed,))

    def read_layout(self, database: sqlite3.Connection) -> Layout | None:
        """The store's layout, None before the first example. Raises StoreError."""
        # One byte more than the largest layout: a longer blob fails to open, and is not loaded as a whole.
        kind, sealed = database.execute(
            "SELECT typeof(layout), substr(layout, 1, ?) FROM store", (MAX_LAYOUT_BYTES + OVERHEAD_BYTES + 1,)
        ).fetchone()
        if kind == "null":
            return None
        try:
            if kind != "blob":
                raise InvalidTag
            message = self._sealer.open(sealed, _LAYOUT + self._store)
        except InvalidTag:
            raise StoreError(
                "example store: the layout of the examples was damaged or tampered with; "
                "ExampleStore.destroy(path) makes room for a new store"
            ) from None
        return Layout.decode(message)

    def write(
        self, database: sqlite3.Connection, layout: Layout, batch: Mapping[str, np.ndarray], ids: range, time: int
    ) -> None:
        """Insert `batch`, checked against `layout`; `time` in seconds."""
        database.executemany("INSERT INTO examples VALUES (?, ?, ?)", self._seal_rows(layout, batch, ids, time))

    def read(
        self, database: sqlite3.Connection, layout: Layout, ids: np.ndarray, skip_missing: bool = False
    ) -> dict[str, np.ndarray]:
        """Arrays `[n, ...]` by field name, in the order of `ids`; `skip_missing` leaves out examples that are gone.

        Raises StoreRecordError. Needs the arrays' memory and 2 MiB more, or that of two examples if it is larger.
        """
        arrays = layout.empty(len(ids))
        present = np.ones(len(ids), bool)
        # By id, so that SQLite goes through the file once; `places` puts each row where it was asked for.
        order = np.argsort(ids, kind="stable")
        step = _rows_at_once(layout)
        for start in range(0, len(ids), step):
            places, messages = [], []
            for place in order[start : start + step].tolist():
                message = self._read_message(database, layout, int(ids[place]))
                if message is not None:
                    places.append(place)
                    messages.append(message)
                elif skip_missing:
                    present[place] = False
                else:
                    id = int(ids[place])
                    raise StoreRecordError(f"example store: example {id} is not there (removed, or too old)", id)
            rows = np.frombuffer(b"".join(messages), np.uint8).reshape(len(messages), layout.nbytes)
            layout.unpack(rows, arrays, np.array(places, np.int64))
        return arrays if present.all() else {name: array[present] for name, array in arrays.items()}

    def _seal_rows(
        self, layout: Layout, batch: Mapping[str, np.ndarray], ids: range, time: int
    ) -> Iterator[tuple[int, int, bytes]]:
        step, size = _rows_at_once(layout), layout.nbytes
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            flat = layout.pack({name: array[start : start + step] for name, array in batch.items()}).data.cast("B")
            # Fresh for every message: XAES-256-GCM allows random nonces (sealing.py).
            nonces = os.urandom(NONCE_BYTES * len(part))
            for index, id in enumerate(part):
                nonce = nonces[NONCE_BYTES * index : NONCE_BYTES * (index + 1)]
                message = flat[size * index : size * (index + 1)]
                yield id, time, self._sealer.seal(nonce, message, self._associated_data(layout, id, time))

    def _read_message(self, database: sqlite3.Connection, layout: Layout, id: int) -> bytes | None:
        row = database.execute(_READ, (sealed_bytes(layout), id)).fetchone()
        if row is None:
            return None
        time, sealed = row
        if isinstance(time, int) and sealed is not None:
            try:
                return self._sealer.open(sealed, self._associated_data(layout, id, time))
            except InvalidTag:
                pass
        raise StoreRecordError(
            f"example store: example {id} was damaged or tampered with; remove([{id}]) lets the others be used", id
        )

    # The associated data: store, layout, id and time. A row that was moved, copied or redated does not open.
    def _associated_data(self, layout: Layout, id: int, time: int) -> bytes:
        where = id.to_bytes(8, "big", signed=True) + time.to_bytes(8, "big", signed=True)
        return _EXAMPLE + self._store + layout.digest + where


def sealed_bytes(layout: Layout) -> int:
    """The size of one example's sealed blob."""
    return layout.nbytes + OVERHEAD_BYTES


def _rows_at_once(layout: Layout) -> int:
    return max(1, _CHUNK_BYTES // layout.nbytes)
