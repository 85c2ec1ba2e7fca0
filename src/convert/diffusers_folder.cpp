#include "convert/diffusers_folder.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "checkpoint/file_checksum.h"
#include "checkpoint/tensor_files.h"
#include "convert/model_card.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/entries.h"
#include "core/text/split.h"
#include "core/text/utf8.h"
#include "diffusion/sampler_noise.h"
#include "diffusion/scheduler_config.h"
#include "models/autoencoders/autoencoder.h"
#include "models/load_model.h"
#include "models/piece_checks.h"
#include "models/registry.h"
#include "models/text/caption_encoder.h"
#include "models/text/text_registry.h"
#include "models/weights_source.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The oldest version whose DiTTransformer2DModel is a class of its own.
constexpr const char* kDiffusersVersion = "0.30.0";
constexpr int64_t kMostStepNoise = int64_t{32} << 20;  // bytes
// A tokenizer has these, in any folder of a text encoder.
constexpr const char* kTokenizerFiles =
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json spiece.model "
    "tokenizer.model vocab.json vocab.txt merges.txt";

void write_json(const fs::path& path, json content) {
  content["_diffusers_version"] = kDiffusersVersion;
  // Class names may be folder names, which need not be UTF-8.
  write_file_atomically("convert", path.string(), dump_utf8(content, 2) + "\n");
}

bool is_weights_file(const fs::path& path) {
  return path.extension() == ".safetensors" || path.extension() == ".bin";
}

void put(const fs::path& from, const fs::path& to, bool links) {
  if (links && is_weights_file(from))
    fs::create_symlink(fs::canonical(from), to);
  else
    fs::copy_file(from, to);
}

// Puts the files of `from` for which `is_wanted` says so into `to`; returns whether weights are among them.
template <class IsWanted>
bool put_files(const fs::path& from, const fs::path& to, bool links, const IsWanted& is_wanted) {
  fs::create_directory(to);
  bool has_weights = false;
  for (const auto& entry : entries_of(from)) {
    if (!entry.is_regular_file() || !is_wanted(entry.path().filename().string())) continue;
    put(entry.path(), to / entry.path().filename(), links);
    has_weights |= is_weights_file(entry.path());
  }
  return has_weights;
}

void check_there(const fs::path& given) {
  if (!fs::exists(given)) fail("convert", "{} does not exist", given.string());
}

// Returns the folder of a pipeline's component, or the one that is given.
fs::path component_folder(const fs::path& given, const char* component) {
  if (fs::is_directory(given / component)) return given / component;
  return fs::is_directory(given) ? given : given.parent_path();
}

// Returns the pixels of a latent's side. Throws Error where the latents are not the model's.
int64_t check_latents(const json& config, const fs::path& given, const DenoiserShape& shape) {
  const std::string class_name = config.is_object() ? config.value("_class_name", "") : "";
  const std::vector<std::string> known = autoencoder_classes();
  if (std::ranges::find(known, class_name) == known.end())
    fail("convert", "{}: expected the folder of an {}", given.string(), fmt::join(known, " or "));
  const auto autoencoder = build_autoencoder(config, {.device = at::kMeta});
  if (autoencoder->latent_channels != shape.in_channels)
    fail("convert", "{} makes latents of {} channels, and the model takes {}", given.string(),
         autoencoder->latent_channels, shape.in_channels);
  return autoencoder->downsample;
}

class FolderWriter {
 public:
  FolderWriter(fs::path folder, const ForeignFormat& format, const ModelRecord& known,
               const ModelRecord& settled, const TensorMap& weights, const DiffusersFolderOptions& options)
      : folder_(std::move(folder)),
        format_(format),
        known_(known),
        record_(settled),
        weights_(weights),
        options_(options),
        model_(build_denoiser(settled.model, settled.model_config, {.device = at::kMeta})),
        schedule_(diffusers_schedule(settled.drawing.sampler, settled.drawing.num_sampling_steps,
                                     settled.objective, format.card.takes_flow_match)) {
    if (known.objective.is_null()) schedule_.config[kAssumedKey] = true;
  }

  DiffusersFolder write() {
    check_pieces();
    const json config = write_model();
    index_ = {{"_class_name", format_.pipeline(record_.model_config)},
              {"scheduler", {"diffusers", schedule_.config["_class_name"]}},
              {format_.component, {"diffusers", format_.class_name}}};
    fs::create_directory(folder_ / "scheduler");
    write_json(folder_ / "scheduler" / "scheduler_config.json", schedule_.config);
    for (const char* component : format_.absent) index_[component] = {nullptr, nullptr};
    const std::string autoencoder = write_autoencoder();
    if (!options_.text_encoder.empty()) write_text_encoder();
    const bool has_null_rows = write_null_rows();
    for (std::size_t i = 0; i < record_.class_names.size(); ++i)
      index_["id2label"][std::to_string(i)] = record_.class_names[i];
    write_json(folder_ / "model_index.json", index_);

    const int64_t downsample = pixels_of_latent(record_.autoencoder, family_of(record_.model));
    side_ = drawn_side(record_, shape(), downsample);
    ModelCard card{.format = format_,
                   .record = record_,
                   .shape = shape(),
                   .schedule = schedule_,
                   .pipeline = index_["_class_name"],
                   .limit = limit_of_pipeline(config),
                   .autoencoder = autoencoder,
                   .has_autoencoder = !options_.autoencoder.empty(),
                   .has_text_encoder = !options_.text_encoder.empty(),
                   .has_null_rows = has_null_rows,
                   .has_step_noise = write_noise(),
                   .was_trained_here = !known_.trained_on.empty(),
                   .other_pieces = other_pieces_,
                   .height = side_ * downsample,
                   .width = side_ * downsample};
    for (const auto& parameter : model_->parameters()) card.num_weights += parameter->value.numel();
    write_file_atomically("convert", (folder_ / "README.md").string(), model_card(card));
    return {.pipeline = card.pipeline,
            .limit = card.limit,
            .has_null_rows = has_null_rows,
            .missing = fmt::format("{}", fmt::join(card.missing_pieces(), " and "))};
  }

