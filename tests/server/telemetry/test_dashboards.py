"""The alert rules and the dashboard: what they name is what a server shows, and promtool finds them right."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS, GRAFANA = ROOT / "docker" / "prometheus", ROOT / "docker" / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "archipel.json"


def known() -> dict[str, set[str]]:
    """The labels of each metric of docs/metrics.md, which test_metrics.py holds against a server, and those that come
    from Prometheus' own configuration."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(
        r"^\| `(archipel_\w+)` \| (\w+).*? \| (.+?) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M
    ):
        own = set(re.findall(r"`(\w+)`", labels)) | {"instance", "job", "server"}
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name + end: own | ({"le"} if end == "_bucket" else set()) for end in ends}
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_every_metric_and_label_is_one_of_the_server(name: str, expression: str) -> None:
    metrics = known()
    named = set(re.findall(r"\barchipel_\w+", expression))
    assert named <= metrics.keys()
    allowed = set.union(*(metrics[each] for each in named)) if named else {"job", "instance", "server"}
    used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", expression))
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        used |= {label.strip() for label in group.split(",")}
    assert used <= allowed


def family(name: str) -> str:
    return re.sub("_(bucket|sum|count)$", "", name)


def test_every_panel_shows_the_servers_that_are_chosen() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    [variable] = dashboard["templating"]["list"]
    # Also series without the label, of a Prometheus that scrapes one server.
    assert (variable["name"], variable["allValue"]) == ("server", ".*")
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            chosen = re.findall(r'\barchipel_\w+\{[^}]*server=~"\$server"\}', target["expr"])
            assert len(chosen) == len(re.findall(r"\barchipel_\w+", target["expr"])), panel["title"]


def test_every_metric_is_in_a_panel() -> None:
    shown = {family(name) for name in re.findall(r"archipel_\w+", DASHBOARD.read_text())}
    assert {family(name) for name in known()} - shown == {"archipel_disk_size_bytes"}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    [uid] = [each["uid"] for each in source["datasources"]]
    places = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places
        places |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == uid


@pytest.mark.slow
def test_promtool_finds_the_rules_right() -> None:
    if subprocess.run([ROOT / "scripts" / "install_prometheus.sh"], capture_output=True).returncode:
        pytest.skip("promtool is not installed; scripts/install_prometheus.sh --yes installs it")
    tool = shutil.which("promtool")
    assert tool is not None
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([tool, *command], cwd=PROMETHEUS, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
