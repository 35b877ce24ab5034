"""A server has kept a bundle that its publisher signed years ago, with a policy that they would not sign today, or one
that was made for another population, and has devices train or adopt it. The signature is good: it always will be.

What stops them: the signed manifest says until when and for whom a bundle is, and its sequence ends the use of all
before it; devices keep the greatest that they have seen. What a device predicts with stays with its owner.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel import lite_runtime as lite
from archipel.bundle import Bundle, Manifest, decode_manifest, encode_manifest, generate_key, open_bundle, pack
from archipel.client.downloads import publisher_book
from archipel.client.downloads.publisher_book import PublisherBook
from archipel.errors import ClientError, ManifestError, PolicyError
from archipel.protocol.messages import Offer
from archipel.protocol.policy import check_validity
from archipel.protocol.sealed import public_bytes
from tests.attacks.borders_world import person
from tests.attacks.owner_offers import Listening, Watched
from tests.client.answers.world import World
from tests.support.federation import Federation
from tests.support.fixtures.federation import federation, server_host  # noqa: F401
from tests.support.in_thread import in_thread
from tests.support.linear_bundle import local_data, make_bundle
from tests.support.registry import make_model
from tests.support.scripted_server import scripted

NOW = int(time.time())


def signed_anew(folder: Path, key: Ed25519PrivateKey, **changes: Any) -> Path:
    """The bundle in the folder with another manifest, signed by its publisher, as one file."""
    manifest = decode_manifest((folder / "manifest.json").read_bytes())
    data = encode_manifest(msgspec.structs.replace(manifest, **changes))
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sig").write_bytes(key.sign(data))
    file = folder.with_suffix(".changed.bundle")
    file.unlink(missing_ok=True)
    pack(folder, file)
    return file


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with scripted(tmp_path) as server:
        made = World(tmp_path, server)
        yield made
        made.agent.close()


def publish(world: World, **changes: Any) -> str:
    file = signed_anew(world.folder / "bundle", world.server.publisher, **changes)
    world.server.files["bundle"] = file.read_bytes()
    world.server.bundle = open_bundle(world.folder / "bundle", [public_bytes(world.server.publisher)]).digest
    return world.server.bundle


def test_devices_take_part_with_no_bundle_that_is_over_or_for_others(world: World) -> None:
    publish(world, not_after=NOW + 1000, populations=("pupils", "staff"))
    assert world.round(privacy="plain").kind == "took_part"
    for changes, words in (
        ({"not_after": NOW - 10}, "expired"),
        ({"populations": ("staff",)}, "not for 'pupils'"),
    ):
        publish(world, **{"not_after": NOW + 1000, "populations": (), **changes})
        outcome = world.round(privacy="plain")
        assert outcome.kind == "refused"
        assert words in outcome.reason
    assert world.asked("update") == 1


def test_what_was_replaced_stays_replaced(world: World) -> None:
    old = publish(world, not_after=0, sequence=3)
    old_file = world.server.files["bundle"]
    assert world.round(privacy="plain").kind == "took_part"
    publish(world, sequence=4)
    assert world.round(privacy="plain").kind == "took_part"
    world.restart()
    world.server.files["bundle"], world.server.bundle = old_file, old
    outcome = world.round(privacy="plain")
    assert outcome.kind == "refused"
    assert "replaced what is below 4" in outcome.reason
    # But whoever has it predicts with it, also after its time.
    expired = signed_anew(world.folder / "bundle", world.server.publisher, not_after=1)
    assert expired.exists()
    bundle = open_bundle(world.folder / "bundle", [public_bytes(world.server.publisher)])
    assert lite.Runtime(bundle).parameters()["w"].shape == (3,)


def test_what_was_replaced_is_not_adopted(tmp_path: Path) -> None:
    """One version by its publisher is adopted; then the server offers an earlier one, and one that is over."""
    server = Listening(tmp_path)
    watched = Watched(server, local_data(0), tmp_path / "device")
    offers = {}
    for serial, (name, changes) in enumerate(
        {"new": {"sequence": 4}, "replaced": {"sequence": 3}, "over": {"sequence": 5, "not_after": 1}}.items(), start=1
    ):
        folder = make_model(tmp_path / name, server.publisher, (0.1, 0.1, 0.1 * serial)).with_suffix("")
        file = signed_anew(folder, server.publisher, **changes)
        digest = open_bundle(folder, [public_bytes(server.publisher)]).digest
        server.stored[digest] = file.read_bytes()
        offers[name] = Offer(population="pupils", model="linear", version=serial, bundle=digest, serial=serial)
    with in_thread(server), watched.agent() as agent:
        agent.enrol(server.token())
        for name, why in (("new", ""), ("replaced", "replaced what is below 4"), ("over", "expired")):
            server.offer(offers[name])
            agent.run_once()
            assert agent.models == {"linear": 1}
            last = [each for each in watched.events if each.name in ("adopted", "kept")][-1]
            assert why in str(last.detail["reason"])
            assert last.name == ("adopted" if name == "new" else "kept")


def test_sequences_are_of_one_publisher_and_one_name(tmp_path: Path) -> None:
    book = PublisherBook(tmp_path / "book")
    keys = generate_key(), generate_key()

    def bundle(number: int, key: Ed25519PrivateKey, sequence: int) -> Bundle:
        folder = tmp_path / f"{number}"
        make_bundle(folder, key)
        signed_anew(folder, key, sequence=sequence)
        return open_bundle(folder, [public_bytes(each) for each in keys])

    first, second, third = bundle(1, keys[0], 9), bundle(2, keys[1], 1), bundle(3, keys[0], 8)
    assert (first.publisher, second.publisher) == tuple(public_bytes(each) for each in keys)
    for each in (first, second):
        book.check(each, "pupils", NOW)
    with pytest.raises(PolicyError, match="below 9"):
        PublisherBook(tmp_path / "book").check(third, "pupils", NOW)
    book.check(second, "pupils", NOW)


@pytest.mark.sampled(every=3)
def test_the_server_begins_nothing_with_such_bundles(federation: Federation) -> None:  # noqa: F811
    operator, key = person(federation, "pupils"), federation.publisher_key
    folder = federation.folder / "linear"
    values = {"name": "x", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 4, "threshold": 3}
    theirs = signed_anew(folder, key, populations=("staff",)).read_bytes()
    status, answer = operator.ask("POST", "/v1/bundles", theirs)
    assert (status, "for ['staff'], not for 'pupils'" in answer["detail"]) == (422, True)
    root = federation.operator.bundles.upload(folder.with_suffix(".changed.bundle")).digest
    over = operator.ask("POST", "/v1/bundles", signed_anew(folder, key, populations=(), not_after=NOW - 5).read_bytes())
    assert over[0] == 201
    with pytest.raises(Exception, match="not for 'pupils'"):
        federation.task(bundle=root)
    status, answer = operator.ask("POST", "/v1/tasks", {**values, "bundle": over[1]["digest"]})
    assert (status, "expired" in answer["detail"]) == (422, True)
    assert operator.ask("POST", "/v1/models", {"name": "old", "population": "pupils"})[0] == 201
    status, answer = operator.ask("POST", "/v1/models/old/versions", {"bundle": over[1]["digest"]})
    assert (status, "expired" in answer["detail"]) == (422, True)


def test_what_a_manifest_may_not_say(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", generate_key())
    manifest: Manifest = decode_manifest((tmp_path / "b" / "manifest.json").read_bytes())
    for changes in (
        {"sequence": -1}, {"not_after": -1}, {"not_after": 2**53}, {"populations": ("b", "a")},
        {"populations": ("a", "a")}, {"populations": ("",)}, {"populations": ("a b",)},
        {"populations": tuple(f"p{number:03}" for number in range(65))},
    ):  # fmt: skip
        with pytest.raises(ManifestError):
            encode_manifest(msgspec.structs.replace(manifest, **changes))


def test_a_clock_without_a_date_is_told_in_seconds(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", generate_key())
    manifest = decode_manifest((tmp_path / "b" / "manifest.json").read_bytes())
    over = msgspec.structs.replace(manifest, not_after=1)
    with pytest.raises(
        PolicyError, match=r"expired at 1970-01-01 00:00:01Z, here it is 4\.611686018427388e\+18 \(Unix"
    ):
        check_validity(over, "pupils", 2.0**62)


@settings(max_examples=100)
@given(data=st.one_of(st.binary(max_size=64), st.text(max_size=64).map(str.encode)))
@pytest.mark.sampled(every=8)
def test_any_bytes_in_place_of_the_book(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-book"  # one for all examples: making folders takes longer
    path.write_bytes(data)
    try:
        seen = PublisherBook(path)._stored()
    except ClientError as error:
        assert "damaged" in str(error)  # noqa: PT017
    else:
        assert len(seen) <= publisher_book.MAX_NAMES
