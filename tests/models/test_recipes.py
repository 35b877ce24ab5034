"""Every recipe of the catalogue: its network takes its data, and the settings are those of a training."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from archipel import Model
from archipel.cli.main import archipel
from archipel.graph.model_card import card_of
from archipel.models import catalogue
from archipel.models.catalogue import CATALOGUE
from archipel.training.by_name import make_loss, make_optimizer
from archipel.training.cloud.config import parse_config
from archipel.training.cloud.parts import make_augment

PATHS = {path.stem: path for path in Path(catalogue.__file__).with_name("recipes").glob("*.toml")}
RECIPES = sorted(PATHS)
# What the functions of archipel.datasets give: the shape of an example, and the number of classes.
PICTURES = {"mnist": ((1, 28, 28), 10), "fashion_mnist": ((1, 28, 28), 10), "cifar10": ((3, 32, 32), 10),
            "har_windows": ((6, 128), 6)}  # fmt: skip
OTHERS = {
    "bc_resnet": ((1, 40, 98), 12),
    "bc_resnet-ecg": ((1, 40, 75), 3),
    "ds_cnn": ((1, 49, 10), 12),
    "ds_cnn-ecg": ((1, 50, 10), 3),
    "mlp": ((784,), 10),
    "unet": ((1, 64, 64), 3),
}


def test_every_network_has_one() -> None:
    assert sorted(CATALOGUE) == [name for name in RECIPES if "-" not in name]
    variants = {f"{name}-{each}" for name, network in CATALOGUE.items() for each in network.variants}
    assert variants == {name for name in RECIPES if "-" in name}


@pytest.mark.parametrize("file", RECIPES)
@pytest.mark.sampled(every=6)
def test_network_data_and_settings_fit(file: str) -> None:
    text = PATHS[file].read_text(encoding="utf-8")
    recipe, name = tomllib.loads(text), file.partition("-")[0]
    assert recipe["model"]["zoo"] == name
    assert recipe["output"]["folder"] == f"trained/{file}"
    config = parse_config(recipe["train"])
    make_loss(config.loss)
    make_optimizer(config.optimizer, config.schedule, 1000)
    make_augment(config.augment)
    data = recipe["data"]
    if "python" in data:
        module, _, function = data["python"].partition(":")
        inspect.signature(getattr(importlib.import_module(module), function)).bind(**data["arguments"])
    with torch.device("meta"), torch.no_grad():
        module = CATALOGUE[name].make(config.seed, **recipe["model"].get("arguments", {})).eval()
        card = CATALOGUE[name].card
        if card is not None and card.recipe.strip() == text.strip():
            assert card.parameters == sum(parameter.numel() for parameter in module.parameters())
        length = data.get("arguments", {}).get("length")
        if length is None:
            shape, classes = OTHERS.get(file) or PICTURES[data["python"].partition(":")[2]]
            answer = module(torch.zeros(2, *shape))
            assert answer.shape[:2] == ((2, classes) if config.loss != "mse" else (2, shape[0]))
        else:
            tokens = [torch.zeros(2, length, dtype=torch.int64) for _ in config.inputs or ("input",)]
            answer = module(*tokens)
            assert answer.shape[:2] == (2, length)
            assert answer.shape[2] >= 128  # Shakespeare's plays are in ASCII


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bc_resnet", "ds_cnn"])
def test_keyword_recipes_take_raw_sound(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    sounds = rng.standard_normal((24, 16000), np.float32) / 10
    np.savez("sounds.npz", input=sounds, label=rng.integers(0, 12, 24))
    path = str(CATALOGUE[name].recipe)
    settings = [*(f"data.{part}=sounds.npz" for part in ("train", "validation", "test")), "batch_size=8", "epochs=1"]
    arguments = ["train", path, *(word for setting in settings for word in ("--set", setting))]
    result = CliRunner().invoke(archipel, arguments)
    assert result.exit_code == 0, result.output
    # The written network takes sound, and its card says what the recipe does.
    model = Model.from_onnx(f"trained/{name}/model.onnx")
    assert [(port.dtype, port.shape) for port in model.inputs] == [("float32", ("batch", 16000))]
    card = card_of(model.ir)
    assert card is not None
    assert (card.task, card.parameters) == ("keyword spotting", CATALOGUE[name].parameters)
    assert {metric.examples for metric in card.metrics} == {24}
