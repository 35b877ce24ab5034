"""`TrainConfig`: every setting of a training, the same in Python and in the table [train] of a TOML file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from archipel.errors import TrainingError
from archipel.training.arguments import flag, number, whole

Precision = Literal["auto", "float32", "bf16", "fp16"]
Parallel = Literal["none", "auto", "ddp", "fsdp", "tensor", "pipeline", "hybrid"]

EPOCHS = 10
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
_COUNTS = ("epochs", "steps", "batch_size", "accumulate", "patience", "checkpoint_every", "threads")
_PATHS = ("cluster", "checkpoint", "tensorboard")
_TEXTS = ("monitor", "label", "mlflow", "wandb", *_PATHS)
# What PyTorch's generators take; and where a slip of the keyboard would bring the machine down.
_MOST = {"seed": 2**63 - 1, "threads": 4096, "workers": 1024}


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to minimize, how, how long, on what, and what to write on the way.

    `loss`, `optimizer`, `schedule`, `metrics` and `augment` are given by name ("cross_entropy"), as a table of a name
    and its arguments ({"name": "sgd", "momentum": 0.9}), or as the objects of `archipel.training`.

    Attributes:
        loss: one of `training.losses`, a function (outputs, batch) -> scalar tensor, or a mapping from the name of
            each output to its loss, where a table may also have `label`, the field it is compared with (by default
            the field of the output's name), and `weight` (1).
        optimizer: one of `training.optimizers`, or a function that takes a module's parameters and returns a
            `torch.optim.Optimizer`.
        schedule: one of `training.schedules`, for the optimizer's rate. Its `steps`, where left out, are all steps of
            the training; a table may have `warmup`, the number of steps in which the rate first rises from 0.
        trainable: a glob over parameter names, or a list of globs; other parameters keep their values.
        decay: "all": weight decay is for every parameter, as in a step graph. "matrices": for those of two and more
            axes, so for neither biases nor normalizations (Goyal et al. 2017, section 5.3).
        epochs: passes over the data; 10 where neither this nor `steps` is given.
        steps: the most updates of the parameters.
        batch_size: examples in a minibatch.
        accumulate: minibatches whose gradients' mean makes one update.
        clip: the largest 2-norm of all gradients together (Pascanu et al. 2013).
        ema: decay of an exponential moving average of the parameters, such as 0.999; validation and the result have
            the averages.
        precision: "bf16" and "fp16" compute products in 16 bits (autocast; fp16 with loss scaling), parameters stay
            float32; "auto" is bf16 or fp16 on a GPU and float32 elsewhere.
        tf32: let GPUs round the factors of float32 products to 10 bits (TF32), which is faster from Ampere on; without
            it they give what a CPU gives.
        patience: epochs without a better `monitor` after which training ends; without it all epochs are trained.
        monitor: the validation metric that chooses the best epoch, "loss" or one of `metrics`.
        metrics: names of `torchmetrics` classes, such as "F1Score", or tables with their arguments.
        seed: of the order of examples, the augmentation and all generators. The same seed on the same machine with
            the same number of threads gives the same numbers.
        device: "auto" takes CUDA, MPS or the CPU, whichever is there first; or "cpu", "cuda", "cuda:1", "mps".
        compile: whether `torch.compile` compiles the module for training; None: no. Not in the mode "eager"
            (`set_mode`). Validation runs the module as it is: its mode and batches would be compiled once more.
        parallel: how the processes that torchrun started share the work: "ddp", "fsdp", "tensor", "pipeline", "hybrid",
            or "auto" (`training.cloud.parallel.prepare` describes them). The losses are those of one process;
            `batch_size` counts the examples of all of them.
        sync_batch_norm: with "ddp" and "fsdp", whether batch normalization uses the statistics of the whole batch, as
            one process does, and not those of each process's part. It costs exchanges in both passes, so it is for
            parts of few examples, such as fewer than 16.
        cluster: TOML file of the devices, for what `parallel` plans ("auto", "tensor", "hybrid" and "pipeline" of a
            graph); without it they are measured, and with the path of no file yet the measurements are written there.
        inputs: the fields that the model takes, in its order; by default all that are no labels.
        label: the field with the labels, by default "label", "y", "labels" or "target", whichever is there. An input
            may be the label, as for an autoencoder.
        next_token: the model predicts each token's successor: its input is the sequence without the last token, the
            label the sequence without the first.
        augment: changes of training batches of the first input, which stay out of the model: random transforms of
            `archipel.preprocessing`, `training.cloud.random_flip` and its like, functions (batch, generator), a list.
        checkpoint: a folder for the training's state, written after every epoch.
        checkpoint_every: write it after every so many updates, too.
        resume: go on from the checkpoint that is there; False refuses a folder that has one.
        tensorboard: a folder for TensorBoard's event files.
        mlflow: the URI of an MLflow server, or of its database ("sqlite:///mlflow.db").
        wandb: a project of Weights & Biases.
        progress: show a progress bar on stderr.
        threads: threads of PyTorch on the CPU; None for as many as it uses otherwise. Small networks are often
            trained fastest by one.
        workers: threads that read and decode batches ahead of their steps; 0 reads them between the steps.

    Raises TrainingError for a wrong value, which names the field.

    Example:
        TrainConfig(loss="cross_entropy", optimizer={"name": "adamw", "lr": 3e-4}, schedule="cosine", epochs=20)
    """

    loss: Any = "cross_entropy"
    optimizer: Any = "adam"
    schedule: Any = None
    trainable: str | tuple[str, ...] = "*"
    decay: Literal["all", "matrices"] = "all"
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 32
    accumulate: int = 1
    clip: float | None = None
    ema: float | None = None
    precision: Precision = "float32"
    tf32: bool = False
    patience: int | None = None
    monitor: str = "loss"
    metrics: tuple[Any, ...] = ()
    seed: int = 0
    device: str = "auto"
    compile: bool | None = None
    parallel: Parallel = "none"
    sync_batch_norm: bool = False
    cluster: str | None = None
    inputs: tuple[str, ...] = ()
    label: str | None = None
    next_token: bool = False
    augment: Any = None
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    resume: bool = True
    tensorboard: str | None = None
    mlflow: str | None = None
    wandb: str | None = None
    progress: bool = False
    threads: int | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) is not None or name in ("batch_size", "accumulate"):
                whole("TrainConfig", name, getattr(self, name), 1)
        whole("TrainConfig", "seed", self.seed, 0)
        whole("TrainConfig", "workers", self.workers, 0)
        for name, most in _MOST.items():
            if (getattr(self, name) or 0) > most:
                raise TrainingError(f"TrainConfig: {name} must be at most {most}, is {getattr(self, name)!r}")
        for name in ("next_token", "resume", "progress", "sync_batch_norm"):
            flag("TrainConfig", name, getattr(self, name))
        if self.compile is not None:
            flag("TrainConfig", "compile", self.compile)
        if self.clip is not None:
            number("TrainConfig", "clip", self.clip, ends="(]")
        if self.ema is not None:
            number("TrainConfig", "ema", self.ema, 0.0, 1.0, ends="[)")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise TrainingError(
                f"TrainConfig: device must be 'auto', 'cpu', 'mps', 'cuda' or 'cuda:' and a number, is {self.device!r}"
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise TrainingError(
                    f"TrainConfig: {name} must be {' or '.join(map(repr, allowed))}, is {getattr(self, name)!r}"
                )
        for name in ("inputs", "metrics", "trainable"):
            given = getattr(self, name)
            if not isinstance(given, list | tuple) and not (name == "trainable" and isinstance(given, str)):
                raise TrainingError(f"TrainConfig: {name} must be a list of names, is {given!r}")
        for name in _TEXTS:
            given = getattr(self, name)
            fits = isinstance(given, (str, os.PathLike) if name in _PATHS else str)
            if not (fits and str(given)) and (given is not None or name == "monitor"):
                what = "a path" if name in _PATHS else "a text"
                raise TrainingError(f"TrainConfig: {name} must be {what}, is {given!r}")
        if self.precision == "fp16" and self.parallel not in ("none", "ddp"):
            # The loss scale must fall in all processes at once, and each sees its own part of the gradients alone.
            raise TrainingError(
                f"TrainConfig: precision 'fp16' goes with parallel 'none' and 'ddp', not with {self.parallel!r}; "
                "choose 'bf16', which needs no loss scale"
            )
        if self.sync_batch_norm and self.parallel in ("tensor", "pipeline", "hybrid"):
            raise TrainingError(
                f"TrainConfig: sync_batch_norm goes with parallel 'ddp' and 'fsdp', not with {self.parallel!r}; leave "
                "one of them out"
            )
        if self.cluster is not None and self.parallel == "none":
            raise TrainingError("TrainConfig: cluster is read by parallel, which is 'none'; set parallel='auto'")
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise TrainingError("TrainConfig: checkpoint_every needs a folder; set checkpoint")

    @property
    def most_epochs(self) -> int | None:
        """How many epochs there are at most; None where only `steps` ends the training."""
        return EPOCHS if self.epochs is None and self.steps is None else self.epochs


_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("auto", "float32", "bf16", "fp16"),
    "parallel": ("none", "auto", "ddp", "fsdp", "tensor", "pipeline", "hybrid"),
    "decay": ("all", "matrices"),
}


def _hint(key: str) -> str:
    if key in ("lr", "learning_rate", "momentum", "weight_decay", "betas"):
        return f'the optimizer has it: optimizer = {{ name = "sgd", {key.replace("learning_rate", "lr")} = ... }}'
    near = get_close_matches(key, TrainConfig.__struct_fields__, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(TrainConfig.__struct_fields__)}"


def parse_config(table: Mapping[str, object], where: str = "train") -> TrainConfig:
    """The table of a TOML file as a TrainConfig. Raises TrainingError that names the key, such as train.batch_size."""
    for key in table:
        if key not in TrainConfig.__struct_fields__:
            raise TrainingError(f"{where}.{key}: no such setting; {_hint(key)}")
    try:
        return msgspec.convert(dict(table), TrainConfig)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise TrainingError(f"{where}{path.rstrip('`')}: {text}") from None
    except TrainingError as error:
        raise TrainingError(str(error).replace("TrainConfig: ", f"{where}.", 1)) from None
