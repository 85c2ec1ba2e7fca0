#include "plan/trace_family.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "plan/trace_parts.h"

namespace kiln {

namespace {

// A pass of one image is another program: what would be broadcast over a batch has its shape already.
constexpr int64_t kLowImages = 2, kLeastHighImages = 8;

constexpr int64_t kTracedPasses = 3;      // a first one and equal ones after it
constexpr int64_t kMostTracedPasses = 6;  // so many and more: one stands for several

// The line through the two traces.
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

void compose_ops(std::vector<OpRecord>& ops, const std::vector<OpRecord>& high, const Line& line) {
  for (size_t i = 0; i < ops.size(); ++i) {
    OpRecord& op = ops[i];
    if (op.name != high[i].name || op.phase != high[i].phase || op.segment != high[i].segment)
      fail("plan", "operation {} of two traces of one step is {} and {}", i, op.name, high[i].name);
    op.flops = line(op.flops, high[i].flops);
    op.bytes = line(op.bytes, high[i].bytes);
    op.m = line(op.m, high[i].m);
    op.n = line(op.n, high[i].n);
    op.k = line(op.k, high[i].k);
  }
}

void compose_events(StepMemory& memory, const StepMemory& high, const Line& line) {
  for (size_t i = 0; i < memory.events.size(); ++i) {
    MemoryEvent& event = memory.events[i];
    if (event.phase != high.events[i].phase || event.segment != high.events[i].segment)
      fail("plan", "allocation {} of two traces of one step is in {} and {}", i, name_of(event.phase),
           name_of(high.events[i].phase));
    event.bytes = line(event.bytes, high.events[i].bytes);
  }
  find_peak(memory);
}

// A trace cut where its passes begin.
struct CutTrace {
  explicit CutTrace(const StepTrace& cut) : trace(cut), parts(parts_of(cut)), begins(micro_steps_of(cut)) {}
  size_t ops_end() const { return parts[begins.back() - 1].ops_end; }  // of the last pass

  const StepTrace& trace;
  std::vector<TracePart> parts;
  std::vector<size_t> begins;
};

// A step of other passes than those that were traced: a first one, one that stands for all equal ones after
// it, and a rest.
class PassComposer {
 public:
  explicit PassComposer(const StepTrace& equal) : equal_(equal), result_(equal) {
    result_.ops.clear();
    result_.memory.marks.clear();
    result_.memory.events.clear();
  }

  // `rest`: a trace whose last pass is the rest; null: there is none.
  StepTrace run(int64_t num_whole, const StepTrace* rest) {
    add(equal_, 0, 1);
    if (num_whole < kMostTracedPasses) {
      for (int64_t i = 1; i < num_whole; ++i) add(equal_, 1, 1);
    } else {  // as trace_step() does
      add(equal_, 1, 1);
      add(equal_, 1, num_whole - 3);
      add(equal_, 1, 1);
    }
    const std::optional<CutTrace> last = rest ? std::optional<CutTrace>(*rest) : std::nullopt;
    if (last) add(*last, kTracedPasses - 1, 1);
    add_end();
    find_peak(result_.memory);
    find_mark_bytes(result_);
    return std::move(result_);
  }

 private:
  void add(const CutTrace& from, size_t pass, int64_t times) {
    const size_t first = from.begins.at(pass), last = from.begins.at(pass + 1);
    passes_.emplace_back(&from, pass);
    append(result_.memory.marks, from.trace.memory.marks, first, last);
    const size_t before = result_.ops.size();
    append(result_.ops, from.trace.ops, from.parts[first].ops_begin, from.parts[last - 1].ops_end);
    for (size_t i = before; i < result_.ops.size(); ++i) result_.ops[i].times = times;
    // What lives as long as the step comes before the first pass; after each pass its batch is freed.
    const size_t begin = first == 0 ? 0 : from.parts[first].events_begin;
    const uint64_t copy = (passes_.size() - 1) << kCopyShift;
    for (size_t i = begin; i < from.parts[last].events_begin; ++i)
      add_event(from.trace.memory.events[i], copy);
  }

  template <class Item>
  static void append(std::vector<Item>& to, const std::vector<Item>& from, size_t begin, size_t end) {
    to.insert(to.end(), from.begin() + static_cast<int64_t>(begin), from.begin() + static_cast<int64_t>(end));
  }

  void add_event(MemoryEvent event, uint64_t copy) {
    event.id |= copy;
    if (event.bytes > 0)
      alive_[event.id] = event;
    else if (alive_.erase(event.id) == 0)
      return;  // of a pass that is not in this step
    result_.memory.events.push_back(event);
  }

