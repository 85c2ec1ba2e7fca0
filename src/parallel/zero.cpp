#include "parallel/zero.h"

#include <ATen/ATen.h>

#include "core/error.h"

namespace kiln {

namespace {

// Reductions under way hold whole gradients: one is sent while the next one is made.
constexpr size_t kMostReductions = 2;

}  // namespace

Zero::Zero(std::shared_ptr<ProcessGroup> group, const ZeroOptions& options)
    : group_(std::move(group)), options_(options) {}

UnitSharding Zero::sharding_of(int64_t elements) const {
  const bool persists = options_.stage == 3 && elements < options_.persist_threshold;
  return {.zero_stage = elements == 0 ? 0
                        : persists    ? 2
                                      : options_.stage,
          .rank = group_->rank(),
          .world_size = group_->world_size()};
}

void Zero::manage(std::vector<FlatUnit*> units) {
  for (FlatUnit* flat : units) {
    units_.push_back({.flat = flat, .is_whole = flat->sharding().zero_stage < 3, .gathering = {}});
    publish(units_.size() - 1);
  }
}

void Zero::start_gather(size_t s) {
  Unit& unit = units_[s];
  if (unit.is_whole) return;
  unit.flat->take_weights_memory();
  // Under a version counter of its own: what arrives is what autograd saved, not a change of it.
  unit.gathering = group_->all_gather(unit.flat->compute_weights.variable_data(), unit.flat->weight_shard,
                                      "the weights of " + unit.flat->name());
  unit.is_whole = true;
}

void Zero::gather(size_t s, int direction) {
  start_gather(s);
  for (int64_t ahead = 1; ahead <= options_.prefetch_segments; ++ahead) {
    const int64_t next = static_cast<int64_t>(s) + direction * ahead;
    if (next < 0 || next >= static_cast<int64_t>(units_.size())) break;
    start_gather(static_cast<size_t>(next));
  }
  units_[s].gathering.wait();
}

void Zero::release(size_t s) {
  Unit& unit = units_[s];
  if (unit.flat->sharding().zero_stage < 3) return;
  unit.flat->drop_weights_memory();
  unit.is_whole = false;
}

bool Zero::begin_gradients(size_t s, bool first_micro_step) {
  FlatUnit& flat = *units_[s].flat;
  if (flat.sharding().zero_stage < 2) return !first_micro_step;
  flat.take_grads_memory();
  return false;
}

void Zero::reduce(size_t s, bool first_micro_step, bool last_micro_step) {
  FlatUnit& flat = *units_[s].flat;
  const int64_t stage = flat.sharding().zero_stage;
  if (flat.size() == 0 || (stage < 2 && !last_micro_step)) return;
  while (reductions_.size() >= kMostReductions) finish_oldest_reduction();

  Reduction reduction{
      .flat = &flat, .input = flat.grads, .output = flat.grad_shard, .add = false, .collective = {}};
  const std::string what = "the gradients of " + flat.name();
  const at::ScalarType dtype = options_.reduce_dtype.value_or(flat.grads.scalar_type());
  if (dtype != flat.grads.scalar_type() && group_->world_size() > 1) {
    reduction.input = flat.grads.to(dtype);
    reduction.output =
        stage == 0 ? reduction.input : at::empty_like(reduction.input.narrow(0, 0, flat.shard_size()));
    if (stage >= 2) flat.drop_grads_memory();
  }
  if (stage >= 2 && !first_micro_step) {
    reduction.add = true;
    if (reduction.output.is_same(flat.grad_shard)) reduction.output = at::empty_like(flat.grad_shard);
  }
  reduction.collective = stage == 0 ? group_->all_reduce(reduction.input, what)
                                    : group_->reduce_scatter(reduction.output, reduction.input, what);
  reductions_.push_back(std::move(reduction));
}

void Zero::finish_oldest_reduction() {
  Reduction reduction = std::move(reductions_.front());
  reductions_.pop_front();
  reduction.collective.wait();
  FlatUnit& flat = *reduction.flat;
  if (reduction.add)
    flat.grad_shard.add_(reduction.output);
  else if (!reduction.output.is_same(flat.grad_shard))
    flat.grad_shard.copy_(reduction.output);
  if (flat.sharding().zero_stage >= 2 && reduction.input.is_same(flat.grads)) flat.drop_grads_memory();
}

void Zero::finish_reductions() {
  while (!reductions_.empty()) finish_oldest_reduction();
}

void Zero::publish(size_t s) {
  FlatUnit& flat = *units_[s].flat;
  const int64_t stage = flat.sharding().zero_stage;
  if (stage == 0 || stage == 3) return;
  units_[s].gathering =
      group_->all_gather(flat.compute_weights, flat.weight_shard, "the weights of " + flat.name());
}

at::Tensor Zero::whole(size_t s, const at::Tensor& buffer) {
  const FlatUnit& flat = *units_[s].flat;
  if (buffer.numel() == flat.size()) return buffer;
  const at::Tensor all = at::empty({flat.size()}, buffer.options());
  group_->all_gather(all, buffer, "the state of " + flat.name()).wait();
  return all;
}

}  // namespace kiln
