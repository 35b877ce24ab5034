"""Make the folder of `archipel up`: convert the model, split the data, lay out server and devices."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Bundle, PrivacyPolicy, open_bundle
from archipel.bundle.roles import Example, Label
from archipel.cli.input_output.arrays import check_fields, write_arrays
from archipel.cli.input_output.strategy_options import read_strategy_options
from archipel.cli.start.local.layout import lay_out
from archipel.cli.start.up.data import Data, read_data, split
from archipel.converter import Signing, Training
from archipel.converter.pipeline import make_bundle
from archipel.converter.request import Request
from archipel.converter.sources import read_model
from archipel.durable import creating_folder, write_durably
from archipel.errors import CommandError
from archipel.graph import Model
from archipel.lite_runtime.evaluation import evaluation_fields
from archipel.protocol.policy import colluders_of
from archipel.training.batch_norm import BatchNorm
from archipel.training.by_name import LOSSES, OPTIMIZERS

POPULATION = "local"
MANY_CLASSES = 100
"""So many different whole numbers are hardly classes."""
BUNDLE_FILE, PLAN_FILE, HELD_OUT_FILE = "model.bundle", "up.json", "held-out.npz"
BUNDLE_SUFFIX = ".bundle"
THRESHOLD = 0.51
POLICY = PrivacyPolicy(
    modes=("secure",), min_cohort=2, threshold=THRESHOLD, max_clip=1000.0, max_bits=24, colluders=0.0,
    min_contributors=2, queries=256, query_days=1,
)  # fmt: skip
"""For trying out: a round may be the sum of two devices, and nobody is taken to work with the server."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the folder is for.

    `min_cohort` is how many devices a round ends with at least; 0 for what `cohort_minimum` says.

    `model`, `data` and `program` (federation.py, where that wrote the two) are fingerprints of files. `key` names the
    task, so that the same one is asked for when the command runs again.
    """

    model: str
    data: str
    devices: int
    rounds: int
    split: str
    strategy: str
    loss: str
    optimizer: str
    lr: float
    epochs: int
    batch_size: int
    seed: int
    evaluate_every: int
    hold_out: float
    strategy_option: tuple[str, ...] = ()
    batch_norm: BatchNorm = "train"
    loss_output: str = ""
    program: str = ""
    min_cohort: int = 0
    key: str = ""


@dataclass(frozen=True)
class Prepared:
    """What was made: the plan, the bundle, the number of examples on each device, and a doubt about the labels."""

    plan: Plan
    bundle: Bundle
    sizes: list[int]
    doubt: str = ""


def prepare(folder: Path, model: Path, data_file: Path, plan: Plan, key: Ed25519PrivateKey) -> Prepared:
    """Fill the new folder, whole or not at all.

    Arguments:
        folder: does not exist, or is empty.
        model: an ONNX file, a .pt2 of torch.export.save, or a .bundle that trains, signed by `key`, which says itself
            how devices train.
        data_file: an .npz or a .csv, as `read_data` takes it.
        plan: what was asked for; an empty `loss` is chosen by the labels.
        key: signs the bundle.

    Raises CommandError, the ArchipelError of a model that cannot be converted, OSError.
    """
    if model.suffix == BUNDLE_SUFFIX:
        return _prepare_bundle(folder, model, data_file, plan, key)
    source = read_model(model, None)
    data = read_data(data_file, [(port.name, port.dtype) for port in source.inputs])
    asked = plan.loss
    loss = asked or _choose_loss(data, source, plan.loss_output)
    held, kept = _hold_out(len(data), plan)
    parts = [kept[indices] for indices in split(data.take(kept), plan.split, plan.devices, plan.seed)]
    plan = msgspec.structs.replace(plan, loss=loss, key=secrets.token_hex(16))
    training = Training(
        LOSSES[loss](), OPTIMIZERS[plan.optimizer](lr=plan.lr), strategy=plan.strategy, epochs=plan.epochs,
        batch_size=plan.batch_size, strategy_options=read_strategy_options(plan.strategy, plan.strategy_option),
        step_options={"batch_norm": plan.batch_norm}, loss_output=plan.loss_output or None,
    )  # fmt: skip
    name = re.sub(r"[^A-Za-z0-9._-]", "-", model.stem).strip(".-_") or "model"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with creating_folder(folder, 0o700) as staging:
        bundle = make_bundle(
            Request(source, staging / BUNDLE_FILE, Signing(key), training=training, name=name, privacy=POLICY)
        )
        _fill(staging, bundle, _fields(data, bundle, loss), held, parts, plan)
    doubt = "" if asked else _doubt_labels(data, loss)
    return Prepared(plan, bundle, [len(indices) for indices in parts], doubt)


def _prepare_bundle(folder: Path, model: Path, data_file: Path, plan: Plan, key: Ed25519PrivateKey) -> Prepared:
    bundle = open_bundle(model, [key.public_key().public_bytes_raw()], allow_development=True)
    if not any(program.kind == "train" for program in bundle.manifest.programs.values()):
        raise CommandError(f"{model}: only predicts; make a bundle that trains: archipel convert ... --loss NAME")
    policy = bundle.manifest.privacy
    # Colluders hide nobody: a round needs the policy's minimum beside them.
    fewest = max(cohort_minimum(plan.devices), policy.min_cohort + colluders_of(policy, plan.devices))
    if fewest > plan.devices:
        raise CommandError(
            f"{model}: its policy asks for rounds of at least {fewest} devices, --devices is {plan.devices}; take more "
            "devices, or convert it with a lower --policy-option min_cohort or colluders"
        )
    data = read_data(
        data_file, [(port.name, port.dtype) for port in evaluation_fields(bundle) if isinstance(port, Example)]
    )
    held, kept = _hold_out(len(data), plan)
    parts = [kept[indices] for indices in split(data.take(kept), plan.split, plan.devices, plan.seed)]
    plan = msgspec.structs.replace(plan, loss="of the bundle", min_cohort=fewest, key=secrets.token_hex(16))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with creating_folder(folder, 0o700) as staging:
        shutil.copyfile(model, staging / BUNDLE_FILE)
        _fill(staging, bundle, _fields(data, bundle, "cross_entropy"), held, parts, plan)
    return Prepared(plan, bundle, [len(indices) for indices in parts])


def _fill(
    staging: Path, bundle: Bundle, fields: dict[str, np.ndarray], held: np.ndarray, parts: list[np.ndarray], plan: Plan
) -> None:
    """Write the held-out examples, the server's folder, the devices' folders and the plan."""
    devices = {
        str(number): {field: array[indices] for field, array in fields.items()}
        for number, indices in enumerate(parts, 1)
    }
    if len(held):
        write_arrays(staging / HELD_OUT_FILE, {field: array[held] for field, array in fields.items()})
    lay_out(staging, population=POPULATION, publisher=bundle.publisher, devices=devices)
    write_durably(staging / PLAN_FILE, msgspec.json.format(msgspec.json.encode(plan), indent=2), 0o644)


def read_plan(folder: Path) -> Plan | None:
    """The plan of a folder that `prepare` made, None where there is no such folder. Raises CommandError."""
    file = folder / PLAN_FILE
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise CommandError(f"--folder {folder}: not empty, and not made by `archipel up`; choose another folder")
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Plan)
    except msgspec.DecodeError as error:
        raise CommandError(f"{file}: damaged ({error}); remove {folder} to begin anew") from None


def fingerprint(file: Path) -> str:
    """The SHA-256 of a file, and of a file of ONNX's external data beside it."""
    digest = hashlib.sha256()
    for each in (file, file.with_name(file.name + ".data")):
        if each.is_file():
            with each.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def cohort_minimum(devices: int) -> int:
    """The smallest number of devices that a round of so many may end with."""
    return max(2, math.floor(devices / 2) + 1)


