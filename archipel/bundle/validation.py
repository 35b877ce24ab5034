"""The rules of a manifest that its types cannot express, each with its own error."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING

from archipel.bundle.carried import validate_carried
from archipel.bundle.program_links import PER_STEP, validate_links, validate_moments
from archipel.bundle.roles import (
    ALLOWED,
    CHANGES,
    Hyperparameter,
    Parameter,
    Personal,
    Port,
    Program,
    State,
    Update,
    role_of,
)
from archipel.errors import ManifestError, TensorLayoutError, UnsafePathError

if TYPE_CHECKING:
    from archipel.bundle.manifest import Aggregators, Manifest, Phase, PrivacyPolicy, Statistic, TensorSpec

MANIFEST_FILE = "manifest.json"
SIGNATURE_FILE = "manifest.sig"
MAX_TENSOR_BYTES = 2 << 30
MAX_RANK = 8
MAX_BITS = 30
MAX_NOISE = 1e6
MAX_QUERIES = 256
"""Queries of one device in a period of the privacy policy. Bounded, as a device stores the cohort of each."""
MAX_EPOCHS = 10_000
MAX_STEPS = 10_000_000
MAX_WHOLE = 2**53 - 1
MAX_POPULATIONS = 64
MAX_LEVELS = 3
"""Of edge servers between a root server and the devices."""
MAX_SITE = 1 << 20
"""Devices below one edge server."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def validate_manifest(manifest: Manifest) -> None:
    """Check what the types cannot express. Raises ManifestError, UnsafePathError or TensorLayoutError."""
    check_text("name", manifest.name)
    for path, digest in manifest.files.items():
        check_file_name(path)
        if path in (MANIFEST_FILE, SIGNATURE_FILE):
            raise ManifestError(f"manifest: {path} cannot hold its own digest")
        check_digest(f"files[{path!r}]", digest)
    parameters = _validate_parameters(manifest.parameters)
    # Over all programs: a tensor that two of them name must have one meaning.
    declared: dict[tuple[str, str], tuple[object, ...]] = {}
    for name, program in manifest.programs.items():
        _validate_program(name, program, manifest.files, parameters, declared)
        _validate_bounds(f"program {name!r}", program, trains=bool(manifest.strategy))
        validate_moments(f"program {name!r}", program)
        validate_carried(f"program {name!r}", program, parameters)
    validate_links(manifest.programs)
    for index, phase in enumerate(manifest.schedule):
        _validate_phase(index, phase, manifest.programs)
    if len({statistic.name for statistic in manifest.statistics}) != len(manifest.statistics):
        raise ManifestError("manifest: two statistics have the same name")
    for statistic in manifest.statistics:
        _validate_statistic(statistic, manifest.programs)
    _validate_self_test(manifest)
    validate_policy(manifest.privacy)
    _validate_validity(manifest)
    if manifest.source and manifest.source not in manifest.files:
        raise ManifestError(f"manifest: source {manifest.source!r} is not among the bundle's files")
    if manifest.lineage.parent is not None:
        check_digest("lineage.parent", manifest.lineage.parent)
    if min(manifest.limits.peak_bytes, manifest.limits.flops_per_example, manifest.limits.upload_bytes) < 0:
        raise ManifestError("manifest: limits must not be negative")


def check_file_name(path: str) -> None:
    """Raises UnsafePathError unless `path` is a plain name: a bundle is flat, so no path can leave it."""
    if not _FILE_NAME.fullmatch(path):
        raise UnsafePathError(f"bundle: file name {path!r} is not a plain name (letters, digits, '.', '_', '-')")


def _validate_parameters(specs: tuple[TensorSpec, ...]) -> dict[str, TensorSpec]:
    parameters: dict[str, TensorSpec] = {}
    for spec in specs:
        check_text("parameters[].name", spec.name)
        check_digest(f"parameter {spec.name!r}", spec.sha256)
        _shape(f"parameter {spec.name!r}", spec.shape)
        if spec.nbytes > MAX_TENSOR_BYTES:
            raise TensorLayoutError(
                f"parameter {spec.name!r}: {spec.nbytes} bytes, the limit is {MAX_TENSOR_BYTES} (2 GiB)"
            )
        if spec.name in parameters:
            raise ManifestError(f"manifest: parameter {spec.name!r} is listed twice")
        parameters[spec.name] = spec
    return parameters


