#!/usr/bin/env python3
"""What torch itself reaches on this GPU, for scripts/gpu run: prints one JSON object.

    gpu_torch.py ceilings | attention [cuda | cpu]

On a CPU it does next to nothing, to see that it runs.
"""
import json
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cuda"
ON_GPU = DEVICE == "cuda"


def milliseconds(function, repeats=10):
    """The median of the GPU's own clock, after two runs that are not counted."""
    if not ON_GPU:
        begin = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - begin)
    for _ in range(2):
        function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def ceilings():
    """Copies in GB/s (read and written, one way over the link), square products in TFLOP/s."""
    num_bytes, size = (1 << 30, 8192) if ON_GPU else (1 << 16, 64)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=ON_GPU)
    found = {"copy_GB_s": 2 * num_bytes / milliseconds(lambda: target.copy_(source)) / 1e6,
             "to_device_GB_s": num_bytes / milliseconds(lambda: target.copy_(host, non_blocking=True)) / 1e6,
             "to_host_GB_s": num_bytes / milliseconds(lambda: host.copy_(source, non_blocking=True)) / 1e6}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("f32", torch.float32)):
        a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        found[f"{name}_TFLOP_s"] = 2 * size**3 / milliseconds(lambda: torch.mm(a, b, out=out), 5) / 1e9
    return found


def attention():
    """Forward and backward of each engine at DiT-XL/2's shape, bf16."""
    found = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION),
                          ("efficient", SDPBackend.EFFICIENT_ATTENTION)):
        shape = (32, 256, 3, 16, 72) if ON_GPU else (1, 8, 3, 2, 8)
        qkv = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attend = torch.nn.functional.scaled_dot_product_attention
        try:
            with sdpa_kernel([backend]):
                forward = milliseconds(lambda: attend(q, k, v))
                out = attend(q, k, v)
                grad = torch.randn_like(out)
                backward = milliseconds(lambda: torch.autograd.grad(out, qkv, grad, retain_graph=True))
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        found[name] = {"forward_ms": forward, "backward_ms": backward}
    return found


if __name__ == "__main__":
    print(json.dumps({"ceilings": ceilings, "attention": attention}[sys.argv[1]]()))
