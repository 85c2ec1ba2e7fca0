// The ranks of a run and what they say to each other: c10d (NCCL on GPUs, Gloo on CPUs) behind the few
// collectives that training needs.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/ranks/collective.h"
#include "parallel/ranks/process_group_options.h"
#include "parallel/ranks/ranks.h"

namespace kiln {

struct GroupConnection;

// Every rank calls the same collectives in the same order. `what` is for messages: "the gradients of
// blocks.3". Sums are the same bits on every rank. On meta tensors (a dry run) nothing is sent.
class ProcessGroup {
 public:
  // One rank, no network: collectives are copies. With several `ranks` it stands for one of them in a dry
  // run.
  explicit ProcessGroup(const Ranks& ranks = {});
  // Meets the other ranks. Throws Error when they do not come within the timeout.
  static std::shared_ptr<ProcessGroup> connect(const Ranks& ranks, const ProcessGroupOptions& options);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;

  // A group of some of these ranks, in this order, this one among them; for the life of this one, which
  // counts and observes for it. Every rank calls it, with the members of its own group. `name`: of this way
  // to group, the first member is added to it.
  std::shared_ptr<ProcessGroup> subgroup(const std::string& name, const std::vector<int64_t>& members);

  int64_t rank() const { return ranks_.rank; }
  int64_t world_size() const { return ranks_.world_size; }
  const Ranks& ranks() const { return ranks_; }

  Collective all_reduce(const at::Tensor& tensor, const std::string& what);  // sum, in place
  // input: (world_size * n), output: (n), which may be this rank's slice of it. Sum.
  Collective reduce_scatter(const at::Tensor& output, const at::Tensor& input, const std::string& what);
  // input: (n), output: (world_size * n), of which it may be this rank's slice.
  Collective all_gather(const at::Tensor& output, const at::Tensor& input, const std::string& what);

  // Small values between hosts; they block.
  std::vector<double> sum(std::vector<double> values, const std::string& what);
  // The same of a tensor, in place and in the background. Nobody counts or observes it.
  Collective sum_tensor(const at::Tensor& values, const std::string& what);
  std::vector<std::string> gather(const std::string& text,
                                  const std::string& what);  // of every rank, by rank
  void barrier(const std::string& what);

  // Waits for what a device is to finish, collectives among it: NCCL's hang where a rank is gone. Throws
  // Error naming such ranks, within ten seconds; after the timeout also those that are only late. REQUIRES:
  // several ranks, no dry run.
  void wait_until(const std::function<bool()>& done, const std::string& what);

  // Before a rank leaves the others on account of an error of its own: their errors then say which.
  void report_failure(const std::string& why);

  // What this group and those made of it have sent. Host values are not counted.
  const CommunicationVolume& volume() const { return parent_ ? parent_->volume() : volume_; }
  // Tells `observer` of the collectives on tensors of this group and those made of it; null ends it.
  // REQUIRES: it outlives them.
  void observe(CollectiveObserver* observer) { observer_ = observer; }

 private:
  ProcessGroup& root() { return parent_ ? parent_->root() : *this; }
  using Operation = CollectiveObserver::Operation;
  Collective begin(Operation operation, const std::string& what, const at::Tensor& whole,
                   std::vector<at::Tensor> tensors);
  Collective start(Operation operation, const std::string& what, std::vector<at::Tensor> tensors,
                   int64_t number, bool is_observed);
  void exchange(Operation operation, const std::string& what, std::vector<at::Tensor> tensors);
  bool is_alone() const { return world_size() == 1 && !connection_; }

  Ranks ranks_;
  ProcessGroup* parent_ = nullptr;  // of a subgroup
  CommunicationVolume volume_;
  CollectiveObserver* observer_ = nullptr;
  int64_t num_pretended_ = 0;
  std::unique_ptr<GroupConnection> connection_;  // null: one rank, or a dry run
};

}  // namespace kiln
