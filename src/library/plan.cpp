#include "kiln/plan.h"

#include <set>

#include "library/guarded.h"
#include "models/registry.h"
#include "parallel/machine.h"
#include "plan/report/report.h"
#include "run/option_values.h"
#include "run/published_settings.h"
#include "train/dataset/store_data.h"

namespace kiln {

TrainOptions train_options_of(const v0::Options& given) {
  TrainOptions options;
  std::set<std::string> names;
  for (const auto& [name, value] : given) {
    std::visit([&, &name = name](const auto& held) { set_option(options, name, held); }, value);
    names.insert(name);
  }
  if (!names.contains("image-size")) options.data.image_size = own_image_size(options);
  take_published_settings(options, names);
  return with_length(std::move(options));
}

v0::Plan v0::plan(const PlanRequest& request) {
  return guarded([&] {
    PlanOptions options{.train = train_options_of(request.options), .gpu = request.gpu, .gpus = request.gpus};
    options.price_per_gpu_hour = request.price_per_gpu_hour;
    if (options.gpu == "cpu") apply({.device = at::kCPU, .threads = options.train.compute.threads});
    const kiln::Plan made = make_plan(options);
    return Plan{.fits = made.fits,
                .memory_bytes = made.machine.memory_bytes,
                .needed_bytes = made.needed_bytes,
                .peak_bytes = made.peak_bytes,
                .bytes_by_kind = made.by_kind,
                .num_weights = made.num_weights,
                .step_seconds = made.step_s,
                .images_per_second = made.images_per_s,
                .days = made.days,
                .cost = made.cost,
                .text = to_text(made),
                .json = to_json(made).dump(1)};
  });
}

}  // namespace kiln
