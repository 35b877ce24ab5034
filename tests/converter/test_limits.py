"""Limits of graphs with loops, branches and sizes that only numbers give, counted by hand."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from archipel import Model, models, training
from archipel.converter.limits import compute_limits, flops_per_example
from archipel.errors import ConversionError, GraphError
from archipel.training import losses, optimizers

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
W = np.ones((8, 8), np.float32)


def load(text: str) -> Model:
    proto = onnx.parser.parse_model(HEAD + text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(W, "w"))
    return Model.from_proto(proto)


SCAN = """agraph (float[batch, 8] s, float[7, batch, 8] x) => (float[batch, 8] last, float[7, batch, 8] all)
<float[8, 8] w>
{ last, all = Scan <num_scan_inputs = 1, body = step (float[batch, 8] before, float[batch, 8] item) =>
      (float[batch, 8] after, float[batch, 8] out)
      { a = MatMul (before, w) b = MatMul (item, w) after = Add (a, b) out = Identity (after) }> (s, x) }"""

LOOP = """agraph (float[batch, 8] s) => (float[batch, 8] y) <float[8, 8] w>
{ n = Constant <value = int64 {TRIPS}> () t = Constant <value = bool {1}> ()
  y = Loop <body = step (int64 i, bool c, float[batch, 8] before) => (bool d, float[batch, 8] after)
      { d = Identity (c) after = MatMul (before, w) }> (n, t, s) }"""

BRANCH = """agraph (float[batch, 8] s) => (float[batch, 8] y) <float[8, 8] w>
{ m = ReduceMax <keepdims = 0> (s) h = CastLike (m, m) z = Sub (h, h) q = Greater (h, z)
  y = If (q) <then_branch = t () => (float[batch, 8] u) { a = MatMul (s, w) u = MatMul (a, w) },
              else_branch = e () => (float[batch, 8] v) { v = MatMul (s, w) }> }"""

PRODUCT = 2 * 8 * 8


@pytest.mark.parametrize(
    ("text", "products"),
    [(SCAN, 14), (LOOP.replace("TRIPS", "5"), 5), (BRANCH, 2)],
    ids=["Scan", "Loop", "If"],
)
def test_flops_of_bodies(text: str, products: int) -> None:
    assert compute_limits({"p": load(text)}, 4).flops_per_example == products * PRODUCT


def test_peak_of_a_scan() -> None:
    """Inputs, weight and both results, and inside the body's inputs and, of a, b, after and out, three at a time."""
    row = 4 * 8 * 4
    outside = row + 7 * row + W.nbytes + row + 7 * row
    assert compute_limits({"p": load(SCAN)}, 4).peak_bytes == outside + 2 * row + 3 * row


def test_what_a_body_reads_stays_alive_until_then() -> None:
    text = """agraph (float[batch, 8] s) => (float[batch, 8] y) <float[8, 8] w>
    { a = MatMul (s, w) b = MatMul (s, w) c = Relu (b) q = Constant <value = bool {1}> ()
      y = If (q) <then_branch = t () => (float[batch, 8] u) { u = Neg (a) },
                  else_branch = e () => (float[batch, 8] v) { v = Neg (c) }> }"""
    row, constant = 4 * 8 * 4, 1
    # s, w; a and c as the branches read them; the result, and what the branch makes.
    assert compute_limits({"p": load(text)}, 4).peak_bytes == row + W.nbytes + 2 * row + row + row + constant


def test_what_is_read_again_stays_alive_until_then() -> None:
    """x, then a beside it, then b, then c while a is still to be read: four rows of four floats for one example."""
    text = "agraph (float[batch, 4] x) => (float[batch, 4] y) { a = Relu (x) b = Neg (a) c = Exp (b) y = Add (c, a) }"
    model = Model.from_proto(onnx.parser.parse_model(HEAD + text))
    assert compute_limits({"p": model}, 1).peak_bytes == 4 * 16


