#include "plan/report/variants.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"
#include "core/tensors.h"
#include "core/toml.h"
#include "core/units.h"
#include "plan/report/report.h"
#include "plan/run/make_plan.h"
#include "run/option_values.h"
#include "run/published_settings.h"
#include "train/dataset/store_data.h"

namespace kiln {

namespace {

constexpr const char* kOn = "on";

std::string value_text(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

class VariantReader {
 public:
  VariantReader(const std::string& path, const std::set<std::string>& given) : path_(path), given_(given) {}

  std::vector<Variant> read(const TrainOptions& base) {
    const std::vector<TomlTable> tables = read_toml_tables(path_);
    TrainOptions shared = base;
    std::set<std::string> given = given_;
    for (const TomlEntry& entry : tables.front().entries) {
      set(shared, entry);
      given.insert(entry.key);
    }
    take_published_settings(shared, given);
    std::vector<Variant> variants;
    for (size_t i = 1; i < tables.size(); ++i) variants.push_back(variant_of(tables[i], shared, variants));
    if (!names(tables, "image-size"))
      for (Variant& variant : variants) variant.options.data.image_size = own_image_size(variant.options);
    if (variants.empty()) fail("probe", "{} has no variants: give each a [name] and its options", path_);
    return variants;
  }

 private:
  bool names(const std::vector<TomlTable>& tables, const char* option) const {
    const auto has_it = [&](const TomlTable& table) {
      return std::ranges::find(table.entries, option, &TomlEntry::key) != table.entries.end();
    };
    return given_.contains(option) || std::ranges::any_of(tables, has_it);
  }

  // Sets an option, unless the command line gives it.
  void set(TrainOptions& options, const TomlEntry& entry) const {
    try {
      TrainOptions overridden;  // takes a value without effect, which is still checked
      set_option(given_.contains(entry.key) ? overridden : options, entry.key, entry.value);
    } catch (const Error& error) {
      throw Error(fmt::format("{} ({} line {})", error.what(), path_, entry.line));
    }
  }

  Variant variant_of(const TomlTable& table, const TrainOptions& shared,
                     const std::vector<Variant>& known) const {
    Variant variant{.name = table.name, .on = {}, .options = shared};
    const auto on = std::ranges::find(table.entries, std::string(kOn), &TomlEntry::key);
    if (on != table.entries.end()) {
      const auto found = std::ranges::find(known, value_text(on->value), &Variant::name);
      if (found == known.end())
        fail("probe", "{} line {}: on expects a variant before this one, got {}", path_, on->line,
             on->value.dump());
      variant.on = found->name;
      variant.options = found->options;
    }
    for (const TomlEntry& entry : table.entries) {
      if (entry.key == kOn) continue;
      set(variant.options, entry);
      const std::string value = value_text(entry.value);
      if (!given_.contains(entry.key))
        variant.changes.push_back(value.empty() ? "no " + entry.key : entry.key + " " + value);
    }
    int64_t& micro_batch = variant.options.micro_batch;  // fits the batch, as a recipe's does
    if (!given_.contains("micro-batch")) micro_batch = std::min(micro_batch, variant.options.global_batch);
    return variant;
  }

  const std::string& path_;
  const std::set<std::string>& given_;
};

std::string number_cell(const nlohmann::json& row, const char* key, int digits) {
  return row.contains(key) ? number_text(row.at(key).get<double>(), digits) : "-";
}

std::string gain_cell(const nlohmann::json& row, const char* key) {
  return row.contains(key) ? fmt::format("{:.2f}x", row.at(key).get<double>()) : "-";
}

}  // namespace

std::vector<Variant> read_variants(const std::string& path, const TrainOptions& base,
                                   const std::set<std::string>& given) {
  return VariantReader(path, given).read(base);
}

VariantResult plan_variant(const Variant& variant, PlanOptions plan) {
  plan.train = variant.options;
  if (!is_here(plan.train.data)) plan.train.data.path.clear();
  plan.gpus = std::max<int64_t>({1, plan.gpus, plan.train.ranks.nproc});
  VariantResult result;
  try {
    const Plan planned = make_plan(plan);
    result = {.step_s = planned.step_s,
              .images_per_s = planned.images_per_s,
              .encoding_share = planned.encoding_s / planned.step_s,
              .memory_bytes = planned.needed_bytes,
              .details = to_json(planned).at("predicted")};
    if (!planned.fits)
      result.problem = fmt::format("does not fit: {:.1f} of {:.1f} GiB", gib(planned.needed_bytes),
                                   gib(planned.machine.memory_bytes));
  } catch (const Error& error) {
    result.problem = error.what();
  }
  return result;
}

nlohmann::json variants_json(const std::string& source, const std::vector<Variant>& variants,
                             const std::vector<VariantResult>& results) {
  nlohmann::json rows = nlohmann::json::array();
  const auto runs = [](const VariantResult& result) { return result.problem.empty() && result.step_s > 0; };
  const auto first = std::ranges::find_if(results, runs);
  for (size_t i = 0; i < variants.size(); ++i) {
    const Variant& variant = variants[i];
    const VariantResult& result = results[i];
    nlohmann::json row = {{"name", variant.name}, {"on", variant.on}, {"changes", variant.changes}};
    if (!result.problem.empty()) row["problem"] = result.problem;
    if (result.memory_bytes > 0) row["memory_bytes"] = result.memory_bytes;
    if (runs(result)) {
      row.update({{"step_s", result.step_s},
                  {"steps_per_s", 1 / result.step_s},
                  {"images_per_s", result.images_per_s},
                  {"encoding_share", result.encoding_share},
                  {"gain_in_all", result.images_per_s / first->images_per_s}});
      const auto on = std::ranges::find(variants, variant.on, &Variant::name);
      if (on != variants.end())
        if (const VariantResult& before = results[static_cast<size_t>(on - variants.begin())]; runs(before)) {
          row["gain"] = result.images_per_s / before.images_per_s;
          row["memory_change_bytes"] = result.memory_bytes - before.memory_bytes;
        }
    }
    if (!result.details.is_null()) row["details"] = result.details;
    rows.push_back(std::move(row));
  }
  return {{"source", source}, {"variants", rows}};
}

std::string variants_text(const nlohmann::json& table) {
  std::string text = fmt::format("{}\n\n  {:<14}{:<14}{:>9}{:>10}{:>8}{:>8}{:>10}{:>11}  {}\n",
                                 table.at("source").get<std::string>(), "variant", "on", "steps/s",
                                 "images/s", "gain", "in all", "encoding", "memory", "changes");
  for (const nlohmann::json& row : table.at("variants")) {
    const double encoding = 100 * row.value("encoding_share", 0.0);
    const std::string memory =
        row.contains("memory_bytes") ? fmt::format("{:.2f} GiB", gib(row.at("memory_bytes"))) : "-";
    const auto changes = row.at("changes").get<std::vector<std::string>>();
    text += fmt::format(
        "  {:<14}{:<14}{:>9}{:>10}{:>8}{:>8}{:>10}{:>11}  {}\n", row.at("name").get<std::string>(),
        row.at("on").get<std::string>(), number_cell(row, "steps_per_s", 3),
        number_cell(row, "images_per_s", 4), gain_cell(row, "gain"), gain_cell(row, "gain_in_all"),
        encoding > 0 ? fmt::format("{:.0f} %", encoding) : "-", memory, fmt::join(changes, ", "));
    if (row.contains("problem")) text += fmt::format("    {}\n", row.at("problem").get<std::string>());
  }
  return text;
}

}  // namespace kiln
