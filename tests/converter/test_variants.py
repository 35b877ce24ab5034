"""`convert_variants`: the bundles are those that `convert` makes, all arguments are checked first, all or nothing."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import parser, save

from archipel.bundle import generate_key
from archipel.compression import DynamicInt8, StaticInt8, WeightOnly
from archipel.compression.work import Progress
from archipel.converter import Compression, Signing, Training, convert, convert_variants, variant_recipes
from archipel.errors import CompressionError, ConversionError, ManifestError
from archipel.lite_runtime import load
from archipel.training import losses, optimizers

X = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
Y = np.arange(40) % 3
TRAINING = Training(losses.cross_entropy(), optimizers.sgd(lr=0.1))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    weights = ", ".join(str(round(float(value), 3)) for value in np.random.default_rng(1).standard_normal(12))
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    net (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w = {{{weights}}}> {{ y = MatMul(x, w) }}"""
    save(parser.parse_model(text), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return generate_key()


@pytest.mark.sampled(every=4)
def test_the_bundles_are_those_of_convert(source: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    signing = Signing(key, sequence=4, populations=["staff"])
    int8 = Compression([StaticInt8()], calibration=X)
    made = convert_variants(
        source, tmp_path / "net", signing=signing, training=TRAINING, variants={"float": None, "int8": int8}
    )
    assert sorted(path.name for path in made.folder.iterdir()) == [
        "float.bundle", "int8.bundle", "release.json", "release.sig",
    ]  # fmt: skip
    for name, compression in {"float": None, "int8": int8}.items():
        alone = tmp_path / "alone" / f"{name}.bundle"
        convert(source, alone, signing=signing, training=TRAINING, compression=compression, name="net")
        file = made.folder / f"{name}.bundle"
        assert file.read_bytes() == alone.read_bytes()
        assert made.release.variant(name).sha256 == hashlib.sha256(alone.read_bytes()).hexdigest()
    # The manifest's limits are those of training, and more than a prediction of one example needs.
    limits = made.open("float", tmp_path / "cache").manifest.limits
    # By hand: x, w and y of one example.
    assert made.release.variant("float").peak_bytes == 4 * (4 + 12 + 3) < limits.peak_bytes
    assert made.release.variant("float").flops_per_example == 2 * 12 < limits.flops_per_example


@pytest.mark.sampled(every=3)
def test_every_variant_trains(source: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    usual = variant_recipes(["int8", "float"], data=(X, Y))
    made = convert_variants(source, tmp_path / "net", signing=Signing(key), training=TRAINING, variants=usual)
    assert [each.name for each in made.release.variants] == ["float", "int8"]
    for each in made.release.variants:
        bundle = made.open(each.name, tmp_path / "cache")
        runtime = load(bundle.folder, [key.public_key().public_bytes_raw()])
        before = runtime.predict(X)
        history = runtime.fit(X, Y, epochs=8, batch_size=8, hyperparameters={"lr": 0.1})
        assert history.losses[-1] < history.losses[0]
        assert not np.array_equal(runtime.predict(X), before)


def test_the_usual_variants_come_best_first_and_have_folders_of_their_own(tmp_path: Path) -> None:
    recipes = variant_recipes(["small", "int8"], data=(X, Y), folder=tmp_path / "work", seed=3)
    assert list(recipes) == ["int8", "small"]
    assert [each and (each.folder, each.seed) for each in recipes.values()] == [
        (tmp_path / "work" / "int8", 3), (tmp_path / "work" / "small", 3),
    ]  # fmt: skip
    assert [[type(part).__name__ for part in each.parts] for each in recipes.values() if each] == [
        ["StaticInt8"], ["PruneChannels", "StaticInt8"],
    ]  # fmt: skip
    own = variant_recipes(["small"], small=[WeightOnly()])["small"]
    assert own is not None
    assert own.parts == (WeightOnly(),)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("float", {}, "expected some of float, int8, small, each at most once, got float"),
        ([], {}, "got none"),
        (["tiny"], {}, "got tiny"),
        (["int8", "int8"], {}, "got int8, int8"),
        (["int8"], {}, r"variant 'int8': part 1 of the recipe, StaticInt8: StaticInt8 needs calibration data; pass"),
        (["small"], {"calibration": X}, r"variant 'small': .* PruneChannels needs training data; pass data="),
    ],
)
def test_recipes_that_are_none(names: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        variant_recipes(names, **options)


def test_all_or_nothing(source: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    """What is wrong is told before the first compression; what fails later, or is stopped, leaves nothing."""
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        raise KeyboardInterrupt

    first = Compression([StaticInt8()], calibration=X, on_progress=stop)
    wrong: list[tuple[dict[str, Any], str, type[Exception]]] = [
        ({"variants": {}}, "expected 1 to 16, got 0", ConversionError),
        ({"variants": {"a": first, "../b": None}}, "variant name '../b'", ManifestError),
        ({"variants": {"a": first, "b": "int8"}}, "variant 'b': compression: expected", ConversionError),
        ({"variants": {"a": first}, "path": tmp_path / "x.bundle"}, "x.bundle: a release is a folder", ConversionError),
        ({"variants": {"a": first}, "path": source}, "exists already", ConversionError),
    ]
    for changes, message, error in wrong:
        with pytest.raises(error, match=re.escape(message)):
            convert_variants(source, **{"path": tmp_path / "net", "signing": Signing(key), **changes})
    assert not seen
    with pytest.raises(KeyboardInterrupt):
        convert_variants(source, tmp_path / "net", signing=Signing(key), variants={"float": None, "int8": first})
    assert seen
    same = {"a": Compression([DynamicInt8()]), "b": Compression([DynamicInt8()])}
    with pytest.raises(ManifestError, match="two variants have the same digest"):
        convert_variants(source, tmp_path / "net", signing=Signing(key), variants=same)
    with pytest.raises(CompressionError):  # where no variant is named, its own class is kept
        Compression([StaticInt8()])
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
