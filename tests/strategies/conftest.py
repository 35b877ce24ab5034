from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.converter import Compression, Signing, Training, convert
from archipel.converter.request import DEFAULT_PRIVACY
from archipel.training import losses, optimizers
from tests.strategies.simulation import BATCH, EPOCHS, LR, dense, imported


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """(strategy, the model's maker, shape of an example) -> a bundle; what is not said is the task's own."""
    torch.set_num_threads(1)
    folder, number = tmp_path_factory.mktemp("strategies"), itertools.count()

    def build(
        strategy: str,
        module: Callable[[], nn.Module] = dense,
        shape: tuple[int, ...] = (6,),
        *,
        key: Ed25519PrivateKey | None = None,
        privacy: PrivacyPolicy = DEFAULT_PRIVACY,
        compression: Compression | None = None,
        **changes: Any,
    ) -> Bundle:
        options = {"clip": 1000.0, "weight_cap": 40, **changes.pop("strategy_options", {})}
        settings: dict[str, Any] = {
            "loss": losses.cross_entropy(), "optimizer": optimizers.sgd(lr=LR), "epochs": EPOCHS, "batch_size": BATCH,
            "strategy": strategy, "strategy_options": options, **changes,
        }  # fmt: skip
        return convert(
            imported(module, shape), folder / f"{strategy}-{next(number)}", training=Training(**settings),
            compression=compression, privacy=privacy, signing=Signing(key or generate_key()),
        )  # fmt: skip

    return build
