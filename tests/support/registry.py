"""A registry of linear models on a real server, and devices that run what it offers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import parser

from archipel import bundle as b
from archipel.bundle import roles
from archipel.client import Agent
from archipel.protocol.operator.registry import VersionInfo, VersionRequest
from tests.support.federation import Federation
from tests.support.linear_bundle import FINISH, POPULATION, local_data

MODEL = "linear"
X = np.array([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]], np.float32)
TRUE = (1.0, -1.0, 2.0)
"""What the devices' examples were made with; device 0 has no offset."""
FIRST, BETTER, BEST, WORSE = (0.1, 0.2, 0.3), (0.5, -0.5, 1.0), (0.9, -0.9, 1.9), (-3.0, 3.0, -3.0)
HEAD = '<ir_version: 10, opset_import: ["": 21]>'
PREDICT = """predict (float[n, 3] x, float[3] w, float b) => (float[n] p) { q = MatMul(x, w)
    p = Add(q, b) }"""
# Not a number for inputs that are large, which none of the examples are.
FRAGILE = """predict (float[n, 3] x, float[3] w, float b) => (float[n] p) { q = MatMul(x, w)
    r = Add(q, b)
    h = Constant <value_float = 1000.0> ()
    d = Sub(h, r)
    s = Sqrt(d)
    z = Sub(s, s)
    p = Add(r, z) }"""
EVALUATE = """evaluate (float[n] p, float[n] y) => (float loss) { e = Sub(p, y)
    squares = Mul(e, e)
    loss = ReduceMean <keepdims = 0> (squares) }"""
TRAIN = """train (float[n, 3] x, float[n] y, float[3] w, float b) => (float[3] w_new, float b_new, float loss) {
    q = MatMul(x, w)
    p = Add(q, b)
    e = Sub(p, y)
    rate = Constant <value_float = 0.1> ()
    one = Constant <value_ints = [1]> ()
    zero = Constant <value_ints = [0]> ()
    column = Unsqueeze(e, one)
    products = Mul(x, column)
    g = ReduceMean <keepdims = 0> (products, zero)
    u = Mul(g, rate)
    w_new = Sub(w, u)
    m = ReduceMean <keepdims = 0> (e)
    v = Mul(m, rate)
    b_new = Sub(b, v)
    squares = Mul(e, e)
    loss = ReduceMean <keepdims = 0> (squares)
}"""


def make_model(
    folder: Path,
    key: Ed25519PrivateKey,
    w: tuple[float, ...],
    *,
    predict: str = PREDICT,
    evaluate: bool = True,
    tested: tuple[float, ...] | None = None,
    peak_bytes: int = 1 << 16,
) -> Path:
    """y = x w + b, with b personal and 0 at first; its vectors are those of `tested`. Returns the .bundle file."""
    f32: dict[str, Any] = {"dtype": "float32"}
    x = roles.Example(name="x", shape=("n", 3), **f32)
    y = roles.Label(name="y", shape=("n",), **f32)
    pw = roles.Parameter(name="w", tensor="w", shape=(3,), **f32)
    pb = roles.Personal(name="b", tensor="b", shape=(), **f32)
    loss = roles.Metric(name="loss", shape=(), reduction="mean", **f32)
    update: dict[str, Any] = {"weighting": "examples", "range": 4.0, "bits": 20, **f32}
    programs = {
        "predict": ("predict", predict, (x, pw, pb), (roles.Output(name="p", shape=("n",), **f32),)),
        "evaluate": ("evaluate", EVALUATE, (roles.Prediction(name="p", shape=("n",), output="p", **f32), y), (loss,)),
        "train": (
            "train",
            TRAIN,
            (x, y, pw, pb),
            (
                roles.Parameter(name="w_new", tensor="w", shape=(3,), **f32),
                roles.Personal(name="b_new", tensor="b", shape=(), **f32),
                loss,
            ),
        ),
        "finish": (
            "finish",
            FINISH,
            (
                pw,
                roles.Start(name="w0", tensor="w", shape=(3,), **f32),
                roles.Count(name="n", shape=(), of="examples", **f32),
            ),
            (
                roles.Update(name="dw", tensor="w", kind="delta", shape=(3,), clip=2.0, **update),
                roles.Update(name="weight", tensor="weight", kind="weight", shape=(), lowest=0.01, **update),
            ),
        ),
    }
    if not evaluate:
        del programs["evaluate"]
    values = {"w": np.array(w, np.float32), "b": np.float32(0)}
    expected = X @ np.array(w if tested is None else tested, np.float32)
    b.write_bundle(
        folder,
        name="linear",
        programs={
            name: b.Program(kind=kind, file=f"{name}.onnx", inputs=inputs, outputs=outputs)  # type: ignore[arg-type]
            for name, (kind, _, inputs, outputs) in programs.items()
        },
        graphs={
            f"{name}.onnx": parser.parse_model(text if text.startswith("<") else f"{HEAD} {text}").SerializeToString()
            for name, (_, text, _, _) in programs.items()
        },
        weights=b.write_weights({name: np.asarray(value) for name, value in values.items()}),
        parameters=b.parameter_specs({name: np.asarray(value) for name, value in values.items()}, ["w"]),
        limits=b.Limits(peak_bytes=peak_bytes, flops_per_example=12, upload_bytes=16),
        privacy=b.PrivacyPolicy(
            modes=("secure", "plain"),
            min_cohort=2,
            threshold=0.6,
            max_clip=2.0,
            max_bits=20,
            colluders=0.0,
            min_contributors=1,
        ),
        key=key,
        schedule=(b.Phase(program="train", epochs=2, batch_size=4),),
        strategy="fedavg",
        self_test=(
            b.SelfTest(file="vectors.safetensors", rtol=1e-5, atol=1e-5),
            b.write_weights({"example/x": X, "output/p": expected}),
        ),
    )
    file = folder.with_suffix(".bundle")
    b.pack(folder, file)
    return file


