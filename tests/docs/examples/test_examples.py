"""The `Example:` of every public name runs, and every public name has one."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import archipel
from archipel import autodiff
from archipel.graph.functions import KEPT
from tests.api.test_public_names import PUBLIC
from tests.support.example_server import open_example_server
from tests.support.example_world import make_world
from tests.support.pages import ROOT

PATTERN = re.compile(r"^( *)Example:\n((?:\1    .*\n|\n)+)", re.M)
POINTER = re.compile(r"^ *Example: see `archipel\.([\w.]+)`\.$", re.M)
"""Instead of an example: where there is one that shows this, too."""
PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.M)
"""What stands behind a print is what it prints."""


def example_of(value: object) -> str:
    """The code of a docstring's `Example:`, empty where there is none."""
    found = PATTERN.search(f"{inspect.getdoc(value) or ''}\n")
    return textwrap.dedent(found[2]).strip("\n") if found else ""


def pointer_of(value: object) -> str:
    """The public name that a docstring points to instead of an example, empty where it points nowhere."""
    found = POINTER.search(inspect.getdoc(value) or "")
    return f"archipel.{found[1]}" if found else ""


def is_documented(value: object) -> bool:
    """Whether the value can have a docstring of its own; a constant shows that of its type."""
    return (
        inspect.isclass(value) or inspect.ismodule(value) or inspect.isroutine(value) or hasattr(value, "__wrapped__")
    )


def members_of(value: object) -> dict[str, Any]:
    """What a class and its bases in archipel have, by name; nothing for what is no class."""
    bases = reversed(value.__mro__) if inspect.isclass(value) else ()
    return {
        name: member for base in bases if base.__module__.startswith("archipel.") for name, member in vars(base).items()
    }


def described() -> dict[str, Any]:
    """What the reference describes, by name: public names, and public methods of classes, whose `__init__` included."""
    values: dict[str, Any] = {}
    for room, names in PUBLIC.items():
        module = importlib.import_module(room)
        for name in names.split():
            value = getattr(module, name)
            if not is_documented(value):
                continue
            values[f"{room}.{name}"] = value
            for member, found in members_of(value).items():
                method = getattr(found, "fget", getattr(found, "__func__", found))
                if inspect.isfunction(method) and (member == "__init__" or not member.startswith("_")):
                    values[f"{room}.{name}.{member}"] = method
    return values


DESCRIBED = described()


def found() -> dict[str, str]:
    """The examples by name; one that several rooms have comes once."""
    examples: dict[str, str] = {}
    for name, value in DESCRIBED.items():
        code = example_of(value)
        if code and code not in examples.values():
            examples[name] = code
    return examples


def room_of(name: str) -> str:
    """The room of a name, which may be a method's."""
    return max((room for room in PUBLIC if name.startswith(f"{room}.")), key=len)


EXAMPLES = found()
WITHOUT = {
    "archipel.__version__": "a constant",
    "archipel.autodiff.FORWARD": "a table; `archipel.autodiff.forward_rule` puts rules into it",
    "archipel.autodiff.RULES": "a table; `archipel.autodiff.rule` puts rules into it",
    "archipel.bundle.FORMAT_VERSION": "a constant",
    "archipel.bundle.MAX_ARCHIVE_BYTES": "a constant",
    "archipel.bundle.WEIGHTS_FILE": "a constant",
    "archipel.edge.run_uplink": "the supervisor of an edge server starts it in a process of its own",
    "archipel.graph.IMPORTERS": "a table; `archipel.converter` puts importers into it",
    "archipel.preprocessing.TRANSFORMS": "a table of the public transforms",
    "archipel.privacy.AccountantName": "a type",
    "archipel.privacy.Event": "a type; `archipel.privacy.Gaussian` and the others are its values",
    "archipel.strategies.STRATEGIES": "a table; `archipel.strategies.get` reads it",
}
"""Public names without an example, and why."""
NOT_RUN = {"archipel.client.Agent", "archipel.bundle.development_key", "archipel.operator.OperatorClient"}
"""The first needs a server with a token; tests/docs/test_agent_page.py runs the same lines. The second takes seconds to
find a key; the tutorials run it. tests/docs/test_operator_page.py runs the calls of the third, with devices."""
OWN_FILES = {
    "archipel": "Model.fix Model.limit_loops",
    "archipel.datasets": "Batches MaskedTokens cifar10 digits_and_clothes ecg_beats fashion_mnist har_by_person "
    "har_windows masked_text_splits mnist open_arrow open_audio open_csv open_file open_images open_lines open_text "
    "text_splits",
    "archipel.preprocessing": "fitted put_before",
    "archipel.training.cloud": "with_preprocessing",
    "archipel.insight": "PageServer",
    "archipel.server": "back_up copy_files create_app load_settings prune restore run_coordinator supervise",
}
"""They read files, train on pictures, or serve, which this small world has not; docs/data.md, docs/preprocessing.md and
the tests of the graphs, the data sets and of the server's storage and processes run the same."""
NOT_RUN |= {f"{room}.{name}" for room, names in OWN_FILES.items() for name in names.split()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def world(folder: Path) -> Callable[[str, str], dict[str, Any]]:
    return make_world(folder)


@pytest.fixture(scope="module")
def answers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    at = tmp_path_factory.mktemp("server")
    with open_example_server(at) as names:
        shutil.copy(at / "linear.bundle", folder)
        yield names


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Rules, modes and handlers that an example sets are those of before for whoever comes next."""
    tables: tuple[Any, ...] = (autodiff.RULES, autodiff.FORWARD, KEPT)
    before, mode, handler = [table.copy() for table in tables], archipel.get_mode(), signal.getsignal(signal.SIGTERM)
    yield
    for table, content in zip(tables, before):
        table.clear()
        table.update(content)
    archipel.set_mode(mode)
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - NOT_RUN))
def test_the_example_runs(
    name: str,
    world: Callable[[str, str], dict[str, Any]],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    room, code = room_of(name), EXAMPLES[name]
    served = request.getfixturevalue("answers") if "client." in code else {}
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("made"))
    # What an example makes must not be there; what it reads must.
    if "convert" not in code:
        shutil.copytree(folder / "made", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # for development keys
    module = importlib.import_module(room)
    file = tmp_path / "example.py"
    file.write_text(code)
    public = {each: getattr(module, each) for each in PUBLIC[room].split()}
    exec(compile(code, str(file), "exec"), world(room, code) | served | public)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in PRINTED.findall(code) if line not in printed] == [], printed


def test_every_public_name_has_an_example() -> None:
    """Or its docstring points to one that shows it, or `WITHOUT` says why it has none."""
    public = [f"{room}.{name}" for room, names in PUBLIC.items() for name in names.split()]
    methods = {name.rpartition(".")[0] for name, value in DESCRIBED.items() if example_of(value)}
    lacking = {
        name
        for name in public
        if name not in methods and not example_of(value := DESCRIBED.get(name)) and not pointer_of(value)
    }
    assert sorted(lacking ^ set(WITHOUT)) == [], "write an example, or into WITHOUT why there is none"


def test_pointers_lead_to_examples() -> None:
    pointers = {name: pointer for name, value in DESCRIBED.items() if (pointer := pointer_of(value))}
    assert len(pointers) > 20
    wrong = {name: to for name, to in pointers.items() if to not in DESCRIBED or not example_of(DESCRIBED[to])}
    assert wrong == {}
    # The site knows a name that a file has, too, by another one.
    assert [to for to in pointers.values() if (ROOT / f"{to.replace('.', '/')}.py").is_file()] == []
