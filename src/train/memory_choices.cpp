#include "train/memory_choices.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/text/some_of.h"
#include "core/text/split.h"
#include "core/units.h"

namespace kiln {

namespace {

// Returns 7 for "blocks.7", whatever a model calls its blocks, and nothing for "embed" and "up.0.1".
std::optional<int64_t> block_number(std::string_view name) {
  const size_t dot = name.find('.');
  return dot == std::string_view::npos ? std::nullopt : whole_number(name.substr(dot + 1));
}

// Returns the segments that --`option` names.
std::vector<bool> parse_segments(const char* option, const SegmentSet& set, const Denoiser& denoiser) {
  const auto& segments = denoiser.segments();
  if (set.is_none() || set.is_all()) return std::vector<bool>(segments.size(), set.is_all());
  std::vector<bool> chosen(segments.size());
  std::vector<std::string> names;
  names.reserve(segments.size());
  for (const auto& segment : segments) names.push_back(segment->name());
  const auto choose = [&](const std::string& name) {
    const auto found = std::ranges::find(names, name);
    if (found == names.end())
      fail("train", "--{} expects none, all, or some of {} (blocks by number or range), got '{}'", option,
           some_of(names), set.text());
    chosen[static_cast<size_t>(found - names.begin())] = true;
  };
  for (const std::string& part : split(set.text(), ',')) {
    const std::vector<std::string> ends = split(part, '-');
    const auto first = whole_number(ends.front()), last = whole_number(ends.back());
    if (!first || !last || ends.size() > 2) {
      choose(part);
      continue;
    }
    if (*first > *last) fail("train", "--{} range '{}' runs backwards", option, part);
    for (int64_t i = *first; i <= *last; ++i) {
      const auto block = std::ranges::find(names, std::optional<int64_t>(i), block_number);
      choose(block == names.end() ? fmt::to_string(i) : *block);
    }
  }
  return chosen;
}

}  // namespace

std::vector<MemoryChoice> parse_memory_choices(const MemoryOptions& options, const Denoiser& denoiser) {
  const std::vector<bool> recompute = parse_segments("recompute", options.recompute, denoiser),
                          offload =
                              parse_segments("offload-activations", options.offload_activations, denoiser);
  std::vector<MemoryChoice> choices(recompute.size());
  for (size_t i = 0; i < choices.size(); ++i)
    choices[i].activations = offload[i]     ? Activations::kOffload
                             : recompute[i] ? Activations::kRecompute
                                            : Activations::kKeep;
  return choices;
}

namespace {

// Returns the shortest text that parse_segments() reads as every `wanted` segment and any of the `free` ones:
// numbers and ranges of blocks, names of the other segments.
SegmentSet segment_set(const std::vector<bool>& wanted, const std::vector<bool>& free,
                       const Denoiser& denoiser) {
  const auto& segments = denoiser.segments();
  if (std::ranges::find(wanted, true) == wanted.end()) return {};
  bool all = true;
  for (size_t i = 0; i < wanted.size(); ++i) all = all && (wanted[i] || free[i]);
  if (all) return SegmentSet::all();
  const auto number_of = [&](size_t i) { return block_number(segments[i]->name()); };
  std::vector<std::string> parts;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i]) continue;
    const auto first = number_of(i);
    if (!first) {
      parts.push_back(segments[i]->name());
      continue;
    }
    size_t last = i;  // the last wanted block with only wanted and free blocks before it
    for (size_t j = i + 1;
         j < wanted.size() && (wanted[j] || free[j]) && number_of(j) == *first + static_cast<int64_t>(j - i);
         ++j)
      if (wanted[j]) last = j;
    parts.push_back(last > i ? fmt::format("{}-{}", *first, *number_of(last)) : fmt::to_string(*first));
    i = last;
  }
  return SegmentSet::parse(fmt::format("{}", fmt::join(parts, ",")));
}

}  // namespace

void set_memory_choices(MemoryOptions& options, const std::vector<MemoryChoice>& choices,
                        const Denoiser& denoiser) {
  std::vector<bool> recompute, offload;
  for (const MemoryChoice& choice : choices) {
    recompute.push_back(choice.activations == Activations::kRecompute);
    offload.push_back(choice.activations == Activations::kOffload);
  }
  options.recompute = segment_set(recompute, /*free=*/offload, denoiser);  // offload wins over recompute
  options.offload_activations = segment_set(offload, /*free=*/std::vector<bool>(choices.size()), denoiser);
}

}  // namespace kiln
