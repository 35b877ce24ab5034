from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel import bundle as b
from archipel.bundle.manifest import MAX_MANIFEST_BYTES, PrivacyPolicy
from archipel.bundle.roles import ALLOWED, Input, Result, role_of
from archipel.bundle.validation import validate_manifest
from archipel.errors import (
    BundleError,
    ManifestError,
    TensorLayoutError,
    UnknownRoleError,
    UnknownVersionError,
    UnsafePathError,
)


@pytest.fixture
def document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_bytes())


def canonical(document: dict[str, Any]) -> bytes:
    """An independent writer of the canonical form: Python's json."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def test_round_trip_is_the_identity(folder: Path) -> None:
    data = (folder / "manifest.json").read_bytes()
    assert b.encode_manifest(b.decode_manifest(data)) == data
    assert canonical(json.loads(data)) == data


def _weighted(document: dict[str, Any], lowest: float) -> None:
    """A strategy's finish that uploads a weight."""
    document["strategy"] = "fedavg"
    document["programs"]["finish"]["outputs"].append(
        {
            "role": "update", "name": "n", "tensor": "n", "dtype": "float32", "shape": [], "kind": "weight",
            "weighting": "examples", "range": 1.0, "bits": 16, "lowest": lowest,
        }
    )  # fmt: skip


