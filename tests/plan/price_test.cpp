#include "plan/price/price.h"

#include <cstdlib>

#include "plan/trace/trace.h"
#include "test_files.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

// Profiles of these tests only.
class Profiles : public ::testing::Test {
 protected:
  void SetUp() override { ::setenv("KILN_PROFILES", folder_.c_str(), 1); }
  void TearDown() override { ::unsetenv("KILN_PROFILES"); }
  test::TempFolder temporary_;
  const fs::path folder_ = temporary_.path() / "profiles";  // made by what is stored
};

OpRecord product(int64_t m, int64_t n, int64_t k, at::ScalarType dtype = at::kBFloat16) {
  return {.name = "kiln::affine",
          .op_class = OpClass::kMatmul,
          .dtype = dtype,
          .flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
          .bytes = 2.0 * static_cast<double>(m * k + n * k + m * n),
          .m = m,
          .n = n,
          .k = k};
}

OpRecord elementwise(double bytes) { return {.name = "aten::mul", .dtype = at::kFloat, .bytes = bytes}; }

TEST_F(Profiles, NamesWithoutRegardToCaseAndDashes) {
  EXPECT_EQ(find_profile("a100 80g").name, "A100-80G");
  EXPECT_EQ(find_profile("rtx4090").name, "RTX-4090");
  EXPECT_EQ(find_profile("cpu").device, DryRunDevice::kCpu);
}

TEST_F(Profiles, AnUnknownNameIsOneLineWithTheClosest) {
  const std::string message = message_of([] { find_profile("A100-60G"); });
  EXPECT_THAT(message, has_all("'A100-60G'", "nearest are A100-", "A100-80G", "--help lists all"));
  EXPECT_LT(message.size(), 200);
  EXPECT_ERROR(find_profile("H10"), "H100");
}

TEST_F(Profiles, JsonRoundTripOfEveryBuiltin) {
  for (MachineProfile profile : builtin_profiles()) {
    profile.rates["kiln::affine bf16"] = {{1e6, 1e-5, 16, 32, 64}, {1e9, 1e-3, 512, 512, 512}};
    const nlohmann::json json = to_json(profile);
    EXPECT_EQ(to_json(profile_from_json(nlohmann::json::parse(json.dump()))), json) << profile.name;
  }
}

// Earlier versions kept the network's share of one GPU, and nothing of a CPU's ranks.
TEST_F(Profiles, OlderOnesAreRead) {
  const auto older = [](const MachineProfile& profile, double node_bytes_per_s) {
    nlohmann::json json = to_json(profile);
    for (const char* key : {"network_bytes_per_s", "switch_sum_bytes_per_s", "rank_hop_s"}) json.erase(key);
    json["node_bytes_per_s"] = node_bytes_per_s;
    return profile_from_json(json);
  };
  EXPECT_EQ(older(find_profile("A100-80G"), 20e9).network_bytes_per_s, 8 * 20e9);
  const MachineProfile cpu = older(find_profile("cpu"), 1e9);
  EXPECT_EQ(cpu.network_bytes_per_s, 0);
  EXPECT_GT(cpu.rank_hop_s, 0);
  nlohmann::json lacking = to_json(find_profile("A100-80G"));
  lacking.erase("network_bytes_per_s");
  EXPECT_ERROR(static_cast<void>(profile_from_json(lacking)), "'network_bytes_per_s'");
}

TEST_F(Profiles, ABrokenFileIsNamed) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "broken.json") << "{\"name\": 3}";
  EXPECT_ERROR(find_profile("A100-80G"), "'name'", "broken.json", "calibrate");
}

TEST_F(Profiles, AStoredProfileIsFoundAgainBeforeTheBuiltin) {
  MachineProfile cpu = find_profile("cpu");
  cpu.measured = true;
  cpu.source = "measured here";
  EXPECT_TRUE(fs::exists(store_profile(cpu)));
  EXPECT_EQ(find_profile("CPU").source, "measured here");
  cpu.machine = "another processor";  // of a shared home folder
  fs::remove_all(folder_);
  store_profile(cpu);
  EXPECT_NE(find_profile("cpu").source, "measured here");
  MachineProfile gpu = find_profile("H100");
  gpu.source = "measured there";
  store_profile(gpu);
  EXPECT_EQ(find_profile("h100").source, "measured there");
}

