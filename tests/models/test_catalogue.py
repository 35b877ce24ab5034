"""What the catalogue says of each network, counted again by PyTorch without memory for weights."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from archipel import Model, models
from archipel.converter.limits import compute_limits
from archipel.errors import CatalogueError
from archipel.models.catalogue import CATALOGUE, find


def test_it_has_every_network() -> None:
    assert sorted(CATALOGUE) == sorted(models.__all__)
    for name, network in CATALOGUE.items():
        assert (network.name, network.make) == (name, getattr(models, name))
        # What the catalogue says holds for the arguments as they are; a network needs no others.
        assert [p.name for p in inspect.signature(network.make).parameters.values() if p.default is p.empty] == ["seed"]


# PyTorch takes LSTM apart, a step at a time.
RECURRENT = {"char_rnn", "deep_conv_lstm"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in RECURRENT else n for n in CATALOGUE])
@pytest.mark.sampled(every=6)
def test_parameters_flops_and_shapes(name: str) -> None:
    network = CATALOGUE[name]
    with torch.device("meta"), torch.no_grad():
        module = network.make(0).eval()
        inputs = [torch.from_numpy(array).to("meta") for array in network.example(1)]
        with FlopCounterMode(display=False) as counter:
            answers = module(*inputs)
    assert sum(parameter.numel() for parameter in module.parameters()) == network.parameters
    assert counter.get_total_flops() == network.flops
    answers = answers if isinstance(answers, tuple) else (answers,)
    assert tuple(tuple(answer.shape[1:]) for answer in answers) == network.outputs
    assert {answer.dtype for answer in answers} == {torch.float32}
    assert list(inspect.signature(module.forward).parameters) == [each.name for each in network.inputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - {"gpt", "bert"}))
def test_peak_bytes(name: str) -> None:
    """Those of the two largest take minutes and gigabytes."""
    network = CATALOGUE[name]
    model = Model.from_torch(network.make(0), tuple(map(torch.from_numpy, network.example())))
    assert compute_limits({"model": model}, 1).peak_bytes == network.peak_bytes
    assert [(port.name, port.dtype, port.shape[1:]) for port in model.inputs] == [
        (each.name, each.dtype, each.shape) for each in network.inputs
    ]


def test_examples_are_valid_inputs() -> None:
    tokens, mask, types = CATALOGUE["bert"].example(3)
    assert tokens.shape == mask.shape == types.shape == (3, 128)
    assert (tokens.max() < 30522, set(np.unique(mask)), set(np.unique(types))) == (True, {0, 1}, {0, 1})
    assert CATALOGUE["lenet"].example(5, seed=1)[0].shape == (5, 1, 28, 28)


def test_unknown_names() -> None:
    with pytest.raises(CatalogueError, match="no network 'resnet19' in the catalogue; did you mean 'resnet18'"):
        find("resnet19")
    with pytest.raises(CatalogueError, match="there are autoencoder, bc_resnet"):
        find("???")


@pytest.mark.parametrize("name", CATALOGUE)
def test_cards_are_of_their_network(name: str) -> None:
    """What was measured, was measured on stated data with a stated licence, and somebody can measure it again."""
    card = CATALOGUE[name].card
    if card is None:
        return
    assert card.name == name
    assert card.task == CATALOGUE[name].task
    assert card.recipe
    assert card.metrics
    assert all(metric.examples and metric.command for metric in card.metrics)
    assert all(each.licence and each.source for each in card.data)
