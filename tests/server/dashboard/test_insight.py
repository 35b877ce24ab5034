"""The inside of models in the dashboard: what a process of its own reads of bundles and weights, and who gets it."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import WEIGHTS_FILE, read_weights, unpack, write_weights
from archipel.insight import documents as made
from archipel.server.dashboard.insight import DOCUMENTS, Documents, process
from archipel.server.database.tables import BundleRow
from tests.support.fixtures.insight import models, publish
from tests.support.fleet import MODEL, Fleet
from tests.support.real_graphs import CNN, sign_cnn
from tests.support.visitors import Visitor, access_token
from tests.support.world import World

SECONDS = 60.0
VERSION = f"/dashboard/models/{MODEL}/versions"


@pytest.fixture
def visitor(world: World) -> Visitor:
    return Visitor(world, access_token(world, "auditor")[0])


def fetch(visitor: Visitor, path: str, status: int = 200) -> Any:
    """A document, once it is made."""
    ends = time.monotonic() + SECONDS
    while (answer := visitor.get(path, **{"Accept-Encoding": "gzip"})).status_code == 202:
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert answer.status_code == status, answer.get_data(as_text=True)[:1000]
    data = answer.get_data()
    return json.loads(gzip.decompress(data) if answer.headers.get("Content-Encoding") == "gzip" else data)


def weights_of(file: Path, folder: Path) -> dict[str, np.ndarray]:
    unpack(file, folder)
    return read_weights(folder / WEIGHTS_FILE)


@pytest.mark.sampled(every=3)
def test_graphs_and_weights_of_a_version(world: World, visitor: Visitor, models: list[str], tmp_path: Path) -> None:
    html = visitor.page(f"{VERSION}/1/insight")
    address = f"/dashboard/insight/bundles/{models[0]}"
    assert f'data-page="{address}"' in html
    assert f"{VERSION}/1/insight" in visitor.page(f"{VERSION}/1")
    page = fetch(visitor, address)
    (subject,) = page["subjects"]
    predict = next(graph for graph in subject["graphs"] if graph["kind"] == "predict")
    unpack(CNN, tmp_path / "cnn")
    nodes = onnx.load(tmp_path / "cnn/predict.onnx").graph.node
    assert [node["op"] for node in predict["nodes"]] == [node.op_type for node in nodes]
    assert predict.get("times") is None, "nothing was run"
    array = read_weights(tmp_path / "cnn" / WEIGHTS_FILE)["4.weight"]
    (row,) = [row for row in subject["tensors"] if row["name"] == "4.weight"]
    assert row["statistics"]["mean"] == pytest.approx(array.mean(dtype=np.float64))
    facts = dict(subject["facts"])
    assert facts["signature"] == "verified"
    assert facts["memory at most, as the bundle states it"] == "81,656 bytes"
    # Of the machine nothing is in it.
    assert str(world.settings.folder) not in json.dumps(page)
    # It is kept: the same again needs no process, and who asks for it plainly gets it plainly.
    answer = visitor.get(address)
    assert (answer.status_code, answer.headers.get("Content-Encoding")) == (200, None)
    assert answer.headers["Cache-Control"] == "no-store"
    assert json.loads(answer.get_data()) == page


@pytest.mark.slow
def test_two_versions_side_by_side(world: World, visitor: Visitor, models: list[str]) -> None:
    html = visitor.page(f"{VERSION}/1/insight?with=2")
    address = f"/dashboard/insight/bundles/{models[0]}?with={models[1]}"
    assert address in html
    page = fetch(visitor, address)
    distances = {row["name"]: row for row in page["comparison"]["tensors"]}
    # 5 x 64 numbers that are 0.5 apart.
    assert distances["4.weight"]["distance"] == pytest.approx(0.5 * np.sqrt(5 * 64), rel=1e-5)
    assert distances["0.weight"]["distance"] == 0
    assert page["comparison"]["outputs"] == [], "nothing was run"


def test_addresses_that_lead_nowhere(visitor: Visitor, models: list[str]) -> None:
    assert visitor.get(f"{VERSION}/1/insight?with=3").status_code == 404
    assert visitor.get(f"{VERSION}/1/insight?with=x").status_code == 404
    assert visitor.get(f"/dashboard/insight/bundles/{models[0]}?with=../x").status_code == 422
    assert visitor.get(f"/dashboard/insight/bundles/{models[0]}?with={'0' * 64}").status_code == 404
    assert visitor.get(f"/dashboard/tasks/{'0' * 32}/insight").status_code == 404


@pytest.mark.sampled(every=3)
def test_histograms_of_rounds_and_of_what_a_training_made(world: World, visitor: Visitor, tmp_path: Path) -> None:
    devices = world.add_devices(3)
    bundle = publish(world, sign_cnn(tmp_path, world.keys.publisher))
    array = weights_of(CNN, tmp_path / "as-it-is")
    stored = world.services.blobs.put(write_weights({"0.weight": array["0.weight"] * 2, "4.weight": array["4.weight"]}))
    task = world.create_task(rounds=1, privacy="plain", threshold=None, cohort=3)["task_id"]
    world.start_round(devices)
    for device in devices:
        device.updating(**{"w.update": np.ones((3, 2), np.float32), "b.update": np.arange(2, dtype=np.float32),
                           "weight": np.array(1.0, np.float32)})  # fmt: skip
    world.settle()
    html = visitor.page(f"/dashboard/tasks/{task}/insight")
    (done,) = [each for each in world.rounds(task) if each["phase"] == "committed"]
    address = f"/dashboard/insight/weights/{done['weights_out']}"
    assert f"round 1&#34;, &#34;from&#34;: &#34;{address}" in html
    found = {row["name"]: row["statistics"] for row in fetch(visitor, address)["tensors"]}
    assert (found["w"]["mean"], found["b"]["high"]) == (1.0, 1.0)
    own = fetch(visitor, f"/dashboard/insight/bundles/{bundle}/weights")
    means = {row["name"]: row["statistics"]["mean"] for row in own["tensors"]}
    assert means["0.weight"] == pytest.approx(array["0.weight"].mean(dtype=np.float64))
    # Weights that no row names are nobody's.
    assert visitor.get(f"/dashboard/insight/weights/{stored}").status_code == 404
    assert visitor.get(f"/dashboard/insight/bundles/{bundle}?weights={stored}").status_code == 404


@pytest.mark.sampled(every=3)
def test_a_version_with_weights_of_its_own_has_their_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(CNN, tmp_path / "cnn")
    array = read_weights(tmp_path / "cnn" / WEIGHTS_FILE)["4.weight"]
    (tmp_path / "w").write_bytes(write_weights({"4.weight": array * 3, "none": array}))
    monkeypatch.chdir(tmp_path)
    # The key that everybody knows (web/tests/make_fixtures.py).
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()
    model = made.Stored(
        bundle=str(CNN), unpacked="cnn", weights="w",
        digest=hashlib.sha256((tmp_path / "cnn/manifest.json").read_bytes()).hexdigest(),
    )  # fmt: skip
    asked = made.Request(kind="page", models=[model], most_bytes=1 << 24, keys=[key.hex()])
    made.write_document(msgspec.json.encode(asked))
    page = json.loads((tmp_path / made.DOCUMENT).read_bytes())
    (subject,) = page["subjects"]
    mean = pytest.approx(3 * array.mean(dtype=np.float64))
    assert [row["statistics"]["mean"] for row in subject["tensors"] if row["name"] == "4.weight"] == [mean]
    for graph in subject["graphs"]:
        for value in graph["values"]:
            if value["name"] == "4.weight" and value.get("statistics"):
                assert value["statistics"]["mean"] == mean, graph["name"]
    assert any("1 tensors of the weights are not those of the bundle" in each for each in subject["notes"])


def test_names_of_the_process_and_of_the_server_are_the_same() -> None:
    assert (process.DOCUMENT, process.PROBLEM) == (made.DOCUMENT, made.PROBLEM)


@pytest.mark.sampled(every=3)
def test_what_cannot_be_read_is_said(world: World, visitor: Visitor, models: list[str]) -> None:
    with world.services.database.read() as session:
        file = session.get_one(BundleRow, models[0]).file_digest
    world.damage(f"sha256/{file[:2]}/{file}")
    (world.settings.bundle_folder / models[0] / "predict.onnx").unlink()
    problem = fetch(visitor, f"/dashboard/insight/bundles/{models[0]}/weights", 422)["problem"]
    assert "not a bundle file" in problem
    assert str(world.settings.folder) not in problem


@pytest.mark.sampled(every=3)
def test_graphs_that_cannot_be_shown_are_said(world: World, visitor: Visitor) -> None:
    Fleet(world).create(2)
    listed = visitor.page(f"{VERSION}/1/insight?with=2")
    start = listed.index("/dashboard/insight/bundles/")
    page = fetch(visitor, unescape(listed[start : listed.index('"', start)]))
    # The graphs of these bundles have no nodes, and no outputs.
    told = page["subjects"][0]["notes"]
    assert len(told) == 5
    assert all("no graph outputs" in each for each in told)
    assert "the two are not compared: model 1: no graph of it can be shown" in page["notes"][0]
    assert {row["name"] for row in page["subjects"][1]["tensors"]} == {"w", "b"}
    assert str(world.settings.folder) not in json.dumps(page)


@pytest.mark.sampled(every=3)
def test_one_document_is_made_at_a_time_and_old_ones_make_room(
    world: World, visitor: Visitor, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents: Documents = world.app.extensions[DOCUMENTS]
    paths = [f"/dashboard/insight/bundles/{digest}/weights" for digest in models]
    assert [visitor.get(path).status_code for path in paths] == [202, 202]
    assert documents._making.locked()
    fetch(visitor, paths[0])
    folder = world.settings.insight_folder
    assert len(list(folder.glob("*.gz"))) == 1
    # What a killed process has left goes with the next document.
    (folder / "making-left").mkdir()
    monkeypatch.setattr("archipel.server.dashboard.insight.documents.MOST_BYTES", 1)
    fetch(visitor, paths[1])
    deadline = time.monotonic() + 5
    while documents._making.locked() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path.suffix for path in folder.iterdir() if path.name != "lock"] == [".gz"]


def test_a_server_that_lacks_what_reads_graphs_says_so(
    world: World, visitor: Visitor, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # A library that is there and does not work.
        patch.setattr(process, "_START", f"raise ImportError('no libstdc++')\n{process._START}")
        problem = fetch(visitor, f"/dashboard/insight/bundles/{models[1]}/weights", 422)["problem"]
        assert "the server's log says how" in problem
    monkeypatch.setattr(process, "NEEDS", ("no_such_library",))
    problem = fetch(visitor, f"/dashboard/insight/bundles/{models[0]}", 422)["problem"]
    assert "pip install 'archipel[insight]'" in problem


def test_script_and_styles_are_files_of_the_server(visitor: Visitor, models: list[str]) -> None:
    html = visitor.page(f"{VERSION}/1/insight")
    for name, kind in (("insight.js", "text/javascript"), ("insight.css", "text/css")):
        start = html.index(f"/dashboard/static/{name}?v=")
        address = html[start : html.index('"', start)]
        with visitor.get(address) as plain, visitor.get(address, **{"Accept-Encoding": "gzip"}) as packed:
            assert (plain.status_code, packed.status_code, plain.mimetype) == (200, 200, kind)
            assert "immutable" in packed.headers["Cache-Control"]
            assert packed.headers["Content-Security-Policy"] == plain.headers["Content-Security-Policy"]
            assert gzip.decompress(packed.get_data()) == plain.get_data()
            assert packed.headers["ETag"] != plain.headers["ETag"]
        with visitor.get(address, **{"If-None-Match": plain.headers["ETag"]}) as again:
            assert (again.status_code, again.get_data()) == (304, b"")
    assert "<script>" not in html
    assert "<style" not in html


KILLED = """
import sys
from pathlib import Path
from archipel.server.dashboard.insight import process
wait = "import time; open('part', 'w').write(str(os.getpid())); os.rename('part', 'begun'); time.sleep(60)"
process._START = process._START.replace("write_document(request)", wait)
process.make_document({"kind": "histograms", "models": []}, [], Path(sys.argv[1]))
"""


@pytest.mark.sampled(every=3)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends at its limits of time")
def test_a_web_process_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    begun, ends = tmp_path / "begun", time.monotonic() + SECONDS
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)]) as web:
        while not begun.exists():
            assert time.monotonic() < ends
            time.sleep(0.02)
        reader = Path(f"/proc/{begun.read_text()}/cmdline")
        assert b"write_document" in reader.read_bytes()
        web.kill()
    # A process that has ended has no command line, whether somebody has waited for it yet or not.
    while reader.exists() and reader.read_bytes():
        assert time.monotonic() < ends
        time.sleep(0.02)
