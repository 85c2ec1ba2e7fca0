// Sums over the rows of a matrix, torch-free.
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace kiln::ops::cpu {

// sums[j] = sum over i < rows of values[i * width + j], in f32 and in order of i; f32, bf16 or fp16.
void column_sum(Dtype dtype, const void* values, size_t rows, size_t width, float* sums);

}  // namespace kiln::ops::cpu
