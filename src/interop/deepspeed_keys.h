// The keys of DeepSpeed's configuration file and what each means here: the one table behind --deepspeed and
// docs/deepspeed_keys.md. Torch-free.
#pragma once
#include <span>
#include <string>

#include "core/json.h"

namespace kiln {

struct DeepSpeedKey {
  enum class Effect {
    kOption,    // sets `option`
    kAlways,    // Kiln does `only` whatever the file says, and warns about another value
    kOnly,      // Kiln can only do `only`, and refuses another value
    kNoEffect,  // Kiln warns about the key unless its value is false
    kFree,      // Kiln does it at no cost, whatever the file says, and is silent
    // A section whose keys are not looked into. Kiln warns about it, or refuses it if `only` is false, unless
    // its "enabled" is false.
    kSection,
    kTogether,  // read together with other keys, as `note` says
  };
  const char* path;  // "fp16.loss_scale"
  Effect effect;
  const char* option = nullptr;  // an option of training
  nlohmann::json only{};         // kAlways, kOnly
  const char* note = "";         // the reason, or how the value is read
  // kOption: returns the option's value, or null if the file's value leaves the option as it is.
  nlohmann::json (*convert)(const nlohmann::json&) = nullptr;
};

std::span<const DeepSpeedKey> deepspeed_keys();

// Returns the table as Markdown. A test compares it with docs/deepspeed_keys.md.
std::string deepspeed_keys_text();

}  // namespace kiln
