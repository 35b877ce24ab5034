"""The slot folder: a bundle and what a device has learned on top of it; `load` opens it like a bundle.

SLOT/bundle/                the signed bundle, complete
SLOT/learned.safetensors    the tensors that differ from it: parameter/NAME, personal/NAME, state/NAME
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from archipel.bundle import Bundle, read_weights, write_weights
from archipel.durable import creating_folder, make_folder, sweep, write_durably
from archipel.errors import RuntimeInputError, TensorLayoutError

BUNDLE_FOLDER = "bundle"
LEARNED_FILE = "learned.safetensors"
MAX_LEARNED_BYTES = 2 << 30


def is_slot(path: Path) -> bool:
    """Whether `path` is a slot folder. A bundle's own folder is flat, so it cannot be taken for one."""
    return (path / BUNDLE_FOLDER).is_dir()


def is_model_file(path: Path) -> bool:
    """Whether an importer reads the file, such as an ONNX file, and `load` does not. Also true where there is none."""
    if path.is_dir() or path.suffix == ".bundle":
        return False
    return path.suffix == ".pt2" or not zipfile.is_zipfile(path)


def write_slot(folder: Path, bundle: Bundle, learned: Mapping[str, np.ndarray]) -> None:
    """Write a slot folder, or replace the learned file in one of the same bundle. After a kill at any time the folder
    has the old contents or the new ones. Raises RuntimeInputError if `folder` holds anything else, OSError.
    """
    folder = folder.absolute()
    # The bundle of an equal digest is the same bytes, so only one file has to be replaced, by a rename.
    check_slot(folder, bundle)
    if folder.exists():
        write_durably(folder / LEARNED_FILE, write_weights(learned))
        return
    # Only what a killed writer of this very name left: others may be writing beside it.
    make_folder(folder.parent)
    sweep(folder.parent, folder.name)
    with creating_folder(folder, 0o700) as staging:
        (staging / BUNDLE_FOLDER).mkdir()
        for name in sorted(path.name for path in bundle.folder.iterdir()):
            _copy(bundle.folder / name, staging / BUNDLE_FOLDER / name)
        write_durably(staging / LEARNED_FILE, write_weights(learned))


def check_slot(folder: Path, bundle: Bundle) -> None:
    """Raises RuntimeInputError where `folder` holds anything else than a slot of this bundle."""
    if not folder.exists() or (is_slot(folder) and _digest(folder) == bundle.digest):
        return
    what = "a model of another bundle" if is_slot(folder) else "something else"
    raise RuntimeInputError(f"{folder}: holds {what}; choose another name, or remove it first")


def read_learned(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a slot's learned file, {} without one. Raises TensorLayoutError."""
    path = folder / LEARNED_FILE
    return dict(read_weights(path, MAX_LEARNED_BYTES)) if path.exists() else {}


def read_parameters(weights: Path | str | Mapping[str, np.ndarray], bundle: Bundle) -> dict[str, np.ndarray]:
    """All parameters of the bundle, from a safetensors file or as they are given by name.

    Raises RuntimeInputError, which names the file and the tensor that is missing, unknown or of another shape.
    """
    if isinstance(weights, Mapping):
        where, arrays = "weights", dict(weights)
    else:
        where = str(weights)
        try:
            arrays = read_weights(Path(weights), MAX_LEARNED_BYTES)
        except TensorLayoutError as error:
            if not Path(weights).is_file():
                raise RuntimeInputError(f"{where}: no such file of weights") from None
            raise RuntimeInputError(f"{where}: not a safetensors file of weights ({error})") from None
    name, specs = bundle.manifest.name, {spec.name: spec for spec in bundle.manifest.parameters}
    for tensor, array in arrays.items():
        spec = specs.get(tensor)
        if spec is None:
            known = ", ".join(specs) or "none; it only predicts"
            raise RuntimeInputError(f"{where}: {tensor!r} is no parameter of bundle {name!r}, which has {known}")
        if array.shape != spec.shape or array.dtype.name != spec.dtype:
            raise RuntimeInputError(
                f"{where}: {tensor!r} is {array.dtype}{list(array.shape)}, but {spec.dtype}{list(spec.shape)} in "
                f"bundle {name!r}; give the bundle of the task that made these weights"
            )
    if missing := [tensor for tensor in specs if tensor not in arrays]:
        raise RuntimeInputError(f"{where}: has no {', '.join(missing)}, of the parameters of bundle {name!r}")
    return arrays


def join_names(groups: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """{group: {name: array}} -> {"group/name": array}."""
    return {f"{group}/{name}": array for group, arrays in groups.items() for name, array in arrays.items()}


def split_names(tensors: Mapping[str, np.ndarray], groups: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    """Inverse of `join_names`. Raises TensorLayoutError for a name in none of the groups."""
    arrays: dict[str, dict[str, np.ndarray]] = {group: {} for group in groups}
    for key, array in tensors.items():
        group, slash, name = key.partition("/")
        if group not in arrays or not slash:
            raise TensorLayoutError(f"tensor {key!r} is in none of the groups {', '.join(groups)}")
        arrays[group][name] = array
    return arrays


def _digest(folder: Path) -> str:
    import hashlib

    try:
        return hashlib.sha256((folder / BUNDLE_FOLDER / "manifest.json").read_bytes()).hexdigest()
    except OSError:
        return ""


def _copy(source: Path, target: Path) -> None:
    try:
        # A hard link takes no space. Both files are only ever replaced and never written to, so they stay equal.
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
