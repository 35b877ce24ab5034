"""Two processes, started once for all quick tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.training.cloud.parallel.cases import SHORT, write_graphs
from tests.training.cloud.parallel.checks import normalized_model, tied_model
from tests.training.cloud.parallel.trainings import Stop, run

HERE = Path(__file__).parent
CHECKS = ["moved", "in_segments", "interrupted", "normalized", "rests", "divisions"]


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two processes read and write."""
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="session")
def of_two(pair_folder: Path) -> list[dict[str, Any]]:
    # Here, once: a process has computed for five seconds when PyTorch has exported its first graph.
    write_graphs(pair_folder, ["mlp", "cnn", "picture"])
    tied_model().save(pair_folder / "tied.onnx")
    normalized_model().save(pair_folder / "normalized.onnx")
    run("fsdp", "none", checkpoint=str(pair_folder / "one"), callbacks=[Stop()], decay="matrices", accumulate=4)
    return run_ranks(HERE / "ways.py", 2, str(pair_folder), *SHORT, *CHECKS)