def _averaged(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A finish that uploads a running mean and variance of three channels: these two entries."""
    bias = next(each for each in document["parameters"] if each["shape"] == [3])
    document["parameters"] += [{**bias, "name": name} for name in ("norm.mean", "norm.variance")]
    common = {"role": "update", "dtype": "float32", "shape": [3], "weighting": "uniform", "bits": 16}
    mean = {**common, "name": "m", "tensor": "norm.mean", "kind": "mean", "range": 3.0}
    variance = {**common, "name": "v", "tensor": "norm.variance", "kind": "variance", "range": 9.0, "mean": "norm.mean"}
    document["programs"]["finish"]["outputs"] += [mean, variance]
    return mean, variance


def test_a_finish_may_upload_running_statistics(document: dict[str, Any]) -> None:
    _averaged(document)
    *_, mean, variance = b.decode_manifest(canonical(document)).programs["finish"].outputs
    assert (mean.kind, variance.kind, variance.mean) == ("mean", "variance", mean.tensor)


def _noised(document: dict[str, Any], **changes: float) -> None:
    noise = {"role": "noise", "name": "z", "dtype": "float32", "shape": [3], "distribution": "gaussian", "scale": 1.0}
    document["programs"]["train"]["inputs"].append({**noise, **changes})


def _in_steps(document: dict[str, Any], steps: int) -> dict[str, Any]:
    """Add a program that makes several steps of `train` at once."""
    program: dict[str, Any] = copy.deepcopy(document["programs"]["train"])
    program.update(steps=steps, repeats="train")
    for port in (*program["inputs"], *program["outputs"]):
        if port["role"] in ("example", "label", "metric"):
            port["shape"] = [steps, *port["shape"]]
    document["programs"]["train.several"] = program
    return program


def test_a_train_program_may_take_several_minibatches(document: dict[str, Any]) -> None:
    _in_steps(document, 2)
    assert b.decode_manifest(canonical(document)).programs["train.several"].steps == 2


def _featured(document: dict[str, Any]) -> dict[str, Any]:
    """Let `train` read a feature that a features program makes of the example."""
    programs = document["programs"]
    source = copy.deepcopy(programs["train"]["inputs"][0])
    assert source["role"] == "example"
    feature = {"role": "feature", "name": "f", "dtype": "float32", "shape": ["batch", 7]}
    programs["features"] = {
        "kind": "features", "file": programs["train"]["file"], "inputs": [source], "outputs": [feature],
    }  # fmt: skip
    programs["train"]["inputs"][0] = dict(feature)
    return feature


def test_a_train_program_may_read_features(document: dict[str, Any]) -> None:
    _featured(document)
    assert b.decode_manifest(canonical(document)).programs["features"].kind == "features"


def _evaluated(document: dict[str, Any], **change: object) -> dict[str, Any]:
    """Add an evaluate program of what `predict` answers; returns its input for the answers."""
    programs = document["programs"]
    answers = {
        "role": "prediction", "name": "p", "output": "y", "dtype": "float32", "shape": ["batch", 3], **change,
    }  # fmt: skip
    label = next(port for port in programs["train"]["inputs"] if port["role"] == "label")
    loss = {"role": "metric", "name": "loss", "dtype": "float32", "shape": [], "reduction": "sum"}
    programs["evaluate"] = {
        "kind": "evaluate", "file": programs["train"]["file"], "inputs": [answers, copy.deepcopy(label)],
        "outputs": [loss],
    }  # fmt: skip
    return answers


def _evaluated_with(document: dict[str, Any], role: str) -> None:
    """An evaluate program that also reads what `train` reads in this role."""
    _evaluated(document)
    other = next(port for port in document["programs"]["train"]["inputs"] if port["role"] == role)
    document["programs"]["evaluate"]["inputs"].append(copy.deepcopy(other))


def test_an_evaluate_program_reads_what_predict_answers(document: dict[str, Any]) -> None:
    _evaluated(document)
    ports = b.decode_manifest(canonical(document)).programs["evaluate"].inputs
    assert [type(port).__name__ for port in ports] == ["Prediction", "Label"]


def _self_tested(document: dict[str, Any], **change: str | float) -> None:
    document["self_test"] = {"file": document["programs"]["predict"]["file"], "rtol": 1e-3, "atol": 0.0, **change}


def test_self_test(document: dict[str, Any]) -> None:
    _self_tested(document)
    test = b.decode_manifest(canonical(document)).self_test
    assert test is not None
    assert test.rtol == 1e-3


def _analyzed(document: dict[str, Any], *names: str) -> None:
    """An analyze program with the mean of one value, told under each of these names."""
    programs = document["programs"]
    sums = [
        {"role": "update", "name": f"{name}/{part}", "tensor": f"{name}/{part}", "dtype": "float32", "shape": [],
         "kind": "value", "weighting": "uniform", "range": 1.0, "bits": 8}
        for name in sorted(set(names)) for part in ("sum", "count")
    ]  # fmt: skip
    source = next(port for port in programs["train"]["inputs"] if port["role"] == "example")
    programs["look"] = {
        "kind": "analyze", "file": programs["train"]["file"], "inputs": [copy.deepcopy(source)], "outputs": sums,
    }  # fmt: skip
    document["statistics"] = [{"name": name, "kind": "mean", "program": "look"} for name in names]


def test_statistics(document: dict[str, Any]) -> None:
    _analyzed(document, "height", "weight")
    assert [each.name for each in b.decode_manifest(canonical(document)).statistics] == ["height", "weight"]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda d: d.update(format=2), UnknownVersionError, "format 2"),
        (lambda d: d.update(extra=1), ManifestError, "extra"),
        (lambda d: _analyzed(d, "height", "height"), ManifestError, "two statistics have the same name"),
        (lambda d: d.pop("limits"), ManifestError, "limits"),
        (lambda d: d["programs"]["train"]["inputs"][0].update(role="spy"), UnknownRoleError, "spy"),
        (lambda d: d["programs"]["train"]["inputs"][0].pop("role"), UnknownRoleError, "role"),
        (lambda d: d["programs"]["predict"]["inputs"][0].update(role="label"), ManifestError, "cannot have 'label'"),
        (lambda d: d["programs"]["train"].update(kind="spy"), ManifestError, "spy"),
        (lambda d: d["programs"]["train"].update(file="other.onnx"), ManifestError, "not among the bundle's files"),
        (lambda d: d["files"].update({"../evil": "0" * 64}), UnsafePathError, "'../evil'"),
        (lambda d: d["files"].update({"/etc/passwd": "0" * 64}), UnsafePathError, "plain name"),
        (lambda d: d["files"].update({"a.onnx": "xyz"}), ManifestError, "SHA-256"),
        (lambda d: d["files"].update({"manifest.sig": "0" * 64}), ManifestError, "its own digest"),
        (lambda d: d["parameters"][0].update(shape=[1 << 20, 1 << 20]), TensorLayoutError, "limit"),
        (lambda d: d["parameters"][0].update(shape=[1] * 9), TensorLayoutError, "rank 9"),
        (lambda d: d["parameters"][0].update(shape=[-1]), TensorLayoutError, "dimension -1"),
        (lambda d: d["parameters"][0].update(dtype="float8"), ManifestError, "float8"),
        (lambda d: d["parameters"].append(d["parameters"][0]), ManifestError, "listed twice"),
        (lambda d: d["programs"]["train"]["inputs"][2].update(shape=[3, 5]), ManifestError, "but parameter"),
        (lambda d: d["programs"]["train"]["inputs"][2].update(tensor="ghost"), ManifestError, "'ghost'"),
        (lambda d: d["programs"]["train"]["inputs"][4].update(default=9.0), ManifestError, "minimum <= default"),
        (lambda d: d["programs"]["finish"]["outputs"][0].update(bits=40), ManifestError, "bits"),
        (lambda d: d["programs"]["finish"]["outputs"][0].update(range=0.0), ManifestError, "range"),
        (lambda d: d["programs"]["finish"]["outputs"][0].update(shape=["n"]), ManifestError, "must be fixed"),
        (lambda d: d["programs"]["finish"]["outputs"][0].update(noise=-1.0), ManifestError, "noise must be"),
        (lambda d: d["programs"]["finish"]["outputs"][0].update(lowest=0.1), ManifestError, "lowest is of a weight"),
        (lambda d: d["programs"]["finish"]["outputs"][0].update(clip=2.0), ManifestError, "clipped together"),
        (lambda d: _weighted(d, lowest=1.5), ManifestError, "from 0 to its range; it is 1.5"),
        (lambda d: _weighted(d, lowest=1e-9), ManifestError, "must be at least a step"),
        (lambda d: _averaged(d)[0].update(tensor="ghost"), ManifestError, "'ghost' is not one of"),
        (lambda d: _averaged(d)[1].update(mean="norm.variance"), ManifestError, "that it alone goes with"),
        (lambda d: _averaged(d)[1].pop("mean"), ManifestError, "'' is no mean of shape [3]"),
        (lambda d: (_averaged(d), d["programs"]["finish"]["outputs"].pop()), ManifestError, "no variance goes with"),
        (lambda d: _averaged(d)[0].update(mean="norm.mean"), ManifestError, "mean is of a variance, this is a mean"),
        (lambda d: _averaged(d)[0].update(clip=1.0), ManifestError, "a running statistic has no clip and no noise"),
        (lambda d: _averaged(d)[1].update(noise=1.0), ManifestError, "a running statistic has no clip and no noise"),
        (
            lambda d: (_analyzed(d, "height"), d["programs"]["look"]["outputs"].extend(_averaged(d))),
            ManifestError,
            "only finish uploads running statistics",
        ),
        (lambda d: d["privacy"].update(max_value=0.0), ManifestError, "max_value and max_server_lr"),
        (lambda d: d["privacy"].update(max_server_lr=-1.0), ManifestError, "max_value and max_server_lr"),
        (lambda d: d["privacy"].update(weighting="steps"), ManifestError, "weighting"),
        (lambda d: _noised(d, scale=0.0), ManifestError, "scale must be above 0"),
        (lambda d: _noised(d, multiplier=-1.0), ManifestError, "multiplier must be at least 0"),
        (lambda d: d["programs"]["train"].update(outputs=[]), ManifestError, "no outputs"),
        (lambda d: d["programs"]["train"].update(steps=0), ManifestError, "steps must be 1"),
        (lambda d: d["programs"]["predict"].update(steps=2), ManifestError, "or more in a train program; it is 2"),
        (lambda d: d["programs"]["train"].update(steps=2), ManifestError, "names the one that it repeats"),
        (lambda d: d["programs"]["train"].update(repeats="train"), ManifestError, "names the one that it repeats"),
        (lambda d: _in_steps(d, 2)["inputs"][0].update(shape=[3, 3]), ManifestError, "must be the program's 2 steps"),
        (lambda d: _in_steps(d, 2)["outputs"][-1].update(shape=[]), ManifestError, "must have shape [2]"),
        (lambda d: _in_steps(d, 2).update(repeats="predict"), ManifestError, "not a train program of 1 step"),
        (lambda d: _in_steps(d, 2)["inputs"][0].update(name="other"), ManifestError, "not those of 'train', 2 times"),
        (
            lambda d: (_in_steps(d, 2), d["schedule"][0].update(program="train.several")),
            ManifestError,
            "makes 2 steps; name 'train'",
        ),
        (lambda d: (_featured(d), d["programs"].pop("features")), ManifestError, "no features program makes 'f'"),
        (lambda d: _featured(d).update(shape=["batch", 8]), ManifestError, "the features program makes"),
        (
            lambda d: (_featured(d), d["programs"].update(more=d["programs"]["features"])),
            ManifestError,
            "one features program at most",
        ),
        # A program that measures something else than `predict` answers could call any model a good one.
        (lambda d: _evaluated_with(d, "parameter"), ManifestError, "evaluate program cannot have 'parameter'"),
        (lambda d: _evaluated_with(d, "example"), ManifestError, "evaluate program cannot have 'example'"),
        (
            lambda d: (_evaluated(d), d["programs"]["evaluate"]["inputs"].pop(0)),
            ManifestError,
            "at least one prediction",
        ),
        (lambda d: _evaluated(d, output="z"), ManifestError, "'z' is no output of the one predict program"),
        (lambda d: _evaluated(d, shape=["batch", 4]), ManifestError, "predict answers float32['batch', 3]"),
        (lambda d: _evaluated(d, shape=["batch"]), ManifestError, "predict answers float32['batch', 3]"),
        (lambda d: _evaluated(d, dtype="float64"), ManifestError, "prediction 'p' is float64['batch', 3]"),
        (
            lambda d: (_evaluated(d), d["programs"].update(again=d["programs"]["predict"])),
            ManifestError,
            "no output of the one predict program",
        ),
        (lambda d: _self_tested(d, file="other.bin"), ManifestError, "'other.bin' is not among the bundle's files"),
        (lambda d: d.update(source="s.onnx"), ManifestError, "source 's.onnx' is not among the bundle's files"),
        (lambda d: _self_tested(d, rtol=-1.0), ManifestError, "finite and not negative"),
        (
            lambda d: (_self_tested(d, file=d["programs"]["train"]["file"]), d["programs"].pop("predict")),
            ManifestError,
            "no predict program",
        ),
        (lambda d: d["schedule"][0].update(program="predict"), ManifestError, "not a train program"),
        (lambda d: d["schedule"][0].update(steps=3), ManifestError, "either epochs or steps"),
        (lambda d: d["schedule"][0].update(epochs=2**63), ManifestError, "more than 10000 epochs"),
        (lambda d: d["schedule"][0].update(batch_size=0), ManifestError, "at least 1"),
        (lambda d: d["schedule"][0].update(moves=["ghost"]), ManifestError, "does not write"),
        (lambda d: d["privacy"].update(threshold=0.5), ManifestError, "above 0.5"),
        (lambda d: d["privacy"].update(min_cohort=1), ManifestError, "min_cohort"),
        (lambda d: d["privacy"].update(modes=[]), ManifestError, "modes"),
        (lambda d: d["privacy"].update(colluders=1.0), ManifestError, "colluders must be a share"),
        (lambda d: d["privacy"].update(colluders=-0.1), ManifestError, "colluders must be a share"),
        (lambda d: d["privacy"].update(min_contributors=0), ManifestError, "min_contributors must be at least 1"),
        (lambda d: d["privacy"].update(queries=257), ManifestError, "queries from 1 to 256"),
        (lambda d: d["privacy"].update(queries=0), ManifestError, "queries from 1 to 256"),
        (lambda d: d["privacy"].update(query_days=367), ManifestError, "query_days from 1 to 366"),
        (lambda d: d["lineage"].update(parent="x") if "lineage" in d else d.update(lineage={"parent": "x"}),
         ManifestError, "lineage.parent"),
        (lambda d: d["limits"].update(peak_bytes=-1), ManifestError, "negative"),
        (lambda d: d.update(name="a\nb"), ManifestError, "printable"),
    ],
)  # fmt: skip
def test_each_rule_has_its_own_error(
    document: dict[str, Any], change: Callable[[dict[str, Any]], object], error: type, text: str
) -> None:
    change(document)
    with pytest.raises(error) as caught:
        b.decode_manifest(canonical(document))
    assert type(caught.value) is error
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b'{"format":"1"}', b"[" * 5000, b'{"format":1' + b"0" * 5000 + b"}"]
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        b.decode_manifest(data)


def test_only_the_canonical_form_is_read(folder: Path) -> None:
    data = (folder / "manifest.json").read_bytes()
    for other in (
        data.replace(b",", b", ", 1),
        data + b"\n",
        data.replace(b'"name":"linear"', b'"name":"linea\\u0072"'),
    ):
        with pytest.raises(ManifestError, match="canonical"):
            b.decode_manifest(other)


def test_too_large_is_refused_before_decoding() -> None:
    with pytest.raises(ManifestError, match="limit"):
        b.decode_manifest(b" " * (MAX_MANIFEST_BYTES + 1))


def test_same_tensor_declared_differently(document: dict[str, Any]) -> None:
    state = {
        "role": "state",
        "name": "m",
        "tensor": "m",
        "dtype": "float32",
        "shape": [3],
        "lifetime": "round",
        "init": 0.0,
    }
    document["programs"]["train"]["inputs"].append(state)
    document["programs"]["finish"]["inputs"].append({**state, "lifetime": "device"})
    with pytest.raises(ManifestError, match="declared differently"):
        b.decode_manifest(canonical(document))


def test_every_role_is_allowed_somewhere() -> None:
    roles = {role_of(kind) for union in (Input, Result) for kind in union.__args__}
    allowed = set().union(*(side for sides in ALLOWED.values() for side in sides))
    assert roles == allowed


def test_mutated_manifests_raise_only_documented_errors(folder: Path) -> None:
    import random

    draw = random.Random(0)
    data = (folder / "manifest.json").read_bytes()
    for _ in range(1500):
        mutated = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(mutated))
            kind = draw.randrange(3)
            if kind == 0:
                mutated[at] = draw.randrange(256)
            elif kind == 1:
                del mutated[at : at + draw.randint(1, 20)]
            else:
                mutated[at:at] = data[draw.randrange(len(data)) :][: draw.randint(1, 20)]
        try:
            decoded = b.decode_manifest(bytes(mutated))
        except BundleError:
            continue
        assert b.encode_manifest(decoded) == bytes(mutated)


def test_validation_runs_on_encoding_too(folder: Path) -> None:
    manifest = b.decode_manifest((folder / "manifest.json").read_bytes())
    broken = msgspec.structs.replace(manifest, schedule=(b.Phase(program="ghost", epochs=1, batch_size=1),))
    with pytest.raises(ManifestError, match="ghost"):
        b.encode_manifest(broken)
    with pytest.raises(ManifestError):
        validate_manifest(broken)


def test_what_equals_a_default_is_left_out():
    """Also where a program made the text or tuple, and it is another object than the default."""
    made = msgspec.json.decode(b'{"server": "malicious", "weighting": "examples", "protocols": ["complete"]}')
    made["protocols"] = tuple(made["protocols"])
    assert made["server"] is not PrivacyPolicy.__struct_defaults__[-1]
    plain = PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=16)
    assert msgspec.json.encode(msgspec.structs.replace(plain, **made)) == msgspec.json.encode(plain)
