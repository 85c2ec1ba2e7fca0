// The precompiled header of code that uses tensors: Kiln's part of ATen, never torch/torch.h; fmt and JSON.
#pragma once
#include "core/aten.h"
#include "core/pch_base.h"