 private:
  const DenoiserShape& shape() const { return model_->shape(); }

  // Compares the given pieces with the record's before anything is written.
  void check_pieces() {
    if (!options_.autoencoder.empty()) check_autoencoder();
    if (!options_.text_encoder.empty())
      check_text_encoder();
    else if (record_.text.encoder.empty())
      record_.text.encoder = format_.text_encoder;
  }

  void check_autoencoder() {
    check_there(options_.autoencoder);
    const fs::path source = component_folder(options_.autoencoder, "vae");
    const int64_t downsample =
        check_latents(read_json((source / "config.json").string()), options_.autoencoder, shape());
    if (record_.autoencoder.downsample == 0) record_.autoencoder.downsample = downsample;
    if (record_.autoencoder.fingerprint.empty()) return;
    const auto given = load_autoencoder(source.string(), at::kCPU, at::kFloat);
    compare(
        [&](const std::string& named) { return autoencoder_mismatch(record_.autoencoder, *given, named); },
        options_.autoencoder, "vae", "--vae");
  }

  // Settles which encoder the model takes, too.
  void check_text_encoder() {
    check_there(options_.text_encoder);
    ModelRecord::TextInfo given;
    const auto take = [&](const TextEncoderShape& encoder) {
      given.encoder = encoder.family;
      if (const int64_t width = shape().conditioning.text_width; encoder.width != width)
        fail("convert", "{} makes captions of width {}, and the model takes {}", options_.text_encoder,
             encoder.width, width);
    };
    if (record_.text.encoder_fingerprint.empty()) {
      const fs::path folder = component_folder(options_.text_encoder, "text_encoder");
      take(outline_text_encoder(folder.string(), at::kFloat)->shape());
    } else {
      const CaptionEncoder encoder(options_.text_encoder, 0, at::kCPU, at::kFloat, {}, EncoderUse::kIds);
      take(encoder.shape());
      given.encoder_fingerprint = encoder.encoder_fingerprint();
      given.tokenizer_fingerprint = encoder.tokenizer_fingerprint();
    }
    compare([&](const std::string& named) { return text_encoder_mismatch(record_.text, given, named); },
            options_.text_encoder, "text_encoder", "--text-encoder");
    record_.text.encoder = given.encoder;
  }

  // `mismatch` returns a text that calls the piece as it is told, or "".
  template <class Mismatch>
  void compare(const Mismatch& mismatch, const std::string& given, const char* component,
               const char* option) {
    const std::string text = mismatch(given);
    if (text.empty()) return;
    say_mismatch(text, fmt::format("give the recorded one with {}", option), options_.anyway);
    other_pieces_.push_back(mismatch(fmt::format("`{}`", component)));
  }

  json write_model() const {
    const TensorMap model = format_.weights_to(record_.model_config, weights_);
    json config = format_.config_to(record_.model_config);
    const fs::path component = folder_ / format_.component;
    fs::create_directories(component);
    write_json(component / "config.json", config);
    save_tensors((component / "diffusion_pytorch_model.safetensors").string(), model, metadata_of(known_));
    return config;
  }

  // Returns the class of the model's autoencoder, whether it is put in or not; "" for a model of pixels.
  std::string write_autoencoder() {
    if (options_.autoencoder.empty()) {
      const KnownAutoencoder* const known = known_autoencoder(record_.autoencoder.name);
      const std::string class_name = known ? known->class_name : family_of(record_.model).latents.autoencoder;
      if (class_name.empty()) index_["vae"] = {nullptr, nullptr};
      return class_name;
    }
    const fs::path source = component_folder(options_.autoencoder, "vae");
    const json config = read_json((source / "config.json").string());
    const bool has_weights = put_files(source, folder_ / "vae", options_.links, [](const std::string& name) {
      return name == "config.json" || name.starts_with("diffusion_pytorch_model");
    });
    if (!has_weights)
      fail("convert", "{}: no diffusion_pytorch_model.safetensors in it", options_.autoencoder);
    std::string class_name = config.at("_class_name");
    index_["vae"] = {"diffusers", class_name};
    return class_name;
  }

