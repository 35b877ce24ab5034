"""Labels and tokens that a model does not have: every command names the file, the field, the row and the value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.commands import Command

TOKENS, CLASSES = 10, 3


def save_model(path: Path) -> None:
    """Class scores of texts of four tokens."""
    rng = np.random.default_rng(0)
    weights = {
        "table": rng.standard_normal((TOKENS, 5)).astype(np.float32),
        "w": rng.standard_normal((5, CLASSES)).astype(np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["vectors"]),
            helper.make_node("ReduceMean", ["vectors"], ["mean"], axes=[1], keepdims=0),
            helper.make_node("MatMul", ["mean", "w"], ["scores"]),
        ],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 4])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture
def folder(archipel: Command, tmp_path: Path) -> Path:
    """With model.onnx, model.bundle, good.npz, and ids.npz and label.npz with one wrong number each, in row 29."""
    save_model(tmp_path / "model.onnx")
    archipel("keys", str(tmp_path / "key"))
    archipel("convert", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "model.bundle"), "--key",
             str(tmp_path / "key"), "--loss", "cross_entropy")  # fmt: skip
    rng = np.random.default_rng(1)
    ids, label = rng.integers(0, TOKENS, (40, 4)), rng.integers(0, CLASSES, 40)
    np.savez(tmp_path / "good.npz", ids=ids, label=label)
    wrong_ids, wrong_label = ids.copy(), label.copy()
    wrong_ids[29, 3], wrong_label[29] = TOKENS, CLASSES
    np.savez(tmp_path / "ids.npz", ids=wrong_ids, label=label)
    np.savez(tmp_path / "label.npz", ids=ids, label=wrong_label)
    return tmp_path


BUNDLE = ["{here}/model.bundle", "--key", "{here}/key.pub"]
IDS = "{here}/ids.npz: field 'ids' has a number that the model does not have, in row 29: 10; the model knows 0 to 9"
LABEL = "{here}/label.npz: field 'label' has a class number that the model does not have, in row 29: 3; the model knows"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", *BUNDLE, "--input", "{here}/ids.npz", "--batch-size", "8"], IDS),
        (["run", *BUNDLE, "--input", "{here}/ids.npz", "--evaluate"], IDS),
        (["run", *BUNDLE, "--input", "{here}/label.npz", "--evaluate"], LABEL),
        (["fit", *BUNDLE, "--data", "{here}/ids.npz"], IDS),
        (["fit", *BUNDLE, "--data", "{here}/label.npz"], LABEL),
        (["fit", *BUNDLE, "--data", "{here}/good.npz", "--validation", "{here}/label.npz"], LABEL),
        (
            ["bench", *BUNDLE, "--input", "{here}/ids.npz", "--batch", "32", "--processes", "1"],
            "ended with 1: field 'ids' has a number that the model does not have, in row 29: 10",
        ),
        (
            ["compress", "{here}/model.onnx", "-o", "{here}/small.onnx", "--calibration", "{here}/ids.npz"],
            "--calibration: input 'ids' of example 29 has 10, and the model knows 0 to 9; 1 of 160 numbers are wrong",
        ),
        (
            ["compress", "{here}/model.onnx", "-o", "{here}/small.onnx", "--calibration", "{here}/good.npz",
             "--validation", "{here}/label.npz"],
            "--validation: label of example 29 has 3, and the model knows 0 to 2; 1 of 40 numbers are wrong",
        ),
        (
            ["compress", "{here}/model.onnx", "-o", "{here}/small.onnx", "--target", "size<1MB", "--calibration",
             "{here}/good.npz", "--validation", "{here}/label.npz"],
            "--validation: label of example 29 has 3, and the model knows 0 to 2",
        ),
        (
            ["compare", "{here}/model.onnx", "{here}/model.onnx", "--data", "{here}/ids.npz"],
            "{here}/ids.npz: data: input 'ids' of example 29 has 10, and the model knows 0 to 9",
        ),
    ],
    ids=lambda value: " ".join(value).replace("{here}/", "") if isinstance(value, list) else "",
)  # fmt: skip
@pytest.mark.sampled(every=6)
def test_one_line_says_where(archipel: Command, folder: Path, arguments: list[str], text: str) -> None:
    _, err = archipel(*(each.format(here=folder) for each in arguments), code=1)
    errors = [line for line in err.splitlines() if line.startswith("archipel: ")]
    assert len(errors) == 1, err
    assert text.format(here=folder) in errors[0]
    assert "Correct these examples or leave them out" in errors[0]
    assert "onnxruntime_src" not in err
    assert "Traceback" not in err
