#include "optim/ema.h"

#include <fmt/ranges.h>
#include <algorithm>

#include "core/error.h"

namespace kiln {

namespace {

struct NamedDecay {
  const char* name;
  double (*decay_at)(double decay, int64_t update);
};

constexpr NamedDecay kNamedDecays[] = {
    {"constant", [](double decay, int64_t) { return decay; }},
    {"diffusers",
     [](double decay, int64_t update) {
       const double n = static_cast<double>(update - 1);
       return n <= 0 ? 0.0 : std::min(decay, (1 + n) / (10 + n));
     }},
};

}  // namespace

std::vector<std::string> ema_schedule_names() {
  std::vector<std::string> names;
  for (const NamedDecay& entry : kNamedDecays) names.push_back(entry.name);
  return names;
}

double ema_decay_at(const std::string& schedule, double decay, int64_t update) {
  for (const NamedDecay& entry : kNamedDecays)
    if (schedule == entry.name) return entry.decay_at(decay, update);
  fail("ema", "schedule expects one of {}, got '{}'", fmt::join(ema_schedule_names(), ", "), schedule);
}

}  // namespace kiln
