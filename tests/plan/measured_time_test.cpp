// What a profile knows of operations in their very shapes, and of the machine's speed at the moment.

#include <cstdlib>

#include "plan/price/calibrate.h"
#include "plan/price/price.h"
#include "plan/report/report.h"
#include "plan/run/make_plan.h"
#include "plan/trace/trace.h"
#include "test_files.h"
#include "train/settings.h"

namespace kiln {
namespace {

class MeasuredTime : public ::testing::Test {
 protected:
  void SetUp() override { ::setenv("KILN_PROFILES", folder_.path().c_str(), 1); }
  void TearDown() override { ::unsetenv("KILN_PROFILES"); }
  test::TempFolder folder_;
};

OpRecord square_product(int64_t side) {
  const auto s = static_cast<double>(side);
  return {.name = "kiln::affine",
          .op_class = OpClass::kMatmul,
          .flops = 2 * s * s * s,
          .bytes = 12 * s * s,
          .m = side,
          .n = side,
          .k = side};
}

OpRecord multiplied(double bytes) { return {.name = "aten::mul", .bytes = bytes}; }

// A machine with one measured rate for everything.
MachineProfile measured_machine() {
  MachineProfile machine = find_profile("cpu");
  machine.measured = true;
  machine.op_overhead_s = 0;
  machine.rates["kiln::affine f32"] = {{2e9, 1e-2, 1000, 1000, 1000}};
  machine.rates["aten::mul f32"] = {{1e6, 1e-4}};
  machine.clock = {.product_s = 1e-3, .copy_s = 2e-3};
  return machine;
}

std::vector<MachineClock> clock_readings(double product_s, double copy_s, double slower_half = 1) {
  std::vector<MachineClock> all(10, {.product_s = product_s, .copy_s = copy_s});
  for (size_t i = 5; i < all.size(); ++i) all[i] = {product_s * slower_half, copy_s * slower_half};
  return all;
}

TEST_F(MeasuredTime, AnExactShapeGoesBeforeTheModel) {
  MachineProfile machine = measured_machine();
  machine.operations.set(square_product(100), 5e-3);
  EXPECT_DOUBLE_EQ(price(square_product(100), machine), 5e-3);
  EXPECT_LT(price(square_product(101), machine), 1e-3) << "another shape is the model's";
  OpRecord bf16 = square_product(100);
  bf16.dtype = at::kBFloat16;
  EXPECT_NE(price(bf16, machine), 5e-3) << "another dtype too";
  const double model = price(multiplied(1e6), machine);
  EXPECT_DOUBLE_EQ(measured_share({{.times = 2, .ops = {square_product(100), multiplied(1e6)}}}, machine),
                   5e-3 / (5e-3 + model));
}

TEST_F(MeasuredTime, TheTableIsStoredWithTheProfile) {
  MachineProfile machine = measured_machine();
  machine.operations.set(square_product(100), 5e-3);
  machine.operations.set(multiplied(3e5), 7e-5);
  store_profile(machine);
  const MachineProfile found = find_profile("cpu");
  EXPECT_EQ(found.operations.size(), 2u);
  EXPECT_EQ(to_json(found).at("operations"), to_json(machine).at("operations"));
  EXPECT_EQ(found.clock.product_s, 1e-3);
  EXPECT_EQ(found.clock.copy_s, 2e-3);
}

TEST_F(MeasuredTime, AProfileOfBeforeStillLoads) {
  nlohmann::json json = to_json(measured_machine());
  json.erase("clock");
  json.erase("operations");
  const MachineProfile machine = profile_from_json(json);
  EXPECT_TRUE(machine.operations.empty());
  EXPECT_EQ(machine.clock.product_s, 0);
  std::ofstream(folder_.path() / "cpu.json") << json.dump();
  EXPECT_EQ(find_profile("cpu").speed.product, 1) << "there is nothing to compare the present with";
}

TEST_F(MeasuredTime, ABrokenTableIsOneLine) {
  const nlohmann::json whole = to_json(measured_machine());
  for (const char* entries : {"[[1, 2, 3]]", "[[1, 2, 3, 4, 5, -1]]", "[[1, 2, 3, 4, 5, \"long\"]]", "7"}) {
    nlohmann::json json = whole;
    json["operations"]["aten::mul f32"] = nlohmann::json::parse(entries);
    std::ofstream(folder_.path() / "cpu.json") << json.dump();
    EXPECT_ERROR(find_profile("cpu"), "aten::mul f32", "cpu.json", "calibrate again") << entries;
  }
}

TEST_F(MeasuredTime, PricesFollowTheClock) {
  MachineProfile machine = measured_machine();
  const double before = price(square_product(1000), machine), copied_before = price(multiplied(1e6), machine);
  machine.speed = speed_of(machine.clock, clock_readings(1.5e-3, 2e-3));
  EXPECT_DOUBLE_EQ(price(square_product(1000), machine), 1.5 * before) << "a shared processor";
  EXPECT_DOUBLE_EQ(price(multiplied(1e6), machine), copied_before) << "whose memory is as fast";
  machine.speed = speed_of(machine.clock, clock_readings(0.8e-3, 4e-3));
  EXPECT_DOUBLE_EQ(price(square_product(1000), machine), 0.8 * before);
  EXPECT_DOUBLE_EQ(price(multiplied(1e6), machine), 2 * copied_before);
  machine.speed = speed_of(machine.clock, clock_readings(1.02e-3, 1.97e-3));
  EXPECT_EQ(machine.speed.product, 1) << "readings differ by so much";
  EXPECT_EQ(machine.speed.copy, 1);
  EXPECT_EQ(describe(machine.speed), "");
}

TEST_F(MeasuredTime, TheIntervalIsAsWideAsLittleIsKnown) {
  MachineProfile machine = measured_machine();
  OpRecord unknown = square_product(100);
  unknown.name = "aten::convolution";
  machine.operations.set(square_product(100), 5e-3);
  const double exact = time_error({{.ops = {square_product(100)}}}, machine);
  const double modelled = time_error({{.ops = {square_product(101)}}}, machine);
  EXPECT_GT(exact, 0);
  EXPECT_GT(modelled, exact) << "other shapes of it";
  EXPECT_GT(time_error({{.ops = {unknown}}}, machine), modelled) << "another operation stands in";
  machine.measured = false;
  EXPECT_EQ(time_error({{.ops = {unknown}}}, machine), 0) << "nobody has measured, no interval is known";
}

TEST_F(MeasuredTime, AnUnsteadyMachineWidensTheIntervalAndSaysSo) {
  MachineProfile machine = measured_machine();
  const std::vector<Span> step = {{.ops = {square_product(100)}}};
  const double steady = time_error(step, machine);
  machine.speed = speed_of(machine.clock, clock_readings(1e-3, 2e-3, /*slower_half=*/1.6));
  EXPECT_FALSE(machine.speed.is_steady());
  EXPECT_NEAR(time_error(step, machine), steady + 0.6, 1e-9) << "as far as from one half to the other";
  EXPECT_THAT(describe(machine.speed), HasSubstr("not steady: the same work takes up to 1.6 times as long"));
}

// Friction 5 of a new user: a plan made beside other programs says so.
TEST_F(MeasuredTime, WhatOthersHaveOfTheProcessorsIsSaid) {
  MachineProfile machine = measured_machine();
  std::vector<MachineClock> readings = clock_readings(1e-3, 2e-3);
  for (size_t i = 0; i < readings.size(); ++i) readings[i].taken = i % 2 == 0 ? 0.5 : 0.9;
  machine.speed = speed_of(machine.clock, readings);
  EXPECT_NEAR(machine.speed.taken, 0.7, 1e-9);
  EXPECT_EQ(describe(machine.speed),
            "other programs had 70 % of the processors' time during this measurement, and steps take less "
            "without them");
  machine.speed.product = 3;
  EXPECT_THAT(describe(machine.speed), has_all("arithmetic takes 3.00", "; other programs"));
}

TEST_F(MeasuredTime, ASlowMomentCountsAsMuchAsAFastOne) {
  const MachineProfile machine = measured_machine();
  std::vector<MachineClock> readings(100, machine.clock);
  readings.insert(readings.end(), 10, {.product_s = 10e-3, .copy_s = 20e-3});  // as long in all
  const MachineSpeed speed = speed_of(machine.clock, readings);
  EXPECT_FALSE(speed.is_steady());
  EXPECT_NEAR(speed.reach, 9, 1e-9) << "in either direction";
  readings.assign(100, machine.clock);
  readings.push_back({.product_s = 5e-1, .copy_s = 5e-1});
  EXPECT_TRUE(speed_of(machine.clock, readings).is_steady()) << "one interruption, however long";
}

TEST_F(MeasuredTime, StepsThatDoNotFitAreLeftOut) {
  const TrainOptions options = changed({}, "model=DiT-S/8 depth=1 global-batch=2");
  StepRepeats repeats{.plain = 3, .watched = 2, .warm_up = 2, .most_seconds = 1e-6};
  EXPECT_FALSE(time_steps(options, at::kCPU, repeats).is_done);
  repeats.most_seconds = 60;
  const StepTiming timing = time_steps(options, at::kCPU, repeats);
  EXPECT_TRUE(timing.is_done);
  EXPECT_FALSE(timing.spans.empty());
}

TEST_F(MeasuredTime, AStepThatWasMeasuredIsPricedAsItWas) {
  MachineProfile machine = measured_machine();
  machine.op_overhead_s = 1e-6;
  StepTiming timing;
  timing.spans = {{.ops = {square_product(100), square_product(100), multiplied(1e6)}}};
  timing.spans[0].ops[0].seconds = 2e-3;
  timing.spans[0].ops[1].seconds = 4e-3;
  timing.spans[0].ops[2].seconds = 1e-3;
  timing.seconds = 7.7e-3;  // nobody watching
  machine.speed = {.product = 2, .copy = 1};
  add_step(machine, timing);
  EXPECT_NEAR(price_step(timing.spans, machine).seconds, 7.7e-3, 1e-9);
  machine.speed = {};
  EXPECT_NEAR(price(square_product(100), machine), 3e-3 / 2 * 1.1, 1e-5)
      << "what it takes at the profile's speed";
}

TEST_F(MeasuredTime, WhatIsLackingIsMeasuredWithinTheTimeGiven) {
  TrainOptions options = changed({}, "model=DiT-S/8 depth=2 global-batch=4");
  const DataShape data = synthetic_shape(options);
  MachineProfile machine = find_profile("cpu");
  machine.measured = true;
  EXPECT_THAT(measure_step(machine, options, data, at::kCPU, /*seconds=*/1e-6).text,
              HasSubstr("nothing was measured"));
  EXPECT_TRUE(machine.operations.empty());
  const MeasuredStep first = measure_step(machine, options, data, at::kCPU, /*seconds=*/60);
  EXPECT_TRUE(first.is_done) << first.text;
  EXPECT_THAT(first.text, HasSubstr("whole model"));
  const std::vector<Span> spans = trace_step(options, data, DryRunDevice::kCpu).spans;
  EXPECT_GT(measured_share(spans, machine), 0.98) << "the real step and the traced one have the same shapes";
  EXPECT_THAT(measure_step(machine, options, data, at::kCPU, 60).text, HasSubstr("has all operations"));
  // A deeper one is of the same shapes.
  options.model.depth = 9;
  EXPECT_GT(measured_share(trace_step(options, data, DryRunDevice::kCpu).spans, machine), 0.98);
}

TEST_F(MeasuredTime, APlanShowsTheIntervalAndWhatIsLacking) {
  store_profile(measured_machine());
  PlanOptions options;
  options.train = changed({}, "model=DiT-S/8 depth=2 global-batch=4");
  const Plan plan = make_plan(options);
  EXPECT_THAT(to_text(plan), has_all("expected between", "--measure-seconds"));
  EXPECT_GT(to_json(plan).at("predicted").at("time_error").get<double>(), 0);
  options.gpu = "H100";
  EXPECT_THAT(to_text(make_plan(options)), Not(HasSubstr("expected between"))) << "nobody has measured one";
}

}  // namespace
}  // namespace kiln
