#include "depthwise.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "vector_loops.h"

namespace archipel {

namespace {

// Rows are short, and a call of memcpy takes longer than to copy one.
inline void copy(const float* from, const float* end, float* to) {
  size_t n = end - from;
  auto some = [&](auto count) {
    std::memcpy(to, from, sizeof(float) * count.value);
    from += count.value, to += count.value;
  };
  for (; n >= 16; n -= 16) some(std::integral_constant<size_t, 16>());
  if (n & 8) some(std::integral_constant<size_t, 8>());
  if (n & 4) some(std::integral_constant<size_t, 4>());
  if (n & 2) some(std::integral_constant<size_t, 2>());
  if (n & 1) *to = *from;
}

// `make()` gives each thread a function of the number of a plane [example * channels + channel].
template <class Make>
void share_planes(const Shape& s, int64_t batch, size_t threads, const Parallel& parallel, Make make) {
  const int64_t planes = batch * s.channels, parts = std::min<int64_t>(planes, static_cast<int64_t>(threads));
  if (planes == 0) return;
  parallel(parts, [&](size_t index) {
    auto work = make();
    for (int64_t at = planes * index / parts; at < planes * static_cast<int64_t>(index + 1) / parts; ++at) work(at);
  });
}

// As `share_planes`, with a function of the plane's number and of its channel's sums, kLanes for each element of the
// kernel; `place` says which element of the weight a sum belongs to.
template <class Make, class Place>
void share_channels(const Shape& s, int64_t batch, float* w, size_t threads, const Parallel& parallel, Make make,
                    Place place) {
  const int64_t size = s.kernel[0] * s.kernel[1];
  // Several channels at once, so that memory is read in long runs and their sums stay in the nearest cache.
  const int64_t many = std::clamp<int64_t>(256 / size, 1, s.channels);
  const int64_t groups = (s.channels + many - 1) / many;
  const int64_t parts = std::min<int64_t>(groups, static_cast<int64_t>(threads));
  parallel(parts, [&](size_t index) {
    auto work = make();
    std::vector<float> sums(many * size * kLanes);
    const int64_t begin = groups * index / parts * many;
    const int64_t end = std::min(s.channels, groups * static_cast<int64_t>(index + 1) / parts * many);
    for (int64_t first = begin; first < end; first += many) {
      const int64_t last = std::min(first + many, end);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t example = 0; example < batch; ++example)
        for (int64_t channel = first; channel < last; ++channel)
          work(example * s.channels + channel, sums.data() + (channel - first) * size * kLanes);
      for (int64_t channel = first; channel < last; ++channel)
        for (int64_t k = 0; k < size; ++k)
          w[channel * size + place(k)] = total(sums.data() + ((channel - first) * size + k) * kLanes);
    }
  });
}

// How a plane lies in memory while it is worked on.
//
// With strides above 1 the padded input falls into phases: element (row, column) of phase (a, b) is element (row * stride
// + a, column * stride + b) of it. Inside a phase every element of the kernel is a shift, so that a whole plane is one
// flat loop: `line` elements from row to row, of which the last `reach[1]` are none of the output's.
struct Layout {
  const Shape& s;
  Pair reach;    // by how many rows and columns of a phase the kernel's last element is shifted
  int64_t line;  // from one row to the next
  int64_t rows;  // of a phase
  int64_t plane;
  std::vector<ptrdiff_t> offsets;          // of each element of the kernel in the phases, which follow each other
  std::vector<std::vector<size_t>> taps;   // of each phase: its elements of the kernel
  std::vector<std::vector<ptrdiff_t>> back;  // and how far back each reads the output's gradient
  size_t length;                           // of the flat loop over the output

