"""One example of a body for each operation that takes JSON without signatures, for the API's description."""

from __future__ import annotations

from typing import Any

_BUNDLE = "35cd58b5d7f3ecee778c2d888e13850c20cc7c37e79320153f64d00879bcf9fa"

EXAMPLES: dict[str, dict[str, Any]] = {
    "challenge": {"device_id": "5f0c1e9ab2d34c7d8e6f7a8b9c0d1e2f"},
    "check_in": {"attributes": {"charging": True, "ram": 4294967296, "region": "north"}, "wait": 15.0},
    "leave": {"reason": "pace"},
    "create_task": {
        "name": "digits",
        "population": "pupils",
        "bundle": _BUNDLE,
        "rounds": 20,
        "min_cohort": 10,
        "cohort": 30,
        "goal": 25,
        "eligibility": "charging and ram >= 512MiB",
        "hyperparameters": {"lr": 0.05},
        "deadlines": {"masking": 60.0},
    },
    "create_model": {"name": "digits", "population": "pupils"},
    "register_version": {"task_id": "0a1b2c3d4e5f60718293a4b5c6d7e8f9", "task_version": 20},
    "promote_version": {"version": 2},
    "reject_version": {"reason": "worse on old phones"},
    "keep_versions": {"keep_versions": 20, "keep_days": 90.0},
    "create_rollout": {
        "model": "digits",
        "version": 2,
        "stages": [{"percent": 5, "soak_seconds": 3600}, {"percent": 50, "soak_seconds": 86400}],
        "gate": {
            "metric": "accuracy",
            "range": 1.0,
            "better": "higher",
            "max_loss": 0.01,
            "min_devices": 30,
            "max_devices": 100,
        },
    },
    "create_token": {"name": "night-shift", "role": "operator", "populations": ["pupils"], "seconds": 86400.0},
    "revoke_enrolment_token": {"token_key": "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="},
}
"""By the operation's id."""
