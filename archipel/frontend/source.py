"""Finds the syntax tree of a Python function, with the lines and columns of its file."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from archipel.errors import FunctionError

Definition = ast.FunctionDef | ast.Lambda


@dataclass(frozen=True)
class Source:
    """The file that a function is in."""

    file: str

    def error(self, node: ast.AST, text: str, calls: tuple[str, ...] = ()) -> FunctionError:
        """The error at a node of the syntax tree. `calls`: those that led to it, "name (file:line)", inner first."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        code = linecache.getline(self.file, line).strip()
        chain = "".join(f", called from {call}" for call in calls)
        return FunctionError(f"{shown(self.file)}:{line}:{column}: {text}{chain}\n    {code}", self.file, line, column)


def shown(file: str) -> str:
    """The path as an error shows it: from the working directory where the file is in there."""
    near = os.path.relpath(file) if os.path.isabs(file) else file
    return file if near.startswith("..") else near


def definition_of(function: Callable[..., Any]) -> tuple[Definition, Source]:
    """The syntax tree of a plain Python function or lambda. Raises FunctionError where there is none."""
    code: CodeType = function.__code__
    source = Source(inspect.getsourcefile(function) or code.co_filename)
    lines = tuple(linecache.getlines(source.file, function.__globals__)) or _of_command(code)
    if not lines:
        raise FunctionError(
            f"{function.__qualname__}: its source text cannot be read ({code.co_filename}); define it in a file or a "
            "notebook, not with exec"
        )
    found = [node for node in _definitions(lines) if _is_of(node, code)]
    if not found:
        raise FunctionError(
            f"{function.__qualname__} is not found in {shown(source.file)}, line {code.co_firstlineno}: the file has "
            "changed since it was imported, or something else made the function; import it again"
        )
    return found[-1], source  # of a lambda within another one's body both were found, the inner one last


def _of_command(code: CodeType) -> tuple[str, ...]:
    """The lines of `python -c`, if the function is defined in them; Python itself keeps no source of them."""
    given = sys.orig_argv
    if code.co_filename != "<string>" or "-c" not in given[:-1]:
        return ()
    text = given[given.index("-c") + 1]
    waiting, found = [compile(text, "<string>", "exec", dont_inherit=True)], False
    while waiting and not found:
        found = (now := waiting.pop()) == code  # compares the instructions, so that no function of an exec passes
        waiting.extend(constant for constant in now.co_consts if isinstance(constant, CodeType))
    lines = text.splitlines(keepends=True)
    if found:
        linecache.cache["<string>"] = (len(text), None, lines, "<string>")
    return tuple(lines) if found else ()


@lru_cache(16)
def _definitions(lines: tuple[str, ...]) -> list[Any]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, kinds)]


def _is_of(node: Any, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        if code.co_name != "<lambda>" or node.lineno != code.co_firstlineno:
            return False
        # Several lambdas may begin in one line. Instructions with a width are of the body.
        places = [(line, column) for line, last, column, end in code.co_positions() if (line, column) != (last, end)]
        line, column = places[-1]
        body = node.body
        return bool((body.lineno, body.col_offset) <= (line, column) < (body.end_lineno, body.end_col_offset))
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return bool(node.name == code.co_name and first == code.co_firstlineno)