def _validate_program(
    name: str,
    program: Program,
    files: dict[str, str],
    parameters: dict[str, TensorSpec],
    declared: dict[tuple[str, str], tuple[object, ...]],
) -> None:
    where = f"program {name!r}"
    check_text("program name", name)
    if program.file not in files:
        raise ManifestError(f"{where}: its file {program.file!r} is not among the bundle's files")
    if not program.outputs:
        raise ManifestError(f"{where}: it has no outputs")
    if program.steps < 1 or (program.steps > 1 and program.kind != "train"):
        raise ManifestError(f"{where}: steps must be 1, or more in a train program; it is {program.steps}")
    if (program.steps > 1) != bool(program.repeats):
        raise ManifestError(f"{where}: a program of several steps, and no other, names the one that it repeats")
    for ports, allowed, side in (
        (program.inputs, ALLOWED[program.kind][0], "inputs"),
        (program.outputs, ALLOWED[program.kind][1], "outputs"),
    ):
        names = [port.name for port in ports]
        if len(set(names)) != len(names):
            raise ManifestError(f"{where}: two {side} have the same name")
        # A tensor may be there under two roles, such as a parameter and the value with which it started the round.
        tensors = [(role_of(port), t) for port in ports if (t := getattr(port, "tensor", None)) is not None]
        if len(set(tensors)) != len(tensors):
            raise ManifestError(f"{where}: two {side} have the same role and tensor")
        for port in ports:
            role = role_of(port)
            if role not in allowed:
                raise ManifestError(f"{where}: a {program.kind} program cannot have {role!r} among its {side}")
            _validate_port(where, port, parameters, program.steps)
            key, declaration = _declaration(port)
            if declared.setdefault(key, declaration) != declaration:
                raise ManifestError(f"{where}: {key[0]} {key[1]!r} is declared differently in another program")


def _validate_port(where: str, port: Port, parameters: dict[str, TensorSpec], steps: int) -> None:
    role = role_of(port)
    here = f"{where}: {role} {port.name!r}"
    check_text(f"{here}: name", port.name)
    _shape(here, port.shape)
    tensor = getattr(port, "tensor", None)
    if tensor is not None:
        check_text(f"{here}: tensor", tensor)
    if role == "update":
        _validate_update(here, port)
    if role in ("parameter", "start") or _changes_tensor(port):
        spec = parameters.get(str(tensor))
        if spec is None:
            raise ManifestError(f"{here}: {tensor!r} is not one of the bundle's parameters")
        if tuple(port.shape) != spec.shape or (port.dtype != spec.dtype and role != "update"):
            raise ManifestError(
                f"{here}: {port.dtype}{list(port.shape)}, but parameter {tensor!r} is {spec.dtype}{list(spec.shape)}"
            )
    if isinstance(port, Hyperparameter) and (port.shape != () or not port.minimum <= port.default <= port.maximum):
        raise ManifestError(f"{here}: must be a scalar with minimum <= default <= maximum")
    steps_axis = (steps,) if steps > 1 else ()
    if role == "metric" and port.shape != steps_axis:
        raise ManifestError(f"{here}: must have shape {list(steps_axis)}, has {list(port.shape)}")
    if role in PER_STEP and port.shape[: len(steps_axis)] != steps_axis:
        raise ManifestError(
            f"{here}: its first axis must be the program's {steps} steps, its shape is {list(port.shape)}"
        )
    if role in ("count", "step", "seed") and port.shape != ():
        raise ManifestError(f"{here}: must be a scalar, has shape {list(port.shape)}")
    if role == "noise" and not getattr(port, "scale", 0.0) > 0:
        raise ManifestError(f"{here}: scale must be above 0")
    if role == "noise" and not 0 <= getattr(port, "multiplier", 0.0) < math.inf:
        raise ManifestError(f"{here}: multiplier must be at least 0")


