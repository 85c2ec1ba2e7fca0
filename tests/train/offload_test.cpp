// Where the optimizer's state lies changes no bit of what is trained, and what lies on a disk takes no memory
// but its three buffers.

#include <iterator>
#include <limits>
#include <map>

#include "parallel/offload/host_exchange.h"
#include "parallel/rank_threads.h"
#include "test_files.h"
#include "train/checkpoints.h"
#include "train/placements.h"

namespace kiln {
namespace {

using test::dry_run, test::expect_equal, test::Outcome, test::placed, test::rows_of, test::state_of,
    test::TinyOptions, test::TinyTraining, test::train;

constexpr int64_t kOffloadedBatch = 4;  // uneven rows on 3 ranks

constexpr at::ScalarType kPlacedDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

class Placements : public ::testing::TestWithParam<at::ScalarType> {};

// KILN_FULL=1: every stage on any ranks in every dtype. Else each pair of them, and some of these accumulate.
TEST_P(Placements, TrainTheSameBits) {
  const bool full = std::getenv("KILN_FULL") != nullptr;
  const int64_t num_steps = full ? 30 : 8,
                dtype = std::ranges::find(kPlacedDtypes, GetParam()) - std::begin(kPlacedDtypes);
  for (int64_t world_size = 1; world_size <= 3; ++world_size) {
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (int64_t stage = 0; stage <= 3; ++stage) {
        if (!full && (world_size + stage) % 3 != dtype) continue;
        const bool accumulates = (world_size + stage) % 2 == 1;
        const TinyOptions options{.compute_dtype = GetParam(),
                                  .accumulate_f32 = accumulates,
                                  .micro_batch = accumulates ? 1 : 0,
                                  .max_grad_norm = 0.5,
                                  .ema_decays = {0.9, 0.99},
                                  .objective = "epsilon",
                                  .group = group,
                                  .zero = {.stage = stage}};
        const Outcome expected = train(options, kOffloadedBatch, num_steps);
        for (const Placement placement : {Placement::kHost, Placement::kNvme}) {
          if (placement == Placement::kHost && accumulates) continue;
          const Outcome outcome = train(placed(options, placement), kOffloadedBatch, num_steps);
          EXPECT_EQ(outcome.losses, expected.losses) << world_size << " ranks, stage " << stage;
          expect_equal(outcome.state, expected.state);
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(ComputeDtypes, Placements, ::testing::ValuesIn(kPlacedDtypes));

TEST(Offload, ASkippedStepMovesNothingAndWritesNothing) {
  const TinyTraining tiny(placed({}, Placement::kNvme));
  tiny.step->run(tiny.batch(kOffloadedBatch), 1e-3);
  const std::vector<at::Tensor> before = state_of(tiny);
  const int64_t written = tiny.state->nvme->store()->bytes_written();
  StepBatch batch = tiny.batch(kOffloadedBatch);
  batch.x_0.fill_(std::numeric_limits<float>::quiet_NaN());
  EXPECT_FALSE(tiny.step->run(batch, 1e-3).applied);
  EXPECT_EQ(tiny.state->nvme->store()->bytes_written(), written);
  expect_equal(state_of(tiny), before);
}

// Every update reads and writes each unit once, less what is still in the buffers.
TEST(Offload, AnUpdateMovesTheStateOnceEachWay) {
  const TinyTraining tiny(placed({}, Placement::kNvme));
  const BlockStore& store = *tiny.state->nvme->store();
  tiny.step->run(tiny.batch(kOffloadedBatch), 1e-3);
  const int64_t read = store.bytes_read(), written = store.bytes_written();
  for (int step = 0; step < 4; ++step) tiny.step->run(tiny.batch(kOffloadedBatch), 1e-3);
  EXPECT_EQ(store.bytes_written() - written, 4 * tiny.state->nvme->disk_bytes());
  EXPECT_LE(store.bytes_read() - read, 4 * tiny.state->nvme->disk_bytes());
}

// Bytes that have been asked of the disk, when a phase of a step begins.
class ReadSoFar : public StepObserver {
 public:
  explicit ReadSoFar(const BlockStore& store) : store_(store), before_(store.bytes_read()) {}
  void begin(StepPhase phase, int64_t) override { bytes.try_emplace(phase, store_.bytes_read() - before_); }
  void end(StepPhase, int64_t) override {}
  std::map<StepPhase, int64_t> bytes;  // when it began first

 private:
  const BlockStore& store_;
  int64_t before_;
};

TEST(Offload, TheDiskReadsTheFirstStatesDuringTheLastBackward) {
  const TinyTraining tiny(placed({.micro_batch = 2, .depth = 6}, Placement::kNvme));
  tiny.step->run(tiny.batch(kOffloadedBatch), 1e-3);
  ReadSoFar observer(*tiny.state->nvme->store());
  tiny.step->observe(&observer);
  tiny.step->run(tiny.batch(kOffloadedBatch), 1e-3);
  tiny.step->observe(nullptr);
  int64_t first_three = 0;  // as many as there are buffers, which held the last three
  for (size_t s = 0; s < 3; ++s)
    first_three += test::disk_bytes(16 * tiny.state->segments[s].unit.shard_size());
  EXPECT_EQ(observer.bytes.at(StepPhase::kBackward), 0);  // the first micro-step's
  EXPECT_EQ(observer.bytes.at(StepPhase::kGradNorm), first_three);
}

TEST(Offload, UnitsShareTheBuffersOnlyOneAfterAnother) {
  const TinyTraining tiny(placed({}, Placement::kNvme));
  auto& segments = tiny.state->segments;
  ASSERT_EQ(segments.size(), 4u);
  {
    const StateLease first = segments[0].unit.lease(Access::kWrite);
    const StateLease again = segments[0].unit.lease(Access::kRead);  // sees the writer's changes
    first.master.fill_(3);
    EXPECT_TRUE(at::equal(again.master, first.master));
    const StateLease second = segments[1].unit.lease(Access::kRead),
                     third = segments[2].unit.lease(Access::kRead);
    EXPECT_THROW(segments[3].unit.lease(Access::kRead), std::logic_error);
  }
  for (size_t s = 1; s < 4; ++s) segments[s].unit.lease(Access::kRead);  // drive it out of its buffer
  const StateLease first = segments[0].unit.lease(Access::kRead);
  EXPECT_TRUE(at::equal(first.master, at::full_like(first.master, 3)));
}

// --- memory ---

TEST(Offload, OnlyTheBuffersAreInMemory) {
  install_tracking_cpu_allocator();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto live_of = [&](Placement placement) {
      return test::live_bytes_of(placed({.compute_dtype = dtype}, placement), kOffloadedBatch);
    };
    live_of(Placement::kDevice);  // what is made once per process
    const TinyTraining tiny(placed({.compute_dtype = dtype}, Placement::kNvme));
    const auto [elements, largest] = test::shard_sizes(tiny);
    const int64_t buffers = test::bytes_of(tiny.state->nvme->buffers());
    EXPECT_GE(buffers, 3 * 16 * largest);
    EXPECT_LE(buffers, 3 * (16 * largest + 2 * BlockStore::kAlignment));
    // master, two moments, one EMA; in f32 the master was the weights, which stay
    const int64_t state = (dtype == at::kFloat ? 12 : 16) * elements;
    EXPECT_EQ(live_of(Placement::kDevice) - live_of(Placement::kNvme), state - buffers);
    EXPECT_GE(tiny.state->nvme->disk_bytes(), 16 * elements);
  }
}

// The same program on meta tensors: what a GPU would not hold is told as bytes of the host and of the disk.
TEST(Offload, ADryRunKnowsWhereStateIs) {
  const TinyOptions options{.compute_dtype = at::kBFloat16};
  OffloadedBytes none, host, nvme, cpu;
  const StepMemory on_device = dry_run(DryRunDevice::kCuda, options, none);
  const StepMemory on_host = dry_run(DryRunDevice::kCuda, placed(options, Placement::kHost), host);
  const StepMemory on_nvme = dry_run(DryRunDevice::kCuda, placed(options, Placement::kNvme), nvme);
  const StepMemory of_cpu = dry_run(DryRunDevice::kCpu, placed(options, Placement::kNvme), cpu);
  const int64_t state = on_device.persistent.at(MemoryKind::kMaster) +
                        on_device.persistent.at(MemoryKind::kMoments) +
                        on_device.persistent.at(MemoryKind::kEma);
  EXPECT_EQ(none.host + none.disk, 0);
  EXPECT_EQ(on_host.persistent_bytes, on_device.persistent_bytes - state);
  EXPECT_EQ(on_nvme.persistent_bytes, on_host.persistent_bytes);
  EXPECT_LE(on_host.peak_bytes, on_device.peak_bytes - state);
  EXPECT_GT(host.host, state);  // and two units' gradients and weights on their way
  EXPECT_EQ(host.disk, 0);
  EXPECT_GE(nvme.disk, state);
  EXPECT_EQ(cpu.host, 0);
  EXPECT_EQ(cpu.disk, nvme.disk);
  EXPECT_EQ(of_cpu.persistent.count(MemoryKind::kMaster), 0u);
  EXPECT_GT(of_cpu.persistent.at(MemoryKind::kStaging), 0);
}

// --- checkpoints and failures ---

TEST(Offload, ACheckpointResumesOnAnyPlacement) {
  const Outcome expected = train({}, kOffloadedBatch, 6);
  for (const Placement from : {Placement::kDevice, Placement::kHost, Placement::kNvme}) {
    const test::TempFolder run;
    const TinyTraining before(placed({}, from));
    for (uint64_t step = 0; step < 3; ++step) before.step->run(before.batch(kOffloadedBatch, step), 1e-3);
    const std::string folder = save_checkpoint(run.path(), *before.state, {.step = 3});
    for (const Placement to : {Placement::kDevice, Placement::kHost, Placement::kNvme}) {
      const TinyTraining after(placed({}, to));
      load_checkpoint(folder, *after.state);
      for (uint64_t step = 3; step < 6; ++step)
        EXPECT_EQ(after.step->run(after.batch(kOffloadedBatch, step), 1e-3).loss, expected.losses[step]);
      expect_equal(state_of(after), expected.state);
    }
  }
}

TEST(Offload, AFailingDiskEndsTheStepAndLeavesTheCheckpoint) {
  const test::TempFolder run;
  const TinyTraining tiny(placed({}, Placement::kNvme));
  tiny.step->run(tiny.batch(kOffloadedBatch), 1e-3);
  const std::string folder = save_checkpoint(run.path(), *tiny.state, {.step = 1});
  const std::vector<at::Tensor> saved = state_of(tiny);
  ASSERT_TRUE(test::break_store());
  EXPECT_ERROR(tiny.step->run(tiny.batch(kOffloadedBatch), 1e-3), "[nvme]", "checkpoint is untouched");
  EXPECT_ERROR(save_checkpoint(run.path(), *tiny.state, {.step = 2}), "[nvme]", "checkpoint is untouched");
  const std::vector<Checkpoint> checkpoints = list_checkpoints(run.path());
  ASSERT_EQ(checkpoints.size(), 1u);
  const TinyTraining resumed{TinyOptions{}};
  load_checkpoint(folder, *resumed.state);
  expect_equal(state_of(resumed), saved);
}

// --- the way between a device and its host ---

TEST(HostExchange, BringsGradientsAndWeightsInTurn) {
  HostExchange exchange(at::kCPU, 8, at::kBFloat16, at::kFloat);
  EXPECT_EQ(exchange.host_bytes(), 2 * 8 * (2 + 4));
  std::vector<at::Tensor> gradients, weights;
  for (int64_t unit = 0; unit < 5; ++unit) {
    gradients.push_back(at::full({4 + unit % 3}, unit, at::kBFloat16));
    weights.push_back(at::zeros({4 + unit % 3}));
  }
  exchange.fetch(gradients[0]);
  for (size_t unit = 0; unit < gradients.size(); ++unit) {
    if (unit + 1 < gradients.size()) exchange.fetch(gradients[unit + 1]);
    const at::Tensor taken = exchange.take();
    EXPECT_TRUE(at::equal(taken, gradients[unit]));
    exchange.weights(weights[unit].numel()).copy_(taken * 2);
    exchange.send(weights[unit]);
  }
  for (size_t unit = 0; unit < weights.size(); ++unit)
    EXPECT_TRUE(at::equal(weights[unit], at::full_like(weights[unit], 2.0 * static_cast<double>(unit))));
}

}  // namespace
}  // namespace kiln
