#include "sample/sample_command.h"

#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>

#include "core/error.h"
#include "core/philox.h"
#include "core/progress_line.h"
#include "core/tensors.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "parallel/ranks/joining.h"
#include "sample/class_selection.h"
#include "sample/graphed_forward.h"
#include "sample/sample_output.h"
#include "sample/sample_source.h"
#include "sample/sampler_loop.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr double kDefaultCfgScale = 4;      // DiT's
constexpr int64_t kDefaultDdpmSteps = 250;  // DiT's
constexpr int64_t kDefaultSteps = 50;
constexpr int64_t kMaxGridImages = 400;

CfgConvention parse_convention(const std::string& name) {
  if (name == "auto") return CfgConvention::kAuto;
  if (name == "dit") return CfgConvention::kModel;
  if (name == "plain") return CfgConvention::kAll;
  fail("sample", "expected --cfg-convention to be auto, dit or plain, got \"{}\"", name);
}

json choose_sampler(const SampleCommand& command, const json& objective) {
  const bool flow = objective.at("type") == "flow";
  const std::string name = !command.sampler.empty() ? command.sampler : flow ? "flow_euler" : "ddpm";
  if (command.num_sampling_steps < 0)
    fail("sample", "expected --num-sampling-steps to be at least 1, got {}", command.num_sampling_steps);
  const int64_t steps = command.num_sampling_steps > 0 ? command.num_sampling_steps
                        : name == "ddpm"               ? kDefaultDdpmSteps
                                                       : kDefaultSteps;
  json config = sampler_config(name, steps, objective);
  make_sampler(config);  // refuses impossible steps before anything is written
  return config;
}

// "000012-birds.png"
std::string file_name(int64_t index, int64_t label, const std::vector<std::string>& class_names,
                      bool classes) {
  std::string name = fmt::format("{:06}", index);
  if (!classes) return name + ".png";
  if (static_cast<size_t>(label) >= class_names.size()) return fmt::format("{}-class-{}.png", name, label);
  name += '-';
  for (unsigned char c : class_names[static_cast<size_t>(label)])
    name += std::isalnum(c) || c == '-' || c >= 0x80 ? static_cast<char>(c) : '_';
  return name + ".png";
}

void check(const SampleCommand& command) {
  if (command.out.empty()) fail("sample", "--out needs a folder for the images");
  constexpr int64_t kMostImages = 100'000'000;
  if (command.num_images < 1 || command.num_images > kMostImages)
    fail("sample", "expected --num-images to be 1 to {}, got {}", kMostImages, command.num_images);
  if (command.random_labels && command.classes.size() == 1)
    fail("sample", "--random-labels has no choice among one of --classes");
  if (command.cuda_graph != "auto" && command.cuda_graph != "off")
    fail("sample", "expected --cuda-graph to be auto or off, got {}", command.cuda_graph);
  if (command.batch < 1) fail("sample", "expected --batch to be at least 1, got {}", command.batch);
  if (command.no_png && command.npz.empty()) fail("sample", "--no-png without --npz would keep no images");
  if (command.no_png && command.grid) fail("sample", "--grid is made of the PNG files: leave out --no-png");
  if (command.cfg_scale && !std::isfinite(*command.cfg_scale))
    fail("sample", "expected --cfg-scale to be a number, got {}", *command.cfg_scale);
}

// "0.2:0.8" as timesteps of the model.
std::optional<SampleOptions::GuidanceInterval> parse_guidance_interval(const std::string& text,
                                                                       const json& objective) {
  if (text.empty()) return std::nullopt;
  const char* end = text.data() + text.size();
  SampleOptions::GuidanceInterval interval;
  const auto low = std::from_chars(text.data(), end, interval.low);
  const bool has_colon = low.ec == std::errc() && low.ptr != end && *low.ptr == ':';
  const auto high = has_colon ? std::from_chars(low.ptr + 1, end, interval.high) : low;
  if (!has_colon || high.ec != std::errc() || high.ptr != end || !(0 <= interval.low) ||
      !(interval.low < interval.high) || !(interval.high <= 1))
    fail("sample", "expected --guidance-interval LO:HI with 0 <= LO < HI <= 1, got \"{}\"", text);
  const double steps = objective.value("num_train_timesteps", 1000.0);
  return SampleOptions::GuidanceInterval{.low = interval.low * steps, .high = interval.high * steps};
}

