#include "train/phase_groups.h"

namespace kiln {

double PhaseGroup::seconds(const nlohmann::json& phase_s) const {
  double sum = 0;
  for (const char* phase : phases) sum += phase_s.value(phase, 0.0);
  return sum;
}

std::span<const PhaseGroup> phase_groups() {
  static const std::vector<PhaseGroup> kGroups = {{"data", "#94a3b8", {"data"}},
                                                  {"forward", "#2563eb", {"input", "forward", "loss"}},
                                                  {"recompute", "#8b5cf6", {"recompute"}},
                                                  {"backward", "#0ea5e9", {"backward"}},
                                                  {"optimizer", "#10b981", {"grad_norm", "optimizer"}},
                                                  {"offload", "#d946ef", {"offload"}},
                                                  {"communication", "#f59e0b", {"communication"}}};
  return kGroups;
}

}  // namespace kiln
