"""A stand-in for a child process that has been taken over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from archipel.lite_runtime.isolated import requests as isolated_requests
from archipel.lite_runtime.isolated.messages import Reply
from tests.support.taken_over import TakenOver


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """(answers, each a reply and its arrays): children made from now on give them, whatever they are asked."""
    monkeypatch.setattr(isolated_requests, "Child", TakenOver)

    def script(*answers: tuple[Reply, dict[str, np.ndarray]]) -> None:
        TakenOver.script = list(answers)

    return script
