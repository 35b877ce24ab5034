"""From digests to documents, by the rights of who asks: those of fetching bundles and weights through the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
    files: dict[str, Callable[[], AbstractContextManager[Path]]] = {}
    for number, model in enumerate(models):
        if model.bundle:
            file = find_bundle_file(desk.call("download_bundle"), model.bundle)
            files[f"bundle {number}"] = _giver(desk, file)
        if model.weights:
            check_blob(desk.call("download_blob"), model.weights)
            files[f"weights {number}"] = _giver(desk, model.weights)
    settings = desk.services.settings
    unpacked = [settings.bundle_folder / model.bundle if model.bundle else None for model in models]

    def request(paths: Mapping[str, str]) -> dict[str, Any]:
        return {
            "kind": kind,
            "keys": list(settings.publisher_keys),
            "allow_development": settings.allow_development,
            "models": [
                {
                    "bundle": paths.get(f"bundle {number}", ""),
                    "weights": paths.get(f"weights {number}", ""),
                    "digest": model.bundle,
                    "unpacked": "" if folder is None else str(folder.resolve()),
                }
                for number, (model, folder) in enumerate(zip(models, unpacked))
            ],
        }

    made_of = (kind, *(digest for model in models for digest in (model.bundle, model.weights)))
    documents: Documents = current_app.extensions[DOCUMENTS]
    return documents.find(Wanted(made_of, files, tuple(each for each in unpacked if each is not None), request))


def _giver(desk: Desk, digest: str) -> Callable[[], AbstractContextManager[Path]]:
    blobs = desk.services.blobs
    return lambda: blobs.open(digest)
