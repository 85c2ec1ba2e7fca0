#include "core/text/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "core/units.h"

namespace kiln {

ProgressLine::ProgressLine(int64_t done, int64_t total, bool is_shown, const char* unit)
    : first_(static_cast<double>(done)),
      total_(total),
      is_shown_(is_shown),
      is_terminal_(::isatty(STDERR_FILENO)),
      unit_(unit),
      start_(Clock::now()),
      last_(start_) {}

void ProgressLine::update(double done, int64_t num_skipped) {
  const double interval_s = is_terminal_ ? 0.5 : 10;
  const auto now = Clock::now();
  if (std::chrono::duration<double>(now - last_).count() < interval_s) return;
  last_ = now;
  print(done, num_skipped);
}

void ProgressLine::print(double done, int64_t num_skipped) {
  if (!is_shown_) return;
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const double rate = seconds > 0 ? (done - first_) / seconds : 0;
  std::string line = fmt::format("{0} / {1} {2}  {3} {2}/s", static_cast<int64_t>(done), total_, unit_,
                                 number_text(rate, 3));
  if (rate > 0) line += fmt::format("  {} left", duration_text((static_cast<double>(total_) - done) / rate));
  if (num_skipped > 0) line += fmt::format("  {} skipped", num_skipped);
  fmt::print(stderr, "{}{}{}", is_terminal_ ? "\r\x1b[K" : "", line, is_terminal_ ? "" : "\n");
  std::fflush(stderr);
  is_open_ = is_terminal_;
}

void ProgressLine::finish(int64_t done, int64_t num_skipped) {
  print(static_cast<double>(done), num_skipped);
  if (is_open_) fmt::print(stderr, "\n");
  is_open_ = false;
}

void ProgressLine::clear() {
  if (is_open_) fmt::print(stderr, "\r\x1b[K");
  is_open_ = false;
}

}  // namespace kiln
