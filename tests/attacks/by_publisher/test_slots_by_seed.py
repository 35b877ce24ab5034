"""A publisher and a server together give every device a place of its own in the sum, and read single examples there.

Who: a publisher who signs graphs that use `seed`, and the server, which makes the plans. What they want: one example of
each device, though only the sum of all is revealed. How: `seed` differed from device to device and followed from what
the server knows, so a graph could put a device's example into the slot that its seed names, and the server knew whose
slot is whose. What stops them: `analyze` has no `seed`, and elsewhere it follows from a secret of the device.

What remains, shown at the end: slots chosen by the noise or by the data itself. Nobody can tell whose they are, but
with few devices and many slots each example stands alone. The owner bounds how long a vector may be; only noise ends
it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

from archipel import bundle as b
from archipel.bundle import roles
from archipel.client.memory.keystore import FileKeys, data_key
from archipel.client.memory.seeds import RoundSeeds
from archipel.errors import BundleError
from archipel.lite_runtime import Runtime
from archipel.protocol.sealed import public_bytes
from tests.attacks.owner_bundles import WIDTH, slots_bundle
from tests.support.federation import Federation
from tests.support.fixtures.federation import federation, server_host  # noqa: F401

SLOTS = 1024
EXAMPLES = np.random.default_rng(0).uniform(-1, 1, (10, 1, WIDTH)).astype(np.float32)
"""One of each of ten devices."""

ENTRIES = 4096
_TRAIN = f"""<ir_version: 10, opset_import: ["": 21]>
train (float[n, 3] x, float[{ENTRIES}] w) => (float[{ENTRIES}] w_new, float loss) {{
    loss = ReduceMean <keepdims = 0> (x)
    w_new = Identity(w)
}}"""
_FINISH = f"""<ir_version: 10, opset_import: ["": 21]>
finish (float[{ENTRIES}] w, uint32 seed) => (float[{ENTRIES}] dw, float weight) {{
    slots = Constant <value = uint32 {{{ENTRIES}}}> ()
    place = Mod(seed, slots)
    number = Cast <to = 7> (place)
    first = Constant <value_ints = [0]> ()
    wide = Unsqueeze(number, first)
    depth = Cast <to = 7> (slots)
    values = Constant <value_floats = [0.0, 1.0]> ()
    row = OneHot(wide, depth, values)
    dw = Squeeze(row, first)
    weight = Constant <value_float = 1.0> ()
}}"""


def places(vector: np.ndarray) -> np.ndarray:
    """The sum of ten devices' vectors, slot by slot."""
    return vector.reshape(-1, WIDTH)


def test_a_bundle_whose_analysis_knows_the_seed_is_not_opened(tmp_path: Path) -> None:
    key = b.generate_key()
    folder = slots_bundle(tmp_path / "census", key, slots=SLOTS, way="seed")
    with pytest.raises(BundleError, match=r"look.*seed"):
        b.open_bundle(folder, [public_bytes(key)])


def foretold(plan: str, device_id: str) -> int:
    """The seed as server and publisher could reckon it: from what both know."""
    return int.from_bytes(hashlib.sha256(f"archipel/v1/seed\0{plan}{device_id}".encode()).digest()[:4], "big")


