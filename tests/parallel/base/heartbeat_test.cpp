// The heartbeats of several ranks on a board in memory; runs under sanitizers, too.
#include "parallel/ranks/heartbeat.h"

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace kiln {
namespace {

using std::chrono::milliseconds;

// Long against what a loaded machine needs to wake a thread.
constexpr milliseconds kInterval(300);
constexpr std::chrono::hours kForever(1);

class MemoryBoard : public NoticeBoard {
 public:
  void set(const std::string& key, const std::string& value) override {
    enter();
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::string> find(const std::string& key) override {
    enter();
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  // From here on calls throw, or block until released.
  void disappear() { change(/*gone=*/true, /*cut_off=*/false); }
  void cut_off() { change(/*gone=*/false, /*cut_off=*/true); }
  void release() { change(/*gone=*/true, /*cut_off=*/false); }

 private:
  void change(bool gone, bool cut_off) {
    const std::lock_guard lock(mutex_);
    is_gone_ = gone;
    is_cut_off_ = cut_off;
    changed_.notify_all();
  }
  void enter() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !is_cut_off_; });
    if (is_gone_) throw std::runtime_error("connection reset by peer");
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  bool is_gone_ = false, is_cut_off_ = false;
};

Ranks rank_of(int64_t rank, int64_t world_size) {
  Ranks ranks;
  ranks.rank = rank;
  ranks.world_size = world_size;
  return ranks;
}

TEST(Heartbeat, NamesWhoIsLateAndWhoIsGone) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat asking(board, rank_of(0, 5), kInterval), there(board, rank_of(1, 5), kInterval),
      late(board, rank_of(2, 5), kInterval);
  auto dead = std::make_unique<Heartbeat>(board, rank_of(3, 5), kInterval);  // rank 4 never came
  dead->next_collective();
  dead.reset();
  EXPECT_EQ(asking.next_collective(), 1);
  EXPECT_EQ(there.next_collective(), 1);
  EXPECT_EQ(asking.describe_missing(1),
            "; rank 2 has not come so far; rank 3 no longer answers; rank 4 no longer answers");
}

// What a GPU is to finish, which hangs when a rank is gone. Rank 0 finds out and tells the others.
TEST(Heartbeat, EndsAWaitForRanksThatAreGone) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat first(board, rank_of(0, 3), kInterval), other(board, rank_of(1, 3), kInterval);
  std::make_unique<Heartbeat>(board, rank_of(2, 3), kInterval).reset();
  const auto begin = std::chrono::steady_clock::now();
  std::string told;
  std::thread waiting([&] { told = other.wait_until([] { return false; }, kForever).value(); });
  EXPECT_EQ(first.wait_until([] { return false; }, kForever), "; rank 2 no longer answers");
  EXPECT_GT(std::chrono::steady_clock::now() - begin, 5 * kInterval);
  waiting.join();
  EXPECT_EQ(told, "; rank 2 no longer answers");
  EXPECT_EQ(first.wait_until([] { return true; }, kForever), std::nullopt);
}

TEST(Heartbeat, EndsAWaitForRankZero) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat other(board, rank_of(1, 2), kInterval);
  EXPECT_EQ(other.wait_until([] { return false; }, kForever), "; rank 0 no longer answers");
}

// Number of a process that is dead; its parent has not asked after it.
int64_t ended_process() {
  std::string name = "true";
  char* const arguments[] = {name.data(), nullptr};
  pid_t process = 0;
  EXPECT_EQ(posix_spawnp(&process, "true", nullptr, nullptr, arguments, environ), 0);
  siginfo_t told;
  EXPECT_EQ(waitid(P_PID, static_cast<id_t>(process), &told, WEXITED | WNOWAIT), 0);
  return process;
}