def _choose_loss(data: Data, source: Model, output: str) -> str:
    """The loss that labels and the model's output ask for.

    Whole numbers are classes of a model that answers several numbers. Of one that answers one they are the two
    classes 0 and 1, or else amounts.
    """
    shape = next((port.shape for port in source.outputs if port.name == output), source.outputs[0].shape)
    if data.classes is None:
        return "mse"
    if len(shape) == 2 and shape[1] == 1:
        return "binary_cross_entropy" if set(np.unique(data.labels)) <= {0, 1} else "mse"
    return "cross_entropy"


def _doubt_labels(data: Data, loss: str) -> str:
    """What to tell where labels are stored as amounts and look like classes; empty: nothing."""
    labels = data.labels
    if data.classes is not None or labels.dtype.kind != "f" or loss != "mse" or labels.size != len(data):
        return ""
    whole = np.array_equal(labels, np.floor(labels)) and labels.min() >= 0 and len(np.unique(labels)) <= MANY_CLASSES
    if not whole:
        return ""
    return (
        f"{data.path}: the labels are stored as floats, so they are amounts, and the loss is mse; if they are classes, "
        "store whole numbers: y.astype(int)"
    )


def _hold_out(count: int, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """The places of the examples that no device gets, and of the others, ascending; drawn by the plan's seed."""
    order = np.random.default_rng(plan.seed).permutation(count)
    cut = int(plan.hold_out * count)
    return np.sort(order[:cut]), np.sort(order[cut:])


def _fields(data: Data, bundle: Bundle, loss: str) -> dict[str, np.ndarray]:
    """The examples and labels under the names that the bundle has for them, checked against it."""
    ports = {port.name: port for port in evaluation_fields(bundle) if isinstance(port, Example | Label)}
    fields = dict(data.inputs)
    for port in ports.values():
        if isinstance(port, Label):
            labels = data.labels.astype(port.dtype)
            # A column of numbers is also a vector of one number for each example.
            short = labels.ndim == len(port.shape) - 1 and port.shape[-1:] == (1,)
            fields[port.name] = labels = labels[..., None] if short else labels
            if labels.ndim != len(port.shape):
                raise CommandError(
                    f"{data.path}: the labels are {data.labels.dtype}{list(data.labels.shape)}, but --loss {loss} of "
                    f"this model takes {port.dtype}[{', '.join(map(str, port.shape))}]; classes are whole numbers, for "
                    "--loss cross_entropy"
                )
    check_fields(data.path, list(ports.values()), fields, Example, Label)
    _check_classes(data, bundle)
    return {name: fields[name] for name in ports}


def _check_classes(data: Data, bundle: Bundle) -> None:
    """Raise CommandError where a class has no number among the model's outputs."""
    answers = bundle.program("predict").outputs[0].shape
    if data.classes is None or len(answers) != 2 or not isinstance(answers[1], int) or answers[1] == 1:
        return
    outside = np.flatnonzero((data.labels < 0) | (data.labels >= answers[1]))
    if len(outside):
        row = int(outside[0])
        raise CommandError(
            f"{data.path}: row {row} has label {int(data.labels[row])}, but the model answers {answers[1]} numbers, "
            f"for classes 0 to {answers[1] - 1}; number the classes from 0"
        )
    if len(np.unique(data.labels)) == 1:
        raise CommandError(
            f"{data.path}: all labels are {int(data.labels[0])}: of one class a model learns nothing; add examples of "
            "others"
        )
