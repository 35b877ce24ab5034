"""Bad input: one error that names the place and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import archipel
from archipel.datasets.dataset import ArrayDataset, Field
from archipel.errors import ArchipelError, DatasetError, NonFiniteLossError, TrainingError
from archipel.training import optimizers
from archipel.training.cloud import Callback, TrainConfig, train
from archipel.training.cloud.config import parse_config

X = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


def changed(array: np.ndarray, row: int, value: float) -> np.ndarray:
    result = array.copy()
    result[row] = value
    return result


def run(data: Any = (X, Y), module: nn.Module | None = None, **settings: Any) -> None:
    train(module or nn.Linear(5, 2), data, TrainConfig(**{"epochs": 1, "device": "cpu", **settings}))


def test_nan_in_the_data_is_found(tmp_path: Path) -> None:
    data = ArrayDataset({"input": changed(X, 41, np.nan), "label": Y}, name="train.npz")
    with pytest.raises(NonFiniteLossError, match=r"train\.npz, row 41: field 'input' is nan; correct it"):
        run(data, checkpoint=str(tmp_path), checkpoint_every=1, batch_size=30)


@pytest.mark.parametrize("label", [2, -1])
def test_a_label_that_is_no_class_is_found(label: int) -> None:
    data = ArrayDataset({"input": X, "label": changed(Y, 17, label)}, name="train.npz")
    with pytest.raises(TrainingError, match=rf"train\.npz, row 17: .* label {label}, and the model has 2 classes"):
        run(data)
    run(data, loss={"name": "cross_entropy", "ignore_index": label})


def test_faults_of_the_validation_data_are_found_there() -> None:
    config = TrainConfig(epochs=1, device="cpu")
    held = ArrayDataset({"input": X, "label": changed(Y, 17, 2)}, name="held.npz")
    with pytest.raises(TrainingError, match=r"held\.npz, row 17: field 'label' has the label 2"):
        train(nn.Linear(5, 2), (X, Y), config, validation=held)
    held = ArrayDataset({"input": changed(X, 41, np.inf), "label": Y}, name="held.npz")
    with pytest.raises(NonFiniteLossError, match=r"held\.npz, row 41: field 'input' is inf"):
        train(nn.Linear(5, 2), (X, Y), config, validation=held)


def test_a_token_beyond_the_vocabulary_is_named() -> None:
    tokens = np.full((8, 4), 9)
    with pytest.raises(TrainingError, match="a token beyond the vocabulary"):
        run((tokens, tokens), nn.Embedding(5, 5), loss={"name": "cross_entropy", "axis": -1})


def test_a_loss_that_grows_beyond_all_numbers() -> None:
    with pytest.raises(NonFiniteLossError, match=r"no longer finite in epoch .*; lower the learning rate of 1"):
        run(
            (X * 1e6, Y), nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)), epochs=20,
            optimizer=optimizers.sgd(lr=100),
        )  # fmt: skip


class Broken:
    """A data set that cannot read one of its rows."""

    fields = {"input": Field(np.dtype(np.float32), (5,)), "label": Field(np.dtype(np.int64))}

    def __len__(self) -> int:
        return 60

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        if 33 in rows:
            raise OSError("the disk is gone")
        return {"input": X[rows], "label": Y[rows]}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_that_fails_ends_the_training_with_its_row(workers: int, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="row 33: OSError: the disk is gone"):
        run(Broken(), workers=workers, batch_size=4, checkpoint=str(tmp_path), checkpoint_every=1)


class Hungry(nn.Linear):
    """Runs out of memory in its third step."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.steps == 3:
            torch.empty(2**58, dtype=torch.uint8)
        return super().forward(x)


def test_too_little_memory_says_what_to_lower_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    seen: list[bytes] = []

    class Look(Callback):
        def before_batch(self, trainer: Any, batch: Any) -> None:
            if trainer.updates == 2:
                seen.append((tmp_path / "last.pt").read_bytes())

    config = TrainConfig(batch_size=16, checkpoint=str(tmp_path), checkpoint_every=1)
    with pytest.raises(TrainingError, match="out of memory on cpu with a batch of 16; set batch_size=8 with"):
        train(Hungry(5, 2), (X, Y), config, callbacks=[Look()])
    assert (tmp_path / "last.pt").read_bytes() == seen[0]


