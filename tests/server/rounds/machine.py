"""Runs a state machine that compares the server with a model of it."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

M = TypeVar("M", bound=RuleBasedStateMachine)


def run_machine(kind: type[M], *, examples: int, steps: int, derandomize: bool = False, **world: object) -> type[M]:
    """`examples` runs of at most `steps` steps. `world` become attributes of the class, which is returned.

    Without a database of failures: replaying one takes minutes here.
    """
    machine = type("Machine", (kind,), world)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            database=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine
