"""TrainConfig: a wrong value of any setting is one line that names the setting."""

from __future__ import annotations

import pytest

from archipel.errors import TrainingError
from archipel.training.cloud.config import TrainConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", None),
        ("accumulate", None),
        ("seed", 2**63),
        ("threads", 10**6),
        ("workers", 10**4),
        ("trainable", 3),
        ("trainable", None),
        ("inputs", None),
        ("metrics", None),
        ("monitor", None),
        ("monitor", 3),
        ("label", ""),
        ("label", 3),
        ("checkpoint", ""),
        ("checkpoint", 3),
        ("tensorboard", 3),
        ("cluster", ""),
        ("mlflow", 3),
        ("wandb", 3),
        ("compile", "yes"),
        ("next_token", "yes"),
        ("resume", 1),
        ("progress", "no"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(TrainingError, match=f"^TrainConfig: {name} must be .*, is {value!r}$"):
        TrainConfig(**{name: value})  # type: ignore[arg-type]


def test_paths_may_be_path_objects(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert TrainConfig(checkpoint=tmp_path, tensorboard=tmp_path).checkpoint == tmp_path
