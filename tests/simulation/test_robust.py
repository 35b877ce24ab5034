"""Robust rules in rounds: over single updates, over the sums of secure groups, and against attacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from archipel.bundle import Bundle, PrivacyPolicy
from archipel.errors import PolicyError, SimulationError
from archipel.lite_runtime import Runtime
from archipel.protocol.uploads import upload_layout
from archipel.protocol.vector import DecodedSum
from archipel.simulation import Aggregation, Attack, SplitClients, simulate
from archipel.simulation.draws import device_seed
from archipel.strategies.robust.parts import Part, aggregate_parts
from tests.simulation.test_engines import bundle_of, fields

Make = Callable[..., Bundle]
SMALL = PrivacyPolicy(modes=("secure", "plain"), min_cohort=2, threshold=0.67, max_clip=1000.0, max_bits=30)

STRONG = 12.0


def clients(count: int = 9) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        x = rng.normal(size=(12, 6)).astype(np.float32)
        found.append({"input": x, "label": (x[:, 0] > 0).astype(np.int64)})
    return found


def local_deltas(bundle: Bundle, given: list[dict[str, np.ndarray]], number: int = 1) -> dict[str, np.ndarray]:
    """What each device of a first round changes, unweighted, `[devices, ...]` by name: run by the runtime itself."""
    rows: list[dict[str, np.ndarray]] = []
    for client, examples in enumerate(given):
        runtime = Runtime(bundle)
        update = runtime.local_round(examples["input"], examples["label"], seed=device_seed(0, number, client))
        weight = float(update.arrays["fedavg/weight"])
        names = [name for name in update.arrays if name.endswith(".update")]
        rows.append({name.removesuffix(".update"): update.arrays[name] / weight for name in names})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("axis", ["off", "on"])
def test_a_plain_round_with_a_median_moves_the_model_by_the_median_of_the_devices(make: Make, axis: Any) -> None:
    bundle, given = bundle_of(make, "fedavg", privacy=SMALL), clients(5)
    found = simulate(bundle, given, rounds=1, privacy="plain", aggregation="median", tolerated=2, client_axis=axis)
    assert (found.history[0].failed, found.history[0].devices) == ("", 5)
    assert "training loss" in found.history[0].metrics
    before = bundle.parameters()
    for name, rows in local_deltas(bundle, given).items():
        assert_allclose(found.parameters[name], before[name] + np.median(rows, axis=0), atol=1e-6)


@pytest.mark.sampled(every=3)
def test_secure_groups_give_the_rule_over_their_weighted_means(make: Make) -> None:
    """Devices have different numbers of examples, so a group's mean is weighted."""
    bundle, given = bundle_of(make, "fedavg", privacy=SMALL), clients(6)
    given[1] = {name: array[:4] for name, array in given[1].items()}
    mean = simulate(bundle, given, rounds=1, client_axis="off")
    grouped = simulate(bundle, given, rounds=1, secure_groups=3, client_axis="off")
    # The same whole numbers, added up in another order and then as floating point.
    for name, value in mean.parameters.items():
        assert_allclose(grouped.parameters[name], value, atol=1e-6)
    assert grouped.history[0].metrics.keys() == mean.history[0].metrics.keys()
    assert_allclose(grouped.history[0].metrics["training loss"], mean.history[0].metrics["training loss"], rtol=1e-5)

    found = simulate(bundle, given, rounds=1, secure_groups=3, aggregation="median", tolerated=1, client_axis="off")
    deltas, weights = local_deltas(bundle, given), np.array([min(len(each["label"]), 40) / 40 for each in given])
    before, matches = bundle.parameters(), []
    # Which devices make a group is drawn; of all 15 ways exactly one gives this model.
    for groups in _pairings(list(range(6))):
        error = 0.0
        for name, rows in deltas.items():
            means = [np.tensordot(weights[list(g)], rows[list(g)], 1) / weights[list(g)].sum() for g in groups]
            error = max(error, float(np.abs(before[name] + np.median(means, axis=0) - found.parameters[name]).max()))
        matches.append(error)
    assert sorted(matches)[0] < 2e-5 < 1e-3 < sorted(matches)[1]


def _pairings(left: list[int]) -> list[list[tuple[int, int]]]:
    if not left:
        return [[]]
    first, *rest = left
    return [[(first, other), *more] for other in rest for more in _pairings([each for each in rest if each != other])]


