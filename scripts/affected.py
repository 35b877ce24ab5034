"""Which test files reach what was changed, the nearest first.

One graph of imports is walked from the changed files to those that import them: the package's modules as `grimp` reads
them, and every Python file beside the package (tests, scripts, examples, benchmarks) by its syntax tree. Three kinds of
edges are no imports: a test file depends on the conftest.py files of its folders, on modules that a string of it names
(`monkeypatch.setattr("archipel.room.NAME", ...)`, code for a subprocess), and on files beside the package whose names
are in its strings. The distance of a test file is the number of edges between.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import grimp

PACKAGE = "archipel"
CACHE = ".cache/imports"
FOLDERS = {
    "benchmarks": ("tests/benchmarks",),
    "docs": ("tests/docs",),
    "examples": ("tests/examples",),
    "vectors": ("tests/protocol", "tests/web"),
    "web": ("tests/web_library", "tests/web", "tests/browser"),
}
"""Folders beside the package, and where their tests are."""
CONTRACTS = {
    "archipel/cli/": ("tests/cli/test_commands.py", "tests/cli/models/test_convert_options.py"),
    "archipel/converter/": ("tests/cli/models/test_convert_errors.py",),
    "archipel/client/conditions/": (
        "tests/client/conditions/test_conditions.py",
        "tests/cli/devices/device/test_device_settings.py",
    ),
    "archipel/errors.py": ("tests/server/http/test_problems.py",),
    "archipel/operator/": ("tests/operator/test_routes.py", "tests/docs/test_operator_page.py"),
    "archipel/protocol/": ("tests/docs/test_api_page.py",),
    "archipel/server/http/": (
        "tests/docs/test_api_page.py",
        "tests/operator/test_routes.py",
        "tests/server/http/test_permissions.py",
        "tests/server/http/test_problems.py",
    ),
    "archipel/server/settings.py": ("tests/docs",),
    "archipel/training/losses.py": ("tests/cli/models/test_convert_options.py",),
    "archipel/training/optimizers.py": ("tests/cli/models/test_convert_options.py",),
}
"""Tests of lists that grow with the product: they fail where a new thing is missing in one, so they run whatever the
imports say."""
PAGES = "tests/docs"
"""The tests of Markdown pages in the root."""
MANY = {"conftest.py", "__init__.py"}
"""Names of so many files that who says one means none of them."""
FILE_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)+|Makefile")
MODULE_NAME = re.compile(rf"\b{PACKAGE}(?:\.\w+)+")


class NoChangesKnown(Exception):
    """git cannot say what was changed; says why."""


@dataclass(frozen=True)
class Affected:
    """A test file. `distance`: 0 if it was changed itself or is a contract of what was changed, 1 if it imports that,
    and so on."""

    file: str
    distance: int
    same_room: bool
    """Whether it is in the room of something that was changed, as tests/graph is of archipel/graph."""


def find_changes(root: Path, base: str) -> list[str]:
    """Paths that differ from `base`, or where the branch left it, with those that are new to git and those deleted."""
    revision = ask_git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}").strip()
    since = ask_git(root, "merge-base", revision, "HEAD").strip()
    changed = ask_git(root, "diff", "--relative", "--no-renames", "--name-only", "-z", since)
    new = ask_git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({*changed.split("\0"), *new.split("\0")} - {""})


def ask_git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoChangesKnown(f"git {' '.join(arguments)}: {done.stderr.strip() or 'there is no such revision'}")
    return done.stdout


def find_affected(root: Path, changed: Iterable[str]) -> tuple[list[Affected], list[str]]:
    """The test files that reach a changed file, and the changed files that no test reaches."""
    changed = list(changed)
    graph = Graph(root, changed)
    best: dict[str, int] = {}
    uncovered = []
    for path in changed:
        found = {**graph.tests_of(path), **dict.fromkeys(graph.contracts_of(path), 0)}
        for file, distance in found.items():
            best[file] = min(distance, best.get(file, distance))
        if not found and not is_test(path):  # a test that is gone needs none
            uncovered.append(path)
    rooms = {f"tests/{path.split('/')[1].removesuffix('.py')}" for path in changed if path.startswith(f"{PACKAGE}/")}
    found_rooms = {file: "/".join(file.split("/")[:2]) for file in best}
    return [Affected(file, distance, found_rooms[file] in rooms) for file, distance in sorted(best.items())], uncovered


def choose(
    affected: Iterable[Affected], seconds: Mapping[str, float], unknown: float, budget: float
) -> tuple[list[str], list[str]]:
    """The files to run, in this order, and those for which there is no time.

    Those that were changed themselves, and contracts, run in any case. Of others the nearest go first, of these the
    ones in the same room, and of these the shortest; one that does not fit any more leaves its time to the next.
    """
    chosen, left = [], []
    for each in sorted(
        affected, key=lambda each: (each.distance, not each.same_room, seconds.get(each.file, unknown), each.file)
    ):
        needs = seconds.get(each.file, unknown)
        if each.distance == 0 or needs <= budget:
            chosen.append(each.file)
            budget -= needs
        else:
            left.append(each.file)
    return chosen, left


class Graph:
    """Who depends on whom: nodes are names of the package's modules and paths of all other files."""

    def __init__(self, root: Path, changed: Iterable[str]) -> None:
        self._root = root
        gone = [path for path in changed if not (root / path).exists()]
        listed = ask_git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
        files = {path for path in listed if (root / path).is_file()} | set(gone)
        self._tests = {path for path in files - set(gone) if is_test(path)}
        self._dependents: dict[str, set[str]] = defaultdict(set)
        gone_modules = {module_of(path) for path in gone if is_module(path)}
        self._modules = self._read_package() | gone_modules
        outside = sorted(path for path in files if not path.startswith(f"{PACKAGE}/"))
        self._by_name = index(outside, lambda path: {PurePosixPath(path).name} - MANY)
        self._by_module = index(outside, dotted_names)
        self._conftests = {path for path in outside if PurePosixPath(path).name == "conftest.py"}
        self._exports: dict[str, dict[str, str]] = {}
        for path in outside:
            if path.endswith(".py") and path not in gone:
                for target in self._needs_of(path):
                    self._dependents[target].add(path)
        for path in filter(is_module, files - set(gone) if gone_modules else ()):  # grimp keeps no such import
            for target in self._needs_of(path) & gone_modules:
                self._dependents[target].add(module_of(path))

    def tests_of(self, path: str) -> dict[str, int]:
        """Test files that reach a changed file, with their distance."""
        found = dict(self._walk(self._sources_of(path)))
        parts = PurePosixPath(path).parts
        if parts[0] in FOLDERS or (len(parts) == 1 and path.endswith(".md")):
            folders = tuple(f"{folder}/" for folder in FOLDERS.get(parts[0], (PAGES,)))
            found |= {file: 2 for file in self._tests if file.startswith(folders) and file not in found}
        elif parts[0] == "tests" and not found and not is_test(path):
            found = dict.fromkeys(self._neighbours_of(path), 2)
        return found

    def contracts_of(self, path: str) -> list[str]:
        """Test files of CONTRACTS that go with a changed file."""
        wanted = tuple(test for begin, tests in CONTRACTS.items() if path.startswith(begin) for test in tests)
        return [file for file in self._tests if file.startswith(wanted)] if wanted else []

    def _sources_of(self, path: str) -> dict[str, int]:
        """Where the walk begins: nodes that are changed when this file is, with their distance from it."""
        if not path.startswith(f"{PACKAGE}/"):
            return {path: 0}
        name = module_of(path)
        if path.endswith(".py") and name in self._modules:
            below = [module for module in self._modules if module.startswith(f"{name}.")]
            # Importing a module imports the packages that it is in.
            return {name: 0, **(dict.fromkeys(below, 1) if path.endswith("/__init__.py") else {})}
        folder = PurePosixPath(path).parent
        while folder.parts:  # data, and code that is loaded by its path: what is beside it reads it
            package = ".".join(folder.parts)
            beside = [module for module in self._modules if module.rpartition(".")[0] == package]
            if beside:
                return dict.fromkeys(beside, 0)
            folder = folder.parent
        return {}

    def _walk(self, sources: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        distances = dict(sources)
        waiting = deque(sorted(sources, key=lambda node: sources[node]))
        while waiting:
            node = waiting.popleft()
            if node in self._tests:
                yield node, distances[node]
            for dependent in self._dependents.get(node, ()):
                if dependent not in distances:
                    distances[dependent] = distances[node] + 1
                    waiting.append(dependent)

    def _neighbours_of(self, path: str) -> list[str]:
        """The tests of the folder that a file of the tests is in, where nothing imports or names it."""
        for folder in PurePosixPath(path).parents[:-2]:
            beside = [file for file in self._tests if PurePosixPath(file).parent == folder]
            if beside:
                return beside
        return []

    def _read_package(self) -> set[str]:
        sys.path.insert(0, str(self._root))
        (self._root / CACHE).mkdir(parents=True, exist_ok=True)
        graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=str(self._root / CACHE))
        for module in graph.modules:
            self._dependents[module] |= graph.find_modules_that_directly_import(module)
        return graph.modules

    def _needs_of(self, path: str) -> set[str]:
        """What a Python file outside the package depends on."""
        try:
            tree = ast.parse((self._root / path).read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            return set()  # what is wrong with it is said by its own run
        found: set[str] = set()
        bound: dict[str, str] = {}
        """Local names of the package's modules, for names that are looked up in them."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found |= self._resolve(path, alias.name)
                    first = alias.name.split(".")[0]
                    bound[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found |= self._resolve(path, f"{'.' * node.level}{node.module or ''}", alias.name)
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in MODULE_NAME.findall(node.value):
                    found |= self._resolve(path, name)
                if path.startswith("tests/"):
                    for name in FILE_NAME.findall(node.value):
                        found |= self._by_name.get(name, set())
            elif isinstance(node, ast.Attribute):
                whole, _, rest = spelled(node).partition(".")
                if bound.get(whole, "").split(".")[0] == PACKAGE:
                    found |= self._resolve(path, f"{bound[whole]}.{rest}")
        if path.startswith("tests/"):
            found |= {f"{folder}/conftest.py" for folder in PurePosixPath(path).parents} & self._conftests
        return found - {path}

    def _resolve(self, path: str, module: str, name: str | None = None) -> set[str]:
        """Nodes that `import module` or `from module import name` in this file stands for."""
        if module.startswith("."):
            level = len(module) - len(module.lstrip("."))
            folder = PurePosixPath(path).parents[level - 1]
            module = ".".join((*folder.parts, *filter(None, [module.lstrip(".")])))
        if module.split(".")[0] == PACKAGE:
            return self._resolve_in_package(module if name is None else f"{module}.{name}")
        for wanted in ([] if name is None else [f"{module}.{name}"]) + [module]:
            known = self._by_module.get(wanted, set())
            beside = {each for each in known if PurePosixPath(each).parent == PurePosixPath(path).parent}
            if beside or (known and wanted.split(".")[0] not in sys.stdlib_module_names):
                return beside or known
        return set()

    def _resolve_in_package(self, name: str) -> set[str]:
        """The module at the beginning of a dotted name, and the one from which it has the name after it."""
        module, rest = name, ""
        while module not in self._modules:
            module, _, last = module.rpartition(".")
            if not module:
                return set()
            rest = last
        if module == PACKAGE and not rest:
            return {PACKAGE}
        home = self._exports_of(module).get(rest)
        return {module} | ({home} if home else set())

    def _exports_of(self, module: str) -> dict[str, str]:
        """Names that a package's __init__.py imports from its modules, and from which."""
        path = self._root.joinpath(*module.split("."), "__init__.py")
        if module not in self._exports:
            self._exports[module] = {}
            tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module in self._modules:
                    for alias in node.names:
                        self._exports[module][alias.asname or alias.name] = node.module
        return self._exports[module]


def is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).match("test_*.py")


def is_module(path: str) -> bool:
    return path.startswith(f"{PACKAGE}/") and path.endswith(".py")


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def dotted_names(path: str) -> list[str]:
    """All names under which a Python file could be imported from one of its folders."""
    parts = PurePosixPath(path.removesuffix(".py")).parts if path.endswith(".py") else ()
    return [".".join(parts[start:]) for start in range(len(parts))]


def index(paths: Iterable[str], names_of: Callable[[str], Iterable[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        for name in names_of(path):
            found[name].add(path)
    return found


def spelled(node: ast.expr) -> str:
    """A chain of attributes as it is written; "" where it does not begin with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := spelled(node.value)):
        return f"{before}.{node.attr}"
    return ""
