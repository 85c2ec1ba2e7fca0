// The order of samples: position in the global stream -> sample, as a pure function. Splits them into those
// to train on and those held out. Torch-free.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kiln {

// Returns the image of `index` under a permutation of [0, size) chosen by (seed, epoch). O(1) time and
// memory: a Feistel network on Philox over the next power of two, walked until it lands inside (Black and
// Rogaway 2002).
int64_t shuffled_index(uint64_t seed, int64_t epoch, int64_t size, int64_t index);

// Samples [first, first + count) of a store, or `count` chosen ones.
struct SampleRange {
  int64_t first = 0, count = 0;
  // How often each sample comes in a pass, on average. A pass takes round(weight * count) samples, at least
  // one, from a shuffle of the range, and goes on where the pass before it stopped in that shuffle.
  double weight = 1;
  std::shared_ptr<const std::vector<int64_t>> chosen{};  // null: `count` samples from `first` on

  int64_t sample(int64_t i) const { return chosen ? (*chosen)[static_cast<size_t>(i)] : first + i; }
  int64_t per_pass() const;
};

// The samples of one shape, from which whole batches are taken.
struct SampleLane {
  std::vector<SampleRange> samples;

  int64_t size() const;  // samples of a pass, repetitions counted
};

// Decides which sample stands where in the global stream. Row r of global batch g is at position g *
// global_batch + r.
//
// Every global batch is full and of one lane. A lane's samples come in passes, each a shuffle of all of them.
// The next pass fills the batch that the tail of a pass begins, so no sample is dropped and none comes twice
// in a pass. After e epochs a lane of n samples has given floor(e n / B) batches, so each sample is at most
// one batch behind. The batches of an epoch are shuffled among the lanes.
//
// The order depends on (seed, lanes, global_batch, begin) alone: it is the same on all ranks, and every
// position can be computed directly.
class SampleOrder {
 public:
  // Without lanes the stream is endless: the sample is the position, and batches take the `num_endless_lanes`
  // lanes in turn. `begin` is the position of the stream, a multiple of global_batch, at which these lanes
  // begin; others came before. Throws Error for a lane without samples.
  SampleOrder(uint64_t seed, std::vector<SampleLane> lanes, int64_t global_batch,
              int64_t num_endless_lanes = 1, int64_t begin = 0);

  // Where a global batch lies: its lane, and the position of its row 0 in that lane's passes.
  struct LanePlace {
    int64_t lane = 0, first = 0;
  };
  // Returns the place of the global batch that has a row at `position`, which is at least `begin`.
  LanePlace batch_at(int64_t position) const;
  // Returns the sample at a position, or the one that is `further` places behind it in its lane.
  int64_t sample_at(int64_t position, int64_t further = 0) const;

  int64_t samples_per_epoch() const { return samples_per_epoch_; }  // with weights; 0: endless
  int64_t num_lanes() const {
    return lanes_.empty() ? num_endless_lanes_ : static_cast<int64_t>(lanes_.size());
  }

 private:
  int64_t batches_before(int64_t epoch) const;  // of all lanes
  int64_t batches_before(size_t lane, int64_t epoch) const;
  int64_t epoch_of(int64_t batch) const;
  int64_t sample_of(int64_t lane, int64_t place) const;

  uint64_t seed_;
  std::vector<SampleLane> lanes_;
  std::vector<int64_t> sizes_;  // samples of a pass of each lane
  int64_t global_batch_, num_endless_lanes_, begin_, samples_per_epoch_ = 0;
};

enum class Split { kTraining, kHeldOut };

// True if the sample of this name is held out, as about `share` of all names are. A hash of the name decides,
// so a sample stays in its split when others are added, in any order.
bool is_held_out(std::string_view name, double share);

// Returns the samples of `lanes` that belong to a split. A lane may have none.
std::vector<SampleLane> split_lanes(const std::vector<SampleLane>& lanes, double share, Split split,
                                    const std::function<std::string(int64_t id)>& name_of);

// Returns the number of samples of a pass over the lanes.
int64_t samples_per_pass(const std::vector<SampleLane>& lanes);

}  // namespace kiln
