"""The kernels: their times, counters and algorithms, and their shares of a step."""
import json

from .session import Failed, scratch
from .trainings import training_options


def bench(session, *arguments, under=(), env=None, timeout=90):
    """The rows of bench_cuda_kernels' tables: [[cell, ...]]."""
    if session.rehearses:
        arguments = ["--rehearse", 1, 16, 128]
    done = session.run(*under, session.program("bench_cuda_kernels"), *arguments, timeout=timeout, env=env)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    return [row for row in rows if not set(row[0]) <= set("-")]


def times(session, batch):
    rows = bench(session, batch)
    return f"{len(rows) - 1} operations: " + ", ".join(f"{row[0]} {row[1]} us" for row in rows[1:4]), rows


COUNTED = ("adaln_kernel", "adaln_grad_kernel", "gated_residual_kernel", "gated_residual_grad_kernel", "gelu_kernel",
           "adamw_kernel")


def counters(session):
    ncu = session.tool("ncu")
    under = [ncu, "--csv", "--set", "detailed", "--kernel-name-base", "function", "--launch-count", 24, "--kernel-name",
             f"regex:^({'|'.join(COUNTED)})$"] if ncu else []
    bench(session, "--once", 32, under=under, timeout=120)
    return f"the counters of {', '.join(COUNTED)} are in output/", None


def algorithms(session):
    rows = bench(session, "--algorithms", 32)
    return "; ".join(" ".join(row) for row in rows[1:4]), rows


def of_a_step(session, model, batch):
    """The time of a step by kernel, from the profile of two of them."""
    kind = "cpu_op" if session.rehearses else "kernel"
    chosen = training_options(session) if session.rehearses else [
        "--model", model, "--data", "synthetic", "--global-batch", batch, "--checkpoint-every", 0, "--no-checkpoint",
        "--no-tensorboard"]
    with scratch() as folder:
        session.run(session.program("kiln"), "train", *chosen, "--device", session.device, "--compute-dtype", "bf16",
                    "--max-steps", 6, "--profile", "5:6", "--ema-decay", "none", "--out", folder / "run", timeout=120)
        traces = list((folder / "run").glob("profile-*.json"))
        if not traces:
            raise Failed("no profile was written")
        trace = json.loads(traces[0].read_text())
    total = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == kind:
            total[event["name"]] = total.get(event["name"], 0) + event["dur"] / 2e3
    if not total:
        raise Failed("the profile holds no kernel", {"events": len(trace["traceEvents"])})
    whole = sum(total.values())
    longest = sorted(total.items(), key=lambda item: -item[1])[:25]
    text = ", ".join(f"{name.split('(')[0].split('<')[0][-40:]} {100 * ms / whole:.0f} %" for name, ms in longest[:6])
    return f"{whole:.1f} ms of kernels a step: {text}", {"ms": dict(longest), "all_ms": whole}
