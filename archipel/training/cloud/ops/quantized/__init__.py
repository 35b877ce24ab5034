"""Integers: quantization with a gradient, and products of integers."""

from archipel.training.cloud.ops.quantized import integer as integer
from archipel.training.cloud.ops.quantized import quantization as quantization
