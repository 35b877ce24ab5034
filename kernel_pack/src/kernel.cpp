#include "kernel.h"

#include <exception>
#include <mutex>

namespace archipel {

Parallel Kernel::parallel(ort::KernelContext* context) const {
  return [this, context](size_t total, const std::function<void(size_t)>& task) {
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
    ort::check(api_, ort::call<ort::Status*, const ort::KernelContext*, void (*)(void*, size_t), size_t, size_t, void*>(
                         api_, ort::kParallelFor, context, call, total, total, &shared));
    if (shared.error) std::rethrow_exception(shared.error);
  };
}

}  // namespace archipel
