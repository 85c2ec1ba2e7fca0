// Options that validate() accepts, for tests to change.
#pragma once
#include "train/train_config.h"

namespace kiln::test {

// Everything default, on synthetic data.
inline TrainOptions usable_options() {
  TrainOptions options;
  options.data = "synthetic";
  options.out = "run";
  return options;
}

// A DiT of four blocks, a few thousand weights each.
inline TrainOptions tiny_dit_options() {
  TrainOptions options = usable_options();
  options.model = "dit";
  options.hidden_size = 48;
  options.depth = 4;
  options.num_heads = 3;
  options.patch_size = 2;
  options.num_classes = 5;
  options.image_size = 64;
  options.global_batch = 6;
  return options;
}

}  // namespace kiln::test
