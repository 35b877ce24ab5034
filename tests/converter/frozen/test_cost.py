"""What a step is reckoned to cost, against products counted by hand."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from archipel.converter.frozen.cost import _products


@pytest.mark.parametrize(
    ("shapes", "equation", "products"),
    [
        (("b, 4, 5", "5, 6"), "bij,jk->bik", 4 * 5 * 6),
        (("b, 2, 4, 5", "b, 2, 5, 6"), "...ij,...jk->...ik", 2 * 4 * 5 * 6),
        (("b, 2, 3, 7, 4, 5", "5, 6"), "...ij,jk->...ik", 2 * 3 * 7 * 4 * 5 * 6),
    ],
)
def test_einsum(shapes: tuple[str, str], equation: str, products: int) -> None:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> agraph (float[{shapes[0]}] x, float[{shapes[1]}] w) => '
        f'(float[n] y) {{ y = Einsum<equation = "{equation}">(x, w) }}'
    )
    assert _products(ir.serde.deserialize_model(proto).graph[0]) == products
