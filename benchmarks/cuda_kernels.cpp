// Kiln's own operations on a GPU, at the shapes of a DiT block: time, and the share of what the card can do,
// both measured here - bytes against a large copy, multiplications against a large square product.
//
//     build/benchmarks/bench_cuda_kernels [OPTION] [batch] [tokens] [width]  (32 256 1152: DiT-XL/2)
//     --once         each operation once, for a profiler that reads the kernels' counters
//     --algorithms   the time of each of cuBLASLt's algorithms for the products with an epilogue
//     --rehearse     on the CPU, to see that it runs: its numbers mean nothing
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "ops/attention.h"
#include "ops/caption_attention.h"
#include "ops/cuda/launch.h"
#include "ops/gelu.h"
#include "ops/matrix_products.h"
#include "ops/ops.h"

namespace kiln {
namespace {

constexpr auto kLow = at::kBFloat16;
at::Device device(at::kCUDA, 0);
bool is_once = false;

at::Tensor random(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes, at::TensorOptions(device).dtype(at::kFloat)).to(dtype);
}

double seconds_on_cpu(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Median of some runs, in seconds, by the device's own clock. Each run is long enough to hide its launch.
double seconds_of(const std::function<void()>& work) {
  if (device.is_cpu()) return seconds_on_cpu(work);
  constexpr int kWarmUp = 5, kRuns = 21, kTimes = 10;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device);
  for (int i = 0; i < (is_once ? 0 : kWarmUp); ++i) work();
  std::vector<double> seconds;
  for (int run = 0; run < (is_once ? 1 : kRuns); ++run) {
    c10::Event begin(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT),
        end(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
    begin.record(stream);
    const int times = is_once ? 1 : kTimes;
    for (int i = 0; i < times; ++i) work();
    end.record(stream);
    end.synchronize();
    seconds.push_back(begin.elapsedTime(end) / 1e3 / times);
  }
  const auto middle = seconds.begin() + static_cast<int64_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

struct Ceilings {
  double bytes_per_s = 0, flops = 0;
};

Ceilings measure_ceilings() {
  Ceilings ceilings;
  const bool is_small = is_once || device.is_cpu();
  const at::Tensor from = random({int64_t{1} << (is_small ? 16 : 29)}, kLow), to = at::empty_like(from);
  ceilings.bytes_per_s = 2.0 * static_cast<double>(from.nbytes()) / seconds_of([&] { to.copy_(from); });
  const int64_t side = is_small ? 256 : 8192;
  const at::Tensor a = random({side, side}, kLow), b = random({side, side}, kLow);
  at::Tensor c = at::empty_like(a);
  ceilings.flops = 2.0 * side * side * side / seconds_of([&] { at::mm_out(c, a, b); });
  return ceilings;
}

// Forward and backward of an op apart: what a backward times is the graph of one forward, kept.
class Table {
 public:
  explicit Table(const Ceilings& ceilings) : ceilings_(ceilings) {
    fmt::print(
        "| operation | us | of copy bandwidth ({:.0f} GB/s) | of square product ({:.0f} TFLOP/s) "
        "|\n|---|---|---|---|\n",
        ceilings.bytes_per_s / 1e9, ceilings.flops / 1e12);
  }
  void moved(const std::string& name, double bytes, const std::function<void()>& work) const {
    const double seconds = seconds_of(work);
    fmt::print("| {} | {:.1f} | {:.0f} % | |\n", name, seconds * 1e6,
               100 * bytes / seconds / ceilings_.bytes_per_s);
  }
  void multiplied(const std::string& name, double flops, const std::function<void()>& work) const {
    const double seconds = seconds_of(work);
    fmt::print("| {} | {:.1f} | | {:.0f} % |\n", name, seconds * 1e6,
               100 * flops / seconds / ceilings_.flops);
  }

 private:
  Ceilings ceilings_;
};

// Gradients of every leaf, without a new forward.
std::function<void()> backward_of(const std::vector<at::Tensor>& outputs,
                                  const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> grads;
  for (const at::Tensor& output : outputs) grads.push_back(at::randn_like(output));
  return [=] { torch::autograd::grad(outputs, leaves, grads, /*retain_graph=*/true); };
}

std::vector<at::Tensor> as_leaves(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) tensor.requires_grad_();
  return tensors;
}

void rows_of_tokens(const Table& table, int64_t batch, int64_t tokens, int64_t width) {
  const std::vector<at::Tensor> in =
      as_leaves({random({batch, tokens, width}, at::kFloat), random({batch, tokens, width}, kLow),
                 random({batch, width}, kLow), random({batch, width}, kLow), random({batch, width}, kLow)});
  const double elements = static_cast<double>(in[0].numel());
  const auto branch = [&] { return ops::adaln_branch(in[0], in[2], in[3], 1e-6, kLow); };
  const auto both = [&] { return ops::gated_residual_adaln(in[0], in[4], in[1], in[2], in[3], 1e-6, kLow); };
  const auto residual = [&] { return ops::gated_residual(in[0], in[4], in[1]); };
  {
    const at::NoGradGuard no_grad;
    table.moved("adaLN", elements * (4 + 2), [&] { branch(); });
    table.moved("gated residual + adaLN", elements * (4 + 2 + 4 + 2), [&] { both(); });
    table.moved("gated residual", elements * (4 + 2 + 4), [&] { residual(); });
  }
  const ops::NormedResidual one = branch(), two = both();
  table.moved("adaLN backward with the residual's gradient", elements * (4 + 2 + 4 + 4),
              backward_of({one.x, one.normed}, {in[0], in[2], in[3]}));
  table.moved("gated residual + adaLN backward", elements * (4 + 2 + 4 + 2 + 4 + 2),
              backward_of({two.x, two.normed}, in));
  table.moved("gated residual backward", elements * (4 + 2 + 2), backward_of({residual()}, {in[1], in[4]}));
}

void products(const Table& table, int64_t rows, int64_t width) {
  const int64_t hidden_size = 4 * width;
  const at::Tensor x = random({rows, width}, kLow), weight = random({hidden_size, width}, kLow),
                   bias = random({hidden_size}, kLow), hidden = random({rows, hidden_size}, kLow),
                   out_weight = random({width, hidden_size}, kLow), grad = random({rows, width}, kLow);
  const at::Tensor weight_memory = at::empty_like(out_weight), bias_memory = at::empty({width}, x.options());
  at::Tensor activation = at::empty_like(hidden);
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(width * hidden_size);
  const double bytes = static_cast<double>(hidden.nbytes());
  table.multiplied("x W^T + b", flops, [&] { ops::affine(x, weight, bias); });
  table.multiplied("gelu(x W^T + b), hidden kept", flops, [&] { ops::affine_gelu(x, weight, bias); });
  table.multiplied("dY W", flops, [&] { ops::affine_grad_rows(grad, out_weight); });
  table.multiplied("dY W gelu'(h), bias gradient", flops,
                   [&] { ops::affine_grad_rows_gelu(grad, out_weight, hidden, {}); });
  table.multiplied("dY^T X, bias gradient, in flat memory", flops, [&] {
    ops::affine_grads(grad, hidden, {weight_memory, bias_memory});
  });
  if (ops::cuda::capability() >= 89)
    table.multiplied("x W^T + b in fp8, conversions included (of bf16's product)", flops, [&] {
      const at::NoGradGuard no_grad;
      ops::linear(x, weight, bias, kLow, ops::Products::kFp8);
    });
  table.moved("gelu", 2 * bytes, [&] { ops::gelu_tanh_forward(hidden, activation); });
  table.moved("gelu backward", 3 * bytes, [&] { ops::gelu_tanh_backward(activation, hidden, activation); });
}

void attention(const Table& table, int64_t batch, int64_t tokens, int64_t width) {
  const int64_t heads = 16, head_dim = width / heads;
  if (head_dim % 8 != 0 || device.is_cpu()) return;
  const at::Tensor qkv = random({batch, tokens, 3, heads, head_dim}, kLow),
                   grad = random({batch, tokens, width}, kLow);
  const double scale = 0.1, flops = 4.0 * static_cast<double>(batch * heads * tokens) *
                                    static_cast<double>(tokens * head_dim);
  const ops::AttentionEngine engine = ops::cuda::attention_engine(qkv, scale);
  const ops::AttentionResult chosen = ops::cuda::attention(qkv, scale, engine);
  table.multiplied("attention as chosen", flops, [&] { ops::cuda::attention(qkv, scale, engine); });
  table.multiplied("attention backward as chosen", 2.5 * flops, [&] {
    ops::cuda::attention_backward(grad, qkv, chosen, {.scale = scale, .engine = engine});
  });
  const ops::AttentionResult result = ops::cuda::cudnn_attention(qkv, scale);
  table.multiplied("attention, cuDNN", flops, [&] { ops::cuda::cudnn_attention(qkv, scale); });
  table.multiplied("attention backward, cuDNN", 2.5 * flops,
                   [&] { ops::cuda::cudnn_attention_backward(grad, qkv, result, scale); });
  if (ops::cuda::cudnn_packed_backward(grad, qkv, result, scale).defined())
    table.multiplied("attention backward, cuDNN, into packed memory", 2.5 * flops,
                     [&] { ops::cuda::cudnn_packed_backward(grad, qkv, result, scale); });
  const ops::AttentionGrads grads = ops::cuda::cudnn_attention_backward(grad, qkv, result, scale);
  table.moved("packing dq, dk, dv", 2.0 * static_cast<double>(qkv.nbytes()),
              [&] { ops::cuda::packed(grads); });
}

// Captions of 60 to 120 rows: in one call, and as its reference does, one sample after another.
void attention_to_captions(const Table& table, int64_t batch, int64_t tokens, int64_t width) {
  constexpr int64_t kHeads = 16, kFewest = 60;
  const int64_t head_dim = width / kHeads;
  if (head_dim % 8 != 0) return;
  std::vector<int64_t> offsets{0};
  for (int64_t b = 0; b < batch; ++b) offsets.push_back(offsets.back() + kFewest + b * 37 % (kFewest + 1));
  const at::Tensor on_device = at::tensor(offsets, at::kInt).to(device);
  const std::vector<int64_t> rows{offsets.back(), kHeads, head_dim};
  const std::vector<at::Tensor> in =
      as_leaves({random({batch, tokens, kHeads, head_dim}, kLow), random(rows, kLow), random(rows, kLow)});
  const double scale = 0.1,
               flops = 4.0 * static_cast<double>(tokens * offsets.back()) * static_cast<double>(width);
  const auto attend = [&] { return ops::caption_attention(in[0], in[1], in[2], offsets, on_device, scale); };
  {
    const at::NoGradGuard no_grad;
    table.multiplied("attention to captions", flops, [&] { attend(); });
    table.multiplied("attention to captions, sample by sample", flops,
                     [&] { ops::reference::ragged_attention(in[0], in[1], in[2], offsets, scale); });
  }
  table.multiplied("attention to captions, backward", 2.5 * flops, backward_of({attend()}, in));
}

void flat_memory(const Table& table) {
  const int64_t n = int64_t{1} << (device.is_cpu() ? 16 : 27);
  const auto f32 = [&] { return random({n}, at::kFloat); };
  at::Tensor master = f32(), m = f32(), v = f32().square(),
             compute = at::empty({n}, master.options().dtype(kLow));
  const at::Tensor grad = random({n}, kLow);
  std::vector<ops::EmaSlice> emas{{f32(), 0.9999}};
  const ops::AdamWStep step{
      .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0, .step = 9, .grad_scale = 1};
  const double count = static_cast<double>(n);
  table.moved("sum of squares", 2 * count, [&] { ops::sum_of_squares(grad); });
  table.moved("AdamW + EMA + cast", count * (2 + 8 * 4 + 2),
              [&] { ops::adamw_ema_step_(master, grad, m, v, emas, &compute, step); });
}

// Of a U-Net, channels-last, at two of Stable Diffusion's levels: sums, then the result, each a pass over x.
void pictures(const Table& table, int64_t batch) {
  constexpr int64_t kGroups = 32;
  for (const auto& [channels, side] : {std::pair<int64_t, int64_t>{320, 64}, {1280, 16}}) {
    const int64_t extent = device.is_cpu() ? 4 : side;
    const std::vector<at::Tensor> in =
        as_leaves({random({batch, channels, extent, extent}, kLow).contiguous(at::MemoryFormat::ChannelsLast),
                   random({channels}, kLow), random({channels}, kLow)});
    const double bytes = static_cast<double>(in[0].nbytes());
    const auto normed = [&] { return ops::group_norm_silu(in[0], kGroups, in[1], in[2], 1e-5, true); };
    const std::string shape = fmt::format(", {} channels of {} x {}", channels, extent, extent);
    {
      const at::NoGradGuard no_grad;
      table.moved("group norm + SiLU" + shape, 3 * bytes, [&] { normed(); });
    }
    table.moved("group norm + SiLU backward" + shape, 5 * bytes, backward_of({normed()}, in));
  }
}

// The times of cuBLASLt's algorithms for each product with an epilogue, in the order in which it proposes
// them. Ends at the first one that it lacks.
void algorithms(int64_t rows, int64_t width) {
  const int64_t hidden_size = 4 * width;
  const at::Tensor x = random({rows, width}, kLow), weight = random({hidden_size, width}, kLow),
                   bias = random({hidden_size}, kLow), hidden = random({rows, hidden_size}, kLow),
                   out_weight = random({width, hidden_size}, kLow), grad = random({rows, width}, kLow);
  const std::pair<const char*, std::function<void()>> products[] = {
      {"gelu(x W^T + b), hidden kept", [&] { ops::affine_gelu(x, weight, bias); }},
      {"dY W gelu'(h), bias gradient", [&] { ops::affine_grad_rows_gelu(grad, out_weight, hidden, {}); }},
      {"dY^T X, bias gradient", [&] { ops::affine_grads(grad, hidden, {}); }}};
  const auto num_refused = [] {
    int64_t refused = 0;
    for (const ops::cuda::EpilogueCount& count : ops::cuda::epilogue_counts()) refused += count.refused;
    return refused;
  };
  fmt::print("| product | us of each algorithm | the first / the best |\n|---|---|---|\n");
  for (const auto& [name, work] : products) {
    std::vector<double> us;
    for (int nth = 0; nth < ops::cuda::kNumEpilogueAlgorithms; ++nth) {
      ops::cuda::take_epilogue_algorithm(nth);
      const int64_t before = num_refused();
      work();
      if (num_refused() > before) break;
      us.push_back(1e6 * seconds_of(work));
    }
    ops::cuda::take_epilogue_algorithm(0);
    if (us.empty())
      fmt::print("| {} | refused | |\n", name);
    else
      fmt::print("| {} | {:.1f} | {:.3f} |\n", name, fmt::join(us, ", "),
                 us[0] / *std::ranges::min_element(us));
  }
}

int run(int argc, char** argv) {
  const std::string option = argc > 1 && std::strncmp(argv[1], "--", 2) == 0 ? argv[1] : "";
  const int first = option.empty() ? 1 : 2;
  if (option == "--rehearse") device = at::kCPU;
  is_once = option == "--once";
  if (device.is_cuda() && (!at::hasCUDA() || !ops::cuda::kernels_compiled())) {
    fmt::print(stderr, "bench_cuda_kernels: no GPU, or a build without CUDA\n");
    return 1;
  }
  const auto extent = [&](int index, int64_t usual) {
    return argc > first + index ? std::atoll(argv[first + index]) : usual;
  };
  const int64_t batch = extent(0, 32), tokens = extent(1, 256), width = extent(2, 1152);
  at::manual_seed(1);
  if (option == "--algorithms" || option == "--rehearse") algorithms(batch * tokens, width);
  if (option == "--algorithms") return 0;
  const Table table(measure_ceilings());
  rows_of_tokens(table, batch, tokens, width);
  products(table, batch * tokens, width);
  attention(table, batch, tokens, width);
  attention_to_captions(table, batch, tokens, width);
  pictures(table, batch);
  flat_memory(table);
  return 0;
}

}  // namespace
}  // namespace kiln

int main(int argc, char** argv) {
  try {
    return kiln::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_cuda_kernels: {}\n", error.what());
    return 1;
  }
}
