"""Complaints of users of such systems whose answer is tested in the room that it belongs to: here is which test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ANSWERED = {
    "the server ate all memory while it read large files": [
        "tests/server/storage/trouble/test_unusable.py::test_memory_does_not_grow_with_the_file",
    ],
    "the training ran out of memory, and all was lost": [
        "tests/training/cloud/test_errors.py::test_too_little_memory_says_what_to_lower_and_leaves_the_checkpoint",
    ],
    "clients did not come back after the server was restarted": [
        "tests/client/test_agent.py::test_a_server_that_restarts_within_a_round_goes_on_with_it",
        "tests/server/processes/test_watching.py::test_a_restart_is_waited_for",
        "tests/client/memory/test_clock_and_silence.py::test_days_without_a_server_and_back",
    ],
    "a client that was restarted was out of the round for good": [
        "tests/client/rounds/trouble/test_parts.py::test_after_a_restart_only_what_is_missing_goes_up",
        "tests/client/rounds/kills/test_kills.py::test_killed_at_any_point_it_loses_and_doubles_nothing",
    ],
    "the server was restarted and forgot the round": [
        "tests/server/processes/test_processes.py::test_two_rounds_over_tcp_while_processes_are_killed",
        "tests/server/rounds/kills/test_kills.py::test_killed_at_any_point_it_loses_and_doubles_nothing",
    ],
    "a message above the limit of the transport failed with a riddle": [
        "tests/server/http/test_problems.py::test_a_body_that_is_too_large",
        "tests/server/http/test_bundles_and_tasks.py::test_a_bundle_beyond_the_limit_is_refused_before_it_is_read",
        "tests/client/rounds/test_refusals.py::test_an_update_larger_than_declared",
    ],
    "a model of gigabytes did not fit into one message": [
        "tests/client/slow_link/test_slow_link.py::test_both_ways_go_on_after_every_cut",
        "tests/client/rounds/trouble/test_parts.py::test_a_link_that_breaks_again_and_again",
    ],
    "a run of days was lost when the machine went down": [
        "tests/simulation/test_rounds.py::test_a_run_killed_at_any_write_ends_at_the_same_model",
        "tests/simulation/test_tuning.py::test_a_tuning_that_was_stopped_and_killed_goes_on_to_the_same_trials",
    ],
    "certificates are hard to set up": [
        "tests/server/processes/tls/test_authority.py::test_certificates_are_hard_to_set_up",
    ],
    "a certificate ran out and the server had to be restarted": [
        "tests/server/processes/tls/test_tls.py::test_a_renewed_certificate_is_used_without_a_restart",
    ],
    "the tutorial does not run any more": ["tests/docs/test_snippets.py"],
}


@pytest.mark.parametrize("complaint", ANSWERED)
def test_there_is_a_test_of_it(complaint: str) -> None:
    for place in ANSWERED[complaint]:
        file, _, name = place.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions if name else any(each.startswith("test_") for each in functions), place
