"""Folders of pictures. Sizes are checked in the header, before a picture is decoded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT, LABEL, Arrays, Field
from archipel.datasets.readers.class_folder import ClassFolder
from archipel.datasets.readers.extra import need
from archipel.errors import DatasetError
from archipel.library_errors import one_line

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".pgm", ".ppm")
# Pillow has decoders for many more, of which some run other programs or are seldom tested.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM")
MAX_PIXELS = 50_000_000
MAX_FILE_BYTES = 256 << 20


def open_images(
    folder: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    fit: Literal["crop", "stretch"] = "crop",
    channels: Literal[1, 3] = 3,
    max_pixels: int = MAX_PIXELS,
) -> ImageDataset:
    """The pictures in a folder (JPEG, PNG, BMP, WebP, PPM), decoded when they are needed.

    The field "input" is uint8 `[height, width, channels]`. With a folder for each class, "label" is the number of the
    class among the sorted names. Pictures are turned as their EXIF data says.

    Arguments:
        folder: the folder.
        size: height and width that each picture is brought to, with Pillow's bilinear filter; by default all must have
            the size of the first.
        fit: "crop" scales until the picture covers the size and cuts the rest off evenly; "stretch" scales each axis.
        channels: 3 for RGB, 1 for grey. Transparent pictures lose their transparency.
        max_pixels: the largest picture that is decoded.

    Raises DatasetError for a folder without pictures, and when they are taken for a picture that is damaged, too large
    or of another size: it names the file. MissingExtraError without Pillow.

    Example:
        data = open_images("flowers", size=(64, 64))
        for batch in Batches(data, 32, workers=4): ...
    """
    if channels not in (1, 3) or fit not in ("crop", "stretch") or (size is not None and min(size) < 1):
        raise DatasetError(f"channels is 1 or 3, fit crop or stretch, sizes from 1; got {channels}, {fit}, {size}")
    return ImageDataset(ClassFolder(Path(folder), SUFFIXES), size, fit, channels, max_pixels)


class ImageDataset:
    """Pictures in a folder; `open_images` makes one."""

    def __init__(
        self, folder: ClassFolder, size: tuple[int, int] | None, fit: str, channels: int, max_pixels: int
    ) -> None:
        need("PIL.Image", "Pillow")
        self.folder = folder
        self._fit, self._mode, self._max_pixels = fit, "RGB" if channels == 3 else "L", max_pixels
        self._resize = size is not None
        height, width = size if size is not None else self._decode(0).shape[:2]
        self.fields: Mapping[str, Field] = {INPUT: Field(np.dtype(np.uint8), (height, width, channels))}
        if folder.classes:
            self.fields = {**self.fields, LABEL: Field(np.dtype(np.int64), (), folder.classes)}

    def __len__(self) -> int:
        return len(self.folder.files)

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The pictures of these numbers, and their labels."""
        shape = self.fields[INPUT].shape
        made = np.empty((len(rows), *(size or 0 for size in shape)), np.uint8)
        for place, row in enumerate(rows):
            picture = self._decode(int(row), self._resize)
            if picture.shape != shape:
                raise DatasetError(
                    f"{self.locate(int(row))}: {picture.shape[0]} x {picture.shape[1]} pixels (height x width), the "
                    f"first picture has {shape[0]} x {shape[1]}; give a size=(height, width) to bring all to"
                )
            made[place] = picture
        taken: Arrays = {INPUT: made}
        if self.folder.classes:
            taken[LABEL] = np.array([self.folder.labels[row] for row in rows], np.int64)
        return taken

    def locate(self, row: int) -> str:
        """The file of a picture."""
        return str(self.folder.path / self.folder.files[row])

    def _decode(self, row: int, resize: bool = False) -> NDArray[np.uint8]:
        image_module, operations = need("PIL.Image", "Pillow"), need("PIL.ImageOps", "Pillow")
        path = self.locate(row)
        try:
            if os.stat(path).st_size > MAX_FILE_BYTES:
                raise DatasetError(f"{path}: more than {MAX_FILE_BYTES} bytes; leave it out or make it smaller")
            with image_module.open(path, formats=_FORMATS) as image:
                if image.width * image.height > self._max_pixels:
                    raise DatasetError(
                        f"{path}: {image.width} x {image.height} pixels, the limit is max_pixels={self._max_pixels}; "
                        "leave it out or make it smaller"
                    )
                turned = operations.exif_transpose(self._shrink(image) if resize else image)
                if "transparency" in turned.info:
                    turned = turned.convert("RGBA")  # Pillow warns of what it does without this step
                turned = turned.convert(self._mode)
                if resize:
                    turned = self._bring_to_size(turned, operations)
                array: NDArray[np.uint8] = np.asarray(turned)
        except DatasetError:
            raise
        except OSError as error:
            raise DatasetError(f"{path}: {error.strerror or one_line(error)}; mend it or leave it out") from None
        except (ValueError, SyntaxError, TypeError, KeyError, IndexError, OverflowError, EOFError, RuntimeError,
                image_module.DecompressionBombError, Warning) as error:  # fmt: skip
            # What Pillow's decoders raise for damage, and its warnings where the caller turns these into errors.
            raise DatasetError(f"{path}: no picture that can be decoded ({one_line(error)}); leave it out") from None
        return array if array.ndim == 3 else array[:, :, None]

    def _shrink(self, image: Any) -> Any:
        # A JPEG can be decoded at a half, a quarter or an eighth of its size, which takes a fraction of the time.
        height, width = self.fields[INPUT].shape[:2]
        longest = 2 * max(height or 0, width or 0)
        image.draft(None, (longest, longest))
        return image

    def _bring_to_size(self, image: Any, operations: Any) -> Any:
        height, width = self.fields[INPUT].shape[:2]
        bilinear = need("PIL.Image", "Pillow").Resampling.BILINEAR
        if self._fit == "crop":
            return operations.fit(image, (width, height), bilinear)
        return image.resize((width, height), bilinear)
