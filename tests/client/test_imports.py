from __future__ import annotations

import subprocess
import sys

from tests.support.federation import Federation

CHECKS_IN = """
import sys
from archipel.client import Agent, AgentConfig
with Agent(AgentConfig(folder=sys.argv[1]), examples=dict) as agent:
    assert agent.run_once().kind == "waiting"
"""
CODE = """
import sys
import archipel.client
banned = "onnx onnx_ir onnxscript torch flask sqlalchemy alembic werkzeug gunicorn onnxruntime".split()
found = sorted(set(banned) & set(sys.modules))
assert not found, found
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("archipel.")}
known = "errors library_errors durable engine_registry importer_registry mode permutations tracing zips".split()
known += "bundle lite_runtime protocol strategies client".split()
assert rooms <= set(known), rooms
"""


def test_a_waiting_device_loads_neither_server_nor_converter_nor_onnx_runtime() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_nor_does_one_that_has_checked_in(federation: Federation) -> None:
    agent = federation.agent(1)
    agent.close()
    code = CHECKS_IN + CODE
    done = subprocess.run(
        [sys.executable, "-c", code, agent.config.folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
