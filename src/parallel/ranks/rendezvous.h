// The meeting point of the ranks, and how they are started on this machine without another launcher.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace kiln {

// Hosts the rendezvous in this process (a launcher, a test) while it lives. Only this machine reaches it.
class Rendezvous {
 public:
  Rendezvous();  // on a free port
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  int64_t port() const;
  const std::string& secret() const;  // for the ranks: a random one
  // True if this rank has told the others that it fails because of an error of its own
  // (ProcessGroup::report_failure()).
  bool has_reported_failure(int64_t rank) const;

 private:
  struct Server;
  std::unique_ptr<Server> server_;
};

// Runs this program again, with the same arguments, as ranks 0 .. num_ranks - 1; hosts their rendezvous;
// waits for them. SIGINT and SIGTERM are passed on to every rank. When a rank fails, the others get a few
// seconds to end by themselves and are then killed; when this process dies, they get SIGTERM. Throws Error
// naming the first rank that failed, with what it said, or how it ended. What several ranks say of one
// failure is told once, each on a line. REQUIRES: no other threads yet, besides those that block these
// signals.
void launch_ranks(int64_t num_ranks);

}  // namespace kiln
