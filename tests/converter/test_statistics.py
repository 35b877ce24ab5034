"""Statistics as programs: the device's sums are NumPy's, and impossible ones are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from archipel import Model, convert
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.converter import Analysis, Histogram, Mean, Quantiles, Signing, Sum
from archipel.converter.statistics import AnyStatistic
from archipel.errors import ConversionError
from archipel.lite_runtime import Runtime
from archipel.protocol.vector import Layout

PRIVACY = PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.67, max_clip=10.0, max_bits=20)


class Brightness(torch.nn.Module):
    """Mean and largest value of each picture."""

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return picture.mean(dim=(1, 2)), picture.amax(dim=(1, 2))


def bundle(folder: Path, statistics: Sequence[AnyStatistic], **more: Any) -> Bundle:
    return convert(
        Brightness(), folder / "look", example=torch.rand(4, 3, 3), analysis=Analysis(statistics, **more),
        privacy=PRIVACY, signing=Signing(generate_key()),
    )  # fmt: skip


@pytest.mark.sampled(every=4)
def test_the_sums_of_a_device_are_those_of_numpy(tmp_path: Path) -> None:
    outputs = outputs_of()
    made = bundle(
        tmp_path,
        [
            Mean(name="light", of=outputs[0], low=0, high=0.5),
            Sum(name="peak", of=outputs[1], low=-1, high=1),
            Histogram(name="spread", of=outputs[0], edges=[0.4, 0.5, 0.6]),
            Quantiles(name="peaks", of=outputs[1], edges=np.linspace(0, 1, 21), probabilities=[0.5]),
        ],
    )
    pictures = np.random.default_rng(0).random((300, 3, 3), np.float32)
    # 300 examples in batches of 256 and 44: the sums of both.
    arrays, count = Runtime(made).analyze({made.program("analyze").inputs[0].name: pictures})
    light, peak = pictures.mean((1, 2)), pictures.max((1, 2))
    assert count == 300
    assert arrays["light/sum"] == pytest.approx(np.clip(light, 0, 0.5).sum(), rel=1e-5)
    assert arrays["light/count"] == 300
    assert arrays["peak/sum"] == pytest.approx(peak.sum(), rel=1e-5)
    bins = [-np.inf, 0.4, 0.5, 0.6, np.inf]
    np.testing.assert_array_equal(arrays["spread/histogram"], np.histogram(light, bins)[0])
    assert arrays["peaks/histogram"].shape == (22,)
    assert [each.kind for each in made.manifest.statistics] == ["mean", "sum", "histogram", "quantiles"]


def test_several_values_of_an_example_stay_within_their_range(tmp_path: Path) -> None:
    """Each of at most 10 examples has 9 values: all of them count, and no count is cut off."""

    class Pixels(torch.nn.Module):
        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            return picture * 2.0

    made = convert(
        Pixels(), tmp_path / "look", example=torch.rand(4, 3, 3), privacy=PRIVACY, signing=Signing(generate_key()),
        analysis=Analysis([Mean(name="light", low=0, high=1), Histogram(name="spread", edges=[0.5])], max_examples=10),
    )  # fmt: skip
    ports = {port.name: port for port in made.program("analyze").outputs}
    assert ports["light/sum"].range == 90.0
    # 90 needs seven bits, and one more is the sign.
    assert (ports["light/count"].bits, ports["spread/histogram"].bits) == (8, 8)
    arrays, _ = Runtime(made).analyze({made.program("analyze").inputs[0].name: np.ones((10, 3, 3), np.float32)})
    checked = Layout.of(made.program("analyze")).encode(arrays, modulus_bits=32, max_cohort=1)
    decoded = Layout.of(made.program("analyze")).decode_sum(checked, cohort=1, modulus_bits=32)
    assert float(decoded.values["light/count"]) == 90
    assert float(decoded.values["light/sum"]) == pytest.approx(90, rel=1e-5)
    assert decoded.values["spread/histogram"].tolist() == [0, 90]


def test_as_many_values_as_an_example_has_must_be_fixed(tmp_path: Path) -> None:
    graph = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, words] x) => (float[n, words] y) { y = Add (x, x) }'
    )
    with pytest.raises(ConversionError, match=r"statistic 'a': output 'y' has .*'words'.* for each example"):
        convert(
            Model.from_proto(graph), tmp_path / "look", privacy=PRIVACY, signing=Signing(generate_key()),
            analysis=Analysis([Sum(name="a", low=0, high=1)]),
        )  # fmt: skip


def outputs_of() -> list[str]:
    return [info.name for info in Model.from_torch(Brightness(), torch.rand(4, 3, 3)).outputs]


@pytest.mark.parametrize(
    ("statistic", "words"),
    [
        (Sum(name="a", low=0, high=1, of="0"), "of='0'"),
        (Sum(name="a", low=0, high=1), "of=''"),
        (Histogram(name="a", edges=[0.5]), "of=''"),
    ],
)
@pytest.mark.sampled(every=6)
def test_a_statistic_of_nothing_is_refused(tmp_path: Path, statistic: AnyStatistic, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        bundle(tmp_path, [statistic])


def test_bounds_that_cannot_be_are_refused(tmp_path: Path) -> None:
    first = outputs_of()[0]
    for statistics, words in (
        ([Sum(name="a", low=1, high=1, of=first)], "not below"),
        ([Sum(name="a", low=0, high=float("nan"), of=first)], "not below"),
        ([Histogram(name="a", edges=[2, 1], of=first)], "grow"),
        ([Quantiles(name="a", edges=[1, 2], probabilities=[1.5], of=first)], "probabilities"),
        ([Sum(name="a", low=0, high=1, of=first), Mean(name="a", low=0, high=1, of=first)], "two"),
    ):
        with pytest.raises(ConversionError, match=words):
            bundle(tmp_path, statistics)
    with pytest.raises(ConversionError, match="max_examples"):
        bundle(tmp_path, [Mean(name="a", low=0, high=1, of=first)], max_examples=1 << 20)
