"""The `Example:` of every public name runs."""

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
from tests.support.example_world import make_world

PATTERN = re.compile(r"^( *)Example:\n((?:\1    .*\n|\n)+)", re.M)


def example_of(value: object) -> str:
    """The code of a docstring's `Example:`, empty where there is none."""
    found = PATTERN.search(f"{inspect.getdoc(value) or ''}\n")
    return textwrap.dedent(found[2]).strip("\n") if found else ""


def found() -> dict[str, str]:
    """The examples by name; a name that several rooms have comes once."""
    examples: dict[str, str] = {}
    for room, names in PUBLIC.items():
        module = importlib.import_module(room)
        for name in names.split():
            value = getattr(module, name)
            code = example_of(value) if inspect.isclass(value) or inspect.isfunction(value) else ""
            if code and code not in examples.values():
                examples[f"{room}.{name}"] = code
    return examples


ROOMS = (
    "archipel", "archipel.autodiff", "archipel.training", "archipel.compression", "archipel.converter",
    "archipel.bundle", "archipel.lite_runtime", "archipel.client", "archipel.operator", "archipel.simulation",
    "archipel.strategies", "archipel.privacy", "archipel.datasets", "archipel.models", "archipel.preprocessing",
    "archipel.training.cloud", "archipel.graph", "archipel.insight", "archipel.server",
)  # fmt: skip
EXAMPLES = {name: code for name, code in found().items() if name.rpartition(".")[0] in ROOMS}


WITHOUT = {
    "archipel.bundle.generate_development_key", "archipel.bundle.parameter_specs", "archipel.bundle.release_pages",
    "archipel.bundle.role_of", "archipel.bundle.weights_layout", "archipel.bundle.write_bundle",
    "archipel.simulation.read_devices", "archipel.graph.promote",
}  # fmt: skip
"""Functions for those who write bundles by another way than `convert`, change graphs, or read traces of devices."""
NOT_RUN = {"archipel.client.Agent", "archipel.bundle.development_key"}
"""The first needs a server with a token; tests/docs/test_agent_page.py runs the same lines. The second takes seconds to
find a key; the tutorials run it."""
OWN_FILES = {
    "archipel.datasets": "Batches MaskedTokens cifar10 digits_and_clothes ecg_beats fashion_mnist har_by_person "
    "har_windows masked_text_splits mnist open_arrow open_audio open_csv open_file open_images open_lines open_text "
    "text_splits",
    "archipel.preprocessing": "fitted put_before",
    "archipel.training.cloud": "with_preprocessing",
    "archipel.insight": "PageServer",
    "archipel.server": "back_up copy_files create_app load_settings prune restore run_coordinator supervise",
}
"""They read files, train on pictures, or serve, which this small world has not; docs/data.md, docs/preprocessing.md and
the tests of the data sets and of the server's storage and processes run the same."""
NOT_RUN |= {f"{room}.{name}" for room, names in OWN_FILES.items() for name in names.split()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def world(folder: Path) -> Callable[[str], dict[str, Any]]:
    return make_world(folder)


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
    name: str, world: Callable[[str], dict[str, Any]], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, code = name.rpartition(".")[0], EXAMPLES[name]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("made"))
    # What an example makes must not be there; what it reads must.
    if "convert" not in code:
        shutil.copytree(folder / "made", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # for development keys
    module = importlib.import_module(room)
    file = tmp_path / "example.py"
    file.write_text(code)
    exec(compile(code, str(file), "exec"), world(room) | {each: getattr(module, each) for each in PUBLIC[room].split()})


def test_what_people_call_has_an_example() -> None:
    """Functions and parts of recipes of these rooms; messages and results are explained where they come from."""
    lacking = [
        f"{room}.{name}"
        for room in ROOMS
        for name in PUBLIC[room].split()
        if inspect.isfunction(value := getattr(importlib.import_module(room), name)) and not example_of(value)
    ]
    assert [name for name in lacking if name not in WITHOUT] == []
