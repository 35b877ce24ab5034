"""Handwritten digits with the person who wrote each of them: the data set that comes with the package.

A subset of the MNIST training images (LeCun, Cortes, Burges; from NIST Special Database 19) with the writers that
QMNIST reconstructed (Yadav and Bottou, 2019, "Cold Case: The Lost MNIST Digits"). It has all digits of each of its
writers that are in MNIST's training set. Licences: `LICENSES/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipel.errors import DatasetError

# NIST's names for the groups of people who filled in the forms ("hsf" numbers).
STAFF_SERIES = (0, 1)
PUPIL_SERIES = (4,)


@dataclass(frozen=True, eq=False)
class DigitsByWriter:
    """Digits in the order of their writers; row i of every array belongs to the same digit. Arrays are read-only.

    images   uint8 [n, 28, 28], 0 is the paper and 255 the ink
    labels   uint8 [n], 0..9
    writers  int16 [n], NIST's number of the person
    series   uint8 [n], NIST's series of the form: 0 and 1 are census staff, 4 are high-school pupils

    Example:
        digits = digits_by_writer()
        one = digits.of(digits.writers[:1])
        print(one.inputs().shape[1:], one.inputs().dtype, one.targets().dtype)  # (1, 28, 28) float32 int64
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    writers: NDArray[np.int16]
    series: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, writers: Iterable[int]) -> DigitsByWriter:
        """All digits of these writers, in their present order.

        Raises DatasetError for a writer who is not in the data.
        """
        # int64, since a number beyond int16 must be reported as missing and not wrap.
        wanted = np.array(sorted(set(writers)), dtype=np.int64)
        missing = np.setdiff1d(wanted, self.writers)
        if len(missing):
            raise DatasetError(
                f"no digits of writer {', '.join(map(str, missing[:5]))} in these data; "
                "choose from writers_in(...) of the same data"
            )
        return self._rows(np.flatnonzero(np.isin(self.writers, wanted)))

    def take(self, rows: NDArray[np.intp]) -> DigitsByWriter:
        """The digits at these row numbers (integer [m]), in the order given."""
        return self._rows(np.asarray(rows, dtype=np.intp))

    def writers_in(self, series: Iterable[int]) -> list[int]:
        """The writers of these series, ascending."""
        return [int(w) for w in np.unique(self.writers[np.isin(self.series, list(series))])]

    def inputs(self) -> NDArray[np.float32]:
        """The images as float32 [n, 1, 28, 28] in 0..1, which the networks in `archipel.models` take."""
        return self.images[:, None].astype(np.float32) / np.float32(255)

    def targets(self) -> NDArray[np.int64]:
        """The labels as int64 [n]."""
        return self.labels.astype(np.int64)

    def _rows(self, rows: NDArray[np.intp]) -> DigitsByWriter:
        arrays = (self.images[rows], self.labels[rows], self.writers[rows], self.series[rows])
        # Indexing with an array copies, so this does not touch the caller's arrays.
        for array in arrays:
            array.flags.writeable = False
        return DigitsByWriter(*arrays)
