"""From update arrays to the one vector of integers that is masked and summed, and from the sum back to numbers.

Fixed point: an element x of an update port with `range` R and `bits` k becomes the nearest integer to x / step (ties to
even), clamped to [-M, M], where M = 2^(k-1) - 1 and step = R / M in float64. It is stored modulo 2^b (two's
complement). So zero is exact, and a sum decodes without knowing which devices took part, as no offset adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle.roles import CHANGES, Program, Update
from archipel.errors import BoundError, MessageError, ProtocolError
from archipel.protocol.bounds import check_sum, check_update, clamp, entries, largest, step

Vector = NDArray[np.uint32]


@dataclass(frozen=True)
class DecodedSum:
    """Sums over the cohort, by tensor name, float64 in the shape of the update.

    Devices weight their `deltas`; dividing the sums by `weight` (the sum of the weights) gives the weighted mean.
    `weight` is None when the program uploads none. `moments` are the entries of kind `mean` and `variance`.
    """

    deltas: dict[str, NDArray[np.float64]]
    values: dict[str, NDArray[np.float64]]
    weight: float | None
    moments: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @classmethod
    def of(cls, sums: Mapping[Update, NDArray[np.float64]]) -> DecodedSum:
        """The sum from one array for each update port."""
        weights = [float(array) for port, array in sums.items() if port.kind == "weight"]

        def kinds(*wanted: str) -> dict[str, NDArray[np.float64]]:
            return {port.tensor: array for port, array in sums.items() if port.kind in wanted}

        return cls(kinds("delta"), kinds("value"), weights[0] if weights else None, kinds("mean", "variance"))

    def total_weight(self, devices: int) -> float:
        """The sum of the devices' weights. Without a weight entry each of the `devices` weighs 1."""
        return float(devices) if self.weight is None else self.weight

    def read(self, port: Update) -> NDArray[np.float64]:
        """The sum of an update port."""
        if port.kind == "weight":
            return np.array(0.0 if self.weight is None else self.weight)
        kinds = {"delta": self.deltas, "value": self.values}
        return kinds.get(port.kind, self.moments)[port.tensor]


