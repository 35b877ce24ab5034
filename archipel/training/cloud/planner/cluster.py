"""The machines of a training in numbers: memory, speed of products, of memory and of links; from a file or measured."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from archipel.durable import write_durably
from archipel.errors import TrainingError
from archipel.library_errors import one_line

_SLOWER = ("all_gather", "reduce_scatter", "all_to_all")
_CONVOLUTIONS = ("narrow", "depthwise")
_OPERATORS = ("AveragePool", "BatchNormalization", "Dropout", "Gelu", "LayerNormalization", "MatMul", "MaxPool",
              "Softmax", "Tanh")  # fmt: skip
_LARGEST = 2**20  # bytes of a file


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal devices that are linked alike, in bytes, seconds and FLOPs (two for a multiply-accumulate).

    Attributes:
        devices: how many, one for each process, 1 or more.
        memory_bytes: of one device, for everything that training keeps there.
        flops_per_second: of large matrix products, by dtype ("float32", "bfloat16").
        convolution_flops_per_second: of large convolutions; None: as of matrix products.
        convolution_share: how fast others are, as a part of that: "narrow" ones of a few channels, "depthwise" ones.
        memory_bytes_per_second: that elementwise operators read and write.
        operator_bytes_per_second: the same of operators that are slower, by ONNX operator: MaxPool, AveragePool,
            BatchNormalization, LayerNormalization, Gelu, Tanh, Softmax, Dropout, each also for those like it; of
            MatMul the copies of its factors that it makes before it computes.
        fresh_bytes_per_second: that are written into memory just allocated, as gradients are; None: as elsewhere.
        launch_seconds: that one small operator takes at least.
        link_bytes_per_second: from one device to another, in one direction.
        latency_seconds: until the first byte arrives.
        exchange_seconds: that PyTorch takes to prepare one exchange of a DTensor.
        wait_seconds: that devices wait for the slowest of them at an exchange between computations, on average.
        exchange_bytes_per_second: that PyTorch copies in one exchange of a DTensor; None: as memory moves bytes.
        slowdown: how much longer an exchange takes than a ring over these links would, by name ("all_gather",
            "reduce_scatter", "all_to_all"); 1 for others.
        overlap: the part of an exchange that goes on beside computing, 0..1: 0 where processors do both.
        dtype: in which parameters and activations are computed.
    """

    devices: int
    memory_bytes: int
    flops_per_second: dict[str, float]
    convolution_flops_per_second: dict[str, float] | None = None
    convolution_share: dict[str, float] = {}
    memory_bytes_per_second: float
    operator_bytes_per_second: dict[str, float] = {}
    fresh_bytes_per_second: float | None = None
    launch_seconds: float = 5e-6
    link_bytes_per_second: float
    latency_seconds: float
    exchange_seconds: float = 1e-4
    wait_seconds: float = 0.0
    exchange_bytes_per_second: float | None = None
    slowdown: dict[str, float] = {}
    overlap: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        rates = [*self.flops_per_second.values(), *(self.convolution_flops_per_second or {}).values()]
        rates += [*self.operator_bytes_per_second.values(), *self.convolution_share.values()]
        rates += [*self.slowdown.values(), *filter(None, [self.exchange_bytes_per_second, self.fresh_bytes_per_second])]
        numbers = [*rates, self.memory_bytes_per_second, self.link_bytes_per_second, self.memory_bytes, self.devices]
        if not all(0 < number < 1e30 for number in numbers):
            raise ValueError("devices, memory and speeds must be above 0")
        seconds = (self.launch_seconds, self.latency_seconds, self.exchange_seconds, self.wait_seconds)
        if not all(0 <= n < 1e6 for n in seconds):
            raise ValueError("seconds must be 0 or more")
        if unknown := set(self.slowdown) - set(_SLOWER):
            raise ValueError(f"slowdown knows {', '.join(_SLOWER)}, not {min(unknown)!r}")
        if unknown := set(self.convolution_share) - set(_CONVOLUTIONS):
            raise ValueError(f"convolution_share knows {', '.join(_CONVOLUTIONS)}, not {min(unknown)!r}")
        if unknown := set(self.operator_bytes_per_second) - set(_OPERATORS):
            raise ValueError(f"operator_bytes_per_second knows {', '.join(_OPERATORS)}, not {min(unknown)!r}")
        if not 0 <= self.overlap <= 1:
            raise ValueError("overlap must be between 0 and 1")
        if self.devices > 2**20:
            raise ValueError("devices must be at most 1048576")
        if self.dtype not in self.flops_per_second:
            raise ValueError(f"flops_per_second has no {self.dtype!r}, which is the dtype")

    def fresh_seconds(self, nbytes: float) -> float:
        """To allocate and write so many bytes."""
        return nbytes / (self.fresh_bytes_per_second or self.memory_bytes_per_second)

    def product_rate(self, convolution: bool) -> float:
        """FLOPs a second of products or convolutions in the cluster's dtype."""
        rates = self.flops_per_second
        if convolution and self.convolution_flops_per_second:
            rates = {**rates, **self.convolution_flops_per_second}
        return rates[self.dtype]


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The cluster that a TOML file describes.

    Raises TrainingError, in one line that names the file and the field, for a file that cannot be read, an unknown
    field, or a number out of bounds.

    Example:
        # cluster.toml: devices = 8, memory_bytes = 80_000_000_000, ...
        cluster = read_cluster("cluster.toml")
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise TrainingError(f"cannot read the cluster file {path}: {error.strerror or type(error).__name__}") from error
    if len(data) > _LARGEST:
        raise TrainingError(f"the cluster file {path} has more than {_LARGEST} bytes")
    try:
        return msgspec.toml.decode(data, type=Cluster)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TrainingError(f"the cluster file {path}: {one_line(error)}; docs/parallel.md lists the fields") from error


