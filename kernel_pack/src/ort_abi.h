// The part of ONNX Runtime's C ABI that custom operators need.
//
// ONNX Runtime's wheels carry no headers. Its ABI is append-only: OrtApi is a table of functions whose places never
// change, and OrtCustomOp a struct that only grows. So the places and fields below hold for every ONNX Runtime from
// API version 17 (1.17) on; `check_abi` calls a few of the functions before anything is registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ort {

struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;

constexpr uint32_t kApiVersion = 17;

struct Api {
  void* functions[300];
};

struct ApiBase {
  const Api* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

enum class ElementType : int { kUndefined = 0, kFloat = 1 };
enum class Characteristic : int { kRequired = 0, kOptional = 1 };

// What ONNX Runtime calls for an operator; it passes the struct itself as the first argument.
struct CustomOp {
  uint32_t version = kApiVersion;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*) = nullptr;
  const char* (*get_name)(const CustomOp*) = nullptr;
  const char* (*get_provider)(const CustomOp*) = nullptr;
  ElementType (*get_input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*get_input_count)(const CustomOp*) = nullptr;
  ElementType (*get_output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*get_output_count)(const CustomOp*) = nullptr;
  void (*compute)(void*, KernelContext*) = nullptr;
  void (*destroy_kernel)(void*) = nullptr;
  Characteristic (*get_input_characteristic)(const CustomOp*, size_t) = nullptr;
  Characteristic (*get_output_characteristic)(const CustomOp*, size_t) = nullptr;
  int (*get_input_memory)(const CustomOp*, size_t) = nullptr;
  int (*get_variadic_input_minimum)(const CustomOp*) = nullptr;
  int (*get_variadic_input_homogeneity)(const CustomOp*) = nullptr;
  int (*get_variadic_output_minimum)(const CustomOp*) = nullptr;
  int (*get_variadic_output_homogeneity)(const CustomOp*) = nullptr;
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void**) = nullptr;
  Status* (*compute_v2)(void*, KernelContext*) = nullptr;
  Status* (*infer_shapes)(const CustomOp*, void*) = nullptr;
  int (*get_first_version)(const CustomOp*) = nullptr;
  int (*get_last_version)(const CustomOp*) = nullptr;
};

enum Place : size_t {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kGetAttributeFloat = 85,
  kGetAttributeInt = 86,
  kGetInputCount = 88,
  kGetInput = 90,
  kGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorInfo = 99,
  kGetAttributeInts = 163,
  kHasSessionConfigEntry = 237,
  kGetSessionConfigEntry = 238,
  kParallelFor = 274,
};

template <class Result, class... Arguments>
Result call(const Api* api, Place place, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(api->functions[place])(arguments...);
}

inline Status* make_error(const Api* api, const char* message) {
  return call<Status*, int, const char*>(api, kCreateStatus, 1, message);
}

// Throws what ONNX Runtime says if a call failed, after `what` it was about.
inline void check(const Api* api, Status* status, const char* what = "") {
  if (status == nullptr) return;
  std::string message = *what ? std::string(what) + ": " : "";
  message += call<const char*, const Status*>(api, kGetErrorMessage, status);
  call<void, Status*>(api, kReleaseStatus, status);
  throw std::runtime_error(message);
}

// A round trip through functions at the table's beginning, middle and end.
inline void check_abi(const Api* api) {
  Status* status = make_error(api, "archipel");
  std::string answer = call<const char*, const Status*>(api, kGetErrorMessage, status);
  call<void, Status*>(api, kReleaseStatus, status);
  if (answer != "archipel") throw std::runtime_error("this ONNX Runtime has another ABI");
}

struct Tensor {
  float* data = nullptr;
  std::vector<int64_t> shape;
};

inline Tensor input(const Api* api, const KernelContext* context, size_t index) {
  size_t count = 0;
  check(api, call<Status*, const KernelContext*, size_t*>(api, kGetInputCount, context, &count));
  const Value* value = nullptr;
  if (index < count)
    check(api, call<Status*, const KernelContext*, size_t, const Value**>(api, kGetInput, context, index, &value));
  if (value == nullptr) return {};  // an optional input that the node leaves out
  TensorInfo* info = nullptr;
  check(api, call<Status*, const Value*, TensorInfo**>(api, kGetTensorTypeAndShape, value, &info));
  size_t rank = 0;
  Status* status = call<Status*, const TensorInfo*, size_t*>(api, kGetDimensionsCount, info, &rank);
  Tensor result;
  if (status == nullptr) {
    result.shape.resize(rank);
    status = call<Status*, const TensorInfo*, int64_t*, size_t>(api, kGetDimensions, info, result.shape.data(), rank);
  }
  call<void, TensorInfo*>(api, kReleaseTensorInfo, info);
  check(api, status);
  void* data = nullptr;
  check(api, call<Status*, Value*, void**>(api, kGetTensorMutableData, const_cast<Value*>(value), &data));
  // A weights file may have a tensor at any place; loops over single elements read whole ones.
  if (reinterpret_cast<uintptr_t>(data) % alignof(float) != 0) throw std::runtime_error("a tensor is not aligned");
  result.data = static_cast<float*>(data);
  return result;
}

inline float* output(const Api* api, KernelContext* context, const std::vector<int64_t>& shape, size_t index = 0) {
  Value* value = nullptr;
  check(api, call<Status*, KernelContext*, size_t, const int64_t*, size_t, Value**>(
                 api, kGetOutput, context, index, shape.data(), shape.size(), &value));
  void* data = nullptr;
  check(api, call<Status*, Value*, void**>(api, kGetTensorMutableData, value, &data));
  return static_cast<float*>(data);
}

// An attribute of the node, which must have one of this name and type.
inline float attribute_float(const Api* api, const KernelInfo* info, const char* name) {
  float value = 0;
  check(api, call<Status*, const KernelInfo*, const char*, float*>(api, kGetAttributeFloat, info, name, &value), name);
  return value;
}

inline int64_t attribute_int(const Api* api, const KernelInfo* info, const char* name) {
  int64_t value = 0;
  check(api, call<Status*, const KernelInfo*, const char*, int64_t*>(api, kGetAttributeInt, info, name, &value), name);
  return value;
}

inline std::vector<int64_t> attribute_ints(const Api* api, const KernelInfo* info, const char* name, size_t count) {
  size_t size = 0;
  auto read = [&](int64_t* values) {
    check(api, call<Status*, const KernelInfo*, const char*, int64_t*, size_t*>(api, kGetAttributeInts, info, name,
                                                                                values, &size), name);
  };
  read(nullptr);
  if (size != count) throw std::runtime_error(std::string(name) + " has another number of entries");
  std::vector<int64_t> values(size);
  read(values.data());
  return values;
}

}  // namespace ort