@pytest.mark.sampled(every=4)
def test_the_server_cannot_foretell_a_seed_of_training(federation: Federation) -> None:  # noqa: F811
    """Over HTTP: `finish` marks the slot of the seed. Slots are used, but not those that the server reckons."""
    f32: dict[str, Any] = {"dtype": "float32"}
    w = roles.Parameter(name="w", tensor="w", shape=(ENTRIES,), **f32)
    update: dict[str, Any] = {"weighting": "uniform", "range": 4.0, "bits": 20, **f32}
    programs = {
        "train": b.Program(
            kind="train", file="train.onnx", inputs=(roles.Example(name="x", shape=("n", 3), **f32), w),
            outputs=(
                roles.Parameter(name="w_new", tensor="w", shape=(ENTRIES,), **f32),
                roles.Metric(name="loss", shape=(), reduction="mean", **f32),
            ),
        ),
        "finish": b.Program(
            kind="finish", file="finish.onnx",
            inputs=(w, roles.Seed(name="seed", dtype="uint32", shape=())),
            outputs=(
                roles.Update(name="dw", tensor="w", kind="delta", shape=(ENTRIES,), clip=2.0, **update),
                roles.Update(name="weight", tensor="weight", kind="weight", shape=(), lowest=1.0, **update),
            ),
        ),
    }  # fmt: skip
    start = {"w": np.zeros(ENTRIES, np.float32)}
    b.write_bundle(
        federation.folder / "marked", name="marked", programs=programs,
        graphs={f"{name}.onnx": parser.parse_model(text).SerializeToString()
                for name, text in (("train", _TRAIN), ("finish", _FINISH))},
        weights=b.write_weights(start), parameters=b.parameter_specs(start, ["w"]),
        limits=b.Limits(peak_bytes=1 << 20, flops_per_example=1, upload_bytes=1 << 15),
        privacy=b.PrivacyPolicy(
            modes=("secure",), min_cohort=3, threshold=0.6, max_clip=2.0, max_bits=20, colluders=0.0
        ),
        key=federation.publisher_key, schedule=(b.Phase(program="train", epochs=1, batch_size=8),), strategy="fedavg",
    )  # fmt: skip
    federation.bundle_file = federation.folder / "marked.bundle"
    b.pack(federation.folder / "marked", federation.bundle_file)
    agents = [federation.agent(number) for number in range(3)]
    task = federation.task(cohort=3, threshold=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    done = federation.wait(task)
    assert done.state == "completed", [e.detail for e in federation.events if e.name == "refused"][:2]
    [info] = federation.rounds(task)
    plan = federation.plan_digest(info.round_id)
    used = set(np.flatnonzero(np.abs(federation.operator.weights.read(info.weights_out)["w"]) > 0.1).tolist())
    assert used == {RoundSeeds(data_key(FileKeys(a.config.folder))).derive(plan) % ENTRIES for a in agents}
    assert used != {foretold(plan, agent.device_id) % ENTRIES for agent in agents}


def test_seeds_are_the_same_again_and_different_for_every_plan_and_device() -> None:
    one, other = RoundSeeds(b"\x01" * 32), RoundSeeds(b"\x02" * 32)
    plans = [f"{number:064x}" for number in range(64)]
    assert [one.derive(plan) for plan in plans] == [RoundSeeds(b"\x01" * 32).derive(plan) for plan in plans]
    assert len({*map(one.derive, plans), *map(other.derive, plans)}) == 128
    # RFC 5869 by hand: HMAC-SHA256(HMAC-SHA256(salt, secret), label | 0x01), the first four bytes.
    import hmac

    middle = hmac.digest(plans[5].encode(), b"\x01" * 32, "sha256")
    expected = hmac.digest(middle, b"archipel/agent/1/seed\x01", "sha256")[:4]
    assert one.derive(plans[5]) == int.from_bytes(expected, "big")


@pytest.mark.parametrize("way", ["noise", "data"])
def test_what_remains_slots_that_nobody_can_reckon(tmp_path: Path, way: str) -> None:
    """Not stopped here: eight or more of ten examples stand alone in the sum, though nobody knows whose each is."""
    key = b.generate_key()
    folder = slots_bundle(tmp_path / "census", key, slots=SLOTS, way=way)
    runtime = Runtime(b.open_bundle(folder, [public_bytes(key)]))
    total = sum(runtime.analyze({"x": example})[0]["places"].astype(np.float64) for example in EXAMPLES)
    seen = places(np.asarray(total))
    read = sum(bool((np.abs(seen - example).max(axis=1) < 1e-6).any()) for example in EXAMPLES[:, 0])
    assert read >= 8
