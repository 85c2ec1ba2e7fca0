#include "cli/train_options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "checkpoint/train_state.h"
#include "cli/commands.h"
#include "core/error.h"
#include "core/json_config.h"
#include "core/text/json_text.h"
#include "core/text/printable.h"
#include "core/toml.h"
#include "interop/deepspeed_config.h"
#include "interop/foreign_recipe.h"
#include "models/model_record.h"
#include "models/registry.h"
#include "models/weights_source.h"
#include "parallel/ranks/ranks.h"
#include "plan/run/plan.h"
#include "run/option_table.h"
#include "run/option_values.h"
#include "run/published_settings.h"
#include "run/stage_options.h"
#include "train/dataset/store_data.h"

namespace kiln::cli {

namespace {

CLI::Option* add_option(CLI::App& command, const std::string& name, bool& field, const std::string& help) {
  return command.add_flag("--" + name + ",!--no-" + name, field,
                          fmt::format("{} (default: {})", help, field ? "on" : "off"));
}
// A list of values. "none" is the empty list.
template <class T>
CLI::Option* add_option(CLI::App& command, const std::string& name, std::vector<T>& field,
                        const std::string& help) {
  const auto read = [&field](const CLI::results_t& given) {
    field.clear();
    if (given == CLI::results_t{"none"}) return true;
    for (const std::string& text : given)
      if (text.empty() || !CLI::detail::lexical_cast(text, field.emplace_back())) return false;
    return !field.empty();
  };
  const auto text = [&field] {
    return field.empty() ? std::string("none") : fmt::format("{}", fmt::join(field, ","));
  };
  return command.add_option("--" + name, read, help, /*defaulted=*/false, text)
      ->type_name(CLI::detail::type_name<T>())
      ->expected(CLI::detail::expected_max_vector_size)
      ->delimiter(',')
      ->capture_default_str();
}
// A list of texts, one per argument, since they may contain commas. "none" is the empty list.
CLI::Option* add_option(CLI::App& command, const std::string& name, std::vector<std::string>& field,
                        const std::string& help) {
  const auto read = [&field](const CLI::results_t& given) {
    field = given == CLI::results_t{"none"} ? CLI::results_t() : given;
    return true;
  };
  const auto text = [&field] {
    return field.empty() ? std::string("none") : fmt::format("{}", fmt::join(field, " | "));
  };
  return command.add_option("--" + name, read, help, /*defaulted=*/false, text)
      ->type_name("TEXT")
      ->expected(CLI::detail::expected_max_vector_size)
      ->capture_default_str();
}
// Returns "{f32,bf16,fp16}" for an option with named values.
template <class T>
std::string type_name_of() {
  if constexpr (Choice<T>)
    return fmt::format("{{{}}}", fmt::join(choice_names<T>(), ","));
  else if constexpr (OptionalChoice<T>::value)
    return type_name_of<typename T::value_type>();
  else
    return "TEXT";
}
template <TextOption T>
CLI::Option* add_option(CLI::App& command, const std::string& name, T& field, const std::string& help) {
  const auto read = [&field, name](const CLI::results_t& given) {
    std::string text = given.back();
    if constexpr (MeansAlone<T>)
      if (text.empty()) text = T::kAlone;
    parse_option(name.c_str(), text, field);
    return true;
  };
  CLI::Option* option =
      command
          .add_option("--" + name, read, help, /*defaulted=*/false, [&field] { return option_text(field); })
          ->type_name(type_name_of<T>())
          ->take_last();
  // CLI11 would take a default that it knows for the value of a name that stands alone.
  return MeansAlone<T> ? option->expected(0, 1) : option->capture_default_str();
}
template <class T>
CLI::Option* add_option(CLI::App& command, const std::string& name, T& field, const std::string& help) {
  CLI::Option* option = command.add_option("--" + name, field, help)->take_last()->capture_default_str();
  if constexpr (std::is_unsigned_v<T>) option->check(not_negative());
  return option;
}

// Adds each option of the table in the group of its section.
struct OptionAdder {
  CLI::App& command;
  std::string prefix, group{};

