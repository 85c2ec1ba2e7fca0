#!/usr/bin/env python3
"""Runs what scripts/gpu build has packed, on a machine with torch 2.11 and an NVIDIA GPU.

    run correct | speed | calibrate [--out DIR] [--minutes N]

Prints a line per check, and writes DIR/<run>.json and DIR/<run>.md. The exit status is 1 when a check failed.
Needs python3 alone; what times torch itself (gpu_torch.py) runs in processes of its own.
"""
import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEER_REPOSITORIES = {"dit": "dit", "dit-compile": "dit", "fast-dit": "fast-dit"}


class Failed(Exception):
    """A check's condition does not hold."""


class NotRun(Exception):
    """A check lacks what it needs here."""


def refuse(text):
    sys.exit(f"gpu: {text}")


def environment():
    """The environment of the packed programs. Refuses where torch 2.11 or a library is missing."""
    found = importlib.util.find_spec("torch")
    if not found or not found.origin:
        refuse(f"there is no torch in {sys.executable}: install torch==2.11.0, or call this with a Python that has it")
    torch = Path(found.origin).parent
    version = (torch / "version.py").read_text()
    if "'2.11." not in version:
        refuse(f"the programs are linked to torch 2.11, {torch} is another: install torch==2.11.0")
    wheels = sorted((torch.parent / "nvidia").glob("*/lib"))
    env = dict(os.environ)
    before = env.get("LD_LIBRARY_PATH")
    folders = [HERE / "lib", torch / "lib", *wheels] + ([before] if before else [])
    env["LD_LIBRARY_PATH"] = ":".join(map(str, folders))
    env["PYTHONPATH"] = ":".join(filter(None, [str(HERE / "python"), env.get("PYTHONPATH")]))
    for program in ("kiln", "test_cuda"):
        lines = subprocess.run(["ldd", HERE / program], env=env, capture_output=True, text=True).stdout.splitlines()
        missing = [line.split()[0] for line in lines if "not found" in line]
        if missing:
            refuse(f"{program} does not find {', '.join(missing)}: the pack is of another system")
    started = subprocess.run([HERE / "kiln", "--help"], env=env, capture_output=True, text=True)
    if started.returncode:
        refuse(f"kiln does not start: {last_line(started.stderr)}")
    return env


def find_gpu(env):
    """What nvidia-smi says of the first GPU."""
    fields = ["name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    except FileNotFoundError:
        refuse("no GPU: there is no nvidia-smi here")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        refuse(f"no GPU: nvidia-smi says: {last_line(done.stderr + done.stdout)}")
    return dict(zip(fields, map(str.strip, lines[0].split(","))))


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1] if lines else "nothing"


class Session:
    """The checks of a run: what they need, and what they found."""

    def __init__(self, kind, out, minutes, env, gpu):
        self.kind, self.out, self.env, self.gpu = kind, out, env, gpu
        self.device = "cuda"
        self.deadline = time.monotonic() + 60 * minutes
        self.checks = []
        out.mkdir(parents=True, exist_ok=True)

    def seconds_left(self):
        return self.deadline - time.monotonic()

    def check(self, name, function, *arguments):
        """Runs function(session, *arguments) -> (summary, details), prints its line and keeps it."""
        begin, details = time.monotonic(), None
        try:
            if self.seconds_left() < 10:
                raise NotRun("no time is left")
            summary, details = function(self, *arguments)
            state = "ok"
        except NotRun as reason:
            state, summary = "not run", str(reason)
        except Failed as reason:
            state, summary = "FAILED", str(reason)
        except subprocess.TimeoutExpired as reason:
            state, summary = "FAILED", f"took longer than {reason.timeout:.0f} s"
        seconds = round(time.monotonic() - begin, 1)
        self.checks.append({"name": name, "state": state, "summary": summary, "seconds": seconds, "details": details})
        print(f"{state:<8}{name}: {summary} ({seconds} s)", flush=True)
        self.write()

    def run(self, *command, timeout=None, check=True):
        timeout = min(timeout or 1e9, max(1, self.seconds_left()))
        done = subprocess.run([str(part) for part in command], env=self.env, capture_output=True, text=True,
                              timeout=timeout)
        if check and done.returncode:
            raise Failed(f"{Path(str(command[0])).name} ended with {done.returncode}: {last_line(done.stderr or done.stdout)}")
        return done

    def torch(self, what, *arguments, timeout=300):
        """The JSON that gpu_torch.py prints."""
        done = self.run(sys.executable, HERE / "gpu_torch.py", what, *arguments, timeout=timeout)
        return json.loads(last_line(done.stdout))

    def write(self):
        result = {"run": self.kind, "date": time.strftime("%Y-%m-%d %H:%M"), "gpu": self.gpu, "checks": self.checks}
        (self.out / f"{self.kind}.json").write_text(json.dumps(result, indent=1) + "\n")
        lines = [f"# scripts/gpu run {self.kind}", "", f"{result['date']}, " + ", ".join(self.gpu.values()), "",
                 "| check | | |", "|---|---|---|"]
        lines += [f"| {c['name']} | {c['state']} | {c['summary'].replace('|', '/')} |" for c in self.checks]
        (self.out / f"{self.kind}.md").write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def scratch():
    with tempfile.TemporaryDirectory(prefix="kiln-gpu-") as folder:
        yield Path(folder)


