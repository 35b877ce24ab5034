// Convolutions of one filter for each channel, on the graph's own layout.
#pragma once

#include "convolution.h"

namespace archipel {

// Whether `run_depthwise` has this convolution: groups of one channel and one filter, and buffers in proportion to them.
bool is_depthwise(const Shape& shape);

// As Convolution::run. The threads share the channels' planes, or for the weight's gradient the channels.
void run_depthwise(Kind kind, const Shape& shape, int64_t batch, float* x, float* w, const float* b, float* y,
                   size_t threads, const Parallel& parallel);

}  // namespace archipel
