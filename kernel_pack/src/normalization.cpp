// BatchNormalization with the statistics of the batch, and its gradient: two passes over memory each.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernel.h"
#include "vector_loops.h"

namespace archipel {

namespace {

// Ioffe and Szegedy 2015, section 3. X and its gradients are [batch, channels, ...], all others [channels].
struct NormalizationBase : Kernel {
  float epsilon;
  NormalizationBase(const ort::Api* api, const ort::KernelInfo* info, size_t threads)
      : Kernel(api, threads), epsilon(ort::attribute_float(api, info, "epsilon")) {}

  struct Sizes {
    int64_t batch, channels, inner;
    double count() const { return static_cast<double>(batch) * inner; }
  };

  static Sizes sizes(const ort::Tensor& x) {
    require(x.shape.size() >= 2, "X must have at least two axes");
    Sizes found{x.shape[0], x.shape[1], 1};
    for (size_t axis = 2; axis < x.shape.size(); ++axis) found.inner *= x.shape[axis];
    return found;
  }

  static void check_row(const ort::Tensor& row, const Sizes& sizes) {
    require(row.shape == std::vector<int64_t>{sizes.channels}, "scale, bias and statistics must be [channels]");
  }

  // Each thread takes some of the channels, in blocks of a few whose sums are `sums`, 2 kLanes for each: first
  // add(channel, offset of a plane, sums) for all planes, then finish(channel, sums), then write(channel, offset).
  template <class Add, class Finish, class Write>
  void run(ort::KernelContext* context, const Sizes& s, Add add, Finish finish, Write write) const {
    constexpr int64_t kBlock = 8;
    const int64_t blocks = (s.channels + kBlock - 1) / kBlock;
    const int64_t parts = std::min<int64_t>(blocks, static_cast<int64_t>(threads()));
    if (parts == 0) return;
    parallel(context)(parts, [&](size_t part) {
      std::vector<float> sums(kBlock * 2 * kLanes);
      for (int64_t block = blocks * part / parts; block < blocks * static_cast<int64_t>(part + 1) / parts; ++block) {
        const int64_t first = block * kBlock, last = std::min(first + kBlock, s.channels);
        auto every = [&](auto work) {
          for (int64_t example = 0; example < s.batch; ++example)
            for (int64_t channel = first; channel < last; ++channel)
              work(channel, (example * s.channels + channel) * s.inner);
        };
        auto own = [&](int64_t channel) { return sums.data() + (channel - first) * 2 * kLanes; };
        std::fill(sums.begin(), sums.end(), 0.0f);
        every([&](int64_t channel, int64_t at) { add(channel, at, own(channel)); });
        for (int64_t channel = first; channel < last; ++channel) finish(channel, own(channel));
        every(write);
      }
    });
  }
};

struct Normalization : NormalizationBase {
  using NormalizationBase::NormalizationBase;

  void compute(ort::KernelContext* context) override {
    const auto x = input(context, 0), scale = input(context, 1), bias = input(context, 2);
    const Sizes s = sizes(x);
    check_row(scale, s), check_row(bias, s);
    require(s.count() > 0, "X is empty");
    float* y = output(context, x.shape, 0);
    float *mean = output(context, scale.shape, 1), *variance = output(context, scale.shape, 2);
    std::vector<float> factors(s.channels);
    const auto& loops = vector_loops();
    run(
        context, s,
        // Around the channel's first element: the sum of squares loses no digits where the mean is large.
        [&](int64_t c, int64_t at, float* sums) { loops.accumulate(x.data + at, x.data[c * s.inner], s.inner, sums); },
        [&](int64_t c, const float* sums) {
          const double away = total(sums) / s.count(), squares = total(sums + kLanes) / s.count();
          mean[c] = static_cast<float>(x.data[c * s.inner] + away);
          variance[c] = static_cast<float>(std::max(squares - away * away, 0.0));
          factors[c] = scale.data[c] / std::sqrt(variance[c] + epsilon);
        },
        [&](int64_t c, int64_t at) {
          loops.scale(x.data + at, mean[c], factors[c], bias.data[c], s.inner, y + at);
        });
  }
};

struct NormalizationGradient : NormalizationBase {
  using NormalizationBase::NormalizationBase;

  // X, g, mean, variance, scale -> dX, and dscale and dB over the elements of a channel.
  void compute(ort::KernelContext* context) override {
    const auto x = input(context, 0), g = input(context, 1), mean = input(context, 2), variance = input(context, 3);
    const auto scale = input(context, 4);
    const Sizes s = sizes(x);
    require(g.shape == x.shape, "X and its result's gradient have other shapes");
    require(s.count() > 0, "X is empty");
    check_row(mean, s), check_row(variance, s), check_row(scale, s);
    float* dx = output(context, x.shape, 0);
    float *slope = output(context, scale.shape, 1), *shift = output(context, scale.shape, 2);
    const auto& loops = vector_loops();
    std::vector<float> inverse(s.channels);
    run(
        context, s,
        [&](int64_t c, int64_t at, float* sums) {
          loops.accumulate_products(x.data + at, g.data + at, mean.data[c], s.inner, sums);
        },
        [&](int64_t c, const float* sums) {
          inverse[c] = 1.0f / std::sqrt(variance.data[c] + epsilon);
          shift[c] = static_cast<float>(total(sums) / s.count());
          slope[c] = static_cast<float>(total(sums + kLanes) / s.count()) * inverse[c];
        },
        [&](int64_t c, int64_t at) {
          const float weight = scale.data[c] * inverse[c];
          loops.scale_both(x.data + at, g.data + at, weight, mean.data[c], -weight * slope[c] * inverse[c],
                           -weight * shift[c], s.inner, dx + at);
        });
  }
};

}  // namespace

std::unique_ptr<Kernel> make_normalization(const ort::Api* api, const ort::KernelInfo* info, size_t threads) {
  return std::make_unique<Normalization>(api, info, threads);
}

std::unique_ptr<Kernel> make_normalization_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads) {
  return std::make_unique<NormalizationGradient>(api, info, threads);
}

}  // namespace archipel
