"""A server, or somebody between, that offers what it should not: events say so, and the agent goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from archipel.bundle import generate_key
from archipel.client import Agent, Outcome
from archipel.client.versions.adoption import Adoption
from archipel.client.versions.offer_book import FILE, MAX_STARTS
from archipel.errors import ClientError, UnreachableError
from archipel.protocol.messages import MAX_MODELS, Offer
from archipel.protocol.sealed import Sealed, seal
from archipel.server.registry.offers import Offers
from tests.support.registry import BEST, BETTER, MODEL, Registry

Say = Callable[..., list[Offer]]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Sealed]], None]:
    """What check-ins are answered from now on."""
    said: list[Sealed] = []
    kept = Offers.to

    def to(self: Offers, *arguments: Any, **named: Any) -> list[Sealed]:
        return said or kept(self, *arguments, **named)

    monkeypatch.setattr(Offers, "to", to)

    def say(offers: list[Sealed]) -> None:
        said[:] = offers

    return say


@pytest.fixture
def offer(registry: Registry) -> Offer:
    """Of version 2, as the server would make it; the device runs version 1."""
    made = registry.add(BEST)
    return Offer(population="pupils", model=MODEL, version=2, bundle=made.bundle, serial=2**50)


def sign(registry: Registry, offer: Offer, label: str = "offer") -> Sealed:
    return seal(label, offer, registry.federation.server.settings.private_key)


@pytest.mark.sampled(every=3)
def test_forged_offers(registry: Registry, offer: Offer, answer: Callable[[list[Sealed]], None]) -> None:
    agent = registry.device()
    answer([sign(registry, msgspec.structs.replace(offer, version=1, bundle=registry_bundle(registry, 1), serial=5))])
    agent.run_once()
    assert agent.models == {MODEL: 1}
    good = sign(registry, offer)
    for forged, said in (
        (seal("offer", offer, generate_key()), "does not verify"),
        (sign(registry, offer, label="plan"), "does not verify"),
        (Sealed(body=good.body[:-1] + b" }", signature=good.signature), "does not verify"),
        (Sealed(body=b"{}", signature=b""), "does not verify"),
        (sign(registry, msgspec.structs.replace(offer, population="teachers")), "population 'teachers'"),
        (sign(registry, msgspec.structs.replace(offer, serial=4)), "older than 5"),
    ):
        answer([forged])
        assert agent.run_once().kind == "waiting"
        assert said in registry.told(agent, "refused")[-1]["reason"]
        assert agent.models == {MODEL: 1}
    answer([good])
    agent.run_once()
    assert agent.models == {MODEL: 2}


def registry_bundle(registry: Registry, number: int) -> str:
    return str(registry.federation.operator.models.version(MODEL, number).bundle)


@pytest.mark.sampled(every=3)
def test_an_old_offer_that_is_sent_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, answer: Callable[[list[Sealed]], None]
) -> None:
    """What a device was told once cannot be told again after it was told something newer, over a restart too."""
    heard: list[Sealed] = []
    kept = Adoption.consider

    def listen(self: Adoption, offers: list[Sealed], *more: Any) -> None:
        heard.extend(offers)
        kept(self, offers, *more)

    monkeypatch.setattr(Adoption, "consider", listen)
    agent = registry.device()
    agent.run_once()
    registry.add(BETTER)
    agent.run_once()
    assert agent.models == {MODEL: 2}
    agent.close()
    with registry.federation.agent(0, enrol=False, adopt=True) as agent:
        answer(heard[:1])
        agent.run_once()
        assert agent.models == {MODEL: 2}
        assert "older than" in registry.told(agent, "refused")[-1]["reason"]


@pytest.mark.sampled(every=4)
def test_what_is_not_there_and_what_does_not_fit(
    registry: Registry, offer: Offer, answer: Callable[[list[Sealed]], None]
) -> None:
    agent = registry.device()
    agent.run_once()
    runs = agent.models[MODEL]
    agents = registry.helpers()
    weights = registry.add_trained(agents, promote=False).weights
    foreign = registry.federation.operator.bundles.upload(registry.federation.bundle_file)
    # A task that never begins: without one no device of the population could fetch it.
    registry.federation.task(bundle=foreign.digest, min_cohort=50, cohort=60, threshold=40)
    for number, (changes, said) in enumerate(
        (
            ({"bundle": "0" * 64}, "404"),
            ({"weights": "0" * 64}, "404"),
            ({"bundle": weights}, "404"),
            ({"weights": offer.bundle}, "404"),
            # Trained from another bundle.
            ({"bundle": foreign.digest, "weights": weights}, "not in the server's log"),
        )
    ):
        answer([sign(registry, msgspec.structs.replace(offer, version=10 + number, **changes))])
        assert agent.run_once().kind == "waiting"
        assert said in registry.told(agent, "kept")[-1]["reason"]
        assert agent.models == {MODEL: runs}


@pytest.mark.sampled(every=4)
def test_older_weights_come_back_only_with_an_entry_in_the_log(
    registry: Registry, answer: Callable[[list[Sealed]], None]
) -> None:
    agent = registry.device()
    agent.run_once()
    helpers = registry.helpers()
    older = registry.add_trained(helpers)
    for number in (2, 3, 4):  # the slots hold the last two
        agent.run_once()
        assert agent.models == {MODEL: number}
        if number < 4:
            registry.add_trained(helpers)
    again = Offer(population="pupils", model=MODEL, version=2, bundle=older.bundle, weights=older.weights, serial=2**50)
    answer([sign(registry, again)])
    agent.run_once()
    assert agent.models == {MODEL: 4}
    assert "no later entry goes back to it" in registry.told(agent, "kept")[-1]["reason"]
    registry.federation.operator.models.promote(MODEL, 2)
    answer([sign(registry, msgspec.structs.replace(again, serial=2**51))])
    agent.run_once()
    assert agent.models == {MODEL: 2}


@pytest.mark.sampled(every=4)
def test_several_offers_of_one_model_and_more_models_than_there_may_be(
    registry: Registry, offer: Offer, answer: Callable[[list[Sealed]], None]
) -> None:
    agent = registry.device()
    older = msgspec.structs.replace(offer, version=1, bundle=registry_bundle(registry, 1), serial=3)
    answer([sign(registry, each) for each in (older, offer, older)])
    agent.run_once()
    assert agent.models == {MODEL: 2}
    more = [msgspec.structs.replace(offer, model=f"m{number}") for number in range(MAX_MODELS)]
    answer([sign(registry, each) for each in more])
    agent.run_once()
    answer([sign(registry, each) for each in more[-1:]])
    agent.run_once()
    assert len(agent.models) == MAX_MODELS
    assert "m15" not in agent.models
    assert "more than the 16" in registry.told(agent, "refused")[-1]["reason"]


@pytest.mark.sampled(every=3)
def test_offers_to_a_device_that_asked_for_none(
    registry: Registry, offer: Offer, answer: Callable[[list[Sealed]], None]
) -> None:
    agent = registry.device(adopt=False)
    answer([sign(registry, offer)])
    agent.run_once()
    assert registry.federation.names(agent) == ["enrolled"]
    assert agent.models == {}


@pytest.mark.sampled(every=3)
def test_a_server_that_goes_away_while_it_sends(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, outcome_of: Callable[[Agent, str], Outcome]
) -> None:
    agent = registry.device()
    from archipel.client.connection.session import DeviceSession

    def gone(*_: object) -> None:
        raise UnreachableError("the server did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceSession, "download", gone)
        with pytest.raises(UnreachableError):
            agent.run_once()
    outcome_of(agent, "waiting")
    assert agent.models == {MODEL: 1}
    assert registry.told(agent, "kept") == []


@pytest.mark.sampled(every=4)
def test_a_version_that_ends_the_process_is_given_up(registry: Registry, offer: Offer) -> None:
    agent = registry.device()
    for _ in range(MAX_STARTS):
        agent._adoption._book.begin(msgspec.structs.replace(offer, serial=1))
    agent.run_once()
    assert agent.models == {}
    assert "ended 3 times" in registry.told(agent, "kept")[0]["reason"]
    registry.add(BETTER)
    agent.run_once()
    assert agent.models == {MODEL: 3}


@pytest.mark.sampled(every=3)
def test_conditions_that_end_meanwhile(registry: Registry) -> None:
    asked: list[bool] = []

    def conditions() -> str:
        asked.append(True)
        return "not charging" if len(asked) > 1 else ""

    agent = registry.device(conditions=conditions)
    assert agent.run_once().kind == "waiting"
    assert agent.models == {}
    assert "not charging" in registry.told(agent, "paused")[-1]["reason"]
    assert registry.told(agent, "kept") == []


@pytest.mark.parametrize(
    "data", [b"", b"{}x", b'{"models":{"a":{"serial":-1}}}', b'{"models":[]}', b"\xff" * (2 << 20)]
)
@pytest.mark.sampled(every=6)
def test_a_damaged_record_is_named(registry: Registry, data: bytes) -> None:
    agent = registry.device()
    path = agent.config.folder / FILE
    path.write_bytes(data)
    assert agent.run_once().kind == "waiting"
    [refused] = registry.told(agent, "refused")
    assert str(path) in refused["reason"]
    assert "remove it" in refused["reason"]
    path.unlink()
    agent.run_once()
    assert agent.models == {MODEL: 1}


@pytest.mark.sampled(every=3)
def test_damaged_slots_are_named_and_the_agent_goes_on(registry: Registry) -> None:
    agent = registry.device()
    agent.run_once()
    (agent.config.folder / "models" / MODEL / "state.json").write_bytes(b"?")
    assert agent.run_once().kind == "waiting"
    assert "state.json" in registry.told(agent, "refused")[-1]["reason"]
    assert agent.models == {}
    with pytest.raises(ClientError, match="runs no version"):
        agent.model(MODEL)


@pytest.mark.sampled(every=3)
def test_a_damaged_model_is_replaced_by_the_next_version(registry: Registry) -> None:
    agent = registry.device()
    agent.run_once()
    folder = agent.config.folder / "models" / MODEL / "a" / "bundle"
    (folder / "predict.onnx").write_bytes(b"?")
    registry.add(BETTER)
    agent.run_once()
    assert agent.models == {MODEL: 2}
    assert "damaged" in registry.told(agent, "adopted")[-1]["reason"]
