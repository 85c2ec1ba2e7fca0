#include "parallel/device_graph.h"

#ifdef KILN_CUDA_KERNELS

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "core/aten.h"

namespace kiln {
namespace {

class CudaDeviceGraph : public DeviceGraph {
 public:
  explicit CudaDeviceGraph(c10::Device device) : device_(device) {}

  // CUDA records no default stream: a side one does the work, between two waits.
  void capture(const std::function<void()>& work) override {
    const c10::cuda::CUDAGuard on_device(device_);
    const c10::cuda::CUDAStream side =
        c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
    c10::cuda::getCurrentCUDAStream(device_.index()).synchronize();
    const c10::cuda::CUDAStreamGuard on_side(side);
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      end_after_error();
      throw;
    }
    graph_.capture_end();
  }

  void replay() override {
    const c10::cuda::CUDAGuard on_device(device_);
    graph_.replay();
  }

 private:
  // The stream and the allocator leave the recording whatever became of it.
  void end_after_error() {
    try {
      graph_.capture_end();
    } catch (const c10::Error&) {  // what `work` threw says why
    }
    graph_.reset();
  }

  c10::Device device_;
  at::cuda::CUDAGraph graph_;
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
