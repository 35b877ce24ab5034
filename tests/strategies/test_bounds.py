"""Every strategy states what devices that keep to its program can send: honest ones stay within it, others do not.

The updates are made by the real `finish` graphs, from weights as extreme as float32 lets them be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel import strategies
from archipel.bundle import Bundle, Manifest, role_of
from archipel.errors import BoundError, ConversionError, PolicyError
from archipel.protocol.messages import RoundPlan
from archipel.protocol.policy import check_plan
from archipel.protocol.vector import DecodedSum, Layout
from archipel.strategies.running_statistics import shared_statistics, split_statistics
from archipel.strategies.strategy import Began, Strategy, no_state, storage_rounding
from tests.strategies.test_contract import BY_LOSS, NEEDED, build

Make = Callable[..., Bundle]
BITS, CLIP, CAP = 16, 0.5, 20

every = pytest.mark.parametrize("name", strategies.STRATEGIES)
every_weighting = pytest.mark.parametrize(
    ("name", "weighting"),
    [
        (name, way)
        for name in strategies.STRATEGIES
        for way in ("examples", "uniform")
        if {name} - BY_LOSS or way != "uniform"
    ],
)

pytestmark = pytest.mark.sampled(every=6)
# So that the largest step is near the bound.
TIGHT = {"qfedavg": {"q": 0.01, "loss_cap": 0.5}}


class Finish:
    """A strategy's real finish program, and what the server does with the sum of many."""

    def __init__(self, bundle: Bundle) -> None:
        self.manifest: Manifest = bundle.manifest
        self.strategy: Strategy = strategies.get(bundle.manifest.strategy)
        self.program = bundle.program("finish")
        self.layout = Layout.of(self.program)
        self.start = bundle.parameters()
        self.session = ort.InferenceSession(str(bundle.program_path("finish")), providers=["CPUExecutionProvider"])

    def update(self, seed: int, distance: float, examples: int, steps: int, choice: int = 0) -> dict[str, np.ndarray]:
        """What a device sends that moved every parameter by about `distance`; of several models, or
        classes, the one of `choice`."""
        generator, feeds = np.random.default_rng(seed), {}
        for port in self.program.inputs:
            role, shape = role_of(port), tuple(map(int, port.shape))
            if role in ("start", "parameter"):
                value = np.zeros(shape) if role == "start" else distance * generator.standard_normal(shape)
            elif role == "count":
                value = np.array(examples if port.of == "examples" else steps)  # type: ignore[union-attr]
            elif role == "hyperparameter":
                value = np.array(port.default)  # type: ignore[union-attr]
            elif port.dtype == "int64":
                value = np.array(choice)
            elif port.tensor == "logits/sums":  # type: ignore[union-attr]
                value = examples * distance * generator.standard_normal(shape)
            elif port.tensor == "logits/counts":  # type: ignore[union-attr]
                value = examples * (np.arange(shape[0]) == choice)
            elif shape == ():  # a measured loss and a count
                value = distance * np.abs(generator.standard_normal())
            else:  # control variates, as far from each other as they may get
                value = distance * generator.standard_normal(shape)
            feeds[port.name] = np.asarray(value, port.dtype)
        names = [port.name for port in self.program.outputs]
        made = dict(zip(names, self.session.run(names, feeds), strict=True))
        return {port.name: made[port.name] for port in self.layout.updates}

    def sum(self, updates: list[Mapping[str, np.ndarray]]) -> DecodedSum:
        cohort, bits = len(updates), self.layout.modulus_bits(len(updates))
        total = np.zeros(self.layout.length, np.uint32)
        for arrays in updates:
            total += self.layout.encode(arrays, modulus_bits=bits, max_cohort=cohort)
        return self.layout.decode_sum(total & np.uint32(2**bits - 1), cohort=cohort, modulus_bits=bits)

    def step(
        self,
        total: DecodedSum,
        cohort: int,
        scales: Sequence[float] = (1.0,),
        hyperparameters: Mapping[str, float] | None = None,
    ) -> tuple[float, float]:
        """Norms of the longest changes of the parameters and of the state that a server's step makes.

        The steps are of sums with the deltas of `total` times one of `scales` after the other, and each begins with
        parameters of 0. Without running statistics, whose bounds are their own.
        """
        trained, _ = split_statistics(self.start, shared_statistics(self.manifest))
        zero = {name: np.zeros_like(array) for name, array in trained.items()}
        state, found = self.strategy.init(zero), np.zeros(2)
        for scale in scales:
            scaled = changed(total, deltas={name: scale * array for name, array in total.deltas.items()})
            if self.strategy.mix is not None:
                # A version so far away that the way back is as long as it can be, in the direction of the update.
                began = Began({name: 1e3 * array for name, array in scaled.deltas.items()})
                scaled = self.strategy.mix(zero, scaled, began, self.manifest, hyperparameters or {})
            moved, following = self.strategy.apply(zero, state, scaled, cohort, hyperparameters or {})
            change = {name: array.astype(np.float64) - state[name] for name, array in following.items()}
            found, state = np.maximum(found, (norm(moved), norm(change))), following
        return float(found[0]), float(found[1])


