"""The channel dependency graph: what goes together, what must stay, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from archipel import Model
from archipel.compression.prune import channel_groups, fixed_channels, remove_channels
from archipel.errors import CompressionError
from archipel.graph import check_model

from .measured import half, run, zeroed
from .networks import PICTURES, SEQUENCES, Network, network

PICTURE = {"x": np.random.default_rng(7).standard_normal((3, 3, 8, 8)).astype(np.float32)}


def check(model: Model, seed: int) -> None:
    groups = channel_groups(model)
    drop = half(groups, seed)
    small = remove_channels(model, drop)
    check_model(small.ir)
    assert (small.inputs, small.outputs) == (model.inputs, model.outputs)
    expected, found = run(zeroed(model, groups, drop), PICTURE)[0], run(small, PICTURE)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    for group in groups:
        for member in group.members:
            if group.name in drop and member.tensor in small.parameters:
                before, after = model.parameters[member.tensor].shape, small.parameters[member.tensor].shape
                assert after[member.axis] <= before[member.axis] - drop[group.name].size


@pytest.mark.sampled(every=3)
@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**31),
    st.lists(st.sampled_from(PICTURES), max_size=5),
    st.lists(st.sampled_from(SEQUENCES), max_size=3),
)
@example(2, [Network.group_norm_by_reshape, Network.conv_8, Network.group_norm_by_reshape], [])
def test_units_whose_weights_are_zero_can_go(seed: int, pictures: list, sequences: list) -> None:
    check(network(seed, pictures, sequences), seed)


@pytest.mark.slow
@settings(max_examples=600, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**31),
    st.lists(st.sampled_from(PICTURES), max_size=8),
    st.lists(st.sampled_from(SEQUENCES), max_size=4),
)
def test_units_whose_weights_are_zero_can_go_in_many_networks(seed: int, pictures: list, sequences: list) -> None:
    check(network(seed, pictures, sequences), seed)


# The units of the first convolution's 8 channels behind one step: (size, channels in a unit) of its groups.
EXPECTED = {
    Network.depthwise: [(8, 1)],
    Network.grouped: [(2, 4)],
    Network.transposed_in_groups: [(2, 4)],
    Network.group_norm: [(2, 4)],
    Network.group_norm_by_reshape: [(2, 4)],
    Network.hard_swish: [(8, 1)],
    Network.swish: [(8, 1)],
    Network.batch_norm: [(8, 1)],
    Network.residual: [(8, 1)],
    Network.concat: [(8, 1)],
    Network.concat_skip: [(8, 1)],
    Network.slice: [(2, 1), (6, 1)],
    Network.pick: [(8, 1)],
    Network.squeeze_and_excite: [(8, 1)],
    Network.resize_by_sizes: [(8, 1)],
    Network.expand: [(8, 1)],
}


@pytest.mark.parametrize("step", EXPECTED, ids=lambda step: step.__name__)
def test_channels_go_through(step: object) -> None:
    groups = channel_groups(network(1, [step, Network.conv_8], []))  # type: ignore[list-item]
    assert [(g.size, g.granularity) for g in groups if g.name.split("#")[0] == "w"] == EXPECTED[step]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (Network.sigmoid, "what it sums over is not zero"),
        (Network.shift_all, "what it sums over is not zero"),
        (Network.slice_with_step, "read with a step"),
        (Network.unknown, "LRN 'LRN': it normalizes over this axis"),
        (Network.barrier, "DepthToSpace 'DepthToSpace': no rule follows channels through this operator"),
    ],
    ids=lambda value: getattr(value, "__name__", "reason"),
)
def test_channels_that_must_stay_have_a_reason(step: object, reason: str) -> None:
    assert reason in fixed_channels(network(1, [step, Network.conv_8], []))["w"]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("step", "unit"),
    [(Network.fused_attention, (3, 12)), (Network.attention, (3, 4)), (Network.lstm_both_ways, (5, 4)),
     (Network.gru, (5, 3)), (Network.rnn, (5, 1)), (Network.feed_forward, (10, 1)), (Network.gated, (6, 2))],
    ids=lambda value: getattr(value, "__name__", "unit"),
)  # fmt: skip
def test_heads_and_hidden_units_are_whole(step: object, unit: tuple[int, int]) -> None:
    groups = channel_groups(network(1, [], [step, Network.dense]))  # type: ignore[list-item]
    assert unit in [(group.size, group.granularity) for group in groups]


def test_indices_of_a_flattened_lstm_and_attention() -> None:
    """Which rows of which tensor, by hand."""
    groups = {g.granularity: g for g in channel_groups(network(1, [], [Network.fused_attention]))}
    heads = next(m for m in groups[12].members if m.role == "weight")
    # Columns are (q, k or v; head; place): head 1 of 3 with 4 places.
    assert heads.indices[1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31]
    hidden = next(g for g in channel_groups(network(1, [], [Network.lstm_both_ways])) if g.size == 5)
    by_role = {(m.role, m.axis, m.indices.shape[1]): m.indices[2].tolist() for m in hidden.members}
    assert by_role["weight", 1, 4] == [2, 7, 12, 17]
    assert by_role["affine", 1, 8] == [2, 7, 12, 17, 22, 27, 32, 37]
    # The next layer reads [forward 5, backward 5].
    assert by_role["consumer", 1, 2] == [2, 7]


def test_equal_constants_do_not_tie_layers_together() -> None:
    """Exporters share the zeros of missing biases and of initial states."""
    net = Network(0)
    bias = net.op.constant(np.zeros(8, np.float32))
    for _ in range(3):
        net.x = net.op.Relu(net.op.Conv(net.x, net.weight(8, net.width, 1, 1), bias))
    net.to_sequence()
    model = net.finish()
    names = [group.name for group in channel_groups(model)]
    assert {"w_2", "w_3", "w_4"} <= set(names)
    small = remove_channels(model, {"w_2": [0, 1], "w_3": [5]})
    check_model(small.ir)
    assert [small.parameters[name].shape[0] for name in ("w_2", "w_3", "w_4")] == [6, 7, 8]


def test_a_tied_embedding_goes_with_both_of_its_uses() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="tied")
    net = Network.__new__(Network)
    net.rng = np.random.default_rng(0)
    from archipel.graph import Builder

    net.op = op = Builder(graph)
    ids = op.input("ids", ir.DataType.INT64, ["batch", 4])
    table = net.weight(11, 6)
    hidden = op.Relu(op.MatMul(op.Gather(table, ids, axis=0), net.weight(6, 6)))
    op.name_output(op.MatMul(hidden, op.Transpose(table, perm=[1, 0])), "logits")
    model = Model(ir.Model(graph, ir_version=10))
    (group,) = [g for g in channel_groups(model) if g.name == "w"]
    assert {(m.tensor, m.axis) for m in group.members} == {("w", 1), ("w_2", 0), ("w_2", 1)}
    small = remove_channels(model, {"w": [1, 3]})
    drop = {"w": np.array([1, 3])}
    feed = {"ids": np.arange(8).reshape(2, 4)}
    np.testing.assert_allclose(run(small, feed)[0], run(zeroed(model, [group], drop), feed)[0], rtol=1e-5, atol=1e-6)


def test_errors_name_the_group_and_its_units() -> None:
    model = network(1, [Network.conv_8], [])
    with pytest.raises(CompressionError, match="no group of channels is called 'ghost'; there are: w, "):
        remove_channels(model, {"ghost": [0]})
    with pytest.raises(CompressionError, match="'w' has the units 0 to 7, got 3 to 8"):
        remove_channels(model, {"w": [3, 8]})
    with pytest.raises(CompressionError, match="'w': all 8 units would go"):
        remove_channels(model, {"w": np.arange(8)})


def test_the_model_itself_stays_as_it_is() -> None:
    model = network(1, [Network.split_unevenly, Network.grouped], [Network.lstm])
    before = model.to_bytes()
    remove_channels(model, half(channel_groups(model)))
    assert model.to_bytes() == before