def write_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write the TOML file that `read_cluster` reads. Raises TrainingError if it cannot be written."""
    lines = []
    tables = []
    for name in cluster.__struct_fields__:
        value = getattr(cluster, name)
        if isinstance(value, dict):
            tables += [f"\n[{name}]", *(f'"{key}" = {rate!r}' for key, rate in value.items())]
        elif value is not None:
            lines.append(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value!r}")
    try:
        write_durably(Path(path), ("\n".join([*lines, *tables]) + "\n").encode())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TrainingError(f"cannot write the cluster file {path}: {reason}; choose another folder") from error


# Exchanges between n devices, by the alpha-beta model: a message of m bytes takes latency + m / bandwidth.
# The rings are those of Thakur, Rabenseifner and Gropp 2005, sections 3.1, 4.2 and 4.5, and Patarasuk and Yuan 2009.


def all_reduce_seconds(cluster: Cluster, nbytes: float, n: int) -> float:
    """A ring: n - 1 steps that reduce and scatter, and n - 1 that gather, of nbytes / n each."""
    return 2 * _half_ring(cluster, nbytes, n)


def gather_seconds(cluster: Cluster, nbytes: float, n: int) -> float:
    """All-gather to nbytes on each device: n - 1 steps of nbytes / n each."""
    return _half_ring(cluster, nbytes, n) * cluster.slowdown.get("all_gather", 1.0)


def scatter_seconds(cluster: Cluster, nbytes: float, n: int) -> float:
    """Reduce-scatter from nbytes on each device: n - 1 steps of nbytes / n each."""
    return _half_ring(cluster, nbytes, n) * cluster.slowdown.get("reduce_scatter", 1.0)


def all_to_all_seconds(cluster: Cluster, nbytes: float, n: int) -> float:
    """Each device has nbytes / n, of which it sends 1 / n to each other one."""
    bare = (n - 1) * (cluster.latency_seconds + nbytes / n / n / cluster.link_bytes_per_second)
    return bare * cluster.slowdown.get("all_to_all", 1.0)


def prepare_seconds(cluster: Cluster, nbytes: float) -> float:
    """What PyTorch does around one exchange of a DTensor that has nbytes on a device."""
    rate = cluster.exchange_bytes_per_second or cluster.memory_bytes_per_second
    return cluster.exchange_seconds + nbytes / rate


def _half_ring(cluster: Cluster, nbytes: float, n: int) -> float:
    return (n - 1) * (cluster.latency_seconds + nbytes / n / cluster.link_bytes_per_second)


def send_seconds(cluster: Cluster, nbytes: float) -> float:
    """From one device to one other."""
    return cluster.latency_seconds + nbytes / cluster.link_bytes_per_second
