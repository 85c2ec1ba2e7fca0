// The meeting point of the ranks.
#pragma once
#include <cstdint>
#include <memory>

namespace kiln {

// Hosts the rendezvous in this process (a launcher, a test) while it lives.
class Rendezvous {
 public:
  Rendezvous();  // on a free port of this machine
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  int64_t port() const;
  // True if this rank has told the others that it fails because of an error of its own
  // (ProcessGroup::report_failure()).
  bool has_reported_failure(int64_t rank) const;

 private:
  struct Server;
  std::unique_ptr<Server> server_;
};

}  // namespace kiln
