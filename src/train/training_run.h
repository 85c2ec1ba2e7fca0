// A training run on one rank: opens what its options name, checks it, and builds model, state and loader.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "core/json.h"
#include "data/loader/batches.h"
#include "models/model_record.h"
#include "parallel/ranks/process_group.h"
#include "sample/prompts.h"
#include "train/dataset/training_data.h"
#include "train/product_choices.h"
#include "train/run_evaluation.h"
#include "train/sample_grid.h"
#include "train/setup.h"
#include "train/validation.h"
#include "watch/step_measurement.h"

namespace kiln {

class TrainingRun {
 public:
  // Applies the options' compute settings, opens the data, checks what can be checked before memory is taken,
  // and warns of settings without effect. `first_step` is where the stage of these options begins. Throws
  // Error on this rank: options or data that do not fit.
  TrainingRun(const TrainOptions& options, std::shared_ptr<ProcessGroup> group, int64_t first_step = 0);
  TrainingRun(const TrainingRun&) = delete;
  ~TrainingRun();  // says what is left out

  // Throws Error on every rank, naming what differs, unless all have the same data and weights. A collective.
  void check_same_on_all_ranks() const;
  // Makes the model, its state and the loader. A collective. Throws Error.
  void build();
  // Writes config.json, for sampling, and `recipe` as config.toml into the run folder. Only rank 0 writes.
  void write_description(const TrainOptions& recipe) const;
  void print_description() const;
  // Begins to keep what is found out about pictures in the run folder (RunPictures::record_in). If it cannot
  // be written, which only costs a later check, training goes on. `begins_stage`: nothing was read yet. A
  // collective.
  void record_pictures(bool begins_stage) const;
  // Says which pictures this rank has left out since the last call.
  void say_left_out() const;

  // Called after build(). The result refers to `prompts` and to this.
  GridSource grid_source(const Prompts& prompts) const {
    return {.info = info,
            .training = training,
            .decoder = data.decoder.get(),
            .prompts = prompts,
            .device = device};
  }
  bool is_first() const { return group->rank() == 0; }  // this rank writes and prints
  bool is_alone() const { return group->world_size() == 1; }
  void warn(const std::string& text) const;  // prints once, on rank 0

  const TrainOptions options;
  const int64_t first_step;
  const std::shared_ptr<ProcessGroup> group;
  const at::Device device;
  const at::ScalarType compute_dtype;
  TrainingData data;
  ModelRecord info;
  nlohmann::json config;  // options and data identity, as checkpoints keep them
  std::optional<Validation> validation;
  PhaseMemory phase_memory;

  double data_sheet_flops = 0;  // of this rank's device; 0: unknown (RunContext)

  // Set by build():
  double peak_flops = 0;  // of this rank's device while the others compute too
  Training training;
  Prompts prompts;  // for the sample grids
  std::optional<RunEvaluation> evaluation;
  std::unique_ptr<BatchSource> batches;
  std::optional<ProductChoices> products;  // with --untried-gpu products

 private:
  std::vector<std::shared_ptr<const RunPictures>> encoded_pictures() const;
  std::string weights_identity() const;
  void compare_with_weights() const;
  void describe_base();
  void describe_drawing();
};

}  // namespace kiln
