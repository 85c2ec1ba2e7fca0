#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>

#include <hwy/aligned_allocator.h>
#include <algorithm>

#include "core/aten.h"
#include "core/error.h"
#include "core/scratch.h"
#include "core/tensors.h"
#include "core/text/some_of.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/varlen_attention.h"
#include "ops/kernels.h"
#include "ops/long_attention.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

using Offsets = std::vector<int64_t>;

// Returns head h from token `first` on, of tokens (N, H, d), or of sample b of (B, N, H, d).
cpu::HeadTokens tokens_from(const at::Tensor& tensor, int64_t b, int64_t first, int64_t h) {
  const bool batched = tensor.dim() == 4;
  const int64_t token_stride = tensor.stride(batched ? 1 : 0);
  const int64_t element =
      (batched ? b * tensor.stride(0) : 0) + first * token_stride + h * tensor.stride(batched ? 2 : 1);
  return {.data = static_cast<char*>(tensor.data_ptr()) + element * tensor.element_size(),
          .stride = static_cast<size_t>(token_stride)};
}

// Cuts the queries of a head into pieces, where heads alone would leave cores idle. The cut depends on the
// shapes only, so sums over queries do not depend on the number of threads.
struct Pieces {
  int64_t count, num_queries;  // pieces; queries of each but the last
  explicit Pieces(const at::Tensor& q) {
    constexpr int64_t kEnough = 128, kLeast = 256;  // pieces in all; queries that pay for widening k and v
    const int64_t wanted =
        std::clamp<int64_t>(at::divup(kEnough, q.size(0) * q.size(2)), 1, at::divup(q.size(1), kLeast));
    constexpr int64_t kBlock = cpu::kRaggedQueries;
    num_queries = at::divup(at::divup(q.size(1), wanted), kBlock) * kBlock;
    count = at::divup(q.size(1), num_queries);
  }
};

// One piece of a head's queries.
struct Piece {
  int64_t b, h, index, first_query;
  cpu::RaggedHead head;
};

// Calls body(piece, scratch) for all pieces. scratch_floats(head_dim, rows) returns the floats that one
// needs.
template <class Scratch, class Body>
void for_each_piece(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Offsets& offsets,
                    double scale, const Scratch& scratch_floats, const Body& body) {
  const Pieces pieces(q);
  const int64_t num_heads = q.size(2);
  int64_t most_rows = 0;
  for (int64_t b = 0; b < q.size(0); ++b) most_rows = std::max(most_rows, offsets[b + 1] - offsets[b]);
  kLoop.on(q)(q.size(0) * pieces.count * num_heads, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = hwy::AllocateAligned<float>(
        scratch_floats(static_cast<size_t>(q.size(3)), static_cast<size_t>(most_rows)));
    if (!scratch)
      fail("ragged_attention", "expected scratch for {} rows, got none: out of memory", most_rows);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i % num_heads, index = i / num_heads % pieces.count, b = i / num_heads / pieces.count,
                    first = index * pieces.num_queries;
      body(Piece{.b = b,
                 .h = h,
                 .index = index,
                 .first_query = first,
                 .head = {.dtype = from_scalar_type(q.scalar_type()),
                          .head_dim = static_cast<size_t>(q.size(3)),
                          .num_queries = static_cast<size_t>(std::min(pieces.num_queries, q.size(1) - first)),
                          .num_rows = static_cast<size_t>(offsets[b + 1] - offsets[b]),
                          .scale = static_cast<float>(scale),
                          .q = tokens_from(q, b, first, h),
                          .k = tokens_from(k, b, offsets[b], h),
                          .v = tokens_from(v, b, offsets[b], h)}},
           scratch.get());
    }
  });
}

// Sums the pieces (pieces, T, H, d) of a gradient of rows.
void sum_pieces(const at::Tensor& pieces, const at::Tensor& sum) {
  const int64_t width = sum.size(1) * sum.size(2);
  kLoop.on(sum)(sum.size(0), at::divup(16384, width), [&](int64_t begin, int64_t end) {
    cpu::sum_partials(pieces.const_data_ptr<float>() + begin * width, static_cast<size_t>(pieces.size(0)),
                      static_cast<size_t>(sum.numel()),
                      static_cast<char*>(sum.data_ptr()) + begin * width * sum.element_size(),
                      from_scalar_type(sum.scalar_type()), static_cast<size_t>((end - begin) * width));
  });
}

