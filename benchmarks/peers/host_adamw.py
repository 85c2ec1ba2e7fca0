"""The update of an offloaded optimizer: Kiln's fused pass and its state on a disk, against DeepSpeedCPUAdam, memcpy and
the bare disk, in turn in one run.

    python benchmarks/peers/host_adamw.py --bench build/benchmarks/bench_offload --nvme-path DIR \\
        [--deepspeed-python VENV/bin/python] [--threads 2] [--rounds 9] [--pieces memory,disk]

DeepSpeed's interpreter (deepspeed 0.19.8, DS_ACCELERATOR=cpu) runs this file as a worker: AdamW alone, and with what a
training step adds to it: the EMA (lerp_) and the copy to bf16.
"""
import argparse
import os
import statistics
import subprocess
import sys

ELEMENTS = 1 << 25


def worker(threads):
    import time

    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(threads)
    weights = torch.nn.Parameter(torch.randn(ELEMENTS))
    weights.grad = torch.randn(ELEMENTS)
    ema, compute = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([weights], lr=1e-4, weight_decay=0, adamw_mode=True)
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        optimizer.step()
        amount = 28 * ELEMENTS
        if line.strip() == "all":
            with torch.no_grad():
                ema.lerp_(weights, 1e-4)
                compute.copy_(weights)
            amount = 38 * ELEMENTS
        print(time.perf_counter() - begin, amount, 0, flush=True)


class Program:
    def __init__(self, command, environment=None):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, **(environment or {})})

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args[0]} ended")
        return [float(value) for value in line.split()]

    def skip_to(self, text):
        while self.process.stdout.readline().strip() != text:
            if self.process.poll() is not None:
                sys.exit(f"{self.process.args[0]} ended")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bench", default="build/benchmarks/bench_offload")
    parser.add_argument("--nvme-path")
    parser.add_argument("--deepspeed-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pieces", default="memory,disk")
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        return worker(args.threads)

    kiln = Program([args.bench, str(args.threads), args.nvme_path])
    asked = {}
    if "memory" in args.pieces:
        asked.update({name: (kiln, name) for name in ("copy", "streamed_copy", "adamw", "fused")})
        if args.deepspeed_python:
            path = os.path.dirname(os.path.abspath(args.deepspeed_python)) + ":" + os.environ["PATH"]
            peer = Program([args.deepspeed_python, __file__, "--worker", "--threads", str(args.threads)],
                           {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(args.threads), "PATH": path})
            peer.skip_to("ready")
            asked.update({"deepspeed adamw": (peer, "adam"), "deepspeed adamw, ema, cast": (peer, "all")})
    if "disk" in args.pieces:
        asked.update({name: (kiln, name) for name in ("disk_write", "disk_read", "nvme")})
    measured = {name: [] for name in asked}
    for _ in range(args.rounds + 1):
        for name, (program, command) in asked.items():
            measured[name].append(program.ask(command))
    rates = {}
    print("| what | GB/s, median | best |\n|---|---|---|")
    for name, rounds in measured.items():
        speeds = [(read + written) / seconds / 1e9 for seconds, read, written in rounds[1:]]  # the first warms up
        rates[name] = statistics.median(speeds)
        print(f"| {name} | {rates[name]:.2f} | {max(speeds):.2f} |")
    if "fused" in rates:
        fastest = max(rates["copy"], rates["streamed_copy"])
        print(f"\nfused against the faster copy: {rates['fused'] / fastest:.2f}")
    if "deepspeed adamw" in rates:
        print(f"fused against deepspeed adamw: {rates['fused'] / rates['deepspeed adamw']:.2f}, with its EMA and cast: "
              f"{rates['fused'] / rates['deepspeed adamw, ema, cast']:.2f}, adamw alone: "
              f"{rates['adamw'] / rates['deepspeed adamw']:.2f}")
    if "nvme" in rates:
        shares = [(read / rates["disk_read"] + written / rates["disk_write"]) / 1e9 / seconds
                  for seconds, read, written in measured["nvme"][1:]]
        print(f"nvme, share of the disk's sequential speed: {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
