#include "parallel/heartbeat.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "core/error.h"

namespace kiln {

namespace {

// Of waiting for the board, in intervals: behind a link that was cut, its calls take as long as TCP tries
// again, a quarter of an hour.
constexpr int kPatience = 5;
// Between two looks at who has moved, in intervals.
constexpr int kLook = 3;

struct Beat {
  int64_t beats = 0, collectives = 0;
};

std::string key_of(int64_t rank) { return fmt::format("alive/{}", rank); }
std::string failure_key_of(int64_t rank) { return fmt::format("failed/{}", rank); }

}  // namespace

// Belongs to the threads that talk to the board, too: one that gets no answer outlives the heartbeat.
struct Heartbeat::Shared {
  const std::shared_ptr<NoticeBoard> board;
  const Ranks ranks;
  const std::chrono::milliseconds interval;
  std::mutex board_mutex;
  std::atomic<int64_t> collectives = 0;

  std::mutex mutex;  // never held while the board is asked
  std::condition_variable changed;
  bool stopping = false, has_ended = false;

  Shared(std::shared_ptr<NoticeBoard> its_board, const Ranks& its_ranks,
         std::chrono::milliseconds its_interval)
      : board(std::move(its_board)), ranks(its_ranks), interval(its_interval) {}

  void beat();
  std::vector<Beat> read_all();
  std::string reported_failures();
  std::string describe_missing(int64_t number);
};

void Heartbeat::Shared::beat() try {
  std::unique_lock lock(mutex);
  for (Beat mine; !stopping; changed.wait_for(lock, interval, [this] { return stopping; })) {
    ++mine.beats;
    mine.collectives = collectives;
    std::string bytes(sizeof mine, '\0');
    std::memcpy(bytes.data(), &mine, sizeof mine);
    lock.unlock();
    {
      const std::lock_guard board_lock(board_mutex);
      board->set(key_of(ranks.rank), bytes);
    }
    lock.lock();
  }
} catch (const std::exception&) {  // the rendezvous ends with whoever hosts it
}

std::vector<Beat> Heartbeat::Shared::read_all() {
  std::vector<Beat> all(static_cast<size_t>(ranks.world_size));
  const std::lock_guard lock(board_mutex);
  for (size_t r = 0; r < all.size(); ++r) {
    const auto bytes = board->find(key_of(static_cast<int64_t>(r)));
    if (bytes && bytes->size() == sizeof(Beat)) std::memcpy(&all[r], bytes->data(), sizeof(Beat));
  }
  return all;
}

// Of ranks that failed first: of those that only miss others, nothing.
std::string Heartbeat::Shared::reported_failures() {
  std::string failures;
  const std::lock_guard lock(board_mutex);
  for (int64_t rank = 0; rank < ranks.world_size; ++rank) {
    if (rank == ranks.rank) continue;
    if (const auto why = board->find(failure_key_of(rank)))
      failures += fmt::format("; rank {} failed: {}", rank, *why);
  }
  return failures;
}

std::string Heartbeat::Shared::describe_missing(int64_t number) {
  if (std::string failures = reported_failures(); !failures.empty()) return failures;
  const std::vector<Beat> before = read_all();
  std::this_thread::sleep_for(kLook * interval);
  const std::vector<Beat> after = read_all();
  std::string missing;
  for (size_t r = 0; r < after.size(); ++r) {
    if (static_cast<int64_t>(r) == ranks.rank) continue;
    if (after[r].beats == before[r].beats)
      missing += fmt::format("; rank {} no longer answers", r);
    else if (after[r].collectives < number)
      missing += fmt::format("; rank {} has not come so far", r);
  }
  return missing;
}

Heartbeat::Heartbeat(std::shared_ptr<NoticeBoard> board, const Ranks& ranks,
                     std::chrono::milliseconds interval)
    : shared_(std::make_shared<Shared>(std::move(board), ranks, interval)) {
  std::thread([shared = shared_] {
    shared->beat();
    const std::lock_guard lock(shared->mutex);
    shared->has_ended = true;
    shared->changed.notify_all();
  }).detach();
}

Heartbeat::~Heartbeat() {
  std::unique_lock lock(shared_->mutex);
  shared_->stopping = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, kPatience * shared_->interval, [this] { return shared_->has_ended; });
}

const Ranks& Heartbeat::ranks() const { return shared_->ranks; }
int64_t Heartbeat::next_collective() { return ++shared_->collectives; }

// The board's answer to a question of a few calls. Throws when it is gone or does not come in time.
std::string Heartbeat::ask(std::function<std::string(Shared&)> question) {
  std::packaged_task<std::string()> task(
      [shared = shared_, question = std::move(question)] { return question(*shared); });
  std::future<std::string> answer = task.get_future();
  std::thread(std::move(task)).detach();
  if (answer.wait_for((kLook + kPatience) * shared_->interval) != std::future_status::ready)
    fail("ranks", "the rendezvous gives no answer");
  return answer.get();
}

void Heartbeat::report_failure(const std::string& why) try {
  ask([why](Shared& shared) {
    const std::lock_guard lock(shared.board_mutex);
    shared.board->set(failure_key_of(shared.ranks.rank), why);
    return std::string();
  });
} catch (const std::exception&) {  // nobody can be told
}

std::string Heartbeat::describe_missing(int64_t number) try {
  return ask([number](Shared& shared) { return shared.describe_missing(number); });
} catch (const std::exception&) {
  return fmt::format("; the rendezvous at {}:{} no longer answers", ranks().master_addr, ranks().master_port);
}

}  // namespace kiln
