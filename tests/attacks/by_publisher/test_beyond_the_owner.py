"""A server sends plans that the device's owner does not want carried out.

Who: the server, or an operator who may start tasks. What they want: that devices compute, and tell, more than their
owners agreed to: in small cohorts, on every occasion, without noise, for another publisher. What stops them: the
owner's limits, which are asked before anything is fetched or computed. A refusal is one line for the owner, and for the
server a reason from a closed list, or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import open_bundle
from archipel.client import Agent, AgentConfig, Event
from archipel.errors import ClientError, OwnerRefusalError
from archipel.protocol.messages import LeaveRequest
from archipel.protocol.sealed import decode, public_bytes
from tests.attacks.owner_bundles import slots_bundle
from tests.support.linear_bundle import local_data
from tests.support.scripted_server import Scripted, scripted

KEY = "ab" * 32
QUICK: dict[str, Any] = {
    "attempts": 2, "backoff": 0.001, "max_wait": 0.01, "patience": 2.0, "pause_seconds": 0.01, "isolated": False,
}  # fmt: skip


class Owned:
    """An enrolled device with its owner's settings, and what happened on it."""

    def __init__(self, folder: Path, server: Scripted) -> None:
        self.folder, self.server = folder / "device", server
        self.events: list[Event] = []
        self.read = 0
        with self.agent() as agent:
            agent.enrol(server.token())

    def agent(self, **settings: Any) -> Agent:
        config = AgentConfig(folder=self.folder, **{**QUICK, **settings})
        return Agent(config, examples=self._examples, on_event=self.events.append)

    def _examples(self) -> dict[str, np.ndarray]:
        self.read += 1
        return local_data(0)

    def takes(self, settings: dict[str, Any], **plan: Any) -> str:
        """What comes of a round with that plan; the device is started anew for it."""
        self.events.clear()
        self.server.forget()
        self.read = 0
        self.server.begin(**plan)
        with self.agent(**settings) as agent:
            return agent.run_once().kind

    @property
    def lines(self) -> list[tuple[str | float, str | float]]:
        """What the owner is told of refusals."""
        return [(each.detail["limit"], each.detail["reason"]) for each in self.events if each.name == "refused"]

    @property
    def told(self) -> list[str | None]:
        """The reasons that the server was told."""
        return [decode("leave", body, LeaveRequest).reason for body in self.server.bodies["leave"]]


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Owned]:
    with scripted(tmp_path) as server:
        yield Owned(tmp_path, server)


BY_PLAN: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("cohort", {"min_cohort": 5}, {"min_cohort": 4}, "a cohort of 4 or more, its owner allows 5 or more"),
    ("kind", {"kinds": ("training",)}, {"kind": "analytics", "program": "look"}, "kind analytics"),
    ("kind", {"kinds": ("analytics",)}, {}, "kind training, its owner allows analytics"),
    ("kind", {"kinds": ()}, {}, "its owner allows none"),
    ("privacy", {}, {"privacy": "plain"}, "allow_plain"),
    (
        "cohort",
        {"min_contributors": 5},
        {"kind": "analytics", "program": "look", "min_contributors": 4},
        "the sum of 4 devices with examples may be released, its owner asks for 5",
    ),
    ("pace", {"max_rounds_per_day": 0}, {}, "0 rounds in the last day, its owner allows 0"),
    ("publisher", {"publishers": (KEY,)}, {}, "none of the publishers"),
    ("population", {"populations": ("teachers",)}, {}, "population 'pupils', its owner allows teachers"),
]


@pytest.mark.parametrize(("code", "settings", "plan", "said"), BY_PLAN)
def test_what_the_plan_shows_costs_nothing(
    owned: Owned, code: str, settings: dict[str, Any], plan: dict[str, Any], said: str
) -> None:
    """No download, no example read; one line; one reason; and the same plan again is not refused again."""
    assert owned.takes(settings, **plan) == "refused"
    assert [step for step in owned.server.steps if step not in ("challenge", "session")] == ["check-in", "leave"]
    assert owned.read == 0
    [(limit, reason)] = owned.lines
    assert (limit, owned.told) == (code, [code])
    assert said in str(reason)
    with owned.agent(**settings) as agent:
        assert agent.run_once().kind == "waiting"
    assert len(owned.lines) == len(owned.told) == 1


BY_BUNDLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"max_peak_bytes": 1000}, {}, "max_peak_bytes"),
    ({"max_upload_bytes": 15}, {}, "max_upload_bytes"),
    ({"max_upload_entries": 3}, {}, "4 numbers to send, its owner allows 3 (max_upload_entries)"),
    ({"max_query_entries": 5}, {"kind": "analytics", "program": "look"}, "7 numbers to send, its owner allows 5 (max_"),
    ({"max_query_entries": 1}, {"kind": "evaluation", "metrics": {"mse": 9.0}}, "allows 1 (max_query_entries)"),
    ({"max_download_bytes": 100}, {}, "the limit here is 100"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "plan", "said"), BY_BUNDLE)
