"""The trained float models as the study uses them: files of each, its data, its calibration examples."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from cases import CASES, Case, read
from cells import digest

from archipel import Model
from archipel.compression.deploy import deploy
from archipel.datasets import Labelled, LabelledSplits
from archipel.durable import write_durably
from archipel.graph.functions import inline_functions
from archipel.graph.slim import slim
from archipel.training.batch_norm import prepared

CALIBRATION = 512
"""Training examples, the first ones, that every quantizer calibrates on."""


@dataclass(frozen=True)
class Subject:
    """One float model. `folder` is where floats.py keeps it, `made` where what is made of it goes."""

    name: str
    seed: int
    folder: Path
    data: Path
    test_examples: int | None = None

    @property
    def title(self) -> str:
        return f"{self.name}-{self.seed}"

    @property
    def case(self) -> Case:
        return CASES[self.name]

    @property
    def path(self) -> Path:
        return self.folder / f"{self.title}.onnx"

    @cached_property
    def digest(self) -> str:
        return digest(self.path.read_bytes())

    @cached_property
    def model(self) -> Model:
        return Model.from_onnx(self.path)

    @property
    def splits(self) -> LabelledSplits:
        return read(self.case.data, self.data)

    @property
    def test(self) -> Labelled:
        test = self.splits.test
        return test if self.test_examples is None else test.take(np.arange(min(self.test_examples, len(test))))

    @property
    def calibration(self) -> np.ndarray:
        inputs: np.ndarray = self.splits.train.inputs[:CALIBRATION]
        return inputs

    @cached_property
    def made(self) -> Path:
        path = self.folder / "made" / f"{self.title}-{self.digest}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @cached_property
    def deployed(self) -> Path:
        """The float model as a device runs it: what every ratio is to."""
        path = self.made / "float.onnx"
        write_durably(path, slim(deploy(self.model).predict.ir).SerializeToString(deterministic=True))
        return path

    @cached_property
    def plain(self) -> Path:
        """The float graph in inference mode, with nothing done to it: what other quantizers start from."""
        path = self.made / "plain.onnx"
        model = prepared(self.model, "frozen")
        inline_functions(model.ir)
        write_durably(path, onnx.shape_inference.infer_shapes(slim(model.ir)).SerializeToString())
        return path

    def array(self, name: str, content: np.ndarray) -> Path:
        """`content` as a file, for other processes."""
        path = self.made / f"{name}.npy"
        buffer = io.BytesIO()
        np.save(buffer, content)
        if not path.exists() or path.read_bytes() != buffer.getvalue():
            write_durably(path, buffer.getvalue())
        return path


def sizes(*paths: Path) -> tuple[int, int]:
    """Bytes of files together, and of their zip (deflate)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return sum(path.stat().st_size for path in paths), buffer.tell()
