#include "data/store/sample_order.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <stdexcept>

#include "core/error.h"
#include "core/philox.h"

namespace kiln {

namespace {

// A round mixes one half only, and halves of one or two bits mix slowly: 12 rounds leave orders of five
// samples visibly uneven (chi-square 990 of 119 degrees of freedom), 48 do not.
constexpr uint32_t kNumRounds = 12, kNumRoundsBelow10Bits = 48;

uint32_t round_bits(uint64_t seed, int64_t epoch, uint32_t round, uint32_t value) {
  const auto e = static_cast<uint64_t>(epoch);
  return philox4x32_10({value, static_cast<uint32_t>(Draw::kShuffle) << 16 | round, static_cast<uint32_t>(e),
                        static_cast<uint32_t>(e >> 32)},
                       {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)})[0];
}

// A single lane keeps the run's seed. Of several lanes, each has its own order.
uint64_t lane_seed(uint64_t seed, size_t num_lanes, int64_t lane) {
  return num_lanes == 1 ? seed : seed + 0x9E3779B97F4A7C15u * (static_cast<uint64_t>(lane) + 1);
}

// Lanes that begin later in the stream have their own orders.
uint64_t begun_seed(uint64_t seed, int64_t begin) {
  return begin == 0 ? seed : seed ^ 0xD1B54A32D192ED03u * static_cast<uint64_t>(begin);
}

}  // namespace

int64_t shuffled_index(uint64_t seed, int64_t epoch, int64_t size, int64_t index) {
  if (index < 0 || index >= size || epoch < 0) throw std::logic_error("shuffled_index: out of range");
  if (size == 1) return 0;
  // The bits of size - 1 are cut into two halves. The left one is at most one bit shorter.
  const int num_bits = std::bit_width(static_cast<uint64_t>(size - 1));
  const int left_bits = num_bits / 2, right_bits = num_bits - left_bits;
  const uint32_t left_mask = (uint64_t{1} << left_bits) - 1, right_mask = (uint64_t{1} << right_bits) - 1;
  const uint32_t num_rounds = num_bits < 10 ? kNumRoundsBelow10Bits : kNumRounds;
  uint64_t value = static_cast<uint64_t>(index);
  do {
    auto left = static_cast<uint32_t>(value >> right_bits);
    uint32_t right = static_cast<uint32_t>(value) & right_mask;
    for (uint32_t round = 0; round < num_rounds; round += 2) {
      left ^= round_bits(seed, epoch, round, right) & left_mask;
      right ^= round_bits(seed, epoch, round + 1, left) & right_mask;
    }
    value = uint64_t{left} << right_bits | right;
  } while (value >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(value);
}

int64_t SampleRange::per_pass() const {
  if (count == 0 || weight == 1) return count;
  return std::max<int64_t>(1, std::llround(weight * static_cast<double>(count)));
}

int64_t SampleLane::size() const {
  int64_t size = 0;
  for (const SampleRange& range : samples) size += range.per_pass();
  return size;
}

SampleOrder::SampleOrder(uint64_t seed, std::vector<SampleLane> lanes, int64_t global_batch,
                         int64_t num_endless_lanes, int64_t begin)
    : seed_(begun_seed(seed, begin)),
      lanes_(std::move(lanes)),
      global_batch_(global_batch),
      num_endless_lanes_(num_endless_lanes),
      begin_(begin) {
  for (const SampleLane& lane : lanes_) {
    sizes_.push_back(lane.size());
    if (sizes_.back() < 1)
      fail("loader", "expected samples in every lane, got none in lane {}", sizes_.size() - 1);
    samples_per_epoch_ += sizes_.back();
  }
}

int64_t SampleOrder::batches_before(size_t lane, int64_t epoch) const {
  return epoch * sizes_[lane] / global_batch_;
}

int64_t SampleOrder::batches_before(int64_t epoch) const {
  int64_t batches = 0;
  for (size_t lane = 0; lane < lanes_.size(); ++lane) batches += batches_before(lane, epoch);
  return batches;
}

// Returns the epoch that global batch `batch` belongs to. Rounding down costs each lane less than a batch,
// which bounds the search from above.
int64_t SampleOrder::epoch_of(int64_t batch) const {
  const auto lanes = static_cast<int64_t>(lanes_.size());
  int64_t low = batch * global_batch_ / samples_per_epoch_;  // batches_before(low) <= batch
  int64_t high = (batch + lanes + 1) * global_batch_ / samples_per_epoch_ + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (batches_before(middle) <= batch ? low : high) = middle;
  }
  return low;
}

