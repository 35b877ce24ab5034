from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import archipel.client
banned = "onnx onnx_ir onnxscript torch flask sqlalchemy alembic werkzeug gunicorn onnxruntime".split()
found = sorted(set(banned) & set(sys.modules))
assert not found, found
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("archipel.")}
assert rooms <= {"errors", "bundle", "lite_runtime", "protocol", "client"}, rooms
"""


def test_a_waiting_device_loads_neither_server_nor_converter_nor_onnx_runtime() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_public_names() -> None:
    import archipel.client

    assert sorted(archipel.client.__all__) == [
        "Agent", "AgentConfig", "Entry", "Event", "FileKeys", "KeyStore", "Outcome", "data_key", "erase", "pause",
        "paused", "resume",
    ]  # fmt: skip
