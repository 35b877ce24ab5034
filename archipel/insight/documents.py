"""What the server's dashboard shows of stored models, as JSON documents: made in a process that ends after each one.

The server starts it by the name of this module, confined and with limits of memory and time. It reads bundles that were
verified when they were uploaded, verifies them again, and runs none of their graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from archipel import __version__
from archipel.bundle import Bundle, open_bundle, read_weights
from archipel.bundle.reader import verify_folder
from archipel.errors import ArchipelError, BundleError, InsightError
from archipel.insight.limits import MAX_HISTOGRAMS, cut
from archipel.insight.page_data import Page, TensorStatistics
from archipel.insight.stored_weights import parameters_of
from archipel.insight.tensor_statistics import describe
from archipel.library_errors import one_line

if TYPE_CHECKING:
    from archipel.insight.subjects import OpenSubject

DOCUMENT, PROBLEM = "document.json", "problem.txt"
"""One of these files is in the folder of the request when the process has ended well."""


class Stored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A model: paths of a .bundle file, of a folder where it may lie unpacked, and of weights that take the place of
    the bundle's. Each may be empty; `digest` is the bundle's."""

    bundle: str = ""
    unpacked: str = ""
    digest: str = ""
    weights: str = ""


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to make: the `page` of one model or of two that are compared, or the `histograms` of one's weights.

    The document has at most `most_bytes`; `keys` are hexadecimal. Paths are relative to the working folder, which gets
    the document, since texts of the document may have them.
    """

    kind: Literal["page", "histograms"]
    models: list[Stored]
    most_bytes: int
    keys: list[str] = []
    allow_development: bool = False


class TensorHistogram(msgspec.Struct, kw_only=True):
    """The statistics of a tensor of floating-point numbers."""

    name: str
    statistics: TensorStatistics


class Histograms(msgspec.Struct, kw_only=True):
    """Those of the weights of one version, MAX_HISTOGRAMS at most."""

    tensors: list[TensorHistogram]


def write_document(request: bytes) -> None:
    """Make what the JSON of a Request asks for, or say in PROBLEM why it cannot be made."""
    asked = msgspec.json.decode(request, type=Request)
    try:
        document = _encode(asked)
    except MemoryError:
        Path(PROBLEM).write_text("it takes more memory than the server has for it", encoding="utf-8")
    except (ArchipelError, OSError) as error:
        Path(PROBLEM).write_text(cut(one_line(error)), encoding="utf-8")
    else:
        Path(DOCUMENT).write_bytes(document)


def _encode(asked: Request) -> bytes:
    if asked.kind == "histograms":
        return msgspec.json.encode(_histograms(asked))
    page = _page(asked)
    document = msgspec.json.encode(page)
    if len(document) > asked.most_bytes:
        # What predicts is what most look for.
        page = _page(asked, alone=True)
        document = msgspec.json.encode(page)
    if len(document) > asked.most_bytes:
        raise InsightError(
            f"the page would have {len(document):,} bytes, and the server shows at most {asked.most_bytes:,}; look at "
            "the bundle with `archipel insight FILE` on your machine"
        )
    return document


def _page(asked: Request, alone: bool = False) -> Page:
    opened = [_open(asked, model, number, alone) for number, model in enumerate(asked.models)]
    page = Page(title="", version=__version__, subjects=[each.subject for each in opened])
    if len(opened) == 2:
        from archipel.insight.comparing import compare_subjects

        try:
            page.comparison = compare_subjects(opened[0], opened[1], run=False)
        except InsightError as error:
            page.notes.append(f"the two are not compared: {one_line(error)}")
    return page


def _open(asked: Request, model: Stored, number: int, alone: bool) -> OpenSubject:
    # Imported here: it takes seconds, and histograms do without.
    from archipel.insight.subjects import read_bundle

    bundle = _bundle(asked, model, number)
    weights = parameters_of(read_weights(Path(model.weights))) if model.weights else None
    names = [name for name, program in bundle.manifest.programs.items() if program.kind == "predict"] if alone else []
    opened = read_bundle(
        bundle, f"model {number + 1}", programs=names, size=Path(model.bundle).stat().st_size, weights=weights
    )
    if alone:
        opened.subject.notes.append("all programs would be too much for one page; what predicts is shown alone")
    return opened


def _bundle(asked: Request, model: Stored, number: int) -> Bundle:
    keys = [bytes.fromhex(key) for key in asked.keys]
    bundle = None
    if model.unpacked and Path(model.unpacked).is_dir():
        try:
            bundle = verify_folder(Path(model.unpacked), keys, allow_development=asked.allow_development)
        except BundleError:
            bundle = None  # a damaged copy, or one that is just being made
    if bundle is None:
        cache = Path(f"unpacked-{number + 1}")
        bundle = open_bundle(Path(model.bundle), keys, cache, allow_development=asked.allow_development)
    if bundle.digest != model.digest:
        raise BundleError(f"the stored file has the bundle {bundle.digest}, and not {model.digest}")
    return bundle


def _histograms(asked: Request) -> Histograms:
    model = asked.models[0]
    arrays = (
        parameters_of(read_weights(Path(model.weights))) if model.weights else _bundle(asked, model, 0).parameters()
    )
    found = [(name, array) for name, array in arrays.items() if array.dtype.kind in "fV" and array.size > 1]
    return Histograms(
        tensors=[TensorHistogram(name=cut(name), statistics=describe(array)) for name, array in found[:MAX_HISTOGRAMS]]
    )
