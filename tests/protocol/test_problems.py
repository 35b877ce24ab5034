"""Which statuses of HTTP mean what; by hand, from RFC 9110 and docs/agent-answers.md."""

from __future__ import annotations

from archipel.protocol.problems import KINDS, TELLS_WHEN, TRY_AGAIN


def test_which_may_be_tried_again() -> None:
    assert sorted(TELLS_WHEN) == [429, 503]
    assert sorted(TRY_AGAIN) == [429, 500, 502, 503, 504]


def test_every_status_that_the_server_answers_with_has_a_kind() -> None:
    assert {status: KINDS[status] for status in (400, 401, 403, 404, 409, 410, 413, 422, 429, 500, 503)} == {
        400: "bad_request", 401: "unauthorized", 403: "forbidden", 404: "not_found", 409: "conflict", 410: "gone",
        413: "too_large", 422: "unprocessable", 429: "rate_limited", 500: "internal", 503: "unavailable",
    }  # fmt: skip
    assert set(KINDS) >= TELLS_WHEN


def test_a_proxys_statuses_have_none() -> None:
    assert not {502, 504} & set(KINDS)