// Gloo may wait for ever for a rank that died; for one that is stopped it does so rightly.
TEST(Heartbeat, EndsAWaitForAProcessThatHasEnded) {
  const auto board = std::make_shared<MemoryBoard>();
  Ranks ranks = rank_of(0, 2);
  ranks.local_world_size = 2;
  Heartbeat first(board, ranks, kInterval);
  ranks.rank = ranks.local_rank = 1;
  auto other = std::make_unique<Heartbeat>(board, ranks, kInterval);
  while (!board->find("alive/1")) std::this_thread::sleep_for(milliseconds(1));
  other.reset();
  const auto end = std::chrono::steady_clock::now() + 9 * kInterval;
  const auto over = [&] { return std::chrono::steady_clock::now() >= end; };
  EXPECT_EQ(first.wait_until(over, kForever, Silence::kIsWaitedFor), std::nullopt) << "it may be stopped";

  std::string beat = board->find("alive/1").value();
  const int64_t mine = getpid(), dead = ended_process();
  const size_t at = beat.find(std::string(reinterpret_cast<const char*>(&mine), sizeof mine));
  ASSERT_NE(at, std::string::npos);
  beat.replace(at, sizeof dead, reinterpret_cast<const char*>(&dead), sizeof dead);
  board->set("alive/1", beat);
  for (const bool is_reaped : {false, true}) {
    if (is_reaped) waitpid(static_cast<pid_t>(dead), nullptr, 0);
    EXPECT_EQ(first.wait_until([] { return false; }, kForever, Silence::kIsWaitedFor),
              "; rank 1 no longer answers");
  }
}

// Nothing tells a machine that is cut off from one that is stopped, but the former's ranks do not come back.
TEST(Heartbeat, EndsAWaitForAnotherMachine) {
  const auto board = std::make_shared<MemoryBoard>();
  constexpr milliseconds kShort(50);
  Heartbeat first(board, rank_of(0, 2), kShort);
  std::make_unique<Heartbeat>(board, rank_of(1, 2), kShort).reset();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(first.wait_until([] { return false; }, kForever, Silence::kIsWaitedFor),
            "; rank 1 no longer answers");
  EXPECT_GT(std::chrono::steady_clock::now() - begin, 30 * kShort);
}

TEST(Heartbeat, WaitsForRanksThatAreLate) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat waiting(board, rank_of(0, 2), kInterval), late(board, rank_of(1, 2), kInterval);
  waiting.next_collective();
  const auto end = std::chrono::steady_clock::now() + 9 * kInterval;
  EXPECT_EQ(waiting.wait_until([&] { return std::chrono::steady_clock::now() >= end; }, kForever),
            std::nullopt);
  EXPECT_LT(std::chrono::steady_clock::now() - end, 3 * kInterval) << "a look does not hold it up";
}

// A process that lives and does not come to what the others wait for, within the timeout.
TEST(Heartbeat, NamesRanksThatAreLateAfterTheTimeout) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat waiting(board, rank_of(0, 3), kInterval), there(board, rank_of(1, 3), kInterval),
      late(board, rank_of(2, 3), kInterval);
  for (Heartbeat* heartbeat : {&waiting, &there}) heartbeat->next_collective();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(waiting.wait_until([] { return false; }, 2 * kInterval), "; rank 2 has not come so far");
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 2 * kInterval);
  late.next_collective();
  EXPECT_EQ(waiting.wait_until([] { return false; }, kInterval), "");  // nobody is to blame
}

TEST(Heartbeat, IsSilentWhenEveryRankHasCome) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat first(board, rank_of(0, 2), kInterval), second(board, rank_of(1, 2), kInterval);
  for (Heartbeat* heartbeat : {&first, &second}) heartbeat->next_collective();
  EXPECT_EQ(first.describe_missing(1), "");
}

// As when a link that was cut is whole again and carries what the rank had sent before it ended.
TEST(Heartbeat, ABeatThatComesLateIsNoSignOfLife) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat first(board, rank_of(0, 2), kInterval);
  auto second = std::make_unique<Heartbeat>(board, rank_of(1, 2), kInterval);
  for (Heartbeat* heartbeat : {&first, second.get()}) heartbeat->next_collective();
  std::this_thread::sleep_for(2 * kInterval);
  second.reset();
  std::string beat = board->find("alive/1").value();
  beat[0] = static_cast<char>(beat[0] + 1);  // the number of beats
  std::thread network([&] {
    std::this_thread::sleep_for(kInterval);
    board->set("alive/1", beat);
  });
  EXPECT_EQ(first.describe_missing(1), "; rank 1 no longer answers");
  network.join();
}

TEST(Heartbeat, PassesOnWhyARankFailed) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat first(board, rank_of(0, 3), kInterval);
  {
    Heartbeat second(board, rank_of(1, 3), kInterval);
    second.report_failure("the disk is full");
  }
  EXPECT_EQ(first.describe_missing(1), "; rank 1 failed: the disk is full");
}

constexpr const char* kSecret = "a secret of the job";

