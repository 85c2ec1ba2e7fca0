#include "core/threads/parallel_pieces.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "core/threads/pieces.h"

// LibTorch's OpenMP is GNU's, whatever compiles this; omp.h would be the compiler's. MKL is there where
// LibTorch has it.
extern "C" void omp_set_num_threads(int threads);
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);

namespace kiln {
namespace {

// While this lives, ATen, oneDNN and MKL use no other thread on behalf of the calling one.
// at::set_num_threads would also forget what oneDNN has compiled.
class OneThread {
 public:
  OneThread() : of_openmp_(at::get_num_threads()) {
    omp_set_num_threads(1);
    if (MKL_Set_Num_Threads_Local) of_mkl_ = MKL_Set_Num_Threads_Local(1);
  }
  ~OneThread() {
    omp_set_num_threads(of_openmp_);
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(of_mkl_);
  }
  OneThread(const OneThread&) = delete;

 private:
  int of_openmp_, of_mkl_ = 0;
};

}  // namespace

void parallel_pieces(int64_t count, int64_t size, c10::function_ref<void(int64_t, int64_t)> body) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  run_pieces(at::divup(count, size), threads, [&](int64_t piece) {
    const OneThread alone;
    body(piece * size, std::min(count, (piece + 1) * size));
  });
}

int64_t rows_of_piece(int64_t width) {
  constexpr int64_t kElements = 1 << 15, kRows = 16;
  return at::divup(kElements, width * kRows) * kRows;
}

}  // namespace kiln
