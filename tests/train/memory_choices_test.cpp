#include "train/memory_choices.h"

#include "models/registry.h"
#include "test_files.h"

namespace kiln {
namespace {

std::vector<MemoryChoice> choices_of(const std::string& recompute, const Denoiser& denoiser) {
  MemoryOptions options;
  options.recompute = SegmentSet::parse(recompute);
  return parse_memory_choices(options, denoiser);
}

TEST(MemoryChoices, RecomputeNamesSegments) {
  const auto denoiser = build_denoiser("DiT-S/8", {{"input_size", 32}}, {.device = at::kMeta});
  const auto chosen = [&](const std::string& text) {
    std::string picture;
    for (const MemoryChoice& choice : choices_of(text, *denoiser))
      picture += choice.activations == Activations::kRecompute ? 'r' : '.';
    return picture;
  };
  EXPECT_EQ(chosen("none"), "..............");
  EXPECT_EQ(chosen("all"), "rrrrrrrrrrrrrr");
  EXPECT_EQ(chosen("0-2, 11"), ".rrr........r.");
  EXPECT_EQ(chosen("embed,final"), "r............r");
  for (const char* bad : {"12", "half", "3-1", "1-", "", "0-99"})
    EXPECT_ERROR(choices_of(bad, *denoiser), "--recompute") << bad;
}

TEST(MemoryChoices, TextsReadBack) {
  const auto denoiser = build_denoiser(
      "dit", {{"input_size", 8}, {"patch_size", 2}, {"hidden_size", 48}, {"depth", 5}, {"num_heads", 3}},
      {.device = at::kMeta});
  const size_t num_segments = denoiser->segments().size();
  size_t num_mixtures = 1;
  for (size_t i = 0; i < num_segments; ++i) num_mixtures *= 3;
  for (size_t code = 0; code < num_mixtures; ++code) {
    std::vector<MemoryChoice> choices;
    for (size_t rest = code; choices.size() < num_segments; rest /= 3)
      choices.push_back({static_cast<Activations>(rest % 3)});
    MemoryOptions options;
    set_memory_choices(options, choices, *denoiser);
    const std::vector<MemoryChoice> read = parse_memory_choices(options, *denoiser);
    for (size_t i = 0; i < num_segments; ++i)
      ASSERT_EQ(read[i].activations, choices[i].activations)
          << options.recompute.text() << " / " << options.offload_activations.text();
  }

  using enum Activations;
  const auto text = [&](std::initializer_list<Activations> activations) {
    std::vector<MemoryChoice> choices;
    for (Activations choice : activations) choices.push_back({choice});
    MemoryOptions options;
    set_memory_choices(options, choices, *denoiser);
    return options.recompute.text() + " / " + options.offload_activations.text();
  };
  EXPECT_EQ(text({kKeep, kKeep, kKeep, kKeep, kKeep, kKeep, kKeep}), "none / none");
  EXPECT_EQ(text({kRecompute, kRecompute, kRecompute, kRecompute, kRecompute, kRecompute, kRecompute}),
            "all / none");
  EXPECT_EQ(text({kKeep, kRecompute, kRecompute, kRecompute, kKeep, kRecompute, kRecompute}),
            "0-2,4,final / none");
  EXPECT_EQ(text({kRecompute, kOffload, kOffload, kRecompute, kRecompute, kRecompute, kRecompute}),
            "all / 0-1");
  EXPECT_EQ(text({kKeep, kRecompute, kOffload, kRecompute, kKeep, kKeep, kOffload}), "0-2 / 1,final");
}

}  // namespace
}  // namespace kiln
