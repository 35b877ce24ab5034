"""What every strategy must do, whoever wrote it: one test over the registry for each rule."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipel
from archipel import strategies
from archipel.bundle import Bundle, read_weights, role_of, write_weights
from archipel.bundle.roles import Broadcast
from archipel.compression import StaticInt8
from archipel.converter import Compression
from archipel.errors import ArchipelError, ConversionError
from archipel.lite_runtime import DeviceState, LocalUpdate, Runtime
from archipel.protocol.vector import DecodedSum, Layout
from archipel.strategies.device import describe
from archipel.strategies.strategy import Strategy
from tests.support.simulation import added_up, clients, first_state, imported, normalized, ports, server_step

pytestmark = pytest.mark.sampled(every=6)

Make = Callable[..., Bundle]
Of = Callable[[Strategy], Bundle]
Updates = Callable[[Strategy], list[dict[str, np.ndarray]]]

NEEDED: dict[str, dict[str, Any]] = {"fedrep": {"personal": "head.*"}, "fedper": {"personal": "head.*"}}
"""Options without a default."""
WRONG: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": -1.0},
    "fedasync": {"mu": -1.0},
    "feddistill": {"strength": -1.0},
    "scaffold": {"control_clip": 0.0, "control_range": "wide"},
    "fednova": {"step_cap": 0},
    "fedrep": {"personal_epochs": 0, "personal": 3},
    "fedbn": {"personal": [3]},
    "ditto": {"strength": float("nan"), "personal_epochs": 1.5},
    "fedper": {"personal": 3},
    "feddyn": {"alpha": 0.0},
    "fedsgd": {"momentum": 1.0},
    "perfedavg": {"inner_lr": 0.0},
    "moon": {"features": 3, "strength": 0.0, "temperature": -0.5},
    "pfedme": {"strength": -1.0, "local_lr": 0.0, "inner_steps": 0},
    "lora": {"rank": 0, "alpha": 0.0, "targets": 1, "full": None, "seed": -1},
    "qfedavg": {"q": -1.0, "loss_cap": 0.0},
    "ifca": {"models": 1, "spread": 0.0, "seed": -1},
    "dpsgd": {"example_clip": 0.0, "noise_multiplier": -0.1},
}
REFERENCES = {
    "test_rounds.py": ("fedavg", "fedprox", "scaffold", "feddyn", "fedsgd", "reptile", "fednova"),
    "test_personal_rounds.py": ("perfedavg", "pfedme", "moon", "fedper", "fedrep", "fedbn", "ditto"),
    "test_server_optimizers.py": ("fedavgm", "fedexp"),
    "test_qfedavg.py": ("qfedavg",),
    "test_dpsgd.py": ("dpsgd",),
}
"""Three rounds against the paper's steps in PyTorch: the test is called test_NAME."""
OTHER_REFERENCES = {
    "lora": ("test_lora.py", "test_lora_on_a_gemm_and_a_conv"),
    "ifca": ("test_ifca.py", "test_three_rounds"),
    "feddistill": ("test_feddistill.py", "test_three_rounds"),
    "fedasync": ("test_fedasync.py", "test_each_update_is_mixed_in_when_it_comes"),
    **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), ("test_server_optimizers.py", "test_adaptive")),
}
BY_LOSS = {"qfedavg"}
"""Their devices weigh as much as their loss says, whatever the number of examples."""
BY_CLASS = {"feddistill"}
"""Their devices weigh each class by itself, so that less than the clip is left of the whole update."""
RATES = {"fedsgd": 0.5}
"""Of a strategy that makes fewer steps than others in a round."""
CLIP, CAP, BITS = 1e-3, 10, 20

every = pytest.mark.parametrize("strategy", strategies.STRATEGIES.values(), ids=lambda s: s.name)


def build(make: Make, strategy: Strategy, options: dict[str, Any] | None = None, **changes: Any) -> Bundle:
    options = options or {"clip": CLIP, "weight_cap": CAP, "bits": BITS, **NEEDED.get(strategy.name, {})}
    # BatchNormalization has no gradient of one example, and several models would have statistics of several kinds.
    step = {"batch_norm": "frozen"} if strategy.name in ("dpsgd", "moon", "ifca") else {}
    if strategy.name == "fedsgd":  # its one step is on all examples
        changes = {"batch_size": 32, **changes}
    return make(strategy.name, normalized, strategy_options=options, step_options=step, **changes)


@pytest.fixture(scope="module")
def bundle_of(make: Make) -> Callable[[Strategy], Bundle]:
    by_name = cache(lambda name: build(make, strategies.get(name)))
    return lambda strategy: by_name(strategy.name)


