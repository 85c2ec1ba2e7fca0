// The meeting point of the ranks.
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

}  // namespace kiln
