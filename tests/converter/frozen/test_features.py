"""Train programs with and without a frozen backbone split off: the same losses and parameters on ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from archipel import Model, models, training
from archipel.bundle.roles import Example, Feature, Hyperparameter, Parameter, Seed, State, Step, role_of
from archipel.converter.features import split_features
from archipel.converter.repeated import repeated
from archipel.errors import ConversionError
from archipel.graph import check_model
from archipel.training import losses, optimizers

Arrays = Mapping[str, np.ndarray]
LOSS, SGD = losses.cross_entropy(), optimizers.sgd(momentum=0.9)


def written(inputs: str, body: str, **weights: tuple[int, ...] | np.ndarray) -> Model:
    """A model in ONNX's text form with the output float[batch, 4] y; weights given by shape are drawn."""
    rng, batch = np.random.default_rng(0), inputs.partition("[")[2].partition(",")[0]
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> agraph ({inputs}) => (float[{batch}, 4] y) {{ {body} }}'
    )
    for name, given in weights.items():
        drawn = rng.standard_normal(given, np.float32) / 4 if isinstance(given, tuple) else given
        proto.graph.initializer.append(onnx.numpy_helper.from_array(drawn, name))
    return Model.from_proto(proto, [name for name, given in weights.items() if isinstance(given, tuple)])


def step_of(model: Model, trainable: str | Sequence[str], **options: Any) -> Model:
    return training.step_graph(model, LOSS, SGD, trainable=trainable, **{"batch_norm": "frozen", **options})


