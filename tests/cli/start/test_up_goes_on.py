"""`archipel up` is stopped, goes on, and stays: the same command each time."""

from __future__ import annotations

import json
import signal
import socket
import tomllib
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from archipel.operator import OperatorClient, TaskRequest
from tests.support.commands import Command
from tests.support.small_federation import up


@pytest.mark.sampled(every=6)
def test_one_command_trains_and_the_same_one_goes_on(folder: Path, archipel: Command) -> None:
    """It is stopped in the middle, and the next one finishes the same task with the same devices."""
    # A busy machine may make some of the rounds before this process has read of the first one.
    started = up(folder, "--devices", "2", "--rounds", "6", "--split", "by-person", "--evaluate-every", "6")
    assert started.stdout is not None
    lines: list[str] = []
    below: list[psutil.Process] = []
    for line in started.stdout:
        lines.append(line.decode())
        # Once: rich writes a line again if it is interrupted before it has noted that it has written it.
        if lines[-1].startswith("round 1 of 6") and not below:
            below = psutil.Process(started.pid).children(recursive=True)
            started.send_signal(signal.SIGINT)
    started.stdout.close()
    started.wait()
    assert started.returncode == 130, lines
    text = "".join(lines)
    assert "your development key" in text
    assert "policy for trying out" in text
    assert "stopped; `archipel up --folder federation` goes on" in text
    _, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []
    assert not (folder / "federation/weights.safetensors").exists()

    again = up(folder, "--stay")
    assert again.stdout is not None
    text = ""
    for line in again.stdout:
        text += line.decode()
        if line.startswith(b"command line: export"):
            # Server and devices are there for another task, and end with Ctrl-C.
            server, token = (part.split("=", 1)[1] for part in line.decode().split()[-2:])
            operator = OperatorClient(server, (folder / token).read_text().strip())
            done = next(each for each in operator.tasks.list() if each.kind == "training")
            more = operator.tasks.create(
                TaskRequest(name="more", population="local", bundle=done.bundle, rounds=1, cohort=2, min_cohort=2)
            )
            assert operator.tasks.wait(more.task_id, timeout=60).state == "completed"
            below = psutil.Process(again.pid).children(recursive=True)
            again.send_signal(signal.SIGINT)
    again.stdout.close()
    assert again.wait() == 0, text
    assert "stopped; the same command starts server and devices again" in text
    _, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []
    assert "goes on with the federation that is there" in text
    assert "round 1 of 6: 2 devices" in text
    assert "round 6 of 6: 2 devices" in text
    assert text.count("evaluation accuracy") == 1
    made = folder / "federation"
    assert (made / "curves.png").read_bytes().startswith(b"\x89PNG")
    learned = load_file(made / "weights.safetensors")["w"]
    with np.load(folder / "data.npz") as data:
        accuracy = ((data["x"] @ learned).argmax(axis=1) == data["y"]).mean()
        # Nobody's examples are on two devices, and all are on one.
        persons = []
        for number in (1, 2):
            with np.load(made / f"devices/{number}/data.npz") as own:
                rows = [int(np.flatnonzero((data["x"] == row).all(axis=1))[0]) for row in own["features"]]
                persons.append(set(data["person"][rows]))
                assert (data["y"][rows] == own["label"]).all()
    assert accuracy > 0.8
    # What the command says of the examples that no device has, reckoned with NumPy.
    with np.load(made / "held-out.npz") as held:
        assert len(held["label"]) == 24
        share = ((held["features"] @ learned).argmax(axis=1) == held["label"]).mean()
        unlearned = (held["label"] == 0).mean()
    assert "on 24 held-out examples: " in text
    assert f"accuracy {unlearned:.4g} -> {share:.4g}" in text
    assert persons[0].isdisjoint(persons[1])
    assert persons[0] | persons[1] == set(range(7))

    # The next commands that it printed, and the parts of real machines.
    for number in (1, 2):
        _, err = archipel("device", "status", str(made / f"devices/{number}/device.toml"))
        assert err == ""
    plan = json.loads((made / "up.json").read_text())
    assert plan["rounds"] == 6
    model, data = str(folder / "model.onnx"), str(folder / "data.npz")
    _, err = archipel("up", model, data, "--folder", str(made), "--rounds", "4", "--split", "iid", code=1)
    assert "holds a federation with other --rounds, --split; go on with it by" in err
    port = int(tomllib.loads((made / "server/server.toml").read_text())["port"])
    with socket.create_server(("127.0.0.1", port)):
        _, err = archipel("up", "--folder", str(made), code=1)
        assert f"port {port} is in use, maybe by this federation, started elsewhere: stop that, or change `port`" in err
    np.savez(folder / "other.npz", x=np.zeros((9, 4)), y=np.zeros(9, int))
    _, err = archipel("up", model, str(folder / "other.npz"), "--folder", str(made), code=1)
    assert f"holds a federation with other DATA; go on with it by `archipel up --folder {made}`" in err
