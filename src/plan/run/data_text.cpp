#include "plan/run/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "core/units.h"

namespace kiln {

namespace {

std::string formats_text(const DataPlan& data) {
  std::vector<std::string> formats;
  for (const auto& [name, share] : data.formats)
    formats.push_back(data.formats.size() == 1 ? name : fmt::format("{} {:.0f} %", name, 100 * share));
  return fmt::format("{}", fmt::join(formats, ", "));
}

std::string disk_text(const Plan& plan) {
  const DataPlan& data = plan.samples;
  return fmt::format("disk: {}{}{}", number_text(plan.data_rate.disk_bytes_per_s / 1e6, 3),
                     data.file_system.empty() ? "" : ", " + data.file_system,
                     data.is_network ? ", a network file system" : "");
}

// Returns what a loader or disk that is too slow does to the run.
std::string wait_text(const Plan& plan) {
  const double slowdown = plan.data_rate.slowdown(), images_per_s = plan.data_rate.images_per_s;
  if (slowdown <= 1)
    return plan.samples.reads_pictures
               ? fmt::format(": enough for the steps, which take {}", number_text(images_per_s, 3))
               : "";
  return fmt::format(": TOO SLOW for the steps, which take {}; the run takes {:.1f} times as long",
                     number_text(images_per_s, 3), slowdown);
}

}  // namespace

std::string weights_text(const Plan& plan) {
  const auto trained = static_cast<double>(plan.num_weights) / 1e6;
  if (!plan.options.train.lora.is_on()) return fmt::format("{:.0f} M weights", trained);
  return fmt::format("{:.0f} M weights, adapter of {:.1f} M",
                     static_cast<double>(plan.num_base_weights) / 1e6, trained);
}

std::string samples_text(const DataPlan& data) {
  const std::string assumed = data.assumed.empty() ? "" : fmt::format("; assumed: {}", data.assumed);
  if (data.reads_pictures)
    return fmt::format("{} pictures {} GiB ({}, {:.0f} x {:.0f} px{})", data.num_samples,
                       gib_text(data.picture_bytes), formats_text(data), data.mean_width, data.mean_height,
                       assumed);
  std::string text = fmt::format("store of {} images {} GiB", data.num_samples, gib_text(data.store_bytes()));
  if (data.text_bytes > 0)
    text += fmt::format(": latents {} GiB, text features {} GiB ({:.2f} MB a caption{})",
                        gib_text(data.latent_bytes), gib_text(data.text_bytes), data.caption_bytes / 1e6,
                        assumed);
  return text;
}

std::string rate_text(const Plan& plan) {
  const DataRate& rate = plan.data_rate;
  if (!plan.samples.reads_pictures)
    return fmt::format("a node reads {} MB/s of features ({}), its loader draws {} images/s{}",
                       number_text(rate.bytes_per_s / 1e6, 3), disk_text(plan),
                       number_text(rate.loader_images_per_s, 3), wait_text(plan));
  const int64_t threads =
      plan.options.train.data.loader_threads * ranks_on_node(plan.machine, plan.options.gpus);
  return fmt::format(
      "a node reads {} MB/s of pictures ({}), its {} loader thread{} deliver{} {} images/s ({:.1f} ms of one "
      "to decode and crop a picture, {} rate){}",
      number_text(rate.bytes_per_s / 1e6, 3), disk_text(plan), threads, threads == 1 ? "" : "s",
      threads == 1 ? "s" : "", number_text(rate.loader_images_per_s, 3), 1e3 * plan.samples.decode_s,
      plan.machine.decoding.is_measured ? "measured" : "built-in", wait_text(plan));
}

std::string cost_text(const PlanOptions& options, double cost, const char* before) {
  if (options.price_per_gpu_hour <= 0) return "";
  if (cost < 0.01) return fmt::format("{}< 0.01", before);  // rounded it would be free
  return fmt::format("{}{:.{}f}", before, cost, cost < 100 ? 2 : 0);
}

}  // namespace kiln
