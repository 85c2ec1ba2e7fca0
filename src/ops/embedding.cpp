#include <ATen/ops/bucketize.h>
#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>

#include "core/aten.h"
#include "core/error.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"
#include "ops/planned/planned.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

at::ScalarType result_dtype(const at::Tensor& table) {
  return at::promote_types(table.scalar_type(), at::kFloat);
}

// Stays on the rows' device: the host does not wait, and a graph can capture it.
at::Tensor choose_rows(const at::Tensor& rows, const at::Tensor& offsets, const at::Tensor& dropped,
                       const at::Tensor& positions, const at::Tensor& null_rows) {
  // The sample of a row is the last one that begins at or before it.
  const at::Tensor all = at::arange(rows.size(0), offsets.options()),
                   starts = offsets.narrow(0, 0, offsets.size(0) - 1);
  const at::Tensor sample_of_row = at::bucketize(all, starts, /*out_int32=*/false, /*right=*/true) - 1;
  const at::Tensor places =
      positions.defined() ? positions : (all - starts.index_select(0, sample_of_row)).to(at::kLong);
  return at::where(dropped.index_select(0, sample_of_row).unsqueeze(1),
                   null_rows.to(rows.scalar_type()).index_select(0, places), rows);
}

constexpr auto kChooseRows = on_all(choose_rows, planned::choose_rows);

struct Embedding : torch::autograd::Function<Embedding> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& table, const at::Tensor& ids) {
    OpMark mark("kiln::embedding_rows", ids);
    ctx->save_for_backward({ids});
    ctx->saved_data["num_rows"] = table.size(0);
    ctx->saved_data["dtype"] = static_cast<int64_t>(table.scalar_type());
    at::Tensor rows = at::embedding(table, ids).to(result_dtype(table));
    mark.outputs(rows);
    return rows;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const at::Tensor &grad = grads[0], ids = ctx->get_saved_variables()[0];
    const int64_t num_rows = ctx->saved_data["num_rows"].toInt();
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    OpMark mark("kiln::embedding_rows_backward", grad, ids);
    const at::Tensor grad_table = at::embedding_dense_backward(grad, ids, num_rows, /*padding_idx=*/-1,
                                                               /*scale_grad_by_freq=*/false)
                                      .to(dtype);
    mark.outputs(grad_table);
    return {grad_table, at::Tensor()};
  }
};

}  // namespace

namespace reference {

at::Tensor embedding_rows(const at::Tensor& table, const at::Tensor& ids) {
  return at::embedding(table.to(result_dtype(table)), ids);
}

}  // namespace reference

at::Tensor rows_with_nulls(const at::Tensor& rows, const at::Tensor& offsets, const at::Tensor& dropped,
                           const at::Tensor& positions, const at::Tensor& null_rows) {
  OpMark mark("kiln::rows_with_nulls", rows, null_rows, dropped);
  at::Tensor chosen = kChooseRows.on(rows)(rows, offsets, dropped, positions, null_rows);
  mark.outputs(chosen);
  return chosen;
}

at::Tensor embedding_rows(const at::Tensor& table, const at::Tensor& ids) {
  if (table.dim() != 2 || ids.scalar_type() != at::kLong)
    fail("embedding_rows", "expected table (rows, D) and i64 ids, got ({}) and {}",
         fmt::join(table.sizes(), ", "), c10::toString(ids.scalar_type()));
  return Embedding::apply(table, ids);
}

}  // namespace kiln::ops