TEST_F(Profiles, Bf16IsRefusedWhereThereIsNone) {
  const MachineProfile v100 = find_profile("V100");
  EXPECT_NO_THROW(check_dtype(v100, at::kHalf));
  EXPECT_ERROR(price(product(512, 512, 512), v100), "V100", "bf16", "--compute-dtype fp16");
}

TEST_F(Profiles, FiguresAreSane) {
  EXPECT_EQ(builtin_profiles().size(), 20u);
  for (const MachineProfile& p : builtin_profiles()) {
    EXPECT_GT(p.memory_bytes, 8e9) << p.name;
    EXPECT_GE(p.peak_flops.at(at::kHalf), 2 * p.peak_flops.at(at::kFloat) * 0.99) << p.name;
    EXPECT_GT(p.host_link_bytes_per_s, 10e9) << p.name;
    EXPECT_LT(p.host_link_bytes_per_s, p.memory_bytes_per_s) << p.name;
    EXPECT_TRUE(p.matmul_efficiency > 0.3 && p.matmul_efficiency < 1) << p.name;
    EXPECT_EQ(p.source, "vendor figures");
  }
}

TEST(Price, GrowsWithWorkOnEveryBuiltin) {
  for (const MachineProfile& machine : builtin_profiles()) {
    double before = 0;
    for (double bytes = 1; bytes < 1e10; bytes *= 3) {
      const double seconds = price(elementwise(bytes), machine);
      EXPECT_GE(seconds, before) << machine.name << " " << bytes;
      before = seconds;
    }
    for (const int64_t step : {1, 37, 128})
      for (int64_t m = 1, last = 0; m < 4000; last = m, m += step) {
        if (last == 0) continue;
        EXPECT_GE(price(product(m, 768, 768, at::kHalf), machine) * (1 + 1e-12),
                  price(product(last, 768, 768, at::kHalf), machine))
            << machine.name << " " << m;
      }
  }
}

TEST(Price, LargeProductsReachTheAssumedShareAndSmallOnesLess) {
  const MachineProfile a100 = find_profile("A100-80G");
  const OpRecord large = product(32768, 4096, 4096), small = product(256, 256, 1024);
  EXPECT_NEAR(large.flops / price(large, a100) / 312e12, a100.matmul_efficiency, 0.05);
  EXPECT_LT(small.flops / price(small, a100) / 312e12, 0.3);
}

TEST(Price, Tf32IsAnotherMachine) {
  const MachineProfile a100 = find_profile("A100-80G"), v100 = find_profile("V100");
  const OpRecord op = product(8192, 8192, 8192, at::kFloat);
  EXPECT_NEAR(price(op, a100) / price(op, with_tf32(a100)), 8, 0.1);
  EXPECT_EQ(price(op, v100), price(op, with_tf32(v100)));
}

TEST(Price, InterpolatesMeasuredPoints) {
  MachineProfile machine = find_profile("H100");
  machine.op_overhead_s = 0;
  machine.rates["aten::mul f32"] = {{1e3, 1e-6}, {1e5, 1e-4}, {1e6, 2e-4}};
  EXPECT_DOUBLE_EQ(price(elementwise(1e5), machine), 1e-4);
  EXPECT_NEAR(price(elementwise(1e4), machine), 1e-5, 1e-9);
  EXPECT_NEAR(price(elementwise(1e7), machine), 2e-3, 1e-9) << "beyond the last at its rate";
  EXPECT_GT(price(elementwise(5e5), machine), 1e-4);
  EXPECT_LT(price(elementwise(5e5), machine), 2e-4);

  machine.rates["kiln::affine bf16"] = {{2e6, 2e-6, 100, 100, 100}, {2e9, 1e-3, 1000, 1000, 1000}};
  EXPECT_NEAR(price(product(100, 100, 100), machine), 2e-6, 1e-9) << "1 TFLOP/s";
  EXPECT_NEAR(price(product(1000, 1000, 1000), machine), 1e-3, 1e-6) << "2 TFLOP/s";
  const double between = product(300, 300, 300).flops / price(product(300, 300, 300), machine);
  EXPECT_TRUE(between > 1e12 && between < 2e12) << between;
  OpRecord other = product(1000, 1000, 1000);
  other.name = "aten::mm";  // never measured
  EXPECT_NEAR(price(other, machine), 1e-3, 1e-6) << "the class stands in";
}

