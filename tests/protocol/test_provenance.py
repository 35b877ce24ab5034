"""The weights log as a device reads it: what it accepts, and each way in which it could be lied to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.bundle import Manifest, generate_key, open_bundle
from archipel.errors import CertificateError, MessageError, PolicyError, ProtocolError, ProvenanceError
from archipel.protocol import public_bytes, seal
from archipel.protocol.messages import Endorsement, Endorser, WeightsStatement
from archipel.protocol.provenance import (
    FIRST,
    MAX_NODES,
    History,
    LogReader,
    check_distance,
    check_endorsement,
    entry_hash,
)
from archipel.protocol.sealed import Sealed
from tests.support.linear_bundle import make_bundle
from tests.support.rounds import Round, fixed, signing_key

BUNDLE, POPULATION = fixed("bundle").hex(), "pupils"
OWN = fixed("own").hex()
SERVER = signing_key("server")
STEP = 0.5


class Log:
    """A server's log, and a device that reads it."""

    def __init__(self, **changes: Any) -> None:
        history = History(population=POPULATION, bundle=BUNDLE)
        self.reader = LogReader(history, OWN, public_bytes(SERVER), lambda entry: STEP)
        self.previous, self.number = FIRST, 0

    def sealed(self, kind: str, weights: str, **changes: Any) -> Sealed:
        fields: dict[str, Any] = {
            "population": POPULATION, "bundle": BUNDLE, "number": self.number + 1, "previous": self.previous,
            "kind": kind, "weights": weights, **changes,
        }  # fmt: skip
        return seal("weights", WeightsStatement(**fields), SERVER)

    def add(self, kind: str, weights: str, **changes: Any) -> WeightsStatement:
        sealed = self.sealed(kind, weights, **changes)
        entry = self.reader.add(sealed)
        self.previous, self.number = entry_hash(sealed), self.number + 1
        return entry

    def start(self, task: str = "task") -> WeightsStatement:
        return self.add("start", OWN, task_id=name(task))

    def step(self, parent: str, weights: str, task: str = "task", **changes: Any) -> WeightsStatement:
        return self.add("step", weights, **step(parent, number=self.number, task=task, **changes))


def name(text: str) -> str:
    return fixed(text, 16).hex()


def step(parent: str, *, number: int = 0, task: str = "task", **changes: Any) -> dict[str, Any]:
    fields = {"parent": parent, "round_id": name(f"round {number}"), "plan": "1" * 64, "devices": 3}
    return {**fields, "task_id": name(task), **changes}


def digest(text: str) -> str:
    return fixed(f"weights {text}").hex()


def test_bounds_add_up_along_the_way() -> None:
    log = Log()
    log.start()
    log.step(OWN, digest("one"))
    log.step(digest("one"), digest("two"))
    log.start("other")
    log.step(OWN, digest("three"), "other")
    found = {text: log.reader.find(digest(text)) for text in ("one", "two", "three")}
    assert [node.bound for node in found.values()] == [STEP, 2 * STEP, STEP]
    between = log.reader.bound_between
    assert between(found["one"], found["two"]) == STEP
    assert between(found["two"], found["three"]) == 3 * STEP
    assert between(found["two"], found["two"]) == 0
    assert not any(node.plain for node in found.values())


def test_a_plain_round_is_remembered_by_all_that_come_from_it() -> None:
    log = Log()
    log.start()
    log.step(OWN, digest("one"), privacy="plain")
    log.step(digest("one"), digest("two"))
    assert log.reader.find(digest("two")).plain


def test_reading_on_later_is_the_same_as_reading_at_once() -> None:
    log = Log()
    log.start()
    log.step(OWN, digest("one"))
    later = LogReader(
        msgspec.json.decode(msgspec.json.encode(log.reader.history), type=History), OWN, public_bytes(SERVER),
        lambda entry: STEP,
    )  # fmt: skip
    more = log.sealed("step", digest("two"), **step(digest("one"), number=9))
    later.add(more)
    log.reader.add(more)
    assert later.history == log.reader.history


@pytest.mark.sampled(every=3)
def test_what_is_kept_is_bounded_and_goes_on() -> None:
    log = Log()
    log.start()
    log.step(OWN, digest("0"))
    for number in range(MAX_NODES + 10):
        log.step(digest(str(number)), digest(str(number + 1)))
    kept = log.reader.history
    assert len(kept.nodes) == MAX_NODES
    again = LogReader(kept, OWN, public_bytes(SERVER), lambda entry: STEP)
    newest = again.find(digest(str(MAX_NODES + 10)))
    assert math.isclose(newest.bound, (MAX_NODES + 11) * STEP)
    assert again.newest(digest("0")) is None


@pytest.mark.sampled(every=3)
def test_what_a_later_entry_may_name_is_kept_however_old_it_is() -> None:
    log = Log()
    log.start("paused")
    log.step(OWN, digest("paused"), "paused")
    log.start()
    log.step(OWN, digest("0"))
    for number in range(MAX_NODES + 10):
        log.step(digest(str(number)), digest(str(number + 1)))
    assert len(log.reader.history.nodes) == MAX_NODES
    log.reader = LogReader(log.reader.history, OWN, public_bytes(SERVER), lambda entry: STEP)
    log.step(digest("paused"), digest("resumed"), "paused")
    assert log.reader.find(digest("resumed")).bound == 2 * STEP
    log.add("rollback", OWN)
    assert log.reader.find(OWN).again == log.number


def test_a_rollback_names_weights_that_were_logged() -> None:
    log = Log()
    log.start()
    log.step(OWN, digest("one"))
    log.step(digest("one"), digest("two"))
    with pytest.raises(ProvenanceError, match="not in the server's log"):
        log.reader.add(log.sealed("rollback", digest("never")))
    log.add("rollback", digest("one"))
    one, two = log.reader.find(digest("one")), log.reader.find(digest("two"))
    assert one.number < two.number < one.again == 4


@pytest.mark.parametrize(
    "changes",
    [{"number": 3}, {"number": 1}, {"previous": "0" * 64}, {"bundle": "2" * 64}, {"population": "others"}],
    ids=lambda changes: next(iter(changes)),
)
def test_entries_follow_one_another(changes: dict[str, Any]) -> None:
    log = Log()
    log.start()
    with pytest.raises(ProvenanceError, match="does not follow"):
        log.reader.add(log.sealed("step", digest("one"), **{**step(OWN), **changes}))
    log.step(OWN, digest("one"))


def test_the_server_signs_each() -> None:
    log = Log()
    sealed = log.sealed("start", OWN, task_id=name("task"))
    forged = seal("weights", msgspec.json.decode(sealed.body, type=WeightsStatement), signing_key("another"))
    with pytest.raises(CertificateError):
        log.reader.add(forged)
    with pytest.raises(CertificateError):
        log.reader.add(seal("offer", msgspec.json.decode(sealed.body, type=WeightsStatement), SERVER))
    with pytest.raises(MessageError):
        log.reader.add(msgspec.structs.replace(sealed, body=sealed.body + b" " * (1 << 14)))


@pytest.mark.parametrize("missing", ["parent", "round_id", "task_id", "plan"])
def test_a_step_names_where_it_comes_from(missing: str) -> None:
    log = Log()
    log.start()
    with pytest.raises(ProvenanceError):
        log.reader.add(log.sealed("step", digest("one"), **{**step(OWN), missing: None}))


def test_steps_that_nobody_made() -> None:
    log = Log()
    with pytest.raises(ProvenanceError, match="bundle's own weights"):
        log.reader.add(log.sealed("start", digest("trap"), task_id=name("task")))
    with pytest.raises(ProvenanceError, match="bundle's own weights"):
        log.reader.add(log.sealed("start", OWN))
    log.start()
    with pytest.raises(ProvenanceError, match="not in the server's log"):
        log.reader.add(log.sealed("step", digest("one"), **step(digest("never"))))
    with pytest.raises(ProvenanceError, match="not in the server's log"):  # of another training
        log.reader.add(log.sealed("step", digest("one"), **step(OWN, task="other")))
    log.step(OWN, digest("one"), round_id=name("round"))
    with pytest.raises(ProvenanceError, match="has made a step already"):
        log.reader.add(log.sealed("step", digest("two"), **step(digest("one"), round_id=name("round"))))


