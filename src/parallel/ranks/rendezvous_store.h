// The meeting point as a rank uses it: c10d's store. For parallel/ only.
#pragma once
#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "parallel/ranks/heartbeat.h"
#include "parallel/ranks/ranks.h"

namespace kiln {

// Opens the store. Throws when the host of the rendezvous does not answer in time.
c10::intrusive_ptr<c10d::Store> open_store(const Ranks& ranks, std::chrono::milliseconds timeout);

// Waits for every rank to come. Throws Error naming those that do not, or that have another secret; the
// connections among ranks, which follow, would wait silently. The rank that hosts the rendezvous is the last
// to give up, so that the others can still ask.
void meet(c10d::Store& store, const Ranks& ranks, std::chrono::milliseconds patience);

// Returns the board for notices, over a connection of its own, signed with the secret of the ranks.
std::shared_ptr<NoticeBoard> notice_board(c10d::Store& store, const Ranks& ranks);

}  // namespace kiln
