"""kill -9 at the steps of an adoption: the device runs the old version or the new one, says which, and goes on.

A script adopts in forked children. As in the tests of slots a profile hook counts the calls that reach the file system,
or are of the adoption, and kills the child at a chosen one.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support.registry import BETTER, MODEL, Registry, X

SCRIPT = r"""
import json, os, shutil, signal, sys
from pathlib import Path
import numpy as np
from archipel.client import Agent, AgentConfig
from archipel.client.versions import adoption, comparing
from archipel.lite_runtime.engines import onnx_runtime

template, model, stride, data, x = json.loads(sys.argv[1])
template, X = Path(template), np.array(x, np.float32)
examples = {key: np.array(value, np.float32) for key, value in data.items()}
onnx_runtime.onnxruntime()
CHANGING = {"fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "write", "fchmod", "copyfileobj"}
CALLED = {"open_bundle", "compare", "switch", "install", "begin", "end", "_tell", "consider"}


def agent(folder):
    return Agent(AgentConfig(folder=folder, adopt=True, isolated=False), examples=lambda: examples)


def in_child(function, *arguments):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def adopt(folder, number, total=None):
    seen = 0

    def hook(frame, event, function):
        nonlocal seen
        code = frame.f_code
        if (event == "c_call" and function.__name__ in CHANGING
                or event in ("call", "return") and code.co_name in CALLED and "archipel" in code.co_filename):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    with agent(folder) as device:
        sys.setprofile(hook)
        device.run_once()
        sys.setprofile(None)
    if total is not None:
        total.write_text(str(seen))


def look(folder, number):
    with agent(folder) as device:
        before = device.models[model]
        said = device.model(model).predict(X).tolist()
    with agent(folder) as device:
        device.run_once()
        after = device.models[model]
        then = device.model(model).predict(X).tolist()
        device.run_once()
    names = sorted(os.listdir(folder / "models" / model)) + sorted(os.listdir(folder))
    print(json.dumps({"before": before, "said": said, "after": after, "then": then, "names": names}))


base = template.parent
shutil.copytree(template, base / "whole")
assert in_child(adopt, base / "whole", -1, base / "total") == 0
for number in range(1, int((base / "total").read_text()) + 1, stride):
    folder = base / f"killed-{number}"
    shutil.copytree(template, folder)
    ended = in_child(adopt, folder, number)
    assert ended == -signal.SIGKILL, (number, ended)
    assert in_child(look, folder, number) == 0, number
    shutil.rmtree(folder)
"""


@pytest.mark.parametrize("stride", [14, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("trained", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=4)
def test_killed_at(registry: Registry, trained: bool, stride: int) -> None:
    """Version 2 is a bundle of its own, or version 1's with weights that a task made."""
    agent = registry.device()
    if trained:
        registry.add_trained(registry.helpers(), promote=False)
    agent.run_once()
    agent.close()
    if trained:
        registry.federation.operator.models.promote(MODEL, 2)
    else:
        registry.add(BETTER)
    data = {name: array.tolist() for name, array in registry.federation.data(0).items()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([str(agent.config.folder), MODEL, stride, data, X.tolist()])],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) > (8 if stride > 1 else 100)
    numbers = [each["before"] for each in found]
    assert numbers == sorted(numbers)  # a later kill never finds it further back
    assert set(numbers) == {1, 2}
    for each in found:
        np.testing.assert_allclose(each["said"], registry.answer(each["before"]), rtol=1e-6)
        assert each["after"] == 2
        np.testing.assert_allclose(each["then"], registry.answer(2), rtol=1e-6)
        assert not [name for name in each["names"] if name.startswith(".")]