  void section(const char* title) { group = prefix.empty() ? title : prefix + ": " + title; }
  void operator()(const char* name, auto& field, OnResume, const std::string& help) {
    add_option(command, name, field, help)->group(group);
  }
};

bool is_given(const CLI::App& command, const std::string& name) {
  const CLI::Option* option = command.get_option_no_throw("--" + name);
  return option != nullptr && option->count() > 0;
}

// Runs body() and adds the place in the recipe to its errors.
template <class Body>
void at_line(const std::string& recipe, int line, Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    throw Error(fmt::format("{} ({} line {})", error.what(), recipe, line));
  }
}

// True for the one process of a run that says what the options became.
bool is_told(const TrainArguments& arguments, const TrainOptions& options) {
  const Ranks ranks = ranks_from_environment();
  return ranks.rank == 0 && (options.ranks.nproc <= 1 || ranks.launched || !arguments.starts_ranks);
}

int64_t world_size_of(const TrainOptions& options) {
  return std::max<int64_t>(options.ranks.nproc, ranks_from_environment().world_size);
}

// Reads another trainer's config. Prints on stderr what it became.
void take_foreign_recipe(const CLI::App& command, const TrainArguments& arguments, int64_t world_size,
                         ResolvedOptions& resolved) {
  const std::string& path = arguments.recipe;
  TrainOptions& options = resolved.options;
  const ForeignRecipe recipe = read_foreign_recipe(
      path, {.world_size = world_size > 0 ? world_size : world_size_of(options),
             .global_batch = is_given(command, "global-batch") ? options.global_batch : 0});
  std::string text;
  TrainOptions overridden;
  // Either option says where training ends.
  const bool has_length = is_given(command, "max-steps") || is_given(command, "epochs");
  for (const ForeignRecipe::Setting& setting : recipe.settings) {
    const bool is_overridden =
        is_given(command, setting.option) || (setting.option == "epochs" && has_length);
    if (setting.is_of_pictures && !options.data.path.empty() && !reads_pictures(source_of(options.data)))
      continue;
    set_option(is_overridden ? overridden : options, setting.option, setting.value);
    if (is_overridden) continue;
    resolved.given.insert(setting.option);
    text += fmt::format("  --{} {}  ({})\n", setting.option, setting.value.dump(), setting.key);
  }
  if (!is_told(arguments, options)) return;
  for (const std::string& note : recipe.notes) fmt::print(stderr, "note: {}: {}\n", path, printable(note));
  fmt::print(stderr, "{} is read as:\n{}", path, printable(text, "\n"));
}

ResolvedOptions with_recipe(const CLI::App& command, const TrainArguments& arguments, int64_t world_size) {
  ResolvedOptions resolved{.options = arguments.options, .change = option_on_command_line, .given = {}};
  visit_options(resolved.options, [&](const char* name, const auto&, OnResume, const std::string&) {
    if (is_given(command, name)) resolved.given.insert(name);
  });
  if (arguments.recipe.empty()) return resolved;
  if (is_foreign_recipe(arguments.recipe)) {
    take_foreign_recipe(command, arguments, world_size, resolved);
    return resolved;
  }
  TrainOptions overridden;  // for values that are replaced but still checked
  const TomlDocument recipe = read_toml_document(arguments.recipe);
  for (const TomlEntry& entry : recipe.entries)
    at_line(arguments.recipe, entry.line, [&] {
      // Both options say where training ends, so either replaces the other.
      const bool is_replaced = entry.key == "max-steps" ? is_given(command, "epochs")
                               : entry.key == "epochs"  ? is_given(command, "max-steps")
                                                        : false;
      set_option(is_replaced || is_given(command, entry.key) ? overridden : resolved.options, entry.key,
                 entry.value);
      if (!is_replaced) resolved.given.insert(entry.key);
    });
  resolved.options.stages = stages_of(recipe, arguments.recipe);
  // A recipe's micro-batch is for its own batch; a smaller batch limits it.
  int64_t& micro_batch = resolved.options.micro_batch;
  if (!is_given(command, "micro-batch")) micro_batch = std::min(micro_batch, resolved.options.global_batch);
  return resolved;
}

// Prints to stderr: standard output may be for a result.
void report(const DeepSpeedConfig& config, const std::string& path) {
  for (const std::string& warning : config.warnings) fmt::print(stderr, "warning: {}\n", printable(warning));
  fmt::print(stderr, "{} is read as:\n", path);
  for (const DeepSpeedConfig::Setting& setting : config.settings)
    fmt::print(stderr, "  --{} {}  ({}{})\n", setting.option, printable(brief(setting.value)), setting.key,
               setting.file == path ? "" : " of " + setting.file);
}

// Training on features uses the size of their images.
void take_image_size(StageOptions& stage) {
  if (!stage.settings.contains("data") || stage.settings.contains("image-size")) return;
  DataOptions data;
  data.path = stage.settings.at("data");
  if (const std::optional<int64_t> stored = stored_image_size(data)) stage.settings["image-size"] = *stored;
}
// Sets the size that the run was begun with (`recorded`, else null), that of a store's pictures or of those
// that the model is made for, if none is given. A search may name several models, which then are none of the
// registry's.
void take_image_size(ResolvedOptions& resolved, const nlohmann::json& recorded) {
  if (resolved.given.contains("image-size")) return;
  TrainOptions& options = resolved.options;
  const std::vector<std::string> known = denoiser_names();
  if (recorded.contains("image-size"))
    set_option(options, "image-size", recorded.at("image-size"));
  else if (stored_image_size(options.data) || std::ranges::find(known, options.model.name) != known.end())
    options.data.image_size = own_image_size(options);
  for (StageOptions& stage : resolved.options.stages) take_image_size(stage);
}

// Reads --deepspeed or --accelerate.
void apply_config_file(const CLI::App& command, const TrainArguments& arguments, int64_t world_size,
                       ResolvedOptions& resolved) {
  const bool is_accelerate = !arguments.accelerate.empty();
  const std::string path = is_accelerate ? arguments.accelerate : arguments.deepspeed;
  const TrainOptions options = resolved.options;
  if (world_size == 0) world_size = world_size_of(options);
  const DeepSpeedContext context{
      .ours = options,
      .is_given = [&](const std::string& option) { return is_given(command, option); },
      .world_size = world_size};
  const DeepSpeedConfig config =
      is_accelerate ? read_accelerate_config(path, context) : read_deepspeed_config(path, context);
  resolved.options = apply(config, options);
  if (is_told(arguments, resolved.options)) report(config, path);
  for (const DeepSpeedConfig::Setting& setting : config.settings) resolved.given.insert(setting.option);
  resolved.change = [config](const std::string& option, const std::string& value) {
    return setting_text(config, option, value);
  };
}

// Returns the options that the run in `out` was begun with, or null if there is nothing to resume.
nlohmann::json recorded_options(const std::string& out) {
  if (out.empty() || !std::filesystem::exists(out + "/config.toml") || list_checkpoints(out).empty())
    return nullptr;
  nlohmann::json options = nlohmann::json::object();
  for (const TomlEntry& entry : read_toml_document(out + "/config.toml").entries)
    options[entry.key] = entry.value;
  return options;
}

// Replaces a run in --weights by its newest weights, as kiln sample draws with. A run that resumes keeps
// those that it began with.
void take_weights_of_run(const TrainArguments& arguments, TrainOptions& options,
                         const nlohmann::json& recorded) {
  std::string& weights = options.model.weights;
  if (weights.empty() || !is_run_folder(weights)) return;
  const std::string begun_with = recorded.is_null() ? "" : recorded.value("weights", "");
  const std::string folder = (std::filesystem::path(weights) / "checkpoints" / "").string();
  if (begun_with.starts_with(folder)) {
    weights = begun_with;
    return;
  }
  const ModelRecord info = read_run_info(weights);
  if (!info.adapter.config.is_null())
    fail("train",
         "--weights {} is the run of an adapter: give the weights that it changes, {}, and the adapter as "
         "--lora-weights",
         weights, info.adapter.base_path);
  const std::string file = find_weights(weights).path;
  if (is_told(arguments, options)) fmt::print(stderr, "--weights {} is read as {}\n", weights, file);
  weights = file;
}

// True if the config that a run was begun with has what the command gives of it: the rest came from the
// record of --weights.
bool has_all_of(const nlohmann::json& recorded, const std::string& given) {
  const auto parse = [](const std::string& text) {
    return json_or_discarded("train", text, "--model-config");
  };
  if (!recorded.is_string()) return false;
  const nlohmann::json known = parse(recorded.get<std::string>()), part = parse(given);
  if (!known.is_object() || !part.is_object()) return false;
  nlohmann::json both = known;
  both.update(part);
  return both == known;
}

// Sets the model that the run was begun with (`recorded`, else null), as far as the command leaves it open.
void take_recorded_model(ResolvedOptions& resolved, const nlohmann::json& recorded) {
  if (!recorded.is_object()) return;
  TrainOptions& options = resolved.options;
  const auto take = [&](const char* name) {
    if (!resolved.given.contains(name) && recorded.contains(name))
      set_option(options, name, recorded.at(name));
  };
  const bool names_model = resolved.given.contains("model");
  // The config of weights came from their record, also for a model that is named.
  if (!names_model || !options.model.weights.empty()) take("model-config");
  if (!options.model.weights.empty() && recorded.contains("model-config") &&
      has_all_of(recorded.at("model-config"), options.model.config))
    set_option(options, "model-config", recorded.at("model-config"));
  if (names_model) return;
  for (const char* name : {"model", "hidden-size", "depth", "num-heads", "patch-size", "position-scale"})
    take(name);
}

// Finds the base of the adapter that --out trains if it is no longer where it was: it may lie beside the run.
void find_moved_base(const TrainArguments& arguments, TrainOptions& options, const nlohmann::json& recorded) {
  std::string& weights = options.model.weights;
  std::error_code unreachable;
  if (!recorded.is_object() || weights.empty() || weights != recorded.value("weights", "") ||
      std::filesystem::exists(weights, unreachable))
    return;
  const ModelRecord record = find_weights(options.out).record;
  if (record.adapter.config.is_null()) return;
  const std::string& base = record.adapter.base_path;
  if (!std::filesystem::exists(base, unreachable))
    fail("train", "{} trains an adapter of {}, which is not there: say where it is with --weights",
         options.out, base);
  if (is_told(arguments, options)) fmt::print(stderr, "--weights {} is read as {}\n", weights, base);
  weights = base;
}

// Throws Error if the record of --weights names a model of the same family with other blocks than --model.
// Conditions and pictures of another kind change the first and the last segment, which the data are checked
// against later.
void require_size_of_weights(const ModelOptions& model, const ModelRecord& record) {
  const std::vector<std::string> known = denoiser_names();  // a search may name several models
  if (std::ranges::find(known, model.name) == known.end() ||
      &family_of(model.name) != &family_of(record.model) || model.hidden_size > 0 || model.depth > 0 ||
      !model.config.empty())
    return;
  const auto blocks_of = [](const std::string& name, const nlohmann::json& config) {
    const auto denoiser = build_denoiser(name, config, {.outline = true});
    const auto& segments = denoiser->segments();
    std::map<std::string, std::vector<int64_t>> shapes;
    for (size_t i = 1; i + 1 < segments.size(); ++i)
      for (const auto& parameter : segments[i]->parameters())
        shapes[parameter->key] = parameter->value.sizes().vec();
    return shapes;
  };
  if (blocks_of(model.name, nlohmann::json::object()) != blocks_of(record.model, record.model_config))
    fail("train",
         "--weights {} are of another size than --model {}: leave out --model, which their record holds",
         model.weights, model.name);
}

// Takes from the record of --weights which model they are, and the side of its pictures, as far as the
// command leaves them open. A run that resumes keeps what it began with.
void take_record_of_weights(const TrainArguments& arguments, ResolvedOptions& resolved,
                            const nlohmann::json& recorded) {
  ModelOptions& model = resolved.options.model;
  if (recorded.is_object() || model.weights.empty()) return;
  if (!std::filesystem::exists(model.weights)) {
    if (resolved.given.contains("model")) return;  // a plan of it needs no values
    fail("train", "--weights {} does not exist: give the path of a weights file, a folder or a run",
         model.weights);
  }
  const WeightsSource source = find_weights(model.weights);
  const ModelRecord& record = source.record;
  if (record.model.empty()) return;
  if (!resolved.given.contains("model")) model.name = record.model;
  const Family& family = family_of(record.model);
  if (model.name != record.model && model.name != family.name) {
    require_size_of_weights(model, record);
    return;
  }
  nlohmann::json config = record.model_config;
  config.erase(family.size_key);  // that of the data
  if (!model.config.empty()) config.update(parse_json("train", model.config, "--model-config"));
  model.config = config.dump();
  if (record.image_size > 0 && !stored_image_size(resolved.options.data) &&
      resolved.given.insert("image-size").second)
    resolved.options.data.image_size = record.image_size;
  if (!record.objective.is_object() || resolved.given.contains("objective")) return;
  const nlohmann::json settings = options_of(record.objective), defaults = to_json(TrainOptions{});
  std::string taken;
  for (const auto& [option, value] : settings.items()) {
    if (!resolved.given.insert(option).second) continue;
    set_option(resolved.options, option, value);
    if (value == defaults.at(option)) continue;
    taken += fmt::format(" --{} {}", option, value.is_string() ? value.get<std::string>() : value.dump());
  }
  if (!taken.empty() && is_told(arguments, resolved.options))
    fmt::print(stderr, "as --weights {} were trained:{}\n", model.weights, taken);
}

// Takes the objective and the drawing of pictures from the run that is resumed or from the published models,
// and says so on stderr.
void take_published(const TrainArguments& arguments, ResolvedOptions& resolved,
                    const nlohmann::json& recorded) {
  TrainOptions& options = resolved.options;
  const std::string taken = take_published_settings(options, resolved.given, recorded);
  if (taken.empty() || !is_told(arguments, options)) return;
  fmt::print(stderr, "{}: {}\n",
             recorded.is_null() ? fmt::format("as {} is published", options.model.name)
                                : fmt::format("as {} was begun", options.out),
             taken);
}

}  // namespace