def local_round(bundle: Bundle, client: int = 3, state: DeviceState | None = None, **hyper: float) -> LocalUpdate:
    strategy = strategies.get(bundle.manifest.strategy)
    broadcast = strategy.broadcast(first_state(bundle))
    (x, y), noise = clients()[client], np.random.default_rng(1).bytes
    device = Runtime(bundle, state=state)
    return device.local_round(x, y, seed=1, broadcast=broadcast, hyperparameters=hyper, randomness=noise)


@pytest.fixture(scope="module")
def updates_of(bundle_of: Of) -> Callable[[Strategy], list[dict[str, np.ndarray]]]:
    """What the four clients upload in a first round."""
    by_name = cache(
        lambda name: [local_round(bundle_of(strategies.get(name)), client=client).arrays for client in range(4)]
    )
    return lambda strategy: by_name(strategy.name)


def summed(bundle: Bundle, updates: list[dict[str, np.ndarray]]) -> DecodedSum:
    """Through the fixed-point encoding, as in a secure round."""
    layout, cohort = Layout.of(bundle.program("finish")), len(updates)
    bits = layout.modulus_bits(cohort)
    total = np.zeros(layout.length, np.uint32)
    for arrays in updates:
        total += layout.encode(arrays, modulus_bits=bits, max_cohort=cohort)
    return layout.decode_sum(total & np.uint32(2**bits - 1), cohort=cohort, modulus_bits=bits)


def norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in arrays)))


@every
@pytest.mark.sampled(every=6)
def test_the_update_is_clipped_and_weighted_on_the_device(bundle_of: Of, strategy: Strategy) -> None:
    bundle = bundle_of(strategy)
    uploads = ports(bundle.program("finish"))
    by_kind = {kind: [port for port in uploads if port.kind == kind] for kind in ("delta", "weight", "value")}
    statistics = {port.tensor for port in uploads if port.kind in ("mean", "variance")}
    # FedBN keeps them on the device, and per-example clipping allows no others than the model's own.
    assert statistics == (
        set()
        if strategy.name in ("fedbn", "dpsgd", "moon", "ifca", "feddistill")
        else {"norm.running_mean", "norm.running_var"}
    )
    assert {port.tensor for port in by_kind["delta"]} | statistics == {s.name for s in bundle.manifest.parameters}
    assert {port.clip for port in by_kind["delta"]} == {CLIP}
    assert len({port.weighting for port in uploads}) == 1
    for client, share in ((0, 0.7), (3, 1.0)):
        arrays = local_round(bundle, client=client).arrays
        weight = float(arrays[by_kind["weight"][0].name]) if by_kind["weight"] else 1.0
        if by_kind["weight"]:
            assert by_kind["weight"][0].weighting == "examples"
            assert weight == pytest.approx(share) or strategy.name in BY_LOSS
        deltas = [arrays[port.name] for port in by_kind["delta"]]
        # Any of these rounds moves further than the bound, so that it is reached.
        assert norm(deltas) <= CLIP * weight * (1 + 1e-4)
        assert norm(deltas) > (0.2 if strategy.name in BY_CLASS else 1 - 1e-4) * CLIP * weight
        assert all(np.abs(arrays[port.name]).max() <= port.range for port in uploads)


@every
@pytest.mark.sampled(every=6)
def test_the_server_half_takes_what_the_devices_send(bundle_of: Of, updates_of: Updates, strategy: Strategy) -> None:
    """Through the fixed-point encoding, as in a round."""
    bundle = bundle_of(strategy)
    assert {port.bits for port in ports(bundle.program("finish"))} == {BITS}
    start, decoded = bundle.parameters(), summed(bundle, updates_of(strategy))
    hyperparameters = dict(strategy.server_hyperparameters)
    first = first_state(bundle)
    moved, state = server_step(bundle, start, first, decoded, 4, hyperparameters)
    assert {name: (a.shape, a.dtype) for name, a in moved.items()} == {n: (a.shape, a.dtype) for n, a in start.items()}
    assert all(np.isfinite(a).all() for a in (*moved.values(), *state.values()))
    assert any(not np.array_equal(moved[name], start[name]) for name in start)
    asked = {p.tensor for q in bundle.manifest.programs.values() for p in q.inputs if isinstance(p, Broadcast)}
    assert asked == set(strategy.broadcast(state))
    # A server rate of half the size moves half as far.
    rate = hyperparameters["server_lr"]
    half, _ = server_step(bundle, start, first, decoded, 4, {**hyperparameters, "server_lr": rate / 2})
    for name, value in start.items():
        # Statistics are measured; a rate does not scale them.
        share = 1.0 if "running" in name else 0.5
        np.testing.assert_allclose(half[name] - value, share * (moved[name] - value), atol=1e-6)


