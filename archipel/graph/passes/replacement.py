"""Replacing one value by another."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder


def take_over(op: Builder, old: ir.Value, new: ir.Value) -> None:
    """Make all readers of `old` read `new`, which also takes its place and name as an output of the graph."""
    if old.is_graph_output():
        old.name, new.name = op.unique(f"{old.name}/before"), old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