std::vector<StageOptions> stages_of(const TomlDocument& recipe, const std::string& path) {
  std::vector<StageOptions> stages;
  for (const TomlTable& table : recipe.tables)
    at_line(path, table.line, [&] {
      if (table.name != "stage")
        fail("train", "unknown table [[{}]]: a recipe has options and [[stage]]s", table.name);
      StageOptions& stage = stages.emplace_back();
      for (const TomlEntry& entry : table.entries) set_stage_key(stage, entry.key, entry.value);
      check_stage(stage, stage_name(stage, stages.size() - 1));
    });
  return stages;
}

std::vector<StageOptions> stages_ahead(const std::string& recipe) {
  TomlDocument document = read_toml_document(recipe);
  if (document.tables.empty())
    document.tables.push_back({.name = "stage", .entries = std::move(document.entries), .line = 1});
  else
    for (TomlTable& table : document.tables)
      table.entries.insert(table.entries.begin(), document.entries.begin(), document.entries.end());
  std::vector<StageOptions> stages = stages_of(document, recipe);
  for (StageOptions& stage : stages) take_image_size(stage);
  return stages;
}

std::shared_ptr<TrainArguments> add_train_options(CLI::App& command, const std::string& prefix) {
  const std::string group = prefix.empty() ? "Options" : prefix;
  auto arguments = std::make_shared<TrainArguments>();
  command
      .add_option("--recipe", arguments->recipe,
                  "TOML file of these options, or a config of Sana (.yaml) or PixArt (.py); the command line "
                  "overrides it")
      ->group(group);
  command
      .add_option(
          "--deepspeed", arguments->deepspeed,
          "DeepSpeed's ds_config.json, read as these options; it must not contradict the command line")
      ->group(group);
  command
      .add_option("--accelerate", arguments->accelerate,
                  "accelerate's default_config.yaml, read as these options")
      ->group(group);
  visit_options(arguments->options, OptionAdder{.command = command, .prefix = prefix});
  command.get_option("--image-size")->default_str("the store's own, else the model's");
  for (const char* name : {"--objective", "--sampler", "--num-sampling-steps", "--cfg-scale"})
    command.get_option(name)->default_str("as the model is published");
  return arguments;
}

ResolvedOptions resolve(const CLI::App& command, const TrainArguments& arguments, int64_t world_size) {
  ResolvedOptions resolved = with_recipe(command, arguments, world_size);
  // The run keeps the settings themselves, since their file may change.
  std::string& model_config = resolved.options.model.config;
  const nlohmann::json recorded = recorded_options(resolved.options.out);
  if (!model_config.empty()) model_config = read_json_option("train", "--model-config", model_config).dump();
  take_recorded_model(resolved, recorded);
  take_weights_of_run(arguments, resolved.options, recorded);
  find_moved_base(arguments, resolved.options, recorded);
  take_record_of_weights(arguments, resolved, recorded);
  take_image_size(resolved, recorded);
  std::string& instruction = resolved.options.data.captions.instruction;
  instruction = read_text_option("train", "--caption-instruction", instruction);
  if (!arguments.deepspeed.empty() && !arguments.accelerate.empty())
    fail("train",
         "--deepspeed and --accelerate are both given: leave out --deepspeed, accelerate's file names it");
  if (!arguments.deepspeed.empty() || !arguments.accelerate.empty())
    apply_config_file(command, arguments, world_size, resolved);
  take_published(arguments, resolved, recorded);
  return resolved;
}

}  // namespace kiln::cli
