"""The owner's view is computed from the journal: what counts as sent, hidden, seen; what it does not claim to know."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.bundle import roles
from archipel.cli.device_owner import _lines
from archipel.client.conditions import Conditions
from archipel.client.folder import lock_folder
from archipel.client.journal import KEPT_ROUNDS, Entry
from archipel.client.owner_view import look, now, running, spent, totals
from archipel.errors import ClientError
from archipel.protocol.sealed import encode, public_bytes
from tests.client.conftest import LOOK, make_bundle

TASK = "1" * 32


def entry(number: int, **changes: Any) -> Entry:
    values: dict[str, Any] = {
        "round_id": f"{number:032x}", "task_id": TASK, "number": number, "plan": "a" * 64, "bundle": "b" * 64,
        "step": "closed", "started": 1000.0 + number, "changed": 1000.0, "masked": "c" * 64, "result": "took_part",
        "sent": 10, "received": 3, "model": "linear", "cohort": 5,
    }  # fmt: skip
    return Entry(**{**values, **changes})


def test_what_was_spent(tmp_path: Path) -> None:
    entries = [
        entry(0, cohort=9),
        entry(1, cohort=4),
        entry(2, cohort=7),
        entry(3, cohort=5),
        entry(4, cohort=0),  # it was not told
        entry(5, result="dropped"),  # the masked update was sent, and may be in the sum
        entry(6, result="dropped", masked=None, sent=1),  # left before
        entry(7, result="refused", masked=None, sent=0),
        entry(8, privacy="plain", cohort=0),
        entry(9, privacy="plain", result="dropped", cohort=0),  # the server saw it all the same
        entry(10, step="masked", result=""),  # under way
        entry(11, kind="analytics", cohort=6),
    ]
    training, analytics = spent(entries, tmp_path, [])
    assert (training.task_id, training.model, training.kind) == (TASK, "linear", "training")
    assert (training.secure, training.smallest, training.median, training.untold) == (5, 4, 5, 1)
    assert (training.plain, training.unsure) == (2, 2)
    assert (training.sent, training.received) == (90, 27)
    assert (analytics.kind, analytics.secure, analytics.smallest, analytics.median) == ("analytics", 1, 6, 6)
    assert {training.noise, analytics.noise} == {"unknown"}
    found = totals(entries)
    assert (found.rounds, found.took_part, found.dropped, found.refused, found.open) == (12, 7, 3, 1, 1)
    assert (found.sent, found.since, found.complete) == (101, 1000.0, True)
    assert not totals([entry(number) for number in range(KEPT_ROUNDS)]).complete


def test_nothing_sent_is_nothing_spent(tmp_path: Path) -> None:
    assert spent([entry(0, result="refused", masked=None), entry(1, result="dropped", masked=None)], tmp_path, []) == []


def noisy(folder: Path, key: Ed25519PrivateKey) -> str:
    """A bundle whose analysis adds noise. Returns its digest."""
    f32: dict[str, Any] = {"dtype": "float32"}
    y = roles.Label(name="y", shape=("n",), **f32)
    noise = roles.Noise(name="z", shape=(), distribution="discrete_gaussian", scale=3.0, **f32)
    total = roles.Update(
        name="total", tensor="y/sum", kind="value", weighting="uniform", range=8.0, bits=16, shape=(), **f32
    )
    b.write_bundle(
        folder / "new", name="noisy", key=key, graphs={"look.onnx": LOOK.encode()}, weights=b.write_weights({}),
        programs={"look": b.Program(kind="analyze", file="look.onnx", inputs=(y, noise), outputs=(total,))},
        parameters=(), statistics=(b.Statistic(name="y", kind="sum", program="look"),),
        limits=b.Limits(peak_bytes=1, flops_per_example=1, upload_bytes=1),
        privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=16),
    )  # fmt: skip
    digest = b.open_bundle(folder / "new", [public_bytes(key)]).digest
    (folder / "new").rename(folder / digest)
    return digest


def test_noise_is_what_the_signed_bundle_says(tmp_path: Path) -> None:
    key = b.generate_key()
    with_noise = noisy(tmp_path, key)
    make_bundle(tmp_path / "plain", key)
    without = b.open_bundle(tmp_path / "plain", [public_bytes(key)]).digest
    (tmp_path / "plain").rename(tmp_path / without)

    trusted = [public_bytes(key)]

    def noise(*digests: str, keys: Any = trusted, kind: Any = "analytics") -> str:
        [found] = spent([entry(n, bundle=digest, kind=kind) for n, digest in enumerate(digests)], tmp_path, keys)
        return found.noise

    assert noise(with_noise) == "added"
    assert noise(with_noise, kind="training") == "none"  # it is the analysis that draws
    assert noise(without) == "none"
    assert noise(with_noise, without) == "partly"
    assert noise(with_noise, "d" * 64) == "unknown"
    assert noise(with_noise, keys=[public_bytes(b.generate_key())]) == "unknown"


class Broken:
    name = "broken"

    def value(self) -> float:
        raise OSError("no such sensor")

    def why_not(self) -> str:
        raise OSError("no such sensor")


class Absent(Broken):
    name = "battery"

    def why_not(self) -> str:
        return ""


class Hot(Broken):
    name = "temperature"

    def value(self) -> float:
        return 81.25

    def why_not(self) -> str:
        return "81.2 degrees, above 70"


def test_conditions_that_fail_do_not_hold() -> None:
    broken, absent, hot = now(Conditions([Broken(), Absent(), Hot()]))
    assert (broken.value, broken.holds) == (None, False)
    assert "no such sensor" in broken.why_not
    assert (absent.value, absent.holds, absent.why_not) == (None, True, "")
    assert (hot.value, hot.holds, hot.why_not) == (81.25, False, "81.2 degrees, above 70")


def test_lines_for_people(tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    for each in (
        entry(1),
        entry(2, privacy="plain", result="dropped", reason="the round failed: too\x1b few\ndevices"),
    ):
        (tmp_path / "rounds" / f"{each.round_id}.json").write_bytes(encode(each))
    lines = list(_lines(look(tmp_path, Conditions([Hot()]))))
    assert "temperature  81.25  no: 81.2 degrees, above 70" in lines
    began = next(line for line in lines if line.startswith("1970-01-01 00:16:42Z"))
    assert began.split()[2:8] == ["11111111", "training", "plain", "0", "10", "3"]
    assert began.endswith("the round failed: too? few?devices")
    assert any(line.startswith("rounds      2 since 1970-01-01 00:16:41Z: 1 took part, 1 dropped") for line in lines)
    row = next(line for line in lines if line.startswith("11111111  linear"))
    assert re.split("  +", row)[2:] == ["training", "1", "5 at least, median 5", "1", "0", "20", "unknown"]
    assert lines[-1].startswith("noise: not known")


@pytest.mark.parametrize("name", ["device.json", "rounds/" + "0" * 32 + ".json", "models/linear/state.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(ClientError, match=f"{name}: damaged"):
        look(tmp_path)
    (tmp_path / name).write_bytes(b"{" * (1 << 17))
    with pytest.raises(ClientError, match=f"{name}: more than 65536 bytes"):
        look(tmp_path)


def test_running_is_who_holds_the_lock(tmp_path: Path) -> None:
    assert running(tmp_path) is False
    handle = lock_folder(tmp_path)
    assert running(tmp_path) is True
    os.close(handle)
    assert running(tmp_path) is False
