"""Graphs as modules of PyTorch: traced node by node, run as a whole or in steps."""