@every
@pytest.mark.sampled(every=6)
def test_the_order_of_devices_does_not_matter(bundle_of: Of, updates_of: Updates, strategy: Strategy) -> None:
    """To the last bit where sums are whole numbers, and to float64 where they are not."""
    bundle, updates = bundle_of(strategy), updates_of(strategy)
    start, first, finish = bundle.parameters(), first_state(bundle), bundle.program("finish")
    turned = [updates[i] for i in (2, 0, 3, 1)]
    for sums, most in (((summed(bundle, updates), summed(bundle, turned)), 0.0),
                       ((added_up(finish, updates), added_up(finish, turned)), 1e-7)):  # fmt: skip
        one, other = (server_step(bundle, start, first, total, 4) for total in sums)
        for mine, others in zip(one, other, strict=True):
            for name, value in mine.items():
                np.testing.assert_allclose(others[name], value, rtol=most, atol=most, err_msg=name)


@every
def test_as_many_devices_as_came_share_a_step(bundle_of: Of, updates_of: Updates, strategy: Strategy) -> None:
    """Devices that all send the same move the model as one alone does, whoever of the cohort dropped out."""
    bundle, update = bundle_of(strategy), updates_of(strategy)[3]
    start, first = bundle.parameters(), first_state(bundle)
    alone = server_step(bundle, start, first, summed(bundle, [update]), 1)
    assert any(not np.array_equal(alone[0][name], start[name]) for name in start)
    for came in (2, 3, 7):
        together = server_step(bundle, start, first, summed(bundle, [update] * came), came)
        for one, several in zip(alone, together, strict=True):
            for name, value in one.items():
                np.testing.assert_allclose(several[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@every
def test_a_task_goes_on_from_what_is_stored(bundle_of: Of, updates_of: Updates, strategy: Strategy) -> None:
    """The server's next step from its blobs, and a device's next round from its file, are those without them."""
    bundle = bundle_of(strategy)
    total = summed(bundle, updates_of(strategy))
    moved, state = server_step(bundle, bundle.parameters(), first_state(bundle), total, 4)
    held = server_step(bundle, moved, state, total, 4)
    stored = read_weights(write_weights(moved)), read_weights(write_weights(state)) if state else {}
    for mine, others in zip(held, server_step(bundle, *stored, total, 4), strict=True):
        assert {n: (a.dtype, a.shape) for n, a in mine.items()} == {n: (a.dtype, a.shape) for n, a in others.items()}
        assert all(np.array_equal(others[name], value) for name, value in mine.items())
    device = DeviceState()
    local_round(bundle, state=device)
    again = DeviceState.decode(device.encode())
    for one, other in zip(*(local_round(bundle, state=each).arrays.items() for each in (device, again)), strict=True):
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])


@every
def test_nothing_to_average_changes_nothing(bundle_of: Of, strategy: Strategy) -> None:
    bundle = bundle_of(strategy)
    layout, start = Layout.of(bundle.program("finish")), bundle.parameters()
    decoded = layout.decode_sum(np.zeros(layout.length, np.uint32), cohort=3, modulus_bits=32)
    state = first_state(bundle)
    moved, following = server_step(bundle, start, state, decoded, 3)
    for before, after in ((start, moved), (state, following)):
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value)


@every
def test_options_are_checked_by_name(strategy: Strategy) -> None:
    needed = NEEDED.get(strategy.name, {})
    describe(strategy.name, strategy.device, needed)
    common = {
        "clip": 0.0, "value_range": -1.0, "bits": 1, "weight_cap": 0, "weighting": "sometimes", "statistics_range": 0.9,
    }  # fmt: skip
    for option, value in {**common, "bits": 31, **WRONG.get(strategy.name, {})}.items():
        with pytest.raises(ConversionError, match=f"strategy '{strategy.name}': {option} must be"):
            describe(strategy.name, strategy.device, {**needed, option: value})
    with pytest.raises(ConversionError, match=f"strategy '{strategy.name}': no option 'ghost'; it has .*clip"):
        describe(strategy.name, strategy.device, {**needed, "ghost": 1})
    for option in needed:
        with pytest.raises(ConversionError, match=f"needs the option '{option}'"):
            describe(strategy.name, strategy.device, {})
    with pytest.raises(ConversionError, match="must be a mapping"):
        describe(strategy.name, strategy.device, [("clip", 1.0)])


