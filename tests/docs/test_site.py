"""The documentation site: every page is in the navigation, every public name in the Python API."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from archipel.operator.connection import Resource
from tests.api.test_public_names import PUBLIC
from tests.support.operator_calls import nowhere
from tests.support.pages import ROOT

SITE = ROOT / "scripts" / "site"


def load(name: str) -> ModuleType:
    """A module of scripts/site, which is no package."""
    path = SITE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"site_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without calling what it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def entries(nav: list[Any]) -> list[str]:
    """The pages in a navigation, in order."""
    found = []
    for entry in nav:
        inside = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += entries(inside) if isinstance(inside, list) else [inside]
    return found


SEEN_ELSEWHERE = {
    "archipel.lite_runtime.IsolatedRuntime": "its methods are those of Runtime",
    "archipel.training.cloud.TorchModule": "its base's methods are for whoever compiles modules",
}
"""Public classes whose bases have methods that their entries need not show, and why."""


def is_told(member: str, value: object) -> bool:
    """Whether it is a public method or property with a docstring."""
    method = getattr(value, "fget", getattr(value, "__func__", value))
    return not member.startswith("_") and inspect.isfunction(method) and bool(method.__doc__)


NAV = entries(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    links = load("links")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    beside = {shown for source, shown in links.BESIDE.items() if source != "README.md"}
    assert sorted(NAV) == sorted([*pages, *beside, "reference/"])
    assert len(set(NAV)) == len(NAV)


@pytest.mark.sampled(every=4)
def test_every_public_name_has_an_entry() -> None:
    reference = load("reference")
    assert set(reference.ROOMS) == set(PUBLIC)
    for room, names in PUBLIC.items():
        text = reference.pages()[reference.page_name(room)]
        entered = re.findall(rf"^      heading: {re.escape(room)}\.(\w+)$", text, re.M)
        assert sorted(entered) == sorted(names.split()), room
        homes = dict(re.findall(r"^\[`(\w+)`\]\(#([\w.]+)\)", text.replace(", [", "\n["), re.M))
        assert sorted(homes) == sorted(names.split())
        parts = {home for each in reference.PARTS.values() for home in each.values()}
        assert [home for home in re.findall(r"^::: (.+)$", text, re.M) if home not in parts] == list(homes.values())


def test_what_public_classes_inherit_has_an_entry() -> None:
    """Of a public method that a base has which is not public, the reference would say nothing."""
    reference = load("reference")
    public = [getattr(importlib.import_module(room), name) for room, names in PUBLIC.items() for name in names.split()]
    classes = {f"{room}.{name}" for room, names in PUBLIC.items() for name in names.split()}
    lacking = set()
    for place in classes:
        room, _, name = place.rpartition(".")
        found = getattr(importlib.import_module(room), name)
        for base in found.__mro__[1:] if inspect.isclass(found) else ():
            members = {member for member, value in vars(base).items() if is_told(member, value)} - vars(found).keys()
            if base.__module__.startswith("archipel.") and base not in public and members:
                lacking.add(place)
    assert sorted(lacking) == sorted({*reference.INHERITED, *SEEN_ELSEWHERE})


def test_every_resource_of_the_operators_client_has_an_entry() -> None:
    parts = load("reference").PARTS["archipel.operator.OperatorClient"]
    resources = {name: type(each) for name, each in vars(nowhere()).items() if isinstance(each, Resource)}
    assert parts == {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in resources.items()}


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("operations.md", "[x](quickstart.md#install)", "[x](quickstart.md#install)"),
        ("operations.md", "[x](../SECURITY.md#keys)", "[x](SECURITY.md#keys)"),
        ("operations.md", "[x](../examples/activity/README.md)", "[x](examples/activity/README.md)"),
        ("operations.md", "[`x`](../archipel/privacy/central.py)", "`x`"),
        ("operations.md", "[x](https://example.org/a.md)", "[x](https://example.org/a.md)"),
        ("operations.md", "[x](#here)", "[x](#here)"),
        ("tutorials/browser-joins.md", "[x](../../SECURITY.md)", "[x](../SECURITY.md)"),
        ("tutorials/browser-joins.md", "[x](../browser.md)", "[x](../browser.md)"),
        ("SECURITY.md", "[x](docs/operations.md)", "[x](operations.md)"),
        ("SECURITY.md", "[x](README.md)", "[x](index.md)"),
        ("examples/activity/README.md", "![x](results/people.png)", "![x](results/people.png)"),
        ("examples/activity/README.md", "[x](../../docs/agent.md)", "[x](../../agent.md)"),
        ("examples/activity/README.md", "[run](run.py)", "run"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(page: str, link: str, becomes: str) -> None:
    links = load("links")
    assert links.resite(f"a {link} b", page) == f"a {becomes} b"
    fenced = f"```text\n{link}\n```\n"
    assert links.resite(fenced, page) == fenced


def test_examples_of_docstrings_are_shown_as_code() -> None:
    pytest.importorskip("griffe")
    text = "What it does.\n\nExample:\n    x = f(1)\n\n    if x:\n        g(x)\n\nRaises ValueError."
    shown = load("docstrings").fence_examples(text)
    assert shown == (
        "What it does.\n\nExample:\n    ```python\n    x = f(1)\n\n    if x:\n        g(x)\n    ```\n\n"
        "Raises ValueError."
    )


def test_names_that_an_example_points_to_become_links() -> None:
    pytest.importorskip("griffe")
    text = "`archipel.a` is no pointer.\n\nExample: see `archipel.bundle.open_bundle` and `x`."
    assert load("docstrings").link_examples(text) == (
        "`archipel.a` is no pointer.\n\n"
        "Example: see [`archipel.bundle.open_bundle`][archipel.bundle.open_bundle] and `x`."
    )


def test_pictures_are_those_that_the_script_draws() -> None:
    draw = load("pictures/draw")
    for name, picture in draw.PICTURES.items():
        drawn = picture().svg(name)
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == drawn, (
            "run python scripts/site/pictures/draw.py"
        )


def test_pictures_say_the_rooms_and_the_phases_of_the_code() -> None:
    import tomllib

    from archipel.server.rounds.machine import RULES

    draw = load("pictures/draw")
    rooms = draw.rooms().svg("rooms")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["containers"] == ["archipel"])
    order = [name for layer in layers[:-2] for name in re.split(r" [:|] ", layer)]
    found = ((name, re.search(rf'y="(\d+)"[^>]*>{name}</text>', rooms)) for name in order)
    shown = {name: int(match[1]) for name, match in found if match}
    assert set(order) - set(shown) == {"__main__", "engine_registry", "importer_registry"}
    assert [shown[name] for name in order if name in shown] == sorted(shown.values())
    assert all(f">{phase}</text>" in draw.round_states().svg("round-states") for phase in RULES)


def test_styles_of_pictures_alone_and_in_the_site_agree() -> None:
    drawing, css = load("pictures/drawing"), (ROOT / "docs" / "assets" / "site.css").read_text()
    classes = set(re.findall(r"\.drawn \.(\w+)", drawing.STYLE))
    assert classes == set(re.findall(r"\.drawn \.(\w+)", css))


def test_the_shim_for_search_from_a_folder_is_in_place() -> None:
    assert "IFrameWorker" in (ROOT / "docs" / "assets" / "iframe-worker.js").read_text()
    assert Path(ROOT / "LICENSES" / "mkdocs-material.txt").is_file()


def test_the_page_about_failed_rounds_has_every_reason() -> None:
    from typing import get_args

    from archipel.protocol.messages import LeaveReason
    from archipel.server.rounds.machine import RULES
    from archipel.server.rounds.refusals import UNTOLD

    text = (ROOT / "docs" / "failed-rounds.md").read_text()
    assert [rule.lacking for rule in RULES.values() if rule.lacking not in text] == []
    assert [kind for kind in (*get_args(LeaveReason), UNTOLD) if f"`{kind}`" not in text] == []
