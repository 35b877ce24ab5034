"""`archipel verify --data`: a bundle whose `predict` answers something else than what devices train is not good."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archipel import bundle as b
from archipel.cli.models.agreement import AgreementOptions
from archipel.compression import StaticInt8
from archipel.converter import Compression, Signing, Training, convert
from archipel.graph import Model
from archipel.training import losses, optimizers
from tests.support.commands import Command

X = np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles calibrated on the data ("good") and on the data times 1e-3 ("bad"), a key, and the data."""
    folder = tmp_path_factory.mktemp("made")
    key = b.generate_key()
    b.save_private_key(key, folder / "k")
    b.save_public_key(key, folder / "k.pub")
    np.savez(folder / "data.npz", input=X)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 6)).eval()
    sgd = optimizers.sgd(lr=0.01)
    for name, scale, training in (
        ("good", 1.0, Training(losses.cross_entropy(), sgd)),
        ("bad", 1e-3, Training(losses.cross_entropy(), sgd)),
        ("bad-mse", 1e-3, Training(losses.mse(), sgd)),
        ("predict", 1.0, None),
    ):
        convert(
            Model.from_torch(module, X[:2]),
            folder / name,
            training=training,
            compression=Compression([StaticInt8()], calibration=X * np.float32(scale)),
            signing=Signing(key),
            min_snr=-100,
        )
    return folder


@pytest.fixture
def verify(archipel: Command, made: Path) -> Callable[..., Any]:
    def call(name: str, *options: str, code: int = 0) -> Any:
        return archipel("verify", str(made / name), "--key", str(made / "k.pub"), *options, code=code)

    return call


@pytest.mark.sampled(every=4)
def test_agreement_is_a_check(verify: Callable[..., Any], made: Path) -> None:
    out, _ = verify("good", "--data", str(made / "data.npz"))
    assert "ok       agreement: predict gives " in out
    assert "% of 64 examples the class that the training form gives them" in out


@pytest.mark.parametrize(
    ("name", "least", "bound"), [("bad", "80.0%", "--min-agreement"), ("bad-mse", "10 dB", "--min-snr")]
)
@pytest.mark.sampled(every=6)
def test_a_wrong_predict_fails(name: str, least: str, bound: str, verify: Callable[..., Any], made: Path) -> None:
    data = ["--data", str(made / "data.npz")]
    out, err = verify(name, *data, code=1)
    assert "FAILED   agreement: " in out
    assert f"expected at least {least}; convert the model with calibration examples like those of devices" in err
    out, _ = verify(name, *data, bound, "-99" if bound == "--min-snr" else "0.01")
    assert "ok       agreement: " in out


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", ["bad", "bad-mse"])
def test_a_wrong_predict_fails_without_data_too(name: str, verify: Callable[..., Any]) -> None:
    """By what the conversion measured. Of these, all calibration examples are in one class, or there are none."""
    out, err = verify(name, code=1)
    assert "FAILED   agreement: as the conversion measured, calibration: signal to noise " in out
    assert "dB, expected at least 10 dB; convert the model with calibration examples like those of devices" in err
    # Signature, graphs and self-test have nothing to say about it.
    assert "1 of " in err
    out, _ = verify(name, "--min-snr", "-99")
    assert "ok       agreement: as the conversion measured, predict and training form on the calibration " in out


def test_bounds_of_what_a_conversion_measured() -> None:
    bounds = AgreementOptions(min_agreement=0.8, min_snr=10.0)
    assert bounds.low({"agreement_calibration": 0.9, "snr_db_calibration": 3.0, "accuracy_after": 0.1}) == []
    assert bounds.low({"agreement_validation": 0.79, "snr_db_validation": 30.0, "snr_db_calibration": 9.0}) == [
        "calibration: signal to noise 9.0 dB, expected at least 10 dB",
        "validation: 79.0% equal classes, expected at least 80.0%",
    ]


def test_what_is_not_compared(verify: Callable[..., Any], made: Path) -> None:
    data = ["--data", str(made / "data.npz")]
    out, _ = verify("predict", *data)
    assert "skipped  agreement: devices do not train it, so there is no training form" in out
    out, _ = verify("bad", *data, "--no-run", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert checks["agreement"]["good"] is None


def test_a_wrong_file_is_told(verify: Callable[..., Any], tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", input=X[:, :5])
    _, err = verify("good", "--data", str(tmp_path / "wrong.npz"), code=1)
    assert "entry 'input' must be float32[batch, 8], is float32[64, 5]" in err
