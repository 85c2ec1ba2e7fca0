// Searches which segments to keep, to recompute and to offload (fit_memory() of segment_costs.h).
#include <algorithm>
#include <tuple>

#include "plan/memory/segment_costs.h"

namespace kiln {

namespace {

// Choices for the first segments, with what they hold and cost.
struct Prefix {
  std::vector<int64_t> live;  // of each walk, before the next segment's forward
  double flops = 0;
  int64_t host_bytes = 0;
  bool fetches = false;  // the last segment's input comes back during the next one's backward
  int32_t parent = -1;   // index in the frontier before
  Activations choice{};  // of the last segment

  std::tuple<double, int64_t> cost() const { return {flops, host_bytes}; }
};

class FrontierSearch {
 public:
  FrontierSearch(const StepCosts& costs, int64_t budget_bytes) : costs_(costs), budget_(budget_bytes) {}

  std::vector<MemoryChoice> run() {
    if (costs_.other_peak_bytes > budget_) return {};
    Prefix nothing;
    for (const WalkCosts& walk : costs_.walks) nothing.live.push_back(walk.live_bytes);
    frontiers_.push_back({nothing});
    for (size_t i = 0; i < costs_.num_segments(); ++i) frontiers_.push_back(extended(i));
    const std::vector<Prefix>& complete = frontiers_.back();  // cheapest first
    const auto best = std::ranges::find_if(complete, [&](const Prefix& prefix) { return loss_fits(prefix); });
    return best == complete.end() ? std::vector<MemoryChoice>{} : choices_of(*best);
  }

 private:
  std::vector<Prefix> extended(size_t segment) const {
    std::vector<Prefix> next;
    for (size_t parent = 0; parent < frontiers_.back().size(); ++parent)
      for (Activations choice : {Activations::kKeep, Activations::kRecompute, Activations::kOffload}) {
        if (choice == Activations::kOffload && !costs_.can_offload) continue;
        const Prefix& before = frontiers_.back()[parent];
        if (!fits(before, segment, choice)) continue;
        Prefix after = before;
        after.parent = static_cast<int32_t>(parent);
        after.choice = choice;
        after.fetches = choice == Activations::kOffload && costs_.host_bytes[segment] > 0;
        for (size_t w = 0; w < after.live.size(); ++w)
          after.live[w] += costs_.walks[w].segments[segment].of(choice).held_bytes;
        if (choice != Activations::kKeep) after.flops += costs_.recompute_flops[segment];
        if (choice == Activations::kOffload) after.host_bytes += costs_.host_bytes[segment];
        next.push_back(std::move(after));
      }
    return undominated(std::move(next));
  }

  int64_t fetched(const Prefix& prefix, size_t walk, size_t segments) const {
    return prefix.fetches ? costs_.walks[walk].segments[segments - 1].fetched_bytes : 0;
  }

  bool fits(const Prefix& before, size_t segment, Activations activations) const {
    for (size_t w = 0; w < before.live.size(); ++w) {
      const SegmentCosts::Choice& choice = costs_.walks[w].segments[segment].of(activations);
      const int64_t most = std::max({choice.forward_peak_bytes, choice.recompute_peak_bytes,
                                     choice.backward_peak_bytes + fetched(before, w, segment)});
      if (before.live[w] + most > budget_) return false;
    }
    return true;
  }

  bool loss_fits(const Prefix& prefix) const {
    for (size_t w = 0; w < prefix.live.size(); ++w)
      if (prefix.live[w] + costs_.walks[w].loss_peak_bytes + fetched(prefix, w, costs_.num_segments()) >
          budget_)
        return false;
    return true;
  }

  // Returns the prefixes that no other one replaces. A prefix replaces another if it costs no more, holds no
  // more in any walk, and fetches an input only if the other does.
  static std::vector<Prefix> undominated(std::vector<Prefix> prefixes) {
    std::ranges::stable_sort(prefixes, [](const Prefix& a, const Prefix& b) { return a.cost() < b.cost(); });
    std::vector<Prefix> kept;
    std::vector<size_t> lowest;  // indices in `kept` of those that none of these covers
    const auto covers = [](const Prefix& a, const Prefix& b) {
      return (!a.fetches || b.fetches) &&
             std::ranges::equal(a.live, b.live, [](int64_t x, int64_t y) { return x <= y; });
    };
    for (Prefix& prefix : prefixes) {
      if (std::ranges::any_of(lowest, [&](size_t k) { return covers(kept[k], prefix); })) continue;
      std::erase_if(lowest, [&](size_t k) { return covers(prefix, kept[k]); });
      lowest.push_back(kept.size());
      kept.push_back(std::move(prefix));
    }
    return kept;
  }

  std::vector<MemoryChoice> choices_of(const Prefix& best) const {
    std::vector<MemoryChoice> choices(costs_.num_segments());
    const Prefix* prefix = &best;
    for (size_t i = choices.size(); i-- > 0;) {
      choices[i].activations = prefix->choice;
      prefix = &frontiers_[i][static_cast<size_t>(prefix->parent)];
    }
    return choices;
  }

  const StepCosts& costs_;
  int64_t budget_;
  std::vector<std::vector<Prefix>> frontiers_;  // by the number of segments chosen
};

}  // namespace

std::vector<MemoryChoice> fit_memory(const StepCosts& costs, int64_t budget_bytes) {
  return FrontierSearch(costs, budget_bytes).run();
}

int64_t smallest_peak_bytes(const StepCosts& costs) {
  const std::vector<MemoryChoice> recompute_all(costs.num_segments(), {Activations::kRecompute});
  int64_t fits = peak_bytes(costs, recompute_all), too_little = costs.persistent_bytes - 1;
  while (fits - too_little > 1) {
    const int64_t middle = too_little + (fits - too_little) / 2;
    const std::vector<MemoryChoice> choices = fit_memory(costs, middle);
    if (choices.empty())
      too_little = middle;
    else
      fits = peak_bytes(costs, choices);
  }
  return fits;
}

}  // namespace kiln
