#include "parallel/heartbeat.h"

#include <cstring>

#include "core/error.h"

namespace kiln {

namespace {

constexpr auto kInterval = std::chrono::seconds(1);

std::string key_of(int64_t rank) { return fmt::format("alive/{}", rank); }
std::string failure_key_of(int64_t rank) { return fmt::format("failed/{}", rank); }

}  // namespace

Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks)
    : store_(std::move(store)), ranks_(ranks), thread_([this] { beat(); }) {}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  thread_.join();
}

void Heartbeat::beat() {
  std::unique_lock lock(mutex_);
  for (Beat mine; !stopping_; stop_.wait_for(lock, kInterval, [this] { return stopping_; })) {
    ++mine.beats;
    mine.collectives = collectives_;
    std::vector<uint8_t> bytes(sizeof mine);
    std::memcpy(bytes.data(), &mine, sizeof mine);
    try {
      store_->set(key_of(ranks_.rank), bytes);
    } catch (const std::exception&) {
      return;  // the rendezvous ends with whoever hosts it
    }
  }
}

std::vector<Heartbeat::Beat> Heartbeat::read_all() {
  std::vector<Beat> all(static_cast<size_t>(ranks_.world_size));
  const std::lock_guard lock(mutex_);
  for (size_t r = 0; r < all.size(); ++r) {
    const std::string key = key_of(static_cast<int64_t>(r));
    if (!store_->check({key})) continue;
    const std::vector<uint8_t> bytes = store_->get(key);
    if (bytes.size() == sizeof(Beat)) std::memcpy(&all[r], bytes.data(), sizeof(Beat));
  }
  return all;
}

void Heartbeat::report_failure(const std::string& why) try {
  const std::lock_guard lock(mutex_);
  store_->set(failure_key_of(ranks_.rank), why);
} catch (const std::exception&) {  // the rendezvous is gone: nobody can be told
}

// Of ranks that failed first: of those that only miss others, nothing.
std::string Heartbeat::reported_failures() {
  std::string failures;
  const std::lock_guard lock(mutex_);
  for (int64_t rank = 0; rank < ranks_.world_size; ++rank) {
    if (rank == ranks_.rank || !store_->check({failure_key_of(rank)})) continue;
    const std::vector<uint8_t> why = store_->get(failure_key_of(rank));
    failures += fmt::format("; rank {} failed: {}", rank, std::string(why.begin(), why.end()));
  }
  return failures;
}

std::string Heartbeat::describe_missing(int64_t number) try {
  if (std::string failures = reported_failures(); !failures.empty()) return failures;
  const std::vector<Beat> before = read_all();
  std::this_thread::sleep_for(3 * kInterval);
  const std::vector<Beat> after = read_all();
  std::string missing;
  for (size_t r = 0; r < after.size(); ++r) {
    if (static_cast<int64_t>(r) == ranks_.rank) continue;
    if (after[r].beats == before[r].beats)
      missing += fmt::format("; rank {} no longer answers", r);
    else if (after[r].collectives < number)
      missing += fmt::format("; rank {} has not come so far", r);
  }
  return missing;
} catch (const std::exception&) {
  return fmt::format("; the rendezvous at {}:{} no longer answers", ranks_.master_addr, ranks_.master_port);
}

}  // namespace kiln
