// Convolutions as operators: what the graph says about shapes is checked here, for nothing after this does.
#include <array>
#include <cstdint>

#include "convolution.h"
#include "kernel.h"

namespace archipel {

namespace {

constexpr int64_t kLargest = 1 << 20;  // of an attribute: products of two stay far below an overflow
constexpr int64_t kLargestSize = int64_t{1} << 32;  // of an axis, which a batch of no examples can say without memory

Pair pair_of(const std::vector<int64_t>& values, size_t at = 0) { return {values.at(at), values.at(at + 1)}; }

struct ConvolutionKernel : Kernel {
  Kind kind;
  Pair strides, dilations, before, after, kernel{}, size{};
  int64_t group;
  Convolution convolution;

  ConvolutionKernel(Kind kind, const ort::Api* api, const ort::KernelInfo* info, size_t threads)
      : Kernel(api, threads), kind(kind), convolution(kind, threads) {
    auto ints = [&](const char* name, size_t count = 2) { return ort::attribute_ints(api, info, name, count); };
    const auto pads = ints("pads", 4);
    strides = pair_of(ints("strides")), dilations = pair_of(ints("dilations"));
    before = pair_of(pads), after = pair_of(pads, 2);
    if (kind == Kind::kWeightGradient) kernel = pair_of(ints("kernel_shape"));
    if (kind == Kind::kInputGradient) size = pair_of(ints("input_size"));
    group = ort::attribute_int(api, info, "group");
    for (int axis : {0, 1}) {
      require(0 < strides[axis] && 0 < dilations[axis], "strides and dilations must be at least 1");
      require(0 <= before[axis] && 0 <= after[axis], "pads must not be negative");
      for (auto value : {strides[axis], dilations[axis], before[axis], after[axis], kernel[axis], size[axis]})
        require(value < kLargest, "an attribute is too large");
    }
    require(0 < group && group < kLargest, "group must be at least 1");
  }

  // How many windows fit along an axis; 0 or less where none does.
  static int64_t positions(const Shape& s, int axis) {
    const int64_t padded = (axis == 0 ? s.height : s.width) + s.before[axis] + s.after[axis];
    const int64_t room = padded - s.dilations[axis] * (s.kernel[axis] - 1) - 1;
    return room < 0 ? 0 : room / s.strides[axis] + 1;
  }

  void compute(ort::KernelContext* context) override {
    const auto first = input(context, 0), second = input(context, 1);
    if (first.shape.size() != 4 || second.shape.size() != 4) throw std::runtime_error("expected two tensors of rank 4");
    for (const auto* each : {&first, &second})
      for (auto length : each->shape) require(length < kLargestSize, "a tensor has too long an axis");
    Shape s{};
    s.strides = strides, s.dilations = dilations, s.before = before, s.after = after, s.group = group;
    const int64_t batch = first.shape[0];
    const auto bias = kind == Kind::kForward ? input(context, 2) : ort::Tensor{};
    int64_t per_group = 0;
    switch (kind) {
      case Kind::kForward:
        s.channels = first.shape[1], s.height = first.shape[2], s.width = first.shape[3];
        s.filters = second.shape[0], s.kernel = {second.shape[2], second.shape[3]}, per_group = second.shape[1];
        s.out_height = positions(s, 0), s.out_width = positions(s, 1), s.bias = bias.data != nullptr;
        break;
      case Kind::kInputGradient:
        s.filters = first.shape[1], s.out_height = first.shape[2], s.out_width = first.shape[3];
        s.kernel = {second.shape[2], second.shape[3]}, per_group = second.shape[1];
        s.channels = per_group * group, s.height = size[0], s.width = size[1];
        require(second.shape[0] == s.filters, "the weight and the gradient have other numbers of filters");
        break;
      case Kind::kWeightGradient:
        s.channels = first.shape[1], s.height = first.shape[2], s.width = first.shape[3];
        s.filters = second.shape[1], s.out_height = second.shape[2], s.out_width = second.shape[3];
        s.kernel = kernel, per_group = s.channels / group;
        require(second.shape[0] == batch, "input and gradient have other batch sizes");
        break;
    }
    // Whatever the graph says, nothing may be read or written beyond its tensors.
    for (int axis : {0, 1}) require(s.kernel[axis] > 0, "the kernel is empty");
    require(s.filters > 0 && per_group > 0 && s.filters % group == 0 && s.channels == per_group * group,
            "channels, filters and groups do not fit together");
    require(s.height > 0 && s.width > 0, "the input has no elements");
    require(s.out_height > 0 && s.out_width > 0 && s.out_height == positions(s, 0) && s.out_width == positions(s, 1),
            "the sizes of input and output do not fit together");
    require(!s.bias || bias.shape == std::vector<int64_t>{s.filters}, "the bias has another shape than [filters]");
    float *x = first.data, *w = second.data, *y = first.data;
    switch (kind) {
      case Kind::kForward:
        y = output(context, {batch, s.filters, s.out_height, s.out_width});
        break;
      case Kind::kInputGradient:
        x = output(context, {batch, s.channels, s.height, s.width});
        break;
      case Kind::kWeightGradient:
        y = second.data;
        w = output(context, {s.filters, per_group, kernel[0], kernel[1]});
        break;
    }
    convolution.run(s, batch, x, w, bias.data, y, parallel(context));
  }
};

}  // namespace

std::unique_ptr<Kernel> make_convolution(const ort::Api* api, const ort::KernelInfo* info, size_t threads) {
  return std::make_unique<ConvolutionKernel>(Kind::kForward, api, info, threads);
}

std::unique_ptr<Kernel> make_input_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads) {
  return std::make_unique<ConvolutionKernel>(Kind::kInputGradient, api, info, threads);
}

std::unique_ptr<Kernel> make_weight_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads) {
  return std::make_unique<ConvolutionKernel>(Kind::kWeightGradient, api, info, threads);
}

}  // namespace archipel
