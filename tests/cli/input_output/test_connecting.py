"""What is said where a command cannot reach its server as it was told to, and where a server's error comes back."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.federation.test_remote import TASK, served, task  # noqa: F401  (fixtures)

Command = Callable[..., tuple[str, str]]
AWAY = ("--server", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "content",
    [
        b"import numpy as secret\nprint(1)\n",
        b"-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----\n",
        b"secret\xff\xfe\x00",
        "sécret".encode(),
        b"secret" * 1000,
    ],
)
def test_a_file_that_holds_no_token(
    archipel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    file = tmp_path / "junk"
    file.write_bytes(content)
    said = "expected an access token, one line of printable ASCII without blanks\n"
    assert archipel("task", "list", *AWAY, "--token-file", str(file), code=1)[1] == f"archipel: {file}: {said}"
    monkeypatch.setenv("ARCHIPEL_TOKEN", os.fsdecode(content.replace(b"\0", b"")))
    assert archipel("task", "list", *AWAY, code=1)[1] == f"archipel: ARCHIPEL_TOKEN: {said}"


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("127.0.0.1:28470", "expected a URL that starts with https:// or http://, got '127.0.0.1:28470'"),
        ("", "expected a URL that starts with https:// or http://, got ''"),
        ("ftp://federation.example", "starts with https:// or http://"),
        ("https://", "expected a host and maybe a port"),
        ("http://federation.example:99999", "expected a host and maybe a port"),
        ("http://me:secret@federation.example", "expected a host and maybe a port"),
        ("http://federation example", "expected a host and maybe a port"),
        ("http://federation.example", "plain http:// to federation.example, where everybody on the way can read"),
    ],
)
def test_an_address_that_is_none(
    archipel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, said: str
) -> None:
    monkeypatch.setenv("ARCHIPEL_TOKEN", "t" * 43)
    _, err = archipel("task", "list", "--server", server, code=1)
    assert err.startswith("archipel: --server or ARCHIPEL_SERVER: ")
    assert said in err
    assert ("set --allow-http or ARCHIPEL_ALLOW_HTTP=1" in err) == ("plain http" in err)
    assert "secret" not in err
    assert err.count("\n") == 1


def test_files_for_tls_and_an_address_without_it(
    archipel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHIPEL_TOKEN", "t" * 43)
    for option in ("--ca", "--client-certificate", "--client-key"):
        assert f"{option} or ARCHIPEL_C" in archipel("task", "list", *AWAY, option, "x.pem", code=1)[1]
    monkeypatch.setenv("ARCHIPEL_CA", "ca.pem")
    assert archipel("task", "list", *AWAY, code=1)[1] == (
        "archipel: --ca or ARCHIPEL_CA is for https://, and the server's address is http://127.0.0.1:1\n"
    )


@pytest.mark.sampled(every=3)
def test_nobody_listens(archipel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPEL_TOKEN", "t" * 43)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    _, err = archipel("task", "list", "--server", url, code=1)
    assert err == f"archipel: {url}: no answer to GET /v1/tasks?limit=100 (connection refused)\n"


@pytest.mark.sampled(every=4)
def test_an_error_of_the_server_has_its_request_id(archipel: Command, served: Path) -> None:  # noqa: F811
    with sqlite3.connect(served / "server" / "archipel.db") as database:
        database.execute("PRAGMA foreign_keys = OFF")
        database.execute("DROP TABLE tasks")
    _, err = archipel("task", "list", code=1)
    request = err.rsplit("request ", 1)[1].removesuffix(")\n")
    log = [line for line in (served / "server" / "requests.log").read_text().splitlines() if '"status":500' in line]
    assert f"(HTTP 500, internal, request {request})" in err
    assert len(log) == 1
    assert request in log[0]


@pytest.mark.sampled(every=4)
def test_a_mark_under_a_place_stays_below_it(archipel: Command, served: Path) -> None:  # noqa: F811
    (served / "task.toml").write_text(TASK.replace('"charging"', '"ram > 5mb"'))
    bundle = str(served / "tiny.bundle")
    first, *others = archipel("task", "create", str(served / "task.toml"), "--bundle", bundle, code=1)[1].splitlines()
    assert first.endswith("(HTTP 422, unprocessable)")
    expression, mark = others
    assert expression.strip() == "ram > 5mb"
    assert mark.strip() == "^"


TOKEN = ("--server-key", "server.key.pub", "--publisher-key", "server.key.pub", "--enrolment-key", "enrolment")


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"--server": "federation.example"}, 1, "--server: expected a URL that starts with https:// or http://"),
        ({"--population": "../evil"}, 1, "--population: expected up to 128 letters"),
        ({"--population": ""}, 1, "--population: expected"),
        ({"--population": "a b/../c"}, 1, "--population: expected"),
        ({"--days": "0"}, 2, "--days"),
        ({"--days": "999999999"}, 2, "--days"),
        ({"--count": "0"}, 2, "--count"),
    ],
)
@pytest.mark.sampled(every=6)
def test_enrolment_tokens_that_would_be_none(
    archipel: Command,
    served: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(served)
    before = sorted(served.rglob("*"))
    options: dict[str, str] = {"--server": "http://127.0.0.1:8470", "--population": "pupils", **changes}
    _, err = archipel("token", *TOKEN, *sum(options.items(), ()), "tokens", code=code)
    assert said in err
    assert sorted(served.rglob("*")) == before
