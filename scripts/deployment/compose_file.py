"""Reads docker/compose.yml as far as it is written: what this does not know is refused, so that nothing is passed over.

Gives each service what a process needs: command, variables, mounts, user, networks, ports, health check and what it
waits for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker" / "compose.yml"
TOP = {"name", "services", "configs", "networks", "volumes"}
# What a plain process does not have, or what a machine's own limits do, is read and left.
LEFT = {"build", "cap_drop", "init", "mem_limit", "pids_limit", "restart", "security_opt", "shm_size",
        "stop_grace_period"}  # fmt: skip
KNOWN = LEFT | {"command", "configs", "depends_on", "entrypoint", "environment", "healthcheck", "image", "network_mode",
                "networks", "ports", "read_only", "tmpfs", "volumes"}  # fmt: skip
WAITS = {"service_healthy", "service_completed_successfully", "service_started"}


@dataclass(frozen=True)
class Mount:
    """`volume`: its name, or "" for `content`; `subpath`: the folder of the volume; `inside`: where it is seen."""

    inside: str
    volume: str = ""
    subpath: str = ""
    content: str = ""
    read_only: bool = False


@dataclass(frozen=True)
class Port:
    """One of a service that this machine shows: `outside` at its address `host`, `inside` at the service's own."""

    service: str
    host: str
    outside: int
    inside: int


@dataclass(frozen=True)
class Service:
    """`entrypoint` and `command` are None where the image's own hold; `waits`: conditions by service."""

    name: str
    image: str
    dockerfile: str
    entrypoint: Sequence[str] | None
    command: Sequence[str] | None
    variables: Mapping[str, str]
    mounts: Sequence[Mount]
    check: Sequence[str] | None
    waits: Mapping[str, str]
    read_only: bool
    networks: Sequence[str]
    ports: Sequence[Port]


def read_compose(path: Path = COMPOSE, variables: Mapping[str, str] = os.environ) -> dict[str, Service]:
    """Every service by its name, each after those that it waits for. Raises ValueError for what is not known."""
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    _check(given, {name for name in given if name.startswith("x-")} | TOP, str(path))
    services = {}
    for name, described in given["services"].items():
        _check(described, KNOWN, name)
        filled = _fill(described, variables)
        services[name] = _service(name, filled, given, path)
    ordered: dict[str, Service] = {}
    while len(ordered) < len(services):
        ready = [each for each in services.values() if each.name not in ordered and set(each.waits) <= set(ordered)]
        if not ready:
            raise ValueError(f"{path}: services wait for each other, or for one that is not there")
        ordered |= {each.name: each for each in ready}
    return ordered


def dockerfile_says(name: str, instruction: str) -> Any:
    """The last ENTRYPOINT or CMD (a list), or USER or WORKDIR (a text), of a Dockerfile beside compose.yml."""
    value = re.findall(rf"^{instruction} (.*)$", _text(name), re.M)[-1]
    return json.loads(value) if value.startswith("[") else value


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8") if name else ""


def _service(name: str, given: Mapping[str, Any], compose: Mapping[str, Any], path: Path) -> Service:
    check = given.get("healthcheck")
    if check is not None and check["test"][0] != "CMD":
        raise ValueError(f"{name}: a health check begins with CMD, this with {check['test'][0]}")
    waits = {other: how["condition"] for other, how in given.get("depends_on", {}).items()}
    if not set(waits.values()) <= WAITS:
        raise ValueError(f"{name}: waits for {sorted(set(waits.values()) - WAITS)}")
    mounts = [_mount(name, each, compose["volumes"]) for each in given.get("volumes", ())]
    for each in given.get("configs", ()):
        source = compose["configs"][each["source"]]
        content = source["content"] if "content" in source else (path.parent / source["file"]).read_text("utf-8")
        mounts.append(Mount(each["target"], content=content, read_only=True))
    for unknown in sorted(set(given.get("networks", ())) - set(compose["networks"])):
        raise ValueError(f"{name}: {unknown} is no network of this file")
    mode = given.get("network_mode", "")
    if mode not in ("", "none"):
        raise ValueError(f"{name}: network_mode: {mode} is not known here, but none")
    dockerfile = given.get("build", {}).get("dockerfile", "")
    for source, inside in re.findall(r"^COPY (docker/\S+) (\S+)$", _text(dockerfile), re.M):
        mounts.append(Mount(inside, content=_text(source), read_only=True))
    return Service(
        name, given["image"], dockerfile, given.get("entrypoint"),
        given.get("command"), {key: str(value) for key, value in given.get("environment", {}).items()}, mounts,
        None if check is None else check["test"][1:], waits, given.get("read_only", False),
        () if mode else tuple(given.get("networks", ("default",))),
        [_port(name, each) for each in given.get("ports", ())],
    )  # fmt: skip


def _port(name: str, given: object) -> Port:
    found = re.fullmatch(r"([\d.]+):(\d+):(\d+)", str(given))
    if found is None:
        raise ValueError(f"{name}: ports: expected ADDRESS:PORT:PORT, got {given}")
    return Port(name, found[1], int(found[2]), int(found[3]))


def _mount(name: str, given: Any, volumes: Mapping[str, Any]) -> Mount:
    if isinstance(given, str):
        source, inside, *options = given.split(":")
        made = Mount(inside, source, read_only=options == ["ro"])
    else:
        _check(given, {"type", "source", "target", "read_only", "volume"}, f"{name}: volumes")
        made = Mount(
            given["target"], given["source"], given["volume"]["subpath"], read_only=given.get("read_only", False)
        )
    if made.volume not in volumes:
        raise ValueError(f"{name}: {made.volume} is no volume of this file")
    return made


def _fill(value: Any, variables: Mapping[str, str]) -> Any:
    """With ${NAME:-default} filled in, and $$ made $."""
    if isinstance(value, str):

        def replace(found: re.Match[str]) -> str:
            return "$" if found[0] == "$$" else variables.get(found[1]) or found[2]

        filled = re.sub(r"\$\$|\$\{(\w+):-([^}]*)\}", replace, value)
        if re.search(r"\$(?!\$)[{\w]", value.replace("$$", "")) and filled == value:
            raise ValueError(f"{value}: write ${{NAME:-default}}")
        return filled
    if isinstance(value, Mapping):
        return {key: _fill(each, variables) for key, each in value.items()}
    return [_fill(each, variables) for each in value] if isinstance(value, list) else value


def _check(given: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{where}: {', '.join(unknown)}: not known here; teach scripts/deployment/compose_file.py")
