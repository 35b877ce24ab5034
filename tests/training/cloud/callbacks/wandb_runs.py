"""Trains with W&B's logger and no network, and prints what the files for `wandb sync` then have: JSON.

Run by a Python that has W&B, in a folder of its own: wandb_runs.py
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import logged
import wandb
from google.protobuf.json_format import MessageToDict
from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK = 7, 32768


def records(path: Path) -> Iterator[Record]:
    """The records of a .wandb file, decoded by W&B's own protocol classes.

    Its frame is that of LevelDB's log: blocks of 32 KiB; a checksum, a length and a kind in front of each piece, where
    1 is a whole record and 4 the last piece of one. Only W&B's sync program, which needs its server, reads it.
    """
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, kept = HEADER, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + HEADER : at + HEADER + length]
        assert zlib.crc32(piece, zlib.crc32(bytes([kind]))) == checksum
        at += HEADER + length
        kept += piece
        if kind in (1, 4):
            yield Record.FromString(kept)
            kept = b""


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"history": [], "config": {}, "artifacts": [], "summary": {}}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["project"] = record.run.project
            found["config"] |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
        elif kind == "history":
            row = {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
            found["history"].append(row)
        elif kind == "summary":
            for each in record.summary.update:
                found["summary"][each.key or "/".join(each.nested_key)] = json.loads(each.value_json)
        elif kind == "artifact":
            found["artifacts"].append(MessageToDict(record.artifact))
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def main() -> None:
    os.environ.update({"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    paths: list[Path] = []

    def note() -> None:
        (path,) = set(Path().glob("wandb/offline-run-*/*.wandb")) - set(paths)
        paths.append(path)

    found: dict[str, Any] = {"told": logged.told(logged.finish(wandb="sorting"))}
    note()
    found["error"] = logged.fail(wandb="sorting")
    note()
    logged.two_outputs(wandb="sorting")
    note()
    wandb.teardown()  # its process writes what it still has
    os.environ["WANDB_MODE"] = "online"
    found["no key"] = logged.fail(wandb="sorting")
    found |= {name: read(path) for name, path in zip(("finished", "failed", "two outputs"), paths)}
    (artefact,) = found["finished"]["artifacts"]
    (content,) = artefact["manifest"]["contents"]
    found["answers"] = logged.answers(Path(content["localPath"]).read_bytes())
    print(json.dumps(found))


main()
