#include "convolution.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <dnnl.hpp>
#include <new>
#include <unordered_map>

#include "depthwise.h"

namespace archipel {

namespace {

using dnnl::memory;
using Tag = memory::format_tag;

constexpr size_t kMostPlans = 64;

const dnnl::engine& engine() {
  static const dnnl::engine made(dnnl::engine::kind::cpu, 0);
  return made;
}

// oneDNN may not start threads of its own: they would fight ONNX Runtime's for the cores. OpenMP keeps the number for
// each thread, and a caller may use OpenMP for something else afterwards.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }

 private:
  int before_;
};

// Memory of one thread for tensors in oneDNN's layouts; the largest plan decides its size.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* reserve(size_t size) {
    if (size > size_) {
      std::free(data_);
      size_ = (size + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(std::aligned_alloc(4096, size_));
      if (data_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

memory::desc describe(const memory::dims& dims, Tag tag) { return {dims, memory::data_type::f32, tag}; }

// A tensor as the graph has it and as the primitive wants it.
struct Operand {
  memory::desc plain, inner;
  dnnl::reorder reorder;
  bool moves = false;
  size_t offset = 0;

  Operand() = default;
  Operand(memory::desc has, memory::desc wants, bool written) : plain(has), inner(wants), moves(has != wants) {
    if (!moves) return;
    const auto& from = written ? inner : plain;
    const auto& to = written ? plain : inner;
    reorder = dnnl::reorder(dnnl::reorder::primitive_desc(engine(), from, engine(), to));
  }
};

}  // namespace

// A primitive for one shape and batch, with the changes of layout around it.
struct Plan {
  Operand x, w, y;
  memory::desc bias, scratchpad;
  dnnl::primitive primitive;
  size_t scratchpad_offset = 0, size = 0;

  template <class Description>
  void lay_out(const Description& made) {
    scratchpad = made.scratchpad_desc();
    for (auto* each : {&x, &w, &y})
      if (each->moves) each->offset = claim(each->inner.get_size());
    scratchpad_offset = claim(scratchpad.get_size());
  }

  size_t claim(size_t bytes) {
    size_t at = size;
    size += (bytes + 63) / 64 * 64;
    return at;
  }

  void run(Kind kind, float* x_data, float* w_data, float* b_data, float* y_data) const {
    thread_local Scratch scratch;
    thread_local dnnl::stream stream(engine());
    char* base = scratch.reserve(size);
    auto outer = [&](const Operand& each, float* data) { return memory(each.plain, engine(), data); };
    auto inner = [&](const Operand& each, float* data) {
      return memory(each.inner, engine(), each.moves ? static_cast<void*>(base + each.offset) : data);
    };
    memory xi = inner(x, x_data), wi = inner(w, w_data), yi = inner(y, y_data);
    auto enter = [&](const Operand& each, float* data, memory& to) {
      if (!each.moves) return;
      memory from = outer(each, data);
      each.reorder.execute(stream, from, to);
    };
    auto leave = [&](const Operand& each, memory& from, float* data) {
      if (!each.moves) return;
      memory to = outer(each, data);
      each.reorder.execute(stream, from, to);
    };
    if (kind != Kind::kInputGradient) enter(x, x_data, xi);
    if (kind != Kind::kWeightGradient) enter(w, w_data, wi);
    if (kind != Kind::kForward) enter(y, y_data, yi);
    std::unordered_map<int, memory> arguments{
        {DNNL_ARG_SCRATCHPAD, memory(scratchpad, engine(), base + scratchpad_offset)}};
    switch (kind) {
      case Kind::kForward:
        arguments.insert({{DNNL_ARG_SRC, xi}, {DNNL_ARG_WEIGHTS, wi}, {DNNL_ARG_DST, yi}});
        if (b_data != nullptr) arguments.insert({DNNL_ARG_BIAS, memory(bias, engine(), b_data)});
        break;
      case Kind::kInputGradient:
        arguments.insert({{DNNL_ARG_DIFF_SRC, xi}, {DNNL_ARG_WEIGHTS, wi}, {DNNL_ARG_DIFF_DST, yi}});
        break;
      case Kind::kWeightGradient:
        arguments.insert({{DNNL_ARG_SRC, xi}, {DNNL_ARG_DIFF_WEIGHTS, wi}, {DNNL_ARG_DIFF_DST, yi}});
        break;
    }
    primitive.execute(stream, arguments);
    if (kind == Kind::kForward) leave(y, yi, y_data);
    if (kind == Kind::kInputGradient) leave(x, xi, x_data);
    if (kind == Kind::kWeightGradient) leave(w, wi, w_data);
    stream.wait();
  }
};

namespace {

std::shared_ptr<const Plan> make_plan(Kind kind, const Shape& s, int64_t batch) {
  OneThread one;
  const memory::dims x_dims{batch, s.channels, s.height, s.width};
  const memory::dims y_dims{batch, s.filters, s.out_height, s.out_width};
  const bool grouped = s.group > 1;
  const memory::dims w_dims =
      grouped ? memory::dims{s.group, s.filters / s.group, s.channels / s.group, s.kernel[0], s.kernel[1]}
              : memory::dims{s.filters, s.channels, s.kernel[0], s.kernel[1]};
  const auto w_tag = grouped ? Tag::goihw : Tag::oihw;
  const memory::dims strides(s.strides.begin(), s.strides.end());
  const memory::dims dilations{s.dilations[0] - 1, s.dilations[1] - 1};
  const memory::dims before(s.before.begin(), s.before.end()), after(s.after.begin(), s.after.end());
  // A kernel of one element is a product of matrices, which reads the plain layout as it is.
  const bool product = s.kernel == Pair{1, 1} && s.strides == Pair{1, 1} && s.before == Pair{0, 0} &&
                       s.after == Pair{0, 0} && !grouped;
  const auto layout = product ? Tag::nchw : Tag::any;
  const auto x_any = describe(x_dims, layout), y_any = describe(y_dims, layout), w_any = describe(w_dims, Tag::any);
  const auto x = describe(x_dims, Tag::nchw), y = describe(y_dims, Tag::nchw), w = describe(w_dims, w_tag);
  const auto direct = dnnl::algorithm::convolution_direct;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);

  auto plan = std::make_shared<Plan>();
  plan->bias = s.bias ? describe({s.filters}, Tag::x) : memory::desc();
  const auto kind_of_pass = kind == Kind::kForward ? dnnl::prop_kind::forward_inference
                                                   : dnnl::prop_kind::forward_training;
  dnnl::convolution_forward::primitive_desc forward(engine(), kind_of_pass, direct, x_any, w_any, plan->bias, y_any,
                                                    strides, dilations, before, after, attributes);
  switch (kind) {
    case Kind::kForward:
      plan->x = Operand(x, forward.src_desc(), false);
      plan->w = Operand(w, forward.weights_desc(), false);
      plan->y = Operand(y, forward.dst_desc(), true);
      plan->primitive = dnnl::convolution_forward(forward);
      plan->lay_out(forward);
      break;
    case Kind::kInputGradient: {
      dnnl::convolution_backward_data::primitive_desc made(engine(), direct, x_any, w_any, y_any, strides, dilations,
                                                           before, after, forward, attributes);
      plan->x = Operand(x, made.diff_src_desc(), true);
      plan->w = Operand(w, made.weights_desc(), false);
      plan->y = Operand(y, made.diff_dst_desc(), false);
      plan->primitive = dnnl::convolution_backward_data(made);
      plan->lay_out(made);
      break;
    }
    case Kind::kWeightGradient: {
      dnnl::convolution_backward_weights::primitive_desc made(engine(), direct, x_any, w_any, y_any, strides,
                                                              dilations, before, after, forward, attributes);
      plan->x = Operand(x, made.src_desc(), false);
      plan->w = Operand(w, made.diff_weights_desc(), true);
      plan->y = Operand(y, made.diff_dst_desc(), false);
      plan->primitive = dnnl::convolution_backward_weights(made);
      plan->lay_out(made);
      break;
    }
  }
  return plan;
}

std::vector<int64_t> key_of(const Shape& s, int64_t batch) {
  std::vector<int64_t> key{batch,     s.channels,  s.height, s.width, s.filters, s.out_height,
                           s.out_width, s.group, s.bias ? 1 : 0};
  for (const auto& pair : {s.kernel, s.strides, s.dilations, s.before, s.after})
    key.insert(key.end(), pair.begin(), pair.end());
  return key;
}

}  // namespace

Convolution::Convolution(Kind kind, size_t threads) : kind_(kind), threads_(threads) {}
Convolution::~Convolution() = default;

std::shared_ptr<const Plan> Convolution::plan(const Shape& shape, int64_t batch) {
  std::lock_guard<std::mutex> lock(mutex_);
  // A step sees two batch sizes, or three; whoever feeds others all the time shall not fill the memory.
  if (plans_.size() >= kMostPlans) plans_.clear();
  auto& found = plans_[key_of(shape, batch)];
  if (found == nullptr) found = make_plan(kind_, shape, batch);
  return found;
}

void Convolution::run(const Shape& shape, int64_t batch, float* x, float* w, float* b, float* y,
                      const Parallel& parallel) {
  const int64_t weights = shape.filters * (shape.channels / shape.group) * shape.kernel[0] * shape.kernel[1];
  if (batch == 0) {
    if (kind_ == Kind::kWeightGradient) std::fill(w, w + weights, 0.0f);
    return;
  }
  if (is_depthwise(shape)) return run_depthwise(kind_, shape, batch, x, w, b, y, threads_, parallel);
  // Each thread takes a part of the batch.
  const int64_t tasks = std::min<int64_t>(batch, static_cast<int64_t>(threads_));
  const int64_t part = (batch + tasks - 1) / tasks;
  const int64_t parts = (batch + part - 1) / part, last = batch - part * (parts - 1);
  const auto most = plan(shape, part), rest = last == part ? most : plan(shape, last);
  const int64_t x_step = part * shape.channels * shape.height * shape.width;
  const int64_t y_step = part * shape.filters * shape.out_height * shape.out_width;
  std::vector<float> sums;
  if (kind_ == Kind::kWeightGradient && parts > 1) sums.resize((parts - 1) * weights);
  parallel(parts, [&](size_t index) {
    OneThread one;
    const auto at = static_cast<int64_t>(index);
    float* into = kind_ == Kind::kWeightGradient && at > 0 ? sums.data() + (at - 1) * weights : w;
    (at == parts - 1 ? rest : most)->run(kind_, x + at * x_step, into, b, y + at * y_step);
  });
  for (int64_t at = 0; at < parts - 1 && !sums.empty(); ++at)
    for (int64_t i = 0; i < weights; ++i) w[i] += sums[at * weights + i];
}

}  // namespace archipel
