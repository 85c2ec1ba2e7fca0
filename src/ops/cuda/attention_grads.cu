// Backward of attention by cuDNN, into packed memory.
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "ops/cuda/attention_graph.h"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr size_t kAlignment = 256, kElementBytes = 2;  // of bf16 and fp16
constexpr int kMostEngines = 8;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
size_t row_sum_bytes(const AttentionGradsArgs& args) {
  return aligned(args.batch * args.num_heads * args.num_tokens * sizeof(float));
}
size_t sum_of_grad_q_bytes(const AttentionGradsArgs& args) {
  return aligned(args.batch * args.num_heads * args.num_tokens * args.head_dim * sizeof(float));
}

// A device's handle, kept for life, and what it runs: one execution at a time sets the handle's stream.
struct Device {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
};

// A compiled kernel for a shape. plan is null where cuDNN has none.
struct Kernel {
  explicit Kernel(const AttentionGradsArgs& args) : graph(args) {}
  AttentionGraph graph;
  cudnnBackendDescriptor_t plan = nullptr;
  int64_t workspace_bytes = 0;
};

// Returns the engines that cuDNN proposes for a finished graph, best first.
std::vector<cudnnBackendDescriptor_t> proposed_engines(AttentionGraph& graph) {
  CudnnDescriptors& all = graph.descriptors();
  const cudnnBackendDescriptor_t heuristics = all.make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  all.set(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.operations());
  all.set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
  all.finish(heuristics);
  std::vector<cudnnBackendDescriptor_t> engines;
  for (int i = 0; i < kMostEngines; ++i) engines.push_back(all.make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
  int64_t found = 0;
  if (all.status() != CUDNN_STATUS_SUCCESS ||
      cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                               kMostEngines, &found, engines.data()) != CUDNN_STATUS_SUCCESS)
    found = 0;
  engines.resize(static_cast<size_t>(found));
  return engines;
}

void compile(Kernel& kernel, cudnnHandle_t handle) {
  CudnnDescriptors& all = kernel.graph.descriptors();
  all.set(kernel.graph.operations(), CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle);
  all.finish(kernel.graph.operations());
  for (const cudnnBackendDescriptor_t engine : proposed_engines(kernel.graph)) {
    const cudnnBackendDescriptor_t plan = all.make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    all.set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle);
    all.set(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, engine);
    if (all.status() != CUDNN_STATUS_SUCCESS) return;
    int64_t found = 0;
    if (cudnnBackendFinalize(plan) == CUDNN_STATUS_SUCCESS &&
        cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &found,
                                 &kernel.workspace_bytes) == CUDNN_STATUS_SUCCESS) {
      kernel.plan = plan;
      return;
    }
  }
}

// Returns the kernel of a shape on the current device, compiled when it is first asked for.
Kernel* kernel_of(const AttentionGradsArgs& args, Device** device) {
  using Key = std::tuple<int, int, size_t, size_t, size_t, size_t>;
  static std::mutex mutex;
  static std::map<int, Device> devices;
  static std::map<Key, std::unique_ptr<Kernel>> kernels;
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  *device = &devices[index];
  if ((*device)->handle == nullptr && cudnnCreate(&(*device)->handle) != CUDNN_STATUS_SUCCESS) return nullptr;
  std::unique_ptr<Kernel>& kernel = kernels[Key{index, static_cast<int>(args.dtype), args.batch,
                                                args.num_tokens, args.num_heads, args.head_dim}];
  if (kernel == nullptr) {
    kernel = std::make_unique<Kernel>(args);
    compile(*kernel, (*device)->handle);
  }
  return kernel->plan == nullptr ? nullptr : kernel.get();
}

cudnnStatus_t run(const AttentionGradsArgs& args, const Kernel& kernel, cudnnHandle_t handle, char* scratch) {
  const size_t part = args.num_heads * args.head_dim * kElementBytes;  // from q to k to v
  const auto at = [](const void* p, size_t bytes) {
    return const_cast<char*>(static_cast<const char*>(p)) + bytes;  // NOLINT: cuDNN takes all as void*
  };
  float scale = args.scale, one = 1;
  char* sum_of_grad_q = scratch + row_sum_bytes(args);
  using Graph = AttentionGraph;
  const int64_t uids[] = {Graph::kQ,      Graph::kK,      Graph::kV,         Graph::kOut,   Graph::kGradOut,
                          Graph::kLogSum, Graph::kScale,  Graph::kOne,       Graph::kGradQ, Graph::kGradK,
                          Graph::kGradV,  Graph::kRowSum, Graph::kSumOfGradQ};
  void* const pointers[] = {at(args.qkv, 0),
                            at(args.qkv, part),
                            at(args.qkv, 2 * part),
                            at(args.out, 0),
                            at(args.grad_out, 0),
                            at(args.log_sum, 0),
                            &scale,
                            &one,
                            at(args.grad_qkv, 0),
                            at(args.grad_qkv, part),
                            at(args.grad_qkv, 2 * part),
                            scratch,
                            sum_of_grad_q};
  CudnnDescriptors all;
  const cudnnBackendDescriptor_t pack = all.make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  all.set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, uids, std::size(uids));
  all.set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers, std::size(pointers));
  void* workspace = sum_of_grad_q + sum_of_grad_q_bytes(args);
  all.set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
  all.finish(pack);
  return all.status() == CUDNN_STATUS_SUCCESS ? cudnnBackendExecute(handle, kernel.plan, pack) : all.status();
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_attention_grads_scratch(const kiln::ops::AttentionGradsArgs* args, size_t* bytes) {
  Device* device = nullptr;
  const Kernel* kernel = kernel_of(*args, &device);
  if (kernel == nullptr) return kAttentionNotServed;
  *bytes = row_sum_bytes(*args) + sum_of_grad_q_bytes(*args) + static_cast<size_t>(kernel->workspace_bytes);
  return 0;
}

int kiln_cuda_attention_grads(const kiln::ops::AttentionGradsArgs* args, void* scratch, void* stream) {
  Device* device = nullptr;
  const Kernel* kernel = kernel_of(*args, &device);
  if (kernel == nullptr) return kAttentionNotServed;
  const std::lock_guard<std::mutex> lock(device->mutex);
  if (cudnnSetStream(device->handle, static_cast<cudaStream_t>(stream)) != CUDNN_STATUS_SUCCESS ||
      run(*args, *kernel, device->handle, static_cast<char*>(scratch)) != CUDNN_STATUS_SUCCESS)
    return static_cast<int>(cudaErrorUnknown);
  return 0;
}
