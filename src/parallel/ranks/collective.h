// Collectives under way in a group of ranks, and their observers.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace kiln {

struct CollectiveWork;

// A collective under way. Call wait() before its tensors are read, changed or dropped. The destructor waits
// too.
class Collective {
 public:
  Collective();  // nothing to wait for
  ~Collective();
  Collective(Collective&&) noexcept;
  Collective& operator=(Collective&&) noexcept;

  // Blocks the host (Gloo) or the current stream (NCCL) until it is done. Throws Error naming this rank, the
  // operation, what it was about, the time it took and, if that can be found out, the ranks that did not take
  // part. The group is unusable afterwards.
  void wait();
  bool under_way() const { return work_ != nullptr; }

 private:
  friend class ProcessGroup;
  explicit Collective(std::unique_ptr<CollectiveWork> work);
  std::unique_ptr<CollectiveWork> work_;
};

// Is told when a collective on tensors begins and when it is waited for, also in a dry run.
class CollectiveObserver {
 public:
  enum class Operation { kAllReduce, kReduceScatter, kAllGather };
  struct Start {
    int64_t number = 0;
    Operation operation{};
    int64_t bytes = 0;  // of the whole tensor
    int64_t num_ranks = 1;
    bool on_one_machine = true;  // true of all the ranks
    std::string what{};          // "the gradients of blocks.3"
  };
  virtual ~CollectiveObserver() = default;
  virtual void started(const Start& start) = 0;
  virtual void waited(int64_t number) = 0;  // the wait begins
};

// Elements that this rank has given to collectives so far. A ring all-reduce moves each about twice, a
// reduce-scatter or all-gather once.
struct CommunicationVolume {
  int64_t all_reduced = 0, reduce_scattered = 0, all_gathered = 0;

  int64_t moved() const { return 2 * all_reduced + reduce_scattered + all_gathered; }
};

}  // namespace kiln
