"""Measurements on the held-out pupils: accuracies by writer, paired intervals, latency, agreement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from archipel.cli.start.demo.results import Interval
from archipel.datasets import DigitsByWriter

Predict = Callable[[np.ndarray], np.ndarray]
"""Images float32 [n, 1, 28, 28] -> logits float32 [n, 10]."""

RESAMPLES = 10_000
BATCH = 512


def predictions(predict: Predict, digits: DigitsByWriter) -> np.ndarray:
    """The class with the largest logit for each digit, int64 [n]."""
    images = digits.inputs()
    parts = [predict(images[at : at + BATCH]).argmax(axis=1) for at in range(0, len(images), BATCH)]
    return np.concatenate(parts)


def by_writer(correct: np.ndarray, digits: DigitsByWriter) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays `[writers]`, writers ascending: the sum of `correct` over a writer's digits, and their number."""
    writers, index = np.unique(digits.writers, return_inverse=True)
    return np.bincount(index, correct, len(writers)), np.bincount(index, minlength=len(writers))


def paired_interval(better: np.ndarray, worse: np.ndarray, counts: np.ndarray, seed: int) -> Interval:
    """Difference of two accuracies with a 95% bootstrap interval that resamples whole writers.

    `better`, `worse`: correct answers of each writer, `counts`: digits of each writer. Writers are resampled and not
    digits, because a model's errors on one person's digits are correlated (Efron and Tibshirani 1993, chapter 8).
    """
    gain = (better - worse).astype(np.float64)
    rng = np.random.default_rng(seed)
    # Both models are measured on the same writers, so a resample takes their difference writer by writer (paired).
    picks = rng.integers(0, len(counts), (RESAMPLES, len(counts)))
    differences = 100 * gain[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.percentile(differences, [2.5, 97.5])
    return Interval(float(100 * gain.sum() / counts.sum()), float(low), float(high))


def latencies(forms: dict[str, Predict], image: np.ndarray, repeats: int = 300) -> dict[str, float]:
    """Median microseconds of one call on `image` for each form, interleaved so that all meet the same noise."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for attempt in range(repeats + 20):
        for name, predict in forms.items():
            started = time.perf_counter()
            predict(image)
            if attempt >= 20:  # the first calls warm up caches and allocators
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}
