"""Writes tests/datasets/readers/corpus, by hand and without archipel: schemas of record files, damaged pictures.

python tests/datasets/readers/make_corpus.py
"""

from __future__ import annotations

import json
import struct
import zlib
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


def png(width: int, height: int, rows: bytes, *, depth: int = 8, color: int = 2, more: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    data = chunk(b"IHDR", head) + more + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def pictures() -> dict[str, bytes]:
    rows = (b"\0" + bytes(range(15))) * 6
    sound = png(5, 6, rows)
    bmp = b"BM" + struct.pack("<IHHI", 70, 0, 0, 54)
    flipped = bytearray(sound)
    flipped[20] ^= 1
    return {
        "empty.png": b"",
        "cut-head.png": sound[:20],
        "cut-pixels.png": sound[:-30],
        "wrong-crc.png": bytes(flipped),
        "fewer-rows.png": png(5, 6, rows[:40]),
        "bomb.png": png(20_000, 20_000, bytes(100_000)),
        "wide.png": png(2**31 - 1, 1, bytes(1000)),
        "no-width.png": png(0, 6, b""),
        "unknown-color.png": png(5, 6, rows, color=5),
        "bad-filter.png": png(5, 6, b"\x09" + rows[1:]),
        "text.png": b"no picture at all",
        "html.jpg": b"<!doctype html><title>404</title>",
        "start-only.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00",
        "postscript.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        "short.bmp": bmp + struct.pack("<IiiHHIIiiII", 40, 4, 4, 1, 24, *[0] * 6),
        "huge.bmp": bmp + struct.pack("<IiiHHIIiiII", 40, 2**31 - 1, 2**31 - 1, 1, 24, *[0] * 6),
        "huge.ppm": b"P6 999999 999999 255\n" + bytes(30),
        "negative.ppm": b"P6 -5 6 255\n" + bytes(90),
        "long-number.ppm": b"P6 " + b"9" * 400 + b" 1 255\n",
        "short.webp": b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f" + bytes(12),
    }  # fmt: skip


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name, content in files().items():
        (CORPUS / f"schema-{name}.json").write_bytes(content)
    (CORPUS / "pictures").mkdir(exist_ok=True)
    for name, content in pictures().items():
        (CORPUS / "pictures" / name).write_bytes(content)
