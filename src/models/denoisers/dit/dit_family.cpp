#include "models/denoisers/dit/dit.h"
#include "models/denoisers/families.h"

namespace kiln {

namespace {

// Options of a run whose features were extracted before.
constexpr const char* kFastOptions = R"({"compute-dtype": "fp16", "recompute": "all", "tf32": true})";

}  // namespace

Family dit_family() {
  return {.name = "dit",
          .presets = dit_presets,
          .resolve = resolve_with<parse_dit_config>,
          .complete = complete_dit_config,
          .fit = fit_dit_config,
          .build = build_with<parse_dit_config, build_dit>,
          .recognise = recognise_dit,
          .formats = {dit_diffusers_format()},
          .published = {{"DiT-XL/2", 256, 256, 1e-4, 7'000'000, "DiT-XL/2's published 7M steps", 64},
                        {"DiT-XL/2", 512, 256, 1e-4, 3'000'000, "DiT-XL/2's published 3M steps", 64},
                        {"DiT-", 0, 256, 1e-4, 400'000, "DiT's 400K steps", 64}},
          // Every published width, with many and with few rows, and 16 to 1,024 tokens. Batches are small, so
          // that a step takes a fraction of a second. There are enough blocks that a step does not fit the
          // caches, as with a whole model: backward reads what was written long before. The most important
          // come first, in case time runs out.
          .calibration = {{384, 6, 6, 2, 256, 4},
                          {768, 12, 3, 4, 256, 16},
                          {1152, 16, 2, 8, 256, 12},
                          {384, 6, 6, 8, 256, 48},
                          {384, 6, 4, 2, 512, 2},
                          {1024, 16, 2, 4, 256, 6},
                          {384, 6, 4, 4, 256, 48},
                          {768, 12, 3, 8, 256, 10},
                          {768, 12, 3, 2, 256, 2},
                          {384, 6, 4, 4, 256, 16, 8},
                          {768, 12, 2, 8, 256, 48},
                          {384, 6, 6, 2, 256, 12},
                          {1152, 16, 2, 2, 256, 2},
                          {768, 12, 2, 4, 256, 6},
                          {1024, 16, 2, 2, 256, 2},
                          {1152, 16, 2, 4, 256, 8},
                          {768, 12, 2, 2, 256, 8},
                          {192, 3, 6, 4, 256, 32}},
          .measured = {{"DiT-XL/2", 256, "A100", 1, 128, 0.84, kFastOptions, "fast-DiT's README"},
                       {"DiT-XL/2", 256, "A100", 2, 256, 0.77, kFastOptions, "fast-DiT's log"}},
          // Table 4 of the paper and its section 5.1.
          .quality = {{"DiT-S/8", 256, 256, 400'000, 153.60},
                      {"DiT-S/4", 256, 256, 400'000, 100.41},
                      {"DiT-S/2", 256, 256, 400'000, 68.40},
                      {"DiT-B/8", 256, 256, 400'000, 122.74},
                      {"DiT-B/4", 256, 256, 400'000, 68.38},
                      {"DiT-B/2", 256, 256, 400'000, 43.47},
                      {"DiT-L/8", 256, 256, 400'000, 118.87},
                      {"DiT-L/4", 256, 256, 400'000, 45.64},
                      {"DiT-L/2", 256, 256, 400'000, 23.33},
                      {"DiT-XL/8", 256, 256, 400'000, 106.41},
                      {"DiT-XL/4", 256, 256, 400'000, 43.01},
                      {"DiT-XL/2", 256, 256, 400'000, 19.47},
                      {"DiT-XL/2", 256, 256, 7'000'000, 9.62},
                      {"DiT-XL/2", 512, 256, 3'000'000, 12.03}},
          .objectives = {{"", R"({"objective": "iddpm"})"}},
          .sampling = {{"", "ddpm", 250, 4}}};  // the repository's sample.py
}

}  // namespace kiln