def test_groups_below_the_policys_minimum_are_left_out(make: Make) -> None:
    bundle, given = bundle_of(make, "fedavg", privacy=SMALL), clients(9)
    found = simulate(bundle, given, rounds=8, secure_groups=4, dropout=0.4, client_axis="off")
    counted = [row.devices for row in found.history]
    present = sum(row.counted for row in found.clients.values())
    # A group of two or three with one device left gives no sum, so fewer devices count than sent an update.
    assert 0 < sum(counted) < present
    assert all(count == 0 or count >= 2 for count in counted)


@pytest.mark.parametrize("attack", ["sign-flip", "gaussian"])
@pytest.mark.sampled(every=4)
def test_an_attack_ruins_the_mean_and_not_a_robust_rule(make: Make, attack: str) -> None:
    bundle, given = make("fedavg", privacy=SMALL), clients(9)
    test = (np.concatenate([each["input"] for each in given]), np.concatenate([each["label"] for each in given]))
    strong: dict[str, Any] = {
        "rounds": 4, "privacy": "plain", "test": test, "client_axis": "on", "test_every": 4,
        "attack": Attack(name=attack, clients=(0, 4, 7), strength=STRONG),
    }  # fmt: skip
    honest = simulate(bundle, given, **{**strong, "attack": ""})
    ruined = simulate(bundle, given, **strong)
    kept = simulate(bundle, given, aggregation="trimmed-mean", tolerated=3, **strong)
    losses = [each.history[-1].tested["loss"] for each in (honest, kept, ruined)]
    assert losses[0] <= losses[1] * 1.05
    assert losses[1] < 0.5 * (losses[0] + losses[2])


def test_attackers_are_the_share_that_was_asked_for_and_train_on_flipped_labels(make: Make) -> None:
    bundle, given = bundle_of(make, "fedavg", privacy=SMALL), clients(4)
    attacked = simulate(bundle, given, rounds=1, attack="label-flip", attackers=[2], client_axis="off")
    spoiled = [dict(each) for each in given]
    classes = bundle.parameters()["head.bias"].size
    spoiled[2]["label"] = classes - 1 - spoiled[2]["label"]
    expected = simulate(bundle, spoiled, rounds=1, client_axis="off")
    arrays = {name: np.concatenate([each[name] for each in given]) for name in given[0]}
    split = SplitClients(arrays, list(np.arange(48).reshape(4, 12)))
    for other in (simulate(bundle, split, rounds=1, attack="label-flip", attackers=[2], client_axis="off"), attacked):
        for name, value in expected.parameters.items():
            np.testing.assert_array_equal(other.parameters[name], value)


@pytest.mark.sampled(every=3)
def test_fltrust_follows_the_servers_own_examples(make: Make) -> None:
    bundle, given = bundle_of(make, "fedavg", privacy=SMALL), clients(5)
    root = given[4]
    options: dict[str, Any] = {"rounds": 1, "privacy": "plain", "client_axis": "off"}
    found = simulate(bundle, given[:4], aggregation="fltrust", tolerated=3, root=root, **options)
    assert (found.history[0].drawn, found.history[0].devices, sorted(found.clients)) == (4, 4, [0, 1, 2, 3])
    deltas, before = local_deltas(bundle, given), bundle.parameters()
    rows = np.concatenate([deltas[name].reshape(5, -1) for name in before], axis=1).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1)
    trust = np.maximum(rows[:4] @ rows[4] / lengths[:4] / lengths[4], 0)
    expected = (trust / lengths[:4]) @ rows[:4] * lengths[4] / trust.sum()
    moved = np.concatenate([(found.parameters[name] - before[name]).reshape(-1) for name in before])
    assert_allclose(moved, expected, atol=1e-6)


@pytest.mark.sampled(every=8)
def test_workers_and_a_run_that_goes_on_come_to_the_same_model(make: Make, tmp_path: Any) -> None:
    bundle, given = bundle_of(make, "fedavg", privacy=SMALL), clients(9)
    options: dict[str, Any] = {
        "cohort": 7, "privacy": "plain", "attack": "alie", "attackers": 0.2, "client_axis": "off",
        "aggregation": Aggregation(rule="centered-clipping", tolerated=2, mixing="bucketing"),
    }  # fmt: skip
    whole = simulate(bundle, given, rounds=3, **options)
    simulate(bundle, given, rounds=2, folder=tmp_path, **options)
    resumed = simulate(bundle, given, rounds=3, folder=tmp_path, workers=2, **options)
    for name, value in whole.parameters.items():
        np.testing.assert_array_equal(resumed.parameters[name], value)


