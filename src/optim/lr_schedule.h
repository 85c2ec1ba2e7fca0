// The learning rate of each step.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

struct LrSchedule {
  std::string name = "constant";  // constant | cosine; both after the warm-up
  double lr = 1e-4;               // the highest
  int64_t warmup_steps = 0;       // lr * min(1, (step + 1) / warmup_steps)
  double min_lr_ratio = 0;        // cosine ends at lr * min_lr_ratio
};

// step: 0-based. progress: fraction of the run that is done, in [0, 1], by steps or by time; cosine follows
// it.
double lr_at(const LrSchedule& schedule, int64_t step, double progress);
std::vector<std::string> lr_schedule_names();
// Throws Error naming the option.
void validate(const LrSchedule& schedule);

}  // namespace kiln
