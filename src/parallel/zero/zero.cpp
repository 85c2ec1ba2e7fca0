#include "parallel/zero/zero.h"

#include <algorithm>
#include <array>

#include "core/aten.h"
#include "core/error.h"
#include "core/json.h"
#include "parallel/offload/device_wait.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

namespace {

// Each reduction under way holds whole gradients: two are sent while the next gradients are computed.
constexpr size_t kMostReductions = 2;

// For --shard-within-node: throws Error on every rank unless every machine has the same number of ranks, in
// order. A collective.
void require_even_nodes(ProcessGroup& group) {
  const Ranks& own = group.ranks();
  const std::string mine = nlohmann::json{own.rank, own.local_rank, own.local_world_size}.dump();
  int64_t local_of_all = 0;
  for (const std::string& text : group.gather(mine, "the ranks of each machine")) {
    const auto [rank, local_rank, local] = nlohmann::json::parse(text).get<std::array<int64_t, 3>>();
    if (local_of_all == 0) local_of_all = local;
    if (local == local_of_all && group.world_size() % local == 0 && rank % local == local_rank) continue;
    fail(
        "zero",
        "--shard-within-node expects the same number of ranks on every machine, numbered machine by machine: "
        "the machine of rank 0 has {}, that of rank {} has {}, of which it is number {}",
        local_of_all, rank, local, local_rank);
  }
}

}  // namespace

Zero::Zero(std::shared_ptr<ProcessGroup> group, const ZeroOptions& options)
    : group_(std::move(group)), options_(options), shards_(group_) {
  const Ranks& ranks = group_->ranks();
  const int64_t local = ranks.local_world_size;
  if (!options.shard_within_node || options.stage == 0) return;
  require_even_nodes(*group_);
  if (local == ranks.world_size) return;
  std::vector<int64_t> node, replicas;
  for (int64_t i = 0; i < local; ++i) node.push_back(ranks.rank - ranks.local_rank + i);
  for (int64_t rank = ranks.local_rank; rank < ranks.world_size; rank += local) replicas.push_back(rank);
  shards_ = group_->subgroup("node", node);
  replicas_ = group_->subgroup("replicas", replicas);
}

UnitSharding Zero::sharding_of(int64_t elements) const {
  const bool persists = options_.stage == 3 && elements < options_.persist_threshold;
  return {.zero_stage = elements == 0 ? 0
                        : persists    ? 2
                                      : options_.stage,
          .rank = shards_->rank(),
          .world_size = shards_->world_size()};
}

void Zero::manage(std::vector<FlatUnit*> units, size_t num_apart) {
  num_walked_ = units.size() - num_apart;
  if (!units.empty() && units.front()->placement().has_host)
    copies_.emplace(units.front()->compute_weights.device());
  for (FlatUnit* flat : units) {
    units_.push_back({.flat = flat, .is_whole = flat->sharding().zero_stage < 3});
    publish(units_.size() - 1);
  }
}

bool Zero::counts_shards() const { return !replicas_ || replicas_->rank() == 0; }
bool Zero::idle() const { return group_->world_size() == 1 && options_.stage < 2; }

void Zero::start_gather(size_t s) {
  Unit& unit = units_[s];
  if (unit.is_whole) return;
  wait_for_change(s);
  FlatUnit& flat = *unit.flat;
  flat.take_weights_memory();
  const at::Tensor shard = unit.shard.emplace(flat.lease_weights(Access::kRead)).shard;
  // It has a version counter of its own: what arrives is what autograd saved, not a change of it.
  at::Tensor whole = flat.compute_weights.variable_data();
  const std::string what = "the weights of " + flat.name();
  unit.is_whole = true;
  if (!flat.placement().gathers_from_host()) {
    unit.gathering = shards_->all_gather(whole, shard, what);
    return;
  }
  // NCCL begins when the stream that calls it gets there, so the gather also runs beside the compute.
  const bool is_alone = shards_->world_size() == 1;
  at::Tensor sent = is_alone ? whole : at::empty({shard.numel()}, whole.options());
  unit.sent = copies_->run([&] {
    sent.copy_(shard, /*non_blocking=*/true);
    if (!is_alone) unit.gathering = shards_->all_gather(whole, sent, what);
  });
}

