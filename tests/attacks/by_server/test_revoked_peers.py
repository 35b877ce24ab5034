"""A server that was taken over leads a revoked device (a stolen phone's key is good company for an attacker) into
cohorts of honest devices, as if nothing had been: it leaves it out of the list of revocations, shows an older one, or
none.

What stops them: every plan of a secure round names a list that the server has signed, whose epoch never goes back and
which loses no entry; devices keep the last one that they saw and refuse both cohorts with a member that is in it and
lists that fall behind it. (An entry that no device has ever been shown the server can keep back.)
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given, settings
from hypothesis import strategies as st

from archipel.client.connection.revocation_book import RevocationBook
from archipel.errors import CertificateError, ClientError, MessageError
from archipel.protocol import identity
from archipel.protocol.messages import MAX_REVOKED, Cohort, Member, Revocations, RoundPlan
from archipel.protocol.policy import plan_digest
from archipel.protocol.revocations import Revoked, check_successor
from archipel.protocol.sealed import encode, public_bytes, seal
from archipel.protocol.secagg import KeyTree, Participant, hand_out_keys
from archipel.server.devices import revocation_lists
from tests.attacks.borders_world import person
from tests.client.answers.world import World
from tests.support.federation import Federation
from tests.support.fixtures.federation import federation, server_host  # noqa: F401  (fixtures)
from tests.support.rounds import signing_key
from tests.support.scripted_server import scripted

SERVER, ENROLMENT = signing_key("server"), signing_key("enrolment")


def listed(epoch: int, *devices: str, tokens: tuple[str, ...] = (), population: str = "pupils") -> Revocations:
    return Revocations(population=population, epoch=epoch, devices=sorted(devices), tokens=sorted(tokens))


def members(revoked: Revoked, count: int = 4) -> tuple[list[Participant], Cohort, list[str]]:
    """Participants of one round, the cohort that the first is shown, and the ids of their tokens."""
    plan = RoundPlan(
        round_id="a" * 32, task_id="b" * 32, number=1, bundle="c" * 64, weights="d" * 64, privacy="secure",
        min_cohort=3, max_cohort=4, threshold=3, modulus_bits=24,
    )  # fmt: skip
    digest = plan_digest(seal("plan", plan, SERVER))
    made, shown, tokens, trees = [], [], [], {}
    for number in range(count):
        key, seed = signing_key(f"device {number}"), bytes([number]) * 32
        certificate = identity.mint_token(ENROLMENT, population="pupils", not_after=2**40, seed=seed)
        chain = identity.issue_identity(seed, certificate, public_bytes(key))
        made.append(Participant(plan, digest, key, chain, public_bytes(ENROLMENT), secrets.token_bytes, revoked))
        request = made[-1].advertise()
        shown.append(Member(chain=chain, advertisement=request.advertisement))
        trees[made[-1].device_id] = KeyTree(request.envelope_keys, plan.max_cohort)
        tokens.append(identity.token_id(identity.verify_chain(chain, public_bytes(ENROLMENT)).token_key))
    in_order = sorted(shown, key=lambda each: identity.read_chain(each.chain)[0])
    return made, Cohort(members=in_order, keys=hand_out_keys(trees, made[0].device_id)), tokens


def test_a_cohort_with_a_revoked_member_is_refused() -> None:
    everybody, _, tokens = members(Revoked())
    thief = everybody[3].device_id
    for revoked in (Revoked(devices=frozenset({thief})), Revoked(tokens=frozenset({tokens[3]}))):
        made, cohort, _ = members(revoked)
        with pytest.raises(CertificateError, match=f"{thief} (was revoked|enrolled with a token that was revoked)"):
            made[0].share(cohort)
    made, cohort, _ = members(Revoked(devices=frozenset({"f" * 32})))
    assert len(made[0].share(cohort).shares) == 3


class Server:
    """Hands out whatever list it likes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def says(self, listed: Revocations, key: Ed25519PrivateKey = SERVER) -> str:
        import hashlib

        data = encode(seal("revocations", listed, key))
        digest = hashlib.sha256(data).hexdigest()
        self.files[f"/v1/blobs/{digest}"] = data
        return digest

    def download(self, path: str, target: Path, limit: int, *, stop: int | None = None) -> None:
        target.write_bytes(self.files[path][:limit])


