"""The Helm chart, rendered by Helm's own engine: valid for Kubernetes, restricted, closed, and with real commands."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from archipel.bundle import generate_key
from archipel.cli.operations.serve import serve
from archipel.server import init_data_folder
from archipel.server.settings import Settings
from tests.support.commanded import run
from tests.support.environments import other_python

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "archipel"
PACKAGES = ("helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0")
RENDER = """
import json, sys
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError
chart, values = Chart.load(sys.argv[1]), json.loads(sys.argv[2])
try:
    rendered = chart.render(values, name="trial", namespace="federation")
    print(json.dumps({"files": rendered, "lint": lint(sys.argv[1], values=values, strict=True)}))
except HelmError as error:
    print(json.dumps({"error": str(error)}))
"""
VALIDATE = """
import json, sys
import kubernetes_validate
for document in json.load(sys.stdin):
    for version in sys.argv[1:]:
        kubernetes_validate.validate(document, version, strict=True)
print("valid")
"""
BUCKET: dict[str, Any] = {
    "image": {"repository": "registry.example/archipel-server"},
    "secrets": {"server": "server-files", "database": "database", "s3": "s3"},
    "storage": {"bucket": "s3://archipel/server"},
}
VOLUME: dict[str, Any] = {
    "image": {"repository": "registry.example/archipel-server", "digest": "sha256:" + "0" * 64},
    "secrets": {"server": "server-files", "database": "database", "tls": "tls"},
    "storage": {"volume": {"size": "100Gi", "storageClass": "shared"}},
    "replicas": 1,
    "metricsPort": 9464,
    "settings": {"retry_after": 30, "query_approval": True},
    "ingress": {"enabled": True, "host": "federation.example", "className": "nginx", "tlsSecret": "cert"},
    "networkPolicy": {
        "enabled": True, "from": [{"namespaceSelector": {}}], "metricsFrom": [{"podSelector": {}}],
        "to": [{"to": [{"ipBlock": {"cidr": "192.0.2.1/32"}}], "ports": [{"port": 5432, "protocol": "TCP"}]}],
    },
    "imagePullSecrets": [{"name": "pull"}],
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "federation", "operator": "Exists"}],
}  # fmt: skip


def render(values: Mapping[str, Any]) -> dict[str, Any]:
    python = other_python("helm", *PACKAGES)
    made: dict[str, Any] = json.loads(run(python, "-c", RENDER, CHART, json.dumps(values)).splitlines()[-1])
    return made


def documents(rendered: Mapping[str, Any]) -> list[dict[str, Any]]:
    assert "error" not in rendered, rendered
    texts = [text for name, text in rendered["files"].items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


@pytest.fixture(scope="module", params=[BUCKET, VOLUME], ids=["bucket", "volume"])
def chart(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    rendered = render(request.param)
    assert [each for each in rendered["lint"].get("messages", ()) if "icon" not in str(each)] == []
    return documents(rendered)


def pods(chart: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for document in chart:
        if document["kind"] in ("Deployment", "Job"):
            yield document["spec"]["template"]["spec"]


@pytest.mark.slow
def test_kubernetes_takes_every_object(chart: list[dict[str, Any]]) -> None:
    python = other_python("helm", *PACKAGES)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", VALIDATE, "1.37.0", "1.30.0"], input=json.dumps(chart), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "valid\n", done.stderr[-3000:]
    kinds = {document["kind"] for document in chart}
    assert kinds >= {"Deployment", "Job", "Service", "NetworkPolicy", "ServiceAccount"}


@pytest.mark.slow
def test_pods_keep_to_the_restricted_standard(chart: list[dict[str, Any]]) -> None:
    found = list(pods(chart))
    assert len(found) == 2
    for pod in found:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert container["resources"]["limits"]["memory"]
            assert not any("hostPort" in port for port in container.get("ports", ()))
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= {"emptyDir", "secret", "persistentVolumeClaim"}


@pytest.mark.slow
def test_secrets_are_named_and_never_shown(chart: list[dict[str, Any]]) -> None:
    assert not any(document["kind"] == "Secret" for document in chart)
    for pod in pods(chart):
        (database,) = [each for each in pod["containers"][0]["env"] if each["name"] == "ARCHIPEL_SERVER_DATABASE"]
        assert database["valueFrom"]["secretKeyRef"] == {"name": "database", "key": "url"}


@pytest.mark.slow
def test_every_setting_and_every_command_is_archipel_s(chart: list[dict[str, Any]]) -> None:
    known = {field.name for field in msgspec.structs.fields(Settings)}
    for pod in pods(chart):
        container = pod["containers"][0]
        names = [each["name"] for each in container["env"]]
        assert len(names) == len(set(names))
        for name in names:
            setting = re.fullmatch(r"ARCHIPEL_SERVER_([A-Z0-9_]+)", name)
            assert name.startswith("AWS_") or (setting and setting[1].lower() in known), name
        group, command, folder, *options = container["args"]
        assert (group, folder) == ("serve", "/var/lib/archipel/data")
        offered = {option for parameter in serve.commands[command].params for option in parameter.opts}
        assert {option for option in options if option.startswith("--")} <= offered


@pytest.mark.slow
def test_probes_and_the_end_fit_the_server(chart: list[dict[str, Any]]) -> None:
    (deployment,) = [document for document in chart if document["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    paths = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    variables = {each["name"]: each.get("value") for each in server["env"]}
    ends = int(variables["ARCHIPEL_SERVER_DRAIN_SECONDS"]) + int(variables["ARCHIPEL_SERVER_STOP_SECONDS"])
    assert pod["terminationGracePeriodSeconds"] > ends
    scheme = "HTTPS" if "ARCHIPEL_SERVER_TLS_KEY" in variables else "HTTP"
    assert server["readinessProbe"]["httpGet"]["scheme"] == scheme


@pytest.mark.slow
def test_traffic_that_is_not_named_is_closed() -> None:
    (policy,) = [each for each in documents(render(VOLUME)) if each["kind"] == "NetworkPolicy"]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert [rule["from"] for rule in policy["spec"]["ingress"]] == [[{"namespaceSelector": {}}], [{"podSelector": {}}]]
    dns, database = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert database == VOLUME["networkPolicy"]["to"][0]
    (policy,) = [each for each in documents(render(BUCKET)) if each["kind"] == "NetworkPolicy"]
    assert [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]] == ["http"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"image": {"repository": ""}}, "repository"),
        ({"secrets": {"server": "a", "database": ""}}, "database"),
        ({"storage": {"bucket": ""}}, "storage: set bucket"),
        ({"storage": {"bucket": "https://bucket"}}, "bucket"),
        ({"replica": 3}, "replica"),
        ({"ingress": {"enabled": True}}, "host"),
        ({"settings": {"Retry-After": 3}}, "Retry-After"),
    ],
)
def test_wrong_values_are_refused(change: Mapping[str, Any], word: str) -> None:
    assert word in render({**BUCKET, **change})["error"]


def test_the_chart_has_this_version() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    assert described["appVersion"] == described["version"] == version[1]


def test_values_and_their_schema_name_the_same() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(given: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> None:
        if schema.get("additionalProperties") is not False:
            return
        assert set(schema["properties"]) - {"global"} == set(given), where
        for name, each in given.items():
            if isinstance(each, Mapping):
                compare(each, schema["properties"][name], f"{where}.{name}")

    compare(values, json.loads((CHART / "values.schema.json").read_text()), "values")


def test_migrate_makes_the_schema_and_may_be_run_again(tmp_path: Path) -> None:
    key = generate_key().public_key().public_bytes_raw()
    init_data_folder(tmp_path / "data", enrolment_key=key, publisher_keys=[key])
    for _ in range(2):
        done = CliRunner().invoke(serve, ["migrate", str(tmp_path / "data")], catch_exceptions=False)
        assert (done.exit_code, done.output) == (0, "the database has this version's schema, and files can be stored\n")
    with sqlite3.connect(tmp_path / "data" / "archipel.db") as database:
        ((revision,),) = database.execute("SELECT version_num FROM alembic_version").fetchall()
    assert revision