def norm(arrays: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays.values())))


def histories() -> list[list[float]]:
    """Of the rounds: one, many alike and then their opposite, and deltas that grow from next to nothing."""
    return [[1.0], [*[1.0] * 60, -1.0], *([growth**-k for k in range(150, -1, -1)] for growth in (1.005, 1.1))]


@pytest.fixture(scope="module")
def finish_of(make: Make) -> Callable[[str, str], Finish]:
    @cache
    def of(name: str, weighting: str) -> Finish:
        options = {
            "clip": CLIP,
            "weight_cap": CAP,
            "bits": BITS,
            "weighting": weighting,
            **NEEDED.get(name, {}),
            **TIGHT.get(name, {}),
        }
        return Finish(build(make, strategies.get(name), options=options))

    return of


@every_weighting
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.sampled(every=6)
def test_honest_devices_keep_within_every_bound(
    finish_of: Callable[[str, str], Finish], name: str, weighting: str, data: st.DataObject
) -> None:
    here = finish_of(name, weighting)
    cohort = data.draw(st.integers(1, 12), label="cohort")
    # All in one direction, or each in its own; nothing at all, and far beyond what float32 squares hold precisely.
    seeds = itertools.repeat(1) if data.draw(st.booleans(), label="together") else itertools.count(2)
    device = st.tuples(
        st.sampled_from([0.0, 1e-30, 1e-6, 1e-3, 0.1, 1.0, 1e6, 1e15]),
        st.sampled_from([1, 2, CAP - 1, CAP, CAP + 1, 10**6]),
        st.sampled_from([1, 3, 256, 257, 10**6]),
    )
    drawn = data.draw(st.lists(device, min_size=cohort, max_size=cohort), label="devices")
    total = here.sum([here.update(seed, *each, choice=i % 2) for i, (seed, each) in enumerate(zip(seeds, drawn))])
    here.layout.check_sum(total, cohort)
    bound = here.strategy.step_bound(here.manifest, {}, cohort)
    kept = here.strategy.init is not no_state
    scales = data.draw(st.lists(st.sampled_from([1.0, -1.0, 0.5, 1e-3]), max_size=9), label="rounds before")
    parameters, state = here.step(total, cohort, [*scales, 1.0] if kept else [1.0])
    assert parameters <= bound.parameters * (1 + 1e-6)
    assert state <= bound.state * (1 + 1e-6)


@every_weighting
@pytest.mark.sampled(every=6)
def test_the_bounds_are_not_far_from_what_devices_reach(
    finish_of: Callable[[str, str], Finish], name: str, weighting: str
) -> None:
    """Devices that all go as far as they may in one direction: so no bound is much too wide to be of use."""
    here = finish_of(name, weighting)
    cohort = 10 if here.strategy.mix is None else 1
    total = here.sum([here.update(1, 1e3, CAP, 300, choice=i % 2) for i in range(cohort)])
    bound = here.strategy.step_bound(here.manifest, {}, cohort)
    # What a server remembers of earlier rounds decides how far it goes; the worst history is another for each strategy.
    reached = [here.step(total, cohort, scales) for scales in histories()]
    parameters, state = max(each[0] for each in reached), max(each[1] for each in reached)
    # What is added for rounding is that of devices with one example.
    assert 0.8 < parameters / bound.parameters <= 1
    assert (bound.state == 0 and state == 0) or 0.8 < state / bound.state <= 1


