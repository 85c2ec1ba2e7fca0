#include "data/store/store_report.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/error.h"
#include "core/text/printable.h"
#include "core/text/progress_line.h"
#include "core/text/utf8.h"
#include "data/images/left_out_list.h"
#include "data/store/store_source.h"
#include "data/text_store/text_store.h"

namespace kiln {
namespace {

// Sums over values, in f64.
struct Sums {
  double count = 0, sum = 0, squares = 0, variance = 0;

  LatentStatistics::Channel channel() const {
    const double mean = sum / count;
    return {mean, std::sqrt(std::max(squares / count - mean * mean, 0.0)), std::sqrt(variance / count)};
  }
  void add(const Sums& other) {
    count += other.count;
    sum += other.sum;
    squares += other.squares;
    variance += other.variance;
  }
};

std::string size_text(uintmax_t num_bytes) {
  if (num_bytes < (1 << 20)) return fmt::format("{:.1f} KiB", static_cast<double>(num_bytes) / (1 << 10));
  if (num_bytes < (1 << 30)) return fmt::format("{:.1f} MiB", static_cast<double>(num_bytes) / (1 << 20));
  return fmt::format("{:.1f} GiB", static_cast<double>(num_bytes) / (1 << 30));
}

void print_row(std::FILE* out, std::string_view name, const std::string& value) {
  fmt::print(out, "{:<14}{}\n", printable(name), printable(value));
}

void print_lanes(const StoreInfo& info, std::FILE* out) {
  if (info.lanes.size() == 1 && info.lanes[0].aspect_ratio == 0) return;
  const std::vector<SampleLane> of_lanes = info.sample_lanes();
  for (size_t i = 0; i < info.lanes.size(); ++i) {
    const Lane& lane = info.lanes[i];
    const int64_t count = of_lanes[i].size();
    print_row(
        out, "bucket",
        fmt::format(
            "{:>4} x {:<4} latents{}  {:>8} samples  {:>5.1f} %", lane.height, lane.width,
            lane.aspect_ratio > 0 ? fmt::format("  ratio {:.2f}", lane.aspect_ratio) : "", count,
            100 * static_cast<double>(count) / static_cast<double>(std::max<int64_t>(info.num_samples, 1))));
  }
}

void print_settings(const std::string& folder, const StoreInfo& info, std::FILE* out) {
  uintmax_t num_bytes = 0;
  std::error_code ignored;
  for (const auto& shard : info.shards) {
    const auto size = std::filesystem::file_size(std::filesystem::path(folder) / shard.file, ignored);
    if (!ignored) num_bytes += size;
  }
  print_row(out, "store", folder);
  print_row(out, "state", info.complete ? "complete" : "unfinished: run the command that began it again");
  print_row(out, "samples",
            fmt::format("{} in {} shards, {}", info.num_samples, info.shards.size(), size_text(num_bytes)));
  print_row(out, "image size", fmt::format("{} pixels", info.image_size));
  print_row(out, "latents",
            fmt::format("{} x {}, {}, {}{}", info.channels, lanes_text(info.lanes), dtype_name(info.dtype),
                        info.has_logvar ? "posterior mean and logvar" : "plain",
                        info.num_flips == 2 ? ", as is and mirrored" : ""));
  print_lanes(info, out);
  print_row(out, "autoencoder",
            fmt::format("{}, weights {}", info.autoencoder,
                        info.autoencoder_fingerprint.empty() ? "unknown" : info.autoencoder_fingerprint));
  print_row(out, "scaling",
            fmt::format("factor {}, shift {}{}", info.scaling_factor, info.shift_factor,
                        info.already_scaled ? ", already applied to the latents" : ""));
  if (!info.source.is_null()) print_row(out, "source", dump_utf8(info.source));
}

void print_labels(const FeatureStore& store, std::FILE* out) {
  const auto& names = store.info().class_names;
  std::vector<int64_t> counts(names.size() + 1);  // the last: no label
  int64_t num_captions = 0, caption_bytes = 0;
  for (int64_t i = 0; i < store.size(); ++i) {
    const int64_t label = store.label(i);
    ++counts[label < 0 ? names.size() : static_cast<size_t>(label)];
    const auto length = static_cast<int64_t>(store.caption(i).size());
    num_captions += length > 0;
    caption_bytes += length;
  }
  print_row(out, "captions",
            num_captions == 0
                ? "none"
                : fmt::format("{}, {} bytes on average", num_captions, caption_bytes / num_captions));
  if (names.empty()) return print_row(out, "classes", "none");
  const auto [least, most] = std::minmax_element(counts.begin(), counts.end() - 1);
  print_row(out, "classes",
            fmt::format("{}, of {} to {} samples; {} samples without a label", names.size(), *least, *most,
                        counts.back()));
  constexpr size_t kMaxShown = 20;
  for (size_t i = 0; i < std::min(names.size(), kMaxShown); ++i)
    fmt::print(out, "{:>14} {:<24} {}\n", i, printable(names[i]), counts[i]);
  if (names.size() > kMaxShown) fmt::print(out, "{:>14} {} more\n", "", names.size() - kMaxShown);
}

void print_statistics(const FeatureStore& store, int64_t max_samples, std::FILE* out) {
  const StoreInfo& info = store.info();
  const LatentStatistics statistics = measure_latents(store, max_samples);
  const double shift = info.already_scaled ? 0 : info.shift_factor,
               scale = info.already_scaled ? 1 : info.scaling_factor;
  fmt::print(out, "\nstatistics of {} of {} samples\n", statistics.num_samples, info.num_samples);
  fmt::print(out, "{:<10}{:>12}{:>12}{:>12}{:>16}{:>16}\n", "channel", "mean", "std", "posterior",
             "trained mean", "trained std");
  const auto print_channel = [&](const std::string& name, const LatentStatistics::Channel& c) {
    fmt::print(out, "{:<10}{:>12.4f}{:>12.4f}{:>12.4f}{:>16.4f}{:>16.4f}\n", name, c.mean, c.mean_std,
               c.sigma, (c.mean - shift) * scale, c.drawn_std() * std::abs(scale));
  };
  for (size_t c = 0; c < statistics.channels.size() && c < 64; ++c)
    print_channel(std::to_string(c), statistics.channels[c]);
  print_channel("all", statistics.all);
  fmt::print(out,
             "mean, std: of the stored latents; posterior: root mean square of its sigma; trained: of "
             "latents as drawn, shifted and scaled\n");
  const double trained_std = statistics.all.drawn_std() * std::abs(scale);
  if (info.autoencoder != "pixels" && (trained_std < 0.5 || trained_std > 2))
    fmt::print(
        out,
        "warning: latents should have a standard deviation near 1 when trained on, these have {:.3f}: is the "
        "scaling factor right?\n",
        trained_std);
}

void print_text(const std::string& folder, const std::string& name, std::FILE* out) {
  const TextStoreInfo info = read_text_store_info(text_store_folder(folder, name));
  print_row(out, "text-" + name,
            info.complete
                ? fmt::format("{} {}, {} different captions of up to {} tokens, features {} wide in {}",
                              info.encoder, info.encoder_fingerprint, info.num_entries - 1, info.max_tokens,
                              info.width, dtype_name(info.dtype))
                : "unfinished: run the command that began it again");
  if (!info.complete) return;
  print_row(out, "",
            fmt::format("{} of {} samples without a caption, {} captions cut{}", info.num_without_caption,
                        info.num_samples, info.num_truncated,
                        info.instruction.empty() ? "" : fmt::format(", after {:?}", info.instruction)));
}

void print_skipped(const std::string& folder, std::FILE* out) {
  const std::vector<SkippedPicture> skipped = read_skipped(folder);
  if (skipped.empty()) return;
  print_row(out, "left out", fmt::format("{} pictures, why: {}", skipped.size(), kLeftOutFile));
  constexpr size_t kMostShown = 5;
  for (size_t i = 0; i < std::min(skipped.size(), kMostShown); ++i) print_row(out, "", skipped[i].why);
}

void inspect_part(const std::string& folder, int64_t max_samples, std::FILE* out) {
  const StoreInfo info = read_store_info(folder);
  print_settings(folder, info, out);
  print_skipped(folder, out);
  if (!info.complete) return;
  const auto store = FeatureStore::open(folder);
  print_labels(*store, out);
  for (const std::string& name : find_text_stores(folder)) print_text(folder, name, out);
  print_row(out, "first sample", store->sample_name(0));
  print_row(out, "last sample", store->sample_name(store->size() - 1));
  print_statistics(*store, max_samples, out);
}

// Prints every problem of a part. Throws Error if there is any.
void verify_part(const std::string& folder, std::FILE* out) {
  const StoreInfo info = read_store_info(folder);
  std::vector<std::string> problems;
  {
    ShardProgress progress("verified shard", static_cast<int64_t>(info.shards.size()));
    problems = find_store_problems(folder, [&](int64_t done, int64_t) { progress.update(done); });
  }
  const size_t num_shards = problems.size();  // that are damaged
  const std::vector<std::string> texts = find_text_stores(folder);
  for (const std::string& name : texts)
    for (std::string& problem : find_text_store_problems(text_store_folder(folder, name)))
      problems.push_back(std::move(problem));
  for (const auto& problem : problems) fmt::print(out, "{}\n", printable(problem));
  std::fflush(out);
  if (!problems.empty())
    fail("store verify", "{} of {} shards{} are damaged ({}), first: {}", num_shards, info.shards.size(),
         texts.empty() ? "" : fmt::format(" and {} files of captions", problems.size() - num_shards), folder,
         problems.front());
  if (!info.complete)
    fail("store verify",
         "the {} samples so far are sound, but {} is unfinished: run the command that began it again",
         info.num_samples, folder);
  fmt::print(out, "{}: {} samples in {} shards{}: checksums, shapes and values are right\n", folder,
             info.num_samples, info.shards.size(),
             texts.empty()
                 ? ""
                 : printable(fmt::format(" and the captions of text-{}", fmt::join(texts, ", text-"))));
}

}  // namespace

double LatentStatistics::Channel::drawn_std() const { return std::sqrt(mean_std * mean_std + sigma * sigma); }

LatentStatistics measure_latents(const FeatureStore& store, int64_t max_samples) {
  const StoreInfo& info = store.info();
  LatentStatistics statistics;
  statistics.num_samples = std::min(store.size(), std::max<int64_t>(max_samples, 1));
  std::vector<Sums> sums(info.channels);
  std::vector<float> mean, logvar;
  for (int64_t i = 0; i < statistics.num_samples; ++i) {
    // In floating point: the product may exceed 64 bits.
    const auto id = static_cast<int64_t>(static_cast<double>(i) * static_cast<double>(store.size()) /
                                         static_cast<double>(statistics.num_samples));
    const Lane lane = info.lanes[static_cast<size_t>(store.lane(id))];
    const int64_t latent_size = info.channels * lane.area();
    mean.resize(latent_size);
    logvar.resize(info.has_logvar ? latent_size : 0);
    for (int64_t flip = 0; flip < info.num_flips; ++flip) {
      const auto flips = static_cast<uint8_t>(flip);
      store.read_mean({&id, 1}, {&flips, 1}, mean);
      if (info.has_logvar) store.read_logvar({&id, 1}, {&flips, 1}, logvar);
      for (int64_t e = 0; e < latent_size; ++e) {
        Sums& channel = sums[e / lane.area()];
        const double value = mean[e];
        channel.count += 1;
        channel.sum += value;
        channel.squares += value * value;
        if (info.has_logvar) channel.variance += std::exp(std::clamp<double>(logvar[e], -30, 20));
      }
    }
  }
  Sums all;
  for (const Sums& channel : sums) {
    statistics.channels.push_back(channel.channel());
    all.add(channel);
  }
  statistics.all = all.channel();
  return statistics;
}

void inspect_store(const std::string& folder, int64_t max_samples, std::FILE* out) {
  const std::vector<std::string> parts = store_parts(folder);
  int64_t samples = 0;
  for (const std::string& part : parts) samples += read_store_info(part).num_samples;
  if (parts.size() > 1) fmt::print(out, "{} samples in {} parts\n", samples, parts.size());
  for (const std::string& part : parts) {
    if (parts.size() > 1) fmt::print(out, "\n");
    inspect_part(part, max_samples, out);
  }
}

void verify_store(const std::string& folder, std::FILE* out) {
  for (const std::string& part : store_parts(folder)) verify_part(part, out);
}

}  // namespace kiln
