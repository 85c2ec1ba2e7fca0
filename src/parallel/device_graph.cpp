#include "parallel/device_graph.h"

#ifdef KILN_CUDA_KERNELS

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "core/aten.h"
#include "parallel/recording.h"

namespace kiln {
namespace {

// Without a pool it takes memory of its own.
struct ThreadsGraph : at::cuda::CUDAGraph {
  void begin(at::cuda::MempoolId_t pool = {}) { capture_begin(pool, cudaStreamCaptureModeThreadLocal); }
};

class CudaDeviceGraph : public DeviceGraph {
 public:
  explicit CudaDeviceGraph(c10::Device device) : device_(device) {}

  // CUDA cannot record the default stream, so a side stream does. Graphs that share their memory share it
  // too: cuBLAS takes a workspace for each stream, and keeps it. Memory that the work took when it was not
  // recorded is freed first, because the graph takes as much again.
  void capture(const std::function<void()>& work, const DeviceGraph* shared) override {
    const c10::cuda::CUDAGuard on_device(device_);
    const auto* shares = static_cast<const CudaDeviceGraph*>(shared);
    side_ = shares ? shares->side_ : c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
    c10::cuda::getCurrentCUDAStream(device_.index()).synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    const c10::cuda::CUDAStreamGuard on_side(*side_);
    const auto pool = shares ? shares->pool_ : at::cuda::graph_pool_handle();
    graph_.begin(pool);
    end_recording(
        graph_, work, [&] { leave(pool); }, [&] { at::zeros({1}, at::TensorOptions(device_)); });
    pool_ = pool;
  }

  void replay() override {
    const c10::cuda::CUDAGuard on_device(device_);
    graph_.replay();
  }

 private:
  // If the stream's recording is broken, capture_end() throws before it tells the allocators.
  void leave(at::cuda::MempoolId_t pool) const {
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device_.index(), pool);
      at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(pool);
      c10::cuda::CUDACachingAllocator::releasePool(device_.index(), pool);
      at::getHostAllocator(at::kCUDA)->release_pool(pool);
    } catch (const c10::Error&) {  // they had left it already
    }
  }

  c10::Device device_;
  std::optional<c10::cuda::CUDAStream> side_;
  ThreadsGraph graph_;
  at::cuda::MempoolId_t pool_{};
};

}  // namespace

std::unique_ptr<DeviceGraph> make_device_graph(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  return std::make_unique<CudaDeviceGraph>(device);
}

}  // namespace kiln

#else

namespace kiln {

std::unique_ptr<DeviceGraph> make_device_graph(c10::Device) { return nullptr; }

}  // namespace kiln

#endif
