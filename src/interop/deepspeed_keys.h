// The keys of DeepSpeed's configuration file and what each means here: the one table behind --deepspeed and
// docs/deepspeed.md. Torch-free.
#pragma once
#include <nlohmann/json.hpp>
#include <span>
#include <string>

namespace kiln {

struct DeepSpeedKey {
  enum class Effect {
    kOption,    // sets `option`
    kAlways,    // Kiln does `only` whatever the file says: another value is warned about
    kOnly,      // Kiln can `only`: another value is refused
    kNoEffect,  // warned about, unless it is false
    kFree,      // Kiln does it at no cost, whatever the file says: no word
    kSection,   // a section of such keys, not looked into; warned about, or with "enabled" `only` false
                // refused
    kTogether,  // read together with others, as `note` says
  };
  const char* path;  // "fp16.loss_scale"
  Effect effect;
  const char* option = nullptr;  // kOption: of TrainOptions
  nlohmann::json only{};         // kAlways, kOnly
  const char* note = "";         // the reason, or how the value is read
  // kOption: the option's value; null where the file's value leaves the option as it is.
  nlohmann::json (*convert)(const nlohmann::json&) = nullptr;
};

std::span<const DeepSpeedKey> deepspeed_keys();

// The table as Markdown: the part of docs/deepspeed.md that a test compares.
std::string deepspeed_keys_text();

}  // namespace kiln
