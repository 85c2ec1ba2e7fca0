#include "ops/op_recorder.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>
#include <unordered_map>

#include "core/aten.h"

namespace kiln {

namespace {

constexpr double kLeastSeconds = 1e-6;  // the least of any operation: nothing is free

enum class OpKind {
  kComposed,  // made of other operations, which count instead
  kFree,      // moves no data
  kWhole,     // counts as one operation, with all that it calls
};

using Tensors = std::vector<at::Tensor>;

const std::set<std::string_view> kFreeOps = {"aten::empty",         "aten::empty_like",
                                             "aten::empty_strided", "aten::_efficientzerotensor",
                                             "aten::new_empty",     "aten::new_empty_strided",
                                             "aten::resize_",       "aten::set_",
                                             "aten::_unsafe_view",  "aten::_local_scalar_dense",
                                             "aten::record_stream", "aten::result_type",
                                             "aten::lift_fresh",    "aten::unbind",
                                             "aten::split",         "aten::split_with_sizes",
                                             "aten::is_nonzero",    "aten::detach_",
                                             "aten::requires_grad_"};
// These overwrite their first argument without reading it.
const std::set<std::string_view> kOverwriting = {"aten::copy_", "aten::zero_", "aten::fill_"};
// These read as many elements of their first argument as they return.
const std::set<std::string_view> kGathering = {"aten::gather", "aten::index", "aten::index_select",
                                               "aten::embedding"};

void add_tensors(const c10::IValue& value, Tensors& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) add_tensors(element, tensors);
  }
}

Tensors tensors_of(c10::ArrayRef<const c10::IValue> values) {
  Tensors tensors;
  for (const c10::IValue& value : values) add_tensors(value, tensors);
  return tensors;
}

// Returns the bytes in memory, where an expanded dimension lies once.
double bytes_of(const at::Tensor& tensor) {
  double bytes = static_cast<double>(tensor.element_size());
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.stride(d) != 0 || tensor.size(d) == 0) bytes *= static_cast<double>(tensor.size(d));
  return bytes;
}

// Counts each tensor once, however often it is named.
double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (auto tensor = tensors.begin(); tensor != tensors.end(); ++tensor)
    if (std::none_of(tensors.begin(), tensor,
                     [&](const at::Tensor& other) { return other.is_same(*tensor); }))
      bytes += bytes_of(*tensor);
  return bytes;
}

