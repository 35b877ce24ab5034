// The loops over time of an LSTM and of its gradient. Each thread takes some columns of the batch through all steps.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernel.h"
#include "vector_loops.h"

namespace archipel {

namespace {

// A matrix for `multiply`: tiles of rows, in each the columns one after the other; rows behind the last one are zero.
struct Packed {
  size_t tiles, inner;
  std::vector<float> data;

  Packed(const float* matrix, size_t rows, size_t columns, bool transposed, size_t vectors) : inner(columns) {
    const size_t tile = vector_loops().rows_at_once / vectors;
    tiles = (rows + tile - 1) / tile;
    data.assign(tiles * tile * columns, 0.0f);
    for (size_t row = 0; row < rows; ++row)
      for (size_t column = 0; column < columns; ++column)
        data[(row / tile * columns + column) * tile + row % tile] =
            transposed ? matrix[column * rows + row] : matrix[row * columns + column];
  }

  // Elements of a product with a panel, the rows behind the last one included.
  size_t product(size_t vectors) const { return tiles * (vector_loops().rows_at_once / vectors) * vectors * kLanes; }

  void multiply(size_t vectors, const float* x, float* out) const {
    vector_loops().multiply(data.data(), tiles, inner, vectors, x, out);
  }
};

struct Lstm : Kernel {
  const bool backwards;
  Lstm(const ort::Api* api, const ort::KernelInfo* info, size_t threads)
      : Kernel(api, threads), backwards(ort::attribute_int(api, info, "reverse") != 0) {}

  // One vector for each row of a panel if more threads have work so, else two.
  size_t vectors(size_t batch) const { return batch <= kLanes * threads() ? 1 : 2; }

  struct Sizes {
    size_t steps, hidden, batch;
    size_t plane() const { return hidden * batch; }
  };

  // Calls work(first column, columns) for each panel.
  template <class Work>
  void panels(ort::KernelContext* context, size_t batch, Work work) const {
    const size_t width = vectors(batch) * kLanes, count = (batch + width - 1) / width;
    if (count == 0) return;
    parallel(context)(count, [&](size_t panel) { work(panel * width, std::min(width, batch - panel * width)); });
  }

  // [hidden, batch] to a panel, whose columns behind the last one are zero.
  static std::vector<float> gather(const float* from, const Sizes& s, size_t first, size_t columns, size_t width) {
    std::vector<float> panel(s.hidden * width, 0.0f);
    for (size_t row = 0; row < s.hidden; ++row)
      std::copy_n(from + row * s.batch + first, columns, panel.data() + row * width);
    return panel;
  }

  static void scatter(const float* panel, const Sizes& s, size_t first, size_t columns, size_t width, float* to) {
    for (size_t row = 0; row < s.hidden; ++row)
      std::copy_n(panel + row * width, columns, to + row * s.batch + first);
  }

  static std::vector<int64_t> shape(std::initializer_list<size_t> sizes) { return {sizes.begin(), sizes.end()}; }
};

// a [steps, 4 hidden, batch], r [4 hidden, hidden], h and c before the first step [hidden, batch]
// -> h, and h and c after the last step, and i, o, f, g, tanh(c) and c before each step.
struct LstmForward : Lstm {
  using Lstm::Lstm;