  void write_text_encoder() {
    const fs::path given = options_.text_encoder;
    const auto is_of_tokenizer = [of_tokenizer = words_in(kTokenizerFiles)](const std::string& name) {
      return std::ranges::find(of_tokenizer, name) != of_tokenizer.end();
    };
    const TransformersClasses& classes = transformers_classes(record_.text.encoder);
    const bool has_weights =
        put_files(component_folder(given, "text_encoder"), folder_ / "text_encoder", options_.links,
                  [&](const std::string& name) { return !is_of_tokenizer(name) && !name.starts_with('.'); });
    if (!has_weights) fail("convert", "{}: no weights of a text encoder in it", given.string());
    put_files(component_folder(given, "tokenizer"), folder_ / "tokenizer", options_.links, is_of_tokenizer);
    index_["text_encoder"] = {"transformers", classes.model};
    index_["tokenizer"] = {"transformers", classes.tokenizer};
  }

  bool write_null_rows() const {
    const auto rows = weights_.find(format_.null_rows_key);
    if (rows == weights_.end()) return false;
    save_tensors((folder_ / kNullRowsFile).string(), {{kNullRowsTensor, rows->second}});
    return true;
  }

  // Writes the noise from which kiln sample draws the card's picture, the first of its seed. Returns whether
  // that of the steps is there.
  bool write_noise() const {
    const std::vector<int64_t> first = {0};
    const at::Tensor start = at::empty({1, shape().in_channels, side_, side_});
    fill_start_noise(kCardSeed, first, start);
    TensorMap tensors = {{kNoiseTensor, start}};
    const int64_t steps = record_.drawing.num_sampling_steps;
    const int64_t bytes = steps * start.numel() * static_cast<int64_t>(sizeof(float));
    const bool has_steps = schedule_.is_stochastic && bytes <= kMostStepNoise;
    if (has_steps) {
      const at::Tensor all = at::empty({steps, 1, shape().in_channels, side_, side_});
      for (int64_t step = 0; step < steps; ++step) fill_step_noise(kCardSeed, first, step, all[step]);
      tensors[kStepNoiseTensor] = all;
    }
    save_tensors((folder_ / kNoiseFile).string(), tensors);
    return has_steps;
  }

  std::string limit_of_pipeline(const json& config) const {
    const CardCode& code = format_.card;
    const double guidance = record_.drawing.cfg_scale;
    if (code.limit != nullptr)
      if (std::string limit = code.limit(config); !limit.empty()) return limit;
    if (!schedule_.why_outside.empty()) return schedule_.why_outside;
    if (!code.passes_masks && record_.text.encoder != "clip_text") return "it passes no masks of captions";
    if (guidance < 1) return "it guides by more than 1 only";
    return "";
  }

  fs::path folder_;
  const ForeignFormat& format_;
  const ModelRecord& known_;
  ModelRecord record_;  // with what is not known settled
  const TensorMap& weights_;
  const DiffusersFolderOptions& options_;
  std::unique_ptr<Denoiser> model_;  // without values
  DiffusersSchedule schedule_;
  int64_t side_ = 0;                       // of the latents that the card draws
  std::vector<std::string> other_pieces_;  // texts on pieces that are not those of training
  json index_;
};

bool hold_the_same(const fs::path& one, const fs::path& other) {
  const auto names_in = [](const fs::path& folder) {
    std::set<fs::path> names;
    for (const auto& entry : entries_below(folder)) names.insert(entry.path().lexically_relative(folder));
    return names;
  };
  const auto hash_of = [](const fs::path& file) {
    const uint64_t bytes = fs::file_size(file);
    return checksum_of_bytes(file.string(), 0, bytes).of_file(bytes);
  };
  const std::set<fs::path> names = names_in(one);
  return names == names_in(other) && std::ranges::all_of(names, [&](const fs::path& name) {
           if (fs::is_directory(one / name)) return fs::is_directory(other / name);
           return fs::is_regular_file(other / name) && hash_of(one / name) == hash_of(other / name);
         });
}

}  // namespace

DiffusersFolder write_diffusers_pipeline(const std::string& folder, const ForeignFormat& format,
                                         const ModelRecord& known, const ModelRecord& settled,
                                         const TensorMap& weights, const DiffusersFolderOptions& options) {
  // The same command may have written it, and not its last line.
  const bool is_there = fs::exists(folder);
  const auto refuse = [&] { fail("convert", "{} exists: remove it or choose another --out", folder); };
  if (is_there && !fs::exists(fs::path(folder) / "model_index.json")) refuse();
  fs::path target = folder;
  if (!target.has_filename()) target = target.parent_path();  // given with a trailing slash
  try {
    if (target.has_parent_path()) fs::create_directories(target.parent_path());
    AtomicFolder written("convert", target.string());
    DiffusersFolder result = FolderWriter(written.folder(), format, known, settled, weights, options).write();
    if (!is_there)
      written.commit();
    else if (!hold_the_same(written.folder(), target))
      refuse();
    return result;
  } catch (const fs::filesystem_error& error) {
    fail("convert", "cannot write {}: {}", target.string(), error.code().message());
  }
}

}  // namespace kiln
