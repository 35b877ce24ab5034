"""What every Dockerfile keeps to, read from its instructions: no root, an exact base, a health check, small."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "STOPSIGNAL", "USER",
    "VOLUME", "WORKDIR",
}  # fmt: skip


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Each with its arguments on one line."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, arguments = line.partition(" ")
            yield name, " ".join(arguments.split())


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name.partition(".")[0])
def steps(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    return list(instructions(request.param))


def test_there_are_three() -> None:
    assert [path.name.partition(".")[0] for path in DOCKERFILES] == ["cloud", "device", "server"]


def test_instructions_are_known(steps: list[tuple[str, str]]) -> None:
    assert {name for name, _ in steps} <= KNOWN


def test_the_base_has_an_exact_tag_and_can_be_given_a_digest(steps: list[tuple[str, str]]) -> None:
    (base,) = [value for name, value in steps if name == "ARG" and value.startswith("BASE=")]
    assert re.fullmatch(r"BASE=docker\.io/[\w/-]+:\d+\.\d+[\w.-]*", base)
    assert [value.split()[0] for name, value in steps if name == "FROM"] == ["${BASE}", "${BASE}"]


def test_programs_run_as_a_user_of_a_number(steps: list[tuple[str, str]]) -> None:
    users = [value for name, value in steps if name == "USER"]
    assert users == ["10001:10001"]
    last_run = max(number for number, (name, _) in enumerate(steps) if name == "RUN")
    assert steps.index(("USER", users[0])) > last_run


def test_what_is_started_gets_signals_itself(steps: list[tuple[str, str]]) -> None:
    for wanted in ("ENTRYPOINT", "CMD"):
        (value,) = [value for name, value in steps if name == wanted]
        assert json.loads(value)


def test_it_says_how_it_is_and_what_it_consists_of(steps: list[tuple[str, str]]) -> None:
    (health,) = [value for name, value in steps if name == "HEALTHCHECK"]
    assert health == "NONE" or " CMD [" in health
    (labels,) = [value for name, value in steps if name == "LABEL"]
    assert 'org.archipel.sbom="/opt/archipel/sbom.cdx.json"' in labels
    assert any("cyclonedx-py" in value and "/opt/archipel/sbom.cdx.json" in value for _, value in steps)


def test_versions_are_the_constraints_and_lists_of_packages_go(steps: list[tuple[str, str]]) -> None:
    for name, value in steps:
        if name == "RUN" and "/opt/tools/bin/pip --python" in value:
            assert "--constraint /packages/constraints.txt" in value
        if name == "RUN" and "apt-get" in value:
            assert "--no-install-recommends" in value
            assert "rm -rf /var/lib/apt/lists/*" in value
    tools = re.findall(r"cyclonedx-bom==[\d.]+", (ROOT / "scripts" / "release" / "wheels.py").read_text())
    assert tools == [word for _, value in steps for word in re.findall(r"cyclonedx-bom==[\d.]+", value)]


def test_what_is_copied_gets_through_to_the_builder(steps: list[tuple[str, str]]) -> None:
    ignored, *let_in = (ROOT / ".dockerignore").read_text().split()
    assert ignored == "*"
    copied = [word for name, value in steps if name == "COPY" and "--from=" not in value for word in value.split()[:-1]]
    assert copied
    for word in copied:
        assert any(fnmatch.fnmatch(word, pattern.removeprefix("!")) for pattern in let_in), word
        # dist/ is built; the rest is in the sources.
        assert word.startswith("dist/") or (ROOT / word).is_file()