// Whoever reaches the rendezvous can write to it and read it.
TEST(NoticeBoard, Finding3OnlyANoticeWithTheSecretCounts) {
  const auto board = std::make_shared<MemoryBoard>();
  const auto ours = signed_board(board, kSecret, "0");
  ours->set("failed/1", "the disk is full");
  EXPECT_EQ(ours->find("failed/1"), "the disk is full");
  const std::string genuine = board->find("failed/1").value();
  const std::vector<std::pair<std::string, std::string>> forgeries = {
      {"gone", "; ended by a stranger"},
      {"gone", std::string(64, '0') + "; ended by a stranger"},
      {"failed/2", genuine},  // of another rank
      {"failed/1", genuine + "!"},
      {"failed/1", ""},
  };
  for (const auto& [key, value] : forgeries) {
    board->set(key, value);
    EXPECT_EQ(ours->find(key), std::nullopt) << key << " " << value;
  }
  board->set("failed/1", genuine);
  EXPECT_EQ(signed_board(board, kSecret, "1")->find("failed/1"), std::nullopt) << "of another attempt";
  EXPECT_EQ(signed_board(board, "another secret", "0")->find("failed/1"), std::nullopt);
  EXPECT_EQ(signed_board(board, "", "0"), board);
  EXPECT_NE(random_secret(), random_secret());
}

TEST(Heartbeat, Finding3AStrangerEndsNoWait) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat first(signed_board(board, kSecret, "0"), rank_of(0, 2), kInterval),
      other(signed_board(board, kSecret, "0"), rank_of(1, 2), kInterval);
  board->set("gone", "; \x1b[2Jended by a stranger");
  board->set("failed/1", "\x1b]52;c;aGk=\x07");
  const auto end = std::chrono::steady_clock::now() + 3 * kInterval;
  EXPECT_EQ(first.wait_until([&] { return std::chrono::steady_clock::now() >= end; }, kForever),
            std::nullopt);
  first.next_collective();
  other.next_collective();
  EXPECT_EQ(first.describe_missing(1), "");
}

// Between machines, without a secret.
TEST(Heartbeat, Finding3NoticesAreHarmlessToATerminal) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat first(board, rank_of(0, 2), kInterval), other(board, rank_of(1, 2), kInterval);
  board->set("failed/1", "\x1b]52;c;aGk=\x07\nkiln: all is well");
  EXPECT_EQ(first.describe_missing(0), "; rank 1 failed: \\x1b]52;c;aGk=\\x07\\x0akiln: all is well");
  board->set("gone", "\x1b[2J");
  EXPECT_EQ(other.wait_until([] { return false; }, kForever), "\\x1b[2J");
}

TEST(Heartbeat, CountsCollectivesOfSeveralThreads) {
  const auto board = std::make_shared<MemoryBoard>();
  constexpr int kThreads = 4, kEach = 200;
  Heartbeat heartbeat(board, rank_of(0, 1), kInterval);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      for (int n = 0; n < kEach; ++n) heartbeat.next_collective();
    });
  EXPECT_EQ(heartbeat.describe_missing(1), "");
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(heartbeat.next_collective(), kThreads * kEach + 1);
}

TEST(Heartbeat, OutlivesItsBoard) {
  const auto board = std::make_shared<MemoryBoard>();
  Heartbeat heartbeat(board, rank_of(1, 2), milliseconds(5));
  board->disappear();
  EXPECT_EQ(heartbeat.describe_missing(1),
            "; rank 0 no longer answers, with the rendezvous at 127.0.0.1:29500");
  heartbeat.report_failure("nobody hears it");
}

// As behind a link that was cut: neither a question nor the end waits for calls that do not come back.
TEST(Heartbeat, DoesNotWaitForABoardThatIsCutOff) {
  const auto board = std::make_shared<MemoryBoard>();
  {
    Ranks launched = rank_of(0, 2);
    launched.launcher_hosts = true;
    Heartbeat heartbeat(board, launched, milliseconds(20));
    board->cut_off();
    EXPECT_EQ(heartbeat.describe_missing(1),
              "; the launcher no longer answers, with the rendezvous at 127.0.0.1:29500");
  }
  board->release();
  // The threads that were left behind end, and let go of the board.
  for (int i = 0; i < 1000 && board.use_count() > 1; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(board.use_count(), 1);
}

}  // namespace
}  // namespace kiln
