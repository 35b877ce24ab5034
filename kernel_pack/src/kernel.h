// What every operator of the pack is for ONNX Runtime.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>

#include "ort_abi.h"
#include "parallel.h"

namespace archipel {

class Kernel {
 public:
  Kernel(const ort::Api* api, size_t threads) : api_(api), threads_(threads) {}
  virtual ~Kernel() = default;
  virtual void compute(ort::KernelContext* context) = 0;
  const ort::Api* api() const { return api_; }

 protected:
  size_t threads() const { return threads_; }
  ort::Tensor input(const ort::KernelContext* context, size_t index) const { return ort::input(api_, context, index); }
  float* output(ort::KernelContext* context, const std::vector<int64_t>& shape, size_t index = 0) const {
    return ort::output(api_, context, shape, index);
  }
  // On the threads of the session; valid during the call of `compute`.
  Parallel parallel(ort::KernelContext* context) const;

 private:
  const ort::Api* api_;
  size_t threads_;
};

using Make = std::unique_ptr<Kernel> (*)(const ort::Api*, const ort::KernelInfo*, size_t threads);

std::unique_ptr<Kernel> make_convolution(const ort::Api* api, const ort::KernelInfo* info, size_t threads);
std::unique_ptr<Kernel> make_input_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads);
std::unique_ptr<Kernel> make_weight_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads);
std::unique_ptr<Kernel> make_normalization(const ort::Api* api, const ort::KernelInfo* info, size_t threads);
std::unique_ptr<Kernel> make_normalization_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads);
std::unique_ptr<Kernel> make_relu_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads);
std::unique_ptr<Kernel> make_clip_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads);
std::unique_ptr<Kernel> make_lstm(const ort::Api* api, const ort::KernelInfo* info, size_t threads);
std::unique_ptr<Kernel> make_lstm_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads);

inline void require(bool holds, const char* message) {
  if (!holds) throw std::runtime_error(message);
}

}  // namespace archipel
