from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.bundle.archive import unpack
from archipel.errors import (
    ArchiveError,
    BundleError,
    DigestError,
    ManifestError,
    SignatureError,
    TensorLayoutError,
    UnsafePathError,
)


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def test_folder_and_file_open_alike(
    folder: Path, key: Ed25519PrivateKey, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    b.pack(folder, tmp_path / "linear.bundle")
    from_folder = b.open_bundle(folder, [public(key)])
    from_file = b.open_bundle(tmp_path / "linear.bundle", [os.urandom(32), public(key)], cache=tmp_path / "cache")
    assert from_folder.manifest == from_file.manifest
    assert from_folder.digest == from_file.digest == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert from_file.folder == tmp_path / "cache" / from_file.digest
    for name, values in tensors.items():
        np.testing.assert_array_equal(from_file.tensor(name), values)
    assert list(from_file.parameters()) == ["fc.weight", "fc.bias"]
    assert from_file.program_path("train").read_bytes() == b"\x08\x0a\x3a\x07\x12\x05train\x42\x02\x10\x15"
    with pytest.raises(BundleError, match="finish, predict, train"):
        from_file.program("refresh")
    again = b.open_bundle(str(tmp_path / "linear.bundle"), [public(key)], cache=str(tmp_path / "cache"))
    assert again.folder == from_file.folder


def test_a_damaged_cached_copy_is_replaced(folder: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    b.pack(folder, tmp_path / "l.bundle")
    opened = b.open_bundle(tmp_path / "l.bundle", [public(key)], cache=tmp_path / "cache")
    (opened.folder / "train.onnx").write_bytes(b"damaged")
    again = b.open_bundle(tmp_path / "l.bundle", [public(key)], cache=tmp_path / "cache")
    assert again.program_path("train").read_bytes() == b"\x08\x0a\x3a\x07\x12\x05train\x42\x02\x10\x15"


def zip64(file: Path, members: int, plain_members: int, *, place: int = 0) -> None:
    """Put a ZIP64 record before the end record of the zip file, as APPNOTE 4.3.14 lays it out."""
    data = file.read_bytes()
    end = data[-22:]
    size, start = struct.unpack_from("<LL", end, 12)
    record = struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, members, members, size, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(data) - 22 + place, 1)
    plain = struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, plain_members, plain_members, size, start, 0)
    file.write_bytes(data[:-22] + record + locator + plain)


def test_a_zip64_record_cannot_hide_how_many_members_there_are(
    folder: Path, key: Ed25519PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b.pack(folder, tmp_path / "true.bundle")
    with zipfile.ZipFile(tmp_path / "true.bundle") as archive:
        count = len(archive.infolist())
    zip64(tmp_path / "true.bundle", count, count)
    b.open_bundle(tmp_path / "true.bundle", [public(key)], cache=tmp_path / "cache")

    with zipfile.ZipFile(tmp_path / "many.bundle", "w") as archive:
        for number in range(5000):
            archive.writestr(f"m{number}", b"")
    zip64(tmp_path / "many.bundle", 5000, 2)
    b.pack(folder, tmp_path / "elsewhere.bundle")
    zip64(tmp_path / "elsewhere.bundle", count, count, place=-4)
    b.pack(folder, tmp_path / "comment.bundle")
    with open(tmp_path / "comment.bundle", "ab") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x01\x00c")

    def not_before(*_: object) -> None:
        raise AssertionError("zipfile reads the whole directory into memory")

    monkeypatch.setattr(zipfile, "ZipFile", not_before)
    for name, words in (
        ("many", "5000 members in .* at most 64 are allowed"),
        ("elsewhere", "ZIP64 directory is not where it says"),
        ("comment", "no zip directory"),
    ):
        with pytest.raises(ArchiveError, match=words):
            b.open_bundle(tmp_path / f"{name}.bundle", [public(key)], cache=tmp_path / "cache")


def test_the_file_is_a_deterministic_plain_zip(folder: Path, tmp_path: Path) -> None:
    b.pack(folder, tmp_path / "one")
    shutil.copytree(folder, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "train.onnx", (1, 1))
    b.pack(str(tmp_path / "copy"), str(tmp_path / "two"))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with zipfile.ZipFile(tmp_path / "one") as archive:
        assert archive.namelist()[:2] == ["manifest.json", "manifest.sig"]
        assert archive.testzip() is None


def test_only_a_bundle_folder_is_packed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"not a bundle folder, it has no manifest\.json"):
        b.pack(tmp_path / "nothing", tmp_path / "x.bundle")
    (folder / "manifest.sig").unlink()
    with pytest.raises(ArchiveError, match=r"it has no manifest\.sig"):
        b.pack(folder, tmp_path / "x.bundle")
    assert not (tmp_path / "x.bundle").exists()