@dataclass(frozen=True)
class Layout:
    """Where each `update` output of a `finish` or `analyze` program lies in the vector, in the outputs' order.

    `not_negative` are the names of those that are 0 or more of every device, such as counts. `histograms`, pairs of
    names: the first has counts of devices in bins, and every device that counts 1 in the second, a scalar, counts 1 in
    one bin and 0 in the others.
    """

    updates: tuple[Update, ...]
    not_negative: frozenset[str] = frozenset()
    histograms: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, program: Program) -> Layout:
        """The layout of `program`. Raises ProtocolError when it uploads nothing, or more than one weight."""
        updates = tuple(port for port in program.outputs if isinstance(port, Update))
        if not updates:
            raise ProtocolError(f"a {program.kind} program without update outputs has nothing to upload")
        if sum(port.kind == "weight" for port in updates) > 1:
            raise ProtocolError(f"a {program.kind} program may upload one weight, this one uploads several")
        return cls(updates)

    @property
    def length(self) -> int:
        """Number of entries of the vector."""
        return sum(entries(port) for port in self.updates)

    def modulus_bits(self, max_cohort: int) -> int:
        """The smallest of 8, 16, 24 and 32 bits in which a sum of `max_cohort` devices cannot overflow.

        Raises ProtocolError where 32 bits are too few.
        """
        # Whole bytes, because `pack` rounds up to them. Where entries have bits of their own (protocol.narrow), this is
        # the modulus of the masks.
        for bits in (8, 16, 24, 32):
            if self.fits(bits, max_cohort):
                return bits
        raise ProtocolError(
            f"{max_cohort} devices with {max(port.bits for port in self.updates)} bits per entry overflow 32 bits; "
            "make the cohort smaller or the update's bits fewer"
        )

    def encode(self, arrays: Mapping[str, NDArray[Any]], *, modulus_bits: int, max_cohort: int) -> Vector:
        """Fixed point of one device's update, before masking.

        Arguments:
            arrays: by output name, floating point, in the shapes that the program declares.
            modulus_bits: b, from the plan.
            max_cohort: how many devices the sum may have.

        Returns:
            uint32 [length], every entry below 2^b.

        Raises:
            ProtocolError: an array is missing, unknown or of another shape, has NaN or infinity, or the modulus could
                overflow.
            BoundError: the arrays exceed a bound of the manifest, see protocol.bounds.
        """
        self._check_modulus(modulus_bits, max_cohort)
        checked = self.check(arrays)
        limits = clamp(self.updates, checked)
        vector = np.empty(self.length, np.uint32)
        start = 0
        for port in self.updates:
            stop = start + entries(port)
            vector[start:stop] = _quantize(port, checked[port.name], limits[port.name])
            start = stop
        vector &= np.uint32(2**modulus_bits - 1)
        return vector

    def discount(self, arrays: Mapping[str, NDArray[Any]], staleness: int, exponent: float) -> dict[str, NDArray[Any]]:
        """The arrays, with the changes times (1 + staleness)^-exponent (FedBuff: Nguyen et al. 2022)."""
        scale = np.float32((1.0 + staleness) ** -exponent)
        # Values and the weight stay: a smaller weight would undo the discount when the sum is divided by the weights.
        changes = {port.name for port in self.updates if port.kind in CHANGES}
        return {name: array * scale if name in changes else array for name, array in arrays.items()}

    def check(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """`arrays` once they are checked: all update outputs, in their shapes, finite, within the manifest's norms.

        Raises ProtocolError or BoundError, as `encode`.
        """
        unknown = set(arrays) - {port.name for port in self.updates}
        if unknown:
            raise ProtocolError(f"update: {sorted(unknown)} are not update outputs of the program")
        checked = {port.name: _check_array(port, arrays.get(port.name)) for port in self.updates}
        check_update(self.updates, checked)
        return checked

    def to_send(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """What a device of a plain round sends of these arrays, checked as `check` does."""
        return self.check(arrays)

    def check_sum(self, total: DecodedSum, cohort: int) -> None:
        """Raises BoundError unless `cohort` devices that run the signed program can have sent updates of this sum."""
        sums = {port.name: total.read(port) for port in self.updates}
        check_sum(self.updates, sums, cohort)
        self.check_counts(sums)

    def check_counts(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Raises BoundError for counts that no device, and no sum of devices, can have: below 0, or of a histogram not
        whole, or with another sum than the number of devices that count themselves in it. `arrays` by output name."""
        for name, counter in sorted(self.histograms):
            counts, devices = arrays[name], float(arrays[counter])
            if not ((counts >= 0).all() and (counts == np.rint(counts)).all() and counts.sum() == devices):
                raise BoundError(
                    f"rejected: {name!r} counts {counts.sum():g} devices, and {counts.min():g} in one of its bins; "
                    f"{devices:g} count themselves, each in one bin"
                )
        for name in sorted(self.not_negative):
            if arrays[name] < 0:
                raise BoundError(f"rejected: {name!r} is {float(arrays[name]):g}, and no device has less than 0 of it")

    def decode_sum(self, total: Vector, *, cohort: int, modulus_bits: int) -> DecodedSum:
        """The sums in floating point, from `total`, the sum of the unmasked vectors modulo 2^b.

        Arguments:
            total: uint32 [length], every entry below 2^b.
            cohort: how many devices' vectors are in the sum.
            modulus_bits: b, from the plan.

        Raises ProtocolError when an entry is beyond what that many devices can sum to: then it is not their sum.
        """
        signed = self.signed_sum(total, cohort=cohort, modulus_bits=modulus_bits)
        sums: dict[Update, NDArray[np.float64]] = {}
        start = 0
        for port in self.updates:
            stop = start + entries(port)
            sums[port] = np.multiply(signed[start:stop], step(port), dtype=np.float64).reshape(_shape(port))
            start = stop
        return DecodedSum.of(sums)

    def signed_sum(self, total: Vector, *, cohort: int, modulus_bits: int) -> NDArray[np.int64]:
        """The sum in whole steps, `[length]`, from the arguments of `decode_sum`. Raises ProtocolError as that does."""
        self._check_modulus(modulus_bits, cohort)
        check_vector("sum", total, modulus_bits, self.length)
        # Two's complement of b bits: residues from 2^(b-1) on stand for negative sums. `_check_modulus` has shown that
        # no true sum of the cohort reaches that far.
        signed = total.astype(np.int64)
        signed[signed >= 1 << (modulus_bits - 1)] -= 1 << modulus_bits
        start = 0
        for port in self.updates:
            part = signed[start : start + entries(port)]
            start += entries(port)
            limit = cohort * largest(port)
            # A mask that is left makes entries uniform modulo 2^b, most of them beyond the limit where b leaves room.
            if part.size and max(int(part.max()), -int(part.min())) > limit:
                raise ProtocolError(
                    f"sum: an entry of {port.tensor!r} is beyond ±{limit}, the most that {cohort} devices can sum to; "
                    "a mask is left in it or a device sent something else than its update"
                )
        return signed

    def fits(self, modulus_bits: int, cohort: int) -> bool:
        """Whether sums of `cohort` devices cannot overflow modulo 2^modulus_bits."""
        # Sums are from -cohort M to cohort M, and each sign has half of the residues.
        return all(cohort * largest(port) < 1 << (modulus_bits - 1) for port in self.updates)

    def widths(self, max_cohort: int) -> list[tuple[int, int]]:
        """For each part of the vector how many entries it has, and the bits that a sum of `max_cohort` devices needs:
        one more than its largest value has, for the sign."""
        return [(entries(port), (max_cohort * largest(port)).bit_length() + 1) for port in self.updates]

    def _check_modulus(self, modulus_bits: int, cohort: int) -> None:
        if not 1 <= modulus_bits <= 32 or not self.fits(modulus_bits, cohort):
            raise ProtocolError(
                f"a modulus of {modulus_bits} bits cannot hold the sum of {cohort} devices with up to "
                f"{max(port.bits for port in self.updates)} bits per entry"
            )


def pack(vector: Vector, modulus_bits: int) -> bytes:
    """The bytes of a vector: little-endian, ceil(modulus_bits / 8) bytes per entry, no header.

    Raises ProtocolError for a wrong vector.
    """
    check_vector("vector", vector, modulus_bits)
    width = -(-modulus_bits // 8)
    # Each entry as four bytes, the low ones first, of which the first `width` are kept.
    words = vector.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)
    if width == 4:
        return words.tobytes()
    # One column after the other takes a fifth of what NumPy takes for all of them in rows of three bytes.
    packed = np.empty((vector.size, width), np.uint8)
    for index in range(width):
        packed[:, index] = words[:, index]
    return packed.tobytes()


def unpack(data: bytes, length: int, modulus_bits: int) -> Vector:
    """The vector, uint32 [length], from the bytes of `pack`.

    Raises MessageError for any other number of bytes or an entry >= 2^b.
    """
    width = -(-modulus_bits // 8)
    if len(data) != length * width:
        raise MessageError(
            f"vector: expected {length} entries of {width} bytes = {length * width} bytes, got {len(data)}"
        )
    # Words that overlap: each begins with an entry, and what follows of the next ones is masked. Copying single bytes
    # apart takes six times as long. The last words would reach beyond the data, so they get zeros.
    vector, mask = np.empty(length, np.uint32), np.uint32(256**width - 1)
    inside = max((len(data) - 4) // width + 1, 0)
    for part, raw in ((vector[:inside], data), (vector[inside:], data[inside * width :] + bytes(4))):
        np.bitwise_and(np.ndarray(part.size, "<u4", raw, strides=(width,)), mask, out=part)
    # Entries of whole bytes cannot be too large.
    if modulus_bits % 8 and length and int(vector.max()) >> modulus_bits:
        raise MessageError(f"vector: entry {int(np.argmax(vector))} is not below 2^{modulus_bits}")
    return vector


def check_vector(where: str, vector: Vector, modulus_bits: int, length: int | None = None) -> None:
    """Raises ProtocolError unless `vector` is uint32 [length] with every entry below 2^modulus_bits."""
    if not isinstance(vector, np.ndarray) or vector.dtype != np.uint32 or vector.ndim != 1:
        kind = f"{vector.dtype}{list(vector.shape)}" if isinstance(vector, np.ndarray) else type(vector).__name__
        raise ProtocolError(f"{where}: expected a uint32 array with one axis, got {kind}")
    if length is not None and vector.size != length:
        raise ProtocolError(f"{where}: expected {length} entries, got {vector.size}")
    if vector.size and int(vector.max()) >> modulus_bits:
        raise ProtocolError(f"{where}: entry {int(np.argmax(vector))} is not below 2^{modulus_bits}")


def _check_array(port: Update, array: NDArray[Any] | None) -> NDArray[Any]:
    here = f"update {port.name!r}"
    if array is None:
        raise ProtocolError(f"{here}: missing; an update has every update output of the program")
    array = np.asarray(array)
    if array.shape != tuple(port.shape) or not np.issubdtype(array.dtype, np.floating):
        raise ProtocolError(f"{here}: expected floating point {list(port.shape)}, got {array.dtype}{list(array.shape)}")
    # NaN has no nearest integer: the conversion would make some number of it, without an error.
    if not np.isfinite(array).all():
        raise ProtocolError(f"{here}: has NaN or infinite entries; the local round diverged, lower its learning rate")
    return array


def _quantize(port: Update, array: NDArray[Any], limit: float) -> Vector:
    # In float64: entries have up to 30 bits, and float32 holds integers of 24.
    steps = array.astype(np.float64).reshape(-1)
    # `limit` is below the range where an element may be at most the device's weight times the range.
    if limit < port.range:
        np.clip(steps, -limit, limit, out=steps)
    steps /= step(port)
    # Clamped after rounding: `fits` counts on at most M from each device, or the sum could overflow.
    np.rint(steps, out=steps)
    np.clip(steps, -largest(port), largest(port), out=steps)
    # The view turns negative numbers into their residues modulo 2^32, which `encode` reduces modulo 2^b.
    return steps.astype(np.int32).view(np.uint32)


def _shape(port: Update) -> tuple[int, ...]:
    return tuple(int(dim) for dim in port.shape)
