"""Options of fits and rounds: one struct, made of the keywords, that says which of them is wrong."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.errors import RuntimeInputError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.training.calls import FitData, RoundData
from archipel.lite_runtime.training.options import FitOptions, RoundOptions, check_options
from tests.support.text_bundles import Roles

# What goes beside the options: arrays, functions and objects.
BESIDE_FIT = [field.name for field in dataclasses.fields(FitData)] + ["callbacks", "control"]
BESIDE_ROUND = [field.name for field in dataclasses.fields(RoundData)] + ["callbacks", "randomness"]


@pytest.mark.parametrize(
    ("call", "options", "beside"),
    [(Runtime.fit, FitOptions, BESIDE_FIT), (Runtime.local_round, RoundOptions, BESIDE_ROUND)],
)
def test_every_keyword_is_an_option_or_goes_beside_them(
    call: Callable[..., object], options: type[msgspec.Struct], beside: list[str]
) -> None:
    keywords = dict(inspect.signature(call).parameters)
    fields = msgspec.structs.fields(options)
    assert sorted(keywords) == sorted(["self", *beside, *(field.name for field in fields)])
    for field in fields:
        default = keywords[field.name].default
        if field.name == "hyperparameters":
            assert (default, field.default_factory()) == (None, {})
        elif options is RoundOptions:
            assert (default, field.default) == (inspect.Parameter.empty, msgspec.NODEFAULT)
        else:
            assert default == field.default


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("epochs", 0, r"fit: epochs must be a whole number of at least 1 .*, got 0$"),
        ("epochs", 2.5, r"epochs must be a whole number .*, got 2\.5$"),
        ("epochs", "3", r"epochs must be a whole number .*, got '3'$"),
        ("epochs", True, r"epochs must be a whole number .*, got True$"),
        ("epochs", 2**64, r"below 2\*\*63\), got 18446744073709551616$"),
        ("batch_size", -1, r"batch_size must be a whole number of at least 1"),
        ("batch_size", None, r"batch_size must be .*, got None$"),
        ("batch_size", np.zeros(2, np.int64), r"batch_size must be .*, got array\(\[0, 0\]\)$"),
        ("shuffle", 1, r"shuffle must be True or False, got 1$"),
        ("seed", -1, r"seed must be from 0 to 4294967295 \(a whole number\), got -1$"),
        ("seed", 2**32, r"seed must be from 0 to 4294967295 .*, got 4294967296$"),
        ("hyperparameters", {"lr": "fast"}, r"hyperparameters must be numbers by name, .*, got \{'lr': 'fast'\}$"),
        ("hyperparameters", {1: 0.1}, r"hyperparameters must be numbers by name"),
        ("hyperparameters", 0.1, r"hyperparameters must be numbers by name, .*, got 0\.1$"),
        ("program", 3, r"program must be the name of a train program, or None, got 3$"),
        ("moves", "w", r"moves must be a sequence of names of tensors, or None, got 'w'$"),
        ("moves", [1], r"moves must be .*, got \[1\]$"),
        ("checkpoint", b"c", r"checkpoint must be the path of a file, or None, got b'c'$"),
        ("checkpoint_every", -0.5, r"checkpoint_every must be a number of seconds, 0 or more, got -0\.5$"),
        ("checkpoint_every", math.nan, r"checkpoint_every must be .*, got nan$"),
        ("feature_cache", "no", r"feature_cache must be True or False, got 'no'$"),
        ("moves", [0] * 1000, r"got \[0, 0, .* \.\.\.$"),
    ],
)
def test_what_is_wrong_is_named_with_what_was_expected(option: str, value: object, text: str) -> None:
    with pytest.raises(RuntimeInputError, match=text) as caught:
        check_options(FitOptions, "fit", {"epochs": 3, option: value})
    assert len(str(caught.value)) < 300


def test_the_first_of_several_mistakes_is_named() -> None:
    with pytest.raises(RuntimeInputError, match=r"^fit: batch_size must"):
        check_options(FitOptions, "fit", {"moves": 3, "epochs": 3, "batch_size": 0})
    with pytest.raises(RuntimeInputError, match=r"^local_round: seed must be from 0"):
        check_options(RoundOptions, "local_round", {"seed": "s", "hyperparameters": {}})


def test_numpys_numbers_paths_and_collections_are_taken(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "epochs": np.int64(3),
        "batch_size": np.array(8, np.int32),
        "shuffle": np.bool_(False),
        "seed": np.uint32(2**32 - 1),
        "hyperparameters": {"lr": np.float32(0.5), "mu": 1},
        "moves": {"w": 0}.keys(),
        "checkpoint": tmp_path / "c",
        "checkpoint_every": 0,
    }
    options = check_options(FitOptions, "fit", given)
    assert options == FitOptions(
        epochs=3,
        batch_size=8,
        shuffle=False,
        seed=2**32 - 1,
        hyperparameters={"lr": 0.5, "mu": 1.0},
        moves=("w",),
        checkpoint=str(tmp_path / "c"),
        checkpoint_every=0.0,
    )
    assert [type(value) for value in (options.epochs, options.shuffle, options.hyperparameters["mu"])] == [
        int, bool, float,
    ]  # fmt: skip
    assert check_options(FitOptions, "fit", {}) == FitOptions()
    assert check_options(FitOptions, "fit", {"checkpoint_every": math.inf}).checkpoint_every == math.inf


def test_options_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        FitOptions().epochs = 2  # type: ignore[misc]


def test_mistakes_come_before_everything_else(make: Callable[..., Runtime], r: type[Roles]) -> None:
    """Before the program is looked for, which this bundle does not have."""
    predict = "predict (float[n] x) => (float[n] y) { y = Neg(x) }"
    runtime = make({"predict": ("predict", predict, {"x": r.example, "y": r.output})}, {"w": np.ones(1, np.float32)})
    with pytest.raises(RuntimeInputError, match="fit: epochs must be"):
        runtime.fit(np.ones(2), epochs=0)
    with pytest.raises(RuntimeInputError, match="local_round: seed must be"):
        runtime.local_round(np.ones(2), seed=-1)
