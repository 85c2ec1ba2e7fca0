#include "parallel/ranks/heartbeat.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/text/printable.h"
#include "core/text/some_of.h"

namespace kiln {

namespace {

// How many intervals to wait for the board. If its link was cut, a call lasts as long as TCP retries: a
// quarter of an hour.
constexpr int kPatience = 5;
// How many intervals lie between two looks at which ranks have beaten.
constexpr int kLook = 3;

// A rank without a beat for this many intervals, while others wait, is gone.
constexpr int kSilence = 5;
// One on another machine is gone after this many even where one that is stopped is waited for. If the link
// was cut, that rank has ended by then, as it no longer reached the rendezvous, and TCP may take a minute to
// say so.
constexpr int kSilenceElsewhere = 30;
// The key under which rank 0 says who is gone. The others only watch rank 0, so the load on the rendezvous
// grows with the number of ranks, not with its square.
constexpr const char* kGoneKey = "gone";

// The pause between two looks at whether something is done.
constexpr std::chrono::microseconds kPause(100);

using Clock = std::chrono::steady_clock;

struct Beat {
  int64_t beats = 0, collectives = 0;
  int64_t process = 0;     // its number in the namespace `processes`; 0: unknown
  uint64_t processes = 0;  // the namespace; containers on one machine may have their own
};

std::string key_of(int64_t rank) { return fmt::format("alive/{}", rank); }

uint64_t process_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

// True if the process that wrote `beat` has ended, as far as this one can see. A dead process that still
// waits for its parent counts too.
bool process_has_ended(const Beat& beat) {
  if (beat.process == 0 || beat.processes == 0 || beat.processes != process_namespace()) return false;
  std::ifstream file(fmt::format("/proc/{}/stat", beat.process));
  std::string text;
  if (!std::getline(file, text)) return access("/proc/self/stat", R_OK) == 0;
  const size_t name_end = text.rfind(')');  // of the program's name, which may itself hold anything
  return name_end + 2 < text.size() && (text[name_end + 2] == 'Z' || text[name_end + 2] == 'X');
}

// Returns "; rank 2 failed: why; rank 3 failed: why", or "" for no texts.
std::string listed(const std::vector<std::string>& texts) {
  return texts.empty() ? "" : "; " + some_of(texts, "; ");
}

}  // namespace

std::string failure_key_of(int64_t rank) { return fmt::format("failed/{}", rank); }

// What a waiting rank has seen of the ranks that it watches: rank 0 watches all others, the others watch rank
// 0.
struct Heartbeat::Watch {
  explicit Watch(const Ranks& ranks)
      : first(ranks.rank == 0 ? 1 : 0),
        end(ranks.rank == 0 ? ranks.world_size : 1),
        beats(static_cast<size_t>(end)),
        changed(static_cast<size_t>(end), Clock::now()) {}
  int64_t first, end;
  std::vector<int64_t> beats;
  std::vector<Clock::time_point> changed;
  Clock::time_point last_look = Clock::now();
};

// Shared with the threads that talk to the board. A thread that gets no answer outlives the heartbeat.
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
  Beat read(int64_t rank);  // REQUIRES: board_mutex is held
  std::string reported_failures(int64_t first, int64_t end);
  std::string describe_missing(int64_t number);
  std::string look(Watch& watch, Silence silence);
  bool is_neighbour(int64_t rank) const;  // started by the same launcher, on this machine
};

