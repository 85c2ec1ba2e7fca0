// The ranks of a run and the few collectives that training needs, on top of c10d (NCCL on GPUs, Gloo on
// CPUs).
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
// blocks.3". Sums have the same bits on every rank. On meta tensors (a dry run) nothing is sent.
class ProcessGroup {
 public:
  // A group of one rank, without network: collectives are copies. With several `ranks` it stands for one of
  // them in a dry run.
  explicit ProcessGroup(const Ranks& ranks = {});
  // Meets the other ranks. Throws Error if they do not come within the timeout.
  static std::shared_ptr<ProcessGroup> connect(const Ranks& ranks, const ProcessGroupOptions& options);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;

  // Makes a group of some of these ranks, in this order and including this one. It must not outlive this
  // group, which counts and observes its collectives. Every rank calls this with the members of its own
  // subgroup. `name`: names this way to group; the first member is added to it.
  std::shared_ptr<ProcessGroup> subgroup(const std::string& name, const std::vector<int64_t>& members);

  int64_t rank() const { return ranks_.rank; }
  int64_t world_size() const { return ranks_.world_size; }
  const Ranks& ranks() const { return ranks_; }
  // False with one rank and in a dry run, where nothing is sent.
  bool sends() const { return world_size() > 1 && connection_ != nullptr; }

  Collective all_reduce(const at::Tensor& tensor, const std::string& what);  // sum, in place
  // Sum. input: (world_size * n), contiguous, overwritten on a CPU; output: (n), which may be this rank's
  // slice of the input.
  Collective reduce_scatter(const at::Tensor& output, const at::Tensor& input, const std::string& what);
  // input: (n), which may be this rank's slice of the output; output: (world_size * n).
  Collective all_gather(const at::Tensor& output, const at::Tensor& input, const std::string& what);

  // Sums small values of the hosts. Blocks, as gather() and barrier() do.
  std::vector<double> sum(std::vector<double> values, const std::string& what);
  // Sums a tensor in place and in the background. It is neither counted nor observed.
  Collective sum_tensor(const at::Tensor& values, const std::string& what);
  // Returns the texts of all ranks, by rank.
  std::vector<std::string> gather(const std::string& text, const std::string& what);
  void barrier(const std::string& what);

  // Waits for work of a device, collectives included; NCCL's hang if a rank is gone. Throws Error naming such
  // ranks within ten seconds, and after the timeout also those that are only late. REQUIRES: several ranks,
  // no dry run.
  void wait_until(const std::function<bool()>& done, const std::string& what);

  // Call it before this rank leaves the others because of an error of its own. Their errors then include it.
  void report_failure(const std::string& why);

  // Returns what this group and its subgroups have sent. Host values are not counted.
  const CommunicationVolume& volume() const { return parent_ ? parent_->volume() : volume_; }
  // Tells `observer` about the collectives on tensors of this group and its subgroups; null ends it.
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
