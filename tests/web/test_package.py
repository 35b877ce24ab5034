"""The npm package: what is in it, that TypeScript and Node take it, and pages that bundlers build with it."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import gzip
import json
import re
import shutil
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser
from safetensors.numpy import load_file

import archipel
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.npm_package import (
    MODEL,
    ROOT,
    WEB,
    Site,
    archive,
    job,
    numbers,
    project,
    run,
    serve,
    vite_page,
)

MAX_BYTES = 120_000
"""Of the archive without `archipel-web/device`; it has everything but ONNX Runtime."""
MAX_DEVICE_BYTES = 150_000
"""Of what `archipel-web/device` adds to the archive."""


@pytest.mark.sampled(every=4)
def test_what_is_in_it(archive: Path) -> None:
    assert archive.stat().st_size < MAX_BYTES + MAX_DEVICE_BYTES
    with tarfile.open(archive) as packed:
        files = {entry.name.removeprefix("package/"): packed.extractfile(entry).read() for entry in packed}  # type: ignore[union-attr]
    own = b"".join(data for name, data in sorted(files.items()) if not name.startswith("dist/device/"))
    assert len(gzip.compress(own)) < MAX_BYTES
    described = json.loads(files["package.json"])
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert described["version"] == declared["version"] == archipel.__version__
    assert described["license"] == declared["license"]
    assert files["LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert described["dependencies"].keys() == {"onnxruntime-web"}
    assert described.keys() & {"private", "scripts", "devDependencies"} == set()
    assert {name for name in files if not re.fullmatch(r"dist/[\w/]+(\.d\.ts|\.js)", name)} == {
        "package.json", "README.md", "LICENSE",
    }  # fmt: skip
    entries = [target for entry in (".", "./device") for target in described["exports"][entry].values()]
    for target in (described["types"], *entries, *described["sideEffects"]):
        assert target.removeprefix("./") in files
    sources = {path.relative_to(WEB / "src").with_suffix("") for path in (WEB / "src").rglob("*.ts")}
    for suffix in (".js", ".d.ts"):
        assert {Path(name[5 : -len(suffix)]) for name in files if name.endswith(suffix)} == sources
    for name, text in files.items():
        for wanted in re.findall(rb"""(?:from |import\(|import |new URL\()["'](\.[^"']+)["']""", text):
            if name.endswith((".js", ".d.ts")):
                found = (Path("/") / name).parent.joinpath(wanted.decode()).resolve().relative_to("/")
                assert str(found) in files, f"{name} refers to {wanted.decode()}"


@pytest.mark.parametrize("resolution", [("bundler", "esnext"), ("nodenext", "nodenext")], ids="/".join)
@pytest.mark.sampled(every=8)
def test_typescript_takes_it(project: Path, resolution: tuple[str, str]) -> None:
    run(
        "node_modules/typescript/bin/tsc", "--noEmit", "--strict", "--exactOptionalPropertyTypes", "--skipLibCheck",
        "false", "--types", "", "--lib", "es2023,dom", "--target", "es2022", "--moduleResolution", resolution[0],
        "--module", resolution[1], "types.ts", cwd=project,
    )  # fmt: skip


@pytest.mark.sampled(every=4)
def test_node_takes_it(project: Path) -> None:
    script = """
        import { readFileSync } from "node:fs";
        import { load } from "archipel-web";
        const file = new Uint8Array(readFileSync(process.argv[1]));
        const runtime = await load(file, { trustedKeys: [process.argv[2]] });
        const x = { dtype: "float32", dims: [1, 12], data: new Float32Array(12) };
        console.log((await runtime.predict(x)).dims.join());
    """
    given = str(WEB / "tests" / "fixtures" / "mlp.bundle"), numbers()["publicKey"]
    assert run("node", "--input-type=module", "--eval", script, *given, cwd=project) == "1,4\n"


@pytest.mark.parametrize("bundler", ["vite", pytest.param("webpack", marks=pytest.mark.slow)])
@pytest.mark.sampled(every=8)
def test_a_page_that_a_bundler_builds(
    chromium: Browser,
    request: pytest.FixtureRequest,
    project: Path,
    serve: Callable[[Path], Site],
    bundler: str,
) -> None:
    """Without settings of the bundler: the page loads a signed bundle, learns in the worker and answers."""
    if bundler == "vite":
        page: Path = request.getfixturevalue("vite_page")
        # Workers have scripts of their own, with ONNX Runtime in them; `core` is for pages that want no worker.
        built = {file.name: file.read_bytes() for file in (page / "assets").glob("*.js")}
        own = {name: data for name, data in built.items() if not name.startswith(("ort.", "wasm-", "webgpu-"))}
        assert 30_000 < sum(len(data) for name, data in own.items() if not name.startswith("core-")) < 70_000
        assert 30_000 < sum(len(gzip.compress(data)) for data in own.values()) < 60_000
    else:
        run("node", "webpack.mjs", cwd=project)
        page = project / "dist"
        (page / "index.html").write_text((project / "index.html").read_text().replace('type="module"', "defer"))
        shutil.copy(MODEL, page / "model.bundle")
        shutil.copy(WEB / "demo" / "public" / "icon.svg", page)
    site = serve(page.parent)
    task, expected = job(), numbers()
    with chromium.new_context() as context:
        opened, said, workers = context.new_page(), [], []
        opened.on("console", lambda line: said.append(f"{line.type}: {line.text}"))
        opened.on("pageerror", lambda error: said.append(f"error: {error}"))
        opened.on("worker", lambda worker: workers.append(worker.url))
        opened.goto(f"{site.address}{page.name}/")
        found = opened.evaluate("job => window.learn(job)", task)
        assert len(workers) == 1
        threaded = opened.evaluate("job => window.learn(job)", {**task, "options": {"delegate": "wasm", "threads": 2}})
        assert len(workers) == 3  # the next runtime's, and its thread
        assert said == []
        opened.evaluate("() => window.readme().then(() => undefined)")
        assert opened.evaluate("() => window.slots()") == ["mlp: mine"]
    # Chromium itself says so where "auto" asks whether there is a GPU.
    said = [line for line in said if line != "warning: No available adapters."]
    assert said == ["log: wasm: 20 steps, answers of shape 60,4"]
    assert site.missing == []
    arrays = load_file(MODEL.with_suffix(".safetensors"))
    for each in (found, threaded):
        assert each["loaded"] == MODEL.stat().st_size
        np.testing.assert_allclose(each["losses"], expected["losses"], rtol=1e-4)
        np.testing.assert_allclose(np.reshape(each["before"], (60, 4)), arrays["before/output"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.reshape(each["after"], (60, 4)), arrays["after/output"], rtol=1e-3, atol=1e-4)
