// Convolution and its two gradients, on the threads of ONNX Runtime.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "parallel.h"

namespace archipel {

enum class Kind { kForward, kInputGradient, kWeightGradient };

using Pair = std::array<int64_t, 2>;

// A two-dimensional convolution without its batch size.
struct Shape {
  int64_t channels, height, width;
  int64_t filters, out_height, out_width;
  Pair kernel, strides, dilations, before, after;
  int64_t group;
  bool bias;
};

struct Plan;

// Contiguous float32 tensors: x [batch, channels, height, width], w [filters, channels / group, kernel],
// b [filters] or null, y [batch, filters, out_height, out_width]. The kind says which one is written.
class Convolution {
 public:
  Convolution(Kind kind, size_t threads);
  ~Convolution();
  void run(const Shape& shape, int64_t batch, float* x, float* w, float* b, float* y, const Parallel& parallel);

 private:
  std::shared_ptr<const Plan> plan(const Shape& shape, int64_t batch);

  Kind kind_;
  size_t threads_;
  std::mutex mutex_;
  std::map<std::vector<int64_t>, std::shared_ptr<const Plan>> plans_;
};

}  // namespace archipel
