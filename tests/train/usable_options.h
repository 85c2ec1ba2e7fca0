// Options that validate() accepts, for tests to change.
#pragma once
#include "run/train_options.h"

namespace kiln::test {

// Everything default, on synthetic data.
inline TrainOptions usable_options() {
  TrainOptions options;
  options.data.path = "synthetic";
  options.out = "run";
  return options;
}

// A DiT of four blocks, a few thousand weights each.
inline TrainOptions tiny_dit_options() {
  TrainOptions options = usable_options();
  options.model.name = "dit";
  options.model.hidden_size = 48;
  options.model.depth = 4;
  options.model.num_heads = 3;
  options.model.patch_size = 2;
  options.model.num_classes = 5;
  options.data.image_size = 64;
  options.global_batch = 6;
  return options;
}

}  // namespace kiln::test