def _changes_tensor(port: Port) -> bool:
    return isinstance(port, Update) and port.kind in CHANGES and port.carries is None


def _validate_self_test(manifest: Manifest) -> None:
    test = manifest.self_test
    if test is None:
        return
    if test.file not in manifest.files:
        raise ManifestError(f"self_test: its file {test.file!r} is not among the bundle's files")
    if not any(program.kind == "predict" for program in manifest.programs.values()):
        raise ManifestError("self_test: there is no predict program to test")
    if not (0 <= test.rtol < float("inf") and 0 <= test.atol < float("inf")):
        raise ManifestError("self_test: rtol and atol must be finite and not negative")


def _validate_update(here: str, port: Port) -> None:
    # Server and devices derive the vector's layout from the manifest alone, so no size may depend on the data.
    if any(isinstance(dim, str) for dim in port.shape):
        raise ManifestError(f"{here}: an update's shape must be fixed, is {list(port.shape)}")
    if port.dtype != "float32":
        raise ManifestError(f"{here}: an update is float32, not {port.dtype}")
    if not 0 < getattr(port, "range", 0.0) < float("inf"):
        raise ManifestError(f"{here}: range must be above 0 and finite")
    if not 2 <= getattr(port, "bits", 0) <= MAX_BITS:
        raise ManifestError(f"{here}: bits must be from 2 to {MAX_BITS}")
    clip = getattr(port, "clip", None)
    if clip is not None and not 0 < clip < float("inf"):
        raise ManifestError(f"{here}: clip must be above 0 and finite, or absent")
    if not 0 <= getattr(port, "noise", 0.0) < math.inf:
        raise ManifestError(f"{here}: noise must be at least 0 and finite")
    kind, lowest = getattr(port, "kind", ""), getattr(port, "lowest", 0.0)
    if kind == "weight" and port.shape != ():
        raise ManifestError(f"{here}: the weight is a scalar, has shape {list(port.shape)}")
    if not (0 <= lowest <= getattr(port, "range", 0.0) if kind == "weight" else lowest == 0):
        raise ManifestError(f"{here}: lowest is of a weight, from 0 to its range; it is {lowest:g}")


def _validate_bounds(where: str, program: Program, trains: bool) -> None:
    """Checks what `protocol.bounds` computes with. `trains`: a strategy computes its next step from the sum."""
    updates = [port for port in program.outputs if isinstance(port, Update)]
    for kind in ("delta", "value"):
        clips = {port.clip for port in updates if port.kind == kind and port.clip is not None}
        if len(clips) > 1:
            raise ManifestError(f"{where}: its {kind} entries are clipped together, to one norm, not {sorted(clips)}")
    # Only a training's sum is divided by the sum of the weights and moves the model.
    if not trains or program.kind != "finish":
        return
    for port in updates:
        # As protocol.bounds.step; a smaller weight could be encoded as 0.
        step = port.range / ((1 << (port.bits - 1)) - 1)
        if port.kind == "weight" and port.lowest < step:
            raise ManifestError(
                f"{where}: update {port.name!r}: lowest is {port.lowest:g}, must be at least a step ({step:g}); "
                "otherwise one device could make the sum of weights as small as it likes"
            )
    # The bound of a sum allows for the stated noise; with noise that is not stated it would refuse honest sums.
    if any(role_of(port) == "noise" for port in program.inputs) and not any(port.noise for port in updates):
        raise ManifestError(f"{where}: reads noise; state in its update entries how much of it they have (noise)")


