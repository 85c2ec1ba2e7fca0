// The learning rate of each step.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

struct LrSchedule {
  std::string name = "constant";  // constant | cosine | linear; times the warm-up
  double lr = 1e-4;               // the highest
  std::string warmup = "linear";  // (step + 1) / warmup_steps, or "log": log(step + 2) / log(warmup_steps)
  int64_t warmup_steps = 0;       // 0: none
  double min_lr_ratio = 0;        // cosine and linear end at lr * min_lr_ratio
};

// step: 0-based. progress: fraction of the run that is done, in [0, 1], by steps or by time; cosine and
// linear follow it.
double lr_at(const LrSchedule& schedule, int64_t step, double progress);
std::vector<std::string> lr_schedule_names();
// Throws Error naming the option.
void validate(const LrSchedule& schedule);

}  // namespace kiln