def test_of_several_programs_the_largest_counts_whichever_comes_last() -> None:
    small, large = (load(LOOP.replace("TRIPS", "2")), load(SCAN))
    peaks = [compute_limits({"p": each}, 4).peak_bytes for each in (small, large)]
    assert peaks[0] < peaks[1]
    for programs in ({"a": small, "b": large}, {"a": large, "b": small}):
        found = compute_limits(programs, 4)
        assert (found.peak_bytes, found.flops_per_example) == (peaks[1], 14 * PRODUCT)


COUNTED = LOOP.replace("n = Constant <value = int64 {TRIPS}> ()", "COUNT")


@pytest.mark.parametrize(
    ("count", "trips"),
    [
        ("k = Shape <start = 0, end = 1> (s) n = Squeeze (k)", 1),
        ("k = Shape (s) one = Constant <value = int64 {1}> () n = Gather (k, one)", 8),
        ("k = Size (s) three = Constant <value = int64 {3}> () m = Add (k, three) n = Sub (m, three)", 8),
        ("k = Size (s) three = Constant <value = int64 {3}> () m = Mul (k, three) n = Div (m, three)", 8),
        (
            "j = Constant <value = int64 {6}> () r = ReduceMax <keepdims = 0> (s) a = CastLike (r, j) n = Min (a, j)",
            6,
        ),
    ],
    ids=["batch", "Gather", "Sub", "Div", "Min"],
)
def test_a_trip_count_that_follows_from_shapes(count: str, trips: int) -> None:
    assert flops_per_example(load(COUNTED.replace("COUNT", count))) == trips * PRODUCT


STACKED = """agraph (float[batch, 8] s) => (float[batch, 8] y, float[k, batch, 8] z) <float[8, 8] w>
{ n = Constant <value = int64 {TRIPS}> () t = Constant <value = bool {1}> ()
  y, z = Loop <body = step (int64 i, bool c, float[batch, 8] before) =>
      (bool d, float[batch, 8] after, float[batch, 8] out)
      { p = ReduceMax <keepdims = 0> (before) q = CastLike (p, c) d = And (c, q)
        after = MatMul (before, w) out = Neg (after) }> (n, t, s) }"""


def test_what_a_loop_stacks_has_an_item_for_each_iteration() -> None:
    row = 4 * 8 * 4
    peaks = [compute_limits({"p": load(STACKED.replace("TRIPS", count))}, 4).peak_bytes for count in ("5", "11")]
    assert peaks[1] - peaks[0] == 6 * row


def test_a_value_of_one_of_two_ranks_counts_as_the_larger() -> None:
    """As exporters write a squeeze; the sum is what both branches can be added to."""
    text = """agraph (float[batch, 1, 8] s, bool q) => (float[batch, 8] y) {
      axis = Constant <value = int64[1] {1}> ()
      u = If (q) <then_branch = t () => (float[a, b] v) { v = Squeeze (s, axis) },
                  else_branch = e () => (float[a, b, c] w) { w = Identity (s) }>
      r = Neg (u) k = Constant <value = int64[2] {-1, 8}> () y = Reshape (r, k) }"""
    model = Model.from_proto(onnx.parser.parse_model(HEAD + text))
    assert model.ir.graph.node(1).outputs[0].shape is None
    row = 4 * 8 * 4
    # s and the condition; beside them r, y and the target of the Reshape.
    assert compute_limits({"p": model}, 4).peak_bytes == row + 1 + 2 * row + 16


def test_sequences_count_all_their_items() -> None:
    text = """agraph (float[batch, 8] s) => (float[batch, 8] y) <int64 zero = {0}> {
      t = Neg (s) q = SequenceConstruct (s, t, t) r = SequenceInsert (q, s) u = SequenceErase (r, zero)
      y = SequenceAt (u, zero) }"""
    model = Model.from_proto(onnx.parser.parse_model(HEAD + text))
    row = 4 * 8 * 4
    # s and zero stay; at SequenceErase r with four items and u with at most as many.
    assert compute_limits({"p": model}, 4).peak_bytes == row + 8 + 4 * row + 4 * row


