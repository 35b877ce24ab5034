"""Bodies that are almost right."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import msgspec

OTHER_VALUES = (None, True, 0, -1, 1e308, 2**70, "", "x" * 5000, "\ud83d\ude00", [], {}, [[]], "0" * 32, "0" * 64)


def mutations(seed: bytes, generator: random.Random, *, packed: bool = False) -> Iterator[bytes]:
    """Endlessly: broken bytes, and well-formed JSON (or MessagePack) with something else in one place."""
    decode = msgspec.msgpack.decode if packed else json.loads
    while True:
        if generator.random() < 0.5:
            data = bytearray(seed)
            for _ in range(generator.randint(1, 4)):
                start = generator.randrange(len(data) + 1)
                stop = min(len(data), start + generator.randint(0, 8))
                data[start:stop] = generator.randbytes(generator.randint(0, 8))
            yield bytes(data)
        else:
            document = decode(seed)
            place, key = document, None
            while isinstance(place, dict | list) and place and (key is None or generator.random() < 0.7):
                parent = place
                key = generator.choice(list(place) if isinstance(place, dict) else range(len(place)))
                place = parent[key]
            if key is not None:
                other = generator.choice(OTHER_VALUES)
                # MessagePack has no such number and no lone surrogates.
                parent[key] = b"" if packed and other in (2**70, "\ud83d\ude00") else other
            yield msgspec.msgpack.encode(document) if packed else json.dumps(document).encode()
