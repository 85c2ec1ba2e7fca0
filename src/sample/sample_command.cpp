#include "sample/sample_options.h"

#include <unistd.h>

#include <fmt/ranges.h>

#include <charconv>
#include <cmath>
#include <cstdio>
#include <optional>

#include "checkpoint/weights_file.h"
#include "core/error.h"
#include "core/tensors.h"
#include "core/text/progress_line.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "run/published_settings.h"
#include "sample/init_picture.h"
#include "sample/prompts.h"
#include "sample/sample_output.h"
#include "sample/sample_source.h"
#include "sample/sampler_loop.h"
#include "sample/subjects.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr double kDefaultStrength = 0.8;  // diffusers'
constexpr int64_t kMaxGridImages = 400;
constexpr const char* kEmptyCaption = "empty_caption";

// `recorded`: the channels that the record of the weights names.
CfgConvention parse_convention(const std::string& name, const std::string& recorded) {
  if (name == "auto" && recorded == "model") return CfgConvention::kModel;
  if (name == "auto" && recorded == "all") return CfgConvention::kAll;
  if (name == "auto") return CfgConvention::kAuto;
  if (name == "dit") return CfgConvention::kModel;
  if (name == "plain") return CfgConvention::kAll;
  fail("sample", "expected --cfg-convention to be auto, dit or plain, got \"{}\"", name);
}

json choose_sampler(const SampleCommand& command, const json& objective, const Drawing& drawing) {
  if (command.num_sampling_steps < 0)
    fail("sample", "expected --num-sampling-steps to be at least 1, got {}", command.num_sampling_steps);
  const int64_t steps =
      command.num_sampling_steps > 0 ? command.num_sampling_steps : drawing.num_sampling_steps;
  json config = sampler_config(drawing.sampler, steps, objective);
  if (!command.image.empty())
    config["first_step"] = first_step_of(command.strength.value_or(kDefaultStrength), steps, objective);
  make_sampler(config);  // refuses impossible steps before anything is written
  return config;
}

void check(const SampleCommand& command) {
  if (command.out.empty()) fail("sample", "--out needs a folder for the images");
  constexpr int64_t kMostImages = 100'000'000;
  if (command.num_images < 1 || command.num_images > kMostImages)
    fail("sample", "expected --num-images to be 1 to {}, got {}", kMostImages, command.num_images);
  if (command.random_labels && command.classes.size() == 1)
    fail("sample", "--random-labels cannot choose from a single class: give several --classes");
  if (command.strength && command.image.empty())
    fail("sample", "--strength says how far to go from a picture: give it with --image");
  if (!command.noise.empty() && !command.save_noise.empty())
    fail("sample", "--save-noise writes the noise that the seed draws: leave out --noise");
  if (command.cuda_graph != "auto" && command.cuda_graph != "off")
    fail("sample", "expected --cuda-graph to be auto or off, got {}", command.cuda_graph);
  if (command.batch < 1) fail("sample", "expected --batch to be at least 1, got {}", command.batch);
  if (command.no_png && command.npz.empty()) fail("sample", "--no-png without --npz would keep no images");
  if (command.no_png && command.grid) fail("sample", "--grid is made of the PNG files: leave out --no-png");
  if (command.cfg_scale && !std::isfinite(*command.cfg_scale))
    fail("sample", "expected --cfg-scale to be a number, got {}", *command.cfg_scale);
}

// Says what neither the weights nor the command say, and how it was settled.
void say_assumed(const SampleCommand& command, const DrawingSource& source, const SampleOptions& options) {
  std::vector<std::string> published = source.published, usual = source.usual;
  const ModelRecord& record = source.record;
  const Drawing drawing = drawing_of(record, record.objective);
  if (command.sampler.empty() && !drawing.is_recorded) {
    const int64_t steps = make_sampler(options.sampler)->step_count();
    (drawing.is_published ? published : usual)
        .push_back("sampler " + drawing.sampler +
                   (command.num_sampling_steps > 0 ? "" : fmt::format(", {} steps", steps)));
  }
  if (!command.cfg_scale && record.drawing.sampler.empty())
    (options.cfg_scale != 1 ? published : usual).push_back(fmt::format("guidance {:g}", options.cfg_scale));
  if (!published.empty())
    fmt::print(stderr, "kiln sample: as {} is published: {}\n", record.model, fmt::join(published, "; "));
  if (!usual.empty()) fmt::print(stderr, "kiln sample: chosen: {}\n", fmt::join(usual, "; "));
}

// Parses "0.2:0.8" into timesteps of the model.
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

