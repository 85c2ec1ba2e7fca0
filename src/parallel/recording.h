// How a device graph is recorded, free of CUDA.
#pragma once
#include <exception>
#include <functional>

namespace kiln {

// Ends a recording that was begun: `work` is what is recorded. If it throws, or breaks the recording, nothing
// stays behind and the error goes on. A recording that breaks ends without torch's generator hearing of it,
// and the next draw on the device would throw; so one of `least`, which cannot break, is begun and ended.
// `leave` does the rest of what capture_end() does and left out because it threw. Graph: begin(),
// capture_end() and reset() of at::cuda::CUDAGraph.
template <class Graph>
void end_recording(Graph& graph, const std::function<void()>& work, const std::function<void()>& leave,
                   const std::function<void()>& least) {
  try {
    work();
    graph.capture_end();
  } catch (...) {
    try {
      graph.capture_end();
    } catch (const std::exception&) {  // the error above says why
      leave();
    }
    graph.reset();
    try {
      Graph whole;
      whole.begin();
      least();
      whole.capture_end();
    } catch (const std::exception&) {  // the device is lost
    }
    throw;
  }
}

}  // namespace kiln