void Heartbeat::Shared::beat() try {
  std::unique_lock lock(mutex);
  for (Beat mine; !stopping; changed.wait_for(lock, interval, [this] { return stopping; })) {
    ++mine.beats;
    mine.collectives = collectives;
    mine.process = getpid();
    mine.processes = process_namespace();
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

Beat Heartbeat::Shared::read(int64_t rank) {
  Beat beat;
  const auto bytes = board->find(key_of(rank));
  if (bytes && bytes->size() == sizeof(Beat)) std::memcpy(&beat, bytes->data(), sizeof(Beat));
  return beat;
}

std::vector<Beat> Heartbeat::Shared::read_all() {
  std::vector<Beat> all;
  const std::lock_guard lock(board_mutex);
  for (int64_t rank = 0; rank < ranks.world_size; ++rank) all.push_back(read(rank));
  return all;
}

// Returns what ranks [first, end) report about their own failures. Ranks that only miss others report
// nothing.
std::string Heartbeat::Shared::reported_failures(int64_t first, int64_t end) {
  std::vector<std::string> failures;
  const std::lock_guard lock(board_mutex);
  for (int64_t rank = first; rank < end; ++rank) {
    if (rank == ranks.rank) continue;
    if (const auto why = board->find(failure_key_of(rank)))
      failures.push_back(fmt::format("rank {} failed: {}", rank, printable(*why)));
  }
  return listed(failures);
}

bool Heartbeat::Shared::is_neighbour(int64_t rank) const {
  const int64_t first = ranks.rank - ranks.local_rank;
  return rank >= first && rank < first + ranks.local_world_size;
}

// Returns who is gone: among the ranks that this one watches, or according to rank 0.
std::string Heartbeat::Shared::look(Watch& watch, Silence silence) {
  const std::string failures = reported_failures(watch.first, watch.end);
  std::vector<std::string> silent;
  const std::lock_guard lock(board_mutex);
  if (const auto told = board->find(kGoneKey)) return printable(*told);
  // A long gap means that this rank was stopped, and perhaps the others too, which then had no time to beat.
  const Clock::time_point now = Clock::now();
  if (now - std::exchange(watch.last_look, now) >= (kSilence - 1) * interval)
    std::ranges::fill(watch.changed, now);
  for (int64_t rank = watch.first; rank < watch.end; ++rank) {
    const auto r = static_cast<size_t>(rank);
    const Beat beat = read(rank);
    const int64_t before = std::exchange(watch.beats[r], beat.beats);
    if (watch.beats[r] != before) watch.changed[r] = now;
    const auto silent_for = now - watch.changed[r];
    const bool is_gone =
        (silence == Silence::kMeansGone && silent_for > kSilence * interval) ||
        (is_neighbour(rank) ? process_has_ended(beat) : silent_for > kSilenceElsewhere * interval);
    if (is_gone) silent.push_back(fmt::format("rank {} no longer answers", rank));
  }
  std::string gone = failures + listed(silent);
  if (!gone.empty() && ranks.rank == 0) board->set(kGoneKey, gone);
  return gone;
}

std::string Heartbeat::Shared::describe_missing(int64_t number) {
  if (std::string failures = reported_failures(0, ranks.world_size); !failures.empty()) return failures;
  const std::vector<Beat> before = read_all();
  std::vector<Beat> after;
  const auto answers = [&](size_t rank) { return after[rank].beats != before[rank].beats; };
  for (int look = 0; look < kLook; ++look) {
    std::this_thread::sleep_for(interval);
    after = read_all();
    size_t there = 0;
    for (size_t r = 0; r < after.size(); ++r)
      there += static_cast<int64_t>(r) == ranks.rank || (answers(r) && after[r].collectives >= number);
    if (there == after.size()) break;
  }
  std::vector<std::string> missing;
  for (size_t r = 0; r < after.size(); ++r) {
    if (static_cast<int64_t>(r) == ranks.rank) continue;
    if (!answers(r))
      missing.push_back(fmt::format("rank {} no longer answers", r));
    else if (after[r].collectives < number)
      missing.push_back(fmt::format("rank {} has not come so far", r));
  }
  return listed(missing);
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

// Asks the board a question of a few calls in a thread of its own.
std::future<std::string> Heartbeat::start(std::function<std::string(Shared&)> question) const {
  std::packaged_task<std::string()> task(
      [shared = shared_, question = std::move(question)] { return question(*shared); });
  std::future<std::string> answer = task.get_future();
  std::thread(std::move(task)).detach();
  return answer;
}

// Waits for the answer and returns it. Returns "" if done() is true first, and what is missing if the board
// is gone or does not answer in time.
std::string Heartbeat::answer_of(std::future<std::string> answer, const std::function<bool()>& done) const {
  const Clock::time_point deadline = Clock::now() + (kLook + kPatience) * shared_->interval;
  try {
    while (Clock::now() < deadline) {
      if (answer.wait_for(kPause) == std::future_status::ready) return answer.get();
      if (done()) return "";
    }
  } catch (const std::exception&) {
  }
  return fmt::format("; {} no longer answers, with the rendezvous at {}:{}",
                     ranks().launcher_hosts ? "the launcher" : "rank 0", ranks().master_addr,
                     ranks().master_port);
}

void Heartbeat::report_failure(const std::string& why) {
  const auto report = [why](Shared& shared) {
    const std::lock_guard lock(shared.board_mutex);
    shared.board->set(failure_key_of(shared.ranks.rank), why);
    return std::string();
  };
  answer_of(start(report), [] { return false; });
}

std::string Heartbeat::describe_missing(int64_t number) {
  const auto look_once = [&] {
    return answer_of(start([number](Shared& shared) { return shared.describe_missing(number); }),
                     [] { return false; });
  };
  // Where a cut link is whole again, the beats of a rank that has ended may still come in.
  const std::string missing = look_once();
  return missing.empty() ? look_once() : missing;
}

std::optional<std::string> Heartbeat::wait_until(const std::function<bool()>& done,
                                                 std::chrono::milliseconds timeout, Silence silence) {
  const auto watch = std::make_shared<Watch>(ranks());
  const Clock::time_point deadline = Clock::now() + timeout;
  while (Clock::now() < deadline) {
    const Clock::time_point next_look =
        std::min<Clock::time_point>(Clock::now() + shared_->interval, deadline);
    for (; !done(); std::this_thread::sleep_for(kPause))
      if (Clock::now() >= next_look) break;
    if (done()) return std::nullopt;
    const std::string gone =
        answer_of(start([=](Shared& shared) { return shared.look(*watch, silence); }), done);
    if (!gone.empty() && !done()) return gone;
  }
  const std::string missing = describe_missing(shared_->collectives);
  return done() ? std::nullopt : std::optional(missing);
}

}  // namespace kiln
