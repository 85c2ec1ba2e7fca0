// Repositories of the Hugging Face hub, in the cache that diffusers and transformers use too: each finds what
// the other has fetched. Torch-free.
#pragma once
#include <string>
#include <vector>

namespace kiln {

// Returns HF_HUB_CACHE, HF_HOME/hub, XDG_CACHE_HOME/huggingface/hub or ~/.cache/huggingface/hub.
std::string hub_cache();

struct HubRequest {
  std::string repository{};          // "stabilityai/sd-vae-ft-mse"
  std::vector<std::string> files{};  // exact paths, or folders that end in "/"
  std::string revision = "main";
  bool offline = false;
  std::string name{};  // shown in progress lines
};

// Returns the snapshot's folder, with those files in it. Files in the cache are taken as they are, without
// asking the hub. The rest is fetched from HF_ENDPOINT (default: the hub) with HF_TOKEN or the token that the
// hub's own tools left. Files of the hub's large storage are checked against the SHA-256 that it publishes.
// Throws Error: offline and not there, what fetch_file() throws, a repository without such files.
std::string fetch_from_hub(const HubRequest& request);

}  // namespace kiln
