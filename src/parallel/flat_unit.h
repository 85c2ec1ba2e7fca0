// All training state of one segment, in flat buffers (architecture, decision 2).
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace kiln {

// A tensor's place in the flat buffers of its unit, in elements.
struct FlatSlot {
  std::string key;
  std::vector<int64_t> shape;
  int64_t offset = 0, numel = 0;
};

// Places tensors one after another, each on a multiple of 32 elements: 64 bytes or more in every dtype, so
// that all buffers of a unit share one set of offsets. Elements between slots are zero for life.
struct FlatLayout {
  std::vector<FlatSlot> slots;
  int64_t size = 0;  // elements, a multiple of 32

  void add(const std::string& key, const std::vector<int64_t>& shape);
};

struct FlatUnitOptions {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  at::ScalarType grad_dtype = at::kFloat;  // f32 when gradients are accumulated, else the compute dtype
  int64_t num_moments = 0;                 // f32 buffers of the optimizer, zero at the start
  int64_t num_emas = 0;
};

// One segment's compute weights, gradients, f32 master, optimizer moments and EMAs. Each buffer is 1-D with a
// storage of its own that no other unit shares: a ZeRO shard is a slice of it, offload moves it, gather and
// release fill and drop its memory while views that autograd saved stay right.
class FlatUnit {
 public:
  FlatUnit(std::string name, FlatLayout layout, const FlatUnitOptions& options);

  const std::string& name() const { return name_; }
  const FlatLayout& layout() const { return layout_; }

  // Slot `index` of one of the buffers below, in the tensor's own shape: a view, never a copy.
  at::Tensor view(const at::Tensor& buffer, size_t index) const;
  // A fresh leaf on the compute weights that requires a gradient; autograd never runs through the flat
  // buffer.
  at::Tensor leaf(size_t index) const;

  // Writes slot `index` of a buffer from a tensor of any dtype and device. After the master has been written,
  // refresh_compute_weights() is due.
  void write(at::Tensor& buffer, size_t index, const at::Tensor& value) const;
  void refresh_compute_weights();
  void start_emas();  // every EMA becomes a copy of the master

  at::Tensor compute_weights;             // (size) compute dtype; the master itself when that is f32
  at::Tensor grads;                       // (size) grad dtype
  at::Tensor master;                      // (size) f32
  std::vector<at::Tensor> moments, emas;  // (size) f32 each

 private:
  std::string name_;
  FlatLayout layout_;
};

}  // namespace kiln
