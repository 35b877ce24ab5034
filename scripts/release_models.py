"""Write release files of trained networks: for each a signed release, float and int8, with cards, and SHA256SUMS.

    archipel models show mlp --recipe > mlp.toml; archipel train mlp.toml
    python scripts/release_models.py trained/mlp --key publisher --version 1

Reads each folder's model.onnx, whose card has the recipe, and through that the data, so run it where the recipe's paths
lead to them. Writes dist/models/NAME-VERSION/, which `archipel run` and `archipel slots install` take and of which a
device chooses what fits it. dist/ is not in git.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from archipel import Model
from archipel.bundle import SignedRelease, load_private_key
from archipel.cli.models.train.data import read_data
from archipel.cli.models.train.job import read_job
from archipel.converter import Signing, convert_variants, variant_recipes
from archipel.datasets import as_dataset
from archipel.errors import ArchipelError
from archipel.graph.model_card import card_of

CALIBRATION, VALIDATION = 500, 2000
"""Examples of the training data that set the ranges of int8, and of the validation data that measure the accuracy."""


def release(trained: Path, out: Path, signing: Signing, version: str) -> SignedRelease:
    """The release of one training's folder, as `out/NAME-VERSION`. Raises ArchipelError."""
    model = Model.from_onnx(trained / "model.onnx")
    card = card_of(model.ir)
    if card is None or not card.recipe:
        raise ArchipelError(f"{trained / 'model.onnx'}: has no card with a recipe; train it with `archipel train`")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{trained.name}.toml"
        file.write_text(card.recipe, encoding="utf-8")
        job = read_job(file, ())
    data = read_data(job)
    names = [port.name for port in model.inputs]
    classes = job.train.get("loss", "cross_entropy") == "cross_entropy" and len(model.outputs[0].shape) == 2
    calibration = _examples(data.train, names, job.train, CALIBRATION, False)
    validation = None if data.validation is None or not classes else _examples(
        data.validation, names, job.train, VALIDATION, True
    )  # fmt: skip
    path = out / f"{trained.name}-{version}"
    for variants in (["float", "int8"], ["float"]):
        made = variant_recipes(variants, calibration=calibration, validation=validation)
        try:
            return convert_variants(trained / "model.onnx", path, signing=signing, variants=made, name=trained.name)
        except ArchipelError as error:
            if variants == ["float"]:
                raise
            print(f"{trained.name}: float alone: {error}", file=sys.stderr)
    raise AssertionError


def _examples(data: Any, names: list[str], train: dict[str, Any], most: int, labelled: bool) -> dict[str, np.ndarray]:
    """Examples drawn from all of the data, under the model's names."""
    dataset = as_dataset(data)
    rows = np.sort(np.random.default_rng(0).permutation(len(dataset))[:most])  # type: ignore[arg-type]
    fields = dataset.take(rows)  # type: ignore[union-attr]
    inputs = list(train.get("inputs") or [name for name in fields if name != "label"])
    found = {own: fields[name] for own, name in zip(names, inputs, strict=True)}
    return {**found, "label": fields["label"]} if labelled else found


def main() -> None:
    """Release every folder that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trained", nargs="+", type=Path, help="folders that `archipel train` wrote")
    parser.add_argument("--key", required=True, type=Path, help="the publisher's private key, of `archipel keys`")
    parser.add_argument("--version", required=True, help="such as 1; part of the names")
    parser.add_argument("--out", type=Path, default=Path("dist/models"))
    arguments = parser.parse_args()
    signing = Signing(load_private_key(arguments.key))
    for folder in arguments.trained:
        made = release(folder, arguments.out, signing, arguments.version)
        for each in made.release.variants:
            accuracy = "" if each.accuracy is None else f", accuracy {each.accuracy:.4f} on validation examples"
            print(f"{folder.name}-{arguments.version}/{each.file}: {each.bytes:,} bytes{accuracy}")
    files = sorted(file for file in arguments.out.glob("*/*") if file.is_file())
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(arguments.out)}\n" for file in files]
    (arguments.out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
