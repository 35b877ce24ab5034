"""Logistic regression as a loop in NumPy: what the arithmetic of the task costs at least in Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tasks import Prepared, Task, cohorts, linear_accuracy, load, parts, serve


def prepare(task: Task, rounds: int, folder: Path) -> Prepared:
    x, y = load(folder)
    x = x.reshape(len(x), -1)
    devices = parts(len(x), task)
    drawn = cohorts(task, rounds)

    def run() -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(2)
        weight, bias = np.zeros((x.shape[1], 10), np.float32), np.zeros(10, np.float32)
        gradient = np.empty_like(weight)
        for cohort in drawn:
            total_weight, total_bias, total = np.zeros_like(weight), np.zeros_like(bias), 0
            for number in cohort:
                w, b = weight.copy(), bias.copy()
                order = rng.permutation(devices[number])
                for first in range(0, len(order), task.batch):
                    rows = order[first : first + task.batch]
                    batch = x[rows]
                    scores = batch @ w
                    scores += b
                    scores -= scores.max(axis=1, keepdims=True)
                    np.exp(scores, out=scores)
                    scores /= scores.sum(axis=1, keepdims=True)
                    scores[np.arange(len(rows)), y[rows]] -= 1
                    scores *= np.float32(task.rate / len(rows))
                    np.matmul(batch.T, scores, out=gradient)
                    w -= gradient
                    b -= scores.sum(axis=0)
                count = len(order)
                w *= np.float32(count)
                total_weight += w
                total_bias += b * np.float32(count)
                total += count
            weight, bias = total_weight / np.float32(total), total_bias / np.float32(total)
        return weight, bias

    return run, lambda result: linear_accuracy(*result, folder)


if __name__ == "__main__":
    serve(prepare)
