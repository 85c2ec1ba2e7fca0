// Streams and events of a GPU that is not there. Work on them runs at once, on the CPU; what is kept is which
// work comes before which, as far as events say so. Each thread has streams of its own, as each rank a GPU.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace kiln::test {

class StreamEmulation {
 public:
  static at::Device device() { return {at::kCUDA, 0}; }
  // False: a real GPU's streams are linked in.
  static bool is_possible() { return !c10::impl::hasDeviceGuardImpl(at::kCUDA); }

  StreamEmulation() { c10::impl::device_guard_impl_registry[kIndex].store(&guard()); }
  ~StreamEmulation() { c10::impl::device_guard_impl_registry[kIndex].store(nullptr); }
  StreamEmulation(const StreamEmulation&) = delete;

  // Queues work of this name on the thread's current stream.
  static void mark(const std::string& name) {
    Thread& mine = thread();
    Seen& seen = mine.seen[mine.current];
    ++seen[mine.current];
    mine.marks[name] = {mine.current, seen};
  }
  static bool is_marked(const std::string& name) { return thread().marks.contains(name); }
  // True if the second work cannot begin before the first one has ended.
  static bool is_before(const std::string& first, const std::string& second) {
    const Mark &a = thread().marks.at(first), &b = thread().marks.at(second);
    const auto seen = b.seen.find(a.stream);
    return seen != b.seen.end() && seen->second >= a.seen.at(a.stream);
  }
  static c10::StreamId stream_of(const std::string& name) { return thread().marks.at(name).stream; }
  static void forget() { thread() = {}; }

 private:
  static constexpr auto kIndex = static_cast<size_t>(at::kCUDA);
  using Seen = std::map<c10::StreamId, int64_t>;  // how much of each stream comes before
  struct Mark {
    c10::StreamId stream = 0;
    Seen seen{};
  };
  struct Thread {
    c10::StreamId current = 0, last = 0;
    std::map<c10::StreamId, Seen> seen{};
    std::map<std::string, Mark> marks{};
  };
  static Thread& thread() {
    thread_local Thread mine;
    return mine;
  }

  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

  class Guard : public c10::impl::DeviceGuardImplInterface {
   public:
    at::DeviceType type() const override { return at::kCUDA; }
    at::Device exchangeDevice(at::Device) const override { return StreamEmulation::device(); }
    at::Device getDevice() const override { return StreamEmulation::device(); }
    void setDevice(at::Device) const override {}
    void uncheckedSetDevice(at::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 0; }  // autograd needs no thread for it
    c10::Stream getStream(at::Device) const override { return stream(thread().current); }
    c10::Stream getStreamFromGlobalPool(at::Device, bool) const override { return stream(++thread().last); }
    c10::Stream exchangeStream(c10::Stream next) const override {
      return stream(std::exchange(thread().current, next.id()));
    }
    void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
      if (*event == nullptr) *event = new Seen;
      *static_cast<Seen*>(*event) = thread().seen[on.id()];
    }
    void block(void* event, const c10::Stream& on) const override {
      for (const auto& [id, count] : *static_cast<Seen*>(event)) {
        int64_t& seen = thread().seen[on.id()][id];
        seen = std::max(seen, count);
      }
    }
    bool queryEvent(void*) const override { return true; }
    void synchronizeEvent(void*) const override {}
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
      delete static_cast<Seen*>(event);
    }
  };
  static const Guard& guard() {
    static const Guard one;
    return one;
  }
};

}  // namespace kiln::test
