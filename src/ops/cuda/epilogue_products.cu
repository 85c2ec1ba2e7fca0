// Matrix products through cuBLASLt. The epilogues of most do elementwise work: gelu and its slope, bias sums.
// Matrices are row-major here and column-major in cuBLASLt, so each appears as its own transpose, and the
// right operand comes first.
#include <cublasLt.h>

#include <atomic>
#include <cstring>
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
    case EpilogueProduct::kAffine:
      return {out,  rows,  in,
              true, false, args.bias == nullptr ? CUBLASLT_EPILOGUE_DEFAULT : CUBLASLT_EPILOGUE_BIAS};
    case EpilogueProduct::kGradRows:
      return {in, rows, out, false, false, CUBLASLT_EPILOGUE_DEFAULT};
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
  if (args.bias == nullptr) return CUBLAS_STATUS_SUCCESS;
  KILN_RETURN_UNLESS_OK(set(product.handle, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias));
  KILN_RETURN_UNLESS_OK(
      set(product.handle, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(data_type(args.dtype))));
  if (args.hidden == nullptr) return CUBLAS_STATUS_SUCCESS;
  KILN_RETURN_UNLESS_OK(set(product.handle, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, args.hidden));
  return set(product.handle, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(shape.m));
}

std::atomic<int> wanted_algorithm{0};

// Writes the first `most` algorithms that cuBLASLt proposes, its best guess first, and their number.
cublasStatus_t propose(cublasLtHandle_t handle, const Product& product, const Layout (&layouts)[3],
                       const int (&alignments)[3], size_t workspace_bytes, int most,
                       cublasLtMatmulHeuristicResult_t* results, int* found) {
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
  return cublasLtMatmulAlgoGetHeuristic(handle, product.handle, layouts[0].handle, layouts[1].handle,
                                        layouts[2].handle, layouts[2].handle, preference.handle, most,
                                        results, found);
}

// Times work on a stream. It fails where the stream is being recorded into a graph.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    is_ok_ = cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess;
  }
  ~Stopwatch() {
    if (begin_ != nullptr) cudaEventDestroy(begin_);
    if (end_ != nullptr) cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;

  // Returns the mean milliseconds of a few runs of `work` after a first one, or a negative number.
  template <class Work>
  float milliseconds_of(const Work& work) const {
    constexpr int kRuns = 5;
    float milliseconds = -1;
    if (!is_ok_ || work() != CUBLAS_STATUS_SUCCESS || cudaEventRecord(begin_, stream_) != cudaSuccess)
      return -1;
    for (int run = 0; run < kRuns; ++run)
      if (work() != CUBLAS_STATUS_SUCCESS) return -1;
    const bool is_timed = cudaEventRecord(end_, stream_) == cudaSuccess &&
                          cudaEventSynchronize(end_) == cudaSuccess &&
                          cudaEventElapsedTime(&milliseconds, begin_, end_) == cudaSuccess;
    return is_timed ? milliseconds / kRuns : -1;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  bool is_ok_ = false;
};

using Key = std::tuple<int, int, int, int, bool, size_t, size_t, size_t, int, int, int, size_t>;

struct Choice {
  cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
  cublasLtMatmulAlgo_t algorithm{};
  float microseconds = 0, first_microseconds = 0;  // 0: not timed
};

// The choice for a shape is made once, so the next call of the same shape gives the same bits.
struct Choices {
  std::mutex mutex;
  std::map<Key, Choice> made;
  int num_fastest = 0;  // of kFastestAlgorithm
};
// More shapes are not timed: captions whose rows are not padded have other numbers of rows in each batch.
constexpr int kMostTimed = 1024;

Choices& choices() {
  static Choices all;
  return all;
}

// `run`: starts the product with an algorithm.
template <class Run>
Choice fastest_of(const cublasLtMatmulHeuristicResult_t* results, int found, cudaStream_t stream,
                  const Run& run) {
  Choice best;
  float first = 0;
  const Stopwatch stopwatch(stream);
  for (int i = 0; i < found; ++i) {
    if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
    const float us = 1e3f * stopwatch.milliseconds_of([&] { return run(results[i].algo); });
    if (us <= 0) continue;
    if (first == 0) first = us;
    if (best.status == CUBLAS_STATUS_SUCCESS && us >= best.microseconds) continue;
    best = {CUBLAS_STATUS_SUCCESS, results[i].algo, us, first};
  }
  return best;
}

bool is_recorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

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
  const auto run = [&](const cublasLtMatmulAlgo_t& algorithm) {
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle, product.handle, &one, args.right, layouts[0].handle, args.left,
                          layouts[1].handle, &zero, args.result, layouts[2].handle, args.result,
                          layouts[2].handle, &algorithm, workspace, workspace_bytes, stream);
  };

  const int alignments[3] = {alignment_of(args.right), alignment_of(args.left), alignment_of(args.result)};
  const auto key_of = [&](int nth) {
    return Key{device,
               nth,
               static_cast<int>(args.product),
               static_cast<int>(args.dtype),
               args.bias != nullptr,
               shape.m,
               shape.n,
               shape.k,
               alignments[0],
               alignments[1],
               alignments[2],
               workspace_bytes};
  };
  cublasLtMatmulAlgo_t algorithm;
  {
    const std::lock_guard<std::mutex> lock(choices().mutex);
    auto& made = choices().made;
    int nth = wanted_algorithm;
    // Nothing can be timed where a stream is recorded. A shape is walked once before, so this is rare.
    if (nth == kFastestAlgorithm && made.count(key_of(nth)) == 0 &&
        (choices().num_fastest >= kMostTimed || is_recorded(stream)))
      nth = 0;
    const auto [entry, is_new] = made.try_emplace(key_of(nth));
    Choice& choice = entry->second;
    if (is_new) {
      choices().num_fastest += nth == kFastestAlgorithm;
      cublasLtMatmulHeuristicResult_t results[kEpilogueAlgorithms] = {};
      int found = 0;
      const bool is_timed = nth == kFastestAlgorithm;
      choice.status = propose(handle, product, layouts, alignments, workspace_bytes,
                              is_timed ? int{kEpilogueAlgorithms} : nth + 1, results, &found);
      if (choice.status == CUBLAS_STATUS_SUCCESS && is_timed)
        choice = fastest_of(results, found, stream, run);
      else if (choice.status == CUBLAS_STATUS_SUCCESS)
        choice = found <= nth ? Choice{} : Choice{results[nth].state, results[nth].algo, 0, 0};
    }
    KILN_RETURN_UNLESS_OK(choice.status);
    algorithm = choice.algorithm;
  }
  return run(algorithm);
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

