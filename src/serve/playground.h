// Draws from the newest checkpoints of runs while they train.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/files/temporary_folder.h"
#include "core/json.h"

namespace kiln {

// A drawing that is under way ends with it.
class Playground {
 public:
  // How `kiln sample` is called: its --device and --threads.
  Playground(std::string device, int64_t threads) : device_(std::move(device)), threads_(threads) {}

  // Begins to draw from the first EMA of the run's newest checkpoint, by a kiln sample with the lowest
  // priority that the system ends first when memory is short. `fields`: texts of "classes" or "prompt",
  // "seed", "guidance", "steps" and "images"; "" or none: as kiln sample has it. `run`: the number of the
  // run. Throws Error: not so, or a drawing is under way.
  void begin(int64_t run, const std::string& folder, const nlohmann::json& fields);

  struct Drawing {
    int64_t id = 0;
    int64_t run = 0;
    std::string text{};                        // for people: what it shows, or why there is none
    std::shared_ptr<const std::string> png{};  // a grid; null: under way, or failed
  };
  // Returns the last drawings of a run, newest first.
  std::vector<Drawing> drawings(int64_t run) const;
  // Returns whether what drawings() returns may have changed since the last call.
  bool take_change() { return has_changed_.exchange(false); }

 private:
  void draw(Drawing drawing, const std::string& base, const std::vector<std::string>& options,
            const std::stop_token& stop);

  const std::string device_;
  const int64_t threads_;
  TemporaryFolder folder_{"serve"};
  mutable std::mutex mutex_;  // of what follows
  std::deque<Drawing> drawings_;
  int64_t last_id_ = 0;
  bool is_drawing_ = false;  // the newest of the drawings
  std::atomic<bool> has_changed_ = false;
  std::jthread worker_;
};

}  // namespace kiln
