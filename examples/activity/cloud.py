"""The cloud's part: train a small network on the volunteers, convert it to a signed bundle."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from people import lab
from torch import nn

from archipel.bundle import PrivacyPolicy
from archipel.converter import Signing, Training, convert
from archipel.datasets import HarByPerson
from archipel.training import losses, optimizers
from archipel.training.cloud import TrainConfig, random_scale
from archipel.training.cloud import train as train_network

CLASSES = 6
WIDTH = 32
LOCAL_EPOCHS = 2
BATCH_SIZE = 16
CLIP = 0.5
THRESHOLD = 0.67  # above two thirds, as secure aggregation asks against an active server


class Standardize(nn.Module):
    """Sensor units to what the network learnt with: part of the bundle, so phones keep windows as they measure them."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, mean: np.ndarray, deviation: np.ndarray) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("deviation", deviation)):
            self.register_buffer(name, torch.tensor(values[:, None], dtype=torch.float32))

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        return (windows - self.mean) / self.deviation


def network(seed: int) -> nn.Sequential:
    """17,094 parameters: float32 [batch, 6, 128] -> logits float32 [batch, 6].

    Normalised by groups and not by batches, so that nothing in it depends on whose windows were together.
    """
    torch.manual_seed(seed)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = CLASSES
    for index, width in enumerate((WIDTH, WIDTH, 2 * WIDTH), 1):
        layers[f"conv{index}"] = nn.Conv1d(channels, width, kernel_size=5, stride=2, padding=2)
        layers[f"norm{index}"] = nn.GroupNorm(4, width)
        layers[f"relu{index}"] = nn.ReLU()
        channels = width
    layers["pool"] = nn.AdaptiveAvgPool1d(1)
    layers["flatten"] = nn.Flatten()
    layers["output"] = nn.Linear(channels, CLASSES)
    return nn.Sequential(layers)


def train(windows: HarByPerson, volunteers: Sequence[int], seed: int) -> nn.Module:
    """The network, trained on all volunteers but the first, who says when to stop."""
    parts = [lab(windows, volunteer) for volunteer in volunteers]
    inputs = np.concatenate([part.inputs for part in parts[1:]])
    labels = np.concatenate([part.labels for part in parts[1:]])
    standardize = Standardize(inputs.mean(axis=(0, 2)), inputs.std(axis=(0, 2)))

    def standard(values: np.ndarray) -> np.ndarray:
        return standardize.forward(torch.tensor(values)).numpy()

    trained = train_network(
        network(seed),
        (standard(inputs), labels),
        # So small a network is slower on several threads.
        TrainConfig(epochs=60, patience=6, augment=random_scale(0.2), seed=seed, threads=1),
        validation=(standard(parts[0].inputs), parts[0].labels),
    )
    return nn.Sequential(OrderedDict(standardize=standardize, network=trained.module)).eval()


def publish(module: nn.Module, key: Ed25519PrivateKey, folder: Path, min_cohort: int, min_contributors: int) -> Path:
    """The file of the signed bundle: rounds of training need `min_cohort` devices that do not work with the server, and
    evaluations `min_contributors`."""
    file = folder / "activity.bundle"
    convert(
        module,
        file,
        example=np.zeros((2, 6, 128), np.float32),
        training=Training(
            losses.cross_entropy(),
            optimizers.sgd(),
            strategy="fedavg",
            strategy_options={"clip": CLIP, "value_range": CLIP, "bits": 16},
            epochs=LOCAL_EPOCHS,
            batch_size=BATCH_SIZE,
        ),
        privacy=PrivacyPolicy(
            modes=("secure",),
            min_cohort=min_cohort,
            threshold=THRESHOLD,
            max_clip=CLIP,
            max_bits=16,
            min_contributors=min_contributors,
        ),
        signing=Signing(key),
    )
    return file
