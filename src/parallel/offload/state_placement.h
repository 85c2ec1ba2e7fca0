// Where training state lies between its uses: on which ranks, and in which memory.
#pragma once
#include <c10/core/ScalarType.h>

#include <compare>
#include <cstdint>
#include <optional>

#include "core/choices.h"
#include "core/files/block_store.h"

namespace kiln {

struct ZeroOptions {
  int64_t stage = 0;
  int64_t persist_threshold = 0;   // stage 3: units with fewer elements keep their weights whole
  bool shard_within_node = false;  // divide among the ranks of a machine; machines hold copies
  int64_t prefetch_segments = 1;   // stage 3: segments gathered ahead of the one that computes
  int64_t reduce_bucket_size = 0;  // most elements per reduction of gradients; 0: a whole unit's
  std::optional<at::ScalarType> reduce_dtype{};  // of sums of gradients; none: their own
};

enum class Placement { kDevice, kHost, kNvme };
template <>
struct Choices<Placement> {
  static constexpr std::pair<Placement, const char*> kAll[] = {
      {Placement::kDevice, "none"}, {Placement::kHost, "cpu"}, {Placement::kNvme, "nvme"}};
};

// The placement of a run's state, or of a unit's. Gradients and gathered weights are always on the device. An
// optimizer runs where its state is: on the device, or on the host behind it.
struct StatePlacement {
  Placement optimizer = Placement::kDevice;  // of master weights, moments and averages
  Placement params = Placement::kDevice;     // of compute weights that wait to be gathered; stage 3
  bool has_host = false;                     // the device is a GPU: host memory is across a link

  // Returns where state really is on such a device. Without a host behind it, its memory is the host's.
  StatePlacement on(bool device_has_host) const {
    const auto real = [&](Placement asked) {
      return asked == Placement::kHost && !device_has_host ? Placement::kDevice : asked;
    };
    return {real(optimizer), real(params), device_has_host};
  }
  // Returns the placement of a unit: below stage 3 its weights are always whole.
  StatePlacement at_stage(int64_t zero_stage) const {
    return {optimizer, zero_stage == 3 ? params : Placement::kDevice, has_host};
  }

  bool is_on_device() const { return optimizer == Placement::kDevice && params == Placement::kDevice; }
  bool uses_disk() const { return optimizer == Placement::kNvme || params == Placement::kNvme; }
  // True if the host computes the update, and if weights come to the device from there.
  bool updates_on_host() const { return has_host && optimizer != Placement::kDevice; }
  bool gathers_from_host() const { return has_host && params != Placement::kDevice; }

  auto operator<=>(const StatePlacement&) const = default;
};

struct OffloadOptions : StatePlacement {
  BlockStoreOptions nvme{};
};

}  // namespace kiln
