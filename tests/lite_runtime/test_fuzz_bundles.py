"""Hostile bundles, also such as a trusted key signed: only documented errors, no crash, bounded memory and time."""

from __future__ import annotations

import hashlib
import json
import random
import select
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import convert, training
from archipel.bundle import generate_key, pack
from archipel.converter import Signing, Training

WORKER = Path(__file__).parent / "fuzz_worker.py"
CORPUS = Path(__file__).parent / "corpus" / "bundles"
SECONDS = 20.0

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def key() -> Ed25519PrivateKey:
    return generate_key()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, key: Ed25519PrivateKey) -> Files:
    """The files of a small bundle with every kind of program that a conversion makes."""
    folder = tmp_path_factory.mktemp("good") / "bundle"
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Dropout(0.1), torch.nn.Linear(18, 3),
    )  # fmt: skip
    convert(
        net, folder, example=torch.zeros(2, 1, 6, 6),
        training=Training(training.losses.cross_entropy(), training.optimizers.sgd(momentum=0.9)), signing=Signing(key),
    )  # fmt: skip
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Worker:
    """A process that uses bundles. A dead one is a finding, and the next bundle gets a new one."""

    def __init__(self, key: Ed25519PrivateKey, folder: Path) -> None:
        self._arguments = [key.public_key().public_bytes_raw().hex(), str(folder / "cache")]
        self._start()

    def use(self, path: Path) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        line = self._line()
        if line == "ok" or line.startswith("refused "):
            return line
        finding = f"{line or 'died'}: {self.close()}"
        self._start()
        return finding

    def close(self) -> str:
        self.process.kill()
        _, err = self.process.communicate()
        return f"{self.process.returncode} {err[-3000:]}"

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), *self._arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:
            return f"still busy after {SECONDS} s"
        return self.process.stdout.readline().rstrip("\n")


def sign(files: Files, key: Ed25519PrivateKey) -> Files:
    """Digests and signature made right again after a change. A manifest that is no JSON object is signed as it is."""
    try:
        manifest = json.loads(files["manifest.json"])
        for name in manifest["files"]:
            if name in files:
                manifest["files"][name] = hashlib.sha256(files[name]).hexdigest()
        files = {**files, "manifest.json": json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()}
    except (ValueError, KeyError, TypeError):
        pass
    return {**files, "manifest.sig": key.sign(files["manifest.json"])}


def scramble(data: bytes, rng: random.Random, start: int = 0, stop: int | None = None) -> bytes:
    """A few flips, or a piece cut out, doubled, moved, or replaced by something extreme."""
    broken = bytearray(data)
    stop = len(data) if stop is None else min(stop, len(data))
    at = rng.randrange(start, max(stop, start + 1))
    size = rng.choice([1, 1, 2, 4, 8, 16, 64])
    match rng.randrange(6):
        case 0 | 1:
            for _ in range(rng.choice([1, 1, 2, 5])):
                broken[rng.randrange(start, max(stop, start + 1)) % len(broken)] ^= 1 << rng.randrange(8)
        case 2:
            del broken[at : at + size]
        case 3:
            broken[at:at] = broken[at : at + size]
        case 4:
            broken[at : at + size] = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80"]) * size
        case 5:
            broken[at : at + size] = rng.randbytes(size)
    return bytes(broken)