TEST(Price, FewRowsCostTheReadingOfTheWeights) {
  MachineProfile machine = find_profile("H100");
  machine.op_overhead_s = 0;
  const OpRecord many = product(4096, 4096, 4096), one = product(1, 4096, 4096);
  machine.rates["kiln::affine bf16"] = {{many.flops, 2e-4, many.m, many.n, many.k}};
  EXPECT_NEAR(price(many, machine), 2e-4, 1e-9);
  EXPECT_GT(price(one, machine), one.bytes / machine.memory_bytes_per_s)
      << "far more than 1/4096 of the many";
  EXPECT_LT(price(one, machine), price(many, machine) / 4);
}

// Arithmetic hides the traffic of a product's operands, not that of its epilogue.
TEST(Price, AnEpilogueIsNotFree) {
  const MachineProfile a100 = find_profile("A100-80G");
  const OpRecord plain = product(32768, 4608, 1152);
  OpRecord fused = plain;
  const double hidden_bytes = 2.0 * 32768 * 4608;
  fused.bytes += hidden_bytes;
  const double epilogue_s = price(fused, a100) - price(plain, a100);
  EXPECT_GT(epilogue_s, hidden_bytes / a100.memory_bytes_per_s);
  EXPECT_LT(epilogue_s, price(elementwise(3 * hidden_bytes), a100)) << "no kernel of its own";
}

TEST(Price, SumsAreSlowerThanCopies) {
  const MachineProfile a100 = find_profile("A100-80G");
  OpRecord sums = elementwise(1e8);
  sums.k = 1152;
  EXPECT_GT(price(sums, a100), 1.2 * price(elementwise(1e8), a100));
}

TEST(Price, OperationsOfEqualMicroStepsCountAsOftenAsTheyRun) {
  const OpRecord op = product(64, 64, 64);
  const MachineProfile machine = find_profile("H100");
  const StepPrice once = price_step({{.ops = {op}}}, machine);
  const StepPrice thrice = price_step({{.times = 3, .ops = {op}}}, machine);
  EXPECT_DOUBLE_EQ(thrice.seconds, 3 * once.seconds);
}

TEST(Price, StepIsTheSumOfItsParts) {
  const std::vector<OpRecord> ops{product(64, 64, 64), elementwise(1e6), elementwise(1e7)};
  const MachineProfile machine = find_profile("H200");
  const StepPrice total = price_step({{.phase = StepPhase::kForward, .ops = {ops[0], ops[2]}},
                                      {.phase = StepPhase::kBackward, .ops = {ops[1]}}},
                                     machine);
  EXPECT_DOUBLE_EQ(total.seconds, price(ops[0], machine) + price(ops[1], machine) + price(ops[2], machine));
  EXPECT_DOUBLE_EQ(total.by_phase[static_cast<size_t>(StepPhase::kBackward)], price(ops[1], machine));
}

// fast-DiT trains XL/2 at 107.5 images/s on an A100 with 24.5 % of its peak; good programs reach 30 to 55 %.
TEST(Price, AnA100TrainsXl2AtAPlausibleShareOfItsPeak) {
  TrainOptions options;
  options.model.name = "DiT-XL/2";
  options.compute.dtype = at::kBFloat16;
  options.global_batch = 128;
  const StepTrace trace = trace_step(options, synthetic_shape(options), DryRunDevice::kCuda);
  const double share =
      trace.flops_per_image * 128 / price_step(trace.spans, find_profile("A100-80G")).seconds / 312e12;
  RecordProperty("share_of_peak", std::to_string(share));
  EXPECT_TRUE(share > 0.3 && share < 0.6) << share;
}

}  // namespace
}  // namespace kiln
