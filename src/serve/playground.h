// Draws from the newest checkpoints of runs while they train.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "core/files/temporary_folder.h"

namespace kiln {

class Playground {
 public:
  // How `kiln sample` is called: its --device and --threads.
  Playground(std::string device, int64_t threads);
  ~Playground();  // ends a drawing that is under way
  Playground(const Playground&) = delete;

  // Begins to draw from the first EMA of the run's newest checkpoint, by a kiln sample with the lowest
  // priority that the system ends first when memory is short. `fields`: texts of "classes" or "prompt",
  // "seed", "guidance", "steps" and "images"; "" or none: as kiln sample has it. `run`: the number of the
  // run. Throws Error: not so, or a drawing is under way.
  void begin(size_t run, const std::string& folder, const nlohmann::json& fields);

  struct Drawing {
    int64_t id = 0;
    size_t run = 0;
    std::string text{};                        // for people: what it shows, or why there is none
    std::shared_ptr<const std::string> png{};  // a grid; null: under way, or failed
  };
  // Returns the last drawings of a run, newest first.
  std::vector<Drawing> drawings(size_t run) const;
  // Counts whatever changes what drawings() returns.
  int64_t changes() const;

 private:
  void draw(Drawing drawing, const std::vector<std::string>& options);
  int run_sample(const std::vector<std::string>& options, const std::string& errors);
  void show(const Drawing& drawing);

  const std::string device_, threads_;
  TemporaryFolder folder_{"serve"};
  mutable std::mutex mutex_;  // of what follows
  std::deque<Drawing> drawings_;
  int64_t last_id_ = 0, changes_ = 0;
  bool is_drawing_ = false, ends_ = false;
  pid_t child_ = 0;
  std::thread worker_;
};

}  // namespace kiln