SampleOptions sample_options(const SampleCommand& command, const DrawingSource& source,
                             const std::optional<InitPicture>& init, at::Device device) {
  SampleOptions options;
  const DenoiserShape& shape = source.denoiser->shape();
  const Drawing drawing = drawing_of(source.record, source.record.objective, command.sampler);
  options.sampler = choose_sampler(command, source.record.objective, drawing);
  options.cfg_scale = command.cfg_scale.value_or(shape.conditioning.can_be_guided() ? drawing.cfg_scale : 1);
  const LatentSides sides = latent_sides(command, source, init ? &init->image : nullptr);
  options.height = sides.height;
  options.width = sides.width;
  options.cfg_convention = parse_convention(command.cfg_convention, source.record.drawing.guided_channels);
  options.guidance_interval = parse_guidance_interval(command.guidance_interval, source.record.objective);
  options.batch = command.batch;
  options.seed = command.seed;
  options.device = device;
  if (!command.noise.empty()) {
    const GivenNoise given =
        read_noise(command.noise, command.num_images, {shape.in_channels, sides.height, sides.width});
    options.noise = given.start;
    options.step_noise = given.steps;
  }
  if (init) options.start_from = start_from(*init, *source.autoencoder, sides, options.seed, device);
  if (device.is_cuda() && command.cuda_graph == "auto")
    options.forward = graphed_forward(
        [denoiser = source.denoiser.get()](const ModelInput& input) { return denoiser->forward(input); },
        {.make_graph = [device] { return make_device_graph(device); },
         .warn =
             [](const std::string& line) {
               fmt::print(stderr, "warning: sampling runs without CUDA graphs: {}\n", line);
             }});
  return options;
}

// Encodes the prompts for the model. Returns nothing for a model without captions.
Prompts load_prompts(const SampleCommand& command, const DrawingSource& source, at::Device device,
                     at::ScalarType compute_dtype, int64_t num_processes) {
  ConditioningShape shape = source.denoiser->shape().conditioning;
  // Null rows that are not known are not drawn with.
  if (source.record.drawing.unconditional == kEmptyCaption) shape.has_null_text = false;
  std::vector<std::string> texts = command.prompts;
  if (!command.prompts_file.empty())
    for (std::string& prompt : read_prompts(command.prompts_file)) texts.push_back(std::move(prompt));
  const bool has_words = !texts.empty() || !command.negative_prompt.empty();
  if (!shape.takes_text()) {
    if (has_words) fail("sample", "{} takes no prompts: choose --classes", source.record.model);
    return {};
  }
  if (!command.classes.empty())
    fail("sample", "{} has no classes: say what to draw with --prompt", source.record.model);
  if (texts.empty())
    fail("sample", "{} needs a prompt: give --prompt \"...\" or --prompts FILE", source.record.model);
  return encode_prompts(source.record.text, command.text_encoder, std::move(texts), command.negative_prompt,
                        shape, device, compute_dtype, num_processes, command.anyway);
}

SampleOutput open_output(const SampleCommand& command, const DrawingSource& source,
                         const SampleOptions& options, const std::optional<InitPicture>& init,
                         const Subjects& subjects, const Prompts& prompts, SampleOutputOptions::Role role) {
  const DenoiserShape& shape = source.denoiser->shape();
  const int64_t downsample = source.autoencoder->downsample;
  SampleOutputOptions output = {.folder = command.out,
                                .npz = command.npz,
                                .write_png = !command.no_png,
                                .role = role,
                                .num_images = command.num_images,
                                .height = options.height * downsample,
                                .width = options.width * downsample,
                                .words = [subjects](int64_t image) { return subjects(image).words; }};
  output.settings = {{"weights", source.weights_fingerprint},
                     {"model", source.record.model_config},
                     {"autoencoder", source.autoencoder->fingerprint},
                     {"sampler", options.sampler},
                     {"cfg_scale", options.cfg_scale},
                     {"cfg_convention", command.cfg_convention},
                     {"classes", subjects.numbers()},
                     {"seed", options.seed},
                     {"compute_dtype", command.compute_dtype}};
  output.notes["average"] = source.average;
  // Defaults are not written, so that folders of earlier versions can be continued.
  if (command.random_labels) output.settings["label_sampling"] = "random";
  if (!command.guidance_interval.empty()) output.settings["guidance_interval"] = command.guidance_interval;
  if (command.no_ema) output.settings["ema"] = false;
  if (command.tiles != "auto") output.settings["tiles"] = command.tiles;
  if (init) output.settings["image"] = init->fingerprint;
  if (!command.noise.empty()) output.settings["noise"] = digest_of_weights(command.noise);
  if (command.tf32 && options.device.is_cuda()) output.settings["tf32"] = true;
  const std::string& recorded = source.record.drawing.guided_channels;
  if (command.cfg_convention == "auto" && !recorded.empty() &&
      recorded != (shape.predicts_sigma() ? "model" : "all"))
    output.settings["guided_channels"] = recorded;
  if (shape.conditioning.has_null_text && source.record.drawing.unconditional == kEmptyCaption)
    output.settings["unconditional"] = kEmptyCaption;
  if (options.height != shape.input_size || options.width != shape.input_size)
    output.settings["size"] = {output.height, output.width};
  if (!prompts.texts.empty()) {
    output.settings["prompts"] = prompts.texts;
    output.settings["negative_prompt"] = command.negative_prompt;
    output.settings["text_encoder"] = prompts.encoder_fingerprint;
  }
  std::vector<std::string> names;
  for (int64_t i = 0; i < command.num_images; ++i) names.push_back(subjects.file_name(i));
  return SampleOutput(output, std::move(names));
}

