"""`archipel models`: what is listed is what the catalogue has."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from archipel.models.catalogue import CATALOGUE
from tests.support.commands import Command


def test_the_list(archipel: Command) -> None:
    out, _ = archipel("models", "list")
    head, *rows = out.splitlines()
    assert head.split()[:3] == ["parameters", "FLOPs", "network"]
    assert len(rows) == len(CATALOGUE)
    assert re.search(r"^ *11,689,512 +3\.63 G +resnet18 +image classification +3x224x224 ", out, re.M)
    # What a recipe reached is of the recipe's network, which may be smaller than the published one of the row.
    assert re.search(r"^ *124,439,808 .* loss 1\.769, tiny Shakespeare, .* \(817,920 parameters\)$", out, re.M)
    assert re.search(r"^ *61,706 .* lenet .* accuracy 0\.9091, Fashion-MNIST, test$", out, re.M)
    found = json.loads(archipel("models", "list", "--task", "keyword spotting", "--json")[0])
    assert [each["name"] for each in found] == ["bc_resnet", "ds_cnn"]
    _, err = archipel("models", "list", "--task", "chess", code=1)
    assert "--task chess: no network is for that; tasks are activity recognition," in err


def test_one_network(archipel: Command) -> None:
    out, _ = archipel("models", "show", "bert")
    for line in ("bert: text encoding", "  <- mask: int64[batch, 128] below 2", "  -> float32[batch, 768]",
                 "  109,482,240 parameters, 22,348,431,360 FLOPs per example"):  # fmt: skip
        assert f"{line}\n" in out
    facts = json.loads(archipel("models", "show", "bert", "--json")[0])
    assert (facts["parameters"], facts["outputs"]) == (109_482_240, [[128, 768], [768]])
    assert facts["inputs"][0] == {"name": "tokens", "dtype": "int64", "shape": [128]}
    _, err = archipel("models", "show", "brt", code=1)
    assert err == "archipel: no network 'brt' in the catalogue; did you mean 'bert'?\n"


def test_a_variant_of_a_recipe(archipel: Command) -> None:
    out, _ = archipel("models", "show", "ds_cnn", "--recipe", "--variant", "ecg")
    assert 'python = "archipel.datasets:ecg_beats"' in out
    assert (
        "another recipe: archipel models show ds_cnn --recipe --variant ecg\n"
        in archipel("models", "show", "ds_cnn")[0]
    )
    assert "--variant small: ds_cnn has ecg" in archipel("models", "show", "ds_cnn", "--recipe", "--variant", "small",
                                                         code=1)[1]  # fmt: skip
    assert "give both" in archipel("models", "show", "ds_cnn", "--variant", "ecg", code=1)[1]


@pytest.mark.sampled(every=4)
def test_it_needs_no_extra() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from archipel.cli.main import archipel as a;"
        "assert CliRunner().invoke(a, ['models', 'show', 'gpt']).exit_code == 0;"
        "print([m for m in ('onnx', 'torch', 'flask', 'onnxruntime') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
