"""Seconds that one device computes: an operator's forward and backward pass, and the optimizer's update."""

from __future__ import annotations

from archipel.training.cloud.planner.cluster import Cluster
from archipel.training.cloud.planner.costs import CONVOLUTIONS, PRODUCTS, Unit

# Bytes that an optimizer keeps, moves and allocates in a step for each byte of a parameter. PyTorch's work one
# elementwise operation after the other: Adam's lerp_ reads two tensors and writes one, and so on for mul_, addcmul_,
# sqrt, div, add_ and addcdiv_; sqrt and div write new tensors.
OPTIMIZERS = {"sgd": (0, 3, 0), "momentum": (1, 8, 0), "adam": (2, 16, 2), "adamw": (2, 18, 2)}

_FEW_CHANNELS = 16  # a vector register of a CPU has as many float32
_LIKE = {
    "Gelu": "Gelu", "Erf": "Gelu", "Mish": "Gelu",
    "Tanh": "Tanh", "Sigmoid": "Tanh", "Exp": "Tanh", "Log": "Tanh", "Softplus": "Tanh", "Sin": "Tanh", "Cos": "Tanh",
    "Elu": "Tanh", "Selu": "Tanh", "Celu": "Tanh", "Pow": "Tanh",
    "Softmax": "Softmax", "LogSoftmax": "Softmax",
    "LayerNormalization": "LayerNormalization", "RMSNormalization": "LayerNormalization",
    "BatchNormalization": "BatchNormalization", "InstanceNormalization": "BatchNormalization",
    "GroupNormalization": "BatchNormalization",
    "MaxPool": "MaxPool", "LpPool": "MaxPool", "GlobalMaxPool": "MaxPool", "AveragePool": "AveragePool",
    "Dropout": "Dropout",
    **dict.fromkeys(PRODUCTS, "MatMul"),
}  # fmt: skip


def unit_seconds(unit: Unit, cluster: Cluster, share: float = 1.0) -> float:
    """Forward and backward pass of this share of an operator, launches included.

    That is the slower of computing and moving bytes (Williams et al. 2009), where the cluster tells nothing about such
    operators. Where it says how fast products copy their factors, they do that first and then compute.
    """
    computing = unit.flops / _rate(unit, cluster)
    kind = _LIKE.get(unit.op_type, "")
    moving = unit.traffic / cluster.operator_bytes_per_second.get(kind, cluster.memory_bytes_per_second)
    copies = kind == "MatMul" and kind in cluster.operator_bytes_per_second
    once = (computing + moving if copies else max(computing, moving)) * share
    # A view takes a launch as well.
    return (once + cluster.launch_seconds) * (1 + unit.backward)


def convolution_kind(channels: int, groups: int) -> str:
    """ "depthwise", "narrow" or "": what the speed of a convolution depends on most.

    Arguments:
        channels: that each group reads.
        groups: how many.
    """
    if channels >= _FEW_CHANNELS:
        return ""
    return "depthwise" if groups > 1 else "narrow"


def optimizer_seconds(nbytes: float, tensors: int, cluster: Cluster, optimizer: str) -> float:
    """One update of parameters of so many bytes."""
    _, moved, fresh = OPTIMIZERS[optimizer]
    operations = tensors * (1 + moved // 3) * cluster.launch_seconds
    return nbytes * moved / cluster.memory_bytes_per_second + cluster.fresh_seconds(nbytes * fresh) + operations


def _rate(unit: Unit, cluster: Cluster) -> float:
    """FLOPs a second."""
    if unit.op_type not in CONVOLUTIONS:
        return cluster.product_rate(convolution=False)
    weight = unit.node.inputs[1]
    shape = () if weight is None or weight.shape is None else tuple(weight.shape)
    groups = unit.node.attributes.get_int("group", 1)
    # Conv's weight is [channels out, channels of a group in, ...], ConvTranspose's [channels in, ...].
    channels = shape[1] if unit.op_type == "Conv" and len(shape) > 1 else (shape[0] if shape else _FEW_CHANNELS)
    if unit.op_type == "ConvTranspose" and isinstance(channels, int):
        channels //= groups
    kind = convolution_kind(channels if isinstance(channels, int) else _FEW_CHANNELS, groups)
    return cluster.product_rate(convolution=True) * cluster.convolution_share.get(kind, 1.0)