void kiln_cuda_set_product_choice(const kiln::ops::ProductChoice* choice) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return;
  const Key key{device,
                kFastestAlgorithm,
                static_cast<int>(choice->product),
                static_cast<int>(choice->dtype),
                choice->has_bias,
                choice->m,
                choice->n,
                choice->k,
                choice->alignments[0],
                choice->alignments[1],
                choice->alignments[2],
                choice->workspace_bytes};
  Choice made{CUBLAS_STATUS_SUCCESS, {}, choice->microseconds, choice->first_microseconds};
  static_assert(sizeof made.algorithm == sizeof choice->algorithm);
  std::memcpy(&made.algorithm, choice->algorithm, sizeof made.algorithm);
  const std::lock_guard<std::mutex> lock(choices().mutex);
  choices().num_fastest += choices().made.insert_or_assign(key, made).second;
}

size_t kiln_cuda_product_choices(kiln::ops::ProductChoice* all, size_t most) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  const std::lock_guard<std::mutex> lock(choices().mutex);
  size_t count = 0;
  for (const auto& [key, made] : choices().made) {
    const auto& [of_device, nth, product, dtype, has_bias, m, n, k, right, left, result, workspace_bytes] =
        key;
    if (of_device != device || nth != kFastestAlgorithm || made.status != CUBLAS_STATUS_SUCCESS) continue;
    if (count < most) {
      kiln::ops::ProductChoice& choice = all[count];
      choice = {static_cast<kiln::ops::EpilogueProduct>(product),
                static_cast<kiln::Dtype>(dtype),
                has_bias,
                m,
                n,
                k,
                {right, left, result},
                workspace_bytes,
                {},
                made.microseconds,
                made.first_microseconds};
      std::memcpy(choice.algorithm, &made.algorithm, sizeof choice.algorithm);
    }
    ++count;
  }
  return count;
}

size_t kiln_cuda_cublaslt_version(void) { return cublasLtGetVersion(); }

void kiln_cuda_epilogue_counts(kiln::ops::EpilogueProduct product, int64_t* served, int64_t* refused) {
  const Counts& counts = counts_of(product);
  *served = counts.served;
  *refused = counts.refused;
}