def _declaration(port: Port) -> tuple[tuple[str, str], tuple[object, ...]]:
    # A key for the logical tensor, and what must agree wherever it appears: dtype, shape, and how it begins. Fields and
    # scalars have no tensor and agree with anything; a parameter's dtype and shape are compared with its TensorSpec.
    tensor = getattr(port, "tensor", None)
    shape = tuple(port.shape)
    if isinstance(port, Parameter) or (tensor is None and not isinstance(port, Hyperparameter)):
        return (role_of(port), f"{port.name}"), () if tensor is None else (port.dtype, shape)
    if isinstance(port, Hyperparameter):
        return ("hyperparameter", port.name), (port.default, port.minimum, port.maximum)
    if isinstance(port, State):
        return ("state", port.tensor), (port.dtype, shape, port.lifetime, port.init)
    if isinstance(port, Personal):
        return ("personal", port.tensor), (port.dtype, shape, port.init)
    return (role_of(port), str(tensor)), (port.dtype, shape)


def _validate_phase(index: int, phase: Phase, programs: dict[str, Program]) -> None:
    where = f"schedule[{index}]"
    program = programs.get(phase.program)
    if program is None or program.kind != "train":
        raise ManifestError(f"{where}: {phase.program!r} is not a train program of this bundle")
    # A schedule names programs of one step; a runtime itself finds the program that repeats one.
    if program.steps > 1:
        raise ManifestError(f"{where}: {phase.program!r} makes {program.steps} steps; name {program.repeats!r}")
    if (phase.epochs is None) == (phase.steps is None):
        raise ManifestError(f"{where}: give either epochs or steps")
    if min(phase.epochs or phase.steps or 0, phase.batch_size) < 1:
        raise ManifestError(f"{where}: epochs, steps and batch_size must be at least 1")
    if (phase.epochs or 0) > MAX_EPOCHS or (phase.steps or 0) > MAX_STEPS:
        raise ManifestError(f"{where}: more than {MAX_EPOCHS} epochs or {MAX_STEPS} steps")
    if phase.moves is not None:
        written = {port.tensor for port in program.outputs if isinstance(port, Parameter | Personal)}
        for tensor in phase.moves:
            if tensor not in written:
                raise ManifestError(f"{where}: moves {tensor!r}, which {phase.program!r} does not write")


def validate_policy(policy: PrivacyPolicy) -> None:
    """Check what the types of a privacy policy cannot express. Raises ManifestError."""
    if not policy.modes:
        raise ManifestError("privacy: modes must name at least one of 'secure', 'plain'")
    if "secure" in policy.modes and not (policy.min_cohort >= 2 and 0.5 < policy.threshold <= 1):
        # At one half or less two disjoint groups could each unmask a sum (Bonawitz et al. 2017, section 6.2).
        raise ManifestError("privacy: secure mode needs min_cohort >= 2 and threshold above 0.5 and at most 1")
    if not 0 <= policy.colluders < 1:
        raise ManifestError(f"privacy: colluders must be a share from 0 to below 1, is {policy.colluders}")
    if not policy.protocols or not 0 <= policy.dropouts < 1:
        raise ManifestError(
            "privacy: protocols must name at least one of 'complete', 'neighbours', 'neighbours-mlkem', and dropouts "
            f"be a share from 0 to below 1, is {policy.dropouts}"
        )
    if policy.min_contributors < 1 or not 1 <= policy.queries <= MAX_QUERIES or not 1 <= policy.query_days <= 366:
        raise ManifestError(
            f"privacy: min_contributors must be at least 1, queries from 1 to {MAX_QUERIES}, query_days from 1 to 366"
        )
    if not 0 < policy.max_clip < float("inf") or not 2 <= policy.max_bits <= MAX_BITS:
        raise ManifestError(f"privacy: max_clip must be above 0 and finite, max_bits from 2 to {MAX_BITS}")
    if not (0 < policy.max_value < math.inf and 0 < policy.max_server_lr < math.inf):
        raise ManifestError("privacy: max_value and max_server_lr must be above 0 and finite")
    if not 0 <= policy.noise_multiplier <= MAX_NOISE:
        raise ManifestError(f"privacy: noise_multiplier must be from 0 to {MAX_NOISE:g}, is {policy.noise_multiplier}")
    if policy.aggregators is not None:
        _validate_aggregators(policy.aggregators, policy)