void Zero::finish_gather(size_t s) {
  wait_for_change(s);
  Unit& unit = units_[s];
  unit.gathering.wait();
  if (unit.sent) {
    wait_on_stream(unit.sent);
    if (unit.flat->placement().params == Placement::kNvme)  // other units get its buffer
      wait_for(*unit.sent, *group_, "the weights of " + unit.flat->name());
  }
  unit.sent.reset();
  unit.shard.reset();
}

// If weights are on a disk, the segment after those that are gathered is read meanwhile.
void Zero::gather(size_t s, int direction) {
  start_gather(s);
  for (int64_t ahead = 1; ahead - 1 <= options_.prefetch_segments; ++ahead) {
    const int64_t next = static_cast<int64_t>(s) + direction * ahead;
    if (next < 0 || next >= static_cast<int64_t>(num_walked_)) break;
    if (ahead <= options_.prefetch_segments)
      start_gather(static_cast<size_t>(next));
    else
      units_[static_cast<size_t>(next)].flat->prefetch_weights();
  }
  finish_gather(s);
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
  // With few units, reductions of the previous micro-step may still read the memory that is replaced here.
  const auto is_of_unit = [&](const Reduction& reduction) { return reduction.flat == &flat; };
  while (std::ranges::any_of(reductions_, is_of_unit)) finish_oldest_reduction();
  flat.take_grads_memory();
  return false;
}

void Zero::reduce(size_t s, bool first_micro_step, bool last_micro_step) {
  FlatUnit& flat = *units_[s].flat;
  const int64_t stage = flat.sharding().zero_stage;
  if (flat.size() == 0 || (stage < 2 && !last_micro_step)) return;
  const int64_t num_shards = flat.size() / flat.shard_size();
  const int64_t bucket = options_.reduce_bucket_size > 0
                             ? std::max<int64_t>(1, options_.reduce_bucket_size / num_shards)
                             : flat.shard_size();
  for (int64_t begin = 0; begin < flat.shard_size(); begin += bucket)
    start_reduction(flat, begin, std::min(bucket, flat.shard_size() - begin),
                    {.add = stage >= 2 && !first_micro_step, .is_last = last_micro_step});
}

// Begins to reduce elements [begin, begin + count) of every shard.
void Zero::start_reduction(FlatUnit& flat, int64_t begin, int64_t count, MicroStep micro_step) {
  while (reductions_.size() >= kMostReductions) finish_oldest_reduction();
  const int64_t stage = flat.sharding().zero_stage;
  const at::ScalarType dtype = group_->world_size() > 1
                                   ? options_.reduce_dtype.value_or(flat.grads.scalar_type())
                                   : flat.grads.scalar_type();
  Reduction reduction{
      .flat = &flat, .target = flat.grad_shard.narrow(0, begin, count), .micro_step = micro_step};
  reduction.input = flat.grads.view({-1, flat.shard_size()}).narrow(1, begin, count).to(dtype).reshape({-1});
  const bool ends_unit = begin + count == flat.shard_size(),
             is_copy = !reduction.input.is_alias_of(flat.grads);
  if (stage >= 2 && ends_unit && is_copy) flat.drop_grads_memory();
  reduction.drops_grads = stage >= 2 && ends_unit && !is_copy;
  if (stage == 0)
    reduction.output = reduction.input;
  else if (micro_step.add || dtype != flat.grad_shard.scalar_type())
    reduction.output = at::empty({count}, reduction.input.options());
  else
    reduction.output = reduction.target;
  const std::string what = "the gradients of " + flat.name();
  reduction.collective = stage == 0 ? group_->all_reduce(reduction.input, what)
                                    : shards_->reduce_scatter(reduction.output, reduction.input, what);
  reductions_.push_back(std::move(reduction));
}