def test_a_loop_without_an_end_is_refused_or_gets_a_maximum() -> None:
    model = load(STACKED.replace("TRIPS", "9223372036854775807"))
    with pytest.raises(ConversionError, match=r"Loop 'node.*' has no fixed number of iterations.*Model\.limit_loops"):
        compute_limits({"p": model}, 4)
    limited = model.limit_loops(3)
    found, wanted = (compute_limits({"p": m}, 4) for m in (limited, load(STACKED.replace("TRIPS", "3"))))
    assert found.flops_per_example == wanted.flops_per_example == 3 * PRODUCT
    assert found.peak_bytes == wanted.peak_bytes + 8  # the count itself, an int64
    s = np.full((2, 8), 1.0, np.float32)
    session = onnxruntime.InferenceSession(limited.to_bytes(), providers=["CPUExecutionProvider"])
    y, z = session.run(None, {"s": s})
    np.testing.assert_array_equal(y, s * 8**3)  # the weight is all ones
    assert z.shape == (3, 2, 8)
    with pytest.raises(GraphError, match="iterations is 0; give a whole number of 1 or more"):
        model.limit_loops(0)


def test_a_bound_of_its_own_stays() -> None:
    model = load(STACKED.replace("TRIPS", "5"))
    assert model.limit_loops(3).to_bytes() == model.to_bytes()


@pytest.mark.parametrize("cell", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
@pytest.mark.sampled(every=4)
def test_recurrent_networks(cell: str) -> None:
    """Over a fixed time training takes three times the products: forward, towards the input, towards the weights."""
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    model = Model.from_torch(models.char_rnn(0, cell, hidden=16), tokens)
    gates = {"lstm": 4, "gru": 3}[cell]
    forward = 2 * 12 * (gates * 16 * (8 + 16) + gates * 16 * (16 + 16) + 16 * 80)
    assert compute_limits({"predict": model}, 4).flops_per_example == forward
    step = training.step_graph(model, losses.cross_entropy(axis=-1), optimizers.sgd())
    first = 2 * 12 * gates * 16 * 8
    found = compute_limits({"train": step}, 4).flops_per_example
    assert 3 * forward - first <= found <= 3.1 * forward


@pytest.mark.sampled(every=4)
def test_however_a_step_is_nested_an_example_costs_the_same() -> None:
    model = Model.from_torch(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.zeros(2, 8))
    loss, sgd = losses.cross_entropy(), optimizers.sgd()
    plain, several, single = (
        compute_limits({"train": training.step_graph(model, loss, sgd, **options)}, 16)
        for options in ({}, {"steps": 4}, {"per_example": training.per_example()})
    )
    forward = 2 * (8 * 8 + 8 * 4)
    assert plain.flops_per_example == 3 * forward - 2 * 8 * 8
    assert several.flops_per_example == plain.flops_per_example
    # The sum of the biases' clipped gradients is a product with the examples' factors.
    assert plain.flops_per_example <= single.flops_per_example <= plain.flops_per_example + 2 * (8 + 4)
    batch = 16 * (8 * 4 + 8)
    assert several.peak_bytes >= plain.peak_bytes + 3 * batch


def test_sizes_that_reshapes_merge() -> None:
    text = """agraph (float[batch, 6, 8] x) => (float[rows, 8] z) <float[8, 8] w>
    { t = Constant <value = int64[2] {-1, 8}> () y = Reshape (x, t) z = MatMul (y, w) }"""
    found = compute_limits({"p": load(text)}, 4)
    assert found.flops_per_example == 6 * PRODUCT
    assert found.peak_bytes >= W.nbytes + 3 * 4 * 6 * 8 * 4
