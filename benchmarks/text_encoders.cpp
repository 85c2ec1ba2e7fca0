// Encoding of texts of equal length by a text encoder as it lies in a folder, in bf16.
//
//   bench_text_encoders FOLDER TEXTS TOKENS SHARED [REPEATS]
//
// Prints the median seconds of a pass over TEXTS of TOKENS tokens each. The first SHARED of these are the
// same in all and were computed before. benchmarks/peers/text_encoders.py sets it against transformers.
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "models/text/text_registry.h"
#include "parallel/machine.h"

namespace kiln {
namespace {

TokenRows rows_of(int64_t texts, int64_t tokens, int64_t vocabulary_size) {
  TokenRows rows{.host_offsets = {0}};
  constexpr int64_t kOrdinary = 5;  // ids below are often special
  rows.ids = at::randint(kOrdinary, vocabulary_size, {texts * tokens}, at::kLong);
  for (int64_t i = 1; i <= texts; ++i) rows.host_offsets.push_back(i * tokens);
  return rows;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() < 4) {
    fmt::print(stderr, "bench_text_encoders FOLDER TEXTS TOKENS SHARED [REPEATS]\n");
    return 1;
  }
  const int64_t texts = std::stoll(arguments[1]), tokens = std::stoll(arguments[2]),
                shared = std::stoll(arguments[3]);
  const int64_t repeats = arguments.size() > 4 ? std::stoll(arguments[4]) : 5;
  const c10::InferenceMode inference;
  apply(ComputeSettings{.device = at::kCPU});
  OpenedTextEncoder opened = open_text_encoder(arguments[0], at::kBFloat16);
  opened.load(at::kCPU);
  const TextEncoder& encoder = *opened.encoder;
  TokenPrefix prefix;
  TextBatch batch{.tokens = rows_of(texts, tokens - shared, encoder.shape().vocabulary_size)};
  if (shared > 0) {
    encoder.encode_batch({.tokens = rows_of(1, shared, encoder.shape().vocabulary_size), .fills = &prefix});
    batch.after = &prefix;
  }
  encoder.encode_batch(batch);
  std::vector<double> seconds;
  for (int64_t i = 0; i < repeats; ++i) {
    const auto started = std::chrono::steady_clock::now();
    encoder.encode_batch(batch);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  }
  std::ranges::sort(seconds);
  fmt::print("{}\n", seconds[seconds.size() / 2]);
  return 0;
}

}  // namespace
}  // namespace kiln

int main(int count, char** values) {
  try {
    return kiln::run({values + 1, values + count});
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