void set_product(OpRecord& op, int64_t m, int64_t n, int64_t k) {
  op.op_class = OpClass::kMatmul;
  op.m = m, op.n = n, op.k = k;
  op.flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

// queries: (B, H, N, d), over `num_keys` keys. Backward makes five products where forward makes two.
void set_attention(OpRecord& op, const at::Tensor& queries, int64_t num_keys, bool backward) {
  const int64_t heads = queries.size(0) * queries.size(1), num_tokens = queries.size(2),
                dim = queries.size(3);
  op.op_class = OpClass::kAttention;
  op.m = heads, op.n = num_tokens, op.k = dim;
  op.flops =
      (backward ? 10.0 : 4.0) * static_cast<double>(heads * num_tokens) * static_cast<double>(num_keys * dim);
}

// Forward reads q, k, v, ..., and backward the result's gradient, q, k, v, ...
void set_fused_attention(OpRecord& op, const Tensors& in) {
  set_attention(op, in[0], in[1].size(2), /*backward=*/false);
}
void set_fused_attention_backward(OpRecord& op, const Tensors& in) {
  set_attention(op, in[1], in[2].size(2), /*backward=*/true);
}

// qkv: (B, N, 3, H, d).
void set_packed_attention(OpRecord& op, const at::Tensor& qkv, bool backward) {
  set_attention(op, qkv.select(2, 0).transpose(1, 2), qkv.size(1), backward);
}

// q: (B, N, H, d), k: (T, H, d). Each key belongs to one sample.
void set_ragged_attention(OpRecord& op, const at::Tensor& q, const at::Tensor& k, bool backward) {
  set_attention(op, q.transpose(1, 2), /*num_keys=*/1, backward);
  op.flops *= static_cast<double>(k.size(0)) / static_cast<double>(std::max<int64_t>(q.size(0), 1));
}

// Describes a convolution as the product (pixels, in * kernel) x (in * kernel, out). The outputs tell the
// rest.
void set_convolution(OpRecord& op, const at::Tensor& weight, int64_t pixels) {
  set_product(op, pixels, weight.size(0), weight.numel() / weight.size(0));
  op.op_class = OpClass::kConvolution;
}

// The first operand meets a weight.
const std::set<std::string_view> kLayers = {"kiln::affine", "kiln::affine_gelu", "aten::convolution",
                                            "kiln::conv_forward", "kiln::glu_depthwise_conv"};
// A CPU's kernels that make several products at once and are priced by their bytes.
const std::set<std::string_view> kManyProducts = {"kiln::glu_depthwise_conv", "kiln::relu_linear_attention"};

Tensors operands_of(const OpRecord& op, c10::ArrayRef<const c10::IValue> inputs) {
  if (op.op_class == OpClass::kElementwise && !kManyProducts.contains(op.name)) return {};
  Tensors tensors = tensors_of(inputs);
  if (kLayers.contains(op.name)) tensors.resize(1);
  return tensors;
}

using Describe = void (*)(OpRecord& op, const Tensors& in);
const std::unordered_map<std::string_view, Describe>& multiplying_ops() {
  static const std::unordered_map<std::string_view, Describe> table = {
      {"kiln::affine",
       [](OpRecord& op, const Tensors& in) { set_product(op, in[0].size(0), in[1].size(0), in[0].size(1)); }},
      {"kiln::affine_gelu",
       [](OpRecord& op, const Tensors& in) { set_product(op, in[0].size(0), in[1].size(0), in[0].size(1)); }},
      {"kiln::affine_grad_rows_gelu",
       [](OpRecord& op, const Tensors& in) { set_product(op, in[0].size(0), in[1].size(1), in[0].size(1)); }},
      {"kiln::affine_grad_rows",
       [](OpRecord& op, const Tensors& in) { set_product(op, in[0].size(0), in[1].size(1), in[0].size(1)); }},
      {"kiln::affine_grad_weight",
       [](OpRecord& op, const Tensors& in) { set_product(op, in[0].size(1), in[1].size(1), in[0].size(0)); }},
      {"kiln::packed_attention",
       [](OpRecord& op, const Tensors& in) { set_packed_attention(op, in[0], /*backward=*/false); }},
      {"kiln::packed_attention_backward",
       [](OpRecord& op, const Tensors& in) { set_packed_attention(op, in[1], /*backward=*/true); }},
      {"kiln::ragged_attention",
       [](OpRecord& op, const Tensors& in) { set_ragged_attention(op, in[0], in[1], /*backward=*/false); }},
      {"kiln::ragged_attention_backward",
       [](OpRecord& op, const Tensors& in) { set_ragged_attention(op, in[1], in[2], /*backward=*/true); }},
      {"aten::mm",
       [](OpRecord& op, const Tensors& in) { set_product(op, in[0].size(0), in[1].size(1), in[0].size(1)); }},
      {"aten::addmm",
       [](OpRecord& op, const Tensors& in) { set_product(op, in[1].size(0), in[2].size(1), in[1].size(1)); }},
      {"aten::bmm",
       [](OpRecord& op, const Tensors& in) {
         set_product(op, in[0].size(0) * in[0].size(1), in[1].size(2), in[0].size(2));
       }},
      {"aten::baddbmm",
       [](OpRecord& op, const Tensors& in) {
         set_product(op, in[1].size(0) * in[1].size(1), in[2].size(2), in[1].size(2));
       }},
      {"mkldnn::_linear_pointwise",
       [](OpRecord& op, const Tensors& in) {
         set_product(op, in[0].numel() / in[0].size(-1), in[1].size(0), in[1].size(1));
       }},
      {"kiln::fused_attention", set_fused_attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", set_fused_attention},
      {"aten::_scaled_dot_product_flash_attention", set_fused_attention},
      {"aten::_scaled_dot_product_efficient_attention", set_fused_attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", set_fused_attention_backward},
      {"aten::_scaled_dot_product_flash_attention_backward", set_fused_attention_backward},
      {"aten::_scaled_dot_product_efficient_attention_backward", set_fused_attention_backward},
      {"aten::convolution",
       [](OpRecord& op, const Tensors& in) { set_convolution(op, in[1], /*pixels=*/0); }},
      {"aten::convolution_backward",
       [](OpRecord& op, const Tensors& in) { set_convolution(op, in[2], in[0].numel() / in[0].size(1)); }},
      {"kiln::conv_forward",
       [](OpRecord& op, const Tensors& in) { set_convolution(op, in[1], /*pixels=*/0); }},
      {"kiln::conv_grad_x",
       [](OpRecord& op, const Tensors& in) { set_convolution(op, in[1], in[0].numel() / in[0].size(1)); }},
      {"kiln::conv_grad_weight",
       [](OpRecord& op, const Tensors& in) { set_convolution(op, in[2], in[0].numel() / in[0].size(1)); }}};
  return table;
}

OpKind look_up(std::string_view name, std::string_view overload) {
  if (name.starts_with("kiln::")) return OpKind::kWhole;
  if (kFreeOps.contains(name)) return OpKind::kFree;
  const auto op = c10::Dispatcher::singleton().findOp({std::string(name), std::string(overload)});
  if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
    return OpKind::kComposed;
  const auto& results = op->schema().returns();
  const bool is_view = !results.empty() && std::ranges::all_of(results, [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
  return is_view ? OpKind::kFree : OpKind::kWhole;
}

// Returns the kind of an operator from its name and overload, as torch's RecordFunction gives them.
OpKind kind_of(std::string_view name, std::string_view overload) {
  thread_local std::unordered_map<std::string, OpKind> known;
  std::string key;
  key.reserve(name.size() + overload.size() + 1);
  key.append(name).append(".").append(overload);
  const auto [entry, is_new] = known.try_emplace(std::move(key), OpKind::kComposed);
  if (is_new) entry->second = look_up(name, overload);
  return entry->second;
}

// Fills in what the inputs say about the operation `op.name`.
void describe_inputs(OpRecord& op, std::string_view overload, c10::ArrayRef<const c10::IValue> inputs) {
  Tensors tensors = tensors_of(inputs);
  if (tensors.empty()) return;
  op.dtype = tensors[0].scalar_type();
  op.from = kOverwriting.contains(op.name) && tensors.size() > 1 ? tensors[1].scalar_type() : op.dtype;
  if (op.dtype == at::kFloat8_e5m2) op.dtype = at::kFloat8_e4m3fn;  // one rate for both
  if (const auto entry = multiplying_ops().find(op.name); entry != multiplying_ops().end())
    entry->second(op, tensors);
  // The last argument of f(..., out) is written only.
  if (overload.ends_with("out") && tensors.size() > 1) tensors.pop_back();
  if (kOverwriting.contains(op.name) || kGathering.contains(op.name)) tensors.erase(tensors.begin());
  op.bytes = bytes_of(tensors);
  if (op.op_class == OpClass::kElementwise)
    for (const at::Tensor& tensor : tensors) op.k = std::max(op.k, tensor.numel());
}

// Fills in what the outputs say.
void describe_outputs(OpRecord& op, c10::ArrayRef<c10::IValue> outputs) {
  const Tensors tensors = tensors_of(c10::ArrayRef<const c10::IValue>(outputs.data(), outputs.size()));
  if (op.op_class == OpClass::kElementwise) {  // sums, where a result is smaller than what is read
    int64_t smallest = op.k;
    for (const at::Tensor& tensor : tensors) smallest = std::min(smallest, tensor.numel());
    op.k = smallest > 0 && smallest < op.k ? op.k / smallest : 0;
  }
  if (tensors.empty()) {
    if (op.op_class == OpClass::kMatmul)
      op.bytes += static_cast<double>(op.m * op.n) * static_cast<double>(c10::elementSize(op.dtype));
    return;
  }
  if (op.op_class == OpClass::kConvolution) {
    if (op.m == 0)
      op.m = tensors[0].numel() / tensors[0].size(1);
    else  // a product for the gradient of the pixels and of the weight
      op.m *= std::ranges::count_if(tensors, [](const at::Tensor& tensor) { return tensor.dim() > 1; });
    op.flops = 2.0 * static_cast<double>(op.m * op.n) * static_cast<double>(op.k);
  }
  op.bytes += bytes_of(tensors) * (kGathering.contains(op.name) ? 2 : 1);
  if (op.op_class == OpClass::kElementwise) op.dtype = tensors[0].scalar_type();
}

bool is_checked(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) && tensor.element_size() > 1 && tensor.numel() > 0;
}

int64_t num_infinite(const at::Tensor& tensor) {
  return tensor.numel() - at::isfinite(tensor).sum().item<int64_t>();
}

// Counts infinite results of an operation whose inputs are finite. An operation in place shows its inputs
// only after it has run, so its overflow counts.
void check_values(OpRecord& op, const Tensors& inputs, c10::ArrayRef<c10::IValue> outputs) {
  const at::NoGradGuard no_grad;
  const Tensors results = tensors_of(c10::ArrayRef<const c10::IValue>(outputs.data(), outputs.size()));
  int64_t found = 0;
  for (const at::Tensor& result : results) {
    if (!is_checked(result)) continue;
    const int64_t here = num_infinite(result);
    found += here;
    if (here == 0 && result.element_size() == 2)
      op.largest = std::max(op.largest, result.detach().abs().max().item<double>());
  }
  if (found == 0) return;
  for (const at::Tensor& input : inputs) {
    const bool is_result =
        std::ranges::any_of(results, [&](const at::Tensor& result) { return result.is_same(input); });
    if (!is_result && is_checked(input) && num_infinite(input) > 0) return;
  }
  op.num_overflows = found;
}

}  // namespace

// Callbacks that torch runs around every operation of the thread.
struct OpCallbacks {
  struct Leaf : at::ObserverContext {
    Tensors inputs;  // kept where values are checked: torch gives them only at the start
  };
  // The recorder of this thread's operations. Autograd takes it, with the callbacks, to the thread that runs
  // a GPU's backward, while this one waits.
  struct Owner : c10::DebugInfoBase {
    explicit Owner(OpRecorder& its_recorder) : recorder(its_recorder) {}
    OpRecorder& recorder;
  };
  static constexpr auto kOwner = c10::DebugInfoKind::PRODUCER_INFO;
  static OpRecorder* recorder() {
    auto* owner = static_cast<Owner*>(c10::ThreadLocalDebugInfo::get(kOwner));
    return owner ? &owner->recorder : nullptr;
  }

  template <class Values>
  static const void* first_tensor(const Values& values) {
    return !values.empty() && values[0].isTensor() ? values[0].toTensor().unsafeGetTensorImpl() : nullptr;
  }

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    OpRecorder& r = *recorder();
    if (r.inside_ || kind_of(function.name(), function.overload_name()) != OpKind::kWhole) return nullptr;
    r.inside_ = true;
    r.current_ = {.name = function.name()};
    describe_inputs(r.current_, function.overload_name(), function.inputs());
    if (r.keeps_operands_)
      for (at::Tensor& operand : operands_of(r.current_, function.inputs()))
        r.operands_.push_back(std::move(operand));
    r.first_input_ = first_tensor(function.inputs());
    if (r.timed_) r.started_ = r.now();
    auto leaf = std::make_unique<Leaf>();
    if (r.checks_values_) leaf->inputs = tensors_of(function.inputs());
    return leaf;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    if (!context) return;
    OpRecorder& r = *recorder();
    if (r.timed_) r.current_.seconds = std::chrono::duration<double>(r.now() - r.started_).count();
    if (r.empty_seconds_ > 0)
      r.current_.seconds = std::max(kLeastSeconds, r.current_.seconds - r.empty_seconds_);
    describe_outputs(r.current_, function.outputs());
    if (r.checks_values_) check_values(r.current_, static_cast<Leaf*>(context)->inputs, function.outputs());
    // On meta, sums in place (engine_sums.h) have the name of sums that are not.
    if (r.current_.name == "aten::add" && r.first_input_ == first_tensor(function.outputs()))
      r.current_.name = "aten::add_";
    r.records_.push_back(std::move(r.current_));
    r.inside_ = false;
  }
};

OpRecorder::OpRecorder(const Options& options)
    : timed_(options.timed),
      checks_values_(options.checks_values),
      keeps_operands_(options.keeps_operands),
      device_(options.device) {
  if (OpCallbacks::recorder()) throw std::logic_error("two recorders of operations in one thread");
  if (timed_ && !device_.is_cpu()) measure_empty();
  owner_ =
      std::make_unique<c10::DebugInfoGuard>(OpCallbacks::kOwner, std::make_shared<OpCallbacks::Owner>(*this));
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&OpCallbacks::start, &OpCallbacks::end)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

OpRecorder::~OpRecorder() { at::removeCallback(handle_); }

void OpRecorder::measure_empty() {
  constexpr int kRepeats = 64;
  at::Tensor element = at::zeros({1}, at::TensorOptions(device_));
  empty_seconds_ = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRepeats; ++i) {
    const Clock::time_point begin = now();
    element.zero_();
    empty_seconds_ = std::min(empty_seconds_, std::chrono::duration<double>(now() - begin).count());
  }
}

OpRecorder::Clock::time_point OpRecorder::now() const {
  if (device_.is_cuda()) at::accelerator::synchronizeDevice(device_.index());
  return Clock::now();
}

}  // namespace kiln