class Ints(nn.Module):
    """Has an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def diverged() -> nn.Module:
    module = nn.Linear(5, 2)
    nn.init.constant_(module.bias, float("nan"))
    return module


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"input": X}}, "label: the data have no field 'label' for the labels; they have input"),
        ({"data": {"x": X, "z": X, "label": Y}, "inputs": ("x", "y")}, "inputs: the data have no field 'y'"),
        ({"data": (X[:0], Y[:0])}, "examples"),
        ({"module": Ints()}, r"the model cannot compute a batch of input \[32, 5\]: .*"),
        ({"data": {"input": X, "age": Y, "label": Y}}, "3 were given; leave out fields of the data that are no inputs"),
        ({"module": nn.ReLU()}, "the module has no parameters"),
        ({"module": nn.Linear}, "got builtins.type; give the network itself"),
        ({"module": nn.Linear(5, 2).state_dict()}, "got collections.OrderedDict; give the network itself"),
        ({"device": "cuda:7"}, "device: .*"),
        ({"monitor": "F1Score"}, "monitor: there is no metric 'F1Score'; there are loss, accuracy"),
        ({"metrics": ("Nope",)}, "metrics: torchmetrics has no 'Nope'"),
        ({"metrics": ({"name": "F1Score", "averag": 1},)}, "metrics.averag: F1Score has no such argument"),
        ({"metrics": ({"name": "F1Score", "average": "all"},)}, "metrics: F1Score: .*average"),
        ({"module": diverged()}, "parameter 'bias' has NaN or infinite numbers before the first update"),
        ({"trainable": "9.*"}, "trainable: no parameter matches '9"),
        ({"schedule": "cosine", "optimizer": optimizers.adam()}, "schedule: the optimizer is an object"),
        ({"schedule": {"name": "cosine", "warmpu": 3}}, "schedule.warmpu: cosine has no such argument"),
        ({"optimizer": {"lr": 3}}, r"optimizer: a table needs a name"),
        ({"optimizer": lambda parameters: 3}, "the function must return a torch.optim.Optimizer"),
        ({"augment": "random_turn"}, "augment: no 'random_turn'; there are random_shift, random_flip, random_scale"),
        ({"mlflow": "folder"}, "mlflow: is not installed; install it with: pip install mlflow"),
        ({"wandb": "project"}, "wandb: is not installed"),
    ],
)  # fmt: skip
def test_unusable_arguments_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchipelError, match=message):
        run(**{"module": nn.Linear(5, 2), "epochs": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "train.epochs must be a whole number of 1 or more, is 0"),
        ({"batch_size": "x"}, "train.batch_size: Expected `int`, got `str`"),
        ({"precision": "fp8"}, "train.precision: Invalid enum value 'fp8'"),
        ({"device": "tpu"}, "train.device must be 'auto', 'cpu', .* is 'tpu'"),
        ({"ema": 1.0}, "train.ema must be .*, is 1.0"),
        ({"cluster": "nope.toml"}, "train.cluster is read by parallel, which is 'none'; set parallel='auto'"),
        ({"lr": 0.1}, r"train.lr: no such setting; the optimizer has it: optimizer = \{ name = .sgd., lr"),
        ({"epoch": 1}, "train.epoch: no such setting; did you mean 'epochs'"),
        ({"checkpoint_every": 5}, "train.checkpoint_every needs a folder; set checkpoint"),
        ({"precision": "fp16", "parallel": "fsdp"}, "train.precision 'fp16' goes with parallel 'none' and 'ddp', not"),
    ],
)
def test_a_table_of_settings_is_read_strictly(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        parse_config(settings)


@pytest.mark.sampled(every=3)
def test_a_softmax_is_not_applied_twice() -> None:
    model = archipel.Model.from_torch(nn.Sequential(nn.Linear(5, 2), nn.Softmax(1)), X[:2])
    with pytest.raises(TrainingError, match="is a softmax already"):
        train(model, (X, Y))


def test_a_last_batch_of_one_example_has_a_remedy() -> None:
    with pytest.raises(TrainingError, match="BatchNorm has no statistics of one example: take a batch_size that"):
        run(module=nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), batch_size=59)


def test_a_loss_function_that_fails_is_blamed_itself() -> None:
    told = r"^loss: the function, called with .* \(a mapping of 'input', 'label'\), raised KeyError: 'nothing'$"
    with pytest.raises(TrainingError, match=told):
        run(loss=lambda outputs, batch: batch["nothing"])


def test_a_loader_in_place_of_its_data_set_is_refused() -> None:
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    with pytest.raises(DatasetError, match=r"DataLoader: it makes batches, .* give its \.dataset"):
        run(torch.utils.data.DataLoader(data, 8))


def test_data_without_examples_are_refused() -> None:
    with pytest.raises(DatasetError, match="no examples"):
        run((X[:0], Y[:0]))
