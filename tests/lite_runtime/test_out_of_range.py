"""An example with a number that the model does not have is named by field, row and value, whatever runs the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, convert
from archipel.bundle import Bundle, generate_key
from archipel.converter import Signing, Training
from archipel.errors import IndexRangeError, RuntimeProgramError
from archipel.lite_runtime import ModelRuntime, Runtime
from archipel.lite_runtime.isolated.runtime import load_isolated
from archipel.training import losses, optimizers

TOKENS, CLASSES, LENGTH = 10, 3, 4


class Texts(nn.Module):
    """Class scores of a text: the mean of its tokens' vectors, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.embedding(ids).mean(1))
        return scores


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.manual_seed(0)
    model = Model.from_torch(Texts(), torch.zeros(2, LENGTH, dtype=torch.int64))
    return convert(
        model, tmp_path_factory.mktemp("bundle") / "texts", signing=Signing(generate_key()),
        training=Training(losses.cross_entropy(ignore_index=-100), optimizers.sgd(lr=0.1), batch_size=8),
    )  # fmt: skip


@pytest.fixture(params=["in this process", "isolated"])
def runtime(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[ModelRuntime]:
    if request.param == "in this process":
        yield Runtime(bundle)
    elif sys.platform != "linux":
        pytest.skip("isolated runtimes need Linux")
    else:
        with load_isolated(bundle.folder, [bundle.publisher]) as isolated:
            yield isolated


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, TOKENS, (40, LENGTH)), rng.integers(0, CLASSES, 40)


Call = Callable[[ModelRuntime, np.ndarray, np.ndarray], object]
CALLS: dict[str, Call] = {
    "predict": lambda runtime, x, y: runtime.predict(x),
    "evaluate": lambda runtime, x, y: runtime.evaluate(x, y, batch_size=8),
    "fit": lambda runtime, x, y: runtime.fit(x, y, batch_size=8),
    "round": lambda runtime, x, y: runtime.local_round(x, y, seed=0),
    "validation": lambda runtime, x, y: runtime.fit(x[:8], y[:8], batch_size=8, validation=(x, y)),
}


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("call", CALLS)
def test_a_token_beyond_the_table(runtime: ModelRuntime, data: tuple[np.ndarray, np.ndarray], call: str) -> None:
    x, y = data
    x[33, 2] = TOKENS
    with pytest.raises(IndexRangeError) as error:
        CALLS[call](runtime, x, y)
    assert str(error.value) == (
        "field 'ids' has a number that the model does not have, in row 33: 10; the model knows 0 to 9. Correct these "
        "examples or leave them out"
    )


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("call", ["evaluate", "fit", "round", "validation"])
@pytest.mark.parametrize("wrong", [CLASSES, -1, 2**40])
def test_a_label_of_no_class(runtime: ModelRuntime, data: tuple[np.ndarray, np.ndarray], call: str, wrong: int) -> None:
    x, y = data
    y[17] = wrong
    with pytest.raises(IndexRangeError) as error:
        CALLS[call](runtime, x, y)
    assert f"field 'label' has a class number that the model does not have, in row 17: {wrong}; " in str(error.value)
    assert "the model knows 0 to 2" in str(error.value)


def test_every_label_that_may_be_meant_is_named(bundle: Bundle, data: tuple[np.ndarray, np.ndarray]) -> None:
    """The manifest does not say which number is ignored, so it is among the suspects."""
    x, y = data
    y[[2, 5]] = -100
    Runtime(bundle).evaluate(x, y)
    y[30] = 7
    with pytest.raises(IndexRangeError, match="in row 2: -100, row 5: -100, row 30: 7; the model"):
        Runtime(bundle).evaluate(x, y)


def test_a_runtime_goes_on(runtime: ModelRuntime, data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    before = runtime.evaluate(x, y)
    with pytest.raises(RuntimeProgramError):  # the class that such errors had before
        runtime.predict(x + TOKENS)
    assert runtime.evaluate(x, y) == before
