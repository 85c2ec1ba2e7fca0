#include "core/text/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "core/units.h"

namespace kiln {
namespace {

// Where nobody takes the text any more, the work goes on.
void put(const std::string& text) {
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace

LiveLine::LiveLine() : is_terminal_(::isatty(STDERR_FILENO) == 1) {}

bool LiveLine::is_due() {
  const auto now = Clock::now();
  if (std::chrono::duration<double>(now - last_).count() < (is_terminal_ ? 0.5 : 10)) return false;
  last_ = now;
  return true;
}

void LiveLine::show(const std::string& text) {
  put(is_terminal_ ? "\r\x1b[K" + text : text + "\n");
  is_open_ = is_terminal_;
}

void LiveLine::end() {
  if (is_open_) put("\n");
  is_open_ = false;
}

void LiveLine::clear() {
  if (is_open_) put("\r\x1b[K");
  is_open_ = false;
}

double LiveLine::seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

void ProgressLine::update(double done, int64_t num_skipped) {
  if (line_.is_due()) print(done, num_skipped);
}

void ProgressLine::print(double done, int64_t num_skipped) {
  if (!is_shown_) return;
  const double seconds = line_.seconds(), rate = seconds > 0 ? (done - first_) / seconds : 0;
  std::string text = fmt::format("{0} / {1} {2}  {3} {2}/s", static_cast<int64_t>(done), total_, unit_,
                                 number_text(rate, 3));
  if (rate > 0) text += fmt::format("  {} left", duration_text((static_cast<double>(total_) - done) / rate));
  if (num_skipped > 0) text += fmt::format("  {} skipped", num_skipped);
  line_.show(text);
}

void ProgressLine::finish(int64_t done, int64_t num_skipped) {
  print(static_cast<double>(done), num_skipped);
  line_.end();
}

void ShardProgress::update(int64_t done) {
  if (first_ < 0) first_ = done - 1;
  if (!line_.is_due()) return;
  const double left =
      line_.seconds() / static_cast<double>(done - first_) * static_cast<double>(total_ - done);
  line_.show(fmt::format("{} {} / {}  {} %  {} left", verb_, done, total_, 100 * done / total_,
                         duration_text(left)));
}

}  // namespace kiln