def test_wrong_signature(folder: Path, key: Ed25519PrivateKey) -> None:
    with pytest.raises(SignatureError, match="none of the 1 trusted keys"):
        b.open_bundle(folder, [public(b.generate_key())])
    with pytest.raises(SignatureError, match="no trusted keys"):
        b.open_bundle(folder, [])
    signature = bytearray((folder / "manifest.sig").read_bytes())
    signature[0] ^= 1
    (folder / "manifest.sig").write_bytes(signature)
    with pytest.raises(SignatureError):
        b.open_bundle(folder, [public(key)])


def test_a_signature_error_names_the_file_that_was_given(folder: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    b.pack(folder, tmp_path / "given.bundle")
    with pytest.raises(SignatureError, match=r"given\.bundle: none of the 1 trusted keys"):
        b.open_bundle(tmp_path / "given.bundle", [bytes(32)], tmp_path / "cache")


def test_wrong_digest(folder: Path, key: Ed25519PrivateKey) -> None:
    (folder / "train.onnx").write_bytes(b"graph of trainx")
    with pytest.raises(DigestError, match=r"train\.onnx: SHA-256 is"):
        b.open_bundle(folder, [public(key)])
    (folder / "train.onnx").unlink()
    with pytest.raises(DigestError, match="cannot be read"):
        b.open_bundle(folder, [public(key)])


def test_foreign_files_and_links(folder: Path, key: Ed25519PrivateKey) -> None:
    (folder / "extra").write_bytes(b"")
    with pytest.raises(UnsafePathError, match="'extra' is not in the manifest"):
        b.open_bundle(folder, [public(key)])
    (folder / "extra").unlink()
    (folder / "train.onnx").rename(folder.parent / "elsewhere")
    (folder / "train.onnx").symlink_to(folder.parent / "elsewhere")
    with pytest.raises(UnsafePathError, match="not a regular file"):
        b.open_bundle(folder, [public(key)])


def test_parameters_must_match_the_weights(
    parts: dict[str, Any], tensors: dict[str, np.ndarray], key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    other = {**tensors, "fc.bias": tensors["fc.bias"] + 1}
    with pytest.raises(DigestError, match=r"fc\.bias"):
        b.write_bundle(tmp_path / "x", key=key, **{**parts, "weights": b.write_weights(other)})
    assert not (tmp_path / "x").exists()
    other["fc.bias"] = np.zeros((1, 3), np.float32)
    with pytest.raises(TensorLayoutError, match=r"fc\.bias"):
        b.write_bundle(tmp_path / "x", key=key, **{**parts, "weights": b.write_weights(other)})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_overwritten(folder: Path, parts: dict[str, Any], key: Ed25519PrivateKey) -> None:
    with pytest.raises(BundleError, match="exists already"):
        b.write_bundle(folder, key=key, **parts)


def archive_with(path: Path, members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("members", "compression", "error", "text"),
    [
        ([("manifest.json", b"{}")], 0, ArchiveError, "1 members"),
        ([("a", b""), ("b", b"")], 0, ArchiveError, "first"),
        ([("manifest.json", b"{}"), ("manifest.sig", b""), ("../x", b"")], 0, UnsafePathError, "'../x'"),
        ([("manifest.json", b"{}"), ("manifest.sig", b""), ("/x", b"")], 0, UnsafePathError, "'/x'"),
        ([("manifest.json", b"{}"), ("manifest.sig", b""), ("d/", b"")], 0, UnsafePathError, "'d/'"),
        ([("manifest.json", b"{}"), ("manifest.sig", b""), ("x", b""), ("x", b"")], 0, ArchiveError, "twice"),
        ([("manifest.json", b"{}" * 99), ("manifest.sig", b"0" * 64)], 8, ArchiveError, "compressed"),
        ([("manifest.json", b"{}")] + [(f"f{i}", b"") for i in range(80)], 0, ArchiveError, "at most 64"),
        ([("manifest.json", b"{}"), ("manifest.sig", b"0" * 64)], 0, SignatureError, "trusted"),
    ],
)
def test_hostile_archives(
    tmp_path: Path, members: list[tuple[str, bytes]], compression: int, error: type, text: str
) -> None:
    file = archive_with(tmp_path / "x.bundle", members, compression)
    with pytest.raises(error) as caught:
        b.open_bundle(file, [os.urandom(32)], cache=tmp_path / "cache")
    assert type(caught.value) is error
    assert text in str(caught.value)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == []


@pytest.mark.parametrize("method", [8, 12, 14, 93])
def test_a_member_of_another_method_of_the_same_size(method: int, tmp_path: Path) -> None:
    """What it says of its sizes is what a stored one says."""
    file = archive_with(tmp_path / "x.bundle", [("manifest.json", b"{}"), ("manifest.sig", b"0" * 64)])
    data = bytearray(file.read_bytes())
    struct.pack_into("<H", data, data.index(b"PK\1\2") + 10, method)
    file.write_bytes(data)
    with pytest.raises(ArchiveError, match=r"'manifest\.json' is compressed"):
        unpack(file, tmp_path / "unpacked")


def test_more_members_than_the_end_of_the_file_says(tmp_path: Path) -> None:
    """zipfile reads the whole directory, whatever number stands at its end."""
    members = [("manifest.json", b"{}"), ("manifest.sig", b"0" * 64), *((f"f{i}", b"") for i in range(63))]
    file = archive_with(tmp_path / "x.bundle", members)
    data = bytearray(file.read_bytes())
    struct.pack_into("<HH", data, data.rindex(b"PK\5\6") + 8, 3, 3)
    file.write_bytes(data)
    with pytest.raises(ArchiveError, match="65 members, expected 2 to 64"):
        unpack(file, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_members_inside_each_other(tmp_path: Path) -> None:
    """Fifield 2019, "A better zip bomb": the bytes of one member hold another member with its header, so that a small
    file unpacks to a large one. Here 40 members of which each holds all that follow it."""
    names = ["manifest.json", "manifest.sig", *(f"f{number}" for number in range(38))]
    inner, places = b"x" * 5000, []
    for name in reversed(names):
        encoded = name.encode()
        header = (b"PK\3\4", 20, 0, 0, 0, 0x21, zlib.crc32(inner), len(inner), len(inner), len(encoded), 0)
        places.append((len(inner), zlib.crc32(inner), encoded))
        inner = struct.pack("<4s5H3L2H", *header) + encoded + inner
    directory, at = b"", 0
    for size, checksum, encoded in reversed(places):
        entry = (b"PK\1\2", 20, 20, 0, 0, 0, 0x21, checksum, size, size, len(encoded), 0, 0, 0, 0, 0, at)
        directory += struct.pack("<4s6H3L5H2L", *entry) + encoded
        at += 30 + len(encoded)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, len(names), len(names), len(directory), len(inner), 0)
    file = tmp_path / "x.bundle"
    file.write_bytes(inner + directory + end)
    with zipfile.ZipFile(file) as archive:
        assert archive.namelist() == names
        assert sum(info.file_size for info in archive.infolist()) > 20 * file.stat().st_size
    with pytest.raises(ArchiveError, match="members overlap"):
        unpack(file, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_not_an_archive(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello" * 100)
    with pytest.raises(ArchiveError, match="not a bundle file"):
        b.open_bundle(tmp_path / "x", [os.urandom(32)])
    with pytest.raises(BundleError, match="no such bundle"):
        b.open_bundle(tmp_path / "missing", [os.urandom(32)])


@pytest.mark.sampled(every=4)
def test_mutated_archives_raise_only_documented_errors(folder: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    b.pack(folder, tmp_path / "good")
    data = (tmp_path / "good").read_bytes()
    draw = random.Random(2)
    opened = 0
    for _ in range(300):
        mutated = bytearray(data)
        for _ in range(draw.randint(1, 5)):
            if draw.random() < 0.3:
                at = draw.randrange(len(mutated))
                del mutated[at : at + draw.randint(1, 50)]
            else:
                # The structures of the zip are at its end and before every member.
                at = draw.choice([draw.randrange(len(mutated)), len(mutated) - 1 - draw.randrange(500)])
                mutated[at] = draw.randrange(256)
        (tmp_path / "bad").write_bytes(mutated)
        try:
            b.open_bundle(tmp_path / "bad", [public(key)], cache=tmp_path / "cache")
            opened += 1
        except BundleError:
            continue
    # Bytes that no reader looks at (times, flags of the host system) may change and the bundle is still itself.
    assert opened < 150


def test_corpus_of_broken_bundles() -> None:
    """Kept inputs that once reached an unexpected place; each must stay refused."""
    corpus = sorted((Path(__file__).parent / "corpus").glob("*"))
    assert len(corpus) >= 4
    for path in corpus:
        data = path.read_bytes()
        if path.suffix == ".json":
            with pytest.raises(ManifestError):
                b.decode_manifest(data)
        elif path.suffix == ".safetensors":
            with pytest.raises(TensorLayoutError):
                b.read_weights(data)


def test_keys_as_files(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    b.save_private_key(key, tmp_path / "k.pem")
    b.save_public_key(key, tmp_path / "k.pub")
    assert stat.S_IMODE((tmp_path / "k.pem").stat().st_mode) == 0o600
    assert public(b.load_private_key(tmp_path / "k.pem")) == b.load_public_key(tmp_path / "k.pub") == public(key)
    with pytest.raises(SignatureError, match="never overwritten"):
        b.save_private_key(key, tmp_path / "k.pem")
    (tmp_path / "bad").write_text("hello")
    with pytest.raises(SignatureError, match="not an unencrypted private key"):
        b.load_private_key(tmp_path / "bad")
    with pytest.raises(SignatureError, match="64 hexadecimal"):
        b.load_public_key(tmp_path / "bad")
    with pytest.raises(SignatureError, match="cannot be read"):
        b.load_private_key(tmp_path / "missing")


def test_the_device_install_is_enough() -> None:
    """Importing the room must not pull in anything that a device does not have."""
    import subprocess
    import sys

    code = "import sys, archipel.bundle; print([m for m in ('onnx', 'torch', 'flask') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
