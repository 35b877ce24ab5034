"""What commands that take a model open: a model file, a bundle with or without learned weights, a saved fit, a slot."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from archipel.bundle import Bundle
from archipel.bundle.foreign import recognize
from archipel.cli.input_output.publisher_keys import remedy_of, tell_development, trusted_keys
from archipel.errors import BundleError, CommandError, ModelImportError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.learned import is_model_file, is_slot
from archipel.lite_runtime.runtime import open_runtime as open_learned

if TYPE_CHECKING:
    from archipel.graph import Model

learned_weights = click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="Learned parameters of a bundle (FILE of `archipel task download` or `archipel model download`).",
)


class Source(NamedTuple):
    """A model in float, and the bundle that it comes from, None for a model file."""

    model: Model
    bundle: Bundle | None


def has_bundle(path: Path, weights: Path | None = None) -> bool:
    """Whether there is a bundle at `path`, and not a model file, which nobody signs.

    Raises CommandError for what is neither, and for weights that a model file cannot have.
    """
    if not path.exists():
        raise CommandError(f"{path}: no such file; expected a bundle (a folder or a .bundle file) or an ONNX file")
    if not is_slot(path) and (foreign := recognize(path)) is not None:
        raise CommandError(f"{path}: {foreign}")
    if not is_model_file(path):
        return True
    if weights is not None:
        raise CommandError(f"--weights are for a bundle; {path} has its own")
    return False


def open_runtime(
    path: Path,
    key_files: Sequence[Path],
    folder: str,
    threads: int = 1,
    delegates: Sequence[str] = (),
    weights: Path | None = None,
    own: Sequence[bytes] = (),
) -> Runtime:
    """Load what `path` names, verified with one of the keys, so that it predicts.

    Arguments:
        path: a bundle (a folder or a .bundle file), what `archipel fit --save` wrote, a slot, or an ONNX file.
        key_files: public keys of publishers; none: the user's development key. An ONNX file needs none.
        folder: an existing folder that a .bundle file is unpacked below.
        threads: threads for one operator.
        delegates: execution providers in order; none: "auto".
        weights: a file of parameters that replace the bundle's.
        own: public keys that take the place of the development key.

    Raises:
        CommandError: a bundle without a key, an ONNX file with weights.
        BundleError: the bundle is damaged, or none of the keys signed it.
        ModelImportError: the ONNX file cannot be read.
    """
    if has_bundle(path, weights):
        keys = list(own) if own and not key_files else trusted_keys(path, key_files)
        with nullcontext() if own else remedy_of(key_files):
            runtime = open_learned(
                path, keys, threads=threads, delegates=list(delegates) or "auto", cache=Path(folder),
                allow_development=True, weights=weights,
            )  # fmt: skip
        tell_development(runtime.bundle.publisher)
        return runtime
    model = read_file(path)
    from archipel.compression.bare_bundle import write_bare_bundle

    bare = Path(folder) / "file"
    try:
        key = write_bare_bundle(model, bare, path.stem)
    except BundleError as error:
        raise CommandError(f"{path}: {error}") from None
    return open_learned(bare, [key], threads=threads, delegates=list(delegates) or "auto")


def read_file(path: Path) -> Model:
    """The graph in an ONNX file as it is, which has tensors of numbers alone. Raises CommandError, ModelImportError."""
    import archipel.graph  # noqa: F401  (first: its error names the extra that is missing)
    from archipel.compression.stored import read_stored
    from archipel.graph.check import refuse_types

    model = read_stored(path)
    try:
        refuse_types(model.ir)
    except ModelImportError as error:
        raise CommandError(f"{path}: {error}") from None
    return model


def open_source(
    path: Path, key_files: Sequence[Path], weights: Path | None, folder: str, own: Sequence[bytes] = ()
) -> Source:
    """What `path` names as a model in float; `open_runtime` says what that may be, and describes the arguments.

    Raises also ConversionError for a bundle without float parameters.
    """
    from archipel.converter.opened import open_model, source_model

    if not has_bundle(path, weights):
        return Source(open_model(path), None)
    runtime = open_runtime(path, key_files, folder, weights=weights, own=own)
    return Source(source_model(runtime), runtime.bundle)