  explicit Layout(const Shape& shape) : s(shape) {
    auto shift = [&](int axis, int64_t k) { return k * s.dilations[axis] / s.strides[axis]; };
    auto phase = [&](int axis, int64_t k) { return k * s.dilations[axis] % s.strides[axis]; };
    for (int axis : {0, 1}) {
      reach[axis] = 0;
      for (int64_t k = 0; k < s.kernel[axis]; ++k) reach[axis] = std::max(reach[axis], shift(axis, k));
    }
    line = s.out_width + reach[1];
    rows = s.out_height + reach[0];
    plane = rows * line;
    length = (s.out_height - 1) * line + s.out_width;
    taps.resize(s.strides[0] * s.strides[1]);
    back.resize(taps.size());
    for (int64_t i = 0; i < s.kernel[0]; ++i)
      for (int64_t j = 0; j < s.kernel[1]; ++j) {
        const auto at = phase(0, i) * s.strides[1] + phase(1, j);
        const auto moved = shift(0, i) * line + shift(1, j);
        taps[at].push_back(offsets.size());
        back[at].push_back(-moved);
        offsets.push_back(at * plane + moved);
      }
  }

  size_t phases() const { return taps.size(); }
  size_t input_size() const { return phases() * plane + kSlack; }
  // The output's gradient with zeros around it: `margin` before the first element.
  size_t margin() const { return reach[0] * line + reach[1]; }
  size_t output_size() const { return margin() + plane + kSlack; }

  // Columns [first, last) of phase b that lie inside the input.
  std::pair<int64_t, int64_t> inside(int axis, int64_t offset, int64_t limit) const {
    const int64_t size = axis == 0 ? s.height : s.width, stride = s.strides[axis], pad = s.before[axis];
    const int64_t first = std::max<int64_t>(0, (pad - offset + stride - 1) / stride);
    const int64_t last = std::min(limit, size + pad - offset <= 0 ? 0 : (size + pad - offset - 1) / stride + 1);
    return {first, std::max(first, last)};
  }

  // `buffer` is zero outside the input's elements, always the same ones.
  void enter_input(const float* from, float* buffer) const {
    for (int64_t a = 0; a < s.strides[0]; ++a) {
      const auto [top, bottom] = inside(0, a, rows);
      for (int64_t b = 0; b < s.strides[1]; ++b) {
        const auto [left, right] = inside(1, b, line);
        float* into = buffer + (a * s.strides[1] + b) * plane;
        for (int64_t row = top; row < bottom; ++row) {
          const float* source = from + (row * s.strides[0] + a - s.before[0]) * s.width;
          const int64_t column = b - s.before[1];
          if (s.strides[1] == 1)
            copy(source + left + column, source + right + column, into + row * line + left);
          else
            for (int64_t at = left; at < right; ++at) into[row * line + at] = source[at * s.strides[1] + column];
        }
      }
    }
  }

  void enter_output(const float* from, float* buffer) const {
    for (int64_t row = 0; row < s.out_height; ++row)
      copy(from + row * s.out_width, from + (row + 1) * s.out_width, buffer + margin() + row * line);
  }

