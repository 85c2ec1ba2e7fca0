// Every rank shows once a second that it lives, so that a collective that fails can name who is missing.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parallel/ranks.h"

namespace kiln {

// A thread writes (beats, collectives begun) of this rank to the rendezvous. A process that is stopped, dead
// or cut off no longer does; one that is only late does.
class Heartbeat {
 public:
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;

  const Ranks& ranks() const { return ranks_; }
  int64_t next_collective() { return ++collectives_; }
  // Tells the other ranks, whom this one is about to leave, why.
  void report_failure(const std::string& why);
  // "; rank 2 no longer answers; rank 3 has not come so far" of ranks that keep collective `number` waiting;
  // "; rank 2 failed: ..." of one that said so; empty when every rank lives and has begun it. Takes up to
  // three seconds.
  std::string describe_missing(int64_t number);

 private:
  struct Beat {
    int64_t beats = 0, collectives = 0;
  };
  void beat();
  std::vector<Beat> read_all();
  std::string reported_failures();

  c10::intrusive_ptr<c10d::Store> store_;
  const Ranks ranks_;
  std::atomic<int64_t> collectives_ = 0;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace kiln
