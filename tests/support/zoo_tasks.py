"""What each network of the zoo learns in fifty steps, and how PyTorch trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch.nn import functional

from archipel import datasets, models, training
from archipel.training.cloud.ops.normalization import BatchNormalization

STEPS = 50


@dataclass(frozen=True)
class Task:
    """`batch(i)` gives inputs and, last, labels; `torch_loss` is what `loss` is called in PyTorch."""

    network: Callable[[], torch.nn.Module]
    batch: Callable[[int], tuple[np.ndarray, ...]]
    loss: Callable[[], training.losses.Loss]
    torch_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    lr: float = 0.05
    batch_norm: str = "train"


def digits(i: int, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Real handwriting; eight batches, over and over, so that the loss falls."""
    pictures, classes = handwriting()
    start = i % 8 * size
    return pictures[start : start + size], classes[start : start + size]


@cache
def handwriting() -> tuple[np.ndarray, np.ndarray]:
    found = datasets.digits_by_writer()
    return found.inputs()[:64], found.targets()[:64]


def noise(*shape: int, classes: int) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Random pictures or signals; four batches, over and over: the network learns them by heart."""

    def batch(i: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(i % 4)
        return rng.standard_normal(shape, np.float32), rng.integers(0, classes, shape[0])

    return batch


TEXT = np.frombuffer(
    b"the sea is one and the islands are many; what is learned travels, what is lived stays. " * 9, np.uint8
)


def text(i: int, size: int = 4, length: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Characters and the ones that follow them, as numbers below 80."""
    starts = np.random.default_rng(i % 8).integers(0, len(TEXT) - length - 1, size)
    windows = np.stack([TEXT[s : s + length + 1] for s in starts]).astype(np.int64) - 32
    return windows[:, :-1] % 80, windows[:, 1:] % 80


def cross_entropy() -> training.losses.Loss:
    return training.losses.cross_entropy()


