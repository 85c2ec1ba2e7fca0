#include <algorithm>

#include "plan/report/report.h"
#include "run/option_values.h"
#include "watch/phase_timers.h"

namespace kiln {

namespace {

using Json = nlohmann::json;

Json to_json(const Footprint& bytes) {
  return {{"device", bytes.device},
          {"host", bytes.host},
          {"pinned_host", bytes.pinned_host},
          {"nvme", bytes.nvme}};
}

Json scaling_json(const Plan& plan) {
  Json points = Json::array();
  for (const ScalingPoint& point : plan.scaling)
    points.push_back({{"gpus", point.gpus},
                      {"step_s", point.step_s},
                      {"images_per_s", point.images_per_s},
                      {"efficiency", point.efficiency},
                      {"days", point.days},
                      {"cost", point.cost}});
  return points;
}

Json lanes_json(const Plan& plan) {
  Json lanes = Json::array();
  for (const LaneSpeed& speed : plan.lane_speeds)
    lanes.push_back({{"height", speed.lane.height},
                     {"width", speed.lane.width},
                     {"step_s", speed.step_s},
                     {"images_per_s", speed.images_per_s}});
  return lanes;
}

Json milestones_json(const Plan& plan) {
  Json milestones = Json::array();
  for (const Milestone& milestone : plan.milestones)
    milestones.push_back({{"name", milestone.name},
                          {"steps", milestone.steps},
                          {"days", milestone.days},
                          {"cost", milestone.cost}});
  return milestones;
}

Json measured_json(const Plan& plan) {
  Json runs = Json::array();
  for (const MeasuredSpeed& run : plan.measured)
    runs.push_back({{"source", run.source},
                    {"options", run.options},
                    {"gpus", run.gpus},
                    {"global_batch", run.global_batch},
                    {"steps_per_s", run.steps_per_s},
                    {"planned_steps_per_s", run.planned_steps_per_s}});
  return runs;
}

// Returns the seconds that a step waits for a slower loader.
double data_wait_s(const Plan& plan) {
  const double loader = plan.data_rate.loader_images_per_s;
  return loader > 0 ? plan.step_s * std::max(0.0, plan.data_rate.images_per_s / loader - 1) : 0;
}

// Returns null for a figure that is not known.
Json positive_json(double figure) { return figure > 0 ? Json(figure) : Json(); }

Json samples_json(const DataPlan& data) {
  return {{"latent_bytes", data.latent_bytes},   {"text_bytes", data.text_bytes},
          {"caption_bytes", data.caption_bytes}, {"reads_pictures", data.reads_pictures},
          {"picture_bytes", data.picture_bytes}, {"formats", data.formats},
          {"mean_height", data.mean_height},     {"mean_width", data.mean_width},
          {"decode_s", data.decode_s},           {"assumed", data.assumed},
          {"file_system", data.file_system},     {"is_network", data.is_network}};
}

Json predicted_json(const Plan& plan) {
  Json by_phase = Json::object(), footprints = Json::object(), phase_s = Json::object();
  for (const PhasePlan& phase : plan.phases) {
    by_phase[phase.name] = phase.live_bytes;
    footprints[phase.name] = to_json(phase.bytes);
  }
  for (size_t i = 0; i < plan.phase_s.size(); ++i)
    phase_s[std::string(name_of(static_cast<StepPhase>(i)))] = plan.phase_s[i];
  if (plan.encoding_s > plan.caption_encoding_s)
    phase_s[kEncodingPhases[0]] = plan.encoding_s - plan.caption_encoding_s;
  if (plan.caption_encoding_s > 0) phase_s[kEncodingPhases[1]] = plan.caption_encoding_s;
  phase_s["data"] = data_wait_s(plan);
  return {{"peak_bytes", plan.peak_bytes},
          {"reserved_bytes", plan.reserved_bytes},
          {"needed_bytes", plan.needed_bytes},
          {"needed_phase", plan.needed_phase},
          {"peak_phase", plan.peak_phase},
          {"peak_segment", plan.peak_segment},
          {"fits", plan.fits},
          {"by_kind", plan.by_kind},
          {"overhead", plan.overhead},
          {"by_phase", by_phase},
          {"footprints", footprints},
          {"step_s", plan.step_s},
          {"time_error", plan.time_error},
          {"measured_share", plan.measured_share},
          {"images_per_s", plan.images_per_s},
          {"taken_share", plan.machine.speed.taken},
          {"peak_share", positive_json(plan.peak_share.of_profile)},
          {"mfu", positive_json(plan.peak_share.mfu)},
          {"internal", plan.peak_share.problem},
          {"half_precision_speed", positive_json(plan.half_precision_speed)},
          {"communication_s", plan.communication_s},
          {"phase_s", phase_s},
          {"curve", kiln::to_json(plan.curve)},
          {"steps", plan.steps},
          {"days", plan.days},
          {"cost", plan.cost},
          {"gpu_hours", plan.gpu_hours},
          {"kilowatt_hours", plan.kilowatt_hours},
          {"lanes", lanes_json(plan)},
          {"scaling", scaling_json(plan)},
          {"milestones", milestones_json(plan)},
          {"measured_by_others", measured_json(plan)},
          {"dataset_size", plan.samples.num_samples},
          {"store_bytes", plan.samples.store_bytes()},
          {"samples", samples_json(plan.samples)},
          {"extraction_days", plan.extraction_days},
          {"checkpoint_bytes", plan.checkpoint_bytes},
          {"num_checkpoints", plan.num_checkpoints},
          {"optimizer_bytes", plan.optimizer_bytes},
          {"data_rate",
           {{"images_per_s", plan.data_rate.images_per_s},
            {"bytes_per_s", plan.data_rate.bytes_per_s},
            {"disk_bytes_per_s", plan.data_rate.disk_bytes_per_s},
            {"loader_images_per_s", plan.data_rate.loader_images_per_s},
            {"slowdown", plan.data_rate.slowdown()}}}};
}

}  // namespace

nlohmann::json to_json(const Plan& plan) {
  return {{"predicted", predicted_json(plan)},
          {"machine",
           {{"name", plan.machine.name},
            {"source", plan.machine.source},
            {"measured", plan.machine.measured},
            {"speed",
             {{"product", plan.machine.speed.product},
              {"copy", plan.machine.speed.copy},
              {"spread", plan.machine.speed.spread},
              {"steady", plan.machine.speed.is_steady()}}},
            {"memory_bytes", plan.machine.memory_bytes},
            {"gpus_per_node", plan.machine.gpus_per_node},
            {"network_bytes_per_s", plan.machine.network_bytes_per_s}}},
          {"gpus", plan.options.gpus},
          {"zero_stage", plan.options.train.zero.stage},
          {"offload_optimizer", choice_name(plan.options.train.offload.optimizer)},
          {"offload_params", choice_name(plan.options.train.offload.params)},
          {"num_weights", plan.num_weights},
          {"rank_batch", plan.rank_batch},
          {"micro_batch", plan.micro_batch},
          {"num_micro_steps", plan.num_micro_steps},
          {"advice", plan.advice},
          {"notes", plan.notes},
          {"options", to_json(plan.options.train)}};
}

}  // namespace kiln
