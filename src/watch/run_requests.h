// What is asked of a run while it trains: files in RUN/requests, so that a page and a shell can ask alike
// (`touch RUN/requests/stop`). Their content does not matter. Torch-free.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

enum class RunRequest { kStop, kCheckpoint, kSample };
// The names of the files, in the order of RunRequest.
inline constexpr std::array<const char*, 3> kRunRequests = {"stop", "checkpoint", "sample"};
constexpr int64_t bit_of(RunRequest request) { return int64_t{1} << static_cast<int>(request); }

// The side that trains. Nothing in the folder ends training: what is no request costs one warning.
class RunRequests {
 public:
  // Makes the folder. `forgets`: removes what was asked of an earlier process. Nothing is asked of a run
  // whose `run` is "".
  RunRequests(const std::string& run, bool forgets);

  // Returns the bits of the requests that are new since the last call. Looks at most five times a second.
  int64_t take_new();
  // Removes the file of a request that take_new() has returned, which says that it was served.
  void served(RunRequest request);
  // Removes all requests.
  void forget();

 private:
  void warn_once(const std::string& text);
  void look_for_strange_names();

  std::string folder_;
  int64_t taken_ = 0;  // bits of requests that were returned and still stand there
  bool has_warned_ = false;
  std::chrono::steady_clock::time_point looks_at_{};
};

// The side that asks.

// Makes the file of a request. Throws Error: no such request, or it cannot be written.
void ask_run(const std::string& run, const std::string& request);
// Returns the requests that were not served yet.
std::vector<std::string> waiting_requests(const std::string& run);

}  // namespace kiln
