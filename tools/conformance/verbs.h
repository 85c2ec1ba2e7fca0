// The verbs of kiln-conformance: each runs one component on tensors from files. docs/conformance.md is the
// interface.
#pragma once
#include <CLI/CLI.hpp>

namespace kiln::conformance {

void add_forward_verb(CLI::App& app);
void add_init_verb(CLI::App& app);
void add_sample_verb(CLI::App& app);
void add_sampler_verb(CLI::App& app);
void add_loss_verb(CLI::App& app);
void add_metrics_verb(CLI::App& app);
void add_optim_verb(CLI::App& app);
void add_train_verb(CLI::App& app);
void add_tokenize_verb(CLI::App& app);

using AddVerb = void (*)(CLI::App&);
inline constexpr std::initializer_list<AddVerb> kVerbs = {
    add_optim_verb,   add_train_verb, add_forward_verb, add_init_verb,     add_sample_verb,
    add_sampler_verb, add_loss_verb,  add_metrics_verb, add_tokenize_verb,
};

}  // namespace kiln::conformance
