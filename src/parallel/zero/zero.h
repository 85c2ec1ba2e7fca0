// ZeRO (Rajbhandari et al. 2020) on flat units: which rank keeps which slice of the training state, and the
// collectives that bring slices together. The step's walk calls it segment by segment; it never sees the
// optimizer.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "parallel/offload/side_stream.h"
#include "parallel/ranks/collective.h"
#include "parallel/zero/flat_unit.h"

namespace kiln {

class ProcessGroup;

// Per unit s, in the order of the walk:
//   forward:   gather(s, +1) ... release(s)
//   backward:  gather(s, -1), begin_gradients(s) ... reduce(s, ...), release(s)
//   update:    finish_reductions(), then per unit: its shards change, publish(s); on another stream than the
//              walk's: changes_until(s, ...)
// Every rank makes the same calls. Gathers and reductions run while the caller computes.
class Zero {
 public:
  Zero(std::shared_ptr<ProcessGroup> group, const ZeroOptions& options);
  const ZeroOptions& options() const { return options_; }
  // Returns how a unit of this many elements is divided.
  UnitSharding sharding_of(int64_t elements) const;
  // Takes the units, which must stay where they are. Begins to fill their whole weights from the shards. The
  // last `num_apart` are not of the walk: no weights of theirs are gathered ahead.
  void manage(std::vector<FlatUnit*> units, size_t num_apart = 0);

  ProcessGroup& group() const { return *group_; }
  // True if this rank counts its shards in a sum over all ranks' shards; false if a rank with the same shards
  // does.
  bool counts_shards() const;
  // True if the calls below do nothing: one rank that keeps everything whole.
  bool idle() const;

  // Waits until the weights of unit s are whole. The next units in `direction` (1 or -1) follow in the
  // background.
  void gather(size_t s, int direction);
  void release(size_t s);  // stage 3: frees the memory of whole weights

  // Prepares memory for the whole gradients of one micro-step. Returns true if it holds those of earlier
  // micro-steps, to be added to; false if it must be overwritten.
  bool begin_gradients(size_t s, bool first_micro_step);
  // Call it when the whole gradients of this micro-step are done. After the last micro-step and
  // finish_reductions(), unit s's grad_shard holds their sum over ranks and micro-steps.
  void reduce(size_t s, bool first_micro_step, bool last_micro_step);
  void finish_reductions();

  // Call it when the shard of the weights has changed. Brings whole weights up to date by the next gather(s).
  void publish(size_t s);
  // Says that unit s changes on another stream until `end`. Its next gather waits for that on its stream, as
  // finish_gathers() does.
  void changes_until(size_t s, std::optional<c10::Event> end);
  bool is_changing(size_t s) const { return units_[s].changed.has_value(); }
  void wait_for_change(size_t s);
  // Begins to read the weights that the next forward gathers first, if they are on a disk.
  void read_ahead();
  // Waits for whole weights that are on their way. Call it before shards are read or written outside a step.
  void finish_gathers();

  // Sums values in place over the ranks that units are divided among. They may be on any device. A
  // collective.
  void sum_over_shards(at::Tensor& values, const std::string& what);
  // Returns, on every rank, the whole of a buffer of unit s of which each rank keeps a shard. A collective.
  at::Tensor whole(size_t s, const at::Tensor& buffer);

 private:
  struct Unit {
    FlatUnit* flat = nullptr;
    bool is_whole = false;                // the weights; also set while a gather is under way
    std::optional<WeightLease> shard{};   // while it is gathered
    std::optional<c10::Event> sent{};     // the shard has left host memory for the device
    std::optional<c10::Event> changed{};  // on another stream: an update has ended
    Collective gathering{};
  };
  struct MicroStep {
    bool add = false;      // add its gradients to what the shard holds
    bool is_last = false;  // of the step
  };
  struct Reduction {
    FlatUnit* flat = nullptr;
    at::Tensor input{}, output{};  // of the collective
    at::Tensor target{};           // the part of the shard that gets its result
    MicroStep micro_step{};
    bool drops_grads = false;  // frees the whole gradients when it is done
    Collective collective{};
  };
  void start_gather(size_t s);
  void finish_gather(size_t s);
  void start_reduction(FlatUnit& flat, int64_t begin, int64_t count, MicroStep micro_step);
  void finish_oldest_reduction();
  void finish_exchange(Reduction& reduction);

  std::shared_ptr<ProcessGroup> group_;
  ZeroOptions options_;
  std::shared_ptr<ProcessGroup> shards_;    // the ranks that a unit is divided among
  std::shared_ptr<ProcessGroup> replicas_;  // the ranks with the same shards; null: only this one
  std::optional<SideStream> copies_;        // on a device with a host behind it
  std::vector<Unit> units_;
  size_t num_walked_ = 0;
  std::deque<Reduction> reductions_;
  std::vector<Reduction> exchanges_;  // between machines, of sums within this one
};

// Makes the file on a disk for units of these layouts, with what their options place there. Throws Error.
std::shared_ptr<NvmeState> make_nvme_state(const Zero& zero, const std::vector<FlatLayout>& layouts,
                                           const std::vector<FlatUnitOptions>& units,
                                           const BlockStoreOptions& disk);

}  // namespace kiln
