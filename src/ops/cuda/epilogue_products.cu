// Matrix products through cuBLASLt whose epilogue does elementwise work: gelu and its slope, bias sums.
// Matrices are row-major here and column-major in cuBLASLt, so each appears as its own transpose, and the
// right operand comes first.
#include <cublasLt.h>

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

#include "ops/cuda/elements.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

cudaDataType_t data_type(Dtype dtype) {
  return dtype == Dtype::kBF16 ? CUDA_R_16BF : dtype == Dtype::kF16 ? CUDA_R_16F : CUDA_R_32F;
}

// Destroys a handle, made by a create call, at the end of a scope.
template <class Handle, cublasStatus_t (*kDestroy)(Handle)>
struct Owned {
  Handle handle = nullptr;
  Owned() = default;
  Owned(const Owned&) = delete;
  ~Owned() {
    if (handle != nullptr) kDestroy(handle);
  }
};
using Product = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// Returns the handle of a device. Handles are kept for life: making one takes milliseconds.
cublasStatus_t handle_of(int device, cublasLtHandle_t* handle) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& entry = handles[device];
  const cublasStatus_t status = entry == nullptr ? cublasLtCreate(&entry) : CUBLAS_STATUS_SUCCESS;
  *handle = entry;
  return status;
}

// The extents of a product of column-major matrices: out (m, n) = right (m, k) left (k, n).
struct Shape {
  size_t m, n, k;
  bool transposes_right, transposes_left;  // as they lie in memory
  cublasLtEpilogue_t epilogue;
};

Shape shape_of(const EpilogueProductArgs& args) {
  const size_t rows = args.rows, out = args.out_features, in = args.in_features;
  switch (args.product) {
    case EpilogueProduct::kAffineGelu:
      return {out, rows, in, true, false, CUBLASLT_EPILOGUE_GELU_AUX_BIAS};
    case EpilogueProduct::kGradRowsGelu:
      return {in, rows, out, false, false, CUBLASLT_EPILOGUE_DGELU_BGRAD};
    default:
      return {in, out, rows, false, true, CUBLASLT_EPILOGUE_BGRADB};
  }
}

int alignment_of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  int alignment = 256;
  while (address % alignment != 0) alignment /= 2;
  return alignment;
}

template <class Value>
cublasStatus_t set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, Value value) {
  return cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value);
}
template <class Value>
cublasStatus_t set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                   Value value) {
  return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
}

#define KILN_RETURN_UNLESS_OK(call)                                            \
  if (const cublasStatus_t status = (call); status != CUBLAS_STATUS_SUCCESS) { \
    return status;                                                             \
  }

