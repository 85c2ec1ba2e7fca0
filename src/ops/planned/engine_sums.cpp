#include "ops/planned/engine_sums.h"

#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include "core/aten.h"

namespace kiln {

namespace {

thread_local int scopes = 0;
thread_local int functions = 0;  // graph functions now running; sums inside them are not the engine's

std::unique_ptr<at::ObserverContext> enter_function(const at::RecordFunction&) {
  ++functions;
  return nullptr;
}
void leave_function(const at::RecordFunction&, at::ObserverContext*) { --functions; }

// The same test as can_accumulate_inplace() of torch's input_buffer.cpp, without its exclusion of meta.
bool engine_holds_alone(const at::Tensor& sum) {
  return scopes > 0 && functions == 0 && torch::autograd::get_current_graph_task_id() >= 0 &&
         sum.use_count() == 1 && sum.has_storage() && sum.storage().use_count() == 1 &&
         sum.is_non_overlapping_and_dense();
}

at::Tensor add_on_meta(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  return engine_holds_alone(self) ? self : at::meta::add(self, other, alpha);
}

// Torch allows the kernels of meta to be replaced.
TORCH_LIBRARY_IMPL(aten, Meta, library) { library.impl("add.Tensor", add_on_meta); }

}  // namespace

EngineSumsInPlace::EngineSumsInPlace()
    : callback_(at::addThreadLocalCallback(at::RecordFunctionCallback(&enter_function, &leave_function)
                                               .scopes({at::RecordScope::BACKWARD_FUNCTION}))) {
  ++scopes;
}

EngineSumsInPlace::~EngineSumsInPlace() {
  --scopes;
  at::removeCallback(callback_);
}

}  // namespace kiln