  void leave_input(const float* phase, int64_t a, int64_t b, float* to) const {
    const auto [top, bottom] = inside(0, a, rows);
    const auto [left, right] = inside(1, b, line);
    for (int64_t row = top; row < bottom; ++row) {
      float* into = to + (row * s.strides[0] + a - s.before[0]) * s.width + b - s.before[1];
      if (s.strides[1] == 1)
        copy(phase + row * line + left, phase + row * line + right, into + left);
      else
        for (int64_t at = left; at < right; ++at) into[at * s.strides[1]] = phase[row * line + at];
    }
  }
};

void forward(const Layout& layout, const float* x, const float* w, float bias, float* y, float* input, float* output) {
  const Shape& s = layout.s;
  layout.enter_input(x, input);
  vector_loops().combine(input, layout.offsets.data(), w, layout.offsets.size(), bias, output, layout.length);
  for (int64_t row = 0; row < s.out_height; ++row)
    copy(output + row * layout.line, output + row * layout.line + s.out_width, y + row * s.out_width);
}

void input_gradient(const Layout& layout, float* x, const float* w, const float* y, float* input, float* output) {
  const Shape& s = layout.s;
  layout.enter_output(y, output);
  // Windows may leave out the last rows and columns.
  const bool covers = layout.rows * s.strides[0] >= s.height + s.before[0] &&
                      layout.line * s.strides[1] >= s.width + s.before[1];
  if (!covers) std::fill(x, x + s.height * s.width, 0.0f);
  float weights[64];
  std::vector<float> many;
  for (size_t phase = 0; phase < layout.phases(); ++phase) {
    const auto& taps = layout.taps[phase];
    float* chosen = weights;
    if (taps.size() > 64) many.resize(taps.size()), chosen = many.data();
    for (size_t k = 0; k < taps.size(); ++k) chosen[k] = w[taps[k]];
    vector_loops().combine(output + layout.margin(), layout.back[phase].data(), chosen, taps.size(), 0.0f, input,
                           layout.plane);
    layout.leave_input(input, phase / s.strides[1], phase % s.strides[1], x);
  }
}

void weight_gradient(const Layout& layout, const float* x, const float* y, float* parts, float* input, float* output) {
  layout.enter_input(x, input);
  layout.enter_output(y, output);
  vector_loops().correlate(output + layout.margin(), input, layout.offsets.data(), layout.offsets.size(),
                           layout.length, parts);
}

// Stride 1 and lines as long in the output as in the input: a plane is one flat loop without a change of layout. An
// element of the kernel left or right of the middle reads beyond the line's end there, which a mask takes out again.
struct Flat {
  int64_t width, kernel_rows, kernel_columns, length, mask_stride;
  size_t margin, size;             // of a copy of the plane that is read, with zeros before and behind it
  std::vector<ptrdiff_t> offsets;  // column by column
  std::vector<int> masks;

  // Of the plane that is written: its rows; pads of the one that is read.
  Flat(const Shape& s, int64_t read_rows, int64_t written_rows, Pair before)
      : width(s.width), kernel_rows(s.kernel[0]), kernel_columns(s.kernel[1]), length(written_rows * s.width) {
    mask_stride = length + kLanes;
    masks.resize(kernel_columns * mask_stride);
    margin = before[0] * width + before[1];
    int64_t last = 0;
    for (int64_t j = 0; j < kernel_columns; ++j) {
      const int64_t column = j * s.dilations[1] - before[1];
      for (int64_t i = 0; i < kernel_rows; ++i) {
        offsets.push_back((i * s.dilations[0] - before[0]) * width + column);
        last = std::max<int64_t>(last, offsets.back());
      }
      for (int64_t at = 0; at < length; ++at)
        masks[j * mask_stride + at] = 0 <= at % width + column && at % width + column < width ? -1 : 0;
    }
    size = margin + std::max(read_rows * width, length + last) + kSlack;
  }
};

bool is_flat(const Shape& s, Pair before) {
  return s.strides == Pair{1, 1} && s.width == s.out_width && before[0] >= 0 && before[1] >= 0 &&
         s.before[0] >= 0 && s.before[1] >= 0;
}

void run_flat(Kind kind, const Shape& s, Pair before, int64_t batch, float* x, float* w, const float* b, float* y,
              size_t threads, const Parallel& parallel) {
  const bool back = kind == Kind::kInputGradient;
  const Flat flat(s, back ? s.out_height : s.height, back ? s.height : s.out_height, before);
  const int64_t in = s.height * s.width, out = s.out_height * s.width, size = s.kernel[0] * s.kernel[1];
  // The kernel column by column, for the input's gradient backwards.
  auto place = [&](int64_t i, int64_t j) {
    return back ? (s.kernel[0] - 1 - i) * s.kernel[1] + s.kernel[1] - 1 - j : i * s.kernel[1] + j;
  };
  if (kind == Kind::kWeightGradient) {
    share_channels(s, batch, w, threads, parallel, [&] {
      return [&, copied = std::vector<float>(flat.size)](int64_t at, float* parts) mutable {
        std::memcpy(copied.data() + flat.margin, x + at * in, in * sizeof(float));
        vector_loops().correlate_masked(y + at * out, copied.data() + flat.margin, flat.offsets.data(), s.kernel[1],
                                        s.kernel[0], flat.masks.data(), flat.mask_stride, flat.length, parts);
      };
    }, [&](size_t k) { return k % s.kernel[0] * s.kernel[1] + k / s.kernel[0]; });
    return;
  }
  share_planes(s, batch, threads, parallel, [&] {
    return [&, copied = std::vector<float>(flat.size), weights = std::vector<float>(size)](int64_t at) mutable {
      const int64_t channel = at % s.channels;
      for (int64_t j = 0; j < s.kernel[1]; ++j)
        for (int64_t i = 0; i < s.kernel[0]; ++i) weights[j * s.kernel[0] + i] = w[channel * size + place(i, j)];
      std::memcpy(copied.data() + flat.margin, back ? y + at * out : x + at * in, (back ? out : in) * sizeof(float));
      vector_loops().combine_masked(copied.data() + flat.margin, flat.offsets.data(), weights.data(), s.kernel[1],
                                    s.kernel[0], flat.masks.data(), flat.mask_stride,
                                    back || b == nullptr ? 0.0f : b[channel], back ? x + at * in : y + at * out,
                                    flat.length);
    };
  });
}

}  // namespace