def session(program: Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(program.to_bytes(), options, providers=["CPUExecutionProvider"])


def run(program: Model, batches: Sequence[Arrays]) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses, and parameters and state after the last batch."""
    signature, native = program.signature, session(program)
    tensors = dict(program.initial)
    found = []
    for number, batch in enumerate(batches):
        feed: dict[str, np.ndarray | None] = {}
        for port in signature.inputs:
            if isinstance(port, Parameter | State):
                first = np.full(port.shape, port.init, port.dtype) if isinstance(port, State) and not isinstance(
                    port.init, str) else None  # fmt: skip
                feed[port.name] = tensors.get(port.tensor, first)
            elif isinstance(port, Hyperparameter):
                feed[port.name] = np.asarray(0.1, port.dtype)
            elif isinstance(port, Step | Seed):
                feed[port.name] = np.asarray(number if isinstance(port, Step) else 7, port.dtype)
            else:
                feed[port.name] = batch[port.name]
        for port, value in zip(signature.outputs, native.run([p.name for p in signature.outputs], feed)):
            if isinstance(port, Parameter | State):
                tensors[port.tensor] = value
            elif port.name == "loss":
                found.append(float(value))
    return found, tensors


def draw(
    program: Model, batch: int = 6, count: int = 3, classes: int = 4, below: int = 1
) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        fields = {}
        for port in program.signature.inputs:
            shape = (6, *port.shape[1:])
            if isinstance(port, Example):
                floats = port.dtype == "float32"
                fields[port.name] = rng.standard_normal(shape, np.float32) if floats else rng.integers(0, below, shape)
            elif role_of(port) == "label":
                fields[port.name] = rng.integers(0, 4, shape)
        batches.append(fields)
    return batches


def features_of(program: Model, batch: Arrays) -> dict[str, np.ndarray]:
    names = [port.name for port in program.signature.outputs]
    return dict(zip(names, session(program).run(names, {p.name: batch[p.name] for p in program.signature.inputs})))


def check(step: Model, split: Mapping[str, Model], batches: list[dict[str, np.ndarray]], name: str = "train") -> None:
    """What the two must have in common; and that an example's features do not depend on the others."""
    features, train = split["features"], split[name]
    for program in (features, train):
        check_model(program.ir)
        for ports, infos in ((program.signature.inputs, program.inputs), (program.signature.outputs, program.outputs)):
            assert [(p.name, p.dtype, p.shape) for p in ports] == [(i.name, i.dtype, i.shape) for i in infos]
    made = {port.name: port for port in features.signature.outputs}
    for port in train.signature.inputs:
        assert not isinstance(port, Feature) or made[port.name] == port
    assert train.signature.outputs == step.signature.outputs
    expected, tensors = run(step, batches)
    found, got = run(train, [{**batch, **features_of(features, batch)} for batch in batches])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len(set(expected)) == len(expected)
    assert got.keys() == tensors.keys()
    for tensor, value in tensors.items():
        np.testing.assert_allclose(got[tensor], value, rtol=1e-6, atol=1e-6, err_msg=tensor)
    whole = features_of(features, batches[0])
    order = np.random.default_rng(1).permutation(len(batches[0]["label"]))
    moved = features_of(features, {name: array[order] for name, array in batches[0].items()})
    for name, value in whole.items():
        assert len(np.unique(value.round(4), axis=0)) > 1
        np.testing.assert_allclose(moved[name], value[order], rtol=1e-5, atol=1e-6)


def operators(program: Model) -> Counter[str]:
    return Counter(node.op_type for node in program.ir.graph)


def made(split: Mapping[str, Model]) -> dict[str, tuple[int | str, ...]]:
    return {port.name: port.shape for port in split["features"].signature.outputs}


@pytest.fixture(scope="module")
def lenet() -> Model:
    return Model.from_torch(models.lenet(0, classes=4).eval(), torch.zeros(2, 1, 28, 28))


@pytest.mark.parametrize(
    ("make", "width"),
    [
        (lambda: models.resnet8(0, classes=4), 64),
        pytest.param(lambda: models.mobilenet_v2(0, classes=4, width=0.25), 1280, marks=pytest.mark.slow),
    ],
    ids=["ResNet-8", "MobileNetV2"],
)
@pytest.mark.sampled(every=4)
def test_a_backbone_with_a_head_that_is_trained(make: Callable[[], nn.Module], width: int) -> None:
    module = make().eval()
    for layer in module.modules():  # statistics that say something
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean, -0.1, 0.1)
    step = step_of(Model.from_torch(module, torch.zeros(2, 3, 32, 32)), "output.*")
    size = len(step.to_bytes())
    split = split_features({"predict": Model(step.ir), "train": step, "finish": Model(step.ir)})
    assert list(split) == ["predict", "features", "train", "finish"]
    assert list(made(split).values()) == [("batch", width)]
    train = operators(split["train"])
    assert not {"Conv", "BatchNormalization", "Relu", "Clip", "GlobalAveragePool"} & set(train)
    assert train["ReduceMean"] == 2  # of loss and accuracy; the one of the pooling is frozen
    assert operators(split["features"])["Conv"] == operators(step)["Conv"]
    assert [role_of(port) for port in split["train"].signature.inputs][:2] == ["feature", "label"]
    assert len(split["train"].to_bytes()) < size / 10
    batches = draw(step)
    check(step, split, batches)
    (name,) = made(split)
    with torch.no_grad():
        expected = nn.Sequential(*list(module)[:-1])(torch.from_numpy(batches[0]["input"]))
    np.testing.assert_allclose(features_of(split["features"], batches[0])[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.sampled(every=3)
def test_nothing_is_changed_in_place(lenet: Model) -> None:
    step = step_of(lenet, "output.*")
    before, signature = step.to_bytes(), step.signature
    programs = {"train": step}
    split = split_features(programs)
    assert "features" in split
    assert programs == {"train": step}
    assert (step.to_bytes(), step.signature) == (before, signature)
    assert split["train"].initial.keys() == step.initial.keys()


MLP = "a = Gemm (x, w1, b1) b = Relu (a) c = Gemm (b, w2, b2) d = Tanh (c) y = Gemm (d, w3, b3)"
LAYERS = {"w1": (30, 20), "b1": (20,), "w2": (20, 12), "b2": (12,), "w3": (12, 4), "b3": (4,)}


def mlp(batch: str = "batch") -> Model:
    return written(f"float[{batch}, 30] x", MLP, **LAYERS)


def test_a_head_of_several_layers() -> None:
    step = step_of(mlp(), ["?2", "?3"])
    split = split_features({"train": step})
    assert made(split) == {"features/b": ("batch", 20)}  # behind the activation
    assert operators(split["features"]) == {"Gemm": 1, "Relu": 1}
    check(step, split, draw(step))


TWO_INPUTS = """a = Conv (picture, w1) b = Relu (a) c = Conv (b, w2) p = Flatten (c) f = MatMul (facts, w3) t = Tanh (f)
all = Concat<axis = 1> (p, t) y = MatMul (all, w4)"""


def two_inputs() -> Model:
    return written("float[batch, 1, 8, 8] picture, float[batch, 5] facts", TWO_INPUTS,
                   w1=(8, 1, 3, 3), w2=(3, 8, 3, 3), w3=(5, 8), w4=(56, 4))  # fmt: skip


def test_an_input_that_trained_layers_read_stays() -> None:
    step = step_of(two_inputs(), ["w3", "w4"])
    split = split_features({"train": step})
    assert [port.name for port in split["features"].signature.inputs] == ["picture"]
    assert [port.name for port in split["train"].signature.inputs if isinstance(port, Example)] == ["facts"]
    assert made(split) == {"features/p": ("batch", 48)}
    check(step, split, draw(step))


def test_branches_that_are_both_frozen_meet_in_features() -> None:
    step = step_of(two_inputs(), "w4")
    split = split_features({"train": step})
    assert [port.name for port in split["features"].signature.inputs] == ["picture", "facts"]
    assert made(split) == {"features/all": ("batch", 56)}
    assert not [port for port in split["train"].signature.inputs if isinstance(port, Example)]
    check(step, split, draw(step))


def test_a_residual_backbone() -> None:
    """Its result is read twice: by the trained layer and around it."""
    body = "a = MatMul (x, w1) b = Relu (a) c = MatMul (b, w2) r = Add (c, x) t = MatMul (r, w3) u = Relu (t) "
    model = written("float[batch, 16] x", body + "z = Add (r, u) y = MatMul (z, w4)",
                    w1=(16, 16), w2=(16, 16), w3=(16, 16), w4=(16, 4))  # fmt: skip
    step = step_of(model, ["w3", "w4"])
    split = split_features({"train": step})
    assert made(split) == {"features/r": ("batch", 16)}
    assert operators(split["features"]) == {"MatMul": 2, "Relu": 1, "Add": 1}
    check(step, split, draw(step))


def test_what_mixes_examples_is_no_feature() -> None:
    """The mean over the batch is taken away before a frozen layer, and behind it."""
    weights = {"w1": (64, 16), "w2": (16, 4), "zero": np.array([0])}
    body = "m = ReduceMean (x, zero) c = Sub (x, m) a = MatMul (c, w1) y = MatMul (a, w2)"
    step = step_of(written("float[batch, 64] x", body, **weights), "w2")
    assert split_features({"train": step}) == {"train": step}
    body = "a = MatMul (x, w1) m = ReduceMean (a, zero) c = Sub (a, m) y = MatMul (c, w2)"
    step = step_of(written("float[batch, 64] x", body, **weights), "w2")
    split = split_features({"train": step})
    assert made(split) == {"features/a": ("batch", 16)}
    assert operators(split["features"]) == {"MatMul": 1}
    check(step, split, draw(step))


NORMALIZED = "n = BatchNormalization (a, scale, shift, mean, variance)"
DROPPED = "n = Dropout (a)"


@pytest.mark.parametrize(
    ("between", "options"),
    [(NORMALIZED, {"batch_norm": "train"}), (DROPPED, {})],
    ids=["statistics of the batch", "dropout"],
)
def test_what_training_changes_ends_the_backbone(between: str, options: dict[str, Any]) -> None:
    body = f"a = Conv (x, w1) {between} r = Relu (n) c = Conv (r, w2) f = Flatten (c) y = MatMul (f, w3)"
    weights: dict[str, tuple[int, ...] | np.ndarray] = {"w1": (4, 3, 3, 3), "w2": (4, 4, 3, 3), "w3": (16, 4)}
    if between == NORMALIZED:
        weights.update(scale=(4,), shift=(4,), mean=(4,), variance=np.ones(4, np.float32))
    model = written("float[batch, 3, 6, 6] x", body, **weights)
    step = step_of(model, "w3", **options)
    split = split_features({"train": step})
    assert operators(split["features"]) == {"Conv": 1}
    assert operators(split["train"])["Conv"] == 1
    check(step, split, draw(step))
    whole = split_features({"train": step_of(model, "w3", dropout=False)})
    assert operators(whole["features"])["Conv"] == 2


def test_cheap_operators_stay_where_less_has_to_be_kept() -> None:
    """A small result is made large again for the trained layer, and cut into patches for its gradient."""
    body = """a = Conv (x, w1) p = AveragePool<kernel_shape = [4, 4], strides = [4, 4]> (a) s = Relu (p)
    l = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (s, , four)
    t = Conv (l, w2) f = Flatten (t) y = MatMul (f, w3)"""
    model = written("float[batch, 1, 12, 12] x", body, w1=(4, 1, 5, 5), w2=(2, 4, 3, 3), w3=(72, 4),
                    four=np.array([1, 1, 4, 4], np.float32))  # fmt: skip
    step = step_of(model, ["w2", "w3"])
    split = split_features({"train": step})
    assert made(split) == {"features/s": ("batch", 4, 2, 2)}
    assert "Resize" in operators(split["train"])
    assert operators(split["features"])["Relu"] == 1  # of the same size: it is not left to every step
    check(step, split, draw(step))


SCALED = written("float[batch, 16] x", "s = Sub (x, half) y = MatMul (s, w)", half=np.float32(0.5), w=(16, 4))
TOKENS = written("int64[batch, 5] x", "e = Gather (table, x) m = ReduceMean<keepdims = 0> (e, one) y = MatMul (m, w)",
                 table=(10, 32), one=np.array([1]), w=(32, 4))  # fmt: skip
# Few multiplications for each byte of its result.
WIDE = written("float[batch, 1, 8, 8] x", "a = Conv (x, v) r = Relu (a) b = Conv (r, w) g = GlobalAveragePool (b) "
               "y = Flatten (g)", v=(32, 1, 1, 1), w=(4, 32, 1, 1))  # fmt: skip


@pytest.mark.parametrize("model", [SCALED, TOKENS, WIDE], ids=["scaling", "looking up", "wide"])
def test_what_is_not_worth_keeping(model: Model) -> None:
    step = step_of(model, "w")
    programs = {"predict": model, "train": step}
    assert split_features(programs) == programs


@pytest.mark.parametrize(("width", "worth"), [(300, True), (900, False)])
def test_a_backbone_is_split_off_where_it_is_a_tenth_of_the_step(width: int, worth: bool) -> None:
    """By hand, of an example: the backbone multiplies 256 * 8 numbers; the layers behind it 8 * width and width * 4,
    once to predict and once for their weights' gradients, and width * 4 for what the first of them learns. Two FLOPs
    each: the backbone is 20 % of the step for a width of 300, and 8 % for 900. Kept are 8 numbers only."""
    backbone, head = 256 * 8, 2 * (8 + 4) * width + 4 * width
    assert (backbone / (backbone + head) > 0.1) == worth
    model = written("float[batch, 256] x", "f = MatMul (x, v) h = MatMul (f, u) r = Relu (h) y = MatMul (r, w)",
                    v=(256, 8), u=(8, width), w=(width, 4))  # fmt: skip
    programs = {"train": step_of(model, ["u", "w"])}
    assert ("features" in split_features(programs)) == worth


def test_without_train_programs() -> None:
    model = mlp()
    assert split_features({"predict": model}) == {"predict": model}


def test_several_train_programs_share_the_features() -> None:
    model = mlp()
    steps = {
        "head": step_of(model, "?3"),
        "tail": training.step_graph(model, LOSS, optimizers.sgd(), trainable=["?2", "?3"]),
        "again": training.step_graph(model, LOSS, optimizers.adam(), trainable="?3"),
    }
    split = split_features(steps)
    assert list(split) == ["features", *steps]
    assert sorted(made(split).values()) == [("batch", 12), ("batch", 20)]
    assert operators(split["features"]) == {"Gemm": 2, "Tanh": 1, "Relu": 1}
    reads = {name: [p.name for p in split[name].signature.inputs if isinstance(p, Feature)] for name in steps}
    assert reads == {"head": ["features/d"], "tail": ["features/b"], "again": ["features/d"]}
    for name, step in steps.items():
        check(step, split, draw(step), name)


def test_a_fixed_batch() -> None:
    step = step_of(mlp("6"), "?3")
    split = split_features({"train": step})
    assert made(split) == {"features/d": (6, 12)}
    check(step, split, draw(step))


@pytest.mark.slow
@pytest.mark.parametrize("make", ["transformer", "char_rnn"])
def test_models_of_sequences(make: str) -> None:
    """Attention and recurrent layers move the batch axis, and their exporters write shape arithmetic."""
    options = {"layers": 1, "width": 16} if make == "transformer" else {"hidden": 8}
    module = getattr(models, make)(0, vocabulary=12, **options).eval()
    model = Model.from_torch(module, torch.zeros(2, 10, dtype=torch.int64))
    step = training.step_graph(model, losses.cross_entropy(axis=-1), SGD, trainable="decoder.*")
    split = split_features({"train": step})
    assert not {"Softmax", "LSTM", "GRU", "Gather", "Gelu"} & set(operators(split["train"]))
    assert not [port for port in split["train"].signature.inputs if isinstance(port, Example)]
    check(step, split, draw(step, below=12))


def test_features_of_several_steps_in_one_graph(lenet: Model) -> None:
    step = step_of(lenet, "output.*")
    split = split_features({"train": step})
    train, three = split["train"], repeated(split["train"], 3)
    assert [port.shape for port in three.signature.inputs if isinstance(port, Feature)] == [(3, "batch", 84)]
    check_model(three.ir)
    batches = [{**batch, **features_of(split["features"], batch)} for batch in draw(step)]
    expected, tensors = run(train, batches)
    feed = {name: np.stack([batch[name] for batch in batches]) for name in batches[0] if name != "input"}
    feed.update({port.name: np.asarray(0.1, np.float32) for port in three.signature.inputs if port.name == "lr"})
    for port in three.signature.inputs:
        if isinstance(port, Parameter | State):
            feed[port.name] = train.initial.get(port.tensor, np.zeros(port.shape, port.dtype))
    found = dict(zip([p.name for p in three.signature.outputs], session(three).run(None, feed)))
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-6)
    for port in three.signature.outputs:
        if isinstance(port, Parameter):
            np.testing.assert_allclose(found[port.name], tensors[port.tensor], rtol=1e-6, atol=1e-6)


def test_errors() -> None:
    several = training.step_graph(mlp(), LOSS, SGD, trainable="?3", steps=2)
    with pytest.raises(ConversionError, match="program 'train' makes 2 steps; split features before"):
        split_features({"train": several})
    with pytest.raises(ConversionError, match="a program called 'features' already"):
        split_features(split_features({"train": step_of(mlp(), "?3")}))
