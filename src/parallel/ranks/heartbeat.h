// Every rank shows once a second that it lives, so that a collective that fails can name who is missing.
// Torch-free: sanitizers run it.
#pragma once
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "parallel/ranks/ranks.h"

namespace kiln {

// Where the ranks leave word for each other: their rendezvous. A heartbeat makes one call at a time, from
// several threads. Calls may block, and throw when the rendezvous is gone.
class NoticeBoard {
 public:
  virtual ~NoticeBoard() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;  // does not wait for it to be set
};

// The key under which a rank leaves word of its failure.
std::string failure_key_of(int64_t rank);

// What a rank that does not beat for a while is to those that wait for it.
enum class Silence {
  kMeansGone,    // it is stopped, dead or cut off: nothing else ends the wait
  kIsWaitedFor,  // it may come back; one whose process has ended on this machine is gone all the same
};

// A thread writes (beats, collectives begun, its process) of this rank to the board. A process that is
// stopped, dead or cut off no longer does; one that is only late does.
class Heartbeat {
 public:
  Heartbeat(std::shared_ptr<NoticeBoard> board, const Ranks& ranks,
            std::chrono::milliseconds interval = std::chrono::seconds(1));
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;

  const Ranks& ranks() const;
  int64_t next_collective();
  // Tells the other ranks, whom this one is about to leave, why.
  void report_failure(const std::string& why);
  // "; rank 2 no longer answers; rank 3 has not come so far" of ranks that keep collective `number` waiting;
  // "; rank 2 failed: ..." of one that said so; empty when every rank lives and has begun it. Takes three
  // intervals, a few more where the rendezvous is cut off.
  std::string describe_missing(int64_t number);
  // Waits until done() says so, and returns nothing; or until ranks are gone, and returns who or what they
  // said: some eight intervals where all others wait, too. Ranks that are only late are waited for until the
  // timeout: then it returns what describe_missing() says of the last collective that was begun here.
  std::optional<std::string> wait_until(const std::function<bool()>& done, std::chrono::milliseconds timeout,
                                        Silence silence = Silence::kMeansGone);

 private:
  struct Shared;
  struct Watch;
  std::future<std::string> start(std::function<std::string(Shared&)> question) const;
  std::string answer_of(std::future<std::string> answer, const std::function<bool()>& done) const;

  std::shared_ptr<Shared> shared_;
};

}  // namespace kiln
