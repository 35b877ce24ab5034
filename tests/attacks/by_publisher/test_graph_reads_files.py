"""A publisher signs an `analyze` program whose graph takes a tensor from a file of the device, and uploads it.

The attacker holds the release key of a fleet, or has turned whoever holds it, and wants what else the agent's user can
read: its device key of mode 0600. ONNX Runtime before 1.24.1 follows such locations, and the graph's file says nothing
that the manifest would have to mention. What stops it: every graph is walked before a session is made, by the runtime
in this process, by the parent of an isolated one and again by its child, and a location other than the bundle's weights
is refused wherever it stands.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Bundle, decode_manifest, generate_key, pack
from archipel.bundle.graphs import inspect_graph
from archipel.converter import export
from archipel.errors import BundleError, ModelImportError, UnsafeGraphError, UnsafePathError
from archipel.graph.importing.bundled import read_bundled
from archipel.lite_runtime import Runtime, load
from archipel.lite_runtime.slots.model_slots import Slots
from tests.attacks.sandbox_bundles import SECRET, device_key, external, public, signed, upload

X = np.zeros(3, np.float32)
PLACES = ("initializer", "constant", "subgraph", "initializer of a subgraph", "function")


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return generate_key()


def steal(folder: Path, key: Ed25519PrivateKey, isolated: bool) -> bytes:
    """What the server would be sent, in the end."""
    if isolated:
        with load(folder, public(key), isolated=True) as runtime:
            sums, _ = runtime.analyze(X)
    else:
        sums, _ = load(folder, public(key)).analyze(X)
    return bytes(sums["u"].astype(np.uint8))


@pytest.mark.parametrize("isolated", [False, True], ids=["here", "isolated"])
@pytest.mark.parametrize("place", PLACES)
def test_a_location_that_leaves_the_bundle(tmp_path: Path, key: Ed25519PrivateKey, place: str, isolated: bool) -> None:
    device_key(tmp_path)
    folder = signed(tmp_path / "bundle", key, upload(external("t", "../device.key"), place))
    with pytest.raises(UnsafeGraphError, match=r"look.*'\.\./device\.key'.*'weights\.safetensors'"):
        steal(folder, key, isolated)


@pytest.mark.parametrize("isolated", [False, True], ids=["here", "isolated"])
def test_an_absolute_location(tmp_path: Path, key: Ed25519PrivateKey, isolated: bool) -> None:
    secret = device_key(tmp_path)
    folder = signed(tmp_path / "bundle", key, upload(external("t", str(secret))))
    with pytest.raises(UnsafeGraphError, match=r"'weights\.safetensors'"):
        steal(folder, key, isolated)


@pytest.mark.parametrize("location", ["../device.key", "device.key", "manifest.json"])
def test_the_source_of_an_export(tmp_path: Path, key: Ed25519PrivateKey, location: str) -> None:
    """The graph that nobody runs, on the machine of an operator who exports what was learned: and its file has it."""
    device_key(tmp_path)
    good = upload(external("t", "weights.safetensors"))
    folder = signed(tmp_path / "bundle", key, good, source=upload(external("t", location)))
    with pytest.raises(UnsafeGraphError, match=rf"source.*'{location}'.*'weights\.safetensors'"):
        export(folder, tmp_path / "m.onnx", public(key))
    # And where a bundle is not opened first.
    with pytest.raises(ModelImportError, match=r"not within weights\.safetensors"):
        read_bundled(folder, "source.onnx")
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize("isolated", [False, True], ids=["here", "isolated"])
def test_a_link_in_the_bundle(tmp_path: Path, key: Ed25519PrivateKey, isolated: bool) -> None:
    """First a link under a name of its own, then one in place of the weights."""
    secret = device_key(tmp_path)
    folder = signed(tmp_path / "bundle", key, upload(external("t", "link")))
    (folder / "link").symlink_to(secret)
    with pytest.raises(UnsafePathError):
        steal(folder, key, isolated)
    folder = signed(tmp_path / "other", key, upload(external("t", "weights.safetensors")))
    (folder / "weights.safetensors").unlink()
    (folder / "weights.safetensors").symlink_to(secret)
    with pytest.raises(UnsafePathError):
        steal(folder, key, isolated)


def test_addresses_in_memory(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    """ONNX Runtime's own tag for bytes that lie at an address of this process."""
    folder = signed(tmp_path / "bundle", key, upload(external("t", "*/_ORT_MEM_ADDR_/*")))
    with pytest.raises(UnsafeGraphError):
        steal(folder, key, False)


def test_a_file_and_slots_take_it_no_more_than_a_folder(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    device_key(tmp_path)
    folder = signed(tmp_path / "bundle", key, upload(external("t", "../device.key")))
    pack(folder, tmp_path / "survey.bundle")
    with pytest.raises(UnsafeGraphError):
        load(tmp_path / "survey.bundle", public(key), cache=tmp_path / "cache")
    with pytest.raises(BundleError), Slots(tmp_path / "slots", public(key)) as slots:
        slots.install(folder)


def test_a_bundle_that_nobody_opened_is_not_run_either(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    device_key(tmp_path)
    folder = signed(tmp_path / "bundle", key, upload(external("t", "../device.key")))
    manifest = decode_manifest((folder / "manifest.json").read_bytes())
    with pytest.raises(UnsafeGraphError):
        Runtime(Bundle(folder, manifest, "0" * 64, public(key)[0]))


def test_what_the_attack_needs_is_what_is_refused(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    """The same graphs with the bundle's own weights pass and run: the test above does not fail for another reason."""
    for place in PLACES:
        model = upload(external("t", "weights.safetensors"), place)
        folder = signed(tmp_path / place, key, model)
        size = (folder / "weights.safetensors").stat().st_size
        inspect_graph("look", model.SerializeToString(), ("weights.safetensors", size))
        assert steal(folder, key, False) == (folder / "weights.safetensors").read_bytes()[:64] != SECRET
        shutil.rmtree(folder)