bool is_depthwise(const Shape& s) {
  if (s.group <= 1 || s.group != s.channels || s.group != s.filters) return false;
  // Strides, dilations and pads of a million around a plane of a few elements would fill the memory with zeros.
  constexpr double kFew = 1 << 16, kMany = 1 << 22;
  const double in = static_cast<double>(s.height) * s.width, out = static_cast<double>(s.out_height) * s.out_width;
  double padded = 1;
  for (int axis : {0, 1}) {
    const double reach = static_cast<double>(s.dilations[axis]) * (s.kernel[axis] - 1);
    padded *= s.strides[axis] * static_cast<double>(axis == 0 ? s.out_height : s.out_width) + reach;
  }
  const double masks = s.kernel[1] * std::max(in, out);
  return padded <= std::max(kFew, 16 * (in + out)) && masks <= kMany;
}

void run_depthwise(Kind kind, const Shape& s, int64_t batch, float* x, float* w, const float* b, float* y,
                   size_t threads, const Parallel& parallel) {
  // The input's gradient is a convolution of the output's with what the windows left free as padding.
  Pair before = s.before;
  if (kind == Kind::kInputGradient)
    for (int axis : {0, 1}) before[axis] = s.dilations[axis] * (s.kernel[axis] - 1) - s.before[axis];
  if (is_flat(s, before)) return run_flat(kind, s, before, batch, x, w, b, y, threads, parallel);
  const Layout layout(s);
  const int64_t in = s.height * s.width, out = s.out_height * s.out_width, size = s.kernel[0] * s.kernel[1];
  auto buffers = [&] {
    // Zeros stay where no element is entered.
    return std::make_pair(std::vector<float>(layout.input_size()), std::vector<float>(layout.output_size()));
  };
  if (kind == Kind::kWeightGradient)
    return share_channels(s, batch, w, threads, parallel, [&] {
      return [&, both = buffers()](int64_t at, float* parts) mutable {
        weight_gradient(layout, x + at * in, y + at * out, parts, both.first.data(), both.second.data());
      };
    }, [](size_t k) { return k; });
  share_planes(s, batch, threads, parallel, [&] {
    return [&, both = buffers()](int64_t at) mutable {
      const int64_t channel = at % s.channels;
      float *input = both.first.data(), *output = both.second.data();
      if (kind == Kind::kInputGradient)
        input_gradient(layout, x + at * in, w + channel * size, y + at * out, input, output);
      else
        forward(layout, x + at * in, w + channel * size, b == nullptr ? 0.0f : b[channel], y + at * out, input, output);
    };
  });
}

}  // namespace archipel
