"""Random networks for the property test: a sequence of drawn steps becomes a graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from archipel.graph import Builder, Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.shapes import dims

TIME, SIZE = 4, 8


class Network:
    """`x` is the present value: pictures [batch, channels, 8, 8], then sequences [batch, 4, width], then logits."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="random")
        self.op = Builder(graph)
        self.x = self.op.input("x", ir.DataType.FLOAT, ["batch", 3, SIZE, SIZE])
        self.older: list[ir.Value] = []
        self.conv(8)

    @property
    def width(self) -> int:
        return int(dims(self.x)[1 if len(dims(self.x)) == 4 else -1])  # type: ignore[arg-type]

    def weight(self, *shape: int) -> ir.Value:
        name = self.op.unique("w")
        tensor = ir.tensor((self.rng.standard_normal(shape) * 0.4).astype(np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=tensor)
        self.op.graph.register_initializer(value)
        return value

    def positive(self, *shape: int) -> ir.Value:
        value = self.weight(*shape)
        value.const_value = ir.tensor(np.abs(value.const_value.numpy()) + 0.5, name=value.name)  # type: ignore[union-attr]
        return value

    def finish(self) -> Model:
        self.x = self.op.Gemm(
            self.op.ReduceMean(self.x, [1], keepdims=0), self.weight(5, self.width), self.weight(5), transB=1
        )
        self.op.name_output(self.x, "logits")
        model = ir.Model(self.op.graph, ir_version=IR_VERSION)
        record_parameters(model, [name for name in parameter_names(model) if name.startswith("w")])
        return Model(model)

    # Pictures.

    def conv(self, out: int) -> None:
        bias = self.weight(out) if self.rng.random() < 0.5 else None
        self.older.append(self.x)
        self.x = self.op.Conv(self.x, self.weight(out, self.width, 3, 3), bias, pads=[1, 1, 1, 1])

    def conv_8(self) -> None:
        self.conv(8)

    def conv_12(self) -> None:
        self.conv(12)

    def transposed(self) -> None:
        self.x = self.op.ConvTranspose(self.x, self.weight(self.width, 6, 3, 3), self.weight(6), pads=[1, 1, 1, 1])

    def transposed_in_groups(self) -> None:
        self.x = self.op.ConvTranspose(self.x, self.weight(self.width, 2, 1, 1), self.weight(4), group=2)

    def depthwise(self) -> None:
        many = self.width * int(self.rng.integers(1, 3))
        self.x = self.op.Conv(
            self.x, self.weight(many, 1, 3, 3), self.weight(many), pads=[1, 1, 1, 1], group=self.width
        )

    def grouped(self) -> None:
        self.x = self.op.Conv(self.x, self.weight(6, self.width // 2, 1, 1), group=2)

    def batch_norm(self) -> None:
        n = self.width
        self.x = self.op.BatchNormalization(self.x, self.weight(n), self.weight(n), self.weight(n), self.positive(n))

    def instance_norm(self) -> None:
        self.x = self.op.InstanceNormalization(self.x, self.weight(self.width), self.weight(self.width))

    def group_norm(self) -> None:
        n = self.width
        before = self.x
        self.x = self.op.GroupNormalization(before, self.weight(n), self.weight(n), num_groups=2)
        self.x.shape, self.x.dtype = before.shape, before.dtype

    def group_norm_by_reshape(self) -> None:
        """As PyTorch's exporter writes it."""
        n, shape = self.width, self.op.Shape(self.x)
        flat = self.op.Reshape(self.x, [0, 2, -1])
        flat = self.op.InstanceNormalization(flat, np.ones(2, np.float32), np.zeros(2, np.float32))
        back = self.op.Reshape(flat, shape)
        back.shape = self.x.shape
        self.x = self.op.Add(self.op.Mul(back, self.weight(n, 1, 1)), self.weight(n, 1, 1))

    def relu(self) -> None:
        self.x = self.op.Relu(self.x)

    def hard_swish(self) -> None:
        """Taken apart, with values in between that are not zero for a channel of zeros."""
        gate = self.op.Clip(self.op.Add(self.x, 3.0), 0.0, 6.0)
        self.x = self.op.Mul(self.x, self.op.Div(gate, 6.0))

    def sigmoid(self) -> None:
        self.x = self.op.Sigmoid(self.x)

    def swish(self) -> None:
        self.x = self.op.Mul(self.op.Sigmoid(self.x), self.x)

    def clip(self) -> None:
        self.x = self.op.Clip(self.x, float(self.rng.choice([-1.0, 0.0, 0.5])), 6.0)

    def prelu(self) -> None:
        self.x = self.op.PRelu(self.x, self.weight(self.width, 1, 1))

    def scale_and_shift(self) -> None:
        self.x = self.op.Add(self.op.Mul(self.x, self.weight(self.width, 1, 1)), self.weight(1, self.width, 1, 1))

    def standardize(self) -> None:
        self.x = self.op.Div(self.op.Sub(self.x, self.weight(self.width, 1, 1)), self.positive(self.width, 1, 1))

    def shift_all(self) -> None:
        self.x = self.op.Sub(self.x, 0.25)

    def maximum(self) -> None:
        self.x = self.op.Max(self.x, self.weight(self.width, 1, 1))

    def square(self) -> None:
        self.x = self.op.Pow(self.x, 2.0)

    def choose(self) -> None:
        self.x = self.op.Where(self.op.Greater(self.x, 0.1), self.x, self.op.Mul(self.x, 0.1))

    def residual(self) -> None:
        before, n = self.x, self.width
        self.conv(n)
        self.x = self.op.Add(self.op.Relu(self.x), before)

    def concat(self) -> None:
        before = self.x
        self.conv(4)
        self.x = self.op.Concat(before, self.x, axis=1)

    def concat_skip(self) -> None:
        self.x = self.op.Concat(self.x, self.older[-1], axis=1)

    def split(self) -> None:
        if self.width % 2 == 0:
            a, b = self.op.emit("Split", self.x, num_outputs=2, axis=1, outputs=2)
            self.x = self.op.Concat(b, self.op.Relu(a), axis=1) if self.rng.random() < 0.5 else self.op.Add(a, b)

    def split_unevenly(self) -> None:
        a, b = self.op.emit("Split", self.x, [2, self.width - 2], axis=1, outputs=2)
        self.x = self.op.Concat(self.op.Tanh(a), b, axis=1)

    def slice(self) -> None:
        self.x = self.op.Slice(self.x, [1], [-1], [1])

    def slice_with_step(self) -> None:
        self.x = self.op.Slice(self.x, [0], [self.width], [1], [2])

    def pick(self) -> None:
        self.x = self.op.Gather(self.x, self.rng.permutation(self.width), axis=1)

    def shuffle(self) -> None:
        """Channel shuffle of two groups."""
        if self.width % 2 == 0:
            n = self.width
            apart = self.op.Reshape(self.x, [-1, 2, n // 2, SIZE, SIZE])
            self.x = self.op.Reshape(self.op.Transpose(apart, perm=[0, 2, 1, 3, 4]), [-1, n, SIZE, SIZE])

    def squeeze_and_excite(self) -> None:
        n = self.width
        mean = self.op.GlobalAveragePool(self.x)
        small = self.op.Relu(self.op.Conv(mean, self.weight(4, n, 1, 1), self.weight(4)))
        self.x = self.op.Mul(self.x, self.op.Sigmoid(self.op.Conv(small, self.weight(n, 4, 1, 1), self.weight(n))))

    def pool(self) -> None:
        self.x = self.op.MaxPool(self.x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1])

    def average(self) -> None:
        pooled = self.op.AveragePool(self.x, kernel_shape=[2, 2], strides=[2, 2])
        self.x = self.op.Resize(pooled, None, np.array([1, 1, 2, 2], np.float32), mode="nearest")

    def resize_by_sizes(self) -> None:
        pooled = self.op.MaxPool(self.x, kernel_shape=[2, 2], strides=[2, 2])
        sizes = self.op.Concat(self.op.Shape(self.x, start=0, end=1), [self.width, SIZE, SIZE], axis=0)
        self.x = self.op.Resize(pooled, None, None, sizes, mode="linear")
        self.x.shape = ir.Shape(["batch", dims(pooled)[1], SIZE, SIZE])

    def pad(self) -> None:
        padded = self.op.Pad(self.x, [0, 0, 1, 1, 0, 0, 0, 0], float(self.rng.integers(0, 2)))
        self.x = self.op.Conv(padded, self.weight(5, self.width, 2, 2))

    def expand(self) -> None:
        mask = self.op.Expand(self.op.constant(np.float32(0.5)), self.op.Shape(self.x))
        mask.shape = self.x.shape
        self.x = self.op.Mul(self.x, mask)

    def unknown(self) -> None:
        self.x = self.op.LRN(self.x, size=3)

    def barrier(self) -> None:
        """An operator that no rule is there for."""
        self.x = (
            self.op.SpaceToDepth(self.op.DepthToSpace(self.x, blocksize=2), blocksize=2)
            if self.width % 4 == 0
            else self.x
        )

    # From pictures to sequences, and what works on these.

    def to_sequence(self) -> None:
        way = int(self.rng.integers(3))
        if way == 0:
            flat = self.op.Flatten(self.op.MaxPool(self.x, kernel_shape=[4, 4], strides=[4, 4]))
            dense = self.op.Relu(self.op.Gemm(flat, self.weight(self.width * 4, TIME * 6), self.weight(TIME * 6)))
            self.x = self.op.Reshape(dense, [-1, TIME, 6])
        elif way == 1:
            small = self.op.MaxPool(self.x, kernel_shape=[4, 4], strides=[4, 4])
            self.x = self.op.Transpose(self.op.Reshape(small, [0, self.width, TIME]), perm=[0, 2, 1])
        else:
            small = self.op.AveragePool(self.x, kernel_shape=[4, 4], strides=[4, 4])
            self.x = self.op.Reshape(self.op.Transpose(small, perm=[0, 2, 3, 1]), [-1, TIME, self.width])

    def dense(self) -> None:
        weight = self.weight(self.width, 8)
        self.x = self.op.Gelu(self.op.Add(self.op.MatMul(self.x, weight), self.weight(8)))

    def dense_by_transpose(self) -> None:
        weight = self.op.Transpose(self.weight(8, self.width), perm=[1, 0])
        self.x = self.op.Add(self.weight(8), self.op.MatMul(self.x, weight))

    def dense_by_einsum(self) -> None:
        self.x = self.op.Tanh(self.op.Einsum(self.x, self.weight(7, self.width), equation="bti,oi->bto"))

    def dense_softplus(self) -> None:
        self.x = self.op.Softplus(self.op.MatMul(self.x, self.weight(self.width, 6)))

    def layer_norm(self) -> None:
        self.x = self.op.LayerNormalization(self.x, self.weight(self.width), self.weight(self.width))

    def feed_forward(self) -> None:
        before, n = self.x, self.width
        inner = self.op.Relu(self.op.MatMul(self.x, self.weight(n, 10)))
        self.x = self.op.Add(before, self.op.MatMul(inner, self.weight(10, n)))

    def gated(self) -> None:
        n = self.width
        both = self.op.MatMul(self.x, self.weight(n, 12))
        a, gate = self.op.emit("Split", both, num_outputs=2, axis=-1, outputs=2)
        self.x = self.op.MatMul(self.op.Mul(a, self.op.Sigmoid(gate)), self.weight(6, n))

    def normalized_sum(self) -> None:
        self.x = self.op.Mul(self.x, self.op.ReduceSum(self.op.Relu(self.x), [-1], keepdims=1))

    def attention(self, fused: bool = False) -> None:
        n, heads, size = self.width, 3, 4
        op = self.op
        if fused:
            every = op.Add(op.MatMul(self.x, self.weight(n, 3 * heads * size)), self.weight(3 * heads * size))
            apart = op.Transpose(op.Reshape(every, [-1, TIME, 3, heads, size]), perm=[2, 0, 3, 1, 4])
            q, k, v = (op.Squeeze(op.Slice(apart, [i], [i + 1], [0]), [0]) for i in range(3))
        else:
            parts = [op.MatMul(self.x, self.weight(n, heads * size)) for _ in range(3)]
            q, k, v = (op.Transpose(op.Reshape(p, [0, 0, heads, size]), perm=[0, 2, 1, 3]) for p in parts)
        keys = op.Transpose(op.Reshape(k, [-1, TIME, size]), perm=[0, 2, 1])  # as PyTorch's exporter does it
        back = op.Concat(op.Shape(q, start=0, end=2), [size, TIME], axis=0)
        keys = op.Reshape(keys, back)
        keys.shape = ir.Shape(["batch", heads, size, TIME])
        scores = op.Softmax(op.Mul(op.MatMul(q, keys), 0.5), axis=-1)
        mixed = op.Reshape(op.Transpose(op.MatMul(scores, v), perm=[0, 2, 1, 3]), [0, TIME, heads * size])
        self.x = op.Add(self.x, op.MatMul(mixed, self.weight(heads * size, n)))

    def fused_attention(self) -> None:
        self.attention(fused=True)

    def recurrent(self, kind: str, gates: int, directions: int) -> None:
        n, hidden, op = self.width, 5, self.op
        steps = op.Transpose(self.x, perm=[1, 0, 2])
        start = [None, None]
        if self.rng.random() < 0.5:
            shape = op.Concat([directions], op.Shape(self.x, start=0, end=1), [hidden], axis=0)
            state = op.Expand(op.constant(np.float32(0)), shape)
            state.shape = ir.Shape([directions, "batch", hidden])
            start = [None, state]
        weights = [self.weight(directions, gates * hidden, n), self.weight(directions, gates * hidden, hidden)]
        bias = self.weight(directions, 2 * gates * hidden)
        y = op(
            kind, steps, *weights, bias, *start, hidden_size=hidden,
            direction="bidirectional" if directions == 2 else "forward",
        )  # fmt: skip
        self.x = op.Reshape(op.Transpose(y, perm=[2, 0, 1, 3]), [0, TIME, directions * hidden])

    def lstm(self) -> None:
        self.recurrent("LSTM", 4, 1)

    def lstm_both_ways(self) -> None:
        self.recurrent("LSTM", 4, 2)

    def gru(self) -> None:
        self.recurrent("GRU", 3, 2)

    def rnn(self) -> None:
        self.recurrent("RNN", 1, 1)


Step = Callable[[Network], None]

PICTURES: tuple[Step, ...] = (
    Network.conv_8, Network.conv_12, Network.transposed, Network.transposed_in_groups, Network.depthwise,
    Network.grouped, Network.batch_norm, Network.instance_norm, Network.group_norm, Network.group_norm_by_reshape,
    Network.relu, Network.hard_swish, Network.sigmoid, Network.swish, Network.clip, Network.prelu,
    Network.scale_and_shift, Network.standardize, Network.shift_all, Network.maximum, Network.square, Network.choose,
    Network.residual, Network.concat, Network.concat_skip, Network.split, Network.split_unevenly, Network.slice,
    Network.slice_with_step, Network.pick, Network.shuffle, Network.squeeze_and_excite, Network.pool, Network.average,
    Network.resize_by_sizes, Network.pad, Network.expand, Network.unknown, Network.barrier,
)  # fmt: skip

SEQUENCES: tuple[Step, ...] = (
    Network.dense, Network.dense_by_transpose, Network.dense_by_einsum, Network.dense_softplus, Network.layer_norm,
    Network.feed_forward, Network.gated, Network.normalized_sum, Network.attention, Network.fused_attention,
    Network.lstm, Network.lstm_both_ways, Network.gru, Network.rnn,
)  # fmt: skip

# What needs an even number of channels is left out where there is an odd one.
EVEN = {
    Network.grouped, Network.group_norm, Network.group_norm_by_reshape, Network.transposed_in_groups,
}  # fmt: skip


def network(seed: int, pictures: list[Step], sequences: list[Step]) -> Model:
    """The network of these steps, one after the other."""
    net = Network(seed)
    for step in pictures:
        size = dims(net.x)[2:]
        if size != (SIZE, SIZE):
            net.x = net.op.Pad(net.x, [0] * 6 + [SIZE - int(d) for d in size]) if min(size) < SIZE else net.x
        if (step in EVEN and net.width % 2) or net.width < 4:
            continue
        step(net)
    net.to_sequence()
    for step in sequences:
        step(net)
    return net.finish()
