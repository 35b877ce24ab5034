"""The training loop of compression: archipel's step graph on ONNX Runtime or PyTorch, resumable at any step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from archipel.compression.examples import Examples, fixed_batch
from archipel.compression.fine_tune import FineTune, steps_per_epoch
from archipel.durable import replacing
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.training import step_graph
from archipel.training.driver import StepRunner
from archipel.training.losses import Loss
from archipel.training.step_engines import ONNX_RUNTIME

Batch = dict[str, np.ndarray]
CHECKPOINT_SECONDS = 20.0
_LOSSES = "archipel/losses"


def train(
    model: Model,
    examples: Examples,
    options: FineTune,
    loss: Loss,
    trainable: tuple[str, ...],
    *,
    seed: int = 0,
    engine: str = ONNX_RUNTIME,
    fields: Callable[[Batch], Batch] | None = None,
    checkpoint: Path | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> tuple[dict[str, np.ndarray], list[float]]:
    """New values of the tensors that training moves, by name, and the loss of every step.

    `engine` runs the steps, as in StepRunner. The order of examples depends on `seed` and the epoch alone. `fields` may
    change each batch before it is used.
    With `checkpoint` the state is written to that file every CHECKPOINT_SECONDS, at the end, and when something stops
    the loop; training goes on from an existing file, with the same result as without interruption. `on_step` gets the
    number of steps made, the number of all steps, and the last loss. Raises CompressionError for a loss that is not
    finite.
    """
    size = fixed_batch(model) or min(options.batch_size, len(examples))
    total = options.steps or options.epochs * steps_per_epoch(len(examples), size)
    statistics = options.batch_norm
    step = step_graph(model, loss, options.make_optimizer(total), list(trainable), batch_norm=statistics)
    runner = StepRunner(step, seed=seed, engine=engine)
    losses = [] if checkpoint is None else _restore(checkpoint, runner)
    done = len(losses)
    last_saved = time.monotonic()
    state = runner.snapshot()
    try:
        while done < total:
            batch = _batch(examples, options, size, seed, done)
            if fields is not None:
                batch = fields(batch)
            value = runner.step(batch)["loss"]
            if not np.isfinite(value):
                raise CompressionError(
                    f"training diverged at step {done} of {total}: the loss is {value}; lower lr={options.lr:g}"
                )
            losses.append(value)
            # Both at once: if Ctrl-C stops the loop here or inside a step, `finally` saves the last whole step.
            state, done = runner.snapshot(), done + 1
            if checkpoint is not None and time.monotonic() - last_saved > CHECKPOINT_SECONDS:
                _save(checkpoint, state(), losses[:done])
                last_saved = time.monotonic()
            if on_step is not None:
                on_step(done, total, value)
    finally:
        if checkpoint is not None and done:
            _save(checkpoint, state(), losses[:done])
    # Without the optimizer's own tensors.
    known = set(model.ir.graph.initializers)
    return {name: value for name, value in state().items() if name in known}, losses


def _batch(examples: Examples, options: FineTune, size: int, seed: int, step: int) -> Batch:
    per_epoch = steps_per_epoch(len(examples), size)
    epoch, place = divmod(step, per_epoch)
    # From the step number alone, so that a resumed run needs no state of a generator.
    order = np.random.default_rng((seed, epoch)).permutation(len(examples))
    rows = order[place * size : (place + 1) * size]
    batch = examples.take(rows).feed
    if options.augment != "none":
        for name, array in batch.items():
            # The same seed for each array, so that a picture and a label that is a picture move together.
            if array.ndim == 4 and array.dtype.kind == "f":
                rng = np.random.default_rng((seed, epoch, place))
                batch[name] = augment_images(array, options.shift, options.augment == "shift_flip", rng)
    return batch


def augment_images(images: np.ndarray, most: int, flip: bool, rng: np.random.Generator) -> np.ndarray:
    """[batch, channels, height, width] moved by -most..most pixels, zeros moving in; with `flip` half are mirrored."""
    count, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (most, most), (most, most)))
    offsets = rng.integers(0, 2 * most + 1, (count, 2))
    mirrored: np.ndarray = (rng.random(count) < 0.5) & np.array(flip)
    result = np.empty_like(images)
    for i, (row, column) in enumerate(offsets):
        window = padded[i, :, row : row + height, column : column + width]
        result[i] = window[:, :, ::-1] if mirrored[i] else window
    return result


def _save(path: Path, tensors: Mapping[str, np.ndarray], losses: list[float]) -> None:
    with replacing(path, 0o666) as file:
        np.savez(file, **{_LOSSES: np.asarray(losses)}, **tensors)  # type: ignore[arg-type]


def _restore(path: Path, runner: StepRunner) -> list[float]:
    if not path.exists():
        return []
    try:
        with np.load(path, allow_pickle=False) as saved:
            tensors = {name: saved[name] for name in saved.files}
    except (OSError, ValueError, EOFError) as error:
        raise CompressionError(f"{path}: not a checkpoint of this run ({error}); remove it to start over") from None
    losses = [float(value) for value in tensors.pop(_LOSSES, np.zeros(0))]
    expected = {name: (value.shape, value.dtype) for name, value in runner.tensors.items()}
    if {name: (value.shape, value.dtype) for name, value in tensors.items()} != expected:
        raise CompressionError(f"{path}: the checkpoint is of another model; remove it to start over")
    runner.resume(tensors, len(losses))
    return losses
