"""Folders of pictures: pixels against a PNG written by hand and Pillow; limits before decoding; damage by file."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from archipel.datasets import Batches, as_dataset, open_images
from archipel.errors import DatasetError

CORPUS = Path(__file__).parent / "corpus" / "pictures"


def png(pixels: np.ndarray, size: tuple[int, int] | None = None) -> bytes:
    """An RGB picture as PNG, by the specification (W3C 2003), or one that announces another size (width, height)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape[:2]
    width, height = size or (width, height)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def picture(seed: int, height: int = 6, width: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    files = {"dog/b.png": png(picture(1)), "dog/deep/a.PNG": png(picture(2)), "cat/z.png": png(picture(3))}
    write(tmp_path, {**files, "cat/.hidden.png": b"", "cat/notes.txt": b"", "empty/notes.txt": b""})
    data = as_dataset(tmp_path)
    assert {name: str(field) for name, field in data.fields.items()} == {"input": "uint8[6, 5, 3]", "label": "int64[]"}
    assert data.fields["label"].classes == ("cat", "dog")
    taken = data.take(np.array([2, 0, 1]))
    assert taken["label"].tolist() == [1, 0, 1]
    assert np.array_equal(taken["input"], np.stack([picture(2), picture(3), picture(1)]))
    assert data.locate(0) == str(tmp_path / "cat/z.png")
    together = next(iter(Batches(data, 3, workers=3, shuffle=False)))
    assert np.array_equal(together["input"], data.take(np.arange(3))["input"])
    grey = open_images(tmp_path, channels=1).take(np.array([0]))["input"][0, :, :, 0]
    # ITU-R BT.601, which Pillow rounds.
    assert np.abs(grey - picture(3) @ [0.299, 0.587, 0.114]).max() <= 1


def test_sizes_and_turns(tmp_path: Path) -> None:
    tall = Image.fromarray(picture(1, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, so it is 20 high and 40 wide
    tall.save(tmp_path / "a.png", exif=exif)
    Image.fromarray(picture(2, 20, 40)).save(tmp_path / "b.jpg", quality=95)
    data = open_images(tmp_path)
    assert list(data.fields) == ["input"]
    assert np.array_equal(data.take(np.array([0]))["input"][0], np.rot90(picture(1, 40, 20), -1))
    stretched = open_images(tmp_path, size=(10, 10), fit="stretch").take(np.arange(2))["input"]
    wide = Image.fromarray(np.rot90(picture(1, 40, 20), -1))
    assert np.array_equal(stretched[0], np.asarray(wide.resize((10, 10), Image.Resampling.BILINEAR)))
    cropped = open_images(tmp_path, size=(10, 10)).take(np.array([0]))["input"][0]
    middle = wide.resize((10, 10), Image.Resampling.BILINEAR, box=(10, 0, 30, 20))
    assert np.array_equal(cropped, np.asarray(middle))
    Image.fromarray(picture(3, 9, 9)).save(tmp_path / "c.png")
    with pytest.raises(DatasetError, match=r"c\.png: 9 x 9 pixels .*first picture has 20 x 40; give a size"):
        open_images(tmp_path).take(np.arange(3))
    palette = Image.fromarray(picture(4)).convert("P")
    palette.save(tmp_path / "d.png", transparency=b"\0\1\2")
    assert open_images(tmp_path, size=(6, 5)).take(np.array([3]))["input"].shape == (1, 6, 5, 3)


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": png(picture(1)), "b.png": png(picture(1), (40_000, 40_000))})
    with pytest.raises(DatasetError, match=r"b\.png: .*(40000 x 40000 pixels, the limit|bomb)"):
        open_images(tmp_path, size=(6, 5)).take(np.array([1]))
    with pytest.raises(DatasetError, match=r"a\.png: 5 x 6 pixels, the limit is max_pixels=29"):
        open_images(tmp_path, max_pixels=29)


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_damaged_pictures_of_the_corpus(tmp_path: Path, path: Path) -> None:
    write(tmp_path, {"a.png": png(picture(1)), f"x{path.suffix}": path.read_bytes()})
    data = open_images(tmp_path, size=(6, 5))
    with pytest.raises(DatasetError, match=rf"x\{path.suffix}: .*; (mend it or )?leave it out"):
        data.take(np.array([1]))


@pytest.mark.sampled(every=3)
@settings(max_examples=60)
@given(st.data())
def test_mutated_pictures_are_refused_or_decoded(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "BMP", "WEBP", "PPM"]))
    buffer = io.BytesIO()
    Image.fromarray(picture(1)).save(buffer, kind)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    folder = tmp_path_factory.getbasetemp() / "mutated pictures"
    folder.mkdir(exist_ok=True)
    (folder / "x.png").write_bytes(content)
    try:
        taken = open_images(folder, size=(4, 4), max_pixels=1_000_000).take(np.array([0]))
    except DatasetError as error:
        taken, message = {"input": np.zeros((1, 4, 4, 3), np.uint8)}, str(error)
        assert str(folder / "x.png") in message
    assert taken["input"].shape == (1, 4, 4, 3)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="nothing: No such folder"):
        open_images(tmp_path / "nothing")
    with pytest.raises(DatasetError, match=r"no files that end with \.jpg"):
        open_images(tmp_path)
    write(tmp_path, {"a.png": png(picture(1)), "dog/b.png": png(picture(1))})
    with pytest.raises(DatasetError, match=r"files in the folder \(a\.png\) and in folders in it \(dog\)"):
        open_images(tmp_path)
