"""Bundles in and out, and which tasks are possible."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import generate_key, open_bundle
from archipel.protocol.messages import Pieces
from archipel.protocol.sealed import decode, public_bytes
from archipel.server.storage import pieces
from tests.support.world import World


def test_a_bundle_goes_in_once_and_comes_out_the_same(world: World, tmp_path: Path) -> None:
    data = world.bundle_file.read_bytes()
    status, info = world.operator("POST", "/v1/bundles", data)
    assert status == 201
    assert info == {"digest": info["digest"], "name": "tiny", "bytes": len(data), "strategy": "fedavg",
                    "published": world.clock.now}  # fmt: skip
    assert world.operator("POST", "/v1/bundles", data) == (200, info)
    (device,) = world.add_devices(1)
    # Not a device's business before a task of its population is about it.
    assert device.call("GET", f"/v1/bundles/{info['digest']}")[0] == 404
    world.create_task(bundle=info["digest"])
    status, answer = device.call("GET", f"/v1/bundles/{info['digest']}")
    assert (status, answer) == (200, data)
    (tmp_path / "back.bundle").write_bytes(answer)
    bundle = open_bundle(tmp_path / "back.bundle", [public_bytes(world.keys.publisher)], tmp_path / "cache")
    assert bundle.digest == info["digest"]
    assert world.stored("incoming") == {}


def test_ranges_and_etags(world: World) -> None:
    digest = world.publish()
    data = world.bundle_file.read_bytes()
    url, operator = f"/v1/bundles/{digest}", {"Authorization": f"Bearer {world.operator_token}"}
    with world.app.test_client() as client:
        with client.get(url, headers=operator) as whole:
            assert whole.headers["ETag"] == f'"{digest}"'
            assert whole.headers["Accept-Ranges"] == "bytes"
        with client.get(url, headers=operator | {"Range": "bytes=100-"}) as rest:
            assert (rest.status_code, rest.get_data()) == (206, data[100:])
            assert rest.headers["Content-Range"] == f"bytes 100-{len(data) - 1}/{len(data)}"
        with client.get(url, headers=operator | {"Range": "bytes=0-9"}) as head:
            assert head.get_data() == data[:10]
        with client.get(url, headers=operator | {"Range": f"bytes={len(data)}-"}) as beyond:
            assert beyond.status_code == 416
        with client.get(url, headers=operator | {"If-None-Match": f'"{digest}"'}) as same:
            assert (same.status_code, same.get_data()) == (304, b"")
        with client.get(url, headers=operator | {"Range": "bytes=5-", "If-Range": '"other"'}) as changed:
            assert (changed.status_code, changed.get_data()) == (200, data)
        with client.head(url, headers=operator) as only:
            assert (only.status_code, only.content_length, only.get_data()) == (200, len(data), b"")


def test_what_files_are_made_of(world: World) -> None:
    digest, data = world.publish(), world.bundle_file.read_bytes()
    task = world.create_task()
    world.settle()
    weights = world.task(task["task_id"])["model"]
    (device,) = world.add_devices(1)
    for path, content in (
        (f"bundles/{digest}", data),
        (f"blobs/{weights}", device.call("GET", f"/v1/blobs/{weights}")[1]),
    ):
        status, answer = device.call("GET", f"/v1/{path}/pieces")
        assert (status, answer["size"]) == (200, len(content))
        at = 0
        for piece in answer["pieces"]:
            assert piece["offset"] >= at
            at = piece["offset"] + piece["length"]
            assert hashlib.sha256(content[piece["offset"] : at]).hexdigest() == piece["sha256"]
        assert at <= len(content)
        if path.startswith("bundles"):
            # The rest is signature, headers and directory of the archive.
            assert sum(piece["length"] for piece in answer["pieces"]) > len(data) - 2500


def test_pieces_are_worked_out_once_and_the_last_few_files_are_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = world.app.extensions["archipel"].blobs
    table = pieces.PieceTable(blobs)
    digests = [blobs.put(np.random.default_rng(n).bytes(1000 + n)) for n in range(pieces.KEPT + 1)]
    opened: list[str] = []
    right = pieces.pieces_of
    monkeypatch.setattr(pieces, "pieces_of", lambda path: opened.append(path.name) or right(path))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(table.of, [*digests[:3] * 20]))
    assert sorted(opened) == sorted(digests[:3])
    assert answers[:3] * 20 == answers
    assert [decode("pieces", answer, Pieces).size for answer in answers[:3]] == [1000, 1001, 1002]
    for digest in digests:
        table.of(digests[0])
        table.of(digest)
    assert sorted(opened) == sorted(digests)
    table.of(digests[1])
    assert opened[-1] == digests[1]


def test_of_many_parts_the_largest_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(200_000))
    every = pieces.pieces_of(path).pieces
    monkeypatch.setattr(pieces, "MAX_PIECES", 5)
    some = pieces.pieces_of(path)
    assert [piece.offset for piece in some.pieces] == sorted(piece.offset for piece in some.pieces)
    lengths = sorted((piece.length for piece in every), reverse=True)
    assert sorted((piece.length for piece in some.pieces), reverse=True) == lengths[:5]


def test_bundles_that_are_refused(world: World, tmp_path: Path, bundle_maker: Callable[..., Path]) -> None:
    foreign = bundle_maker(tmp_path / "foreign", generate_key()).read_bytes()
    data = world.bundle_file.read_bytes()
    damaged = bytearray(data)
    damaged[data.index(b"finish.onnx") + len(b"finish.onnx")] ^= 1
    for body, said in (
        (foreign, "none of the 1 trusted keys signed"),
        (data[:-10], ""),
        (bytes(damaged), ""),
        (b"PK", ""),
    ):
        status, answer = world.operator("POST", "/v1/bundles", body)
        assert status == 422, answer
        assert said in answer["detail"]
        assert str(world.settings.folder) not in str(answer)
    assert world.stored("incoming") == {}
    assert world.stored("sha256") == {}


def test_a_bundle_beyond_the_limit_is_refused_before_it_is_read(world: World) -> None:
    headers = {"Authorization": f"Bearer {world.operator_token}"}
    length = {"CONTENT_LENGTH": str(world.settings.max_bundle_bytes + 1)}
    with world.app.test_client() as client:
        response = client.post("/v1/bundles", data=b"x", headers=headers, environ_overrides=length)
        assert response.status_code == 413


def test_blobs_that_are_not_weights_are_not_given_out(world: World) -> None:
    world.create_task()
    world.settle()
    (device,) = world.add_devices(1)
    file_digest = hashlib.sha256(world.bundle_file.read_bytes()).hexdigest()
    assert f"{file_digest[:2]}/{file_digest}" in world.stored("sha256")
    for path in ("", "/pieces"):
        assert device.call("GET", f"/v1/blobs/{file_digest}{path}")[0] == 404
        assert device.call("GET", f"/v1/blobs/{'0' * 64}{path}")[0] == 404
        assert device.call("GET", f"/v1/bundles/{'0' * 64}{path}")[0] == 404


def test_a_task_begins_with_the_bundles_own_parameters(world: World) -> None:
    from archipel.bundle import read_weights

    task = world.create_task()
    assert (task["state"], task["model"], task["threshold"]) == ("running", None, 3)
    assert task["deadlines"]["advertising"] == 120
    world.settle()
    status, data = world.operator("GET", f"/v1/blobs/{world.task(task['task_id'])['model']}")
    assert status == 200
    parameters = read_weights(data)
    assert set(parameters) == {"w", "b"}
    np.testing.assert_array_equal(parameters["w"], np.zeros((3, 2), np.float32))


def test_the_settings_of_a_task_reach_the_plan(world: World) -> None:
    world.create_task(
        cohort=5,
        min_cohort=3,
        threshold=4,
        hyperparameters={"lr": 0.5, "server_lr": 0.25},
        deadlines={"advertising": 7},
    )
    devices = world.add_devices(5)
    world.start_round(devices)
    plan = devices[0].plan
    assert (plan.min_cohort, plan.max_cohort, plan.threshold, plan.modulus_bits) == (3, 5, 4, 24)
    # The server's half of the strategy keeps its own.
    assert plan.hyperparameters == {"lr": 0.5}
    assert devices[0].status().phase_ends == world.clock.now + 7


def test_the_threshold_defaults_to_the_policys_smallest(world: World) -> None:
    for cohort, expected in ((3, 2), (4, 3), (5, 3), (10, 6), (20, 12)):
        task = world.create_task(cohort=cohort, threshold=None)
        assert task["threshold"] == expected


IMPOSSIBLE = {
    "cohort below min_cohort": ({"cohort": 2}, "cohort: 2 is below min_cohort 3"),
    "cohort below threshold": ({"threshold": 6}, "cohort: 5 is below"),
    "threshold ratio": ({"cohort": 10, "threshold": 5}, "threshold 5 of max_cohort 10"),
    "min_cohort of the policy": ({"min_cohort": 2}, "min_cohort 2 is below the policy's 3"),
    "goal too small": ({"goal": 2}, "goal: 2 is not from 3"),
    "goal too large": ({"goal": 6}, "goal: 6 is not from 3"),
    "hyperparameter unknown": ({"hyperparameters": {"momentum": 0.9}}, "'momentum'"),
    "hyperparameter out of bounds": ({"hyperparameters": {"lr": 2.0}}, "2.0 is not from 0.0 to 1.0"),
    "no bundle": ({"bundle": "0" * 64}, "upload it first"),
}


def test_impossible_tasks_are_refused(world: World) -> None:
    possible = {
        "name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 5, "threshold": 3,
        "bundle": world.publish(),
    }  # fmt: skip
    for case, (settings, said) in IMPOSSIBLE.items():
        status, answer = world.operator("POST", "/v1/tasks", possible | settings)
        assert status == 422, (answer, case)
        assert said in answer["detail"], case
    assert world.operator("GET", "/v1/tasks") == (200, {"items": [], "next": None})


def test_malformed_tasks_are_refused(world: World) -> None:
    for settings in (
        {"rounds": 0},
        {"min_cohort": 0},
        {"cohort": 5000},
        {"privacy": "plainly"},
        {"deadlines": {"dawdling": 5}},
        {"deadlines": {"sharing": 0}},
        {"deadlines": {"sharing": 1e9}},
        {"hyperparameters": {"lr": "fast"}},
        {"name": "../x"},
        {"name": ""},
        {"colour": "red"},
    ):
        values = {
            "name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 5,
            "bundle": "0" * 64, **settings,
        }  # fmt: skip
        status, answer = world.operator("POST", "/v1/tasks", values)
        assert status == 400, (answer, settings)


def test_a_bundle_with_an_unknown_strategy(world: World, tmp_path: Path, bundle_maker: Callable[..., Path]) -> None:
    file = bundle_maker(tmp_path / "odd", world.keys.publisher, name="odd", strategy="fedmagic")
    status, info = world.operator("POST", "/v1/bundles", file.read_bytes())
    assert (status, info["strategy"]) == (201, "fedmagic")
    values = {"name": "x", "population": "p", "rounds": 1, "min_cohort": 3, "cohort": 5, "bundle": info["digest"]}
    status, answer = world.operator("POST", "/v1/tasks", values)
    assert status == 422, answer
    assert "fedmagic" in answer["detail"]


@pytest.mark.sampled(every=3)
def test_rounds_tell_how_far_each_device_came(world: World) -> None:
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    for device in devices[:4]:
        device.advertising()
    world.clock.now += 121
    world.settle()
    for device in devices[:3]:
        device.sharing()
    (info,) = world.rounds(task["task_id"])
    furthest = {participant["device_id"]: participant["furthest"] for participant in info["participants"]}
    assert furthest == {
        **{device.id: "sharing" for device in devices[:3]},
        devices[3].id: "advertising",
        devices[4].id: "assigning",
    }
    sent = {participant["device_id"]: participant["bytes_uploaded"] for participant in info["participants"]}
    assert sent[devices[4].id] == 0 < sent[devices[3].id] < sent[devices[0].id]
    assert world.operator("GET", f"/v1/tasks/{'0' * 32}/rounds")[0] == 404
