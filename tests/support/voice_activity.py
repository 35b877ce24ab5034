"""A small voice-activity network of the structure that real ones have: If nodes within If nodes, which choose by the
sampling rate and by shapes, read values from around them, and hold weights; a recurrent state that goes in and out."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

TEXT = """<ir_version: 8, opset_import: ["" : 16, "ai.onnx.ml" : 3], producer_name: "tool">
voice (float[batch, samples] sound, float[2, batch, 6] state, int64 rate) => (float[p, q] speech, float[2, r, 6] next)
<int64 wide = {16000}> {
    is_wide = Equal (rate, wide)
    channel = Constant <value = int64[1] {1}> ()
    frames = Unsqueeze (sound, channel)
    speech, next = If (is_wide) <then_branch = at_16k () => (float[p, q] speech_16k, float[2, r, 6] next_16k) {
        ONE_16k
    }, else_branch = at_8k () => (float[p, q] speech_8k, float[2, r, 6] next_8k) {
        ONE_8k
    }>
}"""

# RATE, STRIDE and HEAD are replaced. The inner If depends on how long the sound is.
BRANCH = """
        h_RATE = Conv <strides = [STRIDE], pads = [1, 1]> (frames, kernel_RATE, offset_RATE)
        f_RATE = Relu (h_RATE)
        t_RATE = Transpose <perm = [2, 0, 1]> (f_RATE)
        pair_RATE = Constant <value = int64[2] {0, 1}> ()
        h0_RATE, c0_RATE = Split <axis = 0> (state)
        all_RATE, hn_RATE, cn_RATE = LSTM <hidden_size = 6> (t_RATE, w_RATE, r_RATE, b_RATE, , h0_RATE, c0_RATE)
        next_RATE = Concat <axis = 0> (hn_RATE, cn_RATE)
        size_RATE = Shape <start = 0, end = 1> (all_RATE)
        few_RATE = Constant <value = int64[1] {4}> ()
        longer_RATE = Greater (size_RATE, few_RATE)
        flag_RATE = Squeeze (longer_RATE)
        mean_RATE = If (flag_RATE) <then_branch = long () => (float[b, d] m_RATE) {
            m_RATE = ReduceMean <axes = [0, 1], keepdims = 0> (all_RATE)
        }, else_branch = short () => (float[b, d] n_RATE) {
            zero_RATE = Constant <value = int64[1] {0}> ()
            one_RATE = Constant <value = int64[1] {1}> ()
            first_RATE = Slice (all_RATE, zero_RATE, one_RATE)
            n_RATE = Squeeze (first_RATE, pair_RATE)
        }>
        head_RATE = Constant <value = float[6, 1] {HEAD}> ()
        score_RATE = MatMul (mean_RATE, head_RATE)
        speech_RATE = Sigmoid (score_RATE)
"""


def voice_activity() -> onnx.ModelProto:
    """Inputs `sound` [batch, samples], `state` [2, batch, 6] and `rate`, a scalar; outputs `speech` [batch, 1], `next`.

    Each branch has 6 weights: kernel, offset, w, r and b with the rate behind, stored in the branch, and `head`, a
    Constant.
    """
    rng = np.random.default_rng(0)
    text = TEXT
    for rate, stride in (("16k", 2), ("8k", 1)):
        head = ", ".join(f"{value:.3f}" for value in rng.standard_normal(6))
        text = text.replace(
            f"ONE_{rate}", BRANCH.replace("RATE", rate).replace("STRIDE", str(stride)).replace("HEAD", head)
        )
    proto = onnx.parser.parse_model(text)
    for attribute in proto.graph.node[-1].attribute:
        rate = "16k" if attribute.name == "then_branch" else "8k"
        shapes = {"kernel": (3, 1, 4), "offset": (3,), "w": (1, 24, 3), "r": (1, 24, 6), "b": (1, 48)}
        for name, shape in shapes.items():
            array = (0.5 * rng.standard_normal(shape)).astype(np.float32)
            attribute.g.initializer.append(numpy_helper.from_array(array, f"{name}_{rate}"))
    # Exporters leave sizes without a name; here the batch of the state.
    proto.graph.input[1].type.tensor_type.shape.dim[1].ClearField("dim_param")
    return proto