def over_time(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def reconstruction(i: int) -> tuple[np.ndarray, np.ndarray]:
    pictures, _ = digits(i)
    return pictures, pictures


def strokes(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Which pixels are ink, from a picture with noise on it."""
    pictures, _ = digits(i, 4)
    noisy = pictures + 0.3 * np.random.default_rng(i % 8).standard_normal(pictures.shape, np.float32)
    return noisy, (pictures[:, 0] > 0.5).astype(np.int64)


def hidden_tokens(i: int) -> tuple[np.ndarray, ...]:
    """Texts of different lengths in which some characters are hidden, for which the labels are."""
    characters, _ = text(i)
    rng = np.random.default_rng(100 + i % 8)
    mask = (np.arange(characters.shape[1]) < rng.integers(12, 25, len(characters))[:, None]).astype(np.int64)
    chosen = (rng.random(characters.shape) < 0.3) & (mask == 1)
    return (
        np.where(chosen, 80, characters),
        mask,
        (characters > 40).astype(np.int64),
        np.where(chosen, characters, -100),
    )


TASKS = {
    "MLP": Task(
        lambda: models.mlp(0),
        lambda i: (digits(i)[0].reshape(8, 784), digits(i)[1]),
        cross_entropy,
        functional.cross_entropy,
    ),
    "LeNet": Task(lambda: models.lenet(0), digits, cross_entropy, functional.cross_entropy),
    "FedAvg CNN": Task(lambda: models.fedavg_cnn(0), digits, cross_entropy, functional.cross_entropy),
    "digits CNN": Task(lambda: models.digits_cnn(0), digits, cross_entropy, functional.cross_entropy),
    "ResNet-8": Task(
        lambda: models.resnet8(0), noise(8, 3, 32, 32, classes=10), cross_entropy, functional.cross_entropy, 0.002
    ),
    "DS-CNN": Task(
        lambda: models.ds_cnn(0), noise(6, 1, 49, 10, classes=12), cross_entropy, functional.cross_entropy, 0.002
    ),
    "MobileNetV2": Task(
        lambda: models.mobilenet_v2(0, width=0.25),
        noise(8, 3, 32, 32, classes=10),
        cross_entropy,
        functional.cross_entropy,
        0.01,
        # With batch statistics in 52 layers on top of one another PyTorch differs from itself by 10 % after fifty steps
        # if only its number of threads changes: rounding grows from step to step.
        batch_norm="frozen",
    ),
    "1D-CNN": Task(
        lambda: models.cnn_1d(0), noise(6, 6, 128, classes=6), cross_entropy, functional.cross_entropy, 0.002
    ),
    "LSTM": Task(
        lambda: models.char_rnn(0, "lstm", hidden=32),
        text,
        lambda: training.losses.cross_entropy(axis=-1),
        over_time,
        0.5,
    ),
    "GRU": Task(
        lambda: models.char_rnn(0, "gru", hidden=32),
        text,
        lambda: training.losses.cross_entropy(axis=-1),
        over_time,
        0.5,
    ),
    "Transformer": Task(
        lambda: models.transformer(0, length=24, width=32),
        text,
        lambda: training.losses.cross_entropy(axis=-1),
        over_time,
        0.05,
    ),
    "ResNet-18": Task(
        lambda: models.resnet18(0, classes=10, stem="small", width=8),
        noise(8, 3, 16, 16, classes=10),
        cross_entropy,
        functional.cross_entropy,
        0.0005,
    ),
    "ResNet-50": Task(
        lambda: models.resnet50(0, classes=10, width=4),
        noise(4, 3, 32, 32, classes=10),
        cross_entropy,
        functional.cross_entropy,
        0.0005,
        batch_norm="frozen",  # as for MobileNetV2
    ),
    "BC-ResNet": Task(
        lambda: models.bc_resnet(0, dropout=0.0),
        noise(6, 1, 40, 21, classes=12),
        cross_entropy,
        functional.cross_entropy,
        0.01,
        batch_norm="frozen",
    ),
    "DeepConvLSTM": Task(
        lambda: models.deep_conv_lstm(0, channels=3, filters=8, hidden=16, dropout=0.0),
        noise(6, 3, 32, classes=6),
        cross_entropy,
        functional.cross_entropy,
        0.2,
    ),
    "GPT": Task(
        lambda: models.gpt(0, 80, 24, 32, 4, 2, dropout=0.0),
        text,
        lambda: training.losses.cross_entropy(axis=-1),
        over_time,
        0.05,
    ),
    "BERT": Task(
        lambda: models.bert(0, "masked_tokens", 2, 81, 24, 32, 4, 1, dropout=0.0),
        hidden_tokens,
        lambda: training.losses.cross_entropy(axis=-1, ignore_index=-100),
        over_time,
        0.05,
    ),
    "autoencoder": Task(
        lambda: models.autoencoder(0), reconstruction, lambda: training.losses.mse(), functional.mse_loss, 0.5
    ),
    "U-Net": Task(lambda: models.unet(0), strokes, cross_entropy, functional.cross_entropy),
}

LONG = {
    *("GRU", "LSTM", "ResNet-8", "DS-CNN", "MobileNetV2", "U-Net", "FedAvg CNN"),
    *("ResNet-18", "ResNet-50", "BC-ResNet", "DeepConvLSTM"),
}


def torch_losses(module: torch.nn.Module, task: Task, batches: list[tuple[np.ndarray, ...]]) -> list[float]:
    """What a module of the network loses in each step, native or a TorchModule; it is trained."""
    optimizer = torch.optim.SGD(module.parameters(), lr=task.lr, momentum=0.9)
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            layer.train(task.batch_norm == "train")
        elif isinstance(layer, BatchNormalization):
            layer.frozen = task.batch_norm != "train"
    losses = []
    for batch in batches:
        *inputs, labels = map(torch.from_numpy, batch)
        optimizer.zero_grad()
        loss = task.torch_loss(module(*inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses
