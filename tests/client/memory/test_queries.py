"""The devices of earlier queries, as a device keeps them: sets that differ by a few are refused."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archipel.bundle import PrivacyPolicy
from archipel.client.connection.session import DeviceSession
from archipel.client.memory.query_book import FILE, QueryBook
from archipel.errors import ClientError, PolicyError
from archipel.protocol.messages import RoundPlan
from archipel.protocol.sealed import Sealed
from tests.support.federation import Federation

DAY = 86400.0
IDS = [f"{number:032x}" for number in range(200)]
HERE, ELSEWHERE = bytes(32), bytes(31) + b"1"


def policy(**changes: Any) -> PrivacyPolicy:
    values = {"modes": ("secure",), "min_cohort": 2, "threshold": 0.6, "max_clip": 1.0, "max_bits": 16}
    return PrivacyPolicy(**{**values, "min_contributors": 20, "queries": 3, "query_days": 7, **changes})


def plan(**changes: Any) -> RoundPlan:
    values = {
        "round_id": secrets.token_hex(16), "task_id": "1" * 32, "number": 1, "bundle": "b" * 64, "weights": "c" * 64,
        "privacy": "secure", "min_cohort": 2, "max_cohort": 100, "threshold": 51, "modulus_bits": 32,
        "kind": "analytics", "min_contributors": 20,
    }  # fmt: skip
    return RoundPlan(**{**values, **changes})


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(tmp_path: Path, clock: Clock) -> QueryBook:
    return QueryBook(tmp_path, clock)


# The first query was about devices 0 to 49. Allowed: the same again, and whatever differs by twenty or more in all.
@pytest.mark.parametrize(
    ("devices", "different"),
    [
        (IDS[:50], 0),
        (IDS[:49], 1),
        (IDS[:51], 1),
        (IDS[1:51], 2),
        (IDS[:31], 19),
        (IDS[:30], 20),
        (IDS[:69], 19),
        (IDS[:70], 20),
        (IDS[9:59], 18),
        (IDS[10:60], 20),
        (IDS[60:120], 110),
    ],
)
def test_sets_that_differ_by_a_few(book: QueryBook, devices: list[str], different: int) -> None:
    book.add(plan(), policy(), IDS[:50], HERE)
    if 0 < different < 20:
        with pytest.raises(PolicyError, match=f"differ by {different} from those of round"):
            book.add(plan(), policy(), devices, HERE)
    else:
        book.add(plan(), policy(), devices, HERE)


def test_it_outlasts_the_process_and_other_bundles(tmp_path: Path, clock: Clock) -> None:
    QueryBook(tmp_path, clock).add(plan(), policy(), IDS[:50], HERE)
    with pytest.raises(PolicyError, match="differ by 1 "):
        QueryBook(tmp_path, clock).add(plan(bundle="d" * 64, kind="evaluation"), policy(), IDS[:49], HERE)


def test_the_larger_minimum_of_both_counts(book: QueryBook) -> None:
    book.add(plan(), policy(), IDS[:50], HERE)
    with pytest.raises(PolicyError, match="at least 20"):
        book.add(plan(min_contributors=2), policy(min_contributors=2), IDS[:45], HERE)
    with pytest.raises(PolicyError, match="at least 40"):
        book.add(plan(min_contributors=40), policy(), IDS[:75], HERE)


def test_so_many_queries_in_so_many_days(book: QueryBook, clock: Clock) -> None:
    for _ in range(3):
        book.add(plan(), policy(), IDS[:50], HERE)
        clock.now += DAY
    for attempt in (lambda: book.check(plan(), policy(), HERE), lambda: book.add(plan(), policy(), IDS[:50], HERE)):
        with pytest.raises(PolicyError, match="3 evaluations and analyses in the last 7 days, the publisher allows 3"):
            attempt()
    clock.now += 4 * DAY  # the first one is a week ago
    book.add(plan(), policy(), IDS[:50], HERE)
    with pytest.raises(PolicyError, match="the publisher allows 3"):
        book.check(plan(), policy(), HERE)
    book.check(plan(), policy(queries=4), HERE)


def of_tree(**changes: Any) -> RoundPlan:
    return plan(origin=Sealed(body=b"", signature=bytes(64)), **changes)


@pytest.mark.parametrize(("first", "second"), [(of_tree, of_tree), (plan, of_tree), (of_tree, plan)])
def test_a_device_that_moved_answers_a_tree_when_what_it_answered_elsewhere_is_forgotten(
    book: QueryBook, clock: Clock, first: Callable[..., RoundPlan], second: Callable[..., RoundPlan]
) -> None:
    # Three devices in a sum of one edge, two of them in one of another: no server knows both sets.
    book.add(first(), policy(), IDS[:50], ELSEWHERE)
    for attempt in (
        lambda: book.check(second(), policy(), HERE),
        lambda: book.add(second(), policy(), IDS[:20], HERE),
    ):
        with pytest.raises(PolicyError, match="of another edge server, and no server compares the two sums"):
            attempt()
    book.add(second(), policy(), IDS[:50], ELSEWHERE)
    clock.now += 7 * DAY + 1
    book.add(second(), policy(), IDS[:20], HERE)


def test_servers_that_are_in_no_tree_may_each_ask(book: QueryBook) -> None:
    book.add(plan(), policy(), IDS[:50], ELSEWHERE)
    book.add(plan(), policy(), IDS[:50], HERE)


def test_sites_differ_by_as_many_as_a_sum_of_them_has(book: QueryBook) -> None:
    book.add(plan(levels=1, site=20), policy(), IDS[:3], HERE, minimum=2)
    with pytest.raises(PolicyError, match="differ by 1 from those of round"):
        book.add(plan(levels=1, site=20), policy(), IDS[:2], HERE, minimum=2)
    book.add(plan(levels=1, site=20), policy(), IDS[:5], HERE, minimum=2)


def test_plain_rounds_count_and_have_no_set(book: QueryBook) -> None:
    for _ in range(3):
        book.add(plan(privacy="plain"), policy(), [], HERE)
    with pytest.raises(PolicyError, match="the publisher allows 3"):
        book.check(plan(), policy(), HERE)
    assert book._read().sets == []


def test_a_round_counts_once_however_often_it_is_taken_up(book: QueryBook) -> None:
    same = plan(privacy="plain")
    for _ in range(5):
        book.add(same, policy(), [], HERE)
    assert len(book._read().queries) == 1


def test_the_period_ends_and_the_sets_go(book: QueryBook, clock: Clock) -> None:
    book.add(plan(), policy(), IDS[:50], HERE)
    clock.now += 7 * DAY - 1
    with pytest.raises(PolicyError, match="differ by 1 "):
        book.add(plan(), policy(), IDS[:49], HERE)
    clock.now += 2
    book.add(plan(), policy(), IDS[:49], HERE)
    assert len(book._read().sets) == 1


def test_a_clock_that_is_set_back_forgets_nothing(book: QueryBook, clock: Clock) -> None:
    for _ in range(3):
        book.add(plan(), policy(), IDS[:50], HERE)
    clock.now -= 400 * DAY
    with pytest.raises(PolicyError, match="the publisher allows 3"):
        book.check(plan(), policy(), HERE)
    with pytest.raises(PolicyError, match="differ by 1 "):
        book.add(plan(), policy(queries=9), IDS[:49], HERE)


def test_a_set_is_kept_once(book: QueryBook, tmp_path: Path) -> None:
    for _ in range(10):
        book.add(plan(), policy(queries=20), IDS[:50], HERE)
        book.add(plan(), policy(queries=20), IDS[100:150], HERE)
    kept = book._read()
    assert (len(kept.queries), len(kept.sets)) == (20, 2)
    assert {each.devices for each in kept.queries} == {0, 1}
    assert kept.sets[0] == b"".join(bytes.fromhex(each) for each in IDS[:50])
    # 2 x 50 ids of 16 bytes in base64 and 20 lines: nothing that a phone would notice.
    assert (tmp_path / FILE).stat().st_size < 2 * 50 * 16 * 4 / 3 + 20 * 250


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"queries": 3}', b'{"sets": ["AAAA"]}', b'{"more": 1}',
     b'{"queries": [{"round_id": "' + b"0" * 32 + b'", "at": 1, "until": 9e9, "minimum": 2, "devices": 0}]}'],
)  # fmt: skip
def test_a_damaged_book_answers_no_query(book: QueryBook, tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)
    for attempt in (lambda: book.check(plan(), policy(), HERE), lambda: book.add(plan(), policy(), IDS[:50], HERE)):
        with pytest.raises(ClientError, match=r"damaged .*; remove it"):
            attempt()
    assert (tmp_path / FILE).read_bytes() == data


@pytest.mark.sampled(every=4)
def test_it_is_written_before_the_confirmation_leaves(
    federation: Federation, bundle_maker: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation.bundle_file = bundle_maker(federation.publisher_key, min_cohort=2, min_contributors=3)
    agents = [federation.agent(number) for number in range(3)]
    ids = sorted(agent.device_id for agent in agents)
    seen: list[str] = []
    call = DeviceSession.call

    def watched(self: DeviceSession, method: str, path: str, *rest: Any, **more: Any) -> Any:
        if path.endswith("/confirmation"):
            [own] = [agent for agent in agents if agent._session is self]
            seen.extend(each.round_id for each in QueryBook(own.config.folder / "rounds")._read().queries)
        return call(self, method, path, *rest, **more)

    monkeypatch.setattr(DeviceSession, "call", watched)
    task = federation.task(kind="analytics", cohort=3, threshold=None)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state == "completed")
    [info] = federation.rounds(task)
    assert seen == [info.round_id] * 3
    for agent in agents:
        kept = QueryBook(agent.config.folder / "rounds")._read()
        assert kept.sets == [b"".join(bytes.fromhex(each) for each in ids)]


@pytest.mark.sampled(every=4)
def test_an_owner_may_ask_for_more(federation: Federation, bundle_maker: Callable[..., Path]) -> None:
    federation.bundle_file = bundle_maker(federation.publisher_key, min_cohort=2, min_contributors=3)
    careful = federation.agent(0, min_contributors=4)
    others = [federation.agent(number) for number in (1, 2)]
    task = federation.task(kind="analytics", cohort=3, threshold=None)
    federation.run([careful, *others], lambda: any(entry.result == "refused" for entry in careful.rounds))
    federation.operator.tasks.cancel(task.task_id)
    refused = next(entry for entry in careful.rounds if entry.result == "refused")
    assert refused.reason.endswith(
        "the sum of 3 devices with examples may be released, its owner asks for 4 (min_contributors)"
    )
