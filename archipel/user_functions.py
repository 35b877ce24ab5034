"""Functions of the user's own that files of settings name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from archipel.errors import ArchipelError, CommandError


def load_function(name: str, key: str, folder: Path | None = None) -> Callable[..., Any]:
    """A function of the user's, `module:function` or `file.py:function`. It runs the module's code.

    `folder` is where files lie; None: where you are.

    Raises CommandError that names the key, also for what the code of the module raises.
    """
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise CommandError(f"{key}: expected module:function or file.py:function, got {name!r}")
    if where.endswith(".py"):
        path = Path(where) if folder is None else folder / where
        if not path.is_file():
            raise CommandError(f"{key}: {path}: no such file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # where dataclasses and pickle look for it
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise _in_one_line(error, key, name, str(path)) from error
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise CommandError(f"{key}: {error}; give file.py:function for a file") from None
    found = getattr(module, function, None)
    if not callable(found):
        raise CommandError(f"{key}: {where} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def check_arguments(function: Callable[..., Any], name: str, arguments: Mapping[str, Any], key: str) -> None:
    """Raise CommandError for arguments that the function does not have, and for those that it needs."""
    try:
        known = inspect.signature(function).parameters.values()
    except ValueError:  # some functions in C do not tell
        return
    named = [each.name for each in known if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for argument in arguments:
        if argument not in named and not any(each.kind is each.VAR_KEYWORD for each in known):
            raise CommandError(f"{key}.{argument}: {name} has no such argument; it has {', '.join(named) or 'none'}")
    for each in known:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) or each.default is not each.empty:
            continue
        if each.kind is each.POSITIONAL_ONLY:
            raise CommandError(f"{key.partition('.')[0]}.python: {name} takes {each.name!r} by position; give a "
                               "function whose arguments have names")  # fmt: skip
        if each.name not in arguments:
            raise CommandError(f"{key}: {name} needs {each.name!r}; give it in the table [{key}]")


def call_function(function: Callable[..., Any], name: str, arguments: Mapping[str, Any], key: str) -> Any:
    """What the user's function returns. Raises CommandError that names the key and the line of the user's file."""
    try:
        return function(**arguments)
    except Exception as error:
        code = getattr(function, "__code__", None)
        raise _in_one_line(error, key, name, None if code is None else code.co_filename) from error


def _in_one_line(error: Exception, key: str, name: str, file: str | None) -> Exception:
    """The error of the user's code with the line of `file` where it arose, which is the one to look at.

    archipel's own errors stay as they are, and so do those of which the command line says more: an extra that is not
    installed, and memory that was not enough.
    """
    if isinstance(error, ArchipelError | ModuleNotFoundError | MemoryError):
        return error
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    where = f"{name.rpartition(':')[0]}, line {lines[-1]}" if lines else name
    reason = (str(error).strip().splitlines() or [""])[0]
    return CommandError(f"{key}: {where}: {type(error).__name__}{f': {reason}' if reason else ''}")