@pytest.mark.parametrize("bound", [math.inf, math.nan, -1.0])
def test_a_step_without_a_bound_is_none(bound: float) -> None:
    log = Log()
    log.start()
    log.reader._bound = lambda entry: bound
    with pytest.raises(ProvenanceError, match="no bound"):
        log.step(OWN, digest("one"))


# --- evidence -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    key = generate_key()
    folder = tmp_path_factory.mktemp("bundle") / "linear"
    file = make_bundle(folder, key)
    return open_bundle(file, [public_bytes(key)], Path(folder.parent)).manifest


class Evidence:
    """A secure round of three devices with real participants, and the entry that says what it made."""

    def __init__(self, log: Log, *, who: tuple[int, ...] = (0, 1, 2), **plan: Any) -> None:
        settings = {"bundle": BUNDLE, "weights": OWN, "min_cohort": 3, "threshold": 3, "task_id": name("task")}
        self.round = Round(3, **{**settings, **plan})
        self.round.advertise()
        self.round.share()
        self.round.mask()
        confirmed = self.round.confirm().confirmations
        self.entry = log.add(
            "step", digest("one"), **step(OWN, round_id=self.round.plan.round_id, plan=self.round.digest)
        )
        self.message = Endorsement(
            plan=self.round.sealed_plan,
            survivors=self.round.survivors,
            confirmation=confirmed[0].confirmation.body,
            endorsers=[
                Endorser(chain=self.round.chains[i], signature=confirmed[i].confirmation.signature) for i in who
            ],
        )

    def check(self, log: Log, manifest: Manifest, **changes: Any) -> None:
        entry = msgspec.structs.replace(
            self.entry, **{key: value for key, value in changes.items() if key in WeightsStatement.__struct_fields__}
        )
        message = msgspec.structs.replace(
            self.message, **{key: value for key, value in changes.items() if key in Endorsement.__struct_fields__}
        )
        check_endorsement(
            entry, message, manifest, log.reader, server_key=public_bytes(SERVER),
            enrolment_key=self.round.enrolment_key,
        )  # fmt: skip


@pytest.fixture
def log() -> Log:
    made = Log()
    made.start()
    return made


def test_a_round_that_was(log: Log, manifest: Manifest) -> None:
    Evidence(log).check(log, manifest)


def test_all_confirmations_of_a_round_are_the_same_bytes(log: Log) -> None:
    made = Round(3, threshold=3)
    made.advertise()
    made.share()
    made.mask()
    assert len({each.confirmation.body for each in made.confirm().confirmations}) == 1


def test_signatures_that_are_missing_or_twice(log: Log, manifest: Manifest) -> None:
    with pytest.raises(ProvenanceError, match=r"2 devices signed.*3 are needed"):
        Evidence(log, who=(0, 1)).check(log, manifest)
    fresh = Log()
    fresh.start()
    with pytest.raises(ProvenanceError, match=r"2 devices signed.*3 are needed"):
        Evidence(fresh, who=(0, 1, 1)).check(fresh, manifest)


def test_a_signature_of_another(log: Log, manifest: Manifest) -> None:
    made = Evidence(log)
    one, two, three = made.message.endorsers
    with pytest.raises(CertificateError):
        made.check(log, manifest, endorsers=[one, two, Endorser(chain=three.chain, signature=one.signature)])


def test_signers_are_survivors_of_the_population(log: Log, manifest: Manifest) -> None:
    made = Evidence(log)
    stranger = Round(4, threshold=3).chains[3]
    with pytest.raises(ProvenanceError, match="not one of the survivors"):
        made.check(
            log, manifest,
            endorsers=[*made.message.endorsers, Endorser(chain=stranger, signature=bytes(64))],
        )  # fmt: skip
    foreign = made.round.chain(0, population="teachers")
    with pytest.raises(CertificateError, match="teachers"):
        made.check(log, manifest, endorsers=[Endorser(chain=foreign, signature=bytes(64))])
    made_up = made.round.chain(0, enrolment="another")
    with pytest.raises(CertificateError):
        made.check(log, manifest, endorsers=[Endorser(chain=made_up, signature=bytes(64))])


