// What is settled before main().

// jemalloc reads this at start-up. A training step frees and allocates the same large tensors every time. If
// they were given back to the system in between, each would fault in its pages anew (6,161 faults for 25 MB),
// so freed pages are kept.
extern "C" {
extern const char* malloc_conf;
const char* malloc_conf =
    "background_thread:false,dirty_decay_ms:-1,muzzy_decay_ms:-1,metadata_thp:auto,thp:always";
}