def _validate_aggregators(sites: Aggregators, policy: PrivacyPolicy) -> None:
    where = "privacy: aggregators:"
    if not policy.min_cohort <= sites.min_site_cohort <= sites.max_site_cohort <= MAX_SITE:
        raise ManifestError(
            f"{where} min_site_cohort {sites.min_site_cohort} must be from min_cohort {policy.min_cohort} to "
            f"max_site_cohort {sites.max_site_cohort}, and that at most {MAX_SITE}"
        )
    if not (sites.min_cohort >= 2 and 0.5 < sites.threshold <= 1 and 0 <= sites.colluders < 1):
        raise ManifestError(
            f"{where} min_cohort must be at least 2, threshold above 0.5 and at most 1, colluders a share from 0 to "
            "below 1"
        )
    if not 1 <= sites.levels <= MAX_LEVELS:
        raise ManifestError(f"{where} levels must be from 1 to {MAX_LEVELS}, is {sites.levels}")


def _validate_validity(manifest: Manifest) -> None:
    if not 0 <= manifest.sequence <= MAX_WHOLE or not 0 <= manifest.not_after <= MAX_WHOLE:
        raise ManifestError(f"manifest: sequence and not_after must be from 0 to {MAX_WHOLE}")
    if len(manifest.populations) > MAX_POPULATIONS or list(manifest.populations) != sorted(set(manifest.populations)):
        raise ManifestError(f"manifest: populations must be at most {MAX_POPULATIONS} names, each once and sorted")
    for name in manifest.populations:
        if not _FILE_NAME.fullmatch(name):
            raise ManifestError(f"manifest: population {name!r} is not 1 to 128 letters, digits, '.', '_', '-'")


def _validate_statistic(statistic: Statistic, programs: dict[str, Program]) -> None:
    where = f"statistic {statistic.name!r}"
    check_text("statistics[].name", statistic.name)
    program = programs.get(statistic.program)
    if program is None or program.kind != "analyze":
        raise ManifestError(f"{where}: {statistic.program!r} is not an analyze program of this bundle")
    shapes = {port.tensor: tuple(port.shape) for port in program.outputs if isinstance(port, Update)}
    binned = statistic.kind in ("histogram", "quantiles")
    for tensor in statistic.tensors:
        expected = (len(statistic.edges) + 1,) if binned else ()
        if shapes.get(tensor) != expected:
            raise ManifestError(f"{where}: {statistic.program!r} must upload {tensor!r} of shape {list(expected)}")
    edges, shares = statistic.edges, statistic.probabilities
    if binned != bool(edges) or (statistic.kind == "quantiles") != bool(shares):
        raise ManifestError(f"{where}: a {statistic.kind} has edges {list(edges)} and probabilities {list(shares)}")
    if not all(map(math.isfinite, edges)) or any(low >= high for low, high in pairwise(edges)):
        raise ManifestError(f"{where}: edges must be finite and grow")
    if not all(0 <= share <= 1 for share in shares) or len(set(shares)) != len(shares):
        raise ManifestError(f"{where}: probabilities must be from 0 to 1, each once")


def check_text(where: str, value: str) -> None:
    """Raises ManifestError unless `value` has 1 to 256 printable characters, so that it can stand in logs."""
    if not 0 < len(value) <= 256 or not value.isprintable():
        raise ManifestError(f"{where}: expected 1 to 256 printable characters, got {value[:64]!r}")


def check_digest(where: str, value: str) -> None:
    """Raises ManifestError unless `value` is a SHA-256 in lower-case hexadecimal digits."""
    if not _SHA256.fullmatch(value):
        raise ManifestError(f"{where}: expected a SHA-256 in 64 hexadecimal digits, got {value[:80]!r}")


def _shape(where: str, shape: tuple[int | str, ...]) -> None:
    if len(shape) > MAX_RANK:
        raise TensorLayoutError(f"{where}: rank {len(shape)}, the limit is {MAX_RANK}")
    for dim in shape:
        if isinstance(dim, str):
            check_text(f"{where}: dimension", dim)
        elif not 0 <= dim <= MAX_TENSOR_BYTES:
            raise TensorLayoutError(f"{where}: dimension {dim} is not from 0 to {MAX_TENSOR_BYTES}")
