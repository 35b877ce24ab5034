"""Transforms from TOML, decoded strictly: errors name the entry."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.cli.input_output.settings import meanings, settings_of
from archipel.cli.models.convert.lists import list_text
from archipel.errors import PreprocessingError
from archipel.preprocessing import (
    TRANSFORMS,
    CropOrPad,
    Layout,
    LogMel,
    Normalize,
    Raw,
    Scale,
    chain,
    from_settings,
    load_settings,
    to_settings,
)
from archipel.preprocessing.transform import kind_of

TEXT = """
[[preprocess]]
kind = "raw"
dtype = "int16"
shape = ["batch", "samples"]

[[preprocess]]
kind = "crop_or_pad"
size = [16000]
axes = [1]
at = "start"

[[preprocess]]
kind = "scale"
divisor = 32768

[[preprocess]]
kind = "log_mel"
points = 512
hop = 160
bands = 40

[[preprocess]]
kind = "normalize"
mean = [-4.0]
std = [2.5]

[[preprocess]]
kind = "layout"
source = "NFT"
target = "N1TF"
"""


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "sound.toml").write_text(TEXT)
    assert load_settings(tmp_path / "sound.toml") == [
        Raw("int16", ("batch", "samples")),
        CropOrPad((16000,), (1,), "start"),
        Scale(32768.0),
        LogMel(points=512, hop=160, bands=40),
        Normalize((-4.0,), (2.5,)),
        Layout("NFT", "N1TF"),
    ]


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ([{"kind": "scale"}, {"kind": "blur"}], r"\[\[preprocess\]\] 2: kind is one of raw, cast, scale, "),
        ([{"kind": "scale", "divisors": 2}], r"1 \(scale\): .*unknown field `divisors`"),
        ([{"kind": "scale", "divisor": "2"}], r"1 \(scale\): Expected `float`, got `str` - at `\$.divisor`"),
        ([{"kind": "scale", "divisor": 0}], r"1 \(scale\): divisor is a number other than 0"),
        ([{"kind": "resize"}], r"1 \(resize\): .*missing required field `size`"),
        ([{"kind": "resize", "size": [8, 8, 8]}], r"1 \(resize\): .*length 2"),
        ([{"kind": "resize", "size": [0, 8]}], r"1 \(resize\): size is height and width, both 1 to"),
        ([{"kind": "resize", "size": [8, 8], "mode": "cubic"}], r"1 \(resize\): Invalid enum value 'cubic'"),
        ([{"kind": "raw", "dtype": "uint8", "shape": ["batch", -1]}], r"1 \(raw\): shape has sizes from 1 to"),
        ([{"kind": "raw", "dtype": "complex64", "shape": ["batch"]}], r"1 \(raw\): Invalid enum value 'complex64'"),
        ([{"kind": "normalize", "mean": [0.5], "std": [0.0]}], r"1 \(normalize\): std is above 0"),
        ([{"kind": "normalize", "mean": [float("nan")], "std": [1.0]}], r"1 \(normalize\): mean and std are finite"),
        ([{"kind": "log_mel", "points": 1 << 20}], r"1 \(log_mel\): points is even, at most 8192"),
        ([{"kind": "log_mel", "bands": 200}], r"1 \(log_mel\): band \d+ has no bin of 512 points; take fewer bands"),
        ([{"kind": "log_mel", "bands": 10**12}], r"1 \(log_mel\): bands is 1 to 257"),
        (
            [{"kind": "raw", "dtype": "uint8", "shape": ["batch", True]}],
            r"1 \(raw\): Expected `int \| str`, got `bool`",
        ),
        ([{"kind": "one_hot", "classes": 10**12}], r"1 \(one_hot\): classes is 1 to"),
        ([{"kind": "layout", "source": "NHW", "target": "NCHW"}], r"1 \(layout\): .* not the same letters"),
        (["scale"], r"1: expected a table with a kind, got str"),
        ({"kind": "scale"}, r"expected a list of tables, got dict"),
        ([{"kind": "scale"}] * 65, "65 entries, more than 64"),
    ],
)
def test_wrong_entries(tables: Any, problem: str) -> None:
    with pytest.raises(PreprocessingError, match=problem):
        from_settings(tables)


def test_the_list_of_the_command_line_says_what_each_field_means() -> None:
    """`archipel convert --list preprocess` reads it from the docstrings."""
    for kind in TRANSFORMS:
        assert set(settings_of(kind)) == set(kind.__struct_fields__) <= set(meanings(kind)), kind
    text = list_text("preprocess")
    assert "\nlog_mel\n" in text
    assert re.search(r"shape +\(needed\) +list of whole number or text\n", text)


numbers = st.one_of(st.integers(-(2**40), 2**40), st.floats(), st.integers(0, 70), st.floats(0.1, 2), st.booleans())
texts = st.sampled_from(["NHWC", "N1", "NCHW", "htk", "slaney", "area", "db", "start", "nearest", "float32", "", "x"])
values = st.one_of(numbers, texts, st.lists(st.one_of(numbers, texts), max_size=4))
tables = st.sampled_from(TRANSFORMS).flatmap(
    lambda kind: st.fixed_dictionaries(
        {"kind": st.just(kind_of(kind.__name__))}, optional=dict.fromkeys(kind.__struct_fields__, values)
    )
)


@given(tables)
@settings(max_examples=60)
@pytest.mark.sampled(every=4)
def test_any_table_is_read_or_refused(table: dict[str, Any]) -> None:
    """And what is read goes into a graph or is refused, in little time and memory."""
    try:
        transforms = from_settings([table])
    except PreprocessingError as refused:
        text = str(refused)
    else:
        assert from_settings(to_settings(transforms)) == transforms
        for raw in (Raw("float32", ("batch", 6, 6, 3)), Raw("int16", ("batch", "samples"))):
            try:
                chain([raw, *(part for part in transforms if not isinstance(part, Raw))])
            except PreprocessingError as refused:
                text = str(refused)
        return
    assert "\n" not in text
    assert table["kind"] in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kind = ", r"wrong.toml: not TOML"),
        ("", r"wrong.toml: expected a list of \[\[preprocess\]\] tables"),
        ("[[part]]\nkind = 'scale'\n", r"wrong.toml: expected a list .*unknown: 'part'"),
        ("[[preprocess]]\nkind = 'clip'\n", r"wrong.toml: \[\[preprocess\]\] 1 \(clip\): .*`low`"),
    ],
)
def test_wrong_files(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(PreprocessingError, match=problem):
        load_settings(tmp_path / "wrong.toml")
    with pytest.raises(PreprocessingError, match=r"absent\.toml: no such file"):
        load_settings(tmp_path / "absent.toml")
