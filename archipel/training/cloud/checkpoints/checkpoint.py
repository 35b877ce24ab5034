"""The checkpoint of a training: one file, from which a killed training continues to the results of one that was not.

A write replaces the file as a whole or not at all. The file holds tensors, numbers and strings only, and is read with
PyTorch's unpickler for these ("weights_only"), since a general one would run code from the file.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archipel.durable import is_full, reason_of, write_durably
from archipel.errors import CheckpointError
from archipel.library_errors import one_line
from archipel.zips import ZIP_ERRORS

FORMAT = "archipel cloud training 2"

# The errors that PyTorch's unpickler raises for damaged bytes.
_UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    pickle.UnpicklingError,
)
_REMEDY = "delete it to begin again, or name another folder"


def write_checkpoint(path: Path, made_with: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Replace the file.

    Arguments:
        path: the file; its folder is made.
        made_with: the facts that must be equal for a training to continue from it.
        content: tensors, numbers and texts in dicts and lists.

    Raises CheckpointError if it cannot be written.
    """
    import torch

    buffer = io.BytesIO()
    # In memory, so that the file is replaced by complete bytes.
    torch.save({"format": FORMAT, "made_with": dict(made_with), **content}, buffer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, buffer.getvalue())
    except OSError as error:
        remedy = "" if is_full(error) else "; choose another folder"
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason_of(error)}{remedy}") from error


def _check_archive(path: Path) -> None:
    """Refuse damaged bytes, which PyTorch's reader takes as they are, and packed ones, which may unpack to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise damaged(path, "its members are compressed, which PyTorch's are not")
            broken = archive.testzip()
    except ZIP_ERRORS as error:
        raise damaged(path, one_line(error)) from error
    if broken is not None:
        raise damaged(path, f"bytes of {broken} have changed")


def read_checkpoint(path: Path, made_with: Mapping[str, Any]) -> dict[str, Any]:
    """What was written, with tensors on the CPU.

    Raises CheckpointError if the file cannot be read or belongs to another training.
    """
    import torch

    # Before `torch.load`, which would try an older format for a file that is no zip.
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a checkpoint of a training (no zip file); {_REMEDY}")
    _check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Its own text advises to load the file without the check, which would run the file's code.
        raise CheckpointError(
            f"the checkpoint {path} cannot be read (it holds more than tensors, numbers and texts); {_REMEDY}"
        ) from error
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"the checkpoint {path} cannot be read ({reason}); {_REMEDY}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of a training ({FORMAT!r}); {_REMEDY}")
    written_with = content.get("made_with")
    if not isinstance(written_with, dict):
        raise damaged(path, "made_with is missing")
    # Before any state is restored: the checkpoint of another training must leave the module unchanged.
    for name in sorted({*made_with, *written_with}):
        if made_with.get(name) != written_with.get(name):
            raise CheckpointError(
                f"the checkpoint {path} is of another training: {name} was {written_with.get(name)} there, "
                f"is {made_with.get(name)} here; {_REMEDY}"
            )
    return content


def damaged(path: Path, reason: object) -> CheckpointError:
    """The error for a file that lacks something."""
    return CheckpointError(f"the checkpoint {path} is damaged ({reason}); {_REMEDY}")