SampleOrder::LanePlace SampleOrder::batch_at(int64_t position) const {
  if (lanes_.empty()) {
    const int64_t batch = position / global_batch_;
    return {.lane = batch % num_endless_lanes_, .first = batch * global_batch_};
  }
  const int64_t batch = (position - begin_) / global_batch_;
  if (lanes_.size() == 1) return {.lane = 0, .first = batch * global_batch_};
  const int64_t epoch = epoch_of(batch), before = batches_before(epoch);
  int64_t turn = shuffled_index(seed_, epoch, batches_before(epoch + 1) - before, batch - before);
  for (size_t lane = 0;; ++lane) {
    const int64_t first = batches_before(lane, epoch), count = batches_before(lane, epoch + 1) - first;
    if (turn < count) return {.lane = static_cast<int64_t>(lane), .first = (first + turn) * global_batch_};
    turn -= count;
  }
}

int64_t SampleOrder::sample_of(int64_t lane, int64_t place) const {
  const SampleLane& samples = lanes_[lane];
  const int64_t size = sizes_[lane], pass = place / size;
  const uint64_t seed = lane_seed(seed_, lanes_.size(), lane);
  int64_t index = shuffled_index(seed, pass, size, place % size);
  for (const SampleRange& range : samples.samples) {
    const int64_t taken = range.per_pass();
    if (index >= taken) {
      index -= taken;
      continue;
    }
    if (taken == range.count) return range.sample(index);
    const int64_t of_range = pass * taken + index;
    return range.sample(shuffled_index(lane_seed(~seed, samples.samples.size() + 1, range.first),
                                       of_range / range.count, range.count, of_range % range.count));
  }
  throw std::logic_error("SampleOrder: a lane is shorter than its size");
}

int64_t SampleOrder::sample_at(int64_t position, int64_t further) const {
  if (lanes_.empty()) return position + further;
  const LanePlace place = batch_at(position);
  return sample_of(place.lane, place.first + position % global_batch_ + further);
}

bool is_held_out(std::string_view name, double share) {
  return std::ldexp(static_cast<double>(XXH3_64bits(name.data(), name.size())), -64) < share;
}

std::vector<SampleLane> split_lanes(const std::vector<SampleLane>& lanes, double share, Split split,
                                    const std::function<std::string(int64_t)>& name_of) {
  std::vector<SampleLane> parts(lanes.size());
  for (size_t lane = 0; lane < lanes.size(); ++lane)
    for (const SampleRange& range : lanes[lane].samples) {
      auto chosen = std::make_shared<std::vector<int64_t>>();
      for (int64_t i = 0; i < range.count; ++i)
        if (is_held_out(name_of(range.sample(i)), share) == (split == Split::kHeldOut))
          chosen->push_back(range.sample(i));
      if (chosen->empty()) continue;
      const int64_t first = chosen->front(), count = static_cast<int64_t>(chosen->size());
      parts[lane].samples.push_back(
          {.first = first, .count = count, .weight = range.weight, .chosen = std::move(chosen)});
    }
  return parts;
}

int64_t samples_per_pass(const std::vector<SampleLane>& lanes) {
  int64_t samples = 0;
  for (const SampleLane& lane : lanes) samples += lane.size();
  return samples;
}

}  // namespace kiln
