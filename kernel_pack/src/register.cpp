// The operators of the domain `archipel.kernels`, as ONNX Runtime's custom operators.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "convolution.h"
#include "ort_abi.h"

namespace {

using archipel::Convolution;
using archipel::Kind;
using archipel::Pair;
using archipel::Shape;

constexpr const char* kDomain = "archipel.kernels";
constexpr const char* kThreads = "archipel.threads";  // entry of the session's options: how many it has

struct Operator : ort::CustomOp {
  const char* name;
  Kind kind;
  size_t inputs, optional, threads;
  Operator(const char* name, Kind kind, size_t inputs, size_t optional, size_t threads);
};

constexpr int64_t kLargest = 1 << 20;  // of an attribute: products of two stay far below an overflow

void require(bool holds, const char* message) {
  if (!holds) throw std::runtime_error(message);
}

Pair pair_of(const std::vector<int64_t>& values, size_t at = 0) { return {values.at(at), values.at(at + 1)}; }

struct Kernel {
  const ort::Api* api;
  Kind kind;
  Pair kernel, strides, dilations, before, after, size;
  int64_t group;
  Convolution convolution;

  Kernel(const Operator& op, const ort::Api* api, const ort::KernelInfo* info)
      : api(api), kind(op.kind), convolution(op.kind, op.threads) {
    auto ints = [&](const char* name, std::vector<int64_t> otherwise) {
      return ort::attribute(api, info, name, std::move(otherwise));
    };
    const auto pads = ints("pads", {0, 0, 0, 0});
    strides = pair_of(ints("strides", {1, 1}));
    dilations = pair_of(ints("dilations", {1, 1}));
    before = pair_of(pads), after = pair_of(pads, 2);
    kernel = pair_of(ints("kernel_shape", {0, 0}));
    size = pair_of(ints("input_size", {0, 0}));
    group = ort::attribute(api, info, "group", 1);
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

  void compute(ort::KernelContext* context) {
    const auto first = ort::input(api, context, 0), second = ort::input(api, context, 1);
    if (first.shape.size() != 4 || second.shape.size() != 4) throw std::runtime_error("expected two tensors of rank 4");
    Shape s{};
    s.strides = strides, s.dilations = dilations, s.before = before, s.after = after, s.group = group;
    const int64_t batch = first.shape[0];
    const auto bias = kind == Kind::kForward ? ort::input(api, context, 2) : ort::Tensor{};
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
    require(s.out_height > 0 && s.out_width > 0 && s.out_height == positions(s, 0) && s.out_width == positions(s, 1),
            "the sizes of input and output do not fit together");
    require(!s.bias || bias.shape == std::vector<int64_t>{s.filters}, "the bias has another shape than [filters]");
    float *x = first.data, *w = second.data, *y = first.data;
    switch (kind) {
      case Kind::kForward:
        y = ort::output(api, context, {batch, s.filters, s.out_height, s.out_width});
        break;
      case Kind::kInputGradient:
        x = ort::output(api, context, {batch, s.channels, s.height, s.width});
        break;
      case Kind::kWeightGradient:
        y = second.data;
        w = ort::output(api, context, {s.filters, per_group, kernel[0], kernel[1]});
        break;
    }
    convolution.run(s, batch, x, w, bias.data, y, [&](size_t total, const std::function<void(size_t)>& task) {
      if (total == 1) return task(0);
      struct Shared {
        const std::function<void(size_t)>& task;
        std::mutex mutex;
        std::exception_ptr error;
      } shared{task, {}, nullptr};
      // An exception may not pass through ONNX Runtime, which is not built with the same compiler.
      auto call = [](void* data, size_t index) {
        auto& to = *static_cast<Shared*>(data);
        try {
          to.task(index);
        } catch (...) {
          std::lock_guard<std::mutex> lock(to.mutex);
          to.error = std::current_exception();
        }
      };
      ort::check(api, ort::call<ort::Status*, const ort::KernelContext*, void (*)(void*, size_t), size_t, size_t, void*>(
                          api, ort::kParallelFor, context, call, total, total, &shared));
      if (shared.error) std::rethrow_exception(shared.error);
    });
  }
};

template <class Work>
ort::Status* guarded(const ort::Api* api, const char* what, Work work) {
  try {
    work();
    return nullptr;
  } catch (const std::exception& error) {
    return ort::make_error(api, (std::string(what) + ": " + error.what()).c_str());
  }
}

Operator::Operator(const char* name, Kind kind, size_t inputs, size_t optional, size_t threads)
    : name(name), kind(kind), inputs(inputs), optional(optional), threads(threads) {
  using Self = const ort::CustomOp*;
  get_name = [](Self op) { return static_cast<const Operator*>(op)->name; };
  get_provider = [](Self) -> const char* { return nullptr; };  // the CPU
  get_input_type = [](Self, size_t) { return ort::ElementType::kFloat; };
  get_input_count = [](Self op) { return static_cast<const Operator*>(op)->inputs; };
  get_output_type = [](Self, size_t) { return ort::ElementType::kFloat; };
  get_output_count = [](Self) -> size_t { return 1; };
  get_input_characteristic = [](Self op, size_t index) {
    const auto* own = static_cast<const Operator*>(op);
    return index < own->inputs - own->optional ? ort::Characteristic::kRequired : ort::Characteristic::kOptional;
  };
  get_output_characteristic = [](Self, size_t) { return ort::Characteristic::kRequired; };
  get_input_memory = [](Self, size_t) { return 0; };
  get_variadic_input_minimum = get_variadic_output_minimum = [](Self) { return 0; };
  get_variadic_input_homogeneity = get_variadic_output_homogeneity = [](Self) { return 0; };
  get_first_version = [](Self) { return 1; };
  get_last_version = [](Self) { return INT32_MAX; };
  create_kernel_v2 = [](Self op, const ort::Api* api, const ort::KernelInfo* info, void** made) {
    const auto* own = static_cast<const Operator*>(op);
    return guarded(api, own->name, [&] { *made = new Kernel(*own, api, info); });
  };
  compute_v2 = [](void* made, ort::KernelContext* context) {
    auto* kernel = static_cast<Kernel*>(made);
    return guarded(kernel->api, kDomain, [&] { kernel->compute(context); });
  };
  destroy_kernel = [](void* made) { delete static_cast<Kernel*>(made); };
}

size_t threads_of(const ort::Api* api, const ort::SessionOptions* options) {
  int there = 0;
  ort::check(api, ort::call<ort::Status*, const ort::SessionOptions*, const char*, int*>(
                      api, ort::kHasSessionConfigEntry, options, kThreads, &there));
  if (there == 0) return std::max(1u, std::thread::hardware_concurrency());
  char text[32] = {};
  size_t size = sizeof text;
  ort::check(api, ort::call<ort::Status*, const ort::SessionOptions*, const char*, char*, size_t*>(
                      api, ort::kGetSessionConfigEntry, options, kThreads, text, &size));
  return static_cast<size_t>(std::max(1l, std::strtol(text, nullptr, 10)));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                const ort::ApiBase* base) {
  const ort::Api* api = base->get_api(ort::kApiVersion);
  if (api == nullptr) return nullptr;  // ONNX Runtime before 1.17: the functions' bodies run
  return guarded(api, kDomain, [&] {
    ort::check_abi(api);
    const size_t threads = threads_of(api, options);
    // ONNX Runtime points to these for as long as any session lives, which nobody tells: they are never freed.
    auto* domain_ops = new std::array<Operator, 3>{Operator("Conv", Kind::kForward, 3, 1, threads),
                                                   Operator("ConvGradInput", Kind::kInputGradient, 2, 0, threads),
                                                   Operator("ConvGradWeight", Kind::kWeightGradient, 2, 0, threads)};
    void* domain = nullptr;
    ort::check(api, ort::call<ort::Status*, const char*, void**>(api, ort::kCreateCustomOpDomain, kDomain, &domain));
    for (auto& op : *domain_ops)
      ort::check(api, ort::call<ort::Status*, void*, const ort::CustomOp*>(api, ort::kCustomOpDomainAdd, domain, &op));
    ort::check(api, ort::call<ort::Status*, ort::SessionOptions*, void*>(api, ort::kAddCustomOpDomain, options, domain));
  });
}
