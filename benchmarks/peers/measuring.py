"""What the comparisons share: programs measured in turn, Kiln's logged rates, the table's words."""
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile


def processor():
    """"AMD EPYC 9B45, 2 cores": the cores this process may use."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def device_name(device):
    """Of the first GPU, as the driver calls it, or of the processor."""
    if device == "cpu":
        return processor()
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.splitlines()[0] if done.returncode == 0 else "GPU"


def in_turn(rounds, measurements):
    """{name: [result of each round]} of {name: function}; each round runs every one of them once."""
    results = {name: [] for name in measurements}
    for number in range(rounds):
        for name, measure in measurements.items():
            results[name].append(measure())
            print(f"round {number + 1}: {name} {results[name][-1]}", file=sys.stderr, flush=True)
    return results


def kiln_images_per_s(run, warmup):
    """The median over the logged steps of a run folder after the first `warmup`; the run logs every step."""
    lines = [json.loads(line) for line in open(f"{run}/log.jsonl")]
    return statistics.median([line["images_per_s"] for line in lines if "images_per_s" in line][warmup:])


def bound_images_per_s(command):
    """The rate of a step at its bound on this machine, of `kiln train` and its options but for --out."""
    program, _, *options = [str(part) for part in command]
    done = subprocess.run([program, "probe", *options, "--steps", "2", "--no-checkpoint", "--json"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"kiln failed: {done.stderr.strip()[-400:]}")
    probed = json.loads(done.stdout)
    return probed["measured"]["images_per_s"] / probed["bound"]["share"]


def run_kiln_training(command, warmup):
    """Of `kiln train` and its options but for --out: rate, shares of the machine's measured peak and of the step's bound, and
    peak memory, that of tensors on a GPU where it trains there, else of the process."""
    bound = bound_images_per_s(command)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(part) for part in command] + ["--out", folder + "/run"]
        done = subprocess.run(["/usr/bin/time", "-f", "%M", "-o", folder + "/usage", *command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"kiln failed: {done.stderr.strip()[-400:]}")
        lines = [json.loads(line) for line in open(f"{folder}/run/log.jsonl")]
        shares = [line["peak_share"] for line in lines if "peak_share" in line][warmup:]
        rate = kiln_images_per_s(folder + "/run", warmup)
        resident = int(pathlib.Path(folder + "/usage").read_text().split()[-1]) * 1024
        return {"images_per_s": rate, "peak_share": statistics.median(shares) if shares else None, "bound_share": rate / bound,
                "peak_bytes": max(line.get("peak_device_bytes", 0) for line in lines) or resident}


def speed_and_memory_table(results, reference):
    """Lines of a table of {variant: [{images_per_s, peak_bytes and maybe shares}]}, with ratios to the variant `reference`."""
    def share(runs, key):
        shares = [run[key] for run in runs if run.get(key)]
        return f"{100 * statistics.median(shares):.0f} %" if shares else "-"

    lines = [f"| program | images/s (min..max) | share of the bound | of the measured peak | peak memory | speed / {reference} | memory / {reference} |",
             "|---|---|---|---|---|---|---|"]
    base_rate, base_peak = (statistics.median(run[key] for run in results[reference]) for key in ("images_per_s", "peak_bytes"))
    for variant, runs in results.items():
        rates = [run["images_per_s"] for run in runs]
        peak, rate = statistics.median(run["peak_bytes"] for run in runs), statistics.median(rates)
        lines.append(f"| {variant} | {rate:.2f} ({min(rates):.2f}..{max(rates):.2f}) | "
                     f"{share(runs, 'bound_share')} | {share(runs, 'peak_share')} | {peak / 1e9:.2f} GB | {rate / base_rate:.2f}x | "
                     f"{peak / base_peak:.2f}x |")
    return lines


def conclude(text, out):
    """Prints the report and, where `out` is given, writes it there."""
    print(text)
    if out:
        pathlib.Path(out).write_text(text)
