"""'There are hundreds of time-outs to set, and they have to fit each other.'"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from archipel.bundle import generate_key
from archipel.client import AgentConfig
from archipel.protocol.sealed import public_bytes
from archipel.server import init_data_folder, load_settings
from archipel.server.rounds.machine import RULES
from archipel.server.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    keys = generate_key(), generate_key()
    init_data_folder(tmp_path / "data", enrolment_key=public_bytes(keys[0]), publisher_keys=[public_bytes(keys[1])])
    return load_settings(tmp_path / "data", environment={})


def test_nobody_has_to_set_one(settings: Settings, tmp_path: Path) -> None:
    """What has no default is what the commands write: whose keys are trusted, where, and who may give orders."""
    needed = {field.name for field in msgspec.structs.fields(Settings) if field.required}
    assert needed == {"folder", "enrolment_key", "publisher_keys", "operator_token_sha256"}
    written = (tmp_path / "data" / "server.toml").read_text()
    assert all(f"{name} = " in written for name in needed - {"folder"})
    assert "seconds" not in written
    device = {field.name for field in msgspec.structs.fields(AgentConfig) if field.required}
    assert not [name for name in device if "second" in name or "timeout" in name]


def test_the_defaults_fit_each_other(settings: Settings) -> None:
    # Load balancers cut connections off that are idle for 60 s, most of them; nothing that the server holds is.
    assert settings.longest_hold < 60
    assert settings.stall_seconds < 60
    # A device that is told when to come is there when its time is up, also if it is late by once as much.
    assert settings.check_in_window >= 3 * settings.retry_after
    assert settings.longest_hold <= 1.5 * settings.check_in_window
    # Whoever takes over from a coordinator does so before a phase can run out.
    assert settings.lease_seconds < min(rule.seconds for rule in RULES.values())
    # One client cannot take all threads.
    assert settings.concurrent_requests < settings.threads
