"""How near to their bound (docs/probe.md) the steps and passes of ten models come on this machine's processor: a summary, and the operations
of each, as Markdown for benchmarks/results. Some 20 minutes.

    python benchmarks/bound.py [--build build] [--only NAME...] >RESULT

Nothing else should run on the machine: each case measures what the machine reaches in the same process.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

DTYPES = ("bf16", "f32")
HALF_UNET = '{"block_out_channels": [160, 320, 640, 640], "cross_attention_dim": 768, "attention_head_dim": 8}'
STEPS = {
    "DiT-S/2": "model=DiT-S/2 global-batch=16",
    "DiT-B/4": "model=DiT-B/4 global-batch=16",
    "PixArt, width 384": "model=pixart hidden-size=384 depth=12 num-heads=6 global-batch=8 image-size=512",
    "Sana, width 512": "model=sana hidden-size=512 depth=8 num-heads=16 objective=flow global-batch=8 image-size=1024",
    "U-Net, half as wide": f"model=unet2d_condition objective=epsilon global-batch=4 image-size=256 model-config={HALF_UNET}",
}
PASSES = {"T5": "t5", "Gemma 2": "gemma2", "KL encode": "kl-encode", "KL decode": "kl-decode", "DC-AE encode": "dc-encode", "DC-AE decode": "dc-decode",
          "DiT-S/2, sampling": "dit-sample", "PixArt, sampling": "pixart-sample"}
FOUND = re.compile(r"([\d.]+) ms for ([\d.]+) GFLOP: \*\*(\d+) % of the bound\*\* \(([\d.]+) ms\), (\d+) % of the peak")


def words_of(name, dtype):
    if name in PASSES:
        return ["pass", PASSES[name], dtype]
    pairs = [pair.split("=", 1) for pair in re.split(r" (?=[a-z-]+=)", STEPS[name])]
    return [word for pair in [*pairs, ["compute-dtype", dtype]] for word in pair]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--only", nargs="+", choices=[*STEPS, *PASSES], default=[*STEPS, *PASSES])
    options = parser.parse_args()
    rows, details = [], []
    for name in options.only:
        for dtype in DTYPES:
            print(f"{name}, {dtype}", file=sys.stderr, flush=True)
            command = [options.build / "benchmarks/bench_step_operations", *words_of(name, dtype)]
            page = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            measured_ms, gflop, share, bound_ms, peak_share = FOUND.search(page).groups()
            rows.append(f"| {name} | {dtype} | {measured_ms} | {bound_ms} | {share} % | {peak_share} % | {float(gflop) / float(measured_ms):.2f} |")
            details.append(page)
    print("| | in | ms | bound, ms | of the bound | of the peak | TFLOP/s |\n|---|---|---:|---:|---:|---:|---:|")
    print("\n".join(rows), "\n", *details, sep="\n")


if __name__ == "__main__":
    main()
