// Every rank shows once a second that it lives, so that a collective that fails can name who is missing.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>

#include "parallel/ranks.h"

namespace kiln {

// A thread writes (beats, collectives begun) of this rank to the rendezvous. A process that is stopped, dead
// or cut off no longer does; one that is only late does.
class Heartbeat {
 public:
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;

  const Ranks& ranks() const;
  int64_t next_collective();
  // Tells the other ranks, whom this one is about to leave, why.
  void report_failure(const std::string& why);
  // "; rank 2 no longer answers; rank 3 has not come so far" of ranks that keep collective `number` waiting;
  // "; rank 2 failed: ..." of one that said so; empty when every rank lives and has begun it. Takes three
  // seconds, a few more where the rendezvous is cut off.
  std::string describe_missing(int64_t number);

 private:
  struct Shared;
  std::string ask(std::function<std::string(Shared&)> question);

  std::shared_ptr<Shared> shared_;
};

}  // namespace kiln
