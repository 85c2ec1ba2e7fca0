// All training state of one segment, in flat buffers (architecture, decision 2), whole or divided among
// ranks.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/flat_layout.h"
#include "parallel/offload/nvme_pool.h"
#include "parallel/offload/state_placement.h"

namespace kiln {

// How one unit is divided among ranks. Each stage divides what the one before it does, and more:
// 0 nothing, 1 master, moments and EMAs, 2 gradients, 3 compute weights.
struct UnitSharding {
  int64_t zero_stage = 0;
  int64_t rank = 0, world_size = 1;
};

// Returns how many elements a rank keeps of each divided buffer.
int64_t shard_elements(int64_t layout_size, const UnitSharding& sharding,
                       int64_t alignment = FlatLayout::kAlignment);

struct FlatUnitOptions {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  at::ScalarType grad_dtype = at::kFloat;    // f32 when gradients are accumulated, else the compute dtype
  at::ScalarType master_dtype = at::kFloat;  // f32, or bf16: updates are rounded stochastically
  std::vector<StateBuffer> moments{};        // the optimizer's, zero at the start
  int64_t num_emas = 0;
  UnitSharding sharding{};
  StatePlacement placement{};
  std::shared_ptr<NvmeState> nvme{};  // holds this unit if placement.uses_disk()
  size_t nvme_unit = 0;               // the number of the unit there
};
// Returns the bytes of optimizer state that a rank keeps for a unit: master, moments and EMAs, each rounded
// up to a multiple of 64 bytes.
int64_t state_bytes(const FlatLayout& layout, const FlatUnitOptions& options);

// Holds a unit's optimizer state in memory while it lives. Changes last only if the lease's Access announced
// them. Several leases may share a unit; at most three units are leased at once.
class StateLease {
 public:
  at::Tensor master;
  std::vector<at::Tensor> moments, emas;

 private:
  friend class FlatUnit;
  StateLease() = default;
  std::optional<NvmeLease> nvme_{};
};

// The same for the shard of a unit's compute weights. At most prefetch_segments + 1 units are leased at once.
class WeightLease {
 public:
  at::Tensor shard;  // (shard_size) compute dtype

 private:
  friend class FlatUnit;
  WeightLease() = default;
  std::optional<NvmeLease> nvme_{};
};

// One segment's compute weights, gradients, master, optimizer moments and EMAs. Each buffer is 1-D. Whole
// buffers have size() elements; a rank's shard is shard_size() of them from shard_offset() on (all of them at
// stage 0). compute_weights and grads own one storage each for life, which no other unit shares. Views that
// autograd saved therefore stay right when its memory is given up and new memory is taken.
class FlatUnit {
 public:
  FlatUnit(std::string name, FlatLayout layout, const FlatUnitOptions& options);

  const std::string& name() const { return name_; }
  const FlatLayout& layout() const { return layout_; }
  at::ScalarType master_dtype() const { return options_.master_dtype; }
  const UnitSharding& sharding() const { return options_.sharding; }
  int64_t size() const { return size_; }  // the layout's, padded so that the ranks can divide it
  int64_t shard_size() const { return shard_size_; }
  int64_t shard_offset() const { return shard_offset_; }
  const StatePlacement& placement() const { return options_.placement; }
  int64_t host_bytes() const;  // of tensors placed on the host

  // Returns slot `index` of a whole buffer in the tensor's own shape: a view, never a copy.
  at::Tensor view(const at::Tensor& buffer, size_t index) const;
  // Returns a fresh leaf on the compute weights that requires a gradient. Autograd never runs through the
  // flat buffer.
  at::Tensor leaf(size_t index) const;

  // Gives access to master, moments and EMAs, wherever they are. Throws Error if the disk failed.
  StateLease lease(Access access) const;
  // Begins to read them from the disk for the next lease.
  void prefetch_state() const;
  // The same for this rank's slice of the compute weights.
  WeightLease lease_weights(Access access) const;
  void prefetch_weights() const;

  // Returns what this rank keeps of a moment, by slot.
  std::vector<StateRun> moment_runs(size_t moment) const;
  const std::vector<StateBuffer>& moment_buffers() const { return options_.moments; }
  // Writes what this rank keeps of slot `index` into a leased moment. `values`: all values of the slot.
  void write_moment(const StateLease& lease, size_t moment, size_t index, const at::Tensor& values) const;
  // Bytes of master, moments and EMAs, wherever they are.
  int64_t state_bytes() const { return kiln::state_bytes(layout_, options_); }

  // Writes the part of slot `index` that a whole or divided buffer holds, from a tensor of any dtype and
  // device. Call refresh_weight_shard() after the master has been written.
  void write(at::Tensor& buffer, size_t index, const at::Tensor& value) const;
  void refresh_weight_shard();
  void start_emas();  // every EMA becomes a copy of the master

  // Stage 3 keeps whole weights, and stages 2 and 3 whole gradients, only while they are used. New memory is
  // uninitialised, but for zeros between the slots of gradients.
  void take_weights_memory();
  void drop_weights_memory();
  void take_grads_memory();
  void drop_grads_memory();

  at::Tensor compute_weights;  // (size) compute dtype
  at::Tensor grads;            // (size) grad dtype
  at::Tensor weight_shard;  // (shard_size) of compute_weights; undefined on NVMe; the master itself when they
                            // have one dtype and both are on the device
  at::Tensor grad_shard;    // (shard_size)
  at::Tensor master;  // (shard_size) master dtype; undefined on NVMe, as moments and emas are: use lease()
  std::vector<at::Tensor> moments;  // as moment_buffers() says
  std::vector<at::Tensor> emas;     // (shard_size) f32 each

 private:
  std::string name_;
  FlatLayout layout_;
  FlatUnitOptions options_;  // with the placement of its stage
  int64_t size_ = 0, shard_size_ = 0, shard_offset_ = 0;
};

}  // namespace kiln
