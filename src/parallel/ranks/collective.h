// Collectives of a group of ranks that are under way, and who hears of them.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace kiln {

struct CollectiveWork;

// A collective under way. wait() before its tensors are read, changed or dropped; destroyed while running, it
// waits.
class Collective {
 public:
  Collective();  // nothing to wait for
  ~Collective();
  Collective(Collective&&) noexcept;
  Collective& operator=(Collective&&) noexcept;

  // Blocks the host (Gloo) or the current stream (NCCL) until it is done. Throws Error naming this rank, the
  // operation, what it was about, the time it took and, where that can be found out, the ranks that did not
  // take part. The group is unusable afterwards.
  void wait();
  bool under_way() const { return work_ != nullptr; }

 private:
  friend class ProcessGroup;
  explicit Collective(std::unique_ptr<CollectiveWork> work);
  std::unique_ptr<CollectiveWork> work_;
};

// Hears of the collectives on tensors, of a dry run too: what begins and when it is waited for.
class CollectiveObserver {
 public:
  enum class Operation { kAllReduce, kReduceScatter, kAllGather };
  struct Start {
    int64_t number = 0;
    Operation operation{};
    int64_t bytes = 0;  // of the whole tensor
    int64_t num_ranks = 1;
    bool on_one_machine = true;  // all of them
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
