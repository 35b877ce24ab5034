"""Whole local rounds, each against a plain NumPy implementation of its algorithm: the driver knows none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import Phase
from archipel.lite_runtime import DeviceState, Progress, Runtime
from archipel.permutations import permutation
from tests.support.text_bundles import Role, Roles

Make = Callable[..., Runtime]

# The squared error of a linear model: g = mean over the batch of x * (x.w - y), loss = mean((x.w - y)^2) / 2.
GRADIENT = """
    p = MatMul(x, w)
    e = Sub(p, y)
    one = Constant <value_ints = [1]> ()
    zero = Constant <value_ints = [0]> ()
    column = Unsqueeze(e, one)
    products = Mul(x, column)
    g = ReduceMean <keepdims = 0> (products, zero)
    squares = Mul(e, e)
    sum = ReduceMean <keepdims = 0> (squares)
    half = Constant <value_float = 0.5> ()
    loss = Mul(sum, half)
"""

FEDAVG_FINISH = """
finish (float[3] w, float[3] w0, float n) => (float[3] dw, float weight) {
    change = Sub(w, w0)
    dw = Mul(change, n)
    weight = Identity(n)
}"""


def data(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 3)).astype(np.float32)
    return x, (x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.standard_normal(count) + seed).astype(np.float32)


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.T @ (x @ w - y) / len(x)


def cut(count: int, size: int, epochs: int, seed: int, phase: int = 0) -> list[np.ndarray]:
    out = []
    for epoch in range(epochs):
        order = permutation(count, seed, phase, epoch)
        out += [order[i : i + size] for i in range(0, count, size)]
    return out


def finish_roles(r: type[Roles]) -> dict[str, Role]:
    return {
        "w": r.parameter("w"), "w0": r.start("w"), "n": r.count("examples"),
        "dw": r.update("w"), "weight": r.update("weight", "weight"),
    }  # fmt: skip


def train_roles(r: type[Roles], **more: Role) -> dict[str, Role]:
    return {
        "x": r.example, "y": r.label, "w": r.parameter("w"), "lr": r.hyper(0.1),
        "w_new": r.parameter("w"), "loss": r.metric(), **more,
    }  # fmt: skip


def sgd(r: type[Roles]) -> tuple[str, str, dict[str, Role]]:
    text = f"""train (float[n, 3] x, float[n] y, float[3] w, float lr) => (float[3] w_new, float loss) {{
        {GRADIENT}
        u = Mul(g, lr)
        w_new = Sub(w, u)
    }}"""
    return "train", text, train_roles(r)


W0 = np.array([0.1, 0.2, 0.3], np.float32)


def test_fedavg(make: Make, r: type[Roles]) -> None:
    rt = make(
        {"train": sgd(r), "finish": ("finish", FEDAVG_FINISH, finish_roles(r))},
        {"w": W0},
        schedule=[Phase(program="train", epochs=2, batch_size=4)],
    )
    x, y = data(1, 10)
    start = np.array([1, 2, 3], np.float32)
    update = rt.local_round(x, y, seed=9, parameters={"w": start}, hyperparameters={"lr": 0.05})
    w, losses = start.astype(np.float64), []
    for batch in cut(10, 4, 2, seed=9):
        losses.append(float(np.mean((x[batch] @ w - y[batch]) ** 2) / 2))
        w = w - 0.05 * gradient(w, x[batch], y[batch])
    np.testing.assert_allclose(update.arrays["dw"], 10 * (w - start), rtol=1e-5)
    np.testing.assert_allclose(update.losses, losses, rtol=1e-5)
    assert list(update.arrays) == ["dw", "weight"]
    assert (float(update.arrays["weight"]), update.examples, update.steps) == (10.0, 10, 6)
    # The declared reduction is the mean over examples: batches of 4, 4 and 2.
    assert update.metrics["loss"] == pytest.approx(np.average(losses, weights=[4, 4, 2] * 2), rel=1e-5)
    np.testing.assert_allclose(update.parameters["w"], w, rtol=1e-5)
    # The model that was received is not adopted, and nothing of it changed.
    np.testing.assert_array_equal(rt.parameters()["w"], W0)
    np.testing.assert_array_equal(start, [1, 2, 3])


def test_fedprox(make: Make, r: type[Roles]) -> None:
    text = f"""train (float[n, 3] x, float[n] y, float[3] w, float[3] w0, float lr, float mu)
      => (float[3] w_new, float loss) {{
        {GRADIENT}
        away = Sub(w, w0)
        pull = Mul(away, mu)
        all = Add(g, pull)
        u = Mul(all, lr)
        w_new = Sub(w, u)
    }}"""
    roles = train_roles(r, w0=r.start("w"), mu=r.hyper(0.5))
    rt = make(
        {"train": ("train", text, roles), "finish": ("finish", FEDAVG_FINISH, finish_roles(r))},
        {"w": W0},
        schedule=[Phase(program="train", epochs=3, batch_size=5)],
    )
    clients = [data(seed, 5 + 2 * seed) for seed in range(4)]
    ours = theirs = W0.astype(np.float64)
    for number in range(3):
        total, weight, reference = np.zeros(3), 0.0, np.zeros(3)
        for x, y in clients:
            update = rt.local_round(x, y, seed=number, parameters={"w": ours.astype(np.float32)})
            total += update.arrays["dw"]
            weight += float(update.arrays["weight"])
            w = theirs.copy()
            for batch in cut(len(x), 5, 3, seed=number):
                w = w - 0.1 * (gradient(w, x[batch], y[batch]) + 0.5 * (w - theirs))
            reference += len(x) * (w - theirs)
        ours = ours + total / weight
        theirs = theirs + reference / sum(len(x) for x, _ in clients)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_scaffold(make: Make, r: type[Roles]) -> None:
    """Karimireddy et al. 2020, algorithm 1, option II; device state lives from round to round."""
    train = f"""train (float[n, 3] x, float[n] y, float[3] w, float[3] c, float[3] ci, float lr)
      => (float[3] w_new, float loss) {{
        {GRADIENT}
        correction = Sub(c, ci)
        all = Add(g, correction)
        u = Mul(all, lr)
        w_new = Sub(w, u)
    }}"""
    finish = """finish (float[3] w, float[3] w0, float[3] c, float[3] ci, float lr, float steps)
      => (float[3] dw, float[3] dc, float[3] ci_new) {
        dw = Sub(w, w0)
        back = Neg(dw)
        scale = Mul(steps, lr)
        average = Div(back, scale)
        without = Sub(ci, c)
        ci_new = Add(without, average)
        dc = Sub(ci_new, ci)
    }"""
    state = r.state("ci", "device")
    rt_roles = {
        "w": r.parameter("w"), "w0": r.start("w"), "c": r.broadcast("c"), "ci": state, "lr": r.hyper(0.1),
        "steps": r.count("steps"), "dw": r.update("w"), "dc": r.update("c", "value"), "ci_new": state,
    }  # fmt: skip
    programs = {
        "train": ("train", train, train_roles(r, c=r.broadcast("c"), ci=state)),
        "finish": ("finish", finish, rt_roles),
    }
    clients = [data(seed, 6 + 3 * seed) for seed in range(4)]
    devices = [make(programs, {"w": W0}, schedule=[Phase(program="train", epochs=2, batch_size=4)]) for _ in clients]
    ours, c = W0.astype(np.float64), np.zeros(3, np.float32)
    w_ref, c_ref, ci_ref = W0.astype(np.float64), np.zeros(3), [np.zeros(3) for _ in clients]
    for number in range(3):
        dw, dc, dw_ref, dc_ref = np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3)
        for i, (x, y) in enumerate(clients):
            update = devices[i].local_round(
                x, y, seed=number, parameters={"w": ours.astype(np.float32)}, broadcast={"c": c}
            )
            dw += update.arrays["dw"] / 4
            dc += update.arrays["dc"] / 4
            w, batches = w_ref.copy(), cut(len(x), 4, 2, seed=number)
            for batch in batches:
                w = w - 0.1 * (gradient(w, x[batch], y[batch]) + c_ref - ci_ref[i])
            new = ci_ref[i] - c_ref + (w_ref - w) / (len(batches) * 0.1)
            dw_ref, dc_ref, ci_ref[i] = dw_ref + (w - w_ref) / 4, dc_ref + (new - ci_ref[i]) / 4, new
            np.testing.assert_allclose(devices[i].state.state["ci"], new, rtol=1e-3, atol=1e-4)
        ours, c = ours + dw, (c + dc).astype(np.float32)
        w_ref, c_ref = w_ref + dw_ref, c_ref + dc_ref
        np.testing.assert_allclose(ours, w_ref, rtol=1e-3, atol=1e-4)


def test_two_phases_move_different_tensors(make: Make, r: type[Roles]) -> None:
    """Collins et al. 2021 (FedRep): first the personal head for some steps, then the shared part for an epoch."""
    text = """train (float[n, 3] x, float[n] y, float[3] w, float b, float lr)
      => (float[3] w_new, float b_new, float loss) {
        q = MatMul(x, w)
        p = Add(q, b)
        e = Sub(p, y)
        one = Constant <value_ints = [1]> ()
        zero = Constant <value_ints = [0]> ()
        column = Unsqueeze(e, one)
        products = Mul(x, column)
        g = ReduceMean <keepdims = 0> (products, zero)
        gb = ReduceMean <keepdims = 0> (e)
        squares = Mul(e, e)
        loss = ReduceMean <keepdims = 0> (squares)
        u = Mul(g, lr)
        ub = Mul(gb, lr)
        w_new = Sub(w, u)
        b_new = Sub(b, ub)
    }"""
    roles = train_roles(r, b=r.personal("b"), b_new=r.personal("b"))
    rt = make(
        {"train": ("train", text, roles), "finish": ("finish", FEDAVG_FINISH, finish_roles(r))},
        {"w": W0},
        tensors={"b": np.array(0.25, np.float32)},
        schedule=[
            Phase(program="train", steps=5, batch_size=3, moves=("b",)),
            Phase(program="train", epochs=1, batch_size=4, moves=("w",)),
        ],
    )
    x, y = data(2, 8)
    b = 0.25
    received = W0.astype(np.float64)
    for number in range(2):
        update = rt.local_round(x, y, seed=number, parameters={"w": received.astype(np.float32)})
        head = (cut(8, 3, 2, number, phase=0))[:5]
        for batch in head:
            b -= 0.1 * float(np.mean(x[batch] @ received + b - y[batch]))
        w = received.copy()
        for batch in cut(8, 4, 1, number, phase=1):
            w = w - 0.1 * gradient(w, x[batch], y[batch] - b)
        np.testing.assert_allclose(update.arrays["dw"], 8 * (w - received), rtol=1e-4)
        assert float(rt.state.personal["b"]) == pytest.approx(b, rel=1e-5)
        received = received + 0.5
    assert update.steps == 7


@pytest.mark.parametrize("lifetime", ["step", "round", "device"])
def test_momentum_with_each_lifetime(make: Make, r: type[Roles], lifetime: str) -> None:
    text = f"""train (float[n, 3] x, float[n] y, float[3] w, float[3] m, float lr)
      => (float[3] w_new, float[3] m_new, float loss) {{
        {GRADIENT}
        keep = Constant <value_float = 0.9> ()
        old = Mul(m, keep)
        m_new = Add(old, g)
        u = Mul(m_new, lr)
        w_new = Sub(w, u)
    }}"""
    state = r.state("m", lifetime, 0.5)
    rt = make(
        {
            "train": ("train", text, train_roles(r, m=state, m_new=state)),
            "finish": ("finish", FEDAVG_FINISH, finish_roles(r)),
        },
        {"w": W0},
        schedule=[Phase(program="train", epochs=2, batch_size=3)],
    )
    x, y = data(3, 7)
    m = np.full(3, 0.5)
    for number in range(2):
        update = rt.local_round(x, y, seed=number)
        w = W0.astype(np.float64)
        if lifetime == "round":
            m = np.full(3, 0.5)
        for batch in cut(7, 3, 2, number):
            if lifetime == "step":
                m = np.full(3, 0.5)
            m = 0.9 * m + gradient(w, x[batch], y[batch])
            w = w - 0.1 * m
        np.testing.assert_allclose(update.parameters["w"], w, rtol=1e-5)
    assert set(rt.state.state) == ({"m"} if lifetime == "device" else set())


def test_state_can_begin_as_a_tensor_of_the_bundle(make: Make, r: type[Roles]) -> None:
    text = """train (float[n, 3] x, float[3] v) => (float[3] v_new) {
        zero = Constant <value_ints = [0]> ()
        s = ReduceSum <keepdims = 0> (x, zero)
        v_new = Add(v, s)
    }"""
    finish = "finish (float[3] v) => (float[3] total) { total = Identity(v) }"
    state = r.state("v", "round", "first")
    rt = make(
        {
            "train": ("train", text, {"x": r.example, "v": state, "v_new": state}),
            "finish": ("finish", finish, {"v": state, "total": r.update("total", "value")}),
        },
        {},
        tensors={"first": np.array([1, 2, 3], np.float32)},
        schedule=[Phase(program="train", epochs=1, batch_size=2)],
    )
    x, _ = data(1, 5)
    for _ in range(2):
        update = rt.local_round(x, seed=0)
        np.testing.assert_allclose(update.arrays["total"], x.sum(0) + np.array([1, 2, 3]), rtol=1e-5)


def test_personal_copy_begins_as_the_received_parameter(make: Make, r: type[Roles]) -> None:
    """Li et al. 2021 (Ditto): a personal model, first equal to the global one as received, pulled towards it."""
    text = f"""train (float[n, 3] x, float[n] y, float[3] v, float[3] w0, float lr)
      => (float[3] v_new, float loss) {{
        w = Identity(v)
        {GRADIENT}
        away = Sub(v, w0)
        all = Add(g, away)
        u = Mul(all, lr)
        v_new = Sub(v, u)
    }}"""
    personal = r.personal("v", init="w")
    roles = {
        "x": r.example, "y": r.label, "v": personal, "v_new": personal, "w0": r.start("w"), "lr": r.hyper(0.1),
        "loss": r.metric(),
    }  # fmt: skip
    rt = make(
        {"train": ("train", text, roles), "finish": ("finish", FEDAVG_FINISH, finish_roles(r))},
        {"w": W0},
        schedule=[Phase(program="train", epochs=1, batch_size=5)],
    )
    x, y = data(4, 5)
    v = np.array([5.0, 5.0, 5.0])
    for number in range(2):
        received = np.full(3, 5.0 + number)
        update = rt.local_round(x, y, seed=0, parameters={"w": received.astype(np.float32)})
        v = v - 0.1 * (gradient(v, x, y) + v - received)
        np.testing.assert_allclose(rt.state.personal["v"], v, rtol=1e-5)
        np.testing.assert_array_equal(update.arrays["dw"], np.zeros(3))


def test_begin_makes_round_state_and_seed_and_step_are_supplied(make: Make, r: type[Roles]) -> None:
    begin = """begin (float[3] w, float[3] c, uint32 seed) => (float[3] s, float t) {
        s = Add(w, c)
        t = Cast <to = 1> (seed)
    }"""
    train = """train (float[n, 3] x, float[3] s, int64 step, int32 steps, int64 n) => (float[3] s_new, float loss) {
        f = Cast <to = 1> (step)
        k = Cast <to = 1> (steps)
        m = Cast <to = 1> (n)
        a = Add(f, k)
        loss = Add(a, m)
        s_new = Add(s, f)
    }"""
    finish = """finish (float[3] s, float t, uint32 seed, int64 steps, int64 n)
      => (float[3] out, float u, float q) {
        out = Identity(s)
        f = Cast <to = 1> (seed)
        u = Sub(t, f)
        d = Cast <to = 1> (steps)
        e = Cast <to = 1> (n)
        q = Mul(d, e)
    }"""
    s, t = r.state("s", "round"), r.state("t", "round")
    rt = make(
        {
            "begin": ("begin", begin, {"w": r.parameter("w"), "c": r.broadcast("c"), "seed": r.seed, "s": s, "t": t}),
            "train": (
                "train",
                train,
                {
                    "x": r.example, "s": s, "s_new": s, "step": r.step, "steps": r.count("steps"),
                    "n": r.count("examples"), "loss": r.metric("last"),
                },
            ),
            "finish": (
                "finish",
                finish,
                {
                    "s": s, "t": t, "seed": r.seed, "steps": r.count("steps"), "n": r.count("examples"),
                    "out": r.update("out", "value"), "u": r.update("u", "value"), "q": r.update("q", "value"),
                },
            ),
        },
        {"w": W0},
        schedule=[Phase(program="train", steps=3, batch_size=2)],
    )  # fmt: skip
    x, _ = data(1, 9)
    c = np.array([1, 1, 1], np.float32)
    update = rt.local_round(x, seed=4_000_000_000, broadcast={"c": c})
    np.testing.assert_allclose(update.arrays["out"], W0 + 1 + 0 + 1 + 2, rtol=1e-6)
    assert float(update.arrays["u"]) == 0.0
    # 9 examples are there while training; 3 steps of 2 used 6 of them.
    assert update.losses == [9.0, 11.0, 13.0]
    assert update.metrics == {"loss": 13.0}
    assert (float(update.arrays["q"]), update.examples) == (18.0, 6)


def test_noise_is_drawn_for_every_step_and_for_finish(make: Make, r: type[Roles]) -> None:
    train = """train (float[n, 3] x, float[3] s, float[3] z) => (float[3] s_new) { s_new = Add(s, z) }"""
    finish = """finish (float[3] s, int64[3] z) => (float[3] out, float[3] own) {
        out = Identity(s)
        own = Cast <to = 1> (z)
    }"""
    s = r.state("s", "round")
    rt = make(
        {
            "train": (
                "train",
                train,
                {"x": r.example, "s": s, "s_new": s, "z": r.noise("discrete_gaussian", 20.0)},
            ),
            "finish": (
                "finish",
                finish,
                {
                    "s": s, "z": r.noise("discrete_gaussian", 20.0),
                    "out": r.update("out", "value"), "own": r.update("own", "value"),
                },
            ),
        },
        {"w": W0},
        schedule=[Phase(program="train", steps=50, batch_size=2)],
    )  # fmt: skip
    x, _ = data(1, 9)
    rng = np.random.default_rng(5)
    update = rt.local_round(x, seed=0, randomness=rng.bytes)
    assert np.array_equal(update.arrays["out"], np.round(update.arrays["out"]))
    assert 1 < np.abs(update.arrays["out"]).max() < 5 * 20 * 50**0.5
    again = rt.local_round(x, seed=0, randomness=np.random.default_rng(5).bytes)
    np.testing.assert_array_equal(update.arrays["out"], again.arrays["out"])
    # Without a given source the seed of the round decides nothing: noise comes from the system.
    first, second = rt.local_round(x, seed=0), rt.local_round(x, seed=0)
    assert not np.array_equal(first.arrays["out"], second.arrays["out"])


def test_device_state_survives_a_restart(make: Make, r: type[Roles], tmp_path: Path) -> None:
    state = r.state("seen", "device")
    train = "train (float[n, 3] x, float seen) => (float seen_new) { one = Constant <value_float = 1.0> () \n seen_new = Add(seen, one) }"  # noqa: E501
    finish = "finish (float seen) => (float out) { out = Identity(seen) }"
    programs = {
        "train": ("train", train, {"x": r.example, "seen": state, "seen_new": state}),
        "finish": ("finish", finish, {"seen": state, "out": r.update("seen", "value")}),
    }
    schedule = [Phase(program="train", epochs=1, batch_size=2)]
    x, _ = data(0, 6)
    rt = make(programs, {"w": W0}, schedule=schedule)
    rt.local_round(x, seed=0)
    rt.state.save(tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    other = make(programs, {"w": W0}, schedule=schedule)
    other.state = DeviceState.load(tmp_path / "state")
    assert float(other.local_round(x, seed=0).arrays["out"]) == 6.0
    # What another version left in another shape does not fit, so it begins again.
    other.state = DeviceState(state={"seen": np.zeros(2, np.float32)})
    assert float(other.local_round(x, seed=0).arrays["out"]) == 3.0


def test_a_round_that_fails_leaves_no_trace(make: Make, r: type[Roles]) -> None:
    state = r.state("seen", "device")
    train = "train (float[n, 3] x, float seen) => (float seen_new) { seen_new = Add(seen, seen) }"
    finish = "finish (float seen) => (float out) { out = Identity(seen) }"
    rt = make(
        {
            "train": ("train", train, {"x": r.example, "seen": state, "seen_new": state}),
            "finish": ("finish", finish, {"seen": state, "out": r.update("seen", "value")}),
        },
        {"w": W0},
        schedule=[Phase(program="train", epochs=2, batch_size=2)],
    )

    class LeaveError(Exception): ...

    def leave(progress: Progress) -> None:
        if progress.step == 2:
            raise LeaveError

    with pytest.raises(LeaveError):
        rt.local_round(data(0, 6)[0], seed=0, callbacks=[leave])
    assert rt.state.state == {}
