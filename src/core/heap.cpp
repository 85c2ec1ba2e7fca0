#include "core/heap.h"

#include <sys/prctl.h>
#include <sys/types.h>

#include <cstddef>
#include <string>

// jemalloc's control function; null where jemalloc is not linked.
extern "C" __attribute__((weak)) int mallctl(const char* name, void* old_value, size_t* old_size,
                                             void* new_value, size_t new_size);

namespace kiln {

void return_freed_memory() {
  // Turns huge pages off. A huge page is resident as a whole once one of its bytes is, and a quarter of a
  // tensor's size class may be unused.
  ::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  if (!mallctl) return;
  ssize_t at_once = 0;
  mallctl("arenas.dirty_decay_ms", nullptr, nullptr, &at_once, sizeof(at_once));
  mallctl("arenas.muzzy_decay_ms", nullptr, nullptr, &at_once, sizeof(at_once));
  unsigned num_arenas = 0;
  size_t size = sizeof(num_arenas);
  if (mallctl("arenas.narenas", &num_arenas, &size, nullptr, 0) != 0) return;
  // Arenas that no thread has used yet refuse. They take the settings above when they are created.
  for (unsigned arena = 0; arena < num_arenas; ++arena)
    for (const char* kind : {"dirty", "muzzy"}) {
      const std::string name = "arena." + std::to_string(arena) + "." + kind + "_decay_ms";
      mallctl(name.c_str(), nullptr, nullptr, &at_once, sizeof(at_once));
    }
}

}  // namespace kiln