  // The end of the step: losses are converted pass by pass, then gathered; what passes left behind is freed.
  void add_end() {
    const StepTrace& end = equal_.trace;
    size_t op = equal_.ops_end();
    for (; op + kTracedPasses < end.ops.size() && end.ops[op].name == kConversion; op += kTracedPasses)
      for (const auto& [from, pass] : passes_)
        result_.ops.push_back(from->trace.ops.at(from->ops_end() + op - equal_.ops_end() + pass));
    append(result_.ops, end.ops, op, end.ops.size());
    append(result_.memory.marks, end.memory.marks, equal_.begins.back(), end.memory.marks.size());
    const auto& events = end.memory.events;
    for (size_t i = equal_.parts[equal_.begins.back()].events_begin; i < events.size(); ++i)
      add_event(events[i], 0);
    for (auto& [id, event] : std::exchange(alive_, {})) {
      event.bytes = -event.bytes;
      event.phase = events.back().phase;
      event.segment = events.back().segment;
      result_.memory.events.push_back(event);
    }
  }

  static constexpr int kCopyShift = 44;  // ids of a trace count from small numbers
  static constexpr const char* kConversion = "aten::_to_copy";
  const CutTrace equal_;
  StepTrace result_;
  std::vector<std::pair<const CutTrace*, size_t>> passes_;
  std::map<uint64_t, MemoryEvent> alive_;
};

}  // namespace

StepTrace compose_trace(const StepTrace& low, int64_t low_images, const StepTrace& high, int64_t high_images,
                        int64_t images) {
  if (low.ops.size() != high.ops.size() || low.memory.events.size() != high.memory.events.size() ||
      low.memory.marks.size() != high.memory.marks.size())
    fail("plan", "traces of passes of {} and {} images differ in more than their sizes", low_images,
         high_images);
  StepTrace trace = low;
  const Line line(low_images, high_images, images);
  compose_ops(trace.ops, high.ops, line);
  compose_events(trace.memory, high.memory, line);
  find_mark_bytes(trace);
  trace.offloaded_activation_bytes = line(low.offloaded_activation_bytes, high.offloaded_activation_bytes);
  for (size_t i = 0; i < trace.memory.marks.size(); ++i)
    trace.memory.marks[i].live_bytes = line(low.memory.marks[i].live_bytes, high.memory.marks[i].live_bytes);
  return trace;
}

TraceFamily::TraceFamily(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                         int64_t most_images)
    : options_(options),
      data_(data),
      device_(device),
      low_(kLowImages),
      high_(std::max(most_images, kLeastHighImages)) {
  options_.zero_stage = 0;
  options_.offload_optimizer = options_.offload_params = "none";
}

const StepTrace& TraceFamily::traced(int64_t micro_batch, int64_t num_passes) {
  const auto key = std::pair{micro_batch, num_passes};
  if (const auto known = equal_.find(key); known != equal_.end()) return known->second;
  TrainOptions options = options_;
  options.micro_batch = micro_batch;
  options.global_batch = micro_batch * num_passes;
  return equal_.emplace(key, trace_step(options, data_, device_)).first->second;
}

const StepTrace& TraceFamily::equal_passes(int64_t micro_batch, int64_t num_passes) {
  const auto key = std::pair{micro_batch, num_passes};
  if (const auto known = equal_.find(key); known != equal_.end()) return known->second;
  // Scratch of a CPU's products goes in steps, and small ones are other programs.
  if (micro_batch < low_ || device_ == DryRunDevice::kCpu) return traced(micro_batch, num_passes);
  const StepTrace &low = traced(low_, num_passes), &high = traced(high_, num_passes);
  if (micro_batch == low_ || micro_batch == high_) return equal_.at(key);
  return equal_.emplace(key, compose_trace(low, low_, high, high_, micro_batch)).first->second;
}

const StepTrace& TraceFamily::at(int64_t micro_batch, int64_t images) {
  const int64_t num_whole = images / micro_batch, rest = images % micro_batch;
  if (images == micro_batch) return equal_passes(micro_batch, 1);
  if (rest == 0 && num_whole == kTracedPasses) return equal_passes(micro_batch, kTracedPasses);
  const auto key = std::pair{micro_batch, images};
  if (const auto known = traces_.find(key); known != traces_.end()) return known->second;
  const StepTrace* last = rest > 0 ? &equal_passes(rest, kTracedPasses) : nullptr;
  return traces_.emplace(key, PassComposer(equal_passes(micro_batch, kTracedPasses)).run(num_whole, last))
      .first->second;
}

}  // namespace kiln
