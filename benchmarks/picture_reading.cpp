// How fast one thread reads folders of pictures, or stores of latents:
//   bench_picture_reading SIZE SECONDS FOLDER|STORE ...
// Prints a line of JSON for each: bytes and pixels of a sample, seconds to decode it, and to bring it to SIZE
// x SIZE. The files are in memory.
#include <fmt/format.h>

#include <filesystem>
#include <functional>
#include <numeric>

#include "core/error.h"
#include "core/json.h"
#include "core/measuring.h"
#include "data/images/image_dataset.h"
#include "data/store/feature_store.h"

namespace kiln {
namespace {

// Returns the mean over all samples of the least seconds that each of them took.
double seconds_each(int64_t count, double seconds, const std::function<void(int64_t)>& work) {
  std::vector<double> least(static_cast<size_t>(count), 1e9);
  const double begin = thread_seconds();
  do {
    for (int64_t i = 0; i < count; ++i) {
      const double start = thread_seconds();
      work(i);
      least[static_cast<size_t>(i)] = std::min(least[static_cast<size_t>(i)], thread_seconds() - start);
    }
  } while (thread_seconds() - begin < seconds);
  return std::accumulate(least.begin(), least.end(), 0.0) / static_cast<double>(count);
}

nlohmann::json measure_pictures(const std::string& folder, int64_t size, double seconds) {
  const auto images = ImageDataset::open(folder);
  const auto count = static_cast<int64_t>(images->records().size());
  std::vector<std::vector<std::byte>> files;
  std::vector<Image> pictures;
  double bytes = 0, pixels = 0;
  for (int64_t i = 0; i < count; ++i) {
    files.push_back(images->read(i));
    pictures.push_back(images->load(i));
    bytes += static_cast<double>(files.back().size());
    pixels += static_cast<double>(pictures.back().height * pictures.back().width);
  }
  const double decode_s = seconds_each(count, seconds, [&](int64_t i) { decode_image(files[i], "picture"); });
  const double crop_s = seconds_each(count, seconds, [&](int64_t i) { center_crop(pictures[i], size); });
  const auto number = static_cast<double>(count);
  return {{"bytes", bytes / number}, {"pixels", pixels / number}, {"decode_s", decode_s}, {"crop_s", crop_s}};
}

nlohmann::json measure_store(const std::string& folder, double seconds) {
  const auto store = FeatureStore::open(folder);
  std::vector<float> mean(static_cast<size_t>(store->info().latent_size())), logvar(mean.size());
  const double read_s = seconds_each(store->size(), seconds, [&](int64_t i) {
    store->read_mean({&i, 1}, {}, mean);
    if (store->info().has_logvar) store->read_logvar({&i, 1}, {}, logvar);
  });
  const double arrays = store->info().has_logvar ? 2 : 1;
  return {{"bytes", arrays * static_cast<double>(mean.size() * dtype_size(store->info().dtype))},
          {"decode_s", read_s},
          {"crop_s", 0.0}};
}

int run(int argc, char** argv) {
  if (argc < 4) fail("bench_picture_reading", "expected SIZE SECONDS FOLDER|STORE ...");
  for (int i = 3; i < argc; ++i) {
    const bool is_store = std::filesystem::exists(std::filesystem::path(argv[i]) / "store.json");
    nlohmann::json result = is_store ? measure_store(argv[i], std::stod(argv[2]))
                                     : measure_pictures(argv[i], std::stoll(argv[1]), std::stod(argv[2]));
    result["folder"] = argv[i];
    fmt::print("{}\n", result.dump());
  }
  return 0;
}

}  // namespace
}  // namespace kiln

int main(int argc, char** argv) {
  try {
    return kiln::run(argc, argv);
  } catch (const kiln::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
