#include <algorithm>

#include "core/json_fields.h"
#include "plan/report/report.h"
#include "run/option_values.h"
#include "watch/phase_timers.h"

namespace kiln {

namespace {

using Json = nlohmann::json;

Json to_json(const Footprint& bytes) {
  Json json;
  KILN_WRITE_FIELDS(json, bytes, device, host, pinned_host, nvme);
  return json;
}

Json scaling_json(const Plan& plan) {
  Json points = Json::array();
  for (const ScalingPoint& point : plan.scaling)
    KILN_WRITE_FIELDS(points.emplace_back(), point, gpus, step_s, images_per_s, efficiency, days, cost);
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
    KILN_WRITE_FIELDS(milestones.emplace_back(), milestone, name, steps, days, cost);
  return milestones;
}

Json measured_json(const Plan& plan) {
  Json runs = Json::array();
  for (const MeasuredSpeed& run : plan.measured)
    KILN_WRITE_FIELDS(runs.emplace_back(), run, source, options, gpus, global_batch, steps_per_s,
                      planned_steps_per_s);
  return runs;
}

// Returns the seconds that a step waits for a slower loader.
double data_wait_s(const Plan& plan) {
  const double loader = plan.data_rate.loader_images_per_s;
  return loader > 0 ? plan.step_s * std::max(0.0, plan.data_rate.images_per_s / loader - 1) : 0;
}

// Returns null for a figure that is not known.
Json positive_json(double figure) { return figure > 0 ? Json(figure) : Json(); }

Json rate_json(const DataRate& rate) {
  Json json = {{"slowdown", rate.slowdown()}};
  KILN_WRITE_FIELDS(json, rate, images_per_s, bytes_per_s, disk_bytes_per_s, loader_images_per_s);
  return json;
}

Json samples_json(const DataPlan& data) {
  Json json;
  KILN_WRITE_FIELDS(json, data, latent_bytes, text_bytes, caption_bytes, reads_pictures, picture_bytes,
                    formats, mean_height, mean_width, decode_s, assumed, file_system, is_network);
  return json;
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
  Json predicted = {{"by_phase", by_phase},
                    {"footprints", footprints},
                    {"taken_share", plan.machine.speed.taken},
                    {"peak_share", positive_json(plan.peak_share.of_profile)},
                    {"mfu", positive_json(plan.peak_share.mfu)},
                    {"internal", plan.peak_share.problem},
                    {"half_precision_speed", positive_json(plan.half_precision_speed)},
                    {"phase_s", phase_s},
                    {"curve", kiln::to_json(plan.curve)},
                    {"lanes", lanes_json(plan)},
                    {"scaling", scaling_json(plan)},
                    {"milestones", milestones_json(plan)},
                    {"measured_by_others", measured_json(plan)},
                    {"dataset_size", plan.samples.num_samples},
                    {"store_bytes", plan.samples.store_bytes()},
                    {"samples", samples_json(plan.samples)},
                    {"data_rate", rate_json(plan.data_rate)}};
  KILN_WRITE_FIELDS(predicted, plan, peak_bytes, reserved_bytes, needed_bytes, needed_phase, peak_phase,
                    peak_segment, fits, by_kind, overhead, step_s, time_error, measured_share, images_per_s,
                    communication_s, steps, days, cost, gpu_hours, kilowatt_hours, extraction_days,
                    checkpoint_bytes, num_checkpoints, optimizer_bytes);
  if (!plan.attention.empty()) predicted["attention"] = plan.attention;
  return predicted;
}

}  // namespace

nlohmann::json to_json(const Plan& plan) {
  const MachineSpeed& speed = plan.machine.speed;
  Json machine = {{"speed",
                   {{"product", speed.product},
                    {"copy", speed.copy},
                    {"spread", speed.spread},
                    {"steady", speed.is_steady()}}}};
  KILN_WRITE_FIELDS(machine, plan.machine, name, source, measured, memory_bytes, gpus_per_node,
                    network_bytes_per_s);
  const TrainOptions& train = plan.options.train;
  Json json = {{"predicted", predicted_json(plan)},
               {"machine", machine},
               {"gpus", plan.options.gpus},
               {"zero_stage", train.zero.stage},
               {"offload_optimizer", choice_name(train.offload.optimizer)},
               {"offload_params", choice_name(train.offload.params)},
               {"options", to_json(train)}};
  KILN_WRITE_FIELDS(json, plan, num_weights, rank_batch, micro_batch, num_micro_steps, advice, notes);
  return json;
}

}  // namespace kiln
