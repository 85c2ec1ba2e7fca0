#include "cuda_emulation/fake_cublaslt.h"

#include <cublasLt.h>
#include <cuda_runtime.h>

namespace kiln::emulation {
namespace {

CublasLt answer = CublasLt::kServes;
int choices = 0, last = -1, products = 0;
std::array<float, 8> milliseconds = {1, 1, 1, 1, 1, 1, 1, 1};
float now = 0;
bool recording = false;

template <class Handle>
cublasStatus_t give(Handle* handle) {
  static char somewhere;
  *handle = reinterpret_cast<Handle>(&somewhere);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

void set_cublaslt(CublasLt wanted) { answer = wanted; }
int num_choices() { return choices; }
int last_algorithm() { return last; }
int num_products() { return products; }
void set_milliseconds(const std::array<float, 8>& of_algorithms) { milliseconds = of_algorithms; }
void set_recording(bool is_recording) { recording = is_recording; }

}  // namespace kiln::emulation

using namespace kiln::emulation;  // NOLINT: the library below is this file's only other content

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return give(handle); }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* product, cublasComputeType_t, cudaDataType_t) {
  return give(product);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
                                              const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType, uint64_t, uint64_t,
                                          int64_t) {
  return give(layout);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return give(preference);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t, const void*,
                                                    size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int most,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
  ++choices;
  *found = answer == CublasLt::kHasNone ? 0 : most;
  for (int i = 0; i < *found; ++i) {
    results[i].algo.data[0] = static_cast<uint64_t>(i);
    results[i].state = CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                              cublasLtMatrixLayout_t, const void*, cublasLtMatrixLayout_t, const void*,
                              const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t,
                              const cublasLtMatmulAlgo_t* algorithm, void*, size_t, cudaStream_t) {
  last = static_cast<int>(algorithm->data[0]);
  ++products;
  const float takes = milliseconds.at(algorithm->data[0]);
  if (takes < 0) return CUBLAS_STATUS_INVALID_VALUE;
  now += takes;
  return answer == CublasLt::kServes ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

size_t cublasLtGetVersion() { return 130100; }

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = recording ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new float(0));
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  if (recording) return cudaErrorStreamCaptureUnsupported;
  *reinterpret_cast<float*>(event) = now;
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t begin, cudaEvent_t end) {
  *elapsed = *reinterpret_cast<float*>(end) - *reinterpret_cast<float*>(begin);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<float*>(event);
  return cudaSuccess;
}