@dataclass
class Registry:
    """Versions of MODEL; `w` are their parameters by number."""

    federation: Federation
    w: dict[int, np.ndarray]

    def add(
        self,
        w: tuple[float, ...],
        *,
        promote: bool = True,
        model: str = MODEL,
        key: Ed25519PrivateKey | None = None,
        **more: Any,
    ) -> VersionInfo:
        """Another version: a bundle of its own."""
        folder = self.federation.folder / f"{model}-{len(list(self.federation.folder.iterdir()))}"
        file = make_model(folder, key or self.federation.publisher_key, w, **more)
        operator = self.federation.operator
        operator.models.create(model, POPULATION)
        digest = operator.bundles.upload(file).digest
        return self._added(operator.models.register(model, VersionRequest(bundle=digest)), np.array(w), promote)

    def helpers(self) -> list[Agent]:
        """Two devices that train; the rounds of `add_trained` are for such alone, and wait for no other."""
        return [self.federation.agent(number, allow_plain=True, attributes={"helper": True}) for number in (1, 2)]

    def add_trained(self, agents: list[Agent], *, promote: bool = True) -> VersionInfo:
        """Another version: what the agents make of version 1 in a plain round."""
        operator = self.federation.operator
        only = "helper" if all(agent.config.attributes for agent in agents) else ""
        plain: dict[str, Any] = {
            "eligibility": only,
            "privacy": "plain",
            "threshold": None,
            "deadlines": {"assigning": 3, "updating": 5},
        }
        bundle = operator.models.version(MODEL, 1).bundle
        task = self.federation.task(bundle=bundle, min_cohort=2, cohort=len(agents), **plain)
        self.federation.run(agents, lambda: operator.tasks.get(task.task_id).state != "running")
        assert self.federation.wait(task).state == "completed"
        made = operator.models.register(MODEL, VersionRequest(task_id=task.task_id))
        assert made.weights is not None
        return self._added(made, operator.weights.read(made.weights)["w"], promote)

    def _added(self, info: VersionInfo, w: np.ndarray, promote: bool) -> VersionInfo:
        if info.model == MODEL:
            self.w[info.number] = w.astype(np.float32)
        if promote:
            self.federation.operator.models.promote(info.model, info.number)
        return info

    def device(self, number: int = 0, **more: Any) -> Agent:
        return self.federation.agent(number, **{"adopt": True, "allow_plain": True, **more})

    def answer(self, number: int, personal: float | np.ndarray = 0.0) -> np.ndarray:
        """What version `number` says to X."""
        return np.asarray(X @ self.w[number] + np.float32(personal))

    def loss(self, number: int, device: int = 0) -> float:
        """Of the version on a device's examples, by its definition."""
        data = local_data(device)
        return float(np.mean((data["x"].astype(np.float64) @ self.w[number] - data["y"]) ** 2))

    def told(self, agent: Agent, name: str) -> list[dict[str, Any]]:
        """The details of the agent's events of that name."""
        return [
            dict(each.detail)
            for each in self.federation.events
            if each.name == name and each.device_id == agent.device_id
        ]

    def counted(self) -> dict[int, int | None]:
        """How many devices told the server that they fetched each version last."""
        return {each.number: each.downloaded for each in self.federation.operator.models.versions(MODEL)}