  void compute(ort::KernelContext* context) override {
    const auto a = input(context, 0), r = input(context, 1), h = input(context, 2), c = input(context, 3);
    require(a.shape.size() == 3 && r.shape.size() == 2, "a must have three axes, r two");
    const Sizes s{size_t(a.shape[0]), size_t(r.shape[1]), size_t(a.shape[2])};
    require(r.shape == shape({4 * s.hidden, s.hidden}) && a.shape == shape({s.steps, 4 * s.hidden, s.batch}) &&
                h.shape == shape({s.hidden, s.batch}) && c.shape == h.shape,
            "a must be [steps, 4 hidden, batch], r [4 hidden, hidden], h and c [hidden, batch]");
    const auto all = shape({s.steps, s.hidden, s.batch}), one = h.shape;
    float* states = output(context, all, 0);
    float *last_h = output(context, one, 1), *last_c = output(context, one, 2);
    float* kept[6];
    for (size_t index = 0; index < 6; ++index) kept[index] = output(context, all, 3 + index);
    const size_t many = vectors(s.batch), width = many * kLanes;
    const Packed weights(r.data, 4 * s.hidden, s.hidden, false, many);
    panels(context, s.batch, [&](size_t first, size_t columns) {
      auto own_h = gather(h.data, s, first, columns, width), own_c = gather(c.data, s, first, columns, width);
      std::vector<float> product(weights.product(many));
      for (size_t step = 0; step < s.steps; ++step) {
        const size_t at = backwards ? s.steps - 1 - step : step, offset = at * s.plane() + first;
        weights.multiply(many, own_h.data(), product.data());
        const LstmStep cell{s.hidden,         s.batch,          columns,          many,
                            kept[0] + offset, kept[1] + offset, kept[2] + offset, kept[3] + offset,
                            kept[4] + offset, kept[5] + offset, states + offset};
        vector_loops().lstm_cell(product.data(), a.data + 4 * at * s.plane() + first, cell, own_h.data(), own_c.data());
      }
      scatter(own_h.data(), s, first, columns, width, last_h), scatter(own_c.data(), s, first, columns, width, last_c);
    });
  }
};

// i, o, f, g, tanh(c) and c before each step, r, the gradients of h and c after the last step, and that of h after each
// step if there is one -> the gradient of a, and those of h and c before the first step.
struct LstmGradient : Lstm {
  using Lstm::Lstm;

  void compute(ort::KernelContext* context) override {
    float* kept[6];
    const auto all = input(context, 0).shape;
    for (size_t index = 0; index < 6; ++index) {
      const auto each = input(context, index);
      require(each.shape == all, "the gates have other shapes");
      kept[index] = each.data;
    }
    const auto r = input(context, 6), dh = input(context, 7), dc = input(context, 8), dy = input(context, 9);
    require(all.size() == 3, "the gates must have three axes");
    const Sizes s{size_t(all[0]), size_t(all[1]), size_t(all[2])};
    require(r.shape == shape({4 * s.hidden, s.hidden}) && dh.shape == shape({s.hidden, s.batch}) &&
                dc.shape == dh.shape && (dy.data == nullptr || dy.shape == all),
            "r must be [4 hidden, hidden], gradients of states [hidden, batch], dy as the gates");
    float* gates = output(context, shape({s.steps, 4 * s.hidden, s.batch}), 0);
    float *first_h = output(context, dh.shape, 1), *first_c = output(context, dh.shape, 2);
    const size_t many = vectors(s.batch), width = many * kLanes;
    const Packed weights(r.data, s.hidden, 4 * s.hidden, true, many);
    panels(context, s.batch, [&](size_t first, size_t columns) {
      auto own_h = gather(dh.data, s, first, columns, width), own_c = gather(dc.data, s, first, columns, width);
      own_h.resize(weights.product(many));
      std::vector<float> own_gates(4 * s.hidden * width);
      for (size_t step = s.steps; step-- > 0;) {
        const size_t at = backwards ? s.steps - 1 - step : step, offset = at * s.plane() + first;
        const LstmStep cell{s.hidden,         s.batch,          columns,          many,
                            kept[0] + offset, kept[1] + offset, kept[2] + offset, kept[3] + offset,
                            kept[4] + offset, kept[5] + offset, nullptr};
        vector_loops().lstm_cell_gradient(dy.data == nullptr ? nullptr : dy.data + offset, cell, own_h.data(),
                                          own_c.data(), own_gates.data(), gates + 4 * at * s.plane() + first);
        weights.multiply(many, own_gates.data(), own_h.data());
      }
      scatter(own_h.data(), s, first, columns, width, first_h);
      scatter(own_c.data(), s, first, columns, width, first_c);
    });
  }
};

}  // namespace

std::unique_ptr<Kernel> make_lstm(const ort::Api* api, const ort::KernelInfo* info, size_t threads) {
  return std::make_unique<LstmForward>(api, info, threads);
}

std::unique_ptr<Kernel> make_lstm_gradient(const ort::Api* api, const ort::KernelInfo* info, size_t threads) {
  return std::make_unique<LstmGradient>(api, info, threads);
}

}  // namespace archipel
