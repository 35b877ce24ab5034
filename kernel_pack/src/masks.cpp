// Gradients that pass through where an activation is not flat.
#include <algorithm>

#include "kernel.h"
#include "vector_loops.h"

namespace archipel {

namespace {

// g, y -> g where y is not 0. g, x, y -> g where x and y are equal.
struct MaskedGradient : Kernel {
  bool compares;
  MaskedGradient(const ort::Api* api, size_t threads, bool compares) : Kernel(api, threads), compares(compares) {}

  void compute(ort::KernelContext* context) override {
    const auto g = input(context, 0), a = input(context, 1);
    const auto b = compares ? input(context, 2) : ort::Tensor{};
    require(g.shape == a.shape && (!compares || b.shape == g.shape), "the tensors have other shapes");
    float* out = output(context, g.shape);
    int64_t count = 1;
    for (auto size : g.shape) count *= size;
    constexpr int64_t kFew = 1 << 14;  // elements for which a second thread is not worth while
    const int64_t parts = std::clamp<int64_t>(count / kFew, 1, static_cast<int64_t>(threads()));
    parallel(context)(parts, [&](size_t part) {
      const int64_t first = count * part / parts, last = count * static_cast<int64_t>(part + 1) / parts;
      vector_loops().choose(g.data + first, a.data + first, compares ? b.data + first : nullptr, last - first,
                            out + first);
    });
  }
};

}  // namespace

std::unique_ptr<Kernel> make_relu_gradient(const ort::Api* api, const ort::KernelInfo*, size_t threads) {
  return std::make_unique<MaskedGradient>(api, threads, false);
}

std::unique_ptr<Kernel> make_clip_gradient(const ort::Api* api, const ort::KernelInfo*, size_t threads) {
  return std::make_unique<MaskedGradient>(api, threads, true);
}

}  // namespace archipel