SampleOptions sample_options(const SampleCommand& command, const SampleSource& source, at::Device device) {
  SampleOptions options;
  options.sampler = choose_sampler(command, source.objective);
  options.cfg_scale =
      command.cfg_scale.value_or(source.denoiser->shape().conditioning.has_null_class ? kDefaultCfgScale : 1);
  options.cfg_convention = parse_convention(command.cfg_convention);
  options.guidance_interval = parse_guidance_interval(command.guidance_interval, source.objective);
  options.batch = command.batch;
  options.seed = command.seed;
  options.device = device;
  if (device.is_cuda() && command.cuda_graph == "auto")
    options.forward = graphed_forward(
        [denoiser = source.denoiser.get()](const ModelInput& input) { return denoiser->forward(input); },
        {.make_graph = [device] { return make_device_graph(device); },
         .warn = [](const std::string& line) { fmt::print(stderr, "warning: {}\n", line); }});
  return options;
}

// The class of each image: the chosen ones in turn, or drawn from them.
class Labels {
 public:
  Labels(std::vector<int64_t> classes, bool are_random, uint64_t seed)
      : classes_(std::move(classes)), are_random_(are_random), seed_(seed) {}
  int64_t operator()(int64_t index) const {
    const size_t count = classes_.size();
    if (!are_random_) return classes_[static_cast<size_t>(index) % count];
    const double share = philox_uniform(seed_, Draw::kSampleLabel, static_cast<uint64_t>(index));
    return classes_[std::min(static_cast<size_t>(share * static_cast<double>(count)), count - 1)];
  }
  const std::vector<int64_t>& classes() const { return classes_; }
  // Each class gets a column of the grid where there are few.
  int64_t grid_columns(int64_t num_images) const {
    const int64_t num_classes = static_cast<int64_t>(classes_.size());
    if (!are_random_ && num_classes > 1 && num_classes <= 16 && num_classes < num_images) return num_classes;
    return static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(num_images))));
  }

 private:
  std::vector<int64_t> classes_;
  bool are_random_;
  uint64_t seed_;
};

SampleOutput open_output(const SampleCommand& command, const SampleSource& source,
                         const SampleOptions& options, const Labels& labels, SampleOutputOptions::Role role) {
  const DenoiserShape& shape = source.denoiser->shape();
  const int64_t side = shape.input_size * source.autoencoder->downsample;
  SampleOutputOptions output = {.folder = command.out,
                                .npz = command.npz,
                                .write_png = !command.no_png,
                                .role = role,
                                .num_images = command.num_images,
                                .height = side,
                                .width = side};
  output.settings = {{"weights", source.weights_fingerprint},
                     {"model", source.model_config},
                     {"autoencoder", source.autoencoder->fingerprint},
                     {"sampler", options.sampler},
                     {"cfg_scale", options.cfg_scale},
                     {"cfg_convention", command.cfg_convention},
                     {"classes", labels.classes()},
                     {"seed", options.seed},
                     {"compute_dtype", command.compute_dtype}};
  // What is usual is not written: folders of earlier versions go on.
  if (command.random_labels) output.settings["label_sampling"] = "random";
  if (!command.guidance_interval.empty()) output.settings["guidance_interval"] = command.guidance_interval;
  if (command.no_ema) output.settings["ema"] = false;
  std::vector<std::string> names;
  for (int64_t i = 0; i < command.num_images; ++i)
    names.push_back(file_name(i, labels(i), source.class_names, shape.conditioning.num_classes > 0));
  return SampleOutput(output, std::move(names));
}