def test_what_the_manifest_shows_costs_no_work(
    owned: Owned, settings: dict[str, Any], plan: dict[str, Any], said: str
) -> None:
    assert owned.takes(settings, **plan) == "refused"
    assert owned.server.steps.count("weights") == owned.read == 0
    [(limit, reason)] = owned.lines
    assert (limit, owned.told) == ("size", ["size"])
    assert said in str(reason)


@pytest.mark.sampled(every=3)
def test_rounds_a_day_are_counted_across_restarts_and_for_a_day_only(owned: Owned) -> None:
    paced = {"max_rounds_per_day": 2}
    assert [owned.takes(paced) for _ in range(4)] == ["took_part", "took_part", "refused", "refused"]
    assert (owned.lines[0][0], owned.told) == ("pace", ["pace"])
    # A server that makes it refuse cannot make it forget what it did.
    assert [owned.takes({"kinds": ()}) for _ in range(3)] == ["refused"] * 3
    assert owned.takes(paced) == "refused"
    # One of the two was more than a day ago.
    first = min(owned.folder.glob("rounds/*.json"), key=lambda path: json.loads(path.read_bytes())["started"])
    entry = json.loads(first.read_bytes())
    first.write_text(json.dumps({**entry, "started": entry["started"] - 86400}))
    assert [owned.takes(paced) for _ in range(2)] == ["took_part", "refused"]


def test_without_noise_there_is_no_epsilon_that_an_owner_could_allow(owned: Owned) -> None:
    """Nothing is computed, although the examples are counted."""
    assert owned.takes({"max_epsilon": 8.0}) == "refused"
    assert "trained" not in {each.name for each in owned.events}
    [(limit, reason)] = owned.lines
    assert (limit, owned.told) == ("privacy", ["privacy"])
    assert "no noise whose strength the bundle states" in str(reason)


def test_the_reason_is_the_owners_to_tell(owned: Owned) -> None:
    for settings, plan in (({"min_cohort": 5}, {}), ({"max_peak_bytes": 1}, {}), ({}, {"privacy": "plain"})):
        assert owned.takes({**settings, "tell_why": False}, **plan) == "refused"
        assert owned.server.bodies["leave"] == [b"{}"]
        assert len(owned.lines) == 1


def test_a_vector_that_is_long_enough_for_slots(owned: Owned) -> None:
    """A publisher's analysis that gives devices places of their own needs many. By default 4096 numbers may be sent; it
    asks for 1024 slots of four, which with the number of contributors is one more."""
    folder = slots_bundle(owned.folder.parent / "census", owned.server.publisher, slots=1024, way="noise")
    from archipel.bundle import pack

    pack(folder, folder.with_suffix(".bundle"))
    digest = open_bundle(folder, [public_bytes(owned.server.publisher)]).digest
    owned.server.files["bundle"] = folder.with_suffix(".bundle").read_bytes()
    assert owned.takes({}, bundle=digest, kind="analytics", program="look") == "refused"
    assert "4097 numbers to send, its owner allows 4096 (max_query_entries)" in str(owned.lines[0][1])
    assert owned.read == 0


def test_an_owner_who_allows_them_loses_no_round(owned: Owned) -> None:
    """The same limits where they hold: every table is asked, and none refuses."""
    wide = {
        "min_cohort": 3, "kinds": ("training",), "max_rounds_per_day": 1, "populations": ("pupils",),
        "publishers": (public_bytes(owned.server.publisher).hex(),), "max_upload_entries": 4,
    }  # fmt: skip
    assert owned.takes(wide) == "took_part"
    assert (owned.lines, owned.told) == ([], [])


def test_a_token_of_another_population(tmp_path: Path) -> None:
    with scripted(tmp_path) as server:
        config = AgentConfig(folder=tmp_path / "device", populations=("teachers",), **QUICK)
        with Agent(config, examples=dict) as agent:
            with pytest.raises(OwnerRefusalError, match="population 'pupils', its owner allows teachers"):
                agent.enrol(server.token())
            assert (server.steps, agent.device_id) == ([], "")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kinds", ("training", "spying")), ("publishers", ("AB" * 32,)), ("publishers", ("ab",)),
        ("max_rounds_per_day", -1), ("max_rounds_per_day", 257), ("max_epsilon", float("nan")), ("max_epsilon", -1.0),
        ("max_query_entries", -1), ("max_upload_entries", -1), ("min_cohort", 0),
    ],
)  # fmt: skip
def test_limits_that_are_none(tmp_path: Path, setting: str, value: Any) -> None:
    with pytest.raises(ClientError, match=f"^{setting}"):
        AgentConfig(folder=tmp_path, **{setting: value})
