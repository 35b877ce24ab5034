"""Model.from_torch: names, shapes, numbers, silence, and what it refuses."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.converter.importers.torch_module import _translations
from archipel.errors import MissingExtraError, ModelImportError
from archipel.graph import check_model
from archipel.graph.passes.inference import optimize_for_inference
from archipel.graph.shapes import constant_array


class Shared(nn.Module):
    """Two inputs, two outputs, a transposed parameter used twice, a buffer, and one parameter never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(6, 4))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.drop(self.norm(x @ self.embed)) * scale
        return hidden @ self.embed.t(), hidden.flatten(1).sum(1)


@pytest.fixture(scope="module")
def shared() -> tuple[nn.Module, tuple[torch.Tensor, ...], Model]:
    module, example = Shared(), (torch.randn(3, 6), torch.rand(3, 1))
    return module, example, Model.from_torch(module, example)


def run(model: Model, *inputs: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    return session.run(None, {port.name: array for port, array in zip(model.inputs, inputs)})


@pytest.mark.sampled(every=3)
def test_parameters_have_the_names_and_values_of_the_state_dict(
    shared: tuple[nn.Module, tuple[torch.Tensor, ...], Model],
) -> None:
    module, _, model = shared
    state = module.state_dict()
    assert set(model.parameters) == {"embed", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    for name, value in model.parameters.items():
        np.testing.assert_array_equal(value, state[name].numpy())


def test_batch_is_symbolic_and_outputs_are_named(shared: tuple[nn.Module, tuple[torch.Tensor, ...], Model]) -> None:
    _, _, model = shared
    assert [(p.name, p.dtype, p.shape) for p in model.inputs] == [
        ("x", "float32", ("batch", 6)),
        ("scale", "float32", ("batch", 1)),
    ]
    assert [(p.name, p.shape) for p in model.outputs] == [("output_0", ("batch", 6)), ("output_1", ("batch",))]
    check_model(model.ir)


def test_another_batch_size_gives_the_modules_outputs(
    shared: tuple[nn.Module, tuple[torch.Tensor, ...], Model],
) -> None:
    module, _, model = shared
    x, scale = torch.randn(5, 6), torch.rand(5, 1)
    was_training = module.training
    with torch.no_grad():
        expected = module.eval()(x, scale)
    module.train(was_training)
    for ours, theirs in zip(run(model, x.numpy(), scale.numpy()), expected):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_the_module_is_left_in_its_mode(shared: tuple[nn.Module, tuple[torch.Tensor, ...], Model]) -> None:
    module, _, _ = shared
    assert module.training
    assert module.drop.training


def test_an_example_of_one_still_has_a_free_batch() -> None:
    model = Model.from_torch(nn.Linear(2, 2), torch.zeros(1, 2))
    assert model.inputs[0].shape == ("batch", 2)
    assert run(model, np.zeros((7, 2), np.float32))[0].shape == (7, 2)


def test_fixed_batch() -> None:
    model = Model.from_torch(nn.Linear(2, 2), torch.zeros(3, 2), dynamic_batch=False)
    assert model.inputs[0].shape == (3, 2)


def test_the_exporter_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    Model.from_torch(nn.Linear(2, 2), torch.zeros(1, 2))
    assert capfd.readouterr() == ("", "")


def test_no_path_of_this_machine_is_in_the_file(shared: tuple[nn.Module, tuple[torch.Tensor, ...], Model]) -> None:
    _, _, model = shared
    data = model.to_bytes()
    assert b".py" not in data
    assert b"site-packages" not in data


@pytest.mark.sampled(every=3)
def test_flatten_becomes_a_constant_reshape() -> None:
    model = Model.from_torch(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), torch.zeros(1, 1, 4, 4))
    assert [node.op_type for node in model.ir.graph] == ["Conv", "Reshape", "Gemm"]


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(3, 4)


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | str]:
        return {"a": x, "b": "text"}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(2, 3, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.layer(packed)[1]  # type: ignore[no-any-return]


REFUSED = {
    "shape": (
        nn.Linear(2, 2),
        torch.zeros(3, 5),
        {},
        r"does not run on the example, float32\[3, 5\]: .*; give examples as the model takes them",
    ),
    "data-dependent": (Branches(), torch.zeros(2, 2), {}, "Branches cannot be exported: .*; forward decides by values"),
    "fixed batch": (
        Fixed(),
        torch.zeros(2, 6),
        {},
        r"one batch size only: input 'x' .* \[2, 6\]; .*dynamic_batch=False",
    ),
    "not a tensor": (nn.Linear(2, 2), [[1.0, 2.0]], {}, "example: expected tensors or NumPy arrays, got list"),
    "batches differ": (nn.Bilinear(2, 2, 2), (torch.zeros(2, 2), torch.zeros(3, 2)), {}, r"the sizes are \[2, 3\]"),
    "packed": (
        Packed(),
        (torch.zeros(2, 5, 2), torch.tensor([3, 5])),
        {},
        r"Packed packs sequences \(pack_padded_sequence\), .*: give the layer the padded sequences",
    ),
    "projection": (
        nn.Sequential(nn.Flatten(2), nn.LSTM(2, 4, proj_size=3)),
        torch.zeros(2, 5, 2),
        {},
        "Sequential: LSTM '1' has proj_size=3, and ONNX's LSTM has no projection; leave proj_size out",
    ),
    "not tensors out": (Named(), torch.zeros(2, 2), {}, "the module returns str"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.sampled(every=6)
def test_refusals_say_why(case: str) -> None:
    module, example, options, message = REFUSED[case]
    with pytest.raises(ModelImportError, match=message):
        Model.from_torch(module, example, **options)


def test_a_wrong_export_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    real = torch.onnx.export

    def wrong(*args: Any, **kwargs: Any) -> Any:
        # As if the exporter had a bug: other weights than the module's.
        changed = nn.Linear(2, 2)
        return real(changed, *args[1:], **kwargs)

    monkeypatch.setattr(torch.onnx, "export", wrong)
    with pytest.raises(ModelImportError, match="Linear: the import differs from the module by"):
        Model.from_torch(module, torch.ones(2, 2))


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"torch is not installed.*archipel\[cloud\]"):
        Model.from_torch(object(), object())  # type: ignore[arg-type]


def test_dropout_stays_in_the_graph_and_is_off() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(self.layers(x), 0.25, self.training)

    original = torch.nn.functional.dropout
    net, x = Net(), torch.randn(3, 4)
    model = Model.from_torch(net, x)
    assert torch.nn.functional.dropout is original
    ratios = [constant_array(node.inputs[1]) for node in model.ir.graph if node.op_type == "Dropout"]
    np.testing.assert_allclose(np.array(ratios), [0.3, 0.25], rtol=1e-6)
    np.testing.assert_allclose(run(model, x.numpy())[0], net.eval()(x).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("layer", "shape"), [("Dropout1d", (4, 6, 5)), ("Dropout2d", (4, 6, 3, 5)),
                                              ("Dropout3d", (4, 6, 2, 3, 2))])  # fmt: skip
@pytest.mark.sampled(every=4)
def test_dropout_of_whole_channels(layer: str, shape: tuple[int, ...]) -> None:
    """Off in inference, where nothing is left of it; a step drops whole channels, each for itself in each example."""
    linear = torch.nn.Linear(math.prod(shape[1:]), 1)
    torch.nn.init.zeros_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    net = torch.nn.Sequential(getattr(torch.nn, layer)(0.5), torch.nn.Flatten(), linear)
    original = torch.nn.functional.dropout2d
    model = Model.from_torch(net, torch.ones(shape))
    assert torch.nn.functional.dropout2d is original
    assert sum(node.op_type == "Dropout" for node in model.ir.graph) == 1
    quiet = model.copy()
    optimize_for_inference(quiet.ir, list(quiet.parameters))
    assert {node.op_type for node in quiet.ir.graph} <= {"Flatten", "Reshape", "Gemm"}
    # Weights of 0 and a label of 1 / 2: a step of rate 1 adds to each weight what it has read.
    step = training.step_graph(model, training.losses.mse(), training.optimizers.sgd(lr=1.0))
    runner = training.StepRunner(step, seed=3)
    runner.step((np.ones((1, *shape[1:]), np.float32), np.full((1, 1), 0.5, np.float32)))
    read = runner.tensors["2.weight"].reshape(shape[1], -1)
    assert set(read[:, 0].tolist()) == {0.0, 2.0}
    np.testing.assert_array_equal(read, np.broadcast_to(read[:, :1], read.shape))


@pytest.mark.sampled(every=3)
def test_the_exporters_translations_are_read_once_and_left_as_they_were() -> None:
    from torch.onnx._internal.exporter import _registration

    before = _registration.onnxscript_apis.get_torchlib_ops
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    first, second = (Model.from_torch(layer, torch.zeros(2, 3)).to_bytes() for _ in range(2))
    assert first == second
    assert _translations.cache_info().misses == 1
    assert _translations.cache_info().hits >= 1
    assert _registration.onnxscript_apis.get_torchlib_ops is before