// Draws options.images into `output`, with a progress line that counts up to `total`.
void draw(const SampleSource& source, SampleOptions& options, int64_t total, bool is_shown,
          SampleOutput& output) {
  const int64_t missing = static_cast<int64_t>(options.images.size());
  const int64_t present = total - missing;
  ProgressLine progress(present, total, is_shown);
  const double steps = static_cast<double>(make_sampler(options.sampler)->timesteps().size());
  int64_t steps_run = 0, images_done = 0;
  options.stop = [&] {
    const double batch = static_cast<double>(std::min(options.batch, missing - images_done));
    const double fraction = std::fmod(static_cast<double>(steps_run++), steps) / steps * batch;
    progress.update(static_cast<double>(present + images_done) + fraction);
    return false;
  };
  sample_images(*source.denoiser, source.autoencoder.get(), options, [&](int64_t index, const Image& image) {
    output.add(index, image);
    if (++images_done == missing) progress.finish(total);
  });
}

// What the first rank finds missing, as all ranks divide it: batches in turn.
std::vector<int64_t> missing_of_this_rank(const SampleOutput& output, int64_t num_images, int64_t batch,
                                          ProcessGroup& group) {
  json missing;
  agree(group, "the folder of the images", [&] {
    if (group.rank() == 0) missing = output.missing();
  });
  const auto of_all =
      json::parse(group.gather(missing.dump(), "the missing images").front()).get<std::vector<int64_t>>();
  const int64_t present = num_images - static_cast<int64_t>(of_all.size());
  if (present > 0 && group.rank() == 0)
    fmt::print(stderr, "kiln sample: {} of {} images are there already\n", present, num_images);
  std::vector<int64_t> mine;
  for (size_t i = 0; i < of_all.size(); ++i)
    if (static_cast<int64_t>(i) / batch % group.world_size() == group.rank()) mine.push_back(of_all[i]);
  return mine;
}

void sample(const SampleCommand& command, ProcessGroup& group) {
  check(command);
  const bool is_first = group.rank() == 0;
  const at::Device device = parse_device(command.device, group.ranks().local_rank);
  const at::ScalarType compute_dtype = parse_compute_dtype(command.compute_dtype, "--compute-dtype");
  apply(ComputeSettings{.device = device, .threads = command.threads, .cpu_share = cpu_share(group)});
  const SampleSource source = load_sample_source(command, device, compute_dtype);
  SampleOptions options = sample_options(command, source, device);
  const Labels labels(
      select_classes(command.classes, source.class_names, source.denoiser->shape().conditioning.num_classes),
      command.random_labels, command.seed);

  using Role = SampleOutputOptions::Role;
  std::optional<SampleOutput> output;
  agree(group, "opening the folder of the images", [&] {
    const Role role = group.world_size() == 1 ? Role::kOnly : is_first ? Role::kFirst : Role::kOther;
    output.emplace(open_output(command, source, options, labels, role));
  });
  for (int64_t index : missing_of_this_rank(*output, command.num_images, options.batch, group))
    options.images.push_back(index);
  std::vector<int64_t> classes_of_images;
  for (const int64_t index : options.images) classes_of_images.push_back(labels(index));
  options.conditioning = class_labels_fn(source.denoiser->shape().conditioning, std::move(classes_of_images));
  const int64_t total =
      group.world_size() == 1 ? command.num_images : static_cast<int64_t>(options.images.size());
  draw(source, options, total, is_first, *output);
  group.barrier("all images drawn");
  if (!is_first) return;
  output->finish();
  if (command.grid) {
    const int64_t count = std::min(command.num_images, kMaxGridImages);
    fmt::print(stderr, "kiln sample: wrote {}\n", output->write_grid(count, labels.grid_columns(count)));
  }
}

}  // namespace

void run_sample_command(const SampleCommand& command, ProcessGroup& group) {
  as_rank(group, [&] { sample(command, group); });
}

}  // namespace kiln
