"""Writes tests/datasets/readers/corpus: sound and damaged schemas of record files, by hand and without archipel.

python tests/datasets/readers/make_corpus.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
LABEL: dict[str, Any] = {"name": "label", "dtype": "int64", "shape": [], "classes": ["cat", "dog"]}


def field(**changes: Any) -> dict[str, Any]:
    return {"name": "input", "dtype": "uint8", "shape": [32, 32, 3], "classes": [], **changes}


def schema(*fields: Any, version: Any = 1, **more: Any) -> bytes:
    return json.dumps({"version": version, "fields": list(fields), **more}).encode()


def files() -> dict[str, bytes]:
    return {
        "sound": schema(field(), LABEL),
        "sound-open-axis": schema(field(shape=[None, 2], dtype="float32")),
        "sound-scalar": schema(field(shape=[])),
        "empty": b"",
        "no-json": b"\xff\xfe{}",
        "cut-short": schema(field())[:-2],
        "deep": b"[" * 100_000,
        "no-fields": schema(),
        "fields-no-list": b'{"version": 1, "fields": {}}',
        "version-two": schema(field(), version=2),
        "version-text": schema(field(), version="1"),
        "unknown-key": schema(field(), more=1),
        "unknown-field-key": schema(field(more=1)),
        "same-name-twice": schema(field(), field()),
        "empty-name": schema(field(name="")),
        "object-dtype": schema(field(dtype="O")),
        "complex-dtype": schema(field(dtype="complex64")),
        "byte-order": schema(field(dtype=">f4")),
        "negative-size": schema(field(shape=[-1, -1])),
        "zero-size": schema(field(shape=[0])),
        "float-size": schema(field(shape=[1.5])),
        "huge-size": schema(field(shape=[2**40])),
        "huge-product": schema(field(shape=[2**30, 2**30])),
        "beyond-integers": b'{"version": 1, "fields": [{"name": "x", "dtype": "int8", "shape": [1e400]}]}',
        "second-axis-open": schema(field(shape=[2, None])),
        "many-axes": schema(field(shape=[1] * 17)),
        "same-class-twice": schema(field(classes=["a", "a"])),
        "class-no-text": schema(field(classes=[1])),
    }


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name, content in files().items():
        (CORPUS / f"schema-{name}.json").write_bytes(content)
