// How NCCL runs collectives, by its own cost model (NVIDIA/nccl, src/graph/tuning.cc) and by what its authors
// and users measured with nccl-tests:
// - A ring passes through all GPUs of a node before it leaves the node, in as many copies as the node has
//   network cards. So the bytes cross each node's boundary once, over all its cards together, and the bus
//   bandwidth is that of the node's whole network, up to that of the links inside: 24 GB/s with one card of
//   200 Gbit/s for 8 GPUs (nccl issue 412), 86 with four (nccl-tests 175), 192 with eight (nccl 1576).
// - A GPU reaches the network through its own PCIe lanes: one GPU on each of several nodes fills one card
//   (nccl-tests 232).
// - Where switches sum (NVLink SHARP: Hopper and Blackwell with NVSwitch), an all-reduce sends each byte to
//   them once and takes the sum back: a bus bandwidth of 480 GB/s on 8 H100 where rings reach 370 (nccl-tests
//   212). Between nodes that takes part in a tree. Two nodes only swap their sums, so that the network
//   carries half of what a ring sends: 470 GB/s on two nodes (nccl issue 2409), 331 on four (published by
//   Voltage Park).
// - Every hop costs time, between nodes more than inside. A ring's hops grow with the number of GPUs, a
//   tree's with its logarithm, but NCCL has trees for all-reduce alone. The protocol LL128 has short hops for
//   8 % of the bandwidth. NCCL takes what it expects to be fastest, and so does this.
// Not in here: trees of two nodes without such switches, which can beat the ring where cards are few
// (nccl-tests 196), sums in the network's switches, and what other jobs send.
#include "plan/ranks/step_time.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kiln {

namespace {

using Operation = CollectiveObserver::Operation;

// Seconds before the first byte and per hop, and the share of the bandwidth.
struct Protocol {
  double begin_s, nvlink_s, pcie_s, network_s, share;
  bool needs_nvlink;
};
constexpr Protocol kProtocols[] = {{8.4e-6, 3.4e-6, 5.7e-6, 14e-6, 1, false},   // Simple
                                   {14e-6, 1.9e-6, 2.5e-6, 4e-6, 0.92, true}};  // LL128
constexpr double kTreeShare = 0.92;                                             // of a ring's bandwidth
constexpr double kSwitchHop = 25e-6;  // to the switches that sum, and back

// The ranks of a collective.
struct Group {
  double ranks, nodes;
  bool reduces_all;       // else a reduce-scatter or an all-gather, half of an all-reduce
  double bytes;           // of the whole tensor
  double inside, across;  // bytes per second of a ring inside a node, and from node to node
};

double hop_inside(const Protocol& protocol, bool has_nvlink) {
  return has_nvlink ? protocol.nvlink_s : protocol.pcie_s;
}

double ring(const Group& group, const Protocol& protocol, bool has_nvlink) {
  const double slowest = group.nodes > 1 ? std::min(group.inside, group.across) : group.inside;
  const double half = (group.ranks - group.nodes) * hop_inside(protocol, has_nvlink) +
                      (group.nodes - 1) * protocol.network_s +
                      (group.ranks - 1) / group.ranks * group.bytes / (slowest * protocol.share);
  return protocol.begin_s + (group.reduces_all ? 2 : 1) * half;
}

// Chains inside the nodes, a binary tree of nodes. REQUIRES: an all-reduce.
double tree(const Group& group, const Protocol& protocol, bool has_nvlink) {
  const double hops = (group.ranks / group.nodes - 1) * hop_inside(protocol, has_nvlink) +
                      std::ceil(std::log2(group.nodes)) * protocol.network_s;
  const double slowest = std::min(group.inside, group.across) * kTreeShare * protocol.share;
  return protocol.begin_s + 2 * (hops + group.bytes / slowest);
}

// Sums in the switches of each node, and a tree of nodes. REQUIRES: an all-reduce.
double switches(const Group& group, double sum_bytes_per_s) {
  const Protocol& simple = kProtocols[0];
  if (group.nodes == 1) return simple.begin_s + kSwitchHop + group.bytes / sum_bytes_per_s;
  const double crossings = group.nodes == 2 ? 1 : 2;
  const double slowest = std::min(sum_bytes_per_s * kTreeShare, group.across / crossings);
  return simple.begin_s + kSwitchHop + 2 * std::ceil(std::log2(group.nodes)) * simple.network_s +
         group.bytes / slowest;
}

double over_nccl(const Group& group, const MachineProfile& machine) {
  const bool has_nvlink = machine.peer_bytes_per_s > machine.host_link_bytes_per_s;
  double best = std::numeric_limits<double>::infinity();
  for (const Protocol& protocol : kProtocols) {
    if (protocol.needs_nvlink && !has_nvlink) continue;
    best = std::min(best, ring(group, protocol, has_nvlink));
    if (group.reduces_all && group.nodes > 1) best = std::min(best, tree(group, protocol, has_nvlink));
  }
  if (group.reduces_all && machine.switch_sum_bytes_per_s > 0 && group.ranks > group.nodes)
    best = std::min(best, switches(group, machine.switch_sum_bytes_per_s));
  return best;
}

// Gloo's rings over sockets of the machine itself. Kiln reduces and scatters by reducing for all ranks, since
// Gloo knows nothing else.
double over_gloo(const Group& group, bool gathers, const MachineProfile& machine) {
  const double half = (group.ranks - 1) * machine.rank_hop_s +
                      (group.ranks - 1) / group.ranks * group.bytes / machine.peer_bytes_per_s;
  return (gathers ? 1 : 2) * half * machine.speed.copy;
}

}  // namespace

double Links::seconds(const CollectiveObserver::Start& collective) const {
  if (collective.num_ranks <= 1 || collective.bytes <= 0) return 0;
  // The ranks with the same place on their nodes, or all ranks of a node, or of all nodes.
  const bool is_of_one_place = !collective.on_one_machine && collective.num_ranks < ranks_;
  const int64_t per_node = is_of_one_place ? 1 : ranks_on_node(*machine_, collective.num_ranks);
  const int64_t nodes = (collective.num_ranks + per_node - 1) / per_node;
  Group group{.ranks = static_cast<double>(collective.num_ranks),
              .nodes = static_cast<double>(nodes),
              .reduces_all = collective.operation == Operation::kAllReduce,
              .bytes = static_cast<double>(collective.bytes),
              .inside = machine_->peer_bytes_per_s,
              .across = machine_->network_bytes_per_s};
  if (machine_->device == DryRunDevice::kCpu)
    return over_gloo(group, collective.operation == Operation::kAllGather, *machine_);
  const int64_t sharing = ranks_ / collective.num_ranks;  // groups on one network link
  if (is_of_one_place) group.across /= static_cast<double>(sharing);
  if (machine_->host_link_bytes_per_s > 0)
    group.across = std::min(group.across, group.ranks / group.nodes * machine_->host_link_bytes_per_s);
  return over_nccl(group, *machine_);
}

}  // namespace kiln
