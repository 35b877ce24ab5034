"""Every name that the client had before it had resources works, and says what to write instead."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archipel.operator.former_names import CALLED, MOVED
from archipel.operator.tasks import Tasks
from tests.support.operator_calls import SentError, arguments, method, methods, nowhere, send

NAMES = """
    health server upload_bundle create_task tasks task approve cancel pause resume rounds round round_status
    create_token tokens revoke_token populations population devices device revoke_device release_device
    revoke_enrolment_token revoked_enrolment_tokens audit audit_head blob bundle weights wait_task
    create_model models model register_version versions version promote roll_back promotions reject_version
    restore_version create_rollout rollouts rollout pause_rollout resume_rollout abort_rollout task_metrics wait_rollout
"""
"""Of the methods, as they were: the table of the product is held against them."""
FORMER = NAMES.split()
PLACES = {**MOVED, **CALLED}


def test_the_table_has_all_of_them() -> None:
    assert sorted([*MOVED, *CALLED]) == sorted(FORMER)
    assert set(PLACES.values()) <= set(methods())


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name(name: str, sent: list[tuple[str, str]], tmp_path: Path) -> None:
    client = nowhere()
    place = PLACES[name]
    call = method(client, place)
    given = arguments(call, tmp_path)
    send(call, **given)
    former: Any = getattr(client, name)
    said = f"OperatorClient.{name}() goes with archipel 0.2: call client.{place}() instead"
    with pytest.raises(SentError), pytest.warns(DeprecationWarning, match=f"^{re.escape(said)}$") as told:
        # By position, too: nobody had to name these.
        next(iter(former(*given.values())))
    [warning] = told
    assert warning.filename == __file__
    first, second = sent
    assert first == second


def test_options_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = nowhere()
    monkeypatch.setattr(Tasks, "wait", lambda self, task_id, **options: (task_id, options))
    with pytest.warns(DeprecationWarning, match=r"client\.tasks\.wait\(\)"):
        assert client.wait_task("1", timeout=2.0) == ("1", {"timeout": 2.0})


def test_rounds_are_the_list_that_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds(self: Tasks, task_id: str) -> Iterator[str]:
        yield task_id

    client: Any = nowhere()
    monkeypatch.setattr(Tasks, "rounds", rounds)
    with pytest.warns(DeprecationWarning, match=r"client\.tasks\.rounds\(\)"):
        assert client.rounds("1") == ["1"]


def test_a_client_that_is_forgotten_is_gone() -> None:
    """And its sockets with it, without waiting for the garbage collector."""
    client = nowhere()
    forgotten = [weakref.ref(each) for each in vars(client).values()]
    del client
    assert [each() for each in forgotten] == [None] * len(forgotten)


def test_nothing_else_is_there() -> None:
    client: Any = nowhere()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttributeError, match="'OperatorClient' object has no attribute 'nothing'"):
            _ = client.nothing
        with pytest.raises(TypeError, match="'Bundles' object is not callable"):
            client.bundles()
