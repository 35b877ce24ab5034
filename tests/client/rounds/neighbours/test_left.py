"""What an agent does about an interrupted round over neighbours that it cannot, or must not, go on with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from archipel.client.memory.keystore import FileKeys, data_key
from archipel.client.memory.vault import Vault
from archipel.protocol import messages as m
from archipel.protocol.identity import verify_chain
from archipel.protocol.sealed import encode, public_bytes, seal
from tests.client.rounds.neighbours.world import NeighbourWorld, opened
from tests.support.scripted_server import before

Harm = Callable[[Path, Vault], None]


def lost(path: Path, vault: Vault) -> None:
    path.unlink()


def damaged(path: Path, vault: Vault) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path, vault: Vault) -> None:
    """Sealed with the right key, for the right place."""
    vault.write(path, b"")


@pytest.fixture
def world(tmp_path: Path) -> NeighbourWorld:  # type: ignore[misc]
    with opened(tmp_path) as made:
        yield made


def file(world: NeighbourWorld, kind: str) -> Path:
    [path] = (world.agent.config.folder / "rounds").glob(f"*{kind}")
    return path


def vault(world: NeighbourWorld) -> Vault:
    return Vault(data_key(FileKeys(world.agent.config.folder)))


def left_cleanly(world: NeighbourWorld, *, told: int) -> None:
    # Without its plan the round is settled first, and the device checks in.
    assert world.finish().kind in ("dropped", "waiting")
    entry = world.agent.rounds[-1]
    assert (entry.step, entry.result) == ("closed", "dropped")
    assert (world.asked("leave"), world.seen) == (told, 0.0)
    world.check_erased()
    world.server.forget()
    assert world.round().kind == "took_part"
    world.check_committed()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("harm", [lost, damaged, empty])
@pytest.mark.parametrize("kind", [".secrets", ".plan", ".vector"])
def test_before_it_masked_it_says_that_it_leaves(world: NeighbourWorld, kind: str, harm: Harm) -> None:
    world.killed_at("shared")
    harm(file(world, kind), vault(world))
    left_cleanly(world, told=1)


@pytest.mark.parametrize("harm", [lost, damaged])
@pytest.mark.sampled(every=4)
def test_without_the_masked_bytes_nothing_is_sent_any_more(world: NeighbourWorld, harm: Harm) -> None:
    world.killed_at("masked")
    harm(file(world, ".masked"), vault(world))
    sent = world.asked("update")
    assert sent == 0
    left_cleanly(world, told=1)


def test_without_the_secrets_the_masked_bytes_are_sent_and_no_more(world: NeighbourWorld) -> None:
    """The peers can unmask them, as after a restart in a round over a complete graph."""
    world.killed_at("masked")
    masked = vault(world).read(file(world, ".masked"))
    lost(file(world, ".secrets"), vault(world))
    assert world.finish().kind == "dropped"
    assert world.server.bodies["update"] == [masked]
    assert world.asked("question") == world.asked("leave") == 0
    world.check_erased()


@pytest.mark.parametrize("phase", ["committed", "failed"])
def test_without_the_secrets_of_a_round_that_counts_its_result_is_waited_for(
    world: NeighbourWorld, phase: m.Phase
) -> None:
    world.killed_at("confirmed")
    damaged(file(world, ".secrets"), vault(world))
    assert world.agent.run_once().kind == "paused"
    assert world.agent.rounds[-1].step == "confirming"
    world.server.phase = phase
    world.finish()
    assert world.agent.rounds[-1].result == ("took_part" if phase == "committed" else "dropped")
    assert world.seen == (4.0 if phase == "committed" else 0.0)
    world.check_erased()


def test_the_vector_is_erased_when_it_is_masked(world: NeighbourWorld) -> None:
    world.killed_at("masked")
    folder = world.agent.config.folder / "rounds"
    assert {path.suffix for path in folder.iterdir()} >= {".masked", ".secrets", ".plan"}
    assert not list(folder.glob("*.vector"))


@pytest.mark.parametrize("event", [pytest.param("advertised", marks=pytest.mark.slow), "shared", "uploaded"])
def test_a_round_that_failed_meanwhile_is_closed(world: NeighbourWorld, event: str) -> None:
    world.killed_at(event)
    world.server.phase = "failed"
    left_cleanly(world, told=0)


@pytest.mark.parametrize(("event", "result"), [("shared", "dropped"), ("confirmed", "took_part")])
def test_a_round_that_was_committed_meanwhile_is_settled(world: NeighbourWorld, event: str, result: str) -> None:
    world.killed_at(event)
    world.server.phase = "committed"
    assert world.finish().kind == result
    assert world.seen == (4.0 if result == "took_part" else 0.0)
    world.check_erased()


def test_the_owner_may_have_changed_the_limits(world: NeighbourWorld) -> None:
    world.killed_at("shared")
    world.restart(max_upload_bytes=1)
    sent = world.asked("dealt")
    assert world.finish().kind == "dropped"
    assert "max_upload_bytes" in world.agent.rounds[-1].reason
    assert (world.asked("leave"), world.asked("refused"), world.asked("dealt")) == (1, 0, sent)


def test_while_the_owners_conditions_do_not_hold_nothing_is_sent(world: NeighbourWorld) -> None:
    world.killed_at("shared")
    asked = len(world.server.steps)
    world.agent._gate._may_work = lambda: "it is not on power"
    assert world.agent.run_once().kind == "paused"
    assert len(world.server.steps) == asked
    world.agent._gate._may_work = None
    world.finish()
    world.check_committed()


def test_a_revoked_neighbour_is_refused_after_a_restart_too(world: NeighbourWorld) -> None:
    _, chain = world.server.peers_chains[0]
    peer = verify_chain(chain, public_bytes(world.server.enrolment_key)).device_id
    listed = m.Revocations(population="pupils", epoch=1, devices=[peer], tokens=[])
    world.server.revoke(encode(seal("revocations", listed, world.server.key)))
    world.killed_at("advertised")
    assert world.finish().kind == "dropped"
    assert "revoked" in world.agent.rounds[-1].reason
    assert world.asked("dealt") == 0
    world.check_erased()


@pytest.mark.sampled(every=3)
def test_stopped_and_started_again_it_goes_on(world: NeighbourWorld) -> None:
    """As before a phone is switched off: SIGTERM, not SIGKILL."""
    for name in ("advertised", "masked"):
        world.server.begin()
        stop = threading.Event()
        world.agent._on_event = lambda event, name=name, stop=stop: stop.set() if event.name == name else None  # type: ignore[misc]
        world.agent.run_forever(stop)
        assert world.agent.rounds[-1].step != "closed"
        assert world.asked("leave") == 0
        world.restart()
        world.finish()
        world.check_committed(rounds=1 if name == "advertised" else 2)
        world.server.forget()


def test_while_the_server_is_silent_it_stays_in_the_round(world: NeighbourWorld) -> None:
    """As a phone that is started again where there is no network."""
    world.killed_at("shared")
    world.restart(patience=0.05)
    world.answers("dealt", *[before(503)] * 60)
    assert world.agent.run_once().kind == "paused"
    assert world.agent.rounds[-1].step == "sharing"
    world.answers("dealt")
    world.finish()
    world.check_committed()


def test_a_round_of_an_asynchronous_task_is_left_after_a_restart(world: NeighbourWorld) -> None:
    """Its vector depends on when it is masked, so it is not kept."""
    world.server.begin(staleness_exponent=0.5)
    assert world._killed(lambda kill: world._at_event(world.agent, "shared", kill))
    left = {path.suffix for path in (world.agent.config.folder / "rounds").iterdir()}
    assert left & {".secrets", ".vector", ".plan"} == set()
    world.server.forget()
    world.agent.run_once()
    assert world.agent.rounds[-1].result == "dropped"
    assert (world.asked("leave"), world.asked("dealt")) == (1, 0)
    world.server.forget()
    assert world.round(staleness_exponent=0.5).kind == "took_part"
    world.check_committed()


@pytest.mark.parametrize("status", [410, pytest.param(404, marks=pytest.mark.slow), 422])
@pytest.mark.sampled(every=4)
def test_refused_after_a_restart_it_leaves(world: NeighbourWorld, status: int) -> None:
    world.killed_at("shared")
    world.answers("dealt", before(status))
    left_cleanly(world, told=0)
