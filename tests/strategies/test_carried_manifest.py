"""A manifest whose packed update entries contradict it is refused when it is written and when it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from archipel.bundle import Bundle, Manifest
from archipel.bundle.manifest import encode_manifest
from archipel.bundle.roles import Hyperparameter, Largest, Rotation, Update
from archipel.errors import ManifestError

Make = Callable[..., Bundle]
Change = Callable[[Update], Update]


def replaced(manifest: Manifest, change: Change, *, seed: bool = True) -> Manifest:
    finish = manifest.programs["finish"]
    outputs = tuple(change(p) if isinstance(p, Update) and p.carries else p for p in finish.outputs)
    inputs = tuple(p for p in finish.inputs if seed or not isinstance(p, Hyperparameter))
    changed = msgspec.structs.replace(finish, inputs=inputs, outputs=outputs)
    return msgspec.structs.replace(manifest, programs={**manifest.programs, "finish": changed})


def put(**values: Any) -> Change:
    return lambda port: msgspec.structs.replace(port, **values)


def carries(**values: Any) -> Change:
    return lambda port: msgspec.structs.replace(port, carries=msgspec.structs.replace(port.carries, **values))


CASES: dict[str, tuple[Change, str]] = {
    "a parameter's name": (put(tensor="body.weight"), "its tensor 'body.weight' is a parameter"),
    "no clip": (put(clip=None), "only a clipped delta of finish without noise"),
    "noise": (put(noise=1.0), "only a clipped delta of finish without noise"),
    "a value": (put(kind="value"), "only a clipped delta of finish without noise"),
    "nobody's change": (carries(parameters=("ghost",)), "carries 'ghost', which is not a float32 parameter"),
    "a change twice": (carries(parameters=("body.bias", "body.bias")), "the change of 'body.bias' is uploaded twice"),
    "no changes": (carries(parameters=()), "0 elements have the shape"),
    "odd blocks": (carries(block=24), "block must be a power of two up to 65536, is 24"),
    "no blocks": (carries(block=0), "block must be a power of two"),
    "huge blocks": (carries(block=1 << 40), "block must be a power of two"),
    "too many rows": (put(shape=(2, 64)), r"53 elements have the shape \[1, 64\] there, not \[2, 64\]"),
    "more than all": (carries(taken=64), "takes 64 of 64 elements"),
    "fewer than none": (carries(taken=-1), "takes -1 of 64 elements"),
    "another shape than taken": (carries(taken=3), r"have the shape \[3\] there"),
    "no largest": (put(carries=Largest(parameters=("body.bias",), most=0)), "most must be from 1 to 5, is 0"),
    "too many largest": (put(carries=Largest(parameters=("body.bias",), most=6)), "most must be from 1 to 5, is 6"),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", CASES)
def test_a_contradiction_is_refused(make: Make, name: str) -> None:
    change, why = CASES[name]
    with pytest.raises(ManifestError, match=why):
        encode_manifest(replaced(bundle_of(make).manifest, change))


def test_a_rotation_needs_its_seed(make: Make) -> None:
    manifest = bundle_of(make).manifest
    encode_manifest(replaced(manifest, lambda port: port))
    with pytest.raises(ManifestError, match="needs the hyperparameter 'update_seed', from 0 to"):
        encode_manifest(replaced(manifest, lambda port: port, seed=False))


_MADE: list[Bundle] = []


def bundle_of(make: Make) -> Bundle:
    if not _MADE:
        _MADE.append(make("fedavg", strategy_options={"clip": 1.0, "bits": 4, "compress": "rotation"}))
        (port,) = [p for p in _MADE[0].program("finish").outputs if isinstance(p, Update) and p.carries]
        assert port.carries == Rotation(parameters=("body.weight", "body.bias", "head.weight", "head.bias"), block=64)
    return _MADE[0]


def test_factors_need_their_matrix_and_its_bases(make: Make) -> None:
    manifest = make("fedavg", strategy_options={"clip": 1.0, "compress": "low_rank", "compress_rank": 1}).manifest
    encode_manifest(manifest)
    finish = manifest.programs["finish"]
    first = next(p for p in finish.outputs if isinstance(p, Update) and p.carries)
    for change, why in (
        (put(shape=(11, 2)), "reads no bases of 'body.weight' of rank 2"),
        (put(shape=(11, 9)), r"factors of a matrix \[5, 6\] have no shape \[11, 9\]"),
        (put(shape=(11,)), "have no shape"),
        (carries(parameters=("body.weight", "head.weight")), "carries the factors of one matrix"),
    ):
        outputs = tuple(change(p) if p is first else p for p in finish.outputs)
        changed = msgspec.structs.replace(finish, outputs=outputs)
        with pytest.raises(ManifestError, match=why):
            encode_manifest(msgspec.structs.replace(manifest, programs={**manifest.programs, "finish": changed}))
