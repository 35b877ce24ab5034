"""The commands that make, take and accept a development key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from archipel.bundle import is_development_key, load_public_key
from tests.support.commands import Command
from tests.support.development import PUBLIC, place_development_key

NET = """<ir_version: 10, opset_import: ["": 21]>
net (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w = {%s}> {
    y = MatMul(x, w)
}"""
SAID = "signed with a development key: for trying out; devices and servers refuse it by default\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has model.onnx and x.npy; the user's settings are in config/."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    weights = ", ".join(str(number / 8) for number in range(12))
    onnx.save(parser.parse_model(NET % weights), tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", np.eye(4, dtype=np.float32))
    return tmp_path


@pytest.mark.sampled(every=4)
def test_an_onnx_file_predicts_after_two_commands(folder: Path, archipel: Command) -> None:
    model, made = str(folder / "model.onnx"), str(folder / "m.bundle")
    _, err = archipel("convert", model, "-o", made)
    file = folder / "config/archipel/development.key"
    assert err.startswith(f"signing with a new development key, {file}: for trying out; ")
    assert err.count("\n") == 1
    out, err = archipel("run", made, "--input", str(folder / "x.npy"))
    assert "y: float32[4, 3]  from 0 to 1.375" in out
    assert err == SAID
    # The second time it is there already.
    _, err = archipel("convert", model, "-o", str(folder / "again.bundle"))
    assert err.startswith("signing with your development key")
    out, _ = archipel("keys")
    assert f"{file}   (there already)" in out
    [public] = [line.split()[-1] for line in out.splitlines() if line.startswith("public key")]
    assert is_development_key(bytes.fromhex(public))


@pytest.mark.sampled(every=3)
def test_peoples_own_commands_say_it(folder: Path, archipel: Command) -> None:
    place_development_key(folder / "config")
    made = str(folder / "m.bundle")
    archipel("convert", str(folder / "model.onnx"), "-o", made)
    public = folder / "development.pub"
    public.write_text(PUBLIC.hex() + "\n")
    for arguments in (["inspect", made], ["verify", made], ["compare", made, made, "--data", str(folder / "x.npy")]):
        for keys in ([], ["--key", str(public)]):
            _, err = archipel(*arguments, *keys)
            assert err == SAID
    out, _ = archipel("verify", made)
    assert "by your development key" in out


def test_another_publishers_bundle_needs_their_key(folder: Path, archipel: Command) -> None:
    archipel("keys", str(folder / "publisher"))
    assert not is_development_key(load_public_key(folder / "publisher.pub"))
    made = str(folder / "m.bundle")
    _, err = archipel("convert", str(folder / "model.onnx"), "-o", made, "--key", str(folder / "publisher"))
    assert err == ""
    asked = ["run", made, "--input", str(folder / "x.npy")]
    _, err = archipel(*asked, code=1)
    assert "give --key FILE.pub" in err
    place_development_key(folder / "config")
    _, err = archipel(*asked, code=1)
    assert "none of the 1 trusted keys" in err
    assert err.endswith("that is your development key: give the publisher's, --key FILE.pub\n")


def test_slots_and_servers_ask_for_the_permission(folder: Path, archipel: Command) -> None:
    place_development_key(folder / "config")
    made = str(folder / "m.bundle")
    archipel("convert", str(folder / "model.onnx"), "-o", made)
    public = folder / "development.pub"
    public.write_text(PUBLIC.hex() + "\n")
    asked = ["slots", "install", str(folder / "slots"), made, "--key", str(public)]
    _, err = archipel(*asked, code=1)
    assert "--allow-development" in err
    archipel(*asked, "--allow-development")
    asked = ["serve", "init", str(folder / "server"), "--enrolment-key", str(public), "--publisher-key", str(public)]
    _, err = archipel(*asked, code=1)
    assert "--allow-development" in err
    archipel(*asked, "--allow-development")
    assert "allow_development = true\n" in (folder / "server/server.toml").read_text()
