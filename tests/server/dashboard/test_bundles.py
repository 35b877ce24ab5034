"""Bundles on pages: what the server has, and the upload of another in a form."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from werkzeug.test import TestResponse

from archipel.bundle import open_bundle
from tests.support.devices import POPULATION
from tests.support.tiny_bundle import make_bundle
from tests.support.visitors import Visitor, access_token, fill
from tests.support.world import World

UPLOAD = "/dashboard/bundles/upload"
BOUNDARY = "----form0123"


@pytest.fixture
def visitor(world: World) -> Visitor:
    return Visitor(world, access_token(world, "operator")[0])


def upload(visitor: Visitor, file: bytes, name: str = "linear.bundle", **headers: str) -> TestResponse:
    return visitor.send(UPLOAD, {"csrf": visitor.csrf, "bundle": (BytesIO(file), name)}, **headers)


def part(name: str, value: bytes, file: str | None = None) -> bytes:
    of_file = "" if file is None else f'; filename="{file}"\r\nContent-Type: application/octet-stream'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{of_file}\r\n\r\n'
    return head.encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


def send_raw(visitor: Visitor, body: bytes, kind: str = f"multipart/form-data; boundary={BOUNDARY}") -> TestResponse:
    return visitor.client.post(
        UPLOAD, base_url=visitor.base, data=body, content_type=kind, headers={"Origin": visitor.base}
    )


def test_a_bundle_of_a_browser_becomes_a_version_and_a_task(world: World, visitor: Visitor) -> None:
    assert "There is no bundle. Upload one" in visitor.words("/dashboard/bundles")
    file = world.bundle_file.read_bytes()
    digest = open_bundle(world.bundle_file, world.settings.trusted_keys).digest
    answer = upload(visitor, file)
    assert answer.status_code == 303, answer.get_data(as_text=True)
    path = f"/dashboard/bundles/{digest}"
    assert answer.headers["Location"] == f"{path}?done=upload"
    assert "The bundle is on the server." in visitor.words(f"{path}?done=upload")
    assert world.operator("GET", f"/v1/bundles/{digest}")[0] == 200
    # The same again changes nothing.
    assert upload(visitor, file).headers["Location"] == answer.headers["Location"]
    (listed,) = world.operator("GET", "/v1/bundles")[1]["items"]
    assert listed == {"digest": digest, "name": "tiny", "bytes": len(file), "strategy": "fedavg",
                      "published": world.clock.now}  # fmt: skip
    assert f'href="{path}"' in visitor.page("/dashboard/bundles")

    model = fill(visitor, "/dashboard/new-model", name="digits", population=POPULATION)
    assert f'href="{model}/register?bundle={digest}"' in visitor.page(path)
    form = visitor.page(f"{model}/register")
    assert f'<option value="{digest}">tiny, ' in form
    assert f'href="{UPLOAD}"' in form
    assert fill(visitor, f"{model}/register", bundle=digest[:8]) == f"{model}/versions/1"
    assert f'href="{path}"' in visitor.page(f"{model}/versions/1")
    assert f'name="bundle" value="{digest}"' in visitor.page(f"/dashboard/tasks/new?bundle={digest}")
    entries = world.operator("GET", "/v1/audit?limit=100")[1]["items"]
    assert [each["subject"] for each in entries if each["action"] == "bundle.publish"] == [digest]


def test_what_is_no_bundle_is_refused_on_the_form_and_nothing_is_kept(
    world: World, visitor: Visitor, tmp_path: Path
) -> None:
    answer = upload(visitor, b"PK\x03\x04 no bundle")
    assert answer.status_code == 422
    words = answer.get_data(as_text=True)
    assert 'role="alert">The body is not a bundle that this server accepts: ' in words
    assert str(world.settings.folder) not in words
    stranger = make_bundle(tmp_path, Ed25519PrivateKey.generate())
    answer = upload(visitor, stranger.read_bytes())
    assert answer.status_code == 422
    assert "add its publisher" in answer.get_data(as_text=True)
    answer = upload(visitor, b"", name="")
    assert answer.status_code == 422
    assert "No file was chosen; choose a .bundle file" in answer.get_data(as_text=True)
    assert world.stored("") == {}
    assert world.operator("GET", "/v1/bundles")[1]["items"] == []


def test_a_file_that_is_too_large_is_refused_before_it_is_read(world: World, visitor: Visitor) -> None:
    most = world.settings.max_bundle_bytes
    assert f'data-most="{most}"' in visitor.page(UPLOAD)

    class Endless(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise AssertionError("the body was read")

    answer = visitor.client.post(
        UPLOAD, base_url=visitor.base, input_stream=Endless(), headers={"Origin": visitor.base},
        content_type=f"multipart/form-data; boundary={BOUNDARY}",
        environ_overrides={"CONTENT_LENGTH": str(most + 5000)},
    )  # fmt: skip
    assert answer.status_code == 413


def test_pages_of_bundles_newest_first(world: World, visitor: Visitor) -> None:
    world.publish()
    world.clock.now += 10
    digests = [each["digest"] for each in world.operator("GET", "/v1/bundles?limit=1")[1]["items"]]
    assert world.operator("GET", f"/v1/bundles?limit=1&after={digests[0]}")[1] == {"items": [], "next": None}
    assert world.operator("GET", f"/v1/bundles?after={'0' * 64}")[0] == 404
    answer = visitor.get(f"/dashboard/bundles/{'0' * 64}")
    assert answer.status_code == 404
    assert f"No bundle {'0' * 64}" in answer.get_data(as_text=True)


def test_who_is_bound_to_another_population_sees_no_bundle_of_this_one(world: World) -> None:
    digest = world.publish()
    status, _ = world.operator("POST", f"/v1/bundles?population={POPULATION}", world.bundle_file.read_bytes())
    assert status == 201
    here, there = (
        Visitor(world, access_token(world, "operator", populations=[name])[0]) for name in (POPULATION, "others")
    )
    assert f"/dashboard/bundles/{digest}" in here.page("/dashboard/bundles")
    assert "There is no bundle." in there.words("/dashboard/bundles")
    assert there.get(f"/dashboard/bundles/{digest}").status_code == 404
    # Their own upload of the same file is theirs.
    assert upload(there, world.bundle_file.read_bytes()).status_code == 303
    assert f"/dashboard/bundles/{digest}" in there.page("/dashboard/bundles")


TOKEN = b"{csrf}"
"""Stands for the session's token in the forms below."""
BROKEN: list[tuple[bytes, int]] = [
    (END, 403),
    (part("csrf", TOKEN)[:-20], 400),
    (part("csrf", TOKEN), 400),
    (part("csrf", TOKEN) + END, 400),
    (part("csrf", b"x" * 100_000) + END, 403),
    (part("bundle", b"PK", "a.bundle") + part("csrf", TOKEN) + END, 403),
    (part("csrf", TOKEN, "a.bundle") + END, 403),
    (part("csrf", TOKEN) + part("bundle", b"PK") + END, 400),
    (part("csrf", TOKEN) + part("other", b"PK", "a.bundle") + END, 400),
    (part("csrf", TOKEN) + part("bundle", b"PK", "a.bundle"), 400),
    (part("csrf", TOKEN) + part("bundle", b"PK", "a.bundle") + part("more", b"1") + END, 413),
    (b"--" + BOUNDARY.encode() + b"\r\n\r\nwithout a head\r\n" + END, 400),
    (b"--" + BOUNDARY.encode() + b"\r\nContent-Disposition: form-data; name=\"\xff\"\r\n\r\n" + END, 400),
    (b"--" + BOUNDARY.encode() + b"\r\n" + b"a" * 600_000, 413),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status"), BROKEN, ids=range(len(BROKEN)))
def test_broken_forms(world: World, visitor: Visitor, body: bytes, status: int) -> None:
    answer = send_raw(visitor, body.replace(TOKEN, visitor.csrf.encode()))
    assert answer.status_code == status, answer.get_data(as_text=True)
    assert answer.mimetype == "text/html"
    assert world.stored("") == {}


@pytest.mark.parametrize("kind", ["application/zip", "multipart/form-data", "text/plain; boundary=x", ""])
def test_other_kinds_of_bodies(visitor: Visitor, kind: str) -> None:
    assert send_raw(visitor, part("csrf", visitor.csrf.encode()) + END, kind).status_code == 415


@pytest.mark.sampled(every=3)
def test_any_bytes_as_a_form(world: World) -> None:
    """Of a session's own, of which any stretch is replaced: nothing but a whole bundle is ever taken."""
    visitor = Visitor(world, access_token(world, "operator")[0])
    csrf = visitor.csrf.encode()
    whole = part("csrf", csrf) + part("bundle", world.bundle_file.read_bytes()[:2000], "a.bundle") + END

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.integers(0, len(whole)), st.integers(0, 300), st.binary(max_size=300))
    @example(0, len(whole), b"")
    @example(len(whole), 0, b"\r\n")
    def check(at: int, length: int, other: bytes) -> None:
        answer = send_raw(visitor, whole[:at] + other + whole[at + length :])
        assert answer.status_code in (400, 403, 413, 422), answer.get_data(as_text=True)
        # Limits count requests, also those that are refused.
        world.clock.now += 60

    check()
    assert world.stored("") == {}


def test_forms_of_other_sites_and_sessions_are_not_read(world: World, visitor: Visitor) -> None:
    file: dict[str, Any] = {"bundle": (BytesIO(world.bundle_file.read_bytes()), "a.bundle")}
    answer = visitor.send(UPLOAD, {"csrf": visitor.csrf, **file}, **{"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403
    other = Visitor(world, access_token(world, "operator")[0])
    for csrf in (other.csrf, "", "x" * 43):
        file = {"bundle": (BytesIO(world.bundle_file.read_bytes()), "a.bundle")}
        answer = visitor.send(UPLOAD, {"csrf": csrf, **file})
        assert answer.status_code == 403
        assert "this form is not of your session" in answer.get_data(as_text=True).lower()
    assert world.stored("") == {}