def change_json(value: Any, rng: random.Random) -> Any:
    """Another value somewhere in a JSON document."""
    extreme = [None, True, -1, 0, 1, 2**31, 2**63, 1e308, "", "../x", "a" * 300, [], {}, [[]], 0.5]
    if isinstance(value, dict) and value and rng.random() < 0.93:
        name = rng.choice(sorted(value))
        match rng.randrange(12):
            case 0:
                return {other: each for other, each in value.items() if other != name}
            case 1:
                return {**value, rng.choice(["x", name + "x", "role", "tensor", "steps"]): rng.choice(extreme)}
            case 2:
                return {**value, name: value[rng.choice(sorted(value))]}
            case _:
                return {**value, name: change_json(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], change_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(extreme)


def in_archive(files: Files, key: Ed25519PrivateKey, rng: random.Random, folder: Path) -> Path:
    path = write(files, folder)
    pack(path, folder / "x.bundle")
    data = (folder / "x.bundle").read_bytes()
    # The structure is in the first local headers and at the end.
    near = rng.random() < 0.5
    broken = scramble(data, rng, 0, 80) if near else scramble(data, rng, max(0, len(data) - 700))
    (folder / "x.bundle").write_bytes(broken)
    return folder / "x.bundle"


def in_manifest(files: Files, key: Ed25519PrivateKey, rng: random.Random, folder: Path) -> Path:
    if rng.random() < 0.2:
        files = {**files, "manifest.json": scramble(files["manifest.json"], rng)}
        return write({**files, "manifest.sig": key.sign(files["manifest.json"])}, folder)
    manifest = json.loads(files["manifest.json"])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        manifest = change_json(manifest, rng)
    return write(sign({**files, "manifest.json": json.dumps(manifest).encode()}, key), folder)


def in_weights(files: Files, key: Ed25519PrivateKey, rng: random.Random, folder: Path) -> Path:
    weights = files["weights.safetensors"]
    header = 8 + int.from_bytes(weights[:8], "little")
    return write(sign({**files, "weights.safetensors": scramble(weights, rng, 0, header)}, key), folder)


def in_graph(files: Files, key: Ed25519PrivateKey, rng: random.Random, folder: Path) -> Path:
    name = rng.choice(sorted(name for name in files if name.endswith(".onnx")))
    data = files[name]
    for _ in range(rng.choice([1, 1, 2, 4])):
        data = scramble(data, rng)
    return write(sign({**files, name: data}, key), folder)


def write(files: Files, folder: Path) -> Path:
    target = folder / "bundle"
    target.mkdir()
    for name, data in files.items():
        (target / name).write_bytes(data)
    return target


KINDS: dict[str, Callable[[Files, Any, random.Random, Path], Path]] = {
    "archive": in_archive, "manifest": in_manifest, "weights": in_weights, "graph": in_graph,
}  # fmt: skip


@pytest.fixture
def worker(key: Ed25519PrivateKey, tmp_path: Path) -> Iterator[Worker]:
    found = Worker(key, tmp_path)
    yield found
    found.close()


@pytest.mark.sampled(every=4)
def test_the_worker_uses_a_good_bundle(good: Files, worker: Worker, tmp_path: Path) -> None:
    assert worker.use(write(good, tmp_path)) == "ok"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cases", [60, pytest.param(2500, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=6)
def test_mutated_bundles(
    good: Files, key: Ed25519PrivateKey, worker: Worker, tmp_path: Path, kind: str, cases: int
) -> None:
    seen: Counter[str] = Counter()
    findings = []
    for seed in range(cases):
        folder = tmp_path / "case"
        folder.mkdir()
        result = worker.use(KINDS[kind](good, key, random.Random(f"{kind} {seed}"), folder))
        seen[result.partition(":")[0]] += 1
        if result != "ok" and not result.startswith("refused "):
            findings.append(f"{kind} {seed}: {result}")
        shutil.rmtree(folder)
    assert not findings, "\n".join(findings[:5])
    assert sum(number for result, number in seen.items() if result.startswith("refused")) > cases // 4, seen


def test_the_kept_corpus(good: Files, key: Ed25519PrivateKey, worker: Worker, tmp_path: Path) -> None:
    """Files are called KIND-ERROR-NUMBER@NAME, NAME being the bundle's file that they replace, or are whole bundles."""
    cases = sorted(CORPUS.iterdir())
    assert len(cases) >= 8
    for case in cases:
        (tmp_path / case.name).mkdir()
        name = case.name.partition("@")[2]
        files = {**good, name: case.read_bytes()}
        if name == "manifest.json":
            # Bundles may have more files today than that manifest knows.
            known = {name, "manifest.sig", *json.loads(files[name])["files"]}
            files = {other: data for other, data in files.items() if other in known}
        path = write(sign(files, key), tmp_path / case.name) if name else case
        expected = case.name.split("-")[1]
        assert worker.use(path).startswith(f"refused {expected}"), case.name
