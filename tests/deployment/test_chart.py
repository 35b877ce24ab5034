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
from archipel.server.openid_settings import OpenId
from archipel.server.settings import Settings, load_settings
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
PROVIDER = "https://login.example:8443/realms/hospital"
BUCKET: dict[str, Any] = {
    "image": {"repository": "registry.example/archipel-server"},
    "secrets": {"server": "server-files", "database": "database", "s3": "s3"},
    "storage": {"bucket": "s3://archipel/server"},
}
VOLUME: dict[str, Any] = {
    "image": {"repository": "registry.example/archipel-server", "digest": "sha256:" + "0" * 64},
    "secrets": {"server": "server-files", "database": "database", "tls": "tls", "openid": "provider"},
    "storage": {"volume": {"size": "100Gi", "storageClass": "shared"}},
    "replicas": 1,
    "metricsPort": 9464,
    "docs": True,
    "livePages": 64,
    "openid": {
        "issuer": PROVIDER, "clientId": "archipel", "caKey": "ca.crt",
        "scopes": ["openid", "groups"], "admins": ['cn=ml,ou=a "b" <ö>', "ml"], "auditors": ["audit"],
        "populationsClaim": "sites",
    },
    "settings": {"retry_after": 3, "query_approval": True, "max_bundle_bytes": 2147483648, "log_format": "json"},
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
        mounted = [{each["name"] for each in container["volumeMounts"]} for container in pod["containers"]]
        assert mounted == [{each["name"] for each in pod["volumes"]} - {"secrets"}]
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
    known |= {f"openid_{field.name}" for field in msgspec.structs.fields(OpenId)}
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
@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (BUCKET, {"workers": 2, "blobs": "s3://archipel/server", "docs": False, "live_pages": 512, "openid": None}),
        (
            VOLUME,
            {
                "docs": True, "live_pages": 64, "retry_after": 3, "query_approval": True, "max_bundle_bytes": 1 << 31,
                "log_format": "json", "metrics_port": 9464,
                "openid": OpenId(
                    issuer=PROVIDER, client_id="archipel",
                    address="https://federation.example", secret_file="/openid/secret", ca_file="/openid/ca.crt",
                    scopes=("openid", "groups"), admins=('cn=ml,ou=a "b" <ö>', "ml"), auditors=("audit",),
                    populations_claim="sites",
                ),
            },
        ),
    ],
    ids=["bucket", "volume"],
)  # fmt: skip
def test_the_variables_are_the_settings_that_the_values_ask_for(
    values: Mapping[str, Any], wanted: Mapping[str, Any], tmp_path: Path
) -> None:
    """As the server reads them."""
    key = generate_key().public_key().public_bytes_raw()
    init_data_folder(tmp_path / "data", enrolment_key=key, publisher_keys=[key])
    file = tmp_path / "data" / "server.toml"
    file.write_text(f'metrics_token_sha256 = "{"0" * 64}"\n' + file.read_text())
    for pod in pods(documents(render(values))):
        container = pod["containers"][0]
        found = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        own = {name: value for name, value in found.items() if name.startswith("ARCHIPEL_")}
        settings = load_settings(tmp_path / "data", environment=own)
        assert {name: getattr(settings, name) for name in wanted} == wanted
        if settings.openid:
            (place,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/openid"]
            (volume,) = [each for each in pod["volumes"] if each["name"] == place["name"]]
            assert volume["secret"]["secretName"] == "provider"


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
    assert [port["port"] for port in policy["spec"]["egress"][1]["ports"]] == [5432, 443]


@pytest.mark.slow
@pytest.mark.parametrize(("issuer", "ports"), [("https://a.example/b", [5432, 443]), (PROVIDER, [5432, 443, 8443])])
def test_the_provider_of_identities_can_be_asked(issuer: str, ports: list[int]) -> None:
    secrets = {**BUCKET["secrets"], "openid": "provider"}
    openid = {"issuer": issuer, "clientId": "archipel", "address": "https://a.example", "operators": ["ml"]}
    rendered = documents(render({**BUCKET, "secrets": secrets, "openid": openid}))
    (policy,) = [each for each in rendered if each["kind"] == "NetworkPolicy"]
    assert [port["port"] for port in policy["spec"]["egress"][1]["ports"]] == ports


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
        ({"settings": {"live_pages": 3}}, "settings.live_pages: the chart has a value for this: livePages"),
        ({"settings": {"openid_claim": "a"}}, "settings.openid_claim: the chart has a value for this: openid"),
        ({"docs": "yes"}, "/docs"),
        ({"livePages": 2049}, "/livePages"),
        ({"openid": {"issuer": "http://login.example"}}, "/openid/issuer"),
        ({"openid": {"issuer": PROVIDER, "scopes": ["email"]}}, "/openid/scopes"),
        ({"openid": {"issuer": PROVIDER}}, "openid: set clientId"),
        ({"openid": {"issuer": PROVIDER, "clientId": "a"}}, "openid: name a value of the claim"),
        ({"openid": {"issuer": PROVIDER, "clientId": "a", "admins": ["b"]}}, "openid: set secrets.openid"),
        (
            {
                "openid": {"issuer": PROVIDER, "clientId": "a", "admins": ["b"]},
                "secrets": {**BUCKET["secrets"], "openid": "provider"},
            },
            "openid: set address",
        ),
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


@pytest.mark.sampled(every=6)
def test_migrate_makes_the_schema_and_may_be_run_again(tmp_path: Path) -> None:
    key = generate_key().public_key().public_bytes_raw()
    init_data_folder(tmp_path / "data", enrolment_key=key, publisher_keys=[key])
    for _ in range(2):
        done = CliRunner().invoke(serve, ["migrate", str(tmp_path / "data")], catch_exceptions=False)
        assert (done.exit_code, done.output) == (0, "the database has this version's schema, and files can be stored\n")
    with sqlite3.connect(tmp_path / "data" / "archipel.db") as database:
        ((revision,),) = database.execute("SELECT version_num FROM alembic_version").fetchall()
    assert revision