# --- correct


def ceilings(session):
    found = session.torch("ceilings")
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items()), found


def gtests(session, test_filter, *under, timeout=240):
    """The CUDA tests, perhaps under another program."""
    with scratch() as folder:
        report = folder / "report.xml"
        done = session.run(*under, HERE / "test_cuda", "--gtest_brief=1", f"--gtest_filter={test_filter}",
                           f"--gtest_output=xml:{report}", timeout=timeout, check=False)
        if not report.exists():
            raise Failed(f"test_cuda ended with {done.returncode}: {last_line(done.stderr or done.stdout)}")
        tests = {f"{test.get('classname')}.{test.get('name')}": test
                 for test in xml.etree.ElementTree.parse(report).iter("testcase")}
    failed = [name for name, test in tests.items() if test.find("failure") is not None]
    skipped = {name: test.find("skipped").get("message") for name, test in tests.items()
               if test.find("skipped") is not None}
    details = {"failed": failed, "skipped": skipped, "output": (done.stdout + done.stderr)[-8000:] if failed else ""}
    if failed or done.returncode:
        raise Failed(f"{len(failed)} of {len(tests)} failed: {', '.join(failed[:8]) or last_line(done.stderr or done.stdout)}")
    return f"{len(tests) - len(skipped)} passed, {len(skipped)} skipped", details


def sanitized(session, tool):
    program = shutil.which("compute-sanitizer", path=session.env["PATH"] + ":/usr/local/cuda/bin")
    if not program:
        raise NotRun("there is no compute-sanitizer here")
    return gtests(session, "*CudaKernels*", program, "--tool", tool, "--error-exitcode", "7")


TRAINED = ["--model", "DiT-S/8", "--data", "synthetic", "--max-steps", "20", "--global-batch", "8", "--log-every", "1",
           "--checkpoint-every", "0", "--no-tensorboard", "--seed", "3", "--lr", "3e-4", "--max-grad-norm", "1"]
COMPARED = ("loss", "loss_quartiles", "grad_norm", "lr")


def log_of(run):
    """{step: its numbers} of a run folder; a step that was repeated after a kill counts once, as it was last."""
    path = run / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: {key: line[key] for key in COMPARED} for line in lines if "loss" in line}


def train(session, folder, name, *options):
    run = folder / name
    session.run(HERE / "kiln", "train", *TRAINED, "--out", run, *options, timeout=180)
    log = log_of(run)
    shutil.rmtree(run)
    steps = int(TRAINED[TRAINED.index("--max-steps") + 1])
    if len(log) != steps:
        raise Failed(f"{name} logged {len(log)} steps of {steps}")
    return log


def worst_difference(a, b):
    """The largest relative difference of losses and norms, and its step."""
    worst, where = 0.0, None
    for step, line in a.items():
        for key in ("loss", "grad_norm"):
            difference = abs(line[key] - b[step][key]) / abs(b[step][key])
            if difference > worst:
                worst, where = difference, f"{key} of step {step}"
    return worst, where