cublasStatus_t describe(const EpilogueProductArgs& args, const Shape& shape, Product& product) {
  KILN_RETURN_UNLESS_OK(cublasLtMatmulDescCreate(&product.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const auto op = [](bool transposes) -> int32_t { return transposes ? CUBLAS_OP_T : CUBLAS_OP_N; };
  KILN_RETURN_UNLESS_OK(set(product.handle, CUBLASLT_MATMUL_DESC_TRANSA, op(shape.transposes_right)));
  KILN_RETURN_UNLESS_OK(set(product.handle, CUBLASLT_MATMUL_DESC_TRANSB, op(shape.transposes_left)));
  KILN_RETURN_UNLESS_OK(
      set(product.handle, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(shape.epilogue)));
  KILN_RETURN_UNLESS_OK(set(product.handle, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias));
  KILN_RETURN_UNLESS_OK(
      set(product.handle, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(data_type(args.dtype))));
  if (args.hidden == nullptr) return CUBLAS_STATUS_SUCCESS;
  KILN_RETURN_UNLESS_OK(set(product.handle, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, args.hidden));
  return set(product.handle, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(shape.m));
}

std::atomic<int> wanted_algorithm{0};

cublasStatus_t choose(int nth, cublasLtHandle_t handle, const Product& product, const Layout (&layouts)[3],
                      const int (&alignments)[3], size_t workspace_bytes, cublasLtMatmulAlgo_t* algorithm) {
  Preference preference;
  KILN_RETURN_UNLESS_OK(cublasLtMatmulPreferenceCreate(&preference.handle));
  KILN_RETURN_UNLESS_OK(set(preference.handle, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes));
  // A long inner product may be split only if its parts are added in f32.
  KILN_RETURN_UNLESS_OK(set(preference.handle, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                            static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)));
  const cublasLtMatmulPreferenceAttributes_t attributes[] = {
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
  for (int i = 0; i < 4; ++i)
    KILN_RETURN_UNLESS_OK(
        set(preference.handle, attributes[i], static_cast<uint32_t>(alignments[i < 2 ? i : 2])));
  cublasLtMatmulHeuristicResult_t results[kEpilogueAlgorithms] = {};
  int found = 0;
  KILN_RETURN_UNLESS_OK(cublasLtMatmulAlgoGetHeuristic(
      handle, product.handle, layouts[0].handle, layouts[1].handle, layouts[2].handle, layouts[2].handle,
      preference.handle, nth + 1, results, &found));
  if (found <= nth) return CUBLAS_STATUS_NOT_SUPPORTED;
  *algorithm = results[nth].algo;
  return results[nth].state;
}

using Key = std::tuple<int, int, int, int, size_t, size_t, size_t, int, int, int, size_t>;

// The choice for a shape is made once, so the next call of the same shape gives the same bits.
struct Choices {
  std::mutex mutex;
  std::map<Key, std::pair<cublasStatus_t, cublasLtMatmulAlgo_t>> made;
};

cublasStatus_t multiply(const EpilogueProductArgs& args, void* workspace, size_t workspace_bytes,
                        cudaStream_t stream) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  cublasLtHandle_t handle = nullptr;
  KILN_RETURN_UNLESS_OK(handle_of(device, &handle));
  const Shape shape = shape_of(args);
  Product product;
  KILN_RETURN_UNLESS_OK(describe(args, shape, product));
  Layout layouts[3];  // right, left, result; rows lie densely
  const auto type = data_type(args.dtype);
  const size_t right_rows = shape.transposes_right ? shape.k : shape.m,
               right_columns = shape.transposes_right ? shape.m : shape.k,
               left_rows = shape.transposes_left ? shape.n : shape.k,
               left_columns = shape.transposes_left ? shape.k : shape.n;
  KILN_RETURN_UNLESS_OK(
      cublasLtMatrixLayoutCreate(&layouts[0].handle, type, right_rows, right_columns, right_rows));
  KILN_RETURN_UNLESS_OK(
      cublasLtMatrixLayoutCreate(&layouts[1].handle, type, left_rows, left_columns, left_rows));
  KILN_RETURN_UNLESS_OK(cublasLtMatrixLayoutCreate(&layouts[2].handle, type, shape.m, shape.n, shape.m));

  const int alignments[3] = {alignment_of(args.right), alignment_of(args.left), alignment_of(args.result)};
  static Choices choices;
  cublasLtMatmulAlgo_t algorithm;
  const int nth = wanted_algorithm;
  {
    const std::lock_guard<std::mutex> lock(choices.mutex);
    const Key key{device,
                  nth,
                  static_cast<int>(args.product),
                  static_cast<int>(args.dtype),
                  shape.m,
                  shape.n,
                  shape.k,
                  alignments[0],
                  alignments[1],
                  alignments[2],
                  workspace_bytes};
    const auto [entry, is_new] = choices.made.try_emplace(key);
    if (is_new)
      entry->second.first =
          choose(nth, handle, product, layouts, alignments, workspace_bytes, &entry->second.second);
    KILN_RETURN_UNLESS_OK(entry->second.first);
    algorithm = entry->second.second;
  }
  const float one = 1, zero = 0;
  return cublasLtMatmul(handle, product.handle, &one, args.right, layouts[0].handle, args.left,
                        layouts[1].handle, &zero, args.result, layouts[2].handle, args.result,
                        layouts[2].handle, &algorithm, workspace, workspace_bytes, stream);
}

struct Counts {
  std::atomic<int64_t> served{0}, refused{0};
};
Counts& counts_of(EpilogueProduct product) {
  static Counts counts[kNumEpilogueProducts];
  return counts[static_cast<int>(product)];
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_epilogue_product(const kiln::ops::EpilogueProductArgs* args, void* workspace,
                               size_t workspace_bytes, void* stream) {
  const cublasStatus_t status =
      multiply(*args, workspace, workspace_bytes, static_cast<cudaStream_t>(stream));
  Counts& counts = counts_of(args->product);
  if (status == CUBLAS_STATUS_SUCCESS) {
    ++counts.served;
    return 0;
  }
  ++counts.refused;
  const bool is_unknown = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
                          status == CUBLAS_STATUS_ARCH_MISMATCH;
  return is_unknown ? kEpilogueNotServed : static_cast<int>(cudaErrorUnknown);
}

void kiln_cuda_take_epilogue_algorithm(int nth) { wanted_algorithm = nth; }

void kiln_cuda_epilogue_counts(kiln::ops::EpilogueProduct product, int64_t* served, int64_t* refused) {
  const Counts& counts = counts_of(product);
  *served = counts.served;
  *refused = counts.refused;
}