void Zero::finish_oldest_reduction() {
  Reduction reduction = std::move(reductions_.front());
  reductions_.pop_front();
  reduction.collective.wait();
  reduction.input.reset();
  if (reduction.micro_step.add) {
    reduction.target.add_(reduction.output);
    reduction.output = reduction.target;
  }
  if (reduction.drops_grads) reduction.flat->drop_grads_memory();
  if (!replicas_ || !reduction.micro_step.is_last || reduction.flat->sharding().zero_stage == 0)
    return finish_exchange(reduction);
  // Machines exchange their sums once a step, in the background: the network between them is slow.
  reduction.collective =
      replicas_->all_reduce(reduction.output, "the gradients of " + reduction.flat->name());
  exchanges_.push_back(std::move(reduction));
}

void Zero::finish_exchange(Reduction& reduction) {
  reduction.collective.wait();
  if (!reduction.output.is_alias_of(reduction.target)) reduction.target.copy_(reduction.output);
}

void Zero::finish_reductions() {
  while (!reductions_.empty()) finish_oldest_reduction();
  for (Reduction& reduction : exchanges_) finish_exchange(reduction);
  exchanges_.clear();
}

void Zero::publish(size_t s) {
  FlatUnit& flat = *units_[s].flat;
  const int64_t stage = flat.sharding().zero_stage;
  if (stage == 0 || stage == 3) return;
  units_[s].gathering =
      shards_->all_gather(flat.compute_weights, flat.weight_shard, "the weights of " + flat.name());
}

void Zero::changes_until(size_t s, std::optional<c10::Event> end) { units_[s].changed = std::move(end); }

void Zero::wait_for_change(size_t s) { wait_on_stream(std::exchange(units_[s].changed, std::nullopt)); }

void Zero::finish_gathers() {
  for (size_t s = 0; s < units_.size(); ++s) {
    if (units_[s].sent) wait_for(*units_[s].sent, *group_, "the weights of " + units_[s].flat->name());
    finish_gather(s);
  }
  // The host reads shards next, so the gathers must be over.
  if (!units_.empty()) wait_for_device(units_.front().flat->compute_weights.device(), *group_, "the weights");
}

void Zero::read_ahead() {
  const size_t count = std::min(num_walked_, static_cast<size_t>(options_.prefetch_segments) + 1);
  for (size_t s = 0; s < count; ++s) units_[s].flat->prefetch_weights();
}

at::Tensor Zero::whole(size_t s, const at::Tensor& buffer) {
  const FlatUnit& flat = *units_[s].flat;
  if (buffer.numel() == flat.size()) return buffer;
  at::Tensor all = at::empty({flat.size()}, buffer.options());
  const std::string what = "the state of " + flat.name();
  shards_->all_gather(all, buffer, what).wait();
  wait_for_device(all.device(), *group_, what);
  return all;
}

void Zero::sum_over_shards(at::Tensor& values, const std::string& what) {
  const at::Device device = units_.front().flat->compute_weights.device();
  at::Tensor there = values.to(device);
  shards_->all_reduce(there, what).wait();
  if (!there.is_same(values)) values.copy_(there);
}

std::shared_ptr<NvmeState> make_nvme_state(const Zero& zero, const std::vector<FlatLayout>& layouts,
                                           const std::vector<FlatUnitOptions>& units,
                                           const BlockStoreOptions& disk) {
  const FlatUnitOptions& first = units.front();
  NvmeUnits state{.dtype = at::kByte};
  NvmeUnits weights{.dtype = first.compute_dtype,
                    // For those that are gathered, and the one that is read meanwhile.
                    .num_buffers = static_cast<size_t>(zero.options().prefetch_segments) + 2};
  for (size_t i = 0; i < units.size(); ++i) {
    const UnitSharding& sharding = units[i].sharding;
    if (first.placement.optimizer == Placement::kNvme)
      state.elements.push_back(state_bytes(layouts[i], units[i]));
    if (first.placement.params == Placement::kNvme)
      weights.elements.push_back(
          sharding.zero_stage == 3 ? shard_elements(layouts[i].size, sharding, layouts[i].alignment) : 0);
  }
  weights.num_buffers = std::min(weights.num_buffers, std::max<size_t>(1, units.size()));
  return std::make_shared<NvmeState>(state, weights, disk, first.device);
}

}  // namespace kiln