// Draws options.images into `output`, with a progress line that counts up to `total`.
void draw(const DrawingSource& source, SampleOptions& options, int64_t total, bool is_shown,
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

// Returns the conditioning of options.images.
ConditioningFn conditioning_of(const SampleOptions& options, const DrawingSource& source,
                               const Subjects& subjects, const Prompts& prompts) {
  const ConditioningShape& shape = source.denoiser->shape().conditioning;
  const int64_t downsample = source.autoencoder->downsample;
  std::vector<int64_t> numbers;
  for (const int64_t index : options.images) numbers.push_back(subjects(index).number);
  const ConditioningFn by_class =
      class_labels_fn(shape, shape.takes_labels() ? numbers : std::vector<int64_t>());
  return with_image_size(shape, with_prompts(by_class, prompts, std::move(numbers)),
                         options.height * downsample, options.width * downsample);
}

// Returns this rank's part of the images that the first rank finds missing. The ranks take batches in turn.
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

void sample(SampleCommand command, ProcessGroup& group) {
  check(command);
  settle_weights(command, group);
  const bool is_first = group.rank() == 0;
  const at::Device device = parse_device(command.device, group.ranks().local_rank);
  const at::ScalarType compute_dtype = parse_compute_dtype(command.compute_dtype, "--compute-dtype");
  apply(ComputeSettings{
      .device = device, .threads = command.threads, .cpu_share = cpu_share(group), .tf32 = command.tf32});
  if (is_first) note_tf32("kiln sample", command.tf32, device);
  std::optional<InitPicture> init;
  if (!command.image.empty()) init = read_init_picture(command.image);
  const int64_t num_processes = group.ranks().local_world_size;
  const DrawingSource source = load_drawing_source(command, device, compute_dtype, num_processes);
  SampleOptions options = sample_options(command, source, init, device);
  if (is_first) say_assumed(command, source, options);
  const Prompts prompts = load_prompts(command, source, device, compute_dtype, num_processes);
  const Subjects subjects =
      choose_subjects(command.classes, source, prompts, command.random_labels, command.seed);

  using Role = SampleOutputOptions::Role;
  std::optional<SampleOutput> output;
  agree(group, "opening the folder of the images", [&] {
    const Role role = group.world_size() == 1 ? Role::kOnly : is_first ? Role::kFirst : Role::kOther;
    output.emplace(open_output(command, source, options, init, subjects, prompts, role));
  });
  for (int64_t index : missing_of_this_rank(*output, command.num_images, options.batch, group))
    options.images.push_back(index);
  options.conditioning = conditioning_of(options, source, subjects, prompts);
  options.null_text = prompts.null;
  if (is_first && !command.save_noise.empty())
    write_noise(command.save_noise, command.num_images,
                {source.denoiser->shape().in_channels, options.height, options.width}, options);
  const int64_t total =
      group.world_size() == 1 ? command.num_images : static_cast<int64_t>(options.images.size());
  draw(source, options, total, is_first, *output);
  group.barrier("all images drawn");
  if (!is_first) return;
  output->finish();
  if (command.grid) {
    const int64_t count = std::min(command.num_images, kMaxGridImages);
    const int64_t columns = subjects.grid_columns(count);
    fmt::print(stderr, "kiln sample: wrote {}\n", output->write_grid(count, columns));
    if (prompts.texts.empty()) return;
    std::vector<std::string> captions;
    for (int64_t i = 0; i < count; ++i) captions.push_back(subjects(i).words);
    fmt::print(stderr, "kiln sample: wrote {}\n", output->write_captioned_grid(captions, columns));
  }
}

}  // namespace

void run_sample_command(const SampleCommand& command, ProcessGroup& group) {
  as_rank(group, [&] { sample(command, group); });
}

}  // namespace kiln
