"""A real server and real agents over HTTP: what lies on the server's disk, and what the sum is."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from archipel.bundle import generate_key, open_bundle, pack
from archipel.bundle.roles import Update
from archipel.cli.start.demo.fleet import Federation
from archipel.cli.start.local.processes import Processes
from archipel.client import Agent, AgentConfig, Event
from archipel.converter import Signing, Training, convert
from archipel.converter.request import DEFAULT_PRIVACY
from archipel.datasets import DigitsByWriter
from archipel.models import digits_cnn
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.messages import Complaints
from archipel.protocol.metrics.training_metrics import training_entries
from archipel.protocol.operator.tasks import RoundInfo
from archipel.protocol.sealed import decode
from archipel.protocol.secagg import Participant
from archipel.protocol.vector import Layout
from archipel.training import losses, optimizers

DEVICES = 12
VANISHING = (3, 7)
BITS, RANGE = 16, 0.5
PIECES = 8


@dataclass
class Seen:
    """What each device knows and must not tell, what it told, and everything that was on the server's disk."""

    arrays: dict[int, Mapping[str, np.ndarray]] = field(default_factory=dict)
    vectors: dict[int, np.ndarray] = field(default_factory=dict)
    masked: dict[int, np.ndarray] = field(default_factory=dict)
    files: dict[str, list[bytes]] = field(default_factory=dict)
    pages: dict[str, set[bytes]] = field(default_factory=dict)
    device_ids: dict[int, str] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    moved: dict[str, np.ndarray] = field(default_factory=dict)
    ports: tuple[Update, ...] = ()
    """Of the update, the weight last; in a vector what the device reports of its training follows."""
    reports: tuple[Update, ...] = ()
    round: RoundInfo | None = None


