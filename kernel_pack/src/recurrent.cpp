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
  size_t vectors, tile, tiles, inner;
  std::vector<float> data;

  Packed(size_t rows, size_t columns, size_t vectors)
      : vectors(vectors), tile(vector_loops().rows_at_once / vectors), tiles((rows + tile - 1) / tile), inner(columns),
        data(tiles * tile * columns, 0.0f) {}

  // A matrix [rows, columns] as the part of this one that begins in column `first`.
  void place(const float* matrix, size_t rows, size_t columns, size_t first) {
    for (size_t row = 0; row < rows; ++row) {
      float* to = data.data() + (row / tile * inner + first) * tile + row % tile;
      for (size_t column = 0; column < columns; ++column) to[column * tile] = matrix[row * columns + column];
    }
  }

  // A matrix [inner, rows], transposed, as the rows that begin with `first`.
  void place_transposed(const float* matrix, size_t rows, size_t first) {
    for (size_t row = 0; row < rows;) {
      const size_t place = first + row, some = std::min(rows - row, tile - place % tile);
      float* to = data.data() + place / tile * inner * tile + place % tile;
      for (size_t column = 0; column < inner; ++column)
        std::copy_n(matrix + column * rows + row, some, to + column * tile);
      row += some;
    }
  }

  // Elements of a product with a panel, the rows behind the last one included.
  size_t product() const { return tiles * tile * vectors * kLanes; }

  void multiply(const float* x, float* out) const {
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
    size_t steps, hidden, batch, features;
    size_t plane() const { return hidden * batch; }
  };

  // Calls work(first column, columns) for each panel.
  template <class Work>
  void panels(ort::KernelContext* context, size_t batch, Work work) const {
    const size_t width = vectors(batch) * kLanes, count = (batch + width - 1) / width;
    if (count == 0) return;
    parallel(context)(count, [&](size_t panel) { work(panel * width, std::min(width, batch - panel * width)); });
  }

  // Rows of the batch, from the panel's first column on, to the panel, and back.
  static void gather(const float* from, size_t rows, size_t batch, size_t columns, size_t width, float* panel) {
    if (columns == batch && columns == width) rows *= columns, batch = columns = width = 1;
    for (size_t row = 0; row < rows; ++row) std::copy_n(from + row * batch, columns, panel + row * width);
  }

  static void scatter(const float* panel, size_t rows, size_t batch, size_t columns, size_t width, float* to) {
    for (size_t row = 0; row < rows; ++row) std::copy_n(panel + row * width, columns, to + row * batch);
  }

  static std::vector<int64_t> shape(std::initializer_list<size_t> sizes) { return {sizes.begin(), sizes.end()}; }
};

// x [steps, features, batch], w [4 hidden, features], r [4 hidden, hidden], h and c before the first step
// [hidden, batch] -> h, and h and c after the last step, and i, o, f, g, tanh(c) and c before each step.
struct LstmForward : Lstm {
  using Lstm::Lstm;

