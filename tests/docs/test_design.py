"""The algorithms of docs/manifests.md, completed and validated by the product's own decoder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from archipel.bundle import decode_manifest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "manifests.md").read_text()
BLOCKS = dict(re.findall(r"^## (\S+)\n\n[^\n]+\n\n```json\n(.*?)\n```", TEXT, re.S | re.M))
SHAPES = {"body": [4, 3], "head": [3], "body.lora_a": [4, 1], "body.lora_b": [1, 3]}
SCALARS = {"hyperparameter", "count", "metric", "weight", "tau"}
FIELDS = {"x": ("float32", ["batch", 4]), "y": ("int64", ["batch"])}


def complete(port: dict[str, Any]) -> dict[str, Any]:
    tensor = str(port.get("tensor", ""))
    shape: list[Any] = next((s for name, s in SHAPES.items() if tensor == name or tensor.endswith(f".{name}")), [])
    dtype = "int64" if port["role"] == "count" else "float32"
    if port["name"] in FIELDS:
        dtype, shape = FIELDS[port["name"]]
    if port["role"] in SCALARS or port.get("kind") == "weight" or tensor == "tau":
        shape = []
    return {"dtype": dtype, "shape": shape, **port}


def canonical(block: dict[str, Any]) -> bytes:
    used = set()
    programs = {}
    for name, program in block["programs"].items():
        sides = {side: [complete(port) for port in program[side]] for side in ("inputs", "outputs")}
        used |= {p["tensor"] for side in sides.values() for p in side if p["role"] in ("parameter", "start")}
        for port in (p for side in sides.values() for p in side):
            if port["role"] == "state" and port.get("init") == 0.0:
                del port["init"]
        programs[name] = {"kind": program["kind"], "file": f"{name}.onnx", **sides}
    zero = "0" * 64
    document = {
        "format": 1, "name": "algorithm", "programs": programs, "schedule": block["schedule"],
        "parameters": [{"name": t, "dtype": "float32", "shape": SHAPES[t], "sha256": zero} for t in sorted(used)],
        "files": {f"{name}.onnx": zero for name in programs} | {"weights.safetensors": zero},
        "limits": {"peak_bytes": 1, "flops_per_example": 1, "upload_bytes": 1},
        "privacy": {"modes": ["secure"], "min_cohort": 3, "threshold": 0.6, "max_clip": 1.0, "max_bits": 16},
    }  # fmt: skip
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def test_all_eight_are_there() -> None:
    assert set(BLOCKS) == {"FedProx", "SCAFFOLD", "FedNova", "FedRep", "FedBN", "Ditto", "LoRA", "DP-SGD"}


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_the_format_expresses(name: str) -> None:
    manifest = decode_manifest(canonical(json.loads(BLOCKS[name])))
    written = {
        port.tensor for program in manifest.programs.values() for port in program.outputs if hasattr(port, "tensor")
    }
    for phase in manifest.schedule:
        assert manifest.programs[phase.program].kind == "train"
    # What the server is to add up must come out of the round, and only declared tensors may be kept.
    assert any(getattr(port, "kind", "") == "delta" for port in manifest.programs["finish"].outputs)
    for program in manifest.programs.values():
        for port in program.inputs:
            lifetime = getattr(port, "lifetime", None)
            if lifetime == "round":
                assert port.tensor in written


def test_every_setting_of_the_server_is_documented() -> None:
    import msgspec

    from archipel.server import Settings

    page = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text()
    rows = {
        name.strip("[]"): default
        for names, default in re.findall(r"^\| (`.+?`) \| (.+?) \|", page, re.M)
        for name in names.split("`")
    }
    fields = msgspec.structs.fields(Settings)
    assert {field.name for field in fields} - {"folder"} <= set(rows)
    for field in fields:
        if isinstance(field.default, float | int) and field.default < 1 << 20 and f"`{field.name}`," not in page:
            shown = str(field.default).lower() if isinstance(field.default, bool) else f"{field.default:g}"
            assert shown in rows[field.name], field.name


def test_every_phase_deadline_is_documented() -> None:
    from archipel.server.rounds.machine import RULES

    page = " ".join((Path(__file__).resolve().parents[2] / "docs" / "tasks.md").read_text().split())
    for phase, rule in RULES.items():
        assert re.search(rf"{phase}[^,;]*? {rule.seconds:g}\b", page), phase
