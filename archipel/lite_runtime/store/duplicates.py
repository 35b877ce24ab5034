"""Which examples a store holds already: somebody who adds a file twice does not want each of its examples twice."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from archipel.lite_runtime.store.example_store import ExampleStore
from archipel.lite_runtime.store.layout import Layout, batch_of

_BATCH = 256


def lacking(store: ExampleStore, examples: Mapping[str, np.ndarray]) -> np.ndarray:
    """The places of those `examples`, arrays `[n, ...]` by field name, that the store does not hold, int64 `[m]`.

    Examples are the same if all their fields are, byte for byte. Of one that comes more often among `examples` than in
    the store, the last ones are lacking: adding what is lacking twice is the same as adding it once, and equal examples
    of one file stay as many as they are. Reads and decrypts the whole store, and keeps nothing of it on the disk.

    Raises RuntimeInputError if the fields have no batch axis or different lengths. Examples with other fields than the
    store's are all lacking, and `add_many` says what is wrong with them.
    """
    batch = batch_of(examples, single=False)
    layout = Layout.of(batch)
    count = layout.check(batch)
    if layout.fields != store.fields:
        return np.arange(count)
    held: Counter[bytes] = Counter()
    for part in store.batches(_BATCH, shuffled=False):
        held.update(_digests(layout, part))
    places = []
    for place, digest in enumerate(_digests(layout, batch)):
        if held[digest]:
            held[digest] -= 1
        else:
            places.append(place)
    return np.array(places, np.int64)


def _digests(layout: Layout, batch: Mapping[str, np.ndarray]) -> Iterator[bytes]:
    for start in range(0, len(next(iter(batch.values()))), _BATCH):
        for row in layout.pack({name: array[start : start + _BATCH] for name, array in batch.items()}):
            yield hashlib.sha256(row).digest()
