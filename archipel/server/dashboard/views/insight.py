"""The inside of models: a page for a version or a training, and the documents that it asks for."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import urlencode

from flask import Response, request

from archipel.errors import InvalidRequestError, NotFoundError
from archipel.server.dashboard import rendering
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.insight import Model, Problem, find_document
from archipel.server.dashboard.pages import ROOT, Page
from archipel.server.http.sending import PART_BYTES, in_time

VERSIONS = 24
"""So many versions, or rounds, have histograms one behind the other: the newest."""
COMPARED = 100
"""So many versions are offered to be compared."""
DATA = f"{ROOT}/insight"


def show_version(desk: Desk, name: str, number: str) -> str:
    """One version; with `with` in the query beside another one of the same model."""
    version = desk.ask("show_version", name=name, number=number)
    listed = desk.ask("list_versions", query={"limit": str(COMPARED)}, name=name).items
    beside = desk.query.get("with", "")
    other = desk.ask("show_version", name=name, number=beside) if beside else None
    shown = [version] if other is None else [version, other]
    rows = [each for each in listed if each.weights_deleted is None][:VERSIONS]
    return _render(
        desk,
        title=f"{name} version {version.number}",
        crumbs=(("Models", "models"), (name, f"models/{name}"), (f"Version {version.number}", _place(version))),
        models=[(f"version {each.number}", _model(each)) for each in shown],
        versions=[(f"version {each.number}", _model(each)) for each in reversed(rows)],
        others=[each.number for each in listed if each.number != version.number],
        beside=None if other is None else other.number,
        deleted=[each.number for each in shown if each.weights_deleted is not None],
    )


def show_task(desk: Desk, task_id: str) -> str:
    """A training: its newest weights, and those after each round."""
    task = desk.ask("show_task", task_id=task_id)
    if task.kind != "training":
        raise NotFoundError(f"task {task_id} trains no model")
    metrics = desk.ask("list_metrics", query={"limit": str(VERSIONS), "newest_first": True}, task_id=task_id)
    rounds = sorted(metrics.items, key=lambda each: (each.started, each.number))
    kept = [each for each in rounds if each.weights_out and each.weights_deleted is None]
    newest = "" if task.weights_deleted is not None else task.model or ""
    return _render(
        desk,
        title=task.name,
        crumbs=(("Tasks", "tasks"), (task.name, f"tasks/{task_id}")),
        models=[("newest weights" if newest else "its bundle", Model(task.bundle, newest))],
        versions=[(f"round {each.number}", Model("", each.weights_out)) for each in kept],
        deleted=["newest"] if task.weights_deleted is not None else [],
    )


def _render(
    desk: Desk,
    *,
    models: list[tuple[str, Model]],
    versions: list[tuple[str, Model]],
    others: list[int] | None = None,
    beside: int | None = None,
    **values: Any,
) -> str:
    listed = [{"label": label, "from": _histograms_of(model)} for label, model in versions]
    return rendering.render(
        "insight.html", desk, page=_page_of([model for _, model in models]),
        names=json.dumps([label for label, _ in models]), versions=json.dumps(listed), others=others or [],
        beside=beside, root=ROOT, **values,
    )  # fmt: skip


def _place(version: Any) -> str:
    return f"models/{version.model}/versions/{version.number}"


def _model(version: Any) -> Model:
    # Weights that were deleted are shown as the bundle has them, and the page says so.
    return Model(version.bundle, "" if version.weights_deleted is not None else version.weights or "")


def _page_of(models: list[Model]) -> str:
    asked = {"weights": models[0].weights}
    if len(models) > 1:
        asked |= {"with": models[1].bundle, "with-weights": models[1].weights}
    query = urlencode({name: each for name, each in asked.items() if each})
    return f"{DATA}/bundles/{models[0].bundle}{'?' if query else ''}{query}"


def _histograms_of(model: Model) -> str:
    return f"{DATA}/weights/{model.weights}" if model.weights else f"{DATA}/bundles/{model.bundle}/weights"


def send_page(desk: Desk, digest: str) -> Response:
    """The document of a bundle, with other `weights` if the query names some; beside a second bundle `with`."""
    models = [Model(digest, desk.query.get("weights", ""))]
    if desk.query.get("with"):
        models.append(Model(desk.query["with"], desk.query.get("with-weights", "")))
    return _send(desk, "page", *models)


def send_own_weights(desk: Desk, digest: str) -> Response:
    """Histograms of a bundle's own weights."""
    return _send(desk, "histograms", Model(digest))


def send_weights(desk: Desk, digest: str) -> Response:
    """Histograms of weights."""
    return _send(desk, "histograms", Model("", digest))


def _send(desk: Desk, kind: str, *models: Model) -> Response:
    for digest in (digest for model in models for digest in (model.bundle, model.weights) if digest):
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise InvalidRequestError(f"expected a digest of 64 hexadecimal digits, got {digest[:80]!r}")
    found = find_document(desk, cast("Literal['page', 'histograms']", kind), *models)
    if found is None:
        return Response(status=202, headers={"Retry-After": "1"})
    if isinstance(found, Problem):
        return Response(json.dumps({"problem": found.text}), 422, mimetype="application/json")
    packed = bool(request.accept_encodings["gzip"])
    parts = _parts(found.file, packed)
    response = Response(in_time(parts, desk.services.settings.stall_seconds), mimetype="application/json")
    response.call_on_close(found.file.close)
    response.headers["Vary"] = "Accept-Encoding"
    if packed:
        response.headers["Content-Encoding"] = "gzip"
        response.content_length = found.size
    return response


def _parts(file: BinaryIO, packed: bool) -> Iterator[bytes]:
    with file, file if packed else gzip.open(file) as source:
        while part := source.read(PART_BYTES):
            yield part


_FILES = ("download_bundle", "download_blob")
PAGES = (
    Page(
        "GET", f"{ROOT}/models/<name:name>/versions/<number:number>/insight", show_version,
        ("show_version", "list_versions", *_FILES),
    ),
    Page("GET", f"{ROOT}/tasks/<id:task_id>/insight", show_task, ("show_task", "list_metrics", *_FILES)),
    Page("GET", f"{DATA}/bundles/<digest:digest>", send_page, _FILES),
    Page("GET", f"{DATA}/bundles/<digest:digest>/weights", send_own_weights, ("download_bundle",)),
    Page("GET", f"{DATA}/weights/<digest:digest>", send_weights, ("download_blob",)),
)  # fmt: skip
