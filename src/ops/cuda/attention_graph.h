// Attention's backward as a graph of cuDNN's operations, which its fused kernels recognise (Dao 2023). The
// gradients of q, k and v have the strides of qkv itself, so they are written where a packed projection has
// them; ATen's own graph gives each its own memory.
#pragma once
#include <cudnn.h>

#include <array>
#include <vector>

#include "ops/kernel_args.h"

namespace kiln::ops::cuda {

// Descriptors of cuDNN that live together. After the first failure the others do nothing.
class CudnnDescriptors {
 public:
  using Descriptor = cudnnBackendDescriptor_t;

  CudnnDescriptors() = default;
  CudnnDescriptors(const CudnnDescriptors&) = delete;
  ~CudnnDescriptors() {
    for (const Descriptor descriptor : owned_) cudnnBackendDestroyDescriptor(descriptor);
  }

  cudnnStatus_t status() const { return status_; }
  Descriptor make(cudnnBackendDescriptorType_t type) {
    Descriptor descriptor = nullptr;
    if (is_ok(cudnnBackendCreateDescriptor(type, &descriptor))) owned_.push_back(descriptor);
    return descriptor;
  }
  template <class Value>
  void set(Descriptor to, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
           const Value* values, size_t count) {
    if (is_ok(status_)) is_ok(cudnnBackendSetAttribute(to, name, type, static_cast<int64_t>(count), values));
  }
  template <class Value>
  void set(Descriptor to, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, Value value) {
    set(to, name, type, &value, 1);
  }
  void set(Descriptor to, cudnnBackendAttributeName_t name, Descriptor value) {
    set(to, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value);
  }
  Descriptor finish(Descriptor descriptor) {
    if (is_ok(status_)) is_ok(cudnnBackendFinalize(descriptor));
    return descriptor;
  }

 private:
  bool is_ok(cudnnStatus_t status) {
    if (status_ == CUDNN_STATUS_SUCCESS) status_ = status;
    return status_ == CUDNN_STATUS_SUCCESS;
  }

  std::vector<Descriptor> owned_;
  cudnnStatus_t status_ = CUDNN_STATUS_SUCCESS;
};

// Builds the operations of args' shape; pointers are not read.
class AttentionGraph {
 public:
  // What an execution binds memory to. kScale and kOne are floats on the host.
  enum Uid : int64_t {
    kQ = 1,
    kK,
    kV,
    kOut,
    kGradOut,
    kLogSum,
    kScale,
    kOne,
    kGradQ,
    kGradK,
    kGradV,
    kRowSum,      // scratch (B, H, N) f32
    kSumOfGradQ,  // scratch (B, H, N, d) f32
    kFirstIntermediate,
  };

  explicit AttentionGraph(const AttentionGradsArgs& args)
      : low_(args.dtype == Dtype::kBF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF) {
    const auto b = static_cast<int64_t>(args.batch), n = static_cast<int64_t>(args.num_tokens),
               h = static_cast<int64_t>(args.num_heads), d = static_cast<int64_t>(args.head_dim);
    const Shape packed{{b, h, n, d}, {n * 3 * h * d, d, 3 * h * d, 1}},
        tokens{{b, h, n, d}, {n * h * d, d, h * d, 1}}, heads{{b, h, n, d}, {h * n * d, n * d, d, 1}},
        scores{{b, h, n, n}, {h * n * n, n * n, n, 1}}, rows{{b, h, n, 1}, {h * n, n, 1, 1}},
        scalar{{1, 1, 1, 1}, {1, 1, 1, 1}};
    const Descriptor q = tensor(kQ, low_, packed), k_t = tensor(kK, low_, transposed(packed)),
                     v_t = tensor(kV, low_, transposed(packed)), out = tensor(kOut, low_, tokens),
                     grad_out = tensor(kGradOut, low_, tokens), log_sum = tensor(kLogSum, kF32, rows),
                     scale = tensor(kScale, kF32, scalar, Kind::kByValue),
                     one = tensor(kOne, kF32, scalar, Kind::kByValue), row_sum = tensor(kRowSum, kF32, rows),
                     sum_of_grad_q = tensor(kSumOfGradQ, kF32, heads);

    // With p = softmax(q k^T scale): dv = p^T dout, dp = dout v^T, ds = p (dp - sum(dout out)) scale.
    const Descriptor weighted = pointwise(CUDNN_POINTWISE_MUL, grad_out, out, made(kF32, tokens));
    pointwise(CUDNN_POINTWISE_MUL, sum(weighted, made(kF32, rows)), one, row_sum);
    const Descriptor scaled =
        pointwise(CUDNN_POINTWISE_MUL, product(q, k_t, made(kF32, scores)), scale, made(kF32, scores));
    const Descriptor p =
        pointwise(CUDNN_POINTWISE_EXP, pointwise(CUDNN_POINTWISE_SUB, scaled, log_sum, made(kF32, scores)),
                  nullptr, made(kF32, scores));
    product(reshape(p, made(low_, transposed(scores))), grad_out, tensor(kGradV, low_, packed));
    const Descriptor centred = pointwise(CUDNN_POINTWISE_SUB, product(grad_out, v_t, made(kF32, scores)),
                                         row_sum, made(kF32, scores));
    const Descriptor ds =
        pointwise(CUDNN_POINTWISE_MUL, pointwise(CUDNN_POINTWISE_MUL, centred, p, made(kF32, scores)), scale,
                  made(kF32, scores));
    product(reshape(ds, made(low_, transposed(scores))), q, tensor(kGradK, low_, packed));
    product(ds, reshape(k_t, made(low_, packed)), sum_of_grad_q);
    pointwise(CUDNN_POINTWISE_IDENTITY, sum_of_grad_q, nullptr, tensor(kGradQ, low_, packed));

    operations_ = all_.make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    all_.set(operations_, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, nodes_.data(),
             nodes_.size());
  }

