#include "serve/serve.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "core/error.h"
#include "core/stop_signal.h"
#include "serve/http_server.h"

namespace kiln {

void serve(const ServeOptions& options) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kOften = std::chrono::milliseconds(1000), kSoon = std::chrono::milliseconds(50);
  if (options.port < 0 || options.port > 65535)
    fail("serve", "expected --port to be from 0 to 65535, got {}", options.port);
  const StopSignal stop;
  Site site(options);
  Clock::time_point begin = Clock::now();
  bool has_more = site.update();
  const HttpServer server(site, options.port);
  fmt::print("{}\n", server.address());
  std::fflush(stdout);
  while (!stop.requested()) {
    // Reading takes a tenth of a processor at most, once the logs are read up to their ends.
    const auto next =
        has_more ? begin : begin + std::max<Clock::duration>(kOften, 10 * (Clock::now() - begin));
    while (!stop.requested() && Clock::now() < next) std::this_thread::sleep_for(kSoon);
    begin = Clock::now();
    has_more = site.update();
  }
}

}  // namespace kiln
