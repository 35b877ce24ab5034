"""Tokens, files and servers that are not as they should be; exit codes say whether starting again would help."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.client import Agent
from archipel.client.settings import load_device_settings
from archipel.protocol.sealed import encode
from tests.support.commands import Command
from tests.support.device_process import Device, run_beside
from tests.support.federation import Federation

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected an enrolment token, got none or a damaged one"),
        (b"-----BEGIN PRIVATE KEY-----\nsecret", "expected an enrolment token, got none or a damaged one"),
        (b"\xff" * 100_000, "more than 65536 bytes"),
        (b'{"server": "http://secret"}', "missing required field"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
@pytest.mark.sampled(every=6)
def test_a_file_that_is_no_token(
    archipel: Command, device_of: Callable[[int], Device], content: bytes | None, said: str
) -> None:
    device = device_of(0)
    if content is None:
        device.token.unlink()
    else:
        device.token.write_bytes(content)
    _, err = archipel("device", "enroll", str(device.config), str(device.token), code=1)
    assert err.startswith(f"archipel: {device.token}: ")
    assert said in err
    assert "secret" not in err
    assert err.count("\n") == 1


@pytest.mark.sampled(every=3)
def test_tokens_that_are_not_taken(
    archipel: Command, federation: Federation, device_of: Callable[[int], Device]
) -> None:
    first, second, third, fourth = map(device_of, range(4))
    archipel("device", "enroll", str(first.config), str(first.token))
    _, err = archipel("device", "enroll", str(second.config), str(first.token), code=1)
    assert err.startswith(f"archipel: {first.token}: the server does not take it: ")
    assert "this enrolment token was used by another device; ask for a new one" in err
    expired = federation.token(not_after=int(time.time()) - 60)
    third.token.write_bytes(encode(expired))
    _, err = archipel("device", "enroll", str(third.config), str(third.token), code=1)
    assert "expired" in err
    assert f"; it was for use until {time.strftime('%Y-', time.gmtime(time.time() - 60))}" in err
    other = federation.token(population="teachers")
    third.token.write_bytes(encode(other))
    _, err = archipel("device", "enroll", str(first.config), str(third.token), code=1)
    assert "enrolled already, in population 'pupils'" in err
    fourth.token.write_bytes(encode(federation.token(server="http://127.0.0.1:1")))
    _, err = archipel("device", "enroll", str(fourth.config), str(fourth.token), code=1)
    assert "http://127.0.0.1:1: POST /v1/devices failed" in err


@pytest.mark.sampled(every=3)
def test_a_token_that_contradicts_itself(
    archipel: Command, federation: Federation, device_of: Callable[[int], Device]
) -> None:
    device = device_of(0)
    device.token.write_bytes(encode(federation.token(certificate=federation.token().certificate)))
    _, err = archipel("device", "enroll", str(device.config), str(device.token), code=1)
    assert err.startswith(f"archipel: {device.token}: contradicts itself (")


@pytest.mark.sampled(every=3)
def test_nothing_to_start_with(archipel: Command, device_of: Callable[[int], Device]) -> None:
    """78: systemd does not start it again."""
    device = device_of(0)
    _, err = archipel("device", "run", str(device.config), code=78)
    assert f"not enrolled yet; run: archipel device enroll {device.config} TOKEN_FILE" in err
    device.settings("")
    assert "no examples to learn from; set" in archipel("device", "run", str(device.config), code=78)[1]
    device.settings(threads="0")
    assert "threads: expected `int` >= 1, got 0" in archipel("device", "run", str(device.config), code=78)[1]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (None, "(No such file or directory); put a file with an array for each field of the model there, or set"),
        ({"x": np.zeros((3, 3), np.float32), "y": np.zeros(2, np.float32)}, "one row for each example"),
        ({"x": np.array(["a"], dtype=object)}, "expected numbers or bools; nothing is unpickled"),
    ],
)
def test_examples_that_cannot_be_read(
    archipel: Command, enrolled: Device, arrays: dict[str, np.ndarray] | None, said: str
) -> None:
    (enrolled.place / "data.npz").unlink()
    if arrays is not None:
        np.savez(enrolled.place / "data.npz", **arrays)
    assert said in archipel("device", "run", str(enrolled.config), "--once", code=78)[1]


@pytest.mark.sampled(every=4)
def test_examples_that_are_gone_later(archipel: Command, federation: Federation, enrolled: Device) -> None:
    """The round is refused with the reason; the agent goes on."""
    enrolled.start()
    enrolled.until("waiting")
    (enrolled.place / "data.npz").unlink()
    federation.task(min_cohort=3, cohort=3, threshold=3)
    refused: dict[str, Any] = {}
    run_beside(federation, lambda: refused.update(enrolled.until("refused")))
    assert "examples: " in refused["detail"]["reason"]
    enrolled.until("waiting")
    assert enrolled.stop() == 0


@pytest.mark.sampled(every=4)
def test_a_revoked_device(archipel: Command, federation: Federation, enrolled: Device) -> None:
    enrolled.start()
    device_id = enrolled.until("waiting")["device"]
    federation.operator.devices.revoke(device_id)
    assert enrolled.wait() == 78
    assert "the server does not take this device" in enrolled.error
    assert "revoked" in enrolled.error


@pytest.mark.sampled(every=3)
def test_the_server_is_away(archipel: Command, federation: Federation, enrolled: Device) -> None:
    federation.server.stop()
    _, err = archipel("device", "run", str(enrolled.config), "--once", code=1)
    assert "failed 3 times" in err
    federation.server.start()


@pytest.mark.sampled(every=3)
def test_two_agents_in_one_folder(archipel: Command, enrolled: Device) -> None:
    with Agent(load_device_settings(enrolled.config).config, examples=dict):
        _, err = archipel("device", "run", str(enrolled.config), code=1)
    assert "another agent is using it" in err


def test_places_that_are_no_device(archipel: Command, tmp_path: Path) -> None:
    for command in ("status", "pause", "resume", "erase"):
        assert "not a device's folder" in archipel("device", command, str(tmp_path), code=1)[1]
        assert "cannot be read" in archipel("device", command, str(tmp_path / "none"), code=1)[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "2", "2x", "h", "-1h", "0s", "infd", "nanh", "1e9d", "2 h x"])
@pytest.mark.sampled(every=6)
def test_times_that_are_none(archipel: Command, enrolled: Device, text: str) -> None:
    _, err = archipel("device", "pause", str(enrolled.folder), "--for", text, code=1)
    assert "expected a time such as 90s, 45m, 2h or 3d" in err
    assert not (enrolled.folder / "paused").exists()


@pytest.mark.sampled(every=4)
def test_it_tells_its_supervisor(archipel: Command, enrolled: Device, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(10)
        enrolled.start(NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="400000")
        told = [end.recv(4096).decode()]
        # The server answers a device that waits after a while.
        while told.count("WATCHDOG=1") < 4 or not any(text.startswith("STATUS=waiting") for text in told):
            told.append(end.recv(4096).decode())
        assert "READY=1" in told[:3]
        assert enrolled.stop() == 0
        while told[-1] != "STOPPING=1":
            told.append(end.recv(4096).decode())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_one(tmp_path: Path) -> None:
    unit = (ROOT / "docker" / "archipel-device.service").read_text()
    program = tmp_path / "archipel"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert unit.count("/opt/archipel/bin/archipel device run") == 1
    (tmp_path / "archipel-device.service").write_text(
        unit.replace("ExecStart=/opt/archipel/bin/archipel", f"ExecStart={program}")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "archipel-device.service")],
        capture_output=True, text=True, check=False, env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "RestartPreventExitStatus=2 78" in unit
