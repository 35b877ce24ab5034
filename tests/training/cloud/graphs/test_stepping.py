"""Node by node: results as they come, the first NaN by its node, errors that name their node."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch

import archipel
from archipel.errors import NotANumberError
from archipel.mode import in_mode
from archipel.training.cloud import TorchModule


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Root(torch.nn.Module):
    """Its gradient at zero is 0 times infinity, its value is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x * self.scale) * 0.0


@pytest.fixture
def module() -> TorchModule:
    torch.manual_seed(0)
    return TorchModule(archipel.Model.from_torch(Network(), torch.zeros(2, 4)))


@pytest.fixture(autouse=True)
def mode() -> Iterator[None]:
    before = archipel.get_mode()
    yield
    archipel.set_mode(before)


@pytest.mark.sampled(every=3)
def test_the_steps_are_the_nodes_of_the_graph(module: TorchModule) -> None:
    x = torch.ones(5, 4)
    runs = list(module.steps(x))
    assert [run.op_type for run in runs] == ["Gemm", "Relu", "Gemm"]
    (last,) = runs[-1].values.values()
    assert torch.equal(last, module(x))
    assert str(runs[1]).startswith("Relu ")
    assert str(runs[1]).endswith("[5, 8]")


@pytest.mark.sampled(every=3)
def test_eager_computes_the_same(module: TorchModule) -> None:
    x = torch.randn(5, 4)
    whole = module(x)
    archipel.set_mode("eager")
    assert torch.equal(module(x), whole)


@pytest.mark.sampled(every=3)
def test_watched_values_are_shown(module: TorchModule) -> None:
    seen: list[str] = []
    module.watch("relu*", lambda name, value: seen.append(f"{name} {tuple(value.shape)}"))
    module(torch.ones(2, 4))
    assert seen == []  # only node by node
    with in_mode("eager"):
        module(torch.ones(2, 4))
    assert seen == ["relu (2, 8)"]


@pytest.mark.sampled(every=3)
def test_the_first_nan_names_its_node(module: TorchModule) -> None:
    with torch.no_grad():
        module.get_parameter("first.bias")[3] = float("nan")
    assert module(torch.ones(2, 4)).isnan().any()
    archipel.set_mode("eager")
    with pytest.raises(
        NotANumberError, match=r"^Gemm 'node_linear' has computed NaN in 'linear', in 2 of 16 elements$"
    ):
        module(torch.ones(2, 4))


@pytest.mark.sampled(every=3)
def test_a_nan_gradient_names_its_value() -> None:
    module = TorchModule(archipel.Model.from_torch(Root(), torch.ones(2, 4)))
    archipel.set_mode("eager")
    total = module(torch.zeros(2, 4)).sum()
    with pytest.raises(NotANumberError, match=r"the gradient of 'mul', which Mul 'node_mul' computes"):
        torch.autograd.backward(total)


@pytest.mark.sampled(every=3)
def test_an_error_of_pytorch_has_a_note_with_the_node(module: TorchModule) -> None:
    archipel.set_mode("eager")
    with pytest.raises(RuntimeError) as caught:
        module(torch.ones(2, 7))
    assert caught.value.__notes__ == ["in Gemm 'node_linear', which computes 'linear'"]


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'graph' or 'eager'"):
        archipel.set_mode("fast")  # type: ignore[arg-type]


@pytest.mark.sampled(every=3)
def test_inputs_by_name(module: TorchModule) -> None:
    x = torch.ones(2, 4)
    (name,) = module.input_names
    assert torch.equal(module(**{name: x}), module(x))
    with pytest.raises(TypeError, match="'y' is none of them"):
        module(y=x)
    with pytest.raises(TypeError, match="missing"):
        module()


@pytest.mark.sampled(every=3)
def test_copies_and_pickles_are_of_their_own(module: TorchModule) -> None:
    x = torch.randn(3, 4)
    module.get_parameter("first.weight").requires_grad_(False)
    module.train()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert isinstance(other, TorchModule)
        assert torch.equal(other(x), module(x))
        assert other.training
        assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in module.parameters()]
        with torch.no_grad():
            other.get_parameter("second.bias").add_(1.0)
        assert not torch.equal(other(x), module(x))


@pytest.mark.sampled(every=3)
def test_to_model_has_the_present_weights(module: TorchModule) -> None:
    before = module.source.parameters["second.bias"].copy()
    with torch.no_grad():
        module.get_parameter("second.bias").fill_(7.0)
    model = module.to_model()
    assert (model.parameters["second.bias"] == 7.0).all()
    assert (module.source.parameters["second.bias"] == before).all()
    x = torch.randn(3, 4)
    assert torch.equal(TorchModule(model)(x), module(x))