@every
def test_wrong_values_are_listed_for_every_option(strategy: Strategy) -> None:
    """So that an option cannot come without a check."""
    own = list(inspect.signature(strategy.device).parameters)[1:]
    assert set(own) == set(WRONG.get(strategy.name, {}))


@every
@pytest.mark.sampled(every=6)
def test_predictions_follow_what_the_device_learned(make: Make, bundle_of: Of, strategy: Strategy) -> None:
    """In float and in int8, personal tensors included."""
    x, y = clients()[3]
    field = imported(normalized).inputs[0].name
    plain = bundle_of(strategy)
    first, found = Runtime(plain).predict(x), []
    int8 = Compression([StaticInt8()], calibration={field: 2 * x})
    for bundle in (plain, build(make, strategy, compression=int8)):
        device = Runtime(bundle, state=DeviceState())
        update = local_round(bundle, state=device.state, lr=RATES.get(strategy.name, 0.05))
        device.set_parameters(update.parameters)
        found.append(device.predict(x))
        if bundle is plain:
            assert device.evaluate(x, y)["correct"] == (found[0].argmax(1) == y).sum()
    moved = np.abs(found[0] - first).mean()
    assert moved > 0.1
    assert np.abs(found[0] - found[1]).mean() < 0.1 * moved


@every
def test_personal_tensors_are_not_uploaded(bundle_of: Of, strategy: Strategy) -> None:
    bundle = bundle_of(strategy)
    uploaded = {port.tensor for port in ports(bundle.program("finish"))}
    personal = {
        port.tensor for q in bundle.manifest.programs.values() for port in q.inputs if role_of(port) == "personal"
    }
    assert not uploaded & personal
    state = DeviceState()
    local_round(bundle, state=state)
    assert set(state.personal) == personal


def test_server_halves_need_no_onnx() -> None:
    """The server's install: a finder refuses onnx, and every server half runs a round. So does every description."""
    code = f"""
import sys

class NoOnnx:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("onnx", "onnx_ir", "onnxscript", "onnxruntime", "torch", "flask"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoOnnx())
import numpy as np
from archipel import strategies
from archipel.errors import MissingExtraError
from archipel.protocol.vector import DecodedSum
from archipel.strategies.device import LocalTraining, describe

needed = {NEEDED!r}
parameters = {{"w": np.ones((2, 3), np.float32)}}
for name, strategy in strategies.STRATEGIES.items():
    state = strategy.init(parameters)
    assert strategy.broadcast(state).keys() <= state.keys()
    deltas = {{"w": np.ones((2, 3))}}
    values = {{"control/w": np.ones((2, 3)), "fednova/steps": np.array(2.0), "fedexp/square_norm": np.array(1.0)}}
    values |= {{f"{{name}}/weights": np.array([0.5, 0.5]) for name in ("ifca", "feddistill")}}
    moved, state = strategy.update(parameters, state, DecodedSum(deltas, values, 1.0), 2, {{}})
    assert (moved["w"] > 1).all() and moved["w"].dtype == np.float32
    half = describe(name, strategy.device, needed.get(name, {{}}))
    try:
        half.finish(LocalTraining(parameters))
    except MissingExtraError as error:
        assert "archipel[convert]" in str(error)
    else:
        raise SystemExit(f"{{name}}: finish works without onnx")
print(len(strategies.STRATEGIES))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (out.stdout.strip(), out.stderr) == (str(len(strategies.STRATEGIES)), "")


def test_every_strategy_has_a_reference() -> None:
    """So that none comes without three rounds that somebody else computes."""
    places = {name: (file, f"test_{name}") for file, names in REFERENCES.items() for name in names} | OTHER_REFERENCES
    assert set(places) == set(strategies.STRATEGIES)
    for name, (file, test) in places.items():
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(), name


def test_the_device_knows_no_strategy() -> None:
    """No algorithm's name occurs in what runs on a device."""
    root = Path(archipel.__file__).parent
    names = sorted(strategies.STRATEGIES)
    assert {"fedprox", "scaffold", "fednova", "fedrep", "fedbn", "ditto", "lora", "dpsgd"} <= set(names)
    for room in ("lite_runtime", "client"):
        files = sorted((root / room).rglob("*.py"))
        assert files
        for path in files:
            text = path.read_text().lower()
            assert [name for name in names if name in text] == [], path


def test_registry_names_what_there_is() -> None:
    for name, strategy in strategies.STRATEGIES.items():
        assert strategy.name == name
        assert strategies.get(name) is strategy
    with pytest.raises(ArchipelError, match="no strategy 'fedsomething'; there are: ditto, dpsgd, fed"):
        strategies.get("fedsomething")