// Saves q, k and v. The probabilities are as cheap to compute again as to keep.
struct RaggedAttention : torch::autograd::Function<RaggedAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q_in, const at::Tensor& k_in,
                            const at::Tensor& v_in, const Offsets& offsets, double scale) {
    const ScratchScope scope(Scratch::kAttention);
    OpMark mark("kiln::ragged_attention", q_in, k_in, v_in);
    const at::Tensor q = unit_last(q_in), k = unit_last(k_in), v = unit_last(v_in);
    const at::Tensor out = at::empty(q.sizes(), q.options());  // (B, N, H, d)
    ctx->save_for_backward({q, k, v});
    ctx->saved_data["offsets"] = offsets;
    ctx->saved_data["scale"] = scale;
    for_each_piece(
        q, k, v, offsets, scale, cpu::ragged_attention_scratch, [&](const Piece& piece, float* scratch) {
          cpu::ragged_attention(piece.head, tokens_from(out, piece.b, piece.first_query, piece.h), scratch);
        });
    mark.outputs(out);
    return out.flatten(2);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const ScratchScope scope(Scratch::kAttention);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const Offsets offsets = ctx->saved_data["offsets"].toIntVector();
    const double scale = ctx->saved_data["scale"].toDouble();
    OpMark mark("kiln::ragged_attention_backward", grads[0], q, k, v);
    const at::Tensor grad = grads[0].contiguous().view(q.sizes());
    const at::Tensor grad_q = at::empty(q.sizes(), q.options());
    const at::Tensor grad_k = at::empty(k.sizes(), k.options()), grad_v = at::empty(v.sizes(), v.options());
    // With one piece per head, the sums of that piece are the gradients.
    const int64_t num_pieces = Pieces(q).count;
    at::Tensor pieces_k = grad_k.unsqueeze(0), pieces_v = grad_v.unsqueeze(0);
    if (num_pieces > 1) {
      const std::vector<int64_t> sizes = {num_pieces, k.size(0), k.size(1), k.size(2)};
      pieces_k = at::empty(sizes, k.options().dtype(at::kFloat));
      pieces_v = at::empty(sizes, pieces_k.options());
    }
    for_each_piece(
        q, k, v, offsets, scale, cpu::ragged_attention_grad_scratch, [&](const Piece& piece, float* scratch) {
          const int64_t row = offsets[piece.b];
          cpu::ragged_attention_grad(piece.head, tokens_from(grad, piece.b, piece.first_query, piece.h),
                                     tokens_from(grad_q, piece.b, piece.first_query, piece.h),
                                     tokens_from(pieces_k, piece.index, row, piece.h),
                                     tokens_from(pieces_v, piece.index, row, piece.h),
                                     from_scalar_type(pieces_k.scalar_type()), scratch);
        });
    if (num_pieces > 1) {
      sum_pieces(pieces_k, grad_k);
      sum_pieces(pieces_v, grad_v);
    }
    zero_unowned(grad_k, offsets);
    zero_unowned(grad_v, offsets);
    mark.outputs(grad_q, grad_k, grad_v);
    return {grad_q, grad_k, grad_v, at::Tensor(), at::Tensor()};
  }
};

void check_ragged(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Offsets& offsets) {
  const auto fits = [&](const at::Tensor& rows) {
    return rows.dim() == 3 && rows.size(1) == q.size(2) && rows.size(2) == q.size(3) &&
           rows.scalar_type() == q.scalar_type();
  };
  if (q.dim() != 4 || !fits(k) || !fits(v) || k.size(0) != v.size(0))
    fail("ragged_attention", "expected q (B, N, H, d) and k, v (T, H, d) of one dtype, got ({}), ({}), ({})",
         fmt::join(q.sizes(), ", "), fmt::join(k.sizes(), ", "), fmt::join(v.sizes(), ", "));
  bool ascending = static_cast<int64_t>(offsets.size()) == q.size(0) + 1 && offsets.front() >= 0 &&
                   offsets.back() <= k.size(0);
  for (size_t b = 1; b < offsets.size(); ++b) ascending = ascending && offsets[b - 1] <= offsets[b];
  if (!ascending)
    fail("ragged_attention", "expected {} ascending offsets within {} rows, got {}", q.size(0) + 1, k.size(0),
         some_of(offsets));
}

// A dry run assumes a GPU of compute capability 8.0.
constexpr Kernel<int()> kCapability{.cuda = cuda::capability, .planned_cuda = [] { return 80; }};

// Returns kNone as well where q is not on a GPU.
AttentionEngine gpu_engine(const at::Tensor& q) {
  const auto capability = kCapability.on(q);
  return capability && q.numel() > 0 ? varlen_engine(q.scalar_type(), q.size(3), capability())
                                     : AttentionEngine::kNone;
}

}  // namespace

at::Tensor unit_last(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

at::Tensor ragged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, double scale) {
  return caption_attention(q, k, v, offsets, /*device_offsets=*/{}, scale);
}

at::Tensor caption_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const std::vector<int64_t>& offsets, const at::Tensor& device_offsets,
                             double scale) {
  check_ragged(q, k, v, offsets);
  const bool has_rows = offsets.front() < offsets.back();
  if (const AttentionEngine engine = gpu_engine(q); engine != AttentionEngine::kNone && has_rows)
    return varlen_attention(q, k, v, offsets, device_offsets, scale, engine);
  if (!has_cpu_kernel(q) || q.numel() == 0) return reference::ragged_attention(q, k, v, offsets, scale);
  return prefers_long_attention(q, offsets) ? long_attention(q, k, v, offsets, scale)
                                            : RaggedAttention::apply(q, k, v, offsets, scale);
}

at::Tensor cross_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  Offsets offsets;
  for (int64_t b = 0; b <= q.size(0); ++b) offsets.push_back(b * k.size(1));
  const bool on_gpu = k.size(1) > 0 && gpu_engine(q) != AttentionEngine::kNone;
  return caption_attention(q, k.flatten(0, 1), v.flatten(0, 1), offsets,
                           on_gpu ? even_offsets(q.size(0), k.size(1), q.device()) : at::Tensor(), scale);
}

namespace reference {

at::Tensor ragged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& offsets, double scale) {
  const at::ScalarType dtype = q.scalar_type();
  const at::ScalarType math = dtype == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<at::Tensor> samples;
  for (int64_t b = 0; b < q.size(0); ++b) {
    if (offsets[b] == offsets[b + 1]) {
      samples.push_back(at::zeros({1, q.size(1), q.size(2) * q.size(3)}, q.options()));
      continue;
    }
    const at::Tensor scores =
        at::matmul(sample_tokens(q, b).to(math), sample_rows(k, offsets, b).to(math).transpose(-2, -1)) *
        scale;
    const at::Tensor attended = at::matmul(at::softmax(scores, -1), sample_rows(v, offsets, b).to(math));
    samples.push_back(attended.transpose(1, 2).flatten(2).to(dtype));
  }
  return samples.empty() ? q.flatten(2) : at::cat(samples);
}

}  // namespace reference
}  // namespace kiln::ops