def test_an_aggregate_keeps_to_what_the_cohort_can_sum_to(make: Make) -> None:
    """The median of vectors on three axes' planes is longer than each of them."""
    bundle = bundle_of(make, "fedavg", privacy=SMALL)
    layout = upload_layout(bundle.manifest, "training")
    ports = [port for port in layout.updates if port.kind == "delta"]
    clip = ports[0].clip
    assert clip is not None
    parts = []
    for zero in range(3):
        arrays = {port: np.zeros(port.shape) for port in layout.updates}
        row = np.ones(3)
        row[zero] = 0.0
        arrays[ports[0]].reshape(-1)[:3] = row * clip / np.sqrt(2)
        total = DecodedSum.of(arrays)
        parts.append(Part(DecodedSum(total.deltas, total.values, 1.0), 1))
    total, _ = aggregate_parts(parts, layout, Aggregation(rule="median", tolerated=1), {}, np.arange(3))
    layout.check_sum(total, 3)
    norm = np.sqrt(sum(float(np.square(array).sum()) for array in total.deltas.values()))
    assert 3 * clip * 0.999 < norm < np.sqrt(1.5) * 3 * clip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"aggregation": "krum"}, PolicyError, "needs single updates, which secure rounds hide"),
        ({"secure_groups": 2, "privacy": "plain"}, PolicyError, "secure_groups: are of secure rounds"),
        ({"secure_groups": 3}, PolicyError, r"3 groups of a cohort of 4 have 1 devices, .* asks for 2"),
        ({"aggregation": "fltrust", "privacy": "plain"}, SimulationError, "needs examples of the server's own"),
        ({"aggregation": "median", "privacy": "plain", "root": fields()[0]}, SimulationError, "root: aggregation"),
        (
            {"aggregation": "median", "tolerated": 2, "privacy": "plain"}, PolicyError,
            "4 updates a round are too few to tolerate 2; it needs 5 or more",
        ),
        (
            {"aggregation": Aggregation(rule="median", most_bytes=1000), "privacy": "plain"}, PolicyError,
            r"aggregation 'median': 4 updates of [\d,]+ entries take [\d,]+ bytes, more than most_bytes, 1,000",
        ),
        ({"attack": "alie"}, SimulationError, "attack: give both, an attack and its attackers"),
        ({"attack": "lies", "attackers": 0.2}, SimulationError, "attack: there is no 'lies'; there are: alie"),
        ({"attack": "alie", "attackers": [4]}, SimulationError, "attackers: there is no client 4; there are 0 to 3"),
    ],
)  # fmt: skip
@pytest.mark.sampled(every=6)
def test_settings_that_do_not_go_together_are_refused(
    make: Make, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        simulate(bundle_of(make, "fedavg", privacy=SMALL), fields(), rounds=1, client_axis="off", **options)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("dpsgd", {"noise_multiplier": 1.0}, "the bundle's devices add noise"),
        ("fedavg", {"compress": "top_k", "share": 0.5}, "each device send elements of its own choice"),
        ("qfedavg", {"q": 1.0}, "what devices of strategy 'qfedavg' send, .*, are no answers to the same question"),
    ],
)
def test_strategies_whose_updates_a_rule_cannot_compare_are_refused(
    make: Make, strategy: str, options: dict[str, Any], message: str
) -> None:
    bundle = make(strategy, privacy=SMALL, strategy_options=options)
    with pytest.raises(PolicyError, match=message):
        simulate(bundle, fields(), rounds=1, privacy="plain", aggregation="median", client_axis="off")


@pytest.mark.sampled(every=3)
def test_groups_whose_sums_are_really_masked_come_to_the_same_model(make: Make) -> None:
    bundle, given = bundle_of(make, "fedavg", privacy=SMALL), clients(6)
    options: dict[str, Any] = {
        "rounds": 1, "secure_groups": 3, "aggregation": "median", "tolerated": 1, "client_axis": "off",
    }  # fmt: skip
    bare, masked = simulate(bundle, given, **options), simulate(bundle, given, masks=True, **options)
    for name, value in bare.parameters.items():
        np.testing.assert_array_equal(masked.parameters[name], value)
    assert (masked.history[0].failed, masked.history[0].devices) == ("", 6)
