#include "plan/run/plan.h"

#include <algorithm>

#include "plan/plan_settings.h"
#include "plan/report/report.h"
#include "test_files.h"

namespace kiln {
namespace {

StepTrace small_trace(const nlohmann::json& more = nlohmann::json::object()) {
  nlohmann::json settings = {{"model", "DiT-S/2"}, {"global-batch", 32}, {"compute-dtype", "bf16"}};
  settings.update(more);
  const PlanOptions options = test::plan_options("A100-80G", 1, settings);
  return trace_step(options.train, describe(options.train).shape, DryRunDevice::kCuda);
}

TEST(PeakShare, OfAStepWithoutItsBackwardIsNotToldButNamed) {
  StepTrace trace = small_trace();
  const MachineProfile machine = find_profile("A100-80G");
  // As long as forward alone takes when it is well used.
  const double step_s = trace.flops_per_image * 32 / 3 / (0.5 * machine.peak_flops.at(at::kBFloat16));
  for (Span& span : trace.spans)
    if (span.phase == StepPhase::kBackward && span.segment >= 4 && span.segment < 8) span.ops.clear();
  const PeakShare share = peak_share_of(trace, machine, 32, step_s);
  EXPECT_EQ(share.of_profile, 0);
  EXPECT_EQ(share.mfu, 0);
  EXPECT_THAT(share.problem, has_all("150 %", "backward of blocks.3 has 0,", "kiln::affine", "bf16"));

  Plan plan = make_plan(test::plan_options("A100-80G", 1, {{"model", "DiT-S/2"}}));
  EXPECT_THAT(to_text(plan), HasSubstr("% of peak"));
  plan.peak_share = share;
  EXPECT_THAT(to_text(plan), AllOf(HasSubstr("\n  internal: "), Not(HasSubstr("% of peak"))));
  EXPECT_TRUE(to_json(plan)["predicted"]["peak_share"].is_null());
  EXPECT_THAT(to_json(plan)["predicted"]["internal"], StartsWith("internal: "));
}

TEST(PeakShare, OfAMeasuredMachineMayBeatTheProductThatMeasuredIt) {
  const StepTrace trace = small_trace();
  MachineProfile machine = find_profile("A100-80G");
  machine.name = "another";  // without a data sheet
  const auto at_share = [&](double share) {
    const double peak = machine.peak_flops.at(at::kBFloat16);
    return peak_share_of(trace, machine, 32, trace.flops_per_image * 32 / (share * peak));
  };
  EXPECT_NEAR(at_share(0.99).of_profile, 0.99, 1e-9);
  EXPECT_THAT(at_share(1.01).problem, StartsWith("internal: "));
  machine.measured = true;
  EXPECT_NEAR(at_share(1.29).of_profile, 1.29, 1e-9);
  EXPECT_THAT(at_share(1.31).problem, has_all("131 %", "no single operation is too fast"));
  // A product that is priced far above the peak is named.
  const std::vector<OpRecord> ops = ops_of(trace.spans);
  const OpRecord& product = *std::ranges::max_element(ops, {}, &OpRecord::flops);
  machine.operations.set(product, product.flops / (3 * machine.peak_flops.at(at::kBFloat16)));
  EXPECT_THAT(at_share(1.31).problem, has_all(product.name, fmt::format("{} x {}", product.m, product.n)));
}

}  // namespace
}  // namespace kiln
