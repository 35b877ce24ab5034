"""`archipel convert --variants`, and what `inspect`, `verify`, `run` and `slots install` make of a release."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.support.commands import Command

HIDDEN = 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network of two layers, keys, and examples that a linear rule labels."""
    from archipel.bundle import generate_key, save_private_key, save_public_key

    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    weights = {
        "first": rng.standard_normal((16, HIDDEN)), "bias": rng.standard_normal(HIDDEN),
        "second": rng.standard_normal((HIDDEN, 3)),
    }  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "first", "bias"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
         helper.make_node("MatMul", ["r", "second"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", 1, ["n", 16])], [helper.make_tensor_value_info("y", 1, ["n", 3])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), folder / "m.onnx")
    x = rng.standard_normal((200, 16)).astype(np.float32)
    y = (x @ rng.standard_normal((16, 3))).argmax(axis=1)
    np.savez(folder / "train.npz", x=x, label=y)
    np.savez(folder / "validation.npz", x=x[:50], label=y[:50])
    np.save(folder / "x.npy", x[:5])
    key = generate_key()
    save_private_key(key, folder / "k")
    save_public_key(key, folder / "k.pub")
    return folder


@pytest.fixture(scope="module")
def release(made: Path) -> Path:
    from click.testing import CliRunner

    from archipel.cli.models.convert.command import convert_command

    done = CliRunner().invoke(
        convert_command,
        [str(made / "m.onnx"), "-o", str(made / "net"), "--key", str(made / "k"), "--variants", "small,float,int8",
         "--data", str(made / "train.npz")],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "3 variants, best first" in done.output
    return made / "net"


def variants(archipel: Command, made: Path, release: Path) -> list[dict[str, object]]:
    facts = json.loads(archipel("inspect", str(release), "--key", str(made / "k.pub"), "--json")[0])
    assert (facts["kind"], facts["name"], facts["format"]) == ("release", "net", 1)
    found: list[dict[str, object]] = facts["variants"]
    return found


@pytest.mark.sampled(every=3)
def test_inspect_shows_a_table_of_the_variants(archipel: Command, made: Path, release: Path) -> None:
    float_, int8, small = variants(archipel, made, release)
    assert [each["name"] for each in (float_, int8, small)] == ["float", "int8", "small"]
    for each in (float_, int8, small):
        assert each["bytes"] == (release / f"{each['name']}.bundle").stat().st_size
    # By hand: two per multiply-accumulate, and nothing for the rest.
    assert float_["flops_per_example"] == 2 * 16 * HIDDEN + 2 * HIDDEN * 3
    # Inputs and weights stay; the largest moment has h and r, or r and y, beside them.
    assert float_["peak_bytes"] == 4 * (16 + 16 * HIDDEN + HIDDEN + HIDDEN * 3 + 2 * HIDDEN)
    assert int(str(small["flops_per_example"])) <= 0.55 * int(str(int8["flops_per_example"]))
    shown = archipel("inspect", str(release), "--key", str(made / "k.pub"))[0].splitlines()
    assert shown[0].startswith("release net  format 1  digest ")
    assert shown[2].split() == ["bytes", "memory", "FLOPs", "accuracy", "variant", "digest"]
    assert [line.split()[3:5] for line in shown[3:]] == [["-", "float"], ["-", "int8"], ["-", "small"]]
    err = archipel("inspect", str(release), code=1)[1]
    assert err == f"archipel: {release}: a bundle is opened with its publisher's key; give --key FILE.pub\n"
    assert "--unverified and --layers are for one bundle" in archipel("inspect", str(release), "--layers", code=1)[1]


def test_verify_checks_all_of_it(archipel: Command, made: Path, release: Path, tmp_path: Path) -> None:
    key = ("--key", str(made / "k.pub"))
    out = archipel("verify", str(release), *key, "--data", str(made / "x.npy"))[0].splitlines()
    assert {line.split(maxsplit=1)[0] for line in out[:-1] if "agreement" not in line} == {"ok"}
    assert sum("self-test" in line for line in out) == 3
    assert out[-1].startswith(f"{release}: good; 'net', digest ")
    copy = tmp_path / "net"
    shutil.copytree(release, copy)
    (copy / "extra").touch()
    (copy / "int8.bundle").unlink()
    err = archipel("verify", str(copy), *key, code=1)[1]
    assert "folder: extra: not in the release; remove it" in err
    assert "int8: bundle: " in err
    assert "cannot be read" in err
    (copy / "release.sig").write_bytes(bytes(64))
    answer = json.loads(archipel("verify", str(copy), *key, "--json", code=1)[0])
    assert [(each["name"], each["good"]) for each in answer["checks"]] == [("signature", False)]


def test_run_and_slots_take_the_best_that_fits(archipel: Command, made: Path, release: Path, tmp_path: Path) -> None:
    float_, int8, _ = variants(archipel, made, release)
    common = (str(release), "--key", str(made / "k.pub"))
    predict = ("run", *common, "--input", str(made / "x.npy"))
    out, err = archipel(*predict, "--output", str(tmp_path / "y.npz"))
    assert err.startswith("archipel: variant float of 'net' (")
    reference = onnx.reference.ReferenceEvaluator(str(made / "m.onnx")).run(None, {"x": np.load(made / "x.npy")})[0]
    with np.load(tmp_path / "y.npz") as answered:
        assert answered["y"] == pytest.approx(reference, abs=1e-4)
    _, err = archipel(*predict, "--max-bytes", str(int8["bytes"]), "--max-latency", "10000")
    assert err.startswith("archipel: variant int8 of 'net' (")
    assert f"not float: its file has {float_['bytes']:,} bytes" in err
    err = archipel(*predict, "--max-bytes", "10", "--max-memory", "20", "--max-latency", "0.5", code=1)[1]
    assert err.count("\n") == 1
    assert "(file of at most 10 bytes, memory of at most 20 bytes, latency of at most 0.5 ms): float: its" in err
    out, _ = archipel("slots", "install", str(tmp_path / "slots"), *common, "--max-bytes", str(int8["bytes"]))
    assert out.startswith("variant int8 of 'net' (")
    assert f"slot a: staged 'net', digest {int8['digest']}" in out
    bundle = str(release / "int8.bundle")
    err = archipel("run", bundle, *common[1:], "--input", str(made / "x.npy"), "--max-bytes", "9", code=1)[1]
    assert err == (
        f"archipel: {bundle}: not a release, so there is nothing to choose; leave out --max-bytes\n"
    )  # fmt: skip
    assert "a release of several bundles; name one of its .bundle files" in archipel("bench", *common, code=1)[1]


@pytest.mark.sampled(every=3)
def test_measured_accuracy_decides_the_order(archipel: Command, made: Path, tmp_path: Path) -> None:
    """The network is random, and the recipe trains it, so that the small variant has more right."""
    (tmp_path / "recipe.toml").write_text('[[part]]\nkind = "fine_tune"\nepochs = 20\nlr = 0.01\n')
    out, _ = archipel(
        "convert", str(made / "m.onnx"), "-o", str(tmp_path / "net"), "--key", str(made / "k"), "--variants",
        "float,small", "--data", str(made / "train.npz"), "--validation", str(made / "validation.npz"),
        "--loss", "cross_entropy", "--recipe", str(tmp_path / "recipe.toml"),
    )  # fmt: skip
    assert re.findall(r"^(.+): predict and training form on the (.+) examples: [0-9.]+% equal classes", out, re.M) == [
        ("small", "calibration"), ("small", "validation"),
    ]  # fmt: skip
    small, float_ = variants(archipel, made, tmp_path / "net")
    assert (small["name"], float_["name"]) == ("small", "float")
    with np.load(made / "validation.npz") as data:
        x, label = data["x"], data["label"]
    answers = onnx.reference.ReferenceEvaluator(str(made / "m.onnx")).run(None, {"x": x})[0]
    assert float_["accuracy"] == pytest.approx((answers.argmax(axis=1) == label).mean())
    assert float(str(small["accuracy"])) > float(str(float_["accuracy"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--variants", "float,tiny"), "--variants float,tiny: expected some of float, int8, small, each once"),
        (("--variants", "float,float"), "each once, with commas between"),
        (("--variants", "float,int8"), "int8 needs examples for the ranges of activations; give --calibration FILE or"),
        (
            ("--variants", "small", "--calibration", "none.npy"),
            "small removes channels and trains the rest again; give",
        ),
        (("--variants", "float", "--data", "none.npz"), "--variants float compresses nothing; leave out --data"),
        (("--variants", "float", "--recipe", "r.toml"), "--recipe with --variants is the recipe of the variant small"),
    ],
)
def test_what_is_missing_is_told_before_anything_is_read(
    archipel: Command, made: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    common = (str(made / "m.onnx"), "-o", str(tmp_path / "out"), "--key", str(made / "k"))
    err = archipel("convert", *common, *arguments, code=1)[1]
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_release_is_a_folder_and_appears_as_a_whole(archipel: Command, made: Path, tmp_path: Path) -> None:
    common = ("convert", str(made / "m.onnx"), "--key", str(made / "k"), "--variants")
    err = archipel(*common, "float", "-o", str(tmp_path / "net.bundle"), code=1)[1]
    assert "net.bundle: a release is a folder of several bundles; name it without .bundle" in err
    linear = tmp_path / "linear.onnx"
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "linear",
        [helper.make_tensor_value_info("x", 1, ["n", 16])], [helper.make_tensor_value_info("y", 1, ["n", 3])],
        [numpy_helper.from_array(np.ones((16, 3), np.float32), "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), linear)
    err = archipel(
        "convert", str(linear), "--key", str(made / "k"), "--variants", "float,small", "--data",
        str(made / "train.npz"), "-o", str(tmp_path / "net"), code=1,
    )[1]  # fmt: skip
    assert "variant 'small': " in err
    assert "or leave this variant out" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linear.onnx"]
