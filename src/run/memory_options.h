// Options for what a step keeps of its activations, and for how much memory it may take.
#pragma once
#include <compare>
#include <cstdint>
#include <string>

namespace kiln {

// A choice of segments, made without knowing the model: none, all, or block numbers, ranges and segment names
// ("0-5,8,final"). train/memory_choices.h finds the segments.
class SegmentSet {
 public:
  SegmentSet() = default;
  static SegmentSet all() { return parse("all"); }
  static SegmentSet parse(std::string text) {
    SegmentSet set;
    set.text_ = std::move(text);
    return set;
  }
  bool is_none() const { return text_ == "none"; }
  bool is_all() const { return text_ == "all"; }
  const std::string& text() const { return text_; }
  auto operator<=>(const SegmentSet&) const = default;

 private:
  std::string text_ = "none";
};

// How much of the device's memory a run may take.
class MemoryBudget {
 public:
  // Parses the size of another option, --`option`. Throws Error, also for "auto".
  static int64_t parse_size(const char* option, const std::string& text);
  // Parses "" (no budget), "auto" (what is free), or a size: plain bytes, or with K, M, G, T. "12G" and
  // "12GiB" are binary, "12GB" is decimal. Throws Error.
  static MemoryBudget parse(const std::string& text);
  bool is_given() const { return !text_.empty(); }
  int64_t bytes() const { return bytes_; }  // 0: what is free
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  int64_t bytes_ = 0;
};

struct MemoryOptions {
  SegmentSet recompute{};            // segments whose forward is run again in backward
  SegmentSet offload_activations{};  // the same, and their inputs wait in host memory
  bool keep_gelu = false;            // its result in the segments that are kept
  MemoryBudget budget{};             // recompute and offload_activations are chosen to fit it
  bool preflight = true;             // refuse to start what the plan says cannot fit
};

}  // namespace kiln
