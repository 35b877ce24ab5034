"""Quantization, simulated in the graph: `QuantizeLinear -> DequantizeLinear` on weights and activations."""
