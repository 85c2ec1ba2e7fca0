// The meeting point as a rank uses it: c10d's store. For parallel/ only.
#pragma once
#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "parallel/ranks/heartbeat.h"
#include "parallel/ranks/ranks.h"

namespace kiln {

// True if rank 0 hosts the store and only this machine reaches it.
bool is_on_loopback(const Ranks& ranks);

// Opens the store. Throws when the host of the rendezvous does not answer in time.
c10::intrusive_ptr<c10d::Store> open_store(const Ranks& ranks, std::chrono::milliseconds timeout);

// Waits for every rank to come. Returns their board for notices, over a connection of its own. With a secret
// it is signed with it and a name that rank 0 draws for this job: notices of an earlier one do not count.
// Who comes without the secret is waited for as if nobody had come. Throws Error naming such ranks and those
// that do not come; the connections among ranks, which follow, would wait silently. The rank that hosts the
// rendezvous is the last to give up, so that the others can still ask.
std::shared_ptr<NoticeBoard> meet(c10d::Store& store, const Ranks& ranks, std::chrono::milliseconds patience);

}  // namespace kiln
