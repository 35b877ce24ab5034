"""The larger networks: the parameter counts that others publish, first weights, shapes, names, and what is hidden."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, models

# Of networks as published: torchvision 0.25 (ResNet with 1000 classes), Hugging Face Transformers (GPT-2 small, and
# BERT-base without a head and for masked tokens), Kim et al. 2021, table 2 (in thousands). ResNet-18 for CIFAR-10 is
# 64 * (9 * 3) - 64 * (49 * 3) for the stem and 513 * (10 - 1000) for the classes more than with 1000 classes.
SIZES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (lambda: models.resnet18(0), 11_689_512),
    "resnet18 small": (
        lambda: models.resnet18(0, classes=10, stem="small"),
        11_689_512 - 64 * 3 * (49 - 9) - 513 * 990,
    ),
    "resnet50": (lambda: models.resnet50(0), 25_557_032),
    "gpt": (lambda: models.gpt(0), 124_439_808),
    "bert": (lambda: models.bert(0), 109_482_240),
    "bert masked_tokens": (lambda: models.bert(0, "masked_tokens"), 109_514_298),
    "bert classification": (lambda: models.bert(0, "classification"), 109_482_240 + 2 * (768 + 1)),
    "bc_resnet": (lambda: models.bc_resnet(0), 9_232),
    # 4 convolutions of 5 samples, two LSTM layers with two biases each, and the output.
    "deep_conv_lstm": (
        lambda: models.deep_conv_lstm(0),
        64 * 6 + 3 * 64 * (5 * 64 + 1) + 512 * (384 + 128 + 2) + 512 * (128 + 128 + 2) + 129 * 6,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_many_as_published(name: str) -> None:
    make, expected = SIZES[name]
    with torch.device("meta"):  # shapes without memory
        module = make()
    assert sum(parameter.numel() for parameter in module.parameters()) == expected


@pytest.mark.parametrize(("width", "thousands"), [(8, 9.2), (64, 321)])
def test_bc_resnets_are_as_large_as_in_the_paper(width: int, thousands: float) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in models.bc_resnet(0, width=width).parameters())
    assert count / 1000 == pytest.approx(thousands, rel=0.005)


@pytest.mark.parametrize(("name", "tensors"), [("resnet18", 122), ("resnet50", 320)])
def test_tensors_are_called_as_in_torchvision(name: str, tensors: int) -> None:
    """As in the files that torchvision publishes: some names of layers, and how many tensors there are."""
    with torch.device("meta"):
        state = getattr(models, name)(0).state_dict()
    assert len(state) == tensors
    first = {"resnet18": (64, 64, 3, 3), "resnet50": (64, 64, 1, 1)}[name]
    assert state["layer1.0.conv1.weight"].shape == first
    assert state["layer4.1.bn2.running_var"].shape == (512,)
    assert state["layer3.0.downsample.1.num_batches_tracked"].shape == ()
    assert state["fc.weight"].shape[0] == 1000
    assert ("layer1.0.downsample.0.weight" in state) == (name == "resnet50")


def tokens(*shape: int, below: int = 20) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, below, shape))


SMALL: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": lambda seed: models.resnet18(seed, 1, 3, "small", 8),
    "resnet50": lambda seed: models.resnet50(seed, 1, 3, "imagenet", 4),
    "bc_resnet": lambda seed: models.bc_resnet(seed, 3),
    "deep_conv_lstm": lambda seed: models.deep_conv_lstm(seed, 3, 3, 4, 8),
    "gpt": lambda seed: models.gpt(seed, 20, 8, 16, 2, 2),
    "bert": lambda seed: models.bert(seed, "none", 2, 20, 8, 16, 2, 2),
}
INPUTS: dict[str, tuple[torch.Tensor, ...]] = {
    "resnet18": (torch.rand(2, 1, 16, 16),),
    "resnet50": (torch.rand(2, 1, 64, 48),),
    "bc_resnet": (torch.rand(2, 1, 40, 30),),
    "deep_conv_lstm": (torch.rand(2, 3, 24),),
    "gpt": (tokens(2, 6),),
    "bert": (tokens(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), tokens(2, 6, below=2)),
}
LONG = {"resnet18", "resnet50", "bc_resnet", "deep_conv_lstm"}
SHAPES = {"gpt": (2, 6, 20), "bert": (2, 6, 16)}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.sampled(every=6)
def test_the_seed_decides_and_answers_have_their_shape(name: str) -> None:
    one, same, other = (SMALL[name](seed).eval() for seed in (5, 5, 6))
    state = one.state_dict()
    assert all(torch.equal(tensor, same.state_dict()[key]) for key, tensor in state.items())
    assert any(not torch.equal(tensor, other.state_dict()[key]) for key, tensor in state.items())
    with torch.no_grad():
        answer = one(*INPUTS[name])
    answer = answer[0] if isinstance(answer, tuple) else answer
    assert answer.shape == SHAPES.get(name, (2, 3))
    assert answer.dtype == torch.float32
    assert torch.isfinite(answer).all()


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in SMALL])
def test_graphs_keep_names_answers_and_dropout(name: str) -> None:
    module = SMALL[name](0).eval()
    model = Model.from_torch(module, INPUTS[name])
    # A counter of batches has no part in what a network computes.
    expected = {key for key in module.state_dict() if not key.endswith("num_batches_tracked")}
    assert set(model.parameters) == expected
    drops = sum(node.op_type == "Dropout" for node in model.ir.graph)
    assert drops == {"bc_resnet": 12, "deep_conv_lstm": 1, "gpt": 1 + 2 * 3, "bert": 1 + 2 * 3}.get(name, 0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_decoders_do_not_look_ahead(dropout: float) -> None:
    """With Dropout attention is written out, and without it is PyTorch's own; in inference both must be the same."""
    module = models.gpt(1, 20, 8, 16, 2, 2, dropout=dropout).eval()
    whole = tokens(1, 8)
    changed = whole.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 20
    with torch.no_grad():
        one, two = module(whole), module(changed)
        plain = models.gpt(1, 20, 8, 16, 2, 2, dropout=0.0).eval()(whole)
    torch.testing.assert_close(one[0, :5], two[0, :5], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one[0, 5:], two[0, 5:])
    torch.testing.assert_close(one, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_encoders_leave_out_what_the_mask_hides(dropout: float) -> None:
    module = models.bert(1, "classification", 3, 20, 8, 16, 2, 2, dropout=dropout).eval()
    ids, types = tokens(1, 8), torch.zeros(1, 8, dtype=torch.int64)
    mask = torch.tensor([[1] * 5 + [0] * 3])
    changed = ids.clone()
    changed[0, 5:] = 0
    with torch.no_grad():
        hidden, whole = module(ids, mask, types), module(ids, torch.ones_like(mask), types)
        torch.testing.assert_close(hidden, module(changed, mask, types), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(hidden, module(ids[:, :5], mask[:, :5], types[:, :5]), rtol=1e-5, atol=1e-6)
        nothing = module(ids, torch.zeros_like(mask), types)
    assert not torch.allclose(hidden, whole)
    assert torch.isfinite(nothing).all()


def test_the_embedding_is_the_output_matrix() -> None:
    module = models.gpt(0, 20, 8, 16, 2, 1)
    assert sum(name == "tokens.weight" for name, _ in module.named_parameters()) == 1
    module(tokens(2, 8)).sum().backward()
    # A sum over logits has a gradient for every row, also for tokens that the batch has not.
    assert (module.tokens.weight.grad.abs().sum(1) > 0).all()


def test_first_weights_are_as_the_papers_say() -> None:
    gpt = models.gpt(0, 500, 64, 128, 4, 8)
    assert gpt.tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert gpt.layers[3].narrow.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    bert = models.bert(0, "none", 2, 500, 64, 128, 4, 1)
    assert bert.tokens.weight.abs().max().item() <= 0.04
    assert not bert.layers[0].query.bias.any()
    convolution = models.resnet18(0).layer4[1].conv2.weight
    assert convolution.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.resnet18(0, stem="large"), "stem must be 'imagenet' or 'small', is 'large'"),
        (lambda: models.gpt(0, width=10, heads=4), "width must be a multiple of heads, is 10 with 4 heads"),
        (lambda: models.bert(0, "tokens"), "head must be 'none', 'classification' or 'masked_tokens', is 'tokens'"),
        (lambda: models.bert(0, width=10, heads=4), "width must be a multiple of heads, is 10 with 4 heads"),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
