"""Scan and Loop as ONNX defines them.

onnx.reference's Scan knows neither axes nor directions. Its Loop does not run where the condition is left out, joins
single numbers to a matrix, and lets a value of the graph around it hide a state of the same name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_loop import Loop as ReferenceLoop
from onnx.reference.ops.op_scan import Scan as ReferenceScan

Array = np.ndarray


class Scan(ReferenceScan):
    op_domain = ""

    def __init__(self, node: Any, params: Any) -> None:
        OpRun.__init__(self, node, params)

    def _run(self, *values: Array, context: Any = None, bindings: Any = None, **given: Any) -> tuple[Array, ...]:
        count = self.num_scan_inputs
        states, sequences = list(values[: len(values) - count]), values[len(values) - count :]
        results = len(self.body.output_names) - len(states)
        read = list(zip(self._list("scan_input_axes", count), self._list("scan_input_directions", count)))
        rows = [np.moveaxis(v, axis, 0)[:: -1 if back else 1] for v, (axis, back) in zip(sequences, read)]
        stacked: list[list[Array]] = [[] for _ in range(results)]
        for items in zip(*rows, strict=True):
            inputs = dict(context or {}) | dict(zip(self.body.input_names, [*states, *items]))
            found = self._run_body(inputs, bindings=bindings)
            for column, value in zip(stacked, found[len(states) :]):
                column.append(value)
            states = list(found[: len(states)])
        kinds = zip(self._list("scan_output_axes", results), self._list("scan_output_directions", results))
        ends = [np.stack(column[:: -1 if back else 1], axis) for column, (axis, back) in zip(stacked, kinds)]
        return (*states, *ends)

    def _list(self, name: str, count: int) -> list[int]:
        return list(getattr(self, name, None) or [0] * count)


class Loop(ReferenceLoop):
    op_domain = ""

    def _run(
        self,
        limit: Array | None = None,
        condition: Array | None = None,
        *states: Array,
        context: Any = None,
        bindings: Any = None,
        **given: Any,
    ) -> tuple[Array, ...]:
        stacked: list[list[Array]] = [[] for _ in range(self.K)]
        goes_on, number = condition is None or bool(condition), 0
        while goes_on and (limit is None or number < int(limit)):
            inputs = dict(context or {}) | dict(
                zip(self.body.input_names, [np.array(number), np.array(goes_on), *states])
            )
            found = self._run_body(inputs, bindings=bindings)
            goes_on, number = bool(found[0]), number + 1
            states = tuple(found[1 : 1 + self.N])
            for column, value in zip(stacked, found[1 + self.N :]):
                column.append(value)
        return (*states, *(np.stack(column) if column else self._nothing(i) for i, column in enumerate(stacked)))

    def _nothing(self, index: int) -> Array:
        """No items: of the declared rank, with sizes of 0 where the body declares none, as ONNX Runtime does it."""
        declared = self.onnx_node.attribute[0].g.output[1 + self.N + index].type.tensor_type
        kind = {1: np.float32, 11: np.float64, 7: np.int64, 9: np.bool_}[declared.elem_type]
        return np.zeros([0, *(d.dim_value for d in declared.shape.dim)], kind)


LOOPS: list[type[OpRun]] = [Scan, Loop]
