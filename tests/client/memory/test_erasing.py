"""An erased device cannot be read any more, wherever the process that erased it was killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from archipel.client import Agent
from archipel.client.memory.erasing import erase
from archipel.client.memory.keystore import DATA_KEY, SECRETS, FileKeys, data_key
from archipel.client.memory.vault import Vault
from archipel.errors import ClientError, StoreError
from archipel.lite_runtime import ExampleStore
from tests.support.federation import Federation

DIARY = b"what nobody else may read"


@pytest.fixture
def used(federation: Federation) -> Path:
    """A device that took part in a round, with examples in its store. Returns its folder."""
    agents = [federation.agent(number) for number in range(3)]
    task = federation.task(cohort=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    folder: Path = agents[0].config.folder
    with ExampleStore.open(folder / "examples", data_key(FileKeys(folder))) as store:
        store.add({"text": np.frombuffer(DIARY, np.uint8)})
    (folder / "notes.txt").write_text("the owner's own file")
    agents[0].close()
    return folder


@pytest.mark.sampled(every=4)
def test_nothing_can_be_read_afterwards(federation: Federation, used: Path, tmp_path: Path) -> None:
    secrets = {name: FileKeys(used).load(name) for name in SECRETS}
    assert all(DIARY not in path.read_bytes() for path in used.rglob("*") if path.is_file())
    # What a flash disk may keep for a long time: everything but the keys, as it was.
    copy = tmp_path / "copy"
    shutil.copytree(used, copy, ignore=shutil.ignore_patterns("*.key", "lock"))
    erase(used)
    assert sorted(path.name for path in used.iterdir()) == ["lock", "notes.txt"]
    left = b"".join(path.read_bytes() for path in used.rglob("*") if path.is_file())
    assert not [name for name, secret in secrets.items() if secret and secret in left]
    # With any other key the copy says nothing; with the old one it would.
    [state] = (copy / "state").iterdir()
    with pytest.raises(ClientError):
        Vault(b"n" * 32).read(state)
    assert Vault(secrets[DATA_KEY] or b"").read(state)
    with pytest.raises(StoreError):
        ExampleStore.open(copy / "examples", b"n" * 32)


@pytest.mark.sampled(every=4)
def test_the_device_begins_anew(federation: Federation, used: Path) -> None:
    erase(used)
    with Agent(federation.config(used.name), examples=dict) as agent:
        assert (agent.device_id, agent.rounds) == ("", [])
        with pytest.raises(ClientError, match="not enrolled"):
            agent.run_once()
        assert agent.enrol(federation.token()) not in {other.device_id for other in federation.agents}


def test_not_under_a_running_agent_and_not_nowhere(federation: Federation, tmp_path: Path) -> None:
    agent = federation.agent(0)
    with pytest.raises(ClientError, match="another agent is using it"):
        erase(agent.config.folder)
    assert agent.run_once().kind == "waiting"
    with pytest.raises(ClientError, match="no such folder"):
        erase(tmp_path / "nowhere")


@pytest.mark.sampled(every=4)
def test_an_app_that_has_the_store_open_cannot_read_on(used: Path) -> None:
    with ExampleStore.open(used / "examples", data_key(FileKeys(used))) as store:
        erase(used)
        with pytest.raises(StoreError):
            store.arrays()


VICTIM = """
import json, os, pathlib, shutil, signal, sys
from archipel.client.memory import erasing

folder, at = json.loads(sys.argv[1])
count = 0

def watched(owner, name):
    kept = getattr(owner, name)
    def step(*arguments, **options):
        global count
        for when in ("before", "after"):
            if when == "after":
                result = kept(*arguments, **options)
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
        return result
    setattr(owner, name, step)

for name in ("replace", "fsync", "unlink", "rmdir", "pwrite"):
    watched(os, name)
watched(pathlib.Path, "unlink")
erasing.erase(pathlib.Path(folder))
print(count)
"""


def _run(folder: Path, at: int) -> subprocess.CompletedProcess[str]:
    argument = json.dumps([str(folder), at])
    return subprocess.run(
        [sys.executable, "-c", VICTIM, argument], check=False, timeout=30, capture_output=True, text=True
    )


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.sampled(every=8)
def test_killed_at_each_step(federation: Federation, used: Path, tmp_path: Path, every: int) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(used, whole)
    steps = int(_run(used, -1).stdout)
    assert steps > 60
    outcomes = set()
    for at in range(0, steps, every):
        shutil.rmtree(used)
        shutil.copytree(whole, used)
        assert _run(used, at).returncode == -9, at
        with Agent(federation.config(used.name), examples=dict) as agent:
            outcomes.add(agent.device_id != "")
            if agent.device_id:
                # Not begun: all is there, and can be read.
                assert len(federation.states(used)) == 1
                with ExampleStore.open(used / "examples", data_key(FileKeys(used))) as store:
                    assert store.arrays()["text"].tobytes() == DIARY
            else:
                assert not (used / "examples").exists()
                assert not list((used / "state").iterdir())
                assert agent.rounds == []
        assert not (used / "erasing").exists()
        assert (used / "notes.txt").exists()
    assert outcomes == {True, False}
