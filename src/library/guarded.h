// The border of the library: options of the public headers become those of the program, its errors theirs.
#pragma once
#include <exception>

#include "core/error.h"
#include "kiln/options.h"
#include "run/train_options.h"

namespace kiln {

// Returns what `action` returns. Every error leaves as one of the public headers.
template <class Action>
auto guarded(Action&& action) {
  try {
    return action();
  } catch (const std::exception& error) {
    throw v0::Error(message_of(error));
  }
}

// Completes the options as kiln train does. Throws Error: an unknown name, a value of the wrong kind.
TrainOptions train_options_of(const v0::Options& given);

}  // namespace kiln
