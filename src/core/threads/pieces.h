// Threads that share out work piece by piece. Torch-free.
#pragma once
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace kiln {

// Refers to what is to be called with the number of a piece, which has to outlive it.
class PieceWork {
 public:
  template <class Work>
  requires(!std::same_as<Work, PieceWork> && std::invocable<const Work&, int64_t>) PieceWork(const Work& work)
      : work_(&work), call_([](const void* of, int64_t piece) { (*static_cast<const Work*>(of))(piece); }) {}
  void operator()(int64_t piece) const { call_(work_, piece); }

 private:
  const void* work_;
  void (*call_)(const void*, int64_t);
};

// Calls work(0) .. work(count - 1) on the calling thread and on up to threads - 1 others. Returns when all
// calls have returned; rethrows what the first one threw.
//
// A thread takes the next piece when it is done with one. So a thread that another program keeps from its
// processor does not hold up the others, unless it is in the middle of a piece. Any thread may run any piece,
// so what a piece computes must follow from its number alone. Sums over pieces are added up afterwards, in
// the order of the pieces.
//
// Within a piece, the thread that runs it runs all pieces. At most 2^32 - 1 pieces and 2^16 threads.
void run_pieces(int64_t count, int64_t threads, PieceWork work);

// Calls work(0) .. work(threads - 1) like run_pieces(), with so many threads that the calls may wait for each
// other. Returns false, and calls nothing, within a piece. Throws std::system_error where the system gives no
// more threads.
bool run_together(int64_t threads, PieceWork work);

}  // namespace kiln