  void compute(ort::KernelContext* context) override {
    const auto x = input(context, 0), w = input(context, 1), r = input(context, 2);
    const auto h = input(context, 3), c = input(context, 4);
    require(x.shape.size() == 3 && r.shape.size() == 2, "x must have three axes, r two");
    const Sizes s{size_t(x.shape[0]), size_t(r.shape[1]), size_t(x.shape[2]), size_t(x.shape[1])};
    require(r.shape == shape({4 * s.hidden, s.hidden}) && w.shape == shape({4 * s.hidden, s.features}) &&
                h.shape == shape({s.hidden, s.batch}) && c.shape == h.shape,
            "w must be [4 hidden, features], r [4 hidden, hidden], h and c [hidden, batch]");
    // Else inputs without elements could have more steps, and so results, than there is memory for.
    require(s.hidden > 0 && s.features > 0, "x must have features, h units");
    const auto all = shape({s.steps, s.hidden, s.batch});
    float* states = output(context, all, 0);
    float *last_h = output(context, h.shape, 1), *last_c = output(context, h.shape, 2);
    float* kept[6];
    for (size_t index = 0; index < 6; ++index) kept[index] = output(context, all, 3 + index);
    const size_t many = vectors(s.batch), width = many * kLanes;
    Packed weights(4 * s.hidden, s.hidden + s.features, many);
    weights.place(r.data, 4 * s.hidden, s.hidden, 0), weights.place(w.data, 4 * s.hidden, s.features, s.hidden);
    panels(context, s.batch, [&](size_t first, size_t columns) {
      // h, and below it x of the step.
      std::vector<float> factors((s.hidden + s.features) * width), own_c(s.hidden * width), product(weights.product());
      float* own_x = factors.data() + s.hidden * width;
      gather(h.data + first, s.hidden, s.batch, columns, width, factors.data());
      gather(c.data + first, s.hidden, s.batch, columns, width, own_c.data());
      for (size_t step = 0; step < s.steps; ++step) {
        const size_t at = backwards ? s.steps - 1 - step : step, offset = at * s.plane() + first;
        gather(x.data + at * s.features * s.batch + first, s.features, s.batch, columns, width, own_x);
        weights.multiply(factors.data(), product.data());
        const LstmStep cell{s.hidden,         s.batch,          columns,          many,
                            kept[0] + offset, kept[1] + offset, kept[2] + offset, kept[3] + offset,
                            kept[4] + offset, kept[5] + offset, states + offset};
        vector_loops().lstm_cell(product.data(), cell, factors.data(), own_c.data());
      }
      scatter(factors.data(), s.hidden, s.batch, columns, width, last_h + first);
      scatter(own_c.data(), s.hidden, s.batch, columns, width, last_c + first);
    });
  }
};

// i, o, f, g, tanh(c) and c before each step, r, w, the gradients of h and c after the last step, and that of h after
// each step if there is one -> those of the gates' arguments, of h and c before the first step, and of x.
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
    const auto r = input(context, 6), w = input(context, 7), dh = input(context, 8), dc = input(context, 9);
    const auto dy = input(context, 10);
    require(all.size() == 3 && w.shape.size() == 2, "the gates must have three axes, w two");
    const Sizes s{size_t(all[0]), size_t(all[1]), size_t(all[2]), size_t(w.shape[1])};
    require(r.shape == shape({4 * s.hidden, s.hidden}) && w.shape == shape({4 * s.hidden, s.features}) &&
                dh.shape == shape({s.hidden, s.batch}) && dc.shape == dh.shape &&
                (dy.data == nullptr || dy.shape == all),
            "w must be [4 hidden, features], r [4 hidden, hidden], gradients of states [hidden, batch], dy as the gates");
    require(s.hidden > 0, "h must have units");
    float* gates = output(context, shape({s.steps, 4 * s.hidden, s.batch}), 0);
    float *first_h = output(context, dh.shape, 1), *first_c = output(context, dh.shape, 2);
    float* dx = output(context, shape({s.steps, s.features, s.batch}), 3);
    const size_t many = vectors(s.batch), width = many * kLanes;
    Packed weights(s.hidden + s.features, 4 * s.hidden, many);
    weights.place_transposed(r.data, s.hidden, 0), weights.place_transposed(w.data, s.features, s.hidden);
    panels(context, s.batch, [&](size_t first, size_t columns) {
      // The gradient of h, and below it that of x of the step.
      std::vector<float> product(weights.product()), own_c(s.hidden * width), own_gates(4 * s.hidden * width);
      gather(dh.data + first, s.hidden, s.batch, columns, width, product.data());
      gather(dc.data + first, s.hidden, s.batch, columns, width, own_c.data());
      for (size_t step = s.steps; step-- > 0;) {
        const size_t at = backwards ? s.steps - 1 - step : step, offset = at * s.plane() + first;
        const LstmStep cell{s.hidden,         s.batch,          columns,          many,
                            kept[0] + offset, kept[1] + offset, kept[2] + offset, kept[3] + offset,
                            kept[4] + offset, kept[5] + offset, nullptr};
        vector_loops().lstm_cell_gradient(dy.data == nullptr ? nullptr : dy.data + offset, cell, product.data(),
                                          own_c.data(), own_gates.data(), gates + 4 * at * s.plane() + first);
        weights.multiply(own_gates.data(), product.data());
        scatter(product.data() + s.hidden * width, s.features, s.batch, columns, width,
                dx + at * s.features * s.batch + first);
      }
      scatter(product.data(), s.hidden, s.batch, columns, width, first_h + first);
      scatter(own_c.data(), s.hidden, s.batch, columns, width, first_c + first);
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