def test_what_a_device_was_told_is_never_taken_back(tmp_path: Path) -> None:
    server: Any = Server()

    def book() -> RevocationBook:  # as after a restart, each time
        return RevocationBook(tmp_path / "revoked", public_bytes(SERVER), "pupils")

    first, second = "1" * 32, "2" * 32
    old = server.says(listed(1, first))
    assert book().fetch_named(None, server) == Revoked()
    assert book().fetch_named(old, server).devices == {first}
    both = server.says(listed(2, first, second))
    assert book().fetch_named(both, server).devices == {first, second}
    lies = {
        "none at all": None,
        "an older one": old,
        "an older epoch with all of them": server.says(listed(1, first, second, "4" * 32)),
        "without the first": server.says(listed(3, second)),
        "the same, emptied": server.says(listed(2)),
        "of another population": server.says(listed(9, first, second, population="staff")),
        "by somebody else": server.says(listed(9, first, second), key=signing_key("mallory")),
    }
    for what, digest in lies.items():
        with pytest.raises(CertificateError):
            book().fetch_named(digest, server)
        assert book().fetch_named(both, server).devices == {first, second}, what
    server.files[f"/v1/blobs/{old}"] = server.files[f"/v1/blobs/{both}"]
    server.files["/v1/blobs/" + "0" * 64] = b"{}"
    with pytest.raises(CertificateError, match="another list"):
        book().fetch_named("0" * 64, server)
    more = server.says(listed(4, first, second, tokens=("3" * 32,)))
    assert book().fetch_named(more, server).tokens == {"3" * 32}


def test_a_cohort_that_a_server_makes_with_a_revoked_device_is_left(tmp_path: Path) -> None:
    """Over HTTP: a device knows the list, and the server puts one that is in it among its peers all the same."""
    with scripted(tmp_path) as server:
        world = World(tmp_path, server)
        tokens = [server.token(), server.token()]
        chain = identity.issue_identity(tokens[0].seed, tokens[0].certificate, public_bytes(ENROLMENT))
        stolen = identity.token_id(identity.verify_chain(chain, public_bytes(server.enrolment_key)).token_key)
        server.revoke(encode(seal("revocations", listed(1, tokens=(stolen,)), server.key)))
        peers = iter(tokens)
        server.token = lambda: next(peers)  # type: ignore[method-assign]
        outcome = world.round()
        assert outcome.kind == "dropped"
        assert "enrolled with a token that was revoked" in outcome.reason
        assert (world.asked("advertisement"), world.asked("shares"), world.asked("update")) == (1, 0, 0)
        world.agent.close()


def test_invented_entries_push_no_true_one_out() -> None:
    ids = [f"{number:032x}" for number in range(MAX_REVOKED + 1)]
    full = listed(MAX_REVOKED, *ids[:-1])
    assert len(encode(seal("revocations", full, SERVER))) < 1 << 20
    check_successor(full, listed(MAX_REVOKED + 1, *ids[:-1]), "pupils")
    with pytest.raises(CertificateError, match="not in the server's list any more"):
        check_successor(full, listed(MAX_REVOKED + 1, *ids[1:]), "pupils")


@pytest.mark.sampled(every=4)
def test_a_real_servers_full_list_stays_as_it_is(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(revocation_lists, "MAX_REVOKED", 2)
    agents = [federation.agent(number) for number in range(3)]
    operator, seen = person(federation, "pupils"), []
    for agent in agents:
        assert operator.ask("POST", f"/v1/devices/{agent.device_id}/revoke")[0] == 200
        with federation.server._services.database.read() as session:
            seen.append(revocation_lists.revocations_of(session, "pupils"))
    for before, after in zip([None, *seen], seen):
        check_successor(before, after, "pupils")
    assert seen[2] == listed(3, agents[0].device_id, agents[1].device_id)


@pytest.mark.sampled(every=4)
def test_a_real_server_tells_devices_whom_an_operator_revoked(federation: Federation) -> None:  # noqa: F811
    agents = [federation.agent(number) for number in range(4)]
    operator = person(federation, "pupils")
    assert operator.ask("POST", f"/v1/devices/{agents[3].device_id}/revoke")[0] == 200
    task = federation.task(cohort=3)
    federation.run(agents[:3], lambda: federation.operator.tasks.get(task.task_id).state == "completed")
    for agent in agents[:3]:
        record = agent._record
        assert record is not None
        book = RevocationBook(agent.config.folder / "rounds" / "revoked", record.server_key, record.population)
        stored = book._stored()
        assert stored is not None
        assert book._read(stored) == listed(1, agents[3].device_id)


@settings(max_examples=150)
@example(data=b" ", cut=400)
@given(data=st.one_of(st.binary(max_size=80), st.text(max_size=80).map(str.encode)), cut=st.integers(0, 400))
@pytest.mark.sampled(every=4)
def test_any_bytes_in_place_of_a_list(tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int) -> None:
    whole = encode(seal("revocations", listed(1, "1" * 32), SERVER))
    book = RevocationBook(tmp_path_factory.mktemp("book") / "revoked", public_bytes(SERVER), "pupils")
    for damaged in (data, whole[:cut] + data, whole[: cut % len(whole)]):
        if damaged.strip(b" \t\r\n") == whole:  # spaces around JSON change nothing of what is signed
            assert book._read(damaged) == listed(1, "1" * 32)
            continue
        with pytest.raises((CertificateError, MessageError)):
            book._read(damaged)
        book._path.write_bytes(damaged)
        with pytest.raises(ClientError, match="damaged"):
            book.fetch_named(None, Server())  # type: ignore[arg-type]
