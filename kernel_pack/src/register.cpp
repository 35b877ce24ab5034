// The operators of the domain `archipel.kernels`, as ONNX Runtime's custom operators.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

#include "kernel.h"

namespace {

using archipel::Kernel;

constexpr const char* kDomain = "archipel.kernels";
constexpr const char* kThreads = "archipel.threads";  // entry of the session's options: how many it has

struct Operator : ort::CustomOp {
  const char* name;
  archipel::Make make;
  size_t inputs, optional, outputs, threads;
  Operator(const char* name, archipel::Make make, size_t inputs, size_t optional, size_t outputs, size_t threads);
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

Operator::Operator(const char* name, archipel::Make make, size_t inputs, size_t optional, size_t outputs,
                   size_t threads)
    : name(name), make(make), inputs(inputs), optional(optional), outputs(outputs), threads(threads) {
  using Self = const ort::CustomOp*;
  get_name = [](Self op) { return static_cast<const Operator*>(op)->name; };
  get_provider = [](Self) -> const char* { return nullptr; };  // the CPU
  get_input_type = [](Self, size_t) { return ort::ElementType::kFloat; };
  get_input_count = [](Self op) { return static_cast<const Operator*>(op)->inputs; };
  get_output_type = [](Self, size_t) { return ort::ElementType::kFloat; };
  get_output_count = [](Self op) { return static_cast<const Operator*>(op)->outputs; };
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
    return guarded(api, own->name, [&] { *made = own->make(api, info, own->threads).release(); });
  };
  compute_v2 = [](void* made, ort::KernelContext* context) {
    auto* kernel = static_cast<Kernel*>(made);
    return guarded(kernel->api(), kDomain, [&] { kernel->compute(context); });
  };
  destroy_kernel = [](void* made) { delete static_cast<Kernel*>(made); };
}

size_t threads_of(const ort::Api* api, const ort::SessionOptions* options) {
  int there = 0;
  ort::check(api, ort::call<ort::Status*, const ort::SessionOptions*, const char*, int*>(
                      api, ort::kHasSessionConfigEntry, options, kThreads, &there));
  const size_t all = std::max(1u, std::thread::hardware_concurrency());
  if (there == 0) return all;
  char text[32] = {};
  size_t size = sizeof text;
  ort::check(api, ort::call<ort::Status*, const ort::SessionOptions*, const char*, char*, size_t*>(
                      api, ort::kGetSessionConfigEntry, options, kThreads, text, &size));
  const long threads = std::strtol(text, nullptr, 10);
  return threads > 0 ? static_cast<size_t>(threads) : all;  // as ONNX Runtime takes 0
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
    auto* operators = new std::array<Operator, 9>{
        Operator("Conv", archipel::make_convolution, 3, 1, 1, threads),
        Operator("ConvGradInput", archipel::make_input_gradient, 2, 0, 1, threads),
        Operator("ConvGradWeight", archipel::make_weight_gradient, 2, 0, 1, threads),
        Operator("BatchNorm", archipel::make_normalization, 3, 0, 3, threads),
        Operator("BatchNormGrad", archipel::make_normalization_gradient, 5, 0, 3, threads),
        Operator("ReluGrad", archipel::make_relu_gradient, 2, 0, 1, threads),
        Operator("ClipGrad", archipel::make_clip_gradient, 3, 0, 1, threads),
        Operator("LSTM", archipel::make_lstm, 5, 0, 9, threads),
        Operator("LSTMGrad", archipel::make_lstm_gradient, 11, 1, 4, threads),
    };
    void* domain = nullptr;
    ort::check(api, ort::call<ort::Status*, const char*, void**>(api, ort::kCreateCustomOpDomain, kDomain, &domain));
    for (auto& op : *operators)
      ort::check(api, ort::call<ort::Status*, void*, const ort::CustomOp*>(api, ort::kCustomOpDomainAdd, domain, &op));
    ort::check(api, ort::call<ort::Status*, ort::SessionOptions*, void*>(api, ort::kAddCustomOpDomain, options, domain));
  });
}
