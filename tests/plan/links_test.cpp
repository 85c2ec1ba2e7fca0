// Priced collectives beside what others measured with nccl-tests.
#include "plan/ranks/step_time.h"

#include <gtest/gtest.h>

#include <string>

#include "plan/plan_settings.h"

namespace kiln {
namespace {

using Operation = CollectiveObserver::Operation;

CollectiveObserver::Start collective(Operation operation, int64_t ranks, int64_t bytes) {
  return {.operation = operation, .bytes = bytes, .num_ranks = ranks};
}

// Returns GB/s as nccl-tests count them: what every rank of a ring would send, per second.
double bus_bandwidth(const MachineProfile& machine, Operation operation, int64_t ranks, int64_t bytes) {
  const double seconds = Links(machine, ranks).seconds(collective(operation, ranks, bytes));
  const double sent = (operation == Operation::kAllReduce ? 2.0 : 1.0) * static_cast<double>(ranks - 1) /
                      static_cast<double>(ranks) * static_cast<double>(bytes);
  return sent / seconds / 1e9;
}

struct Published {
  const char *source, *gpu;
  int64_t gpus, gpus_per_node;
  double gbit;  // of a node
  double bus_bandwidth;
  Operation operation = Operation::kAllReduce;
  bool switches_sum = true;  // where they can
};

const Published kPublished[] = {
    // Between nodes.
    {"NVIDIA/nccl issue 412, its author", "A800-80G", 96, 8, 200, 24},
    {"NVIDIA/nccl issue 495", "A100-80G", 16, 8, 800, 75},
    {"NVIDIA/nccl-tests issue 175", "A100-80G", 16, 8, 800, 86},
    {"NVIDIA/nccl-tests issue 100", "A100-80G", 16, 8, 800, 91},
    {"NVIDIA/nccl issue 1576, its authors, DGX A100", "A100-80G", 16, 8, 1600, 192},
    {"Saturn Cloud's table, 400 to 450", "H100", 16, 8, 3200, 425},
    {"NVIDIA/nccl issue 2409 of nccl-tests issue 309", "H100", 16, 8, 3200, 470},
    {"NVIDIA/nccl-tests issue 309, no sums in switches", "H100", 16, 8, 3200, 369, Operation::kAllReduce,
     false},
    {"NVIDIA/nccl issue 1221", "H100", 32, 8, 3200, 320},
    {"Voltage Park", "H100", 32, 8, 3200, 331},
    {"Voltage Park", "H100", 32, 8, 3200, 324, Operation::kAllGather},
    {"NVIDIA/nccl-tests issue 232, one GPU of each node", "H100", 2, 1, 1600, 50},
    // Within one.
    {"NVIDIA/nccl-tests issue 175", "A100-80G", 8, 8, 800, 233},
    {"NVIDIA/nccl issue 412, its author", "A800-80G", 8, 8, 200, 160},
    {"NVIDIA/nccl-tests issue 212, their author", "H100", 8, 8, 3200, 480},
    {"NVIDIA/nccl-tests issue 212, their author", "H100", 8, 8, 3200, 370, Operation::kAllGather},
    {"NVIDIA/nccl-tests issue 272", "H200", 8, 8, 3200, 475},
    {"NVIDIA/nccl issue 1807", "B200", 8, 8, 3200, 830},
    {"NVIDIA/nccl issue 1639", "RTX-5090", 8, 8, 100, 28},
};

TEST(Links, ReachThePublishedBusBandwidths) {
  constexpr int64_t kLarge = int64_t{8} << 30;
  for (const Published& row : kPublished) {
    PlanOptions options;
    options.gpu = row.gpu;
    options.gpus_per_node = row.gpus_per_node;
    options.network_gbit = row.gbit;
    MachineProfile machine = planned_machine(options);
    if (!row.switches_sum) machine.switch_sum_bytes_per_s = 0;
    EXPECT_NEAR(bus_bandwidth(machine, row.operation, row.gpus, kLarge), row.bus_bandwidth,
                0.15 * row.bus_bandwidth)
        << row.source << ": " << row.gpus << " x " << row.gpu;
  }
}

// The built-in networks are those of NVIDIA's own systems.
TEST(Links, OfBuiltInNodesAreThoseOfTheirVendor) {
  EXPECT_EQ(find_profile("A100-80G").network_bytes_per_s, network_rate(1600));
  EXPECT_EQ(find_profile("H100").network_bytes_per_s, network_rate(3200));
  EXPECT_EQ(find_profile("RTX-4090").network_bytes_per_s, network_rate(100));
}

// An all-reduce has trees, the others have rings alone. A ring's node adds its GPUs' hops and one between
// nodes; a tree's level adds two hops between nodes.
TEST(Links, HopsGrowWithTheNodesOfARingAndTheLogarithmOfATree) {
  const MachineProfile machine = find_profile("A100-80G");
  const auto seconds = [&](Operation operation, int64_t nodes) {
    return Links(machine, 8 * nodes).seconds(collective(operation, 8 * nodes, 1024));
  };
  EXPECT_NEAR(seconds(Operation::kAllReduce, 2), 47e-6, 0.15 * 47e-6);  // 2 x 8 H20 (NVIDIA/nccl issue 1244)
  const auto growth = [&](Operation operation, int64_t nodes) {
    return seconds(operation, nodes) - seconds(operation, 2);
  };
  const double of_level = growth(Operation::kAllReduce, 4), of_nodes = growth(Operation::kAllGather, 4);
  EXPECT_GT(of_level, 1e-6);
  EXPECT_GT(of_nodes, of_level);
  EXPECT_NEAR(growth(Operation::kAllReduce, 128), 6 * of_level, 1e-3 * of_level);
  EXPECT_NEAR(growth(Operation::kAllGather, 128), 63 * of_nodes, 0.05 * of_nodes);
}

// Each rank sends a share of the bytes to each of the others in turn. What is reduced is reduced for all.
TEST(Links, OfACpuAreRingsOfMessages) {
  MachineProfile machine = find_profile("cpu");
  machine.rank_hop_s = 1e-3;
  machine.peer_bytes_per_s = 1e9;
  machine.speed = {};
  const auto seconds = [&](Operation operation, int64_t ranks) {
    return Links(machine, ranks).seconds(collective(operation, ranks, 800'000'000));
  };
  EXPECT_DOUBLE_EQ(seconds(Operation::kAllGather, 4), 3 * 1e-3 + 0.75 * 0.8);
  EXPECT_DOUBLE_EQ(seconds(Operation::kAllReduce, 4), 2 * (3 * 1e-3 + 0.75 * 0.8));
  EXPECT_DOUBLE_EQ(seconds(Operation::kReduceScatter, 4), seconds(Operation::kAllReduce, 4));
  EXPECT_DOUBLE_EQ(seconds(Operation::kAllGather, 2), 1e-3 + 0.5 * 0.8);
  EXPECT_EQ(seconds(Operation::kAllGather, 1), 0);
  const double before = seconds(Operation::kAllReduce, 4);
  machine.speed.copy = 1.5;  // they move bytes through memory
  EXPECT_DOUBLE_EQ(seconds(Operation::kAllReduce, 4), 1.5 * before);
  EXPECT_FALSE(Links(machine, 4).are_beside_compute());
  EXPECT_EQ(ranks_on_node(machine, 4), 4);
}

// Sharded within nodes, 8 groups of one GPU per node exchange an eighth each: together as much as one ring.
TEST(Links, GroupsOfOnePlaceShareTheNetworkOfTheirNodes) {
  const MachineProfile machine = find_profile("A100-80G");
  const int64_t bytes = int64_t{8} << 30;
  const double whole = Links(machine, 32).seconds(collective(Operation::kAllReduce, 32, bytes));
  CollectiveObserver::Start shard = collective(Operation::kAllReduce, 4, bytes / 8);
  shard.on_one_machine = false;
  EXPECT_NEAR(Links(machine, 32).seconds(shard), whole * (3.0 / 4) / (31.0 / 32), 0.02 * whole);
  const double node = Links(machine, 32).seconds(collective(Operation::kAllReduce, 8, bytes));
  EXPECT_EQ(node, Links(machine, 8).seconds(collective(Operation::kAllReduce, 8, bytes)));
}

std::vector<ScalingPoint> scaling(const std::string& gpu, int64_t stage, int64_t gpus_per_node = 0,
                                  double gbit = 0) {
  PlanOptions options = test::plan_options(
      gpu, 8,
      {{"model", "DiT-XL/2"}, {"global-batch", 256}, {"compute-dtype", "bf16"}, {"zero-stage", stage}});
  options.gpus_per_node = gpus_per_node;
  options.network_gbit = gbit;
  return make_plan(options).scaling;
}

// Two nodes of data-centre GPUs keep nearly all of data parallel's speed. Cards on one slow network do not.
TEST(Links, MoreGpusAreFasterUnlessTheirNetworkIsSlow) {
  const auto efficiency = [](const std::vector<ScalingPoint>& points, int64_t gpus) {
    return std::ranges::find(points, gpus, &ScalingPoint::gpus)->efficiency;
  };
  for (const char* gpu : {"A100-80G", "H100", "RTX-4090"})
    for (const int64_t stage : {0, 1, 2, 3}) {
      const std::vector<ScalingPoint> points = scaling(gpu, stage);
      for (size_t i = 1; i < points.size(); ++i)
        EXPECT_GT(points[i].images_per_s, points[i - 1].images_per_s)
            << gpu << ", stage " << stage << ", " << points[i].gpus;
    }
  for (const char* gpu : {"A100-80G", "H100"}) EXPECT_GT(efficiency(scaling(gpu, 0), 16), 0.95) << gpu;
  EXPECT_LT(efficiency(scaling("RTX-4090", 0, 4, 10), 8), 0.5);
  // The number of machines counts: eight cards in one of them meet no network.
  EXPECT_GT(efficiency(scaling("RTX-4090", 0, 8, 10), 8), 0.75);
}

}  // namespace
}  // namespace kiln
