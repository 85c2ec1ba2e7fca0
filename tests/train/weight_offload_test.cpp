// At stage 3 the weights in the compute dtype may wait on a disk: the same bits, and no more of them in
// memory than are gathered or read ahead.

#include <map>

#include "parallel/rank_threads.h"
#include "test_files.h"
#include "train/checkpoints.h"
#include "train/placements.h"

namespace kiln {
namespace {

using test::dry_run, test::expect_equal, test::Outcome, test::placed, test::TinyOptions, test::TinyTraining;

constexpr int64_t kStreamedBatch = 8;  // uneven rows on 3 ranks
constexpr Placement kPlacements[] = {Placement::kDevice, Placement::kHost, Placement::kNvme};

TinyOptions stage_three(at::ScalarType dtype = at::kFloat, int64_t prefetch = 1) {
  return {.compute_dtype = dtype, .zero = {.stage = 3, .prefetch_segments = prefetch}};
}

TinyOptions on_nvme(const TinyOptions& options, Placement state = Placement::kDevice) {
  return placed(options, state, Placement::kNvme);
}

class WeightPlacements : public ::testing::TestWithParam<at::ScalarType> {};

// KILN_FULL=1: one pass and four on any ranks in every dtype. Else each pair of them.
TEST_P(WeightPlacements, TrainTheSameBits) {
  const bool full = std::getenv("KILN_FULL") != nullptr;
  const int64_t num_steps = full ? 6 : 4;
  for (int64_t world_size = 1; world_size <= 3; ++world_size) {
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const int64_t micro_steps : {1, 4}) {
        const bool is_odd = (world_size + (GetParam() == at::kBFloat16)) % 2 == 1;
        if (!full && is_odd != (micro_steps > 1)) continue;
        TinyOptions options = stage_three(GetParam(), /*prefetch=*/world_size - 1);
        options.group = group;
        options.max_grad_norm = 0.5;
        options.accumulate_f32 = micro_steps > 1;
        options.micro_batch =
            micro_steps > 1 ? std::max<int64_t>(1, kStreamedBatch / world_size / micro_steps) : 0;
        options.memory.assign(4, {world_size == 2 ? Activations::kRecompute : Activations::kKeep});
        const Outcome expected = train(options, kStreamedBatch, num_steps);
        for (const Placement state : kPlacements) {
          const Outcome outcome = train(on_nvme(options, state), kStreamedBatch, num_steps);
          EXPECT_EQ(outcome.losses, expected.losses) << world_size << " ranks, " << micro_steps << " passes";
          expect_equal(outcome.state, expected.state);
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(ComputeDtypes, WeightPlacements,
                         ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));

TEST(WeightOffload, ReadsAheadOnAnyNumberOfBuffers) {
  const Outcome expected = train(stage_three(), kStreamedBatch, 4);
  for (const int64_t prefetch : {0, 1, 2, 3, 100}) {
    const Outcome outcome = train(on_nvme(stage_three(at::kFloat, prefetch)), kStreamedBatch, 4);
    EXPECT_EQ(outcome.losses, expected.losses) << prefetch;
    expect_equal(outcome.state, expected.state);
  }
}

// Small segments stay whole on every rank, and take nothing of the disk.
TEST(WeightOffload, SegmentsBelowTheThresholdStay) {
  TinyOptions options = stage_three();
  options.zero.persist_threshold = 10000;
  const TinyTraining some(on_nvme(options));
  int64_t stay = 0, go = 0;
  for (const auto& segment : some.state->segments) {
    const bool stays = segment.unit.layout().size < options.zero.persist_threshold;
    EXPECT_EQ(segment.unit.placement().params, stays ? Placement::kDevice : Placement::kNvme);
    (stays ? stay : go) += test::disk_bytes(4 * segment.unit.shard_size());
  }
  EXPECT_GT(stay, 0);
  EXPECT_EQ(some.state->nvme->disk_bytes(), go);
  EXPECT_EQ(take_steps(some, kStreamedBatch, 0, 3).losses, train(options, kStreamedBatch, 3).losses);
}

// Notes how many bytes were asked of the disk when each segment's forward began.
class ReadsByForward : public StepObserver {
 public:
  explicit ReadsByForward(const BlockStore& store) : store_(store), before_(store.bytes_read()) {}
  void begin(StepPhase phase, int64_t segment) override {
    if (phase == StepPhase::kForward) bytes[segment] = store_.bytes_read() - before_;
  }
  void end(StepPhase, int64_t) override {}
  std::map<int64_t, int64_t> bytes;

 private:
  const BlockStore& store_;
  int64_t before_;
};

TEST(WeightOffload, TheDiskReadsBesideTheCompute) {
  TinyOptions options = on_nvme(stage_three(at::kBFloat16));
  options.depth = 6;
  const TinyTraining tiny(options);
  tiny.step->run(tiny.batch(kStreamedBatch), 1e-3);
  ReadsByForward observer(*tiny.state->nvme->store());
  tiny.step->observe(&observer);
  tiny.step->run(tiny.batch(kStreamedBatch), 1e-3);
  tiny.step->observe(nullptr);
  const auto& segments = tiny.state->segments;
  int64_t asked = 0;  // the first two were read when the update ended, the third is while the first computes
  for (size_t s = 0; s + 2 < segments.size(); ++s) {
    asked += test::disk_bytes(2 * segments[s + 2].unit.shard_size());
    EXPECT_EQ(observer.bytes.at(static_cast<int64_t>(s)), asked) << s;
  }
}

// Forward and backward of each micro-step read the weights once, less what is still in the buffers; the
// update writes them once and reads none.
TEST(WeightOffload, MovesNoMoreThanTheFormulaSays) {
  for (const int64_t micro_steps : {1, 4}) {
    TinyOptions options = on_nvme(stage_three(at::kBFloat16));
    options.depth = 6;
    options.micro_batch = kStreamedBatch / micro_steps;
    const TinyTraining tiny(options);
    const BlockStore& store = *tiny.state->nvme->store();
    tiny.step->run(tiny.batch(kStreamedBatch), 1e-3);
    const int64_t read = store.bytes_read(), written = store.bytes_written();
    tiny.step->run(tiny.batch(kStreamedBatch), 1e-3);
    EXPECT_EQ(store.bytes_written() - written, tiny.state->nvme->disk_bytes());
    EXPECT_LE(store.bytes_read() - read, 2 * micro_steps * tiny.state->nvme->disk_bytes());
    EXPECT_GE(store.bytes_read() - read, micro_steps * tiny.state->nvme->disk_bytes());
  }
}

TEST(WeightOffload, OnlyTheBuffersAreInMemory) {
  install_tracking_cpu_allocator();
  TinyOptions options = stage_three(at::kBFloat16);
  options.depth = 6;
  const auto live_of = [](const TinyOptions& placement) {
    return test::live_bytes_of(placement, kStreamedBatch);
  };
  live_of(options);  // what is made once per process
  for (const Placement state : {Placement::kDevice, Placement::kNvme}) {
    int64_t elements = 0, largest = 0, buffers = 0;
    {
      const TinyTraining tiny(on_nvme(options, state));
      elements = test::shard_sizes(tiny).all;
      largest = test::shard_sizes(tiny).largest;
      buffers = test::bytes_of(tiny.state->nvme->weights->buffers());
    }
    EXPECT_LE(buffers, 3 * (2 * largest + 2 * BlockStore::kAlignment));  // two gathered, one read ahead
    EXPECT_LT(buffers, 2 * elements);
    EXPECT_EQ(live_of(placed(options, state)) - live_of(on_nvme(options, state)), 2 * elements - buffers);
  }
}

TEST(WeightOffload, ADryRunKnowsWhereWeightsAre) {
  const TinyOptions options = stage_three(at::kBFloat16);
  OffloadedBytes none, host, nvme, cpu;
  const StepMemory on_device = dry_run(DryRunDevice::kCuda, placed(options, Placement::kHost), none),
                   on_host = dry_run(DryRunDevice::kCuda, placed(options, Placement::kHost, Placement::kHost),
                                     host),
                   on_disk = dry_run(DryRunDevice::kCuda, on_nvme(options, Placement::kHost), nvme),
                   of_cpu = dry_run(DryRunDevice::kCpu, on_nvme(options), cpu);
  const int64_t weights = on_device.persistent.at(MemoryKind::kWeights);
  EXPECT_EQ(on_host.persistent.count(MemoryKind::kWeights), 0u);
  EXPECT_EQ(on_disk.persistent, on_host.persistent);
  EXPECT_LT(on_disk.peak_bytes, on_device.peak_bytes);
  EXPECT_EQ(none.disk + host.disk, 0);
  EXPECT_EQ(host.host - none.host, weights);
  EXPECT_GE(nvme.disk, weights);
  EXPECT_GT(nvme.host, none.host);  // the buffers
  EXPECT_EQ(cpu.host, 0);
  EXPECT_EQ(cpu.disk, nvme.disk);
  EXPECT_GT(of_cpu.persistent.at(MemoryKind::kStaging), 0);
}

// They go from the host to where they are whole, with no copy of them in between.
TEST(WeightOffload, OneRankNeedsNoMoreOfItsDeviceThanWhatIsGathered) {
  TinyOptions options = stage_three(at::kBFloat16);
  options.depth = 6;
  OffloadedBytes none, host;
  const StepMemory on_device = dry_run(DryRunDevice::kCuda, placed(options, Placement::kDevice), none),
                   on_host = dry_run(DryRunDevice::kCuda,
                                     placed(options, Placement::kDevice, Placement::kHost), host);
  EXPECT_EQ(on_device.peak_bytes - on_host.peak_bytes, on_device.persistent.at(MemoryKind::kWeights));
}

TEST(WeightOffload, ACheckpointResumesOnAnyPlacement) {
  const TinyOptions plain = stage_three(at::kBFloat16);
  const Outcome expected = train(plain, kStreamedBatch, 6);
  const TinyOptions placements[] = {plain, on_nvme(plain), on_nvme(plain, Placement::kNvme)};
  for (const TinyOptions& from : placements) {
    const test::TempFolder run;
    const TinyTraining before(from);
    take_steps(before, kStreamedBatch, 0, 3);
    const std::string folder = save_checkpoint(run.path(), *before.state, {.step = 3});
    for (const TinyOptions& to : placements) {
      const TinyTraining after(to);
      take_steps(after, kStreamedBatch, 7, 8);  // weights of another training are in the buffers
      load_checkpoint(folder, *after.state);
      const Outcome outcome = take_steps(after, kStreamedBatch, 3, 6);
      EXPECT_EQ(outcome.losses, std::vector<double>(expected.losses.begin() + 3, expected.losses.end()));
      expect_equal(outcome.state, expected.state);
    }
  }
}

TEST(WeightOffload, AFailingDiskEndsTheStep) {
  const TinyTraining tiny(on_nvme(stage_three()));
  tiny.step->run(tiny.batch(kStreamedBatch), 1e-3);
  ASSERT_TRUE(test::break_store());
  EXPECT_ERROR(tiny.step->run(tiny.batch(kStreamedBatch), 1e-3), "[nvme] the disk of --nvme-path failed",
               "checkpoint is untouched");
}

}  // namespace
}  // namespace kiln
