// Starts the ranks of a run as processes of this machine, without another launcher.
#pragma once
#include <cstdint>

namespace kiln {

// Runs this program again, with the same arguments, as ranks 0 .. num_ranks - 1; hosts their rendezvous;
// waits for them. SIGINT and SIGTERM are passed on to every rank. When a rank fails, the others get a few
// seconds to end by themselves and are then killed; when this process dies, they get SIGTERM. Throws Error
// naming the first rank that failed, with what it said, or how it ended. What several ranks say of one
// failure is told once, each on a line. REQUIRES: no other threads yet, besides those that block these
// signals.
void launch_ranks(int64_t num_ranks);

}  // namespace kiln
