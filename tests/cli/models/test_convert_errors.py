"""Errors of `archipel convert` and `archipel compress` name options, never Python's arguments."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import archipel
from archipel import bundle as b
from archipel.cli.input_output.spelling import spelled
from archipel.cli.models.compress import compress_command
from archipel.cli.models.convert.command import convert_command
from archipel.cli.models.convert.spelling import OPTIONS, PYTHON_ONLY, RULES
from archipel.converter import Analysis, Compression, Signing, Training
from archipel.converter.request import Request
from archipel.training.step import StepOptions

Command = Callable[..., tuple[str, str]]

GROUPS = {
    **{kind.__name__: [f.name for f in dataclasses.fields(kind) if f.init]
       for kind in (Request, Training, Compression, Signing, Analysis)},
    "StepOptions": list(StepOptions.__optional_keys__),
}  # fmt: skip
ARGUMENTS = {argument for group in GROUPS.values() for argument in group}


CALLED = r"\b(Training|Signing|Compression|Analysis|Request|StepOptions)\("
SNAKE = "|".join(argument for argument in ARGUMENTS if "_" in argument and argument != "max_examples")
PYTHON = re.compile(rf"(?<![\w.:=-])(?<!-option )({'|'.join(ARGUMENTS)})=|\b({SNAKE})\b|{CALLED}")


def python_spelling(text: str) -> list[str]:
    return [match[0] for match in PYTHON.finditer(text)]


MODEL = """<ir_version: 10, opset_import: ["": 21]> m (float[n, 8] x) => (float[n, 3] y)
{
    y = Gemm(x, w, b)
}"""
FIXED = """<ir_version: 10, opset_import: ["": 21]> m (float[5, 8] x) => (float[5, 3] y) {
    h = Gemm(x, w, b)
    y = Softmax <axis = 0> (h)
}"""

CONVERT = """
--loss hinge
--loss-option smoothing=1 --loss mse
--loss-option label_smoothing=2
--loss-option label_smoothing
--loss-option class_weights=-1
--loss-option class_weights=1,2
--optimizer newton
--optimizer-option nesterov=true
--optimizer-option nesterov=yes
--optimizer-option lr=1
--optimizer adam --optimizer-option betas=2,3
--optimizer adam --momentum 0.5
--lr 1000
--lr -1
--schedule cosine
--schedule cosine:steps=0 --lr 1
--schedule cosine:steps=2 --schedule linear:steps=3 --lr 1
--schedule cosine:pace=0 --lr 1
--momentum 2
--weight-decay -1
--trainable ghost
--trainable  --lr 1
--fix x
--fix rate=16000
--limit-loops 0
--strategy fedmagic
--strategy fedrep
--strategy fedbn
--strategy scaffold --accumulate 2
--strategy fedsgd --momentum 0.5
--strategy scaffold --optimizer adam
--strategy dpsgd --per-example clip=1
--strategy lora --trainable b
--strategy-option clip=-1
--strategy-option clip=far
--strategy-option bits=40
--strategy-option weight_cap=0
--strategy-option weight_cap=1000000000
--strategy-option value_range=0
--strategy-option statistics_range=0.5
--strategy-option weighting=votes
--strategy-option nu=1
--strategy fedprox --strategy-option mu=-1
--strategy fedrep --strategy-option personal=ghost
--strategy fedrep --strategy-option personal=*
--strategy ditto --strategy-option personal_epochs=0
--strategy lora --strategy-option rank=0
--epochs 0
--epochs 20000
--batch-size 0
--batch-size 4 --fixed
--loss-range -1
--loss-range inf
--loss-output ghost
--batch-norm melted
--accumulate 0
--precision float8
--recompute much
--recompute 10
--recompute auto --per-example clip=1
--kernels --per-example clip=1
--kernels --strategy dpsgd
--transform clip_by_norm
--transform clip_by_norm:max_norm=-1
--transform melt
--per-example noise=-1
--per-example sound=1
--target-epsilon 4
--target-rounds 10
--target-epsilon 4 --target-rounds 10
--target-epsilon 4 --target-rounds 10 --strategy dpsgd --strategy-option noise_multiplier=1
--name \t
--population two/words
--valid-days -1
--min-agreement 2
--min-snr loud
--sequence -1
--sequence 99999999999999999999
--parent short
--policy missing.toml
--policy wrong.toml
--policy broken.toml
--policy-option min_cohort=none
--policy-option min_cohort=1
--policy-option threshold=0.1
--policy-option max_bits=99
--policy-option modes=open
--policy-option weighting=uniform --strategy-option weighting=examples
--analysis wrong.toml
--analysis wrong_kind.toml
--analysis wrong_field.toml
--analysis missing_field.toml
--analysis wrong_bounds.toml
--analysis good.toml
--analysis good.toml --no-loss --policy-option max_bits=4
--analysis ghost.toml --no-loss
--data data.npz
--data bad.npz --recipe aware.toml
--calibration missing.npy
--calibration bad.npz
--validation data.npz
--validation bad.npz --calibration data.npz
--recipe missing.toml
--recipe wrong.toml
--recipe int8.toml
--recipe aware.toml
--work run
--variants huge
--variants int8
--variants float,small
--seed -1
--engine torch:cpu
--engine abacus --data data.npz --recipe aware.toml
--self-test missing.npz
--self-test one.npy
--self-test bad.npz
--list colours
--key missing
""".strip().splitlines()
"""Wrong options beside --loss cross_entropy. "--fixed" takes a model of batch 5, "--no-loss" leaves the loss out."""
COMPRESS = """
--engine abacus --data data.npz --recipe aware.toml
--data bad.npz --recipe aware.toml
--calibration missing.npy
--calibration bad.npz
--validation bad.npz --calibration data.npz
--recipe missing.toml
--recipe wrong.toml
--recipe int8.toml
--recipe aware.toml
--seed -1
--target size<1parsec --validation data.npz
--target size<10kB
--trials 0
--minutes 1
""".strip().splitlines()
UNTRIED = {
    "-h", "--help", "--output", "--trainable", "--report", "--json", "--work", "--list",  # any path is right
    "--dropout", "--no-dropout",  # both are right
    "--weights", "--source-key", "--key",  # test_sources.py
    "--card",  # test_cards.py
    "--preprocess", "--preprocess-data",  # test_convert_preprocess.py
}  # fmt: skip
FILES = {
    "wrong.toml": "colour = 3\n",
    "broken.toml": "colour =",
    "wrong_kind.toml": '[[statistic]]\nkind = "mode"\n',
    "wrong_field.toml": '[[statistic]]\nkind = "mean"\ncolour = 3\n',
    "missing_field.toml": '[[statistic]]\nkind = "mean"\nname = "a"\nlow = 0\n',
    "wrong_bounds.toml": '[[statistic]]\nkind = "mean"\nname = "a"\nlow = 2\nhigh = 1\n',
    "ghost.toml": '[[statistic]]\nkind = "mean"\nname = "a"\nlow = 0\nhigh = 1\nof = "ghost"\n',
    "good.toml": '[[statistic]]\nkind = "mean"\nname = "a"\nlow = 0\nhigh = 1\n',
    "int8.toml": '[[part]]\nkind = "static_int8"\n',
    "aware.toml": '[[part]]\nkind = "quantization_aware"\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(3)
    for name, text in (("m.onnx", MODEL), ("fixed.onnx", FIXED)):
        model = parser.parse_model(text)
        for tensor, shape in {"w": (8, 3), "b": (3,)}.items():
            values = rng.standard_normal(shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(values, tensor))
        onnx.save(model, folder / name)
    x = rng.standard_normal((32, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, label=np.zeros(32, np.int64))
    np.savez(folder / "bad.npz", pixels=x)
    np.save(folder / "one.npy", x)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    b.save_private_key(b.generate_key(), folder / "key")
    return folder


@pytest.mark.parametrize("wrong", CONVERT)
@pytest.mark.sampled(every=6)
def test_convert(wrong: str, archipel: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    given = wrong.split(" ")
    source = "fixed.onnx" if "--fixed" in given else "m.onnx"
    loss = [] if {"--loss", "--no-loss"} & set(given) else ["--loss", "cross_entropy"]
    key = [] if "--key" in given else ["--key", "key"]
    given = [argument for argument in given if argument not in ("--fixed", "--no-loss")]
    check(archipel, "convert", source, "-o", str(tmp_path / "m.bundle"), *key, *loss, *given)


@pytest.mark.parametrize("wrong", COMPRESS)
@pytest.mark.sampled(every=6)
def test_compress(wrong: str, archipel: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    check(archipel, "compress", "m.onnx", "-o", str(tmp_path / "s.onnx"), *wrong.split(" "))


def check(archipel: Command, *arguments: str) -> None:
    try:
        _, err = archipel(*arguments, code=1)
    except AssertionError:
        _, err = archipel(*arguments, code=2)  # wrong usage, which click tells
        assert "Error: " in err
        return
    lines = [line for line in err.splitlines() if line.startswith("archipel: ")]
    assert len(lines) == 1, err
    assert not python_spelling(lines[0]), lines[0]


@pytest.mark.parametrize("group", GROUPS)
def test_every_argument_has_an_option_or_a_reason(group: str) -> None:
    listed = {*OPTIONS[group], *PYTHON_ONLY[group]}
    assert listed == set(GROUPS[group]), "complete OPTIONS or PYTHON_ONLY in archipel/cli/models/convert/spelling.py"
    assert not set(OPTIONS[group]) & set(PYTHON_ONLY[group])
    there = {name for parameter in convert_command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for option in OPTIONS[group].values():
        found = re.search(r"--[\w-]+", option)
        assert (found[0] if found else option.lower()) in there, option


def test_every_option_is_tried_below() -> None:
    for command, tried in ((convert_command, CONVERT), (compress_command, COMPRESS)):
        options = {parameter.opts[-1] for parameter in command.params if isinstance(parameter, click.Option)}
        assert options - {argument for case in tried for argument in case.split()} <= UNTRIED


@pytest.mark.sampled(every=3)
def test_every_error_text_is_spelled() -> None:
    """The texts in the source of everything behind `convert`, whether a test can make them come or not."""
    left = [
        f"{where}: {spelled(text, RULES)}"
        for where, text in error_texts()
        if python_spelling(spelled(text, RULES)) and not any(phrase in text for phrase in UNREACHABLE)
    ]
    assert not left, "add a rule to archipel/cli/models/convert/spelling.py"


UNREACHABLE = (
    "Model.from_torch", "torch module needs example=", "estimator needs example=", "a bundle must be signed",
    "step_options must be a mapping", "step_options: no option", "steps=", "strategy_options must be a mapping",
    "on_progress", "must be training.per_example",
    "dynamic_shapes=", "dynamic_batch=",  # of the code that exports the model
)  # fmt: skip
"""Texts of errors that no options bring about."""


def error_texts() -> Iterator[tuple[str, str]]:
    root = Path(archipel.__file__).parent
    files = [path for room in ("converter", "training", "strategies") for path in sorted((root / room).glob("*.py"))]
    for path in [*files, root / "graph/parameters.py", root / "bundle/validation.py"]:
        if path.name in ("former_keywords.py", "driver.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            for part in ast.walk(node.exc):
                if isinstance(part, ast.JoinedStr):
                    pieces = [str(v.value) if isinstance(v, ast.Constant) else "X" for v in part.values]
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    pieces = [part.value]
                else:
                    continue
                yield f"{path.name}:{node.lineno}", "".join(pieces)