@every_weighting
@pytest.mark.sampled(every=6)
def test_a_sum_beyond_the_bound_is_refused(finish_of: Callable[[str, str], Finish], name: str, weighting: str) -> None:
    """Each entry by itself: what all honest devices send at most, and half as much again."""
    here, cohort = finish_of(name, weighting), 10
    good = here.sum([here.update(1, 1e3, CAP, 300) for _ in range(cohort)])
    here.layout.check_sum(good, cohort)
    far = {key: 1.5 * array for key, array in good.deltas.items()}
    for bad in (
        changed(good, deltas=far),
        *(changed(good, values={**good.values, key: 1.5 * array}) for key, array in good.values.items()
          if norm({key: array}) > 0.9 * norm(good.values)),
        *(changed(good, moments={**good.moments, key: 1.5 * array}) for key, array in good.moments.items()),
        *([] if good.weight is None else [
            changed(good, weight=0.0), changed(good, weight=-1.0), changed(good, weight=1e-3),
            changed(good, weight=10.1), changed(good, weight=float("nan")),
        ]),
        changed(good, deltas={key: np.full_like(array, np.nan) for key, array in good.deltas.items()}),
    ):  # fmt: skip
        with pytest.raises(BoundError, match=r"rejected: .* 10 devices that run the signed program"):
            here.layout.check_sum(bad, cohort)


def changed(total: DecodedSum, **changes: Any) -> DecodedSum:
    parts = {"deltas": total.deltas, "values": total.values, "weight": total.weight, "moments": total.moments}
    return DecodedSum(**{**parts, **changes})


@every
def test_the_server_rate_is_the_policys(finish_of: Callable[[str, str], Finish], name: str) -> None:
    here = finish_of(name, "examples")
    full = here.strategy.step_bound(here.manifest, {}, 10).parameters
    usual = here.strategy.server_hyperparameters["server_lr"]
    quarter = here.strategy.step_bound(here.manifest, {"server_lr": usual / 4}, 10).parameters
    assert quarter == pytest.approx(full / 4)
    for rate in (1.01, -0.1, float("nan")):
        with pytest.raises(PolicyError, match="max_server_lr"):
            here.strategy.step_bound(here.manifest, {"server_lr": rate}, 10)
    policy = msgspec.structs.replace(here.manifest.privacy, max_server_lr=3.0)
    loose = msgspec.structs.replace(here.manifest, privacy=policy)
    # Who is not told the rate reckons with the largest, and with the worst of what else the server may choose.
    unknown = here.strategy.step_bound(loose, None, 10).parameters
    if set(here.strategy.server_hyperparameters) <= {"server_lr", "population"}:
        assert unknown == pytest.approx(3 / usual * full)
    else:
        assert math.isfinite(unknown)
        assert unknown >= 3 / usual * full * (1 - 1e-9)


@every
def test_uniform_weights_where_the_policy_says_so(
    finish_of: Callable[[str, str], Finish], make: Make, name: str, plan_of: Callable[[Layout], RoundPlan]
) -> None:
    if name in BY_LOSS:
        with pytest.raises(ConversionError, match="the loss is the weight"):
            finish_of(name, "uniform")
        return
    here = finish_of(name, "uniform")
    assert {port.weighting for port in here.layout.updates} == {"uniform"}
    assert not any(port.kind == "weight" for port in here.layout.updates)
    few, many = here.update(3, 0.01, 1, 5), here.update(3, 0.01, 1024, 5)
    for port in here.layout.updates:
        np.testing.assert_array_equal(few[port.name], many[port.name])
    policy = msgspec.structs.replace(here.manifest.privacy, weighting="uniform", max_value=1e9, colluders=0.0)
    check_plan(plan_of(here.layout), policy, here.layout)
    weighted = finish_of(name, "examples").layout
    if weighted.updates != here.layout.updates:
        with pytest.raises(PolicyError, match="every device to weigh 1"):
            check_plan(plan_of(weighted), policy, weighted)


@pytest.fixture
def plan_of() -> Callable[[Layout], RoundPlan]:
    def make_plan(layout: Layout) -> RoundPlan:
        return RoundPlan(
            round_id="0" * 32, task_id="0" * 32, number=1, bundle="0" * 64, weights="0" * 64, privacy="secure",
            min_cohort=10, max_cohort=12, threshold=9, modulus_bits=layout.modulus_bits(12),
        )  # fmt: skip

    return make_plan


def test_what_float32_adds_to_a_step() -> None:
    """A parameter of 1 + 2^-24 is stored as 1 or as 1 + 2^-23."""
    assert storage_rounding({"w": np.ones(4, np.float32)}) == pytest.approx(2.0**-24 * 2)