def test_the_survivors_are_those_that_were_signed_for(log: Log, manifest: Manifest) -> None:
    made = Evidence(log)
    fewer = msgspec.structs.replace(made.message.survivors, devices=made.message.survivors.devices[:2])
    with pytest.raises(ProvenanceError, match="2 survivors"):
        made.check(log, manifest, survivors=fewer)
    with pytest.raises(ProvenanceError, match="2 survivors"):
        made.check(log, manifest, survivors=fewer, devices=2)
    more = msgspec.structs.replace(made.message.survivors, devices=[*made.message.survivors.devices, "f" * 32])
    with pytest.raises(ProvenanceError, match="signed is of another"):
        made.check(log, manifest, survivors=more, devices=4)


def test_the_plan_is_the_rounds(log: Log, manifest: Manifest) -> None:
    made = Evidence(log)
    other = Round(3, bundle=BUNDLE, weights=OWN, threshold=3, number=2).sealed_plan
    with pytest.raises(ProvenanceError, match="another plan"):
        made.check(log, manifest, plan=other)
    for field in ("round_id", "task_id"):
        with pytest.raises(ProvenanceError, match="another round, task or bundle"):
            made.check(log, manifest, **{field: "f" * 32})
    with pytest.raises(ProvenanceError, match="began with other weights"):
        made.check(log, manifest, parent=digest("one"))


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"bundle": "2" * 64}, "another round, task or bundle"),
        ({"kind": "evaluation", "metrics": {"mse": 1.0}}, "not of a secure training"),
        ({"min_cohort": 2, "threshold": 2}, "privacy policy"),
        ({"weights": digest("never"), "staleness_exponent": 0.5}, "not in the server's log"),
    ],
)
def test_the_plan_keeps_to_the_policy(log: Log, manifest: Manifest, plan: dict[str, Any], error: str) -> None:
    with pytest.raises((ProvenanceError, PolicyError), match=error):
        Evidence(log, **plan).check(log, manifest)


def test_an_asynchronous_round_may_have_begun_with_an_older_version(log: Log, manifest: Manifest) -> None:
    log.step(OWN, digest("newer"))
    made = Evidence(log, staleness_exponent=0.5)
    made.check(log, manifest, parent=digest("newer"))


def test_devices_that_signed_for_another_plan(log: Log, manifest: Manifest) -> None:
    made = Evidence(log)
    fresh = Log()
    fresh.start()
    other = Evidence(fresh, number=2)
    with pytest.raises(ProtocolError):
        made.check(
            log, manifest, confirmation=other.message.confirmation, endorsers=other.message.endorsers
        )  # fmt: skip


# --- distance -------------------------------------------------------------------------------------------------


def test_distances_are_over_all_tensors() -> None:
    zero = {"a": np.zeros(4, np.float32), "b": np.zeros((2, 2), np.float32)}
    one = {"a": np.full(4, 1.5, np.float32), "b": np.full((2, 2), 2.0, np.float32)}
    check_distance("weights", one, zero, 5.0, 1)  # sqrt(4 * 2.25 + 4 * 4) = 5
    with pytest.raises(ProvenanceError, match=r"5 away.*4.999"):
        check_distance("weights", one, zero, 4.999, 1)


def test_what_float32_rounds_is_allowed() -> None:
    generator = np.random.default_rng(5)
    start = {"a": generator.standard_normal(10_000).astype(np.float32)}
    step, at = (generator.standard_normal(10_000) * 1e-6).astype(np.float64), start["a"]
    for _ in range(50):
        at = (at + step).astype(np.float32)
    exact = 50 * float(np.linalg.norm(step))
    assert float(np.linalg.norm(at.astype(np.float64) - start["a"])) > exact
    check_distance("weights", {"a": at}, start, exact, 50)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_never_near(value: float) -> None:
    with pytest.raises(ProvenanceError):
        check_distance("w", {"a": np.array([value], np.float32)}, {"a": np.zeros(1, np.float32)}, 1e30, 1)


@pytest.mark.parametrize(
    "other",
    [{"a": np.zeros(2, np.float32)}, {"a": np.zeros(1, np.float64)}, {"b": np.zeros(1, np.float32)}, {}],
)
def test_tensors_are_the_same(other: dict[str, np.ndarray]) -> None:
    with pytest.raises(ProvenanceError):
        check_distance("w", {"a": np.zeros(1, np.float32)}, other, 1.0, 1)
