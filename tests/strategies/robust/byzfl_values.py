"""What byzfl makes of the updates in FOLDER/given.npz: run by test_byzfl.py with the Python that has byzfl."""

import sys
from pathlib import Path

import byzfl
import numpy as np

folder = Path(sys.argv[1])
given = np.load(folder / "given.npz")
updates, tolerated, bound = given["updates"], int(given["tolerated"]), float(given["bound"])
# Buckets as ours are: the largest of which more than 2f come out.
size = max(1, (len(updates) - 1) // (2 * tolerated))


class InOrder(byzfl.Bucketing):
    """byzfl's bucketing of updates that are in the order already; it draws one itself."""

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        drawn = np.random.permutation
        np.random.permutation = lambda rows: rows
        try:
            return super().__call__(vectors)
        finally:
            np.random.permutation = drawn


made = {
    "median": byzfl.Median()(updates),
    "trimmed-mean": byzfl.TrMean(tolerated)(updates),
    "krum": byzfl.Krum(tolerated)(updates),
    "multi-krum": byzfl.MultiKrum(tolerated)(updates),
    "geometric-median": byzfl.GeometricMedian(nu=1e-12, T=3000)(updates),
    "norm-bounding": byzfl.Average()(byzfl.Clipping(c=bound)(updates.copy())),
    "centered-clipping": byzfl.CenteredClipping(L=3, tau=bound)(updates),
    "nnm": byzfl.NNM(tolerated)(updates),
    "bucketing": InOrder(size)(updates[given["order"]]),
    "sign-flip": byzfl.SignFlipping()(updates),
    "ipm": byzfl.InnerProductManipulation(tau=0.5)(updates),
    "alie": byzfl.ALittleIsEnough(tau=1.5)(updates),
    "mimic": byzfl.Mimic(epsilon=0)(updates),
}
np.savez(folder / "expected.npz", **made)
