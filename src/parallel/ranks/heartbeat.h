// Every rank shows once a second that it is alive, so that a collective that fails can name who is missing.
// Torch-free: sanitizers run it.
#pragma once
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "core/error.h"
#include "parallel/ranks/notice_board.h"
#include "parallel/ranks/ranks.h"

namespace kiln {

// Thrown when a collective fails because other ranks are missing.
class MissingRanks : public Error {
 public:
  using Error::Error;
};

// Returns the key under which a rank reports its failure.
std::string failure_key_of(int64_t rank);

// How a rank without a beat for a while counts for those that wait for it.
enum class Silence {
  kMeansGone,    // it is stopped, dead or cut off: nothing else ends the wait
  kIsWaitedFor,  // it may come back, unless its process has ended (on this machine), or after half a minute
                 // (elsewhere)
};

// A thread writes this rank's beats, collectives begun and process to the board. A process that is stopped,
// dead or cut off no longer does so; one that is only late still does.
class Heartbeat {
 public:
  Heartbeat(std::shared_ptr<NoticeBoard> board, const Ranks& ranks,
            std::chrono::milliseconds interval = std::chrono::seconds(1));
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;

  const Ranks& ranks() const;
  int64_t next_collective();  // counts a collective and returns its number, from 1 on
  // Tells the other ranks why this one is about to leave them.
  void report_failure(const std::string& why);
  // Returns "; rank 2 no longer answers; rank 3 has not come so far" for ranks that keep collective `number`
  // waiting, "; rank 2 failed: ..." for one that reported it, and "" if every rank is alive and has begun it.
  // Takes three intervals, two if nobody is missing, a few more if the rendezvous is cut off.
  std::string describe_missing(int64_t number);
  // Waits until done() is true and returns nothing, or until ranks are gone and returns who they are or what
  // they reported. That takes some eight intervals if all others wait too. Ranks that are only late are
  // waited for until the timeout. Then it returns what describe_missing() says about the last collective that
  // was begun here.
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
