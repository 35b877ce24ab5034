"""What commands that take a model open: a model file, a bundle with or without learned weights, a saved fit, a slot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from archipel.bundle import load_public_key
from archipel.bundle.foreign import recognize
from archipel.errors import CommandError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.learned import is_model_file, is_slot
from archipel.lite_runtime.runtime import open_runtime as open_learned

if TYPE_CHECKING:
    from archipel.converter.opened import Opened

_TEXT = "Learned parameters of a bundle (FILE of `archipel task download` or `archipel model download`)."

learned_weights = click.option("--weights", type=click.Path(path_type=Path), help=_TEXT)


def open_runtime(
    path: Path,
    key_files: Sequence[Path],
    folder: str,
    threads: int,
    delegates: Sequence[str],
    weights: Path | None = None,
) -> Runtime:
    """Load what `path` names, verified with one of the keys, so that it predicts.

    Arguments:
        path: a bundle (a folder or a .bundle file), what `archipel fit --save` wrote, a slot, or an ONNX file.
        key_files: public keys of publishers; an ONNX file needs none.
        folder: an existing folder that a .bundle file is unpacked below.
        threads: threads for one operator.
        delegates: execution providers in order; none: "auto".
        weights: a file of parameters that replace the bundle's.

    Raises:
        CommandError: a bundle without a key, an ONNX file with weights.
        BundleError: the bundle is damaged, or none of the keys signed it.
        ModelImportError: the ONNX file cannot be read.
    """
    keys = trusted_keys(path, key_files, weights)
    if is_model_file(path):
        import archipel.graph  # noqa: F401  (first: its error names the extra that is missing)
        from archipel.compression.bare_bundle import write_bare_bundle
        from archipel.compression.stored import read_stored

        bundle = Path(folder) / "file"
        keys = [write_bare_bundle(read_stored(path), bundle, path.stem)]
        path = bundle
    return open_learned(
        path, keys, threads=threads, delegates=list(delegates) or "auto", cache=Path(folder), weights=weights
    )


def open_source(
    path: Path, key_files: Sequence[Path], weights: Path | None, folder: str, own: Sequence[bytes] = ()
) -> Opened:
    """What `path` names as a model in float; `open_runtime` says what that may be, and describes the arguments.

    `own` are more publishers' public keys. Raises also ConversionError for a bundle without float parameters.
    """
    from archipel.converter.opened import open_opened

    return open_opened(path, [*trusted_keys(path, key_files, weights, own), *own], weights, folder)


def trusted_keys(
    path: Path, key_files: Sequence[Path], weights: Path | None = None, own: Sequence[bytes] = ()
) -> list[bytes]:
    """The keys in the files.

    Raises CommandError for a bundle without a key, for a model file with weights, and for what is neither.
    """
    if not is_slot(path) and (foreign := recognize(path)) is not None:
        raise CommandError(f"{path}: {foreign}")
    if not is_model_file(path):
        if not key_files and not own:
            raise CommandError(f"{path}: a bundle is opened with its publisher's key; give --key FILE.pub")
    elif weights is not None:
        raise CommandError(f"--weights are for a bundle; {path} has its own")
    return [load_public_key(file) for file in key_files]
