from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from archipel.cli.start.local.processes import Processes
from archipel.datasets import DigitsByWriter, digits_by_writer


@pytest.fixture(scope="session")
def few_writers() -> DigitsByWriter:
    """Twenty of the staff, thirty of the pupils: enough for every stage, small enough for a test."""
    digits = digits_by_writer()
    return digits.of([*digits.writers_in([0])[:20], *digits.writers_in([4])[:30]])


@pytest.fixture
def quiet() -> Progress:
    return Progress(console=Console(file=io.StringIO()))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    children = Processes(tmp_path)
    yield children
    children.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