def as_on_the_cpu(session, dtype, allowed):
    with scratch() as folder:
        logs = [train(session, folder, device, "--device", device, "--compute-dtype", dtype)
                for device in ("cpu", session.device)]
    worst, where = worst_difference(logs[1], logs[0])
    if worst > allowed:
        raise Failed(f"{where} differs by {worst:.2g}, allowed {allowed}")
    return f"losses and norms of {len(logs[0])} steps differ by at most {worst:.2g} (allowed {allowed})", {"cpu": logs[0], "cuda": logs[1]}


def killed_and_resumed(session, folder, *options):
    run = folder / "killed"
    command = [HERE / "kiln", "train", *TRAINED, "--checkpoint-every", "5", "--out", run, *options]
    process = subprocess.Popen([str(part) for part in command], env=session.env, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    begin = time.monotonic()
    while process.poll() is None and max(log_of(run), default=0) < 8 and time.monotonic() - begin < 120:
        time.sleep(0.02)
    if process.poll() is not None:
        raise Failed("the run ended before it could be killed")
    process.send_signal(signal.SIGKILL)
    process.wait()
    session.run(*command, timeout=180)
    return log_of(run)


# Memory choices that may not change a bit. {disk}: a folder.
EQUAL_RUNS = {
    "again": [],
    "as a graph": ["--cuda-graph"],
    "recompute": ["--recompute", "all"],
    "activations on the host": ["--offload-activations", "all"],
    "optimizer on the host": ["--offload-optimizer", "cpu"],
    "optimizer on the disk": ["--offload-optimizer", "nvme", "--nvme-path", "{disk}"],
    "stage 3, weights on the host": ["--zero-stage", "3", "--offload-params", "cpu"],
}


def equal_lines(session, dtype):
    fixed = ["--device", session.device, "--compute-dtype", dtype, "--deterministic"]
    different, logs = [], {}
    with scratch() as folder:
        logs["first"] = train(session, folder, "first", *fixed)
        for name, options in EQUAL_RUNS.items():
            options = [option.format(disk=folder) for option in options]
            logs[name] = train(session, folder, name.replace(" ", "-"), *fixed, *options)
        logs["killed and resumed"] = killed_and_resumed(session, folder, *fixed)
    for name, log in logs.items():
        if log != logs["first"]:
            worst, where = worst_difference(log, logs["first"])
            different.append(f"{name} ({where}: {worst:.2g})")
    if different:
        raise Failed(f"other numbers than the first run's: {'; '.join(different)}")
    return f"{len(logs)} runs logged the same numbers", logs["first"]


def correct(session):
    session.check("ceilings", ceilings)
    session.check("allocator", gtests, "CudaAllocator.ReplaysATraining")
    session.check("allocator, all sizes", gtests, "CudaAllocator.ReplaysBlocksOfAllSizes")
    session.check("CUDA tests", gtests, "-CudaAllocator.*")
    session.check("as on the CPU, f32", as_on_the_cpu, "f32", 1e-4)
    session.check("as on the CPU, bf16", as_on_the_cpu, "bf16", 2e-2)
    session.check("equal lines, bf16", equal_lines, "bf16")
    session.check("memcheck", sanitized, "memcheck")
    session.check("racecheck", sanitized, "racecheck")


# --- speed


def probe(session, model, batch, steps, *options):
    done = session.run(HERE / "kiln", "probe", "--json", "--no-checkpoint", "--model", model, "--data", "synthetic", "--device",
                       "cuda", "--compute-dtype", "bf16", "--global-batch", batch, "--micro-batch", batch, "--steps",
                       steps, "--loader-threads", "8", *options, timeout=180)
    return json.loads(done.stdout)


def speed_of(session, model, batch, steps, *options):
    result = probe(session, model, batch, steps, *options)
    measured, predicted = result["measured"], result["predicted"] or {}
    text = f"{measured['images_per_s']:.1f} images/s, {measured['tflops']:.0f} TFLOP/s"
    if "mfu" in measured:
        text += f", MFU {100 * measured['mfu']:.1f} %"
    text += f", peak {measured['peak_bytes'] / 2**30:.2f} GiB"
    if predicted:
        text += (f"; predicted {predicted['images_per_s']:.1f} images/s, {predicted['peak_bytes'] / 2**30:.2f} GiB")
    return text, result


def peer(session, variant, model, batch):
    repository = HERE / "peers" / PEER_REPOSITORIES[variant]
    if not repository.exists():
        raise NotRun(f"the pack holds no {repository.name} (scripts/gpu build --{repository.name} DIR)")
    done = session.run(sys.executable, HERE / "train_dit.py", "--worker", variant, "--worker-repo", repository, "--model",
                       model, "--batch", batch, "--device", "cuda", "--steps", 10, "--warmup", 5, timeout=240)
    found = json.loads(last_line(done.stdout))
    return f"{found['images_per_s']:.1f} images/s, peak {found['peak_bytes'] / 2**30:.2f} GiB", found


def kernels(session, model, batch):
    """The time of a step by kernel, from the profile of two of them."""
    with scratch() as folder:
        session.run(HERE / "kiln", "train", "--model", model, "--data", "synthetic", "--device", "cuda", "--compute-dtype",
                    "bf16", "--global-batch", batch, "--max-steps", 6, "--profile", "5-6", "--checkpoint-every", 0,
                    "--no-tensorboard", "--ema-decay", "none", "--out", folder / "run", timeout=180)
        trace = json.loads(next((folder / "run").glob("profile-*.json")).read_text())
    total = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            total[event["name"]] = total.get(event["name"], 0) + event["dur"] / 2e3
    if not total:
        raise Failed("the profile holds no kernel")
    whole = sum(total.values())
    longest = sorted(total.items(), key=lambda item: -item[1])[:25]
    text = ", ".join(f"{name.split('(')[0].split('<')[0][-40:]} {100 * ms / whole:.0f} %" for name, ms in longest[:6])
    return f"{whole:.1f} ms of kernels a step: {text}", {"ms": dict(longest), "all_ms": whole}


def attention(session):
    found = session.torch("attention")
    return ", ".join(f"{name} {value['forward_ms']:.2f} + {value['backward_ms']:.2f} ms" for name, value in found.items()), found


def speed(session):
    session.check("ceilings", ceilings)
    for batch, steps in ((32, 40), (256, 15), (8, 60), (128, 20)):
        session.check(f"DiT-XL/2 bf16, batch {batch}", speed_of, "DiT-XL/2", batch, steps)
    for variant in PEER_REPOSITORIES:
        session.check(f"{variant}, DiT-XL/2, batch 32", peer, variant, "DiT-XL/2", 32)
    session.check("kernels of a step, batch 32", kernels, "DiT-XL/2", 32)
    session.check("attention engines, (32, 16, 256, 72)", attention)
    session.check("DiT-B/2 bf16, batch 256", speed_of, "DiT-B/2", 256, 20)
    session.check("DiT-S/8 bf16, batch 32", speed_of, "DiT-S/8", 32, 100)
    session.check("DiT-S/8 bf16, batch 32, as a graph", speed_of, "DiT-S/8", 32, 100, "--cuda-graph")


# --- calibrate


def calibration(session):
    session.run(HERE / "kiln", "plan", "--calibrate", "--device", "cuda", "--model", "DiT-S/2", timeout=200)
    profiles = list((session.out / "profiles").glob("*.json"))
    if not profiles:
        raise Failed("no profile was written")
    return f"{profiles[0].name} is in {session.out / 'profiles'}", json.loads(profiles[0].read_text())


def calibrate(session):
    session.env["KILN_PROFILES"] = str(session.out.resolve() / "profiles")
    (session.out / "profiles").mkdir(exist_ok=True)
    for when in ("before", "after"):
        if when == "after":
            session.check("calibration", calibration)
        for model, batch in (("DiT-B/2", 64), ("DiT-XL/2", 32)):
            session.check(f"{model}, batch {batch}, {when}", speed_of, model, batch, 20)


RUNS = {"correct": correct, "speed": speed, "calibrate": calibrate}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-results"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9, help="begin no check after so long")
    args = parser.parse_args()
    env = environment()
    session = Session(args.run, Path(args.out), args.minutes, env, find_gpu(env))
    print(", ".join(session.gpu.values()), flush=True)
    RUNS[args.run](session)
    states = [check["state"] for check in session.checks]
    print(f"{states.count('ok')} ok, {states.count('FAILED')} failed, {states.count('not run')} not run: "
          f"{session.out}/{args.run}.md and .json")
    sys.exit(1 if "FAILED" in states else 0)


if __name__ == "__main__":
    main()
