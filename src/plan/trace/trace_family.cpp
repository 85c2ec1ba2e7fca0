#include "plan/trace/trace_family.h"

#include <algorithm>

#include "core/error.h"
#include "plan/trace/passes.h"

namespace kiln {

namespace {

// A pass of one image is another program, because what is broadcast over a batch already has its shape.
constexpr int64_t kLowImages = 2, kLeastHighImages = 8;

// The straight line through two traces, taken at `images`.
class Line {
 public:
  Line(int64_t low, int64_t high, int64_t images) : from_(images - low), span_(high - low) {}

  int64_t operator()(int64_t low, int64_t high) const { return low + (high - low) * from_ / span_; }
  double operator()(double low, double high) const {
    return low + (high - low) * static_cast<double>(from_) / static_cast<double>(span_);
  }

 private:
  int64_t from_, span_;
};

// True if two spans may be of one program: they have the same operations and as many allocations.
bool are_alike(const Span& a, const Span& b) {
  return a.phase == b.phase && a.segment == b.segment && a.events.size() == b.events.size() &&
         std::ranges::equal(a.ops, b.ops, {}, &OpRecord::name, &OpRecord::name);
}

void move_along(Span& span, const Span& high, const Line& line) {
  for (size_t i = 0; i < span.ops.size(); ++i) {
    OpRecord& op = span.ops[i];
    op.flops = line(op.flops, high.ops[i].flops);
    op.bytes = line(op.bytes, high.ops[i].bytes);
    op.m = line(op.m, high.ops[i].m);
    op.n = line(op.n, high.ops[i].n);
    op.k = line(op.k, high.ops[i].k);
  }
  for (size_t i = 0; i < span.events.size(); ++i)
    span.events[i].bytes = line(span.events[i].bytes, high.events[i].bytes);
}

}  // namespace

bool are_one_program(const StepTrace& a, const StepTrace& b) {
  return std::ranges::equal(a.spans, b.spans, are_alike);
}

StepTrace compose_trace(const StepTrace& low, int64_t low_images, const StepTrace& high, int64_t high_images,
                        int64_t images) {
  if (!are_one_program(low, high))
    fail("plan", "traces of passes of {} and {} images differ in more than their sizes", low_images,
         high_images);
  StepTrace trace = low;
  const Line line(low_images, high_images, images);
  for (size_t i = 0; i < trace.spans.size(); ++i) move_along(trace.spans[i], high.spans[i], line);
  trace.offloaded_activation_bytes = line(low.offloaded_activation_bytes, high.offloaded_activation_bytes);
  find_bytes(trace);
  return trace;
}

TraceFamily::TraceFamily(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                         int64_t most_images)
    : options_(options),
      data_(data),
      device_(device),
      low_(kLowImages),
      high_(std::max(most_images, kLeastHighImages)) {
  options_.offload.optimizer = options_.offload.params = Placement::kDevice;
}

const StepTrace& TraceFamily::traced(const Kind& kind) {
  if (const auto known = equal_.find(kind); known != equal_.end()) return known->second;
  TrainOptions options = options_;
  options.micro_batch = kind.images;
  options.global_batch = kind.images * kind.num_passes;
  options.zero.stage = kind.writes_gradients ? 2 : 0;
  return equal_.emplace(kind, trace_step(options, data_, device_)).first->second;
}

const StepTrace& TraceFamily::equal_passes(const Kind& kind) {
  if (const auto known = equal_.find(kind); known != equal_.end()) return known->second;
  // The scratch of products grows in steps on a CPU, and small passes are other programs.
  if (kind.images < low_ || device_ == DryRunDevice::kCpu) return traced(kind);
  const StepTrace& low = traced({low_, kind.num_passes, kind.writes_gradients});
  const StepTrace& high = traced({high_, kind.num_passes, kind.writes_gradients});
  if (kind.images == low_ || kind.images == high_) return equal_.at(kind);
  // Other kernels may serve other sizes, for convolutions and for captions whose rows need no filling up.
  if (!are_one_program(low, high)) return traced(kind);
  StepTrace trace = compose_trace(low, low_, high, high_, kind.images);
  trace.options.micro_batch = kind.images;
  trace.options.global_batch = kind.images * kind.num_passes;
  return equal_.emplace(kind, std::move(trace)).first->second;
}

const StepTrace& TraceFamily::at(int64_t micro_batch, int64_t images, int64_t zero_stage) {
  const int64_t num_whole = images / micro_batch, rest = images % micro_batch;
  if (images == micro_batch) return equal_passes({micro_batch, 1, false});
  const bool writes = zero_stage >= 2;
  const StepTrace& equal = equal_passes({micro_batch, kTracedPasses, writes});
  if (rest == 0 && num_whole == kTracedPasses) return equal;
  const auto key = std::tuple{micro_batch, images, writes};
  if (const auto known = traces_.find(key); known != traces_.end()) return known->second;
  const Pass last = rest > 0 ? Pass{&equal_passes({rest, kTracedPasses, writes}), kTracedPasses - 1}
                             : Pass{&equal, kTracedPasses - 1};
  const auto composed = [&](int64_t num_passes) {  // whole ones
    std::vector<Pass> passes(static_cast<size_t>(num_passes - (rest == 0)), {&equal, 1});
    passes.front().micro_step = 0;
    passes.push_back(last);
    return step_of_passes(passes, equal);
  };
  StepTrace trace = equal;
  const bool folds = num_whole > kDistinctPasses + 1;
  static_cast<RecordedStep&>(trace) = composed(folds ? kDistinctPasses : num_whole);
  if (folds) fold_equal_passes(trace, num_whole, own_peak_bytes(composed(kDistinctPasses + 1)));
  trace.options.global_batch = images;
  return traces_.emplace(key, std::move(trace)).first->second;
}

}  // namespace kiln
