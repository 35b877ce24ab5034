"""From digests to documents, by the rights of who asks: those of fetching bundles and weights through the API."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flask import current_app

from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.insight.documents import DOCUMENTS, Documents, Problem, Ready, Wanted
from archipel.server.http.api.bundles import check_blob, find_bundle_file


@dataclass(frozen=True)
class Model:
    """A bundle by its digest, and weights that take the place of its own. One of the two may be empty: the bundle of
    histograms of weights, and the weights of a bundle as it is."""

    bundle: str
    weights: str = ""


def find_document(desk: Desk, kind: Literal["page", "histograms"], *models: Model) -> Ready | Problem | None:
    """The document of one model, or of two; None while it is being made. Raises ApiError 403, 404 and 410 as the API
    does for these bundles and weights."""
    settings = desk.services.settings
    files: dict[str, Callable[[], AbstractContextManager[Path]]] = {}
    folders: dict[str, Path] = {}
    stored = []
    for number, model in enumerate(models, 1):
        names = {"digest": model.bundle}
        if model.bundle:
            names |= {"bundle": f"model-{number}.bundle", "unpacked": f"model-{number}"}
            file = find_bundle_file(desk.call("download_bundle"), model.bundle)
            files[names["bundle"]] = _giver(desk, file)
            folders[names["unpacked"]] = settings.bundle_folder / model.bundle
        if model.weights:
            names["weights"] = f"weights-{number}.safetensors"
            check_blob(desk.call("download_blob"), model.weights)
            files[names["weights"]] = _giver(desk, model.weights)
        stored.append(names)
    request = {
        "kind": kind,
        "models": stored,
        "keys": list(settings.publisher_keys),
        "allow_development": settings.allow_development,
    }
    made_of = (kind, *(digest for model in models for digest in (model.bundle, model.weights)))
    documents: Documents = current_app.extensions[DOCUMENTS]
    return documents.find(Wanted(made_of, request, files, folders))


def _giver(desk: Desk, digest: str) -> Callable[[], AbstractContextManager[Path]]:
    blobs = desk.services.blobs
    return lambda: blobs.open(digest)