  // The graph itself, which the caller gives a handle, or not, and finishes.
  cudnnBackendDescriptor_t operations() const { return operations_; }
  CudnnDescriptors& descriptors() { return all_; }

 private:
  using Descriptor = cudnnBackendDescriptor_t;
  using Extents = std::array<int64_t, 4>;
  struct Shape {
    Extents sizes, strides;
  };
  enum class Kind { kMemory, kByValue, kIntermediate };
  static constexpr cudnnDataType_t kF32 = CUDNN_DATA_FLOAT;

  static Shape transposed(const Shape& s) {
    return {{s.sizes[0], s.sizes[1], s.sizes[3], s.sizes[2]},
            {s.strides[0], s.strides[1], s.strides[3], s.strides[2]}};
  }
  Descriptor tensor(int64_t uid, cudnnDataType_t type, const Shape& shape, Kind kind = Kind::kMemory) {
    const Descriptor made = all_.make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    all_.set(made, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, uid);
    all_.set(made, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
    all_.set(made, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, shape.sizes.data(), shape.sizes.size());
    all_.set(made, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, shape.strides.data(), shape.strides.size());
    all_.set(made, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, int64_t{16});
    if (kind == Kind::kByValue) all_.set(made, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, true);
    if (kind == Kind::kIntermediate) all_.set(made, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, true);
    return all_.finish(made);
  }
  // A result that only the graph's own operations read.
  Descriptor made(cudnnDataType_t type, const Shape& shape) {
    return tensor(next_intermediate_++, type, shape, Kind::kIntermediate);
  }

  Descriptor node(Descriptor operation, Descriptor result) {
    nodes_.push_back(all_.finish(operation));
    return result;
  }
  Descriptor pointwise(cudnnPointwiseMode_t mode, Descriptor x, Descriptor other, Descriptor result) {
    const Descriptor kind = all_.make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    all_.set(kind, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    all_.set(kind, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, kF32);
    const Descriptor operation = all_.make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    all_.set(operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, all_.finish(kind));
    all_.set(operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (other != nullptr) all_.set(operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, other);
    all_.set(operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, result);
    return node(operation, result);
  }
  Descriptor product(Descriptor left, Descriptor right, Descriptor result) {
    const Descriptor kind = all_.make(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    all_.set(kind, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, kF32);
    const Descriptor operation = all_.make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    all_.set(operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, all_.finish(kind));
    all_.set(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, left);
    all_.set(operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, right);
    all_.set(operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, result);
    return node(operation, result);
  }
  Descriptor sum(Descriptor x, Descriptor result) {
    const Descriptor kind = all_.make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    all_.set(kind, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, kF32);
    all_.set(kind, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
             CUDNN_REDUCE_TENSOR_ADD);
    const Descriptor operation = all_.make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    all_.set(operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, all_.finish(kind));
    all_.set(operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    all_.set(operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, result);
    return node(operation, result);
  }
  Descriptor reshape(Descriptor x, Descriptor result) {
    const Descriptor operation = all_.make(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    all_.set(operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    all_.set(operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, result);
    return node(operation, result);
  }

  cudnnDataType_t low_;
  CudnnDescriptors all_;
  std::vector<Descriptor> nodes_;
  Descriptor operations_ = nullptr;
  int64_t next_intermediate_ = kFirstIntermediate;
};

}  // namespace kiln::ops::cuda
