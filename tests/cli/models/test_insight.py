"""`archipel insight`: one file for a bundle, an ONNX file, a run and two models; the server answers."""

# ruff: noqa: F811 (fixtures are imported and then arguments)

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tensorboardX import SummaryWriter

from archipel.bundle import open_bundle, read_weights, write_weights
from archipel.simulation import simulate
from tests.support.commands import Command
from tests.support.development import place_development_key
from tests.support.fixtures.commands import archipel  # noqa: F401

BUNDLE = Path(__file__).resolve().parents[3] / "web/tests/fixtures/cnn.bundle"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    public = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()
    (tmp_path / "key.pub").write_text(public.hex())
    return tmp_path / "key.pub"


def data(path: Path) -> dict[str, Any]:
    """What a page shows."""
    found = re.search(r'id="data">(.*?)</script>', path.read_text(), re.S)
    assert found is not None
    page: dict[str, Any] = json.loads(found[1])
    return page


@pytest.mark.sampled(every=6)
def test_a_bundle_with_weights_of_rounds_and_examples(archipel: Command, tmp_path: Path, key: Path) -> None:
    tensors = open_bundle(BUNDLE, [bytes.fromhex(key.read_text())], tmp_path / "cache").parameters()
    (tmp_path / "rounds").mkdir()
    for number in (2, 10, 1):
        file = tmp_path / "rounds" / f"round-{number}.safetensors"
        file.write_bytes(write_weights({name: array * number for name, array in tensors.items()}))
    np.savez(tmp_path / "x.npz", input=np.ones((3, 1, 10, 10), np.float32))
    out, err = archipel(
        "insight", str(BUNDLE), "--key", str(key), "--weights", str(tmp_path / "rounds"), "--examples",
        str(tmp_path / "x.npz"), "--passes", "2", "--batch", "4", "-o", str(tmp_path / "page.html"),
    )  # fmt: skip
    assert out == f"written to {tmp_path / 'page.html'}\n"
    assert "measuring predict of cnn.bundle: 2 passes" in err
    page = data(tmp_path / "page.html")
    [subject] = page["subjects"]
    assert dict(subject["facts"])["signature"] == "verified"
    predict = subject["graphs"][0]
    assert predict["times"]["runs"] == 2
    assert predict["memory"]["batch"] == 4
    weights = {each["name"]: each["steps"] for each in page["histograms"] if each["kind"] == "weights"}
    labels = ["as it is", "round-1", "round-2", "round-10"]
    assert {name: [step["label"] for step in steps] for name, steps in weights.items()} == dict.fromkeys(
        tensors, labels
    )
    mean = float(tensors["4.weight"].mean(dtype=np.float64))
    assert [step["statistics"]["mean"] for step in weights["4.weight"]] == pytest.approx(
        [mean, mean, 2 * mean, 10 * mean], rel=1e-4
    )
    assert {each["kind"] for each in page["histograms"]} == {"weights", "activations"}


def test_a_run(archipel: Command, tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_scalar("loss", 0.5, 3)
    archipel("insight", str(tmp_path / "run"), "-o", str(tmp_path / "page.html"))
    [curve] = data(tmp_path / "page.html")["curves"]
    assert (curve["name"], curve["steps"], curve["values"]) == ("loss", [3], [0.5])


@pytest.mark.sampled(every=4)
def test_a_simulation_with_its_model_and_what_it_had_after_each_round(
    archipel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    place_development_key(tmp_path / "config")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 3), np.float32), rng.integers(0, 2, 40)
    np.savez(tmp_path / "x.npz", input=x)
    network = torch.nn.Linear(3, 2)
    run, page = tmp_path / "run", tmp_path / "page.html"
    simulate(network, [(x[:20], y[:20]), (x[20:], y[20:])], rounds=3, folder=run, keep_rounds=True, client_axis="off")
    archipel("insight", str(run), "--no-times", "--examples", str(tmp_path / "x.npz"), "-o", str(page))
    shown = data(page)
    series = {(each["kind"], each["name"]): each["steps"] for each in shown["histograms"]}
    assert {tuple(step["label"] for step in steps) for steps in series.values()} == {("round-1", "round-2", "round-3")}
    # What the network answers after each round, which PyTorch computes of the weights that are kept.
    [answers] = [steps for (kind, _), steps in series.items() if kind == "activations"]
    for number, step in enumerate(answers, 1):
        weights = read_weights(run / f"versions/round-{number}.safetensors")
        expected = x @ weights["weight"].T + weights["bias"]
        assert step["statistics"]["mean"] == pytest.approx(float(expected.mean()), rel=1e-4, abs=1e-6)
    assert {graph["name"] for graph in shown["subjects"][0]["graphs"]} >= {"predict", "train"}
    # Somebody else's: the curves are there, and why the model is not; the key beside it opens it.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    archipel("insight", str(run), "-o", str(page))
    assert data(page)["curves"]
    assert "the model is not shown: " in data(page)["notes"][0]
    [public] = run.glob("*.pub")
    archipel("insight", str(run), "--no-times", "--key", str(public), "-o", str(page))
    assert data(page)["subjects"][0]["graphs"]
    (run / public.with_suffix(".bundle").name).unlink()
    _, error = archipel("insight", str(run), "--examples", str(tmp_path / "x.npz"), "-o", str(page), code=1)
    assert f"{run} has no model that could compute with them; give one with the run's weights" in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{bundle}", "-o", "{tmp}/x.html"], "a bundle is opened with its publisher's key"),
        (["{bundle}", "--key", "{key}", "-o", "{tmp}/x.png"], "expected a name that ends in .html"),
        (["{bundle}", "--key", "{key}", "--program", "nothing", "-o", "{tmp}/x.html"], "it has: evaluate, finish"),
        (["{tmp}", "-o", "{tmp}/x.html"], "nothing to show"),
        (["{tmp}/none.onnx"], "no such file"),
        (["{tmp}/rounds.csv"], "a file of a run is shown with its folder, "),
        (["{tmp}", "{bundle}"], "a run is shown as a whole"),
    ],
)
def test_what_is_refused(
    archipel: Command,
    tmp_path: Path,
    key: Path,
    arguments: list[str],
    told: str,
) -> None:
    places = {"bundle": BUNDLE, "tmp": tmp_path, "key": key}
    _, err = archipel("insight", *(each.format(**places) for each in arguments), code=1)
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.sampled(every=4)
def test_the_server(tmp_path: Path, key: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "archipel",
        "insight",
        str(BUNDLE),
        "--key",
        str(key),
        "--no-times",
        "--no-browser",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=None) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.split()[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{22}/", address), line
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert "script-src 'sha256-" in answer.headers["Content-Security-Policy"]
            assert b"0.weight" in answer.read()
        process.terminate()
