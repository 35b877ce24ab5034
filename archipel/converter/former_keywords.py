"""The keywords that `convert` had before it took groups. They work, with a warning, until version 0.2."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from archipel.bundle import Bundle
from archipel.converter.options import BATCH_SIZE, Analysis, Compression, Signing, Training
from archipel.converter.request import Request
from archipel.converter.validation import UNSIGNED
from archipel.errors import ConversionError

P = ParamSpec("P")

ENDS = "0.2"
GROUPS: Mapping[str, Mapping[str, str]] = {
    "training": {
        "loss": "Training(loss, ...)",
        "optimizer": "Training(..., optimizer)",
        "trainable": "Training(..., trainable=)",
        "step_options": "Training(..., step_options=)",
        "strategy": "Training(..., strategy=)",
        "strategy_options": "Training(..., strategy_options=)",
        "epochs": "Training(..., epochs=)",
        "batch_size": "Training(..., batch_size=)",
    },
    "compression": {
        "recipe": "Compression(recipe)",
        "data": "Compression(..., data=)",
        "calibration": "Compression(..., calibration=)",
        "validation": "Compression(..., validation=)",
        "seed": "Compression(..., seed=)",
        "folder": "Compression(..., folder=)",
        "on_progress": "Compression(..., on_progress=)",
    },
    "signing": {
        "sign_key": "Signing(key)",
        "sequence": "Signing(..., sequence=)",
        "not_after": "Signing(..., not_after=)",
        "populations": "Signing(..., populations=)",
        "parent": "Signing(..., parent=)",
        "lineage": "Signing(..., lineage=)",
    },
    "analysis": {
        "statistics": "Analysis(statistics)",
        "max_examples": "Analysis(..., max_examples=)",
    },
}
"""For each group of `convert` the former keywords that it holds, and how they are written now."""
TARGET = "target"

_GROUP_OF = {keyword: group for group, keywords in GROUPS.items() for keyword in keywords}


def accepts_former_keywords(make: Callable[[Request], Bundle]) -> Callable[[Callable[P, Bundle]], Callable[P, Bundle]]:
    """Decorate a function with the arguments of `convert`: with former keywords `make` is called in its place."""

    def decorate(function: Callable[P, Bundle]) -> Callable[P, Bundle]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Bundle:
            former = {name: value for name, value in kwargs.items() if name in _GROUP_OF or name == TARGET}
            present = {name: value for name, value in kwargs.items() if name not in former}
            if former:
                _warn(former)
                present.update(_groups(former, present))
            # Python's own TypeError for a missing argument would not say how to make a key.
            if "signing" not in present:
                raise ConversionError(UNSIGNED)
            if not former:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **present).arguments
            return make(Request(**bound, batch_size=_batch_size(former)))

        return wrapper

    return decorate


def _warn(former: Mapping[str, Any]) -> None:
    remedies = [
        f"{name}= is now {_GROUP_OF[name]}={GROUPS[_GROUP_OF[name]][name]}" if name in _GROUP_OF else
        f"leave {name}= out, it has one value"
        for name in former
    ]  # fmt: skip
    warnings.warn(
        f"convert: {'; '.join(remedies)}. The former keywords end with version {ENDS}", DeprecationWarning, stacklevel=3
    )  # 3: the caller of the wrapper


def _groups(former: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """The groups that the former keywords make. Raises ConversionError where one is given as well."""
    for name in former:
        group = _GROUP_OF.get(name)
        if group in present:
            raise ConversionError(
                f"convert: {name}= and {group}= at once; write {group}={GROUPS[str(group)][name]} and leave {name}= out"
            )
    if former.get(TARGET, "onnxruntime") != "onnxruntime":
        raise ConversionError(f"target {former[TARGET]!r}: this version converts for 'onnxruntime'; leave target= out")
    # None means that the keyword is not given.
    given = {
        group: {name: former[name] for name in keywords if former.get(name) is not None}
        for group, keywords in GROUPS.items()
    }
    groups = {
        "training": _training(**given["training"]),
        "compression": _compression(**given["compression"]),
        "signing": _signing(**given["signing"]),
        "analysis": _analysis(**given["analysis"]),
    }
    return {group: value for group, value in groups.items() if value is not None}


def _training(*, loss: Any = None, optimizer: Any = None, **rest: Any) -> Training | None:
    if loss is not None and optimizer is not None:
        return Training(loss, optimizer, **rest)
    if loss is not None:
        raise ConversionError("a loss without an optimizer: pass training=Training(loss, optimizer), or leave both out")
    if optimizer is not None or rest.get("step_options"):
        what = "an optimizer" if optimizer is not None else "step_options"
        raise ConversionError(
            f"{what} without a loss: pass training=Training(loss, optimizer), or leave it out for a predict-only bundle"
        )
    return None  # without a loss the others have no meaning


def _compression(*, recipe: Any = None, **rest: Any) -> Compression | None:
    return None if recipe is None else Compression(recipe, **rest)


def _signing(*, sign_key: Any = None, **rest: Any) -> Signing | None:
    if sign_key is not None:
        return Signing(sign_key, **rest)
    if rest:
        raise ConversionError(UNSIGNED)
    return None


def _analysis(*, statistics: Any = (), **rest: Any) -> Analysis | None:
    return Analysis(statistics, **rest) if statistics else None


def _batch_size(former: Mapping[str, Any]) -> int:
    """The keyword also decides the limits of a bundle without training, for which no group has a batch size."""
    size: int = former.get("batch_size", BATCH_SIZE)
    return size