@pytest.fixture(scope="module")
def seen(few_writers: DigitsByWriter, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """One secure round of twelve agents, two of which vanish after sharing keys, before they upload."""
    folder = tmp_path_factory.mktemp("federation")
    seen = Seen()
    who = threading.local()
    with pytest.MonkeyPatch.context() as patch:
        encode, mask = Layout.encode, Participant.mask

        def recording_encode(self: Layout, arrays: Mapping[str, np.ndarray], **options: int) -> np.ndarray:
            seen.arrays[who.index] = {name: array.copy() for name, array in arrays.items()}
            vector = encode(self, arrays, **options)
            seen.vectors[who.index] = vector.copy()
            return vector

        def recording_mask(self: Participant, vector: np.ndarray, inbox: Complaints) -> np.ndarray:
            masked = mask(self, vector, inbox)
            seen.masked[who.index] = masked.copy()
            return masked

        patch.setattr(Layout, "encode", recording_encode)
        patch.setattr(Participant, "mask", recording_mask)
        processes = Processes(folder)
        try:
            run_round(seen, who, few_writers, folder, processes)
        finally:
            processes.close()
    return seen


def run_round(seen: Seen, who: threading.local, digits: DigitsByWriter, folder: Path, processes: Processes) -> None:
    key = generate_key()
    bundle = convert(
        digits_cnn(seed=0), folder / "digits", example=np.zeros((2, 1, 28, 28), np.float32),
        training=Training(losses.cross_entropy(), optimizers.sgd(),
                          strategy_options={"clip": 1.0, "value_range": RANGE, "bits": BITS}, batch_size=10),
        privacy=msgspec.structs.replace(DEFAULT_PRIVACY, min_cohort=6, colluders=0.2), signing=Signing(key),
    )  # fmt: skip
    pack(bundle.folder, folder / "digits.bundle")
    seen.parameters = {name: np.array(values) for name, values in bundle.parameters().items()}
    finish = bundle.program("finish")
    seen.ports = tuple(port for port in finish.outputs if isinstance(port, Update))
    seen.reports = training_entries(bundle.manifest, finish, seen.ports)
    federation = Federation(folder, processes, key.public_key().public_bytes_raw())
    stop = threading.Event()
    disk = threading.Lock()

    def device(index: int, writer: int) -> None:
        who.index = index
        own = digits.of([writer]).take(np.arange(20 + index))
        plugged_in = [True]

        def on_event(event: Event) -> None:
            if event.name == "enrolled":
                seen.device_ids[index] = event.device_id
            if event.name == "masked" and index in VANISHING:
                plugged_in[0] = False
            if event.name in ("uploaded", "unmasked"):
                with disk:
                    keep_disk(seen, federation.data_folder)

        agent = Agent(
            AgentConfig(folder=folder / "devices" / str(index), isolated=False, resume_within=0.2),
            examples=lambda: {"input": own.inputs(), "label": own.targets()},
            on_event=on_event,
            conditions=lambda: plugged_in[0],
        )
        with agent:
            agent.enrol(decode("token", federation.mint(), EnrolmentToken))
            agent.run_forever(stop)

    writers = digits.writers_in([4])[:DEVICES]
    threads = [threading.Thread(target=device, args=pair, daemon=True) for pair in enumerate(writers)]
    for thread in threads:
        thread.start()
    federation.devices = dict.fromkeys(map(str, writers))
    task = federation.create_task(folder / "digits.bundle", rounds=1, threshold=9, min_cohort=8, lr=0.2)
    deadline = time.monotonic() + 60
    while federation.operator.tasks.get(task).state == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join(timeout=10)
    (seen.round,) = federation.operator.tasks.rounds(task)
    assert seen.round.weights_out is not None, seen.round.reason
    seen.moved = federation.operator.weights.read(seen.round.weights_out)
    keep_disk(seen, federation.data_folder)
    assert open_bundle(folder / "digits", [key.public_key().public_bytes_raw()]).digest == bundle.digest


def keep_disk(seen: Seen, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        try:
            data = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:
            continue  # a spooled update that was just folded
        versions = seen.files.setdefault(str(path.relative_to(folder)), [])
        if path.name.startswith("archipel.db"):
            # One copy of every page: the rest of the database is the same from one look to the next.
            known = seen.pages.setdefault(path.name, set())
            pages = [data[at : at + 4096] for at in range(0, len(data), 4096)]
            data = b"".join(page for page in pages if page not in known)
            known.update(pages)
        if data and data not in versions:
            versions.append(data)


def survivors(seen: Seen) -> list[int]:
    assert seen.round is not None
    index_of = {device_id: index for index, device_id in seen.device_ids.items()}
    return sorted(index_of[device_id] for device_id in seen.round.survivors)


def representations(vector: np.ndarray, arrays: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Every form that a single update could lie around in."""
    raw = vector.astype("<u4").view(np.uint8).reshape(-1, 4)
    flat = np.concatenate([np.ravel(array) for array in arrays.values()])
    return {
        "packed": raw[:, :3].tobytes(),
        "uint32": raw.tobytes(),
        "int64": vector.astype("<i8").tobytes(),
        "float32": flat.astype("<f4").tobytes(),
        "float64": flat.astype("<f8").tobytes(),
        "packed, big-endian": raw[:, 2::-1].tobytes(),
    }


def traces(data: bytes, haystack: bytes) -> int:
    """How many of PIECES pieces of `data`, each with enough of its own to be no coincidence, occur in `haystack`."""
    pieces = [data[at : at + 96] for at in np.linspace(0, len(data) - 96, 2000, dtype=int)]
    telling = [piece for piece in pieces if len(set(piece)) > 8][:PIECES]
    assert len(telling) == PIECES
    return sum(piece in haystack for piece in telling)


@pytest.mark.sampled(every=8)
def test_everything_was_on_disk_that_should_be(seen: Seen) -> None:
    names = set(seen.files)
    assert {"archipel.db", "requests.log", "server.toml", "server.key"} <= names
    assert sum("updates" in name for name in names) >= DEVICES - len(VANISHING)
    assert seen.round is not None
    assert any(seen.round.round_id in data.decode() for data in seen.files["requests.log"])


@pytest.mark.sampled(every=8)
def test_masked_updates_can_be_found(seen: Seen) -> None:
    """The search below finds what is there: the masked vectors lie in the spool, as they were sent."""
    everything = b"\0".join(data for versions in seen.files.values() for data in versions)
    for index in survivors(seen):
        forms = representations(seen.masked[index], seen.arrays[index])
        assert traces(forms["packed"], everything) == PIECES


@pytest.mark.sampled(every=4)
def test_no_single_update_is_on_disk_unmasked(seen: Seen) -> None:
    everything = b"\0".join(data for versions in seen.files.values() for data in versions)
    assert len(seen.vectors) == DEVICES
    for index, vector in seen.vectors.items():
        for name, data in representations(vector, seen.arrays[index]).items():
            assert traces(data, everything) == 0, f"device {index}: its update lies there as {name}"


def test_masked_vectors_say_nothing_about_the_update(seen: Seen) -> None:
    """Uniform modulo 2^24: the chi-square statistic of the top byte stays within its 1 - 1e-6 quantile."""
    for index in survivors(seen):
        counts = np.bincount(seen.masked[index] >> 16, minlength=256)
        expected = len(seen.masked[index]) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 372  # chi-square, 255 degrees of freedom
        plain = np.bincount(seen.vectors[index] >> 16, minlength=256)
        assert ((plain - expected) ** 2 / expected).sum() > 10_000


def test_two_vanished_and_the_sum_is_exact(seen: Seen) -> None:
    """From the devices' own vectors, in integers: the new model is the old one plus the weighted mean, bit for bit."""
    assert survivors(seen) == [index for index in range(DEVICES) if index not in VANISHING]
    total = np.zeros(len(seen.vectors[0]), np.int64)
    for index in survivors(seen):
        signed = seen.vectors[index].astype(np.int64)
        total += np.where(signed >= 1 << 23, signed - (1 << 24), signed)
    largest = 2 ** (BITS - 1) - 1
    reported = total[-len(seen.reports) :]
    total = total[: -len(seen.reports)]
    weight = total[-1] * 1.0 / largest
    assert seen.round is not None
    assert seen.round.weight_sum == weight
    assert weight == pytest.approx(sum(min(20 + index, 100) / 100 for index in survivors(seen)), abs=DEVICES / largest)
    at = 0
    for port in seen.ports[:-1]:
        old = seen.parameters[port.tensor]
        delta = total[at : at + old.size].reshape(old.shape) * (RANGE / largest)
        expected = (old + 1.0 / weight * delta).astype(np.float32)
        np.testing.assert_array_equal(seen.moved[port.tensor], expected)
        assert np.abs(delta).max() > 0
        at += old.size
    assert at == len(total) - 1
    # The round tells the mean of the loss that the devices measured, and how many clipped. None has over 100 examples.
    metrics = seen.round.result.metrics if seen.round.result is not None else {}
    sums = {port.name: value for port, value in zip(seen.reports, reported.tolist(), strict=True)}
    loss = sums["archipel/training/loss"] * 64.0 / largest / weight
    assert metrics["training loss"] == pytest.approx(loss, rel=1e-9)
    assert seen.round.result is not None
    assert (seen.round.result.clipped, seen.round.result.capped) == (sums["archipel/devices/update/clipped"], 0)


def test_the_plain_updates_agree_with_the_fixed_point_ones(seen: Seen) -> None:
    """What was summed is what the graphs computed, to half a step of the encoding."""
    for index in survivors(seen):
        ports = (*seen.ports, *seen.reports)
        flat = np.concatenate([np.ravel(seen.arrays[index][port.name]) for port in ports])
        signed = seen.vectors[index].astype(np.int64)
        signed = np.where(signed >= 1 << 23, signed - (1 << 24), signed)
        steps = np.concatenate(
            [np.full(int(np.prod(port.shape)), port.range / (2 ** (port.bits - 1) - 1)) for port in ports]
        )
        assert np.all(np.abs(flat - signed * steps) <= 0.5001 * steps)
