// The meeting point of the ranks.
#pragma once
#include <cstdint>
#include <memory>

namespace kiln {

// Hosted by this process for as long as it lives (a launcher, a test).
class Rendezvous {
 public:
  Rendezvous();  // on a free port of this machine
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  int64_t port() const;
  // This rank has told the others that it fails on account of an error of its own
  // (ProcessGroup::report_failure()).
  bool has_reported_failure(int64_t rank) const;

 private:
  struct Server;
  std::unique_ptr<Server> server_;
};

}  // namespace kiln
