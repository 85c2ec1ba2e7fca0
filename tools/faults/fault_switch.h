// tools/plant_faults puts this file into a copy of the source. KILN_FAULT=N makes the planted fault N real. A
// file that KILN_FAULT_MAP names gets a byte for each fault whose place is reached, by this process or by
// those that it starts.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

namespace kiln {
namespace planted {

constexpr int kMostFaults = 4096;
inline unsigned char no_map[kMostFaults];
inline unsigned char* reached = no_map;
inline int chosen = 0;

inline void map_to(const char* path) {
  const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0 || ftruncate(file, kMostFaults) != 0) abort();
  void* bytes = mmap(nullptr, kMostFaults, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (bytes == MAP_FAILED) abort();
  reached = static_cast<unsigned char*>(bytes);  // an earlier map stays: threads may still write to it
  close(file);
}

// Each source brings it; it runs before the constructors of all objects.
__attribute__((constructor(101))) static void read_environment() {
  if (chosen != 0 || reached != no_map) return;
  if (const char* number = std::getenv("KILN_FAULT")) chosen = std::atoi(number);
  if (const char* path = std::getenv("KILN_FAULT_MAP")) map_to(path);
}

}  // namespace planted

#ifdef KILN_FAULT_CHECK  // a warning tells plant_faults that a place is not between #if and #endif
[[deprecated("compiled")]] bool fault(int number);
#endif
inline bool fault(int number) {
  // Kernels ask in their inner loops, from many threads: who only reads leaves the line in every cache.
  unsigned char* mark = planted::reached + number;
  if (__atomic_load_n(mark, __ATOMIC_RELAXED) == 0) __atomic_store_n(mark, 1, __ATOMIC_RELAXED);
  return planted::chosen == number;
}

}  // namespace kiln
