// The inner loops, once for each level of x86-64's instructions; `vector_loops` gives those of this processor.
#pragma once

#include <cstddef>

namespace archipel {

// One step of an LSTM, for `width` columns of a batch, up to `vectors` kLanes. What it keeps are rows of `hidden`, each
// of `batch` elements, from the first of these columns on.
struct LstmStep {
  size_t hidden, batch, width, vectors;
  float *i, *o, *f, *g, *squashed, *before, *h;
};

struct VectorLoops {
  // out[i] = bias + sum over k of w[k] * x[offsets[k] + i], for i below n. Reads and writes up to kSlack beyond n.
  void (*combine)(const float* x, const ptrdiff_t* offsets, const float* w, size_t taps, float bias, float* out,
                  size_t n);
  // The kLanes elements of parts[k] together += sum over i below n of g[i] * x[offsets[k] + i]. Reads up to kSlack
  // beyond n, where g has to be zero.
  void (*correlate)(const float* g, const float* x, const ptrdiff_t* offsets, size_t taps, size_t n, float* parts);
  // As `combine`, for a kernel of `columns` times `rows` elements, column by column; element i of the sum of column c
  // counts where masks[c * stride + i] has all bits, not where it has none. Writes nothing beyond n.
  void (*combine_masked)(const float* x, const ptrdiff_t* offsets, const float* w, size_t columns, size_t rows,
                         const int* masks, size_t stride, float bias, float* out, size_t n);
  // As `correlate`, with the masks applied to g. Reads nothing of g beyond n.
  void (*correlate_masked)(const float* g, const float* x, const ptrdiff_t* offsets, size_t columns, size_t rows,
                           const int* masks, size_t stride, size_t n, float* parts);
  // The kLanes elements of sums[0] together += sum of x - middle over n elements, those of sums[1] += its squares.
  void (*accumulate)(const float* x, float middle, size_t n, float* sums);
  // Likewise the sum of g, and of g (x - middle).
  void (*accumulate_products)(const float* x, const float* g, float middle, size_t n, float* sums);
  // out = factor (x - middle) + shift
  void (*scale)(const float* x, float middle, float factor, float shift, size_t n, float* out);
  // out = weight g + factor (x - middle) + shift
  void (*scale_both)(const float* x, const float* g, float weight, float middle, float factor, float shift, size_t n,
                     float* out);
  // out = g where a and b are equal (without b: where a is not 0), else 0
  void (*choose)(const float* g, const float* a, const float* b, size_t n, float* out);
  // out [rows, vectors kLanes] = a matrix times x [inner, vectors kLanes]. The matrix has `tiles` of rows_at_once /
  // vectors rows, in each the columns one after the other.
  void (*multiply)(const float* packed, size_t tiles, size_t inner, size_t vectors, const float* x, float* out);
  // From the arguments of the gates, the panel [4 hidden, vectors kLanes], the next h and c; keeps the rest.
  void (*lstm_cell)(const float* arguments, const LstmStep& step, float* h, float* c);
  // From the gradients of h (that of this step's result by itself, or null) and c those of the arguments, as a panel
  // and as rows of the batch, and of c before.
  void (*lstm_cell_gradient)(const float* dy, const LstmStep& step, const float* dh, float* dc, float* panels,
                             float* gates);
  size_t rows_at_once;
};

constexpr size_t kLanes = 16;

constexpr size_t kSlack = 64;  // elements: the largest block that a loop works on

const VectorLoops& vector_loops();

// The sum of kLanes elements.
float total(const float* lanes);

namespace v2 {
extern const VectorLoops loops;
}
namespace v3 {
extern const VectorLoops loops;
}
namespace v4 {
extern const VectorLoops loops;
}

}  // namespace archipel
