"""Where model and data of `archipel up` come from, and whether a folder is for what is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

import click

from archipel.bundle.foreign import recognize
from archipel.cli.start.up.prepare import Plan, fingerprint
from archipel.errors import CommandError

MODEL_FILE, DATA_FILE, PROGRAM_FILE = Path("model.onnx"), Path("data.npz"), Path("federation.py")


def find_sources(model: Path | None, data: Path | None) -> tuple[Path, Path, str]:
    """Model, data, and the fingerprint of the program that has written them.

    Without `model` and `data` these are model.onnx and data.npz of this folder, which federation.py of `archipel new`
    writes anew, where it is there; else the fingerprint is empty. Raises CommandError.
    """
    if (model is None) != (data is None):
        raise CommandError("give both MODEL and DATA, such as: archipel up model.onnx data.npz")
    program = ""
    if model is None or data is None:
        model, data = MODEL_FILE, DATA_FILE
        if PROGRAM_FILE.is_file():
            program = fingerprint(PROGRAM_FILE)
            _write_sources()
        if not (model.exists() and data.exists()):
            raise CommandError("no MODEL and DATA: archipel up model.onnx data.npz (`archipel new` makes examples)")
    for path in (model, data):
        if not path.is_file():
            raise CommandError(f"{path}: {recognize(path) or 'no such file'}")
    return model, data, program


def check_same(folder: Path, found: Plan, given: Mapping[str, object], model: Path | None, data: Path | None) -> None:
    """Raise CommandError where another federation is in the folder than the one that is asked for.

    Arguments:
        folder: the federation's.
        found: its plan.
        given: the options that were given, by the names of the plan's fields.
        model, data: the files that were given; None: none.
    """
    differing = [
        f"--{name.replace('_', '-')}" for name in Plan.__struct_fields__
        if name in given and name not in ("model", "data") and given[name] != getattr(found, name)
    ]  # fmt: skip
    for name, file, before in (("MODEL", model, found.model), ("DATA", data, found.data)):
        if file is not None:
            if not file.is_file():
                raise CommandError(f"{file}: {recognize(file) or 'no such file'}")
            if fingerprint(file) != before:
                differing.append(name)
    changed = model is None and found.program and PROGRAM_FILE.is_file() and fingerprint(PROGRAM_FILE) != found.program
    if changed:
        differing.append(str(PROGRAM_FILE))
    if differing:
        without = "" if changed else f"; go on with it by `archipel up --folder {quote(str(folder))}`, or"
        raise CommandError(
            f"--folder {folder}: holds a federation with other {', '.join(differing)}{without or ';'} choose another "
            "--folder"
        )


_HINTS = {
    "data-dependent": " (forward decides by values in Python, of which a graph knows nothing: use torch.where)",
}
"""What to do, by a word of an error of a library."""


def _write_sources() -> None:
    """Call federation.py, which writes model and data. Raises CommandError."""
    click.echo(f"{PROGRAM_FILE}: writes {MODEL_FILE} and {DATA_FILE}")
    done = subprocess.run([sys.executable, str(PROGRAM_FILE)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode != 0:
        reason = told_reason(done.stderr.decode(errors="replace")) or f": ended with {done.returncode}"
        raise CommandError(f"{PROGRAM_FILE}{reason}; mend it, and run `python {PROGRAM_FILE}` to see more")


def told_reason(errors: str) -> str:
    """The line of federation.py where an error arose and the error, of what Python has written to stderr.

    It is the first error of a chain, since PyTorch's exporter, which comes last, only says that it did not succeed.
    Returns ", line N: ERROR", or ": ERROR" where no line is known, and what to do about errors that do not say it
    themselves; empty for an empty text.
    """
    first = errors.split("\nThe above exception was the direct cause of the following exception:\n")[0]
    _, begins, trace = first.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in trace.splitlines() if line.strip()]
    if not lines:
        return ""
    # Below the frames, which are indented. An error of syntax has no such head, and its line is the last.
    error = next((at for at, line in enumerate(lines) if begins and not line.startswith(" ")), len(lines) - 1)
    own = re.findall(rf'^  File "(?:.*/)?{re.escape(str(PROGRAM_FILE))}", line (\d+)', "\n".join(lines[:error]), re.M)
    hint = next((hint for word, hint in _HINTS.items() if word in lines[error]), "")
    return f"{f', line {own[-1]}' if own else ''}: {lines[error]}{hint}"
