#include "plan/trace/phases.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <vector>

#include "core/aten.h"
#include "evaluate/evaluation.h"
#include "evaluate/npz_archive.h"
#include "train/run_evaluation.h"

namespace kiln {

namespace {

constexpr int64_t kF64 = sizeof(double), kF32 = sizeof(float);

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

// Returns the number of pictures of the reference: 0 if it is a file of statistics alone, nothing if it is
// not here.
std::optional<int64_t> reference_size(const TrainOptions& options) {
  const std::string& path = options.evaluation.reference;
  if (path.empty() || !std::filesystem::exists(path)) return std::nullopt;
  const bool is_npz = path.ends_with(".npz");
  if (is_npz && !NpzArchive(path).has("arr_0")) return 0;
  return PictureSource::open(path, is_npz ? 0 : options.data.image_size)->size();
}

// What a pass of the net allocates. It is counted, not traced, because several of the nets' operations
// compute no shapes on meta tensors.
struct PassBytes {
  int64_t width = 0, spatial = 0;  // widths of the features
  int64_t bytes = 0;               // most alive beside the pictures
};

// Counts (rows, 32 + 64 channels, 147, 147) f32 around the third convolution, or the resize before it if
// pictures are large.
PassBytes inception_pass(const FeatureNet&, int64_t rows, int64_t side) {
  constexpr int64_t kSide = 299, kStem = int64_t{147} * 147 * (32 + 64);
  const int64_t resize = 3 * side * side + 4 * (3 * side * kSide) + 3 * (3 * kSide * kSide);
  return {.width = 2048, .spatial = 2023, .bytes = 4 * rows * std::max(kStem, resize)};
}

// Counts three of (rows, 32, side / 2, side / 2) f32: the first stage and what its deviation takes.
PassBytes random_pass(const FeatureNet& net, int64_t rows, int64_t side) {
  int64_t width = 0;
  for (const at::Tensor& weight : net.weights()) width += 2 * weight.size(0);
  return {.width = width, .bytes = 4 * rows * 3 * 8 * side * side};
}

// Counts the residual stream, the MLP's hidden values before and after its activation, and the resized
// pictures.
PassBytes dinov2_pass(const FeatureNet& net, int64_t rows, int64_t) {
  constexpr int64_t kSide = 224, kPatch = 14, kLive = 3 + 4 + 4;
  const int64_t width = net.weights().front().size(-1), tokens = 1 + (kSide / kPatch) * (kSide / kPatch);
  return {.width = width, .bytes = 4 * rows * (kLive * tokens * width + 3 * (3 * kSide * kSide))};
}

PassBytes pass_of(const FeatureNet& net, int64_t rows, int64_t side) {
  if (net.name == "inception") return inception_pass(net, rows, side);
  if (net.name == "dinov2") return dinov2_pass(net, rows, side);
  return random_pass(net, rows, side);
}

// Writes the events of nested blocks: the last one allocated is the first one freed.
class EventList {
 public:
  explicit EventList(MemoryEvents& events) : events_(events) {}
  ~EventList() {
    while (!alive_.empty()) free();
  }
  EventList(const EventList&) = delete;

  void allocate(int64_t bytes) {
    const uint64_t id = kFirstId + events_.size();
    events_.push_back({.id = id, .bytes = bytes});
    alive_.push_back(events_.back());
  }
  void free() {  // frees the last one
    events_.push_back({.id = alive_.back().id, .bytes = -alive_.back().bytes});
    alive_.pop_back();
  }

 private:
  static constexpr uint64_t kFirstId = uint64_t{1} << 45;  // above the ids of traces
  MemoryEvents& events_;
  std::vector<MemoryEvent> alive_;
};

// Returns the bytes of a matrix and a vector in f64 for each kind of features.
int64_t statistics_bytes(const PassBytes& pass) {
  return kF64 * (pass.width * (pass.width + 1) + pass.spatial * (pass.spatial + 1));
}

}  // namespace

EvaluationTrace trace_evaluation(const TrainOptions& options, DryRunDevice device, int64_t world_size) {
  const EvaluationOptions& evaluation = options.evaluation;
  const auto net = outline_feature_net(evaluation.net, evaluation.net_weights);
  const bool is_on_cpu = device == DryRunDevice::kCpu;
  const int64_t share = (evaluation.images + world_size - 1) / world_size, side = options.data.image_size;
  const std::optional<int64_t> known_reference = reference_size(options);
  const int64_t num_reference = known_reference.value_or(0);
  EvaluationTrace trace{.net_bytes = bytes_of(net->weights())};
  if (!known_reference) trace.note = "the features of --evaluate-reference, which is not here";

  const int64_t rows = std::min(kPicturesAtOnce, share);
  const PassBytes pass = pass_of(*net, rows, side);
  const int64_t statistics = statistics_bytes(pass), row_bytes = kF32 * pass.width;
  trace.reference_bytes = statistics + num_reference * row_bytes;
  // First the sums, then the statistics of all features joined, and what the metrics take.
  const auto judge = [&](EventList& events) {
    events.allocate(statistics + share * row_bytes);
    events.allocate(statistics + evaluation.images * row_bytes);
    events.allocate(
        metric_scratch_bytes(std::max(pass.width, pass.spatial), num_reference, evaluation.images));
  };
  {
    EventList on_device(trace.judge);
    on_device.allocate(2 * rows * 3 * side * side + pass.bytes + (is_on_cpu ? statistics : 0));
    on_device.free();
    if (is_on_cpu) judge(on_device);
  }
  if (!is_on_cpu) {
    MemoryEvents host;
    {
      EventList events(host);
      judge(events);
    }
    trace.host_bytes = peak_bytes(host);
  }
  return trace;
}

int64_t feature_net_bytes(const TrainOptions& options) {
  if (options.evaluation.every == 0) return 0;
  return bytes_of(outline_feature_net(options.evaluation.net, options.evaluation.net_weights)->weights());
}

}  // namespace kiln
