// All training state of one segment, in flat buffers (architecture, decision 2), whole or divided among
// ranks.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/choices.h"
#include "core/flat/state_buffer.h"
#include "parallel/offload/nvme_state.h"

namespace kiln {

// How one unit is divided among ranks. Each stage divides what the one before it does, and more:
// 0 nothing, 1 master, moments and EMAs, 2 gradients, 3 compute weights.
struct UnitSharding {
  int64_t zero_stage = 0;
  int64_t rank = 0, world_size = 1;
};

// Elements that a rank keeps of each buffer that is divided.
int64_t shard_elements(int64_t layout_size, const UnitSharding& sharding,
                       int64_t alignment = FlatLayout::kAlignment);

// Where something is between its uses.
enum class Placement { kDevice, kHost, kNvme };
template <>
struct Choices<Placement> {
  static constexpr std::pair<Placement, const char*> kAll[] = {
      {Placement::kDevice, "none"}, {Placement::kHost, "cpu"}, {Placement::kNvme, "nvme"}};
};
// Where what was `asked` to be somewhere is. Without a host behind it (on a CPU) the device's memory is the
// host's.
inline Placement placement_of(Placement asked, bool has_host) {
  return asked == Placement::kHost && !has_host ? Placement::kDevice : asked;
}

struct OffloadOptions {
  Placement optimizer = Placement::kDevice;  // of master weights, moments and averages
  Placement params = Placement::kDevice;     // of compute weights that wait to be gathered; stage 3
  BlockStoreOptions nvme{};

  bool uses_disk() const { return optimizer == Placement::kNvme || params == Placement::kNvme; }
};

struct FlatUnitOptions {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  at::ScalarType grad_dtype = at::kFloat;    // f32 when gradients are accumulated, else the compute dtype
  at::ScalarType master_dtype = at::kFloat;  // f32, or bf16: updates are rounded stochastically
  std::vector<StateBuffer> moments{};        // of the optimizer, zero at the start
  int64_t num_emas = 0;
  UnitSharding sharding{};
  Placement placement = Placement::kDevice;         // of the optimizer's state: master, moments, EMAs
  Placement weight_placement = Placement::kDevice;  // of the shard of the compute weights; stage 3
  std::shared_ptr<NvmeState> nvme{};                // kNvme, of either: holds this unit as its unit number
  size_t nvme_unit = 0;
};
// Bytes of the optimizer's state that a rank keeps of a unit: of master, moments and EMAs, each from a
// multiple of 64 bytes on.
int64_t state_bytes(const FlatLayout& layout, const FlatUnitOptions& options);

// The optimizer's state of a unit, in memory while this lives. Changes last where they were announced.
// Several leases may share a unit; at most three units are leased at once.
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
// stage 0). compute_weights and grads own one storage each for life, which no other unit shares: giving its
// memory up and taking new memory leaves views that autograd saved right.
class FlatUnit {
 public:
  FlatUnit(std::string name, FlatLayout layout, const FlatUnitOptions& options);

  const std::string& name() const { return name_; }
  const FlatLayout& layout() const { return layout_; }
  at::ScalarType master_dtype() const { return master_dtype_; }
  const UnitSharding& sharding() const { return sharding_; }
  int64_t size() const { return size_; }  // the layout's, padded so that the ranks divide it
  int64_t shard_size() const { return shard_size_; }
  int64_t shard_offset() const { return shard_offset_; }
  Placement weight_placement() const { return weight_placement_; }
  int64_t host_bytes() const;  // of what is placed on the host

  // Slot `index` of a whole buffer, in the tensor's own shape: a view, never a copy.
  at::Tensor view(const at::Tensor& buffer, size_t index) const;
  // A fresh leaf on the compute weights that requires a gradient; autograd never runs through the flat
  // buffer.
  at::Tensor leaf(size_t index) const;

  // Master, moments and EMAs, wherever they are. Throws Error: the disk failed.
  StateLease lease(Access access) const;
  // Begins to bring them, for a lease that comes next.
  void prefetch_state() const;
  // This rank's slice of the compute weights, likewise.
  WeightLease lease_weights(Access access) const;
  void prefetch_weights() const;

  // What this rank keeps of a moment, by slot.
  std::vector<StateRun> moment_runs(size_t moment) const;
  const std::vector<StateBuffer>& moment_buffers() const { return moment_buffers_; }
  // Writes what this rank keeps of slot `index` into a moment that is leased, from all values of the slot.
  void write_moment(const StateLease& lease, size_t moment, size_t index, const at::Tensor& values) const;
  // Bytes of master, moments and EMAs, wherever they are.
  int64_t state_bytes() const;

  // Writes slot `index` of a whole or divided buffer, as far as it is in it, from a tensor of any dtype and
  // device. After the master has been written, refresh_weight_shard() is due.
  void write(at::Tensor& buffer, size_t index, const at::Tensor& value) const;
  void refresh_weight_shard();
  void start_emas();  // every EMA becomes a copy of the master

  // Stage 3 keeps whole weights, stages 2 and 3 whole gradients, only while they are used. New memory of
  // weights is unspecified; of gradients, the elements between slots are zero.
  void take_weights_memory();
  void drop_weights_memory();
  void take_grads_memory();
  void drop_grads_memory();

  at::Tensor compute_weights;  // (size) compute dtype
  at::Tensor grads;            // (size) grad dtype
  at::Tensor weight_shard;  // (shard_size) of compute_weights; undefined on NVMe; the master itself when they
                            // have one dtype and both are on the device
  at::Tensor grad_shard;    // (shard_size)
  at::Tensor master;        // (shard_size) master dtype; undefined on NVMe, like the next: lease() gives them
  std::vector<at::Tensor> moments;  // as moment_buffers() says
  std::vector<at::Tensor> emas;     // (shard_size) f32 each

 private:
  std::string name_;
  FlatLayout layout_;
  UnitSharding sharding_;
  int64_t size_ = 0, shard_size_ = 0, shard_offset_ = 0;
  at::ScalarType master_dtype_;
  std::vector<StateBuffer> moment_buffers_;
  size_t num_emas_ = 0;
  Placement placement_{}, weight_placement_{};
  std::shared_ptr<NvmePool> nvme_state_, nvme_weights_;  // null: not on NVMe
  size_t nvme_unit_ = 0;
};

}  // namespace kiln
