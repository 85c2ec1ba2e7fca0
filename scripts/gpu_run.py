#!/usr/bin/env python3
"""Runs what scripts/gpu build has packed, on a machine with torch 2.11 and an NVIDIA GPU. Each run begins on a cold
machine, takes at most 7 minutes and leaves one file, DIR/<run>.tar.gz: the checks and all that their programs wrote.

    run first | second | third [--out DIR] [--minutes N] [--failed SUITE,...] [--rehearse]

first: the CUDA tests, the kernels' times and counters, steps against the CPU and against each other. second: suites that
failed, DiT-XL/2 at three batches, a peer. third: variants and algorithms of kernels, and plans before and after a
calibration. Prints a line per check; the exit status is 1 when one failed. Needs python3 alone; what times torch itself
(gpu_torch.py) runs in processes of its own.

--rehearse: every check on the CPU of the machine that compiled, on the emulated kernels where it is about these. Its
numbers mean nothing, and each of its rows says REHEARSAL.
"""
import argparse
import concurrent.futures
import contextlib
import contextvars
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import xml.etree.ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = {"dit-compile": "dit", "dit": "dit", "fast-dit": "fast-dit"}  # in the order in which one is chosen
MOST_BYTES = 16_000_000  # of a run's file
MOST_OUTPUT = 2_000_000  # bytes that are kept of what a program writes


class Failed(Exception):
    """A check's condition does not hold. `details` is the evidence."""

    def __init__(self, text, details=None):
        super().__init__(text)
        self.details = details


class NotRun(Exception):
    """A check lacks what it needs here."""


def refuse(text):
    sys.exit(f"gpu: {text}")


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1] if lines else "nothing"


def environment():
    """The environment of the packed programs. Refuses where torch 2.11 or a library is missing."""
    found = importlib.util.find_spec("torch")
    if not found or not found.origin:
        refuse(f"there is no torch in {sys.executable}: install torch==2.11.0, or call this with a Python that has it")
    torch = Path(found.origin).parent
    version = (torch / "version.py").read_text()
    if "'2.11." not in version:
        refuse(f"the programs are linked to torch 2.11, {torch} is another: install torch==2.11.0")
    env = dict(os.environ)
    before = env.get("LD_LIBRARY_PATH")
    wheels = sorted((torch.parent / "nvidia").glob("*/lib"))
    env["LD_LIBRARY_PATH"] = ":".join(map(str, [HERE / "lib", torch / "lib", *wheels] + ([before] if before else [])))
    env["PYTHONPATH"] = ":".join(filter(None, [str(HERE / "python"), env.get("PYTHONPATH")]))
    env["CPATH"] = ":".join(map(str, sorted((torch.parent / "nvidia").glob("*/include"))))  # for nvcc
    for program in ("kiln", "test_cuda", "bench_cuda_kernels"):
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


def shorten(path):
    """Leaves the beginning and the end of a file that is too long to be kept."""
    size = path.stat().st_size
    if size <= MOST_OUTPUT:
        return
    with open(path, "rb") as file:
        head = file.read(MOST_OUTPUT // 4)
        file.seek(size - MOST_OUTPUT * 3 // 4)
        tail = file.read()
    path.write_bytes(head + f"\n... {size - MOST_OUTPUT} bytes left out ...\n".encode() + tail)


@contextlib.contextmanager
def limited(seconds):
    """Raises TimeoutError in the main thread after so long, whatever it waits for."""
    def ring(*_):
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Of the check that a thread works for: set when it is over, so that a late thread starts no program any more.
IS_OVER = contextvars.ContextVar("IS_OVER", default=threading.Event())


class Session:
    """The checks of a run: what they need, and what they found. All of it is in one file after each of them."""

    def __init__(self, kind, out, minutes, env, gpu, rehearses=False):
        self.kind, self.out, self.env, self.gpu, self.rehearses = kind, Path(out), env, gpu, rehearses
        self.device = "cpu" if rehearses else "cuda"
        self.failed_suites = []  # to run again, if none are known from the run before
        self.deadline = time.monotonic() + 60 * minutes
        self.checks, self.probes = [], {}
        self.folder = self.out / kind
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "output").mkdir(parents=True)
        self.numbers, self.lock, self.running = itertools.count(1), threading.Lock(), set()

    def seconds_left(self):
        return self.deadline - time.monotonic()

    def program(self, name):
        """Where a program is: in the pack, or what stands for it in the build."""
        stand_ins = {"test_cuda": "tests/test_cuda_emulation", "bench_cuda_kernels": "benchmarks/bench_cuda_kernels"}
        return HERE / (stand_ins.get(name, name) if self.rehearses else name)

    def check(self, name, function, *arguments, limit=240):
        """Runs function(session, *arguments) -> (summary, details), prints its line and keeps it, whatever it raises."""
        begin, details, state = time.monotonic(), None, "FAILED"
        before = IS_OVER.set(threading.Event())
        name = f"REHEARSAL: {name}" if self.rehearses else name
        try:
            if self.seconds_left() < 10:
                raise NotRun("no time is left")
            with limited(min(limit, self.seconds_left())):
                summary, details = function(self, *arguments)
            state = "ok"
        except NotRun as reason:
            state, summary = "not run", str(reason)
        except Failed as failure:
            summary, details = str(failure), failure.details
        except TimeoutError as reason:
            summary, details = str(reason), {"traceback": traceback.format_exc()}
        except Exception as error:  # a mistake of a check costs that check alone
            summary, details = f"{type(error).__name__}: {last_line(str(error))}", {"traceback": traceback.format_exc()}
        finally:
            self.end_programs()
            IS_OVER.reset(before)
        seconds = round(time.monotonic() - begin, 1)
        self.checks.append({"name": name, "state": state, "summary": summary, "seconds": seconds, "details": details})
        print(f"{state:<8}{name}: {summary} ({seconds} s)", flush=True)
        self.write()

    def end_programs(self):
        with self.lock:
            IS_OVER.get().set()
            running = list(self.running)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def started(self, *command, env=None):
        """A program of which the whole output is kept: (process, its number in the results)."""
        command = [str(part) for part in command]
        number = f"{next(self.numbers):03}-{Path(command[0]).name}"
        out, err = (self.folder / "output" / f"{number}.{kind}" for kind in ("out", "err"))
        begin, status = time.monotonic(), "did not start"
        try:
            with open(out, "wb") as out_file, open(err, "wb") as err_file, self.lock:
                if IS_OVER.get().is_set():
                    raise NotRun("the check is over")
                process = subprocess.Popen(command, env={**self.env, **(env or {})}, stdout=out_file, stderr=err_file,
                                           start_new_session=True)
                self.running.add(process)
            try:
                yield process, number
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = process.returncode
                with self.lock:
                    self.running.discard(process)
        finally:
            with self.lock, open(self.folder / "commands.txt", "a") as file:
                variables = " ".join(f"{key}={value}" for key, value in (env or {}).items())
                file.write(f"{number}: {variables} {' '.join(command)}: {status}, {time.monotonic() - begin:.1f} s\n")
            shorten(out)
            shorten(err)

    def text(self, number, kind):
        return (self.folder / "output" / f"{number}.{kind}").read_text(errors="replace")

    def run(self, *command, timeout=None, check=True, env=None):
        limit = max(1, min(timeout or 1e9, self.seconds_left()))
        name = Path(str(command[0])).name
        with self.started(*command, env=env) as (process, number):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
            is_late = process.poll() is None
        done = subprocess.CompletedProcess(command, process.returncode, self.text(number, "out"), self.text(number, "err"))
        if is_late:
            raise Failed(f"{name} took longer than {limit:.0f} s", {"output": number})
        if check and done.returncode:
            why = last_line(done.stderr or done.stdout)
            raise Failed(f"{name} ended with {done.returncode}: {why}", {"output": number})
        return done

    def torch(self, what, timeout=120):
        """The JSON that gpu_torch.py prints."""
        beside = Path(__file__).resolve().parent
        done = self.run(sys.executable, beside / "gpu_torch.py", what, self.device, timeout=timeout)
        return json.loads(last_line(done.stdout))

    def write(self):
        result = {"run": self.kind, "date": time.strftime("%Y-%m-%d %H:%M"), "gpu": self.gpu, "rehearsal": self.rehearses,
                  "checks": self.checks}
        (self.folder / f"{self.kind}.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
        lines = [f"# scripts/gpu run {self.kind}{': REHEARSAL' if self.rehearses else ''}", "",
                 f"{result['date']}, " + ", ".join(self.gpu.values()), "", "| check | | |", "|---|---|---|"]
        lines += [f"| {c['name']} | {c['state']} | {c['summary'].replace('|', '/')} |" for c in self.checks]
        (self.folder / f"{self.kind}.md").write_text("\n".join(lines) + "\n")
        self.pack()

    def pack(self):
        """Writes the run's one file, without the longest outputs if it would be too large."""
        path = self.out / f"{self.kind}.tar.gz"
        outputs = sorted((self.folder / "output").iterdir(), key=lambda file: -file.stat().st_size)
        while True:
            with tarfile.open(f"{path}.part", "w:gz", compresslevel=3) as archive:
                archive.add(self.folder, self.kind)
            if os.path.getsize(f"{path}.part") <= MOST_BYTES or not outputs:
                break
            outputs.pop(0).write_text("left out: the file of this run would be too large\n")
        os.replace(f"{path}.part", path)


@contextlib.contextmanager
def scratch():
    with tempfile.TemporaryDirectory(prefix="kiln-gpu-") as folder:
        yield Path(folder)


def side_by_side(jobs, at_once=4):
    """{name: what the job returned or raised} of {name: function}."""
    def attempt(job):
        try:
            return job()
        except Exception as error:  # as in Session.check
            return error

    pool = concurrent.futures.ThreadPoolExecutor(at_once)
    try:
        answers = [pool.submit(contextvars.copy_context().run, attempt, job) for job in jobs.values()]
        return {name: answer.result() for name, answer in zip(jobs, answers)}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Session.check ends the programs that others wait for


# --- first


def ceilings(session):
    found = session.torch("ceilings")
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items()), found


def suites(session):
    """The CUDA tests, divided into processes: an access that is not allowed ends all that follow in its process. Tests of
    the allocator have one each, since they need an allocator that has served nothing."""
    listed, suite = [], None
    for line in session.run(session.program("test_cuda"), "--gtest_list_tests", timeout=60).stdout.splitlines():
        if re.match(r"[\w/]+\.(\s|$)", line):
            suite = line.split(".")[0]
            listed += [f"{suite}.*"] if not suite.startswith("CudaAllocator") else []
        elif suite and suite.startswith("CudaAllocator") and line.startswith("  "):
            listed.append(f"{suite}.{line.split()[0]}")
    return listed


def gtests(session, test_filter, *under, env=None, timeout=180):
    """Some CUDA tests, perhaps under another program: {"tests", "failed", "skipped"}."""
    with scratch() as folder:
        report = folder / "report.xml"
        done = session.run(*under, session.program("test_cuda"), "--gtest_brief=1", f"--gtest_filter={test_filter}",
                           f"--gtest_output=xml:{report}", timeout=timeout, check=False, env=env)
        if not report.exists():
            raise Failed(f"test_cuda ended with {done.returncode}: {last_line(done.stderr or done.stdout)}")
        tests = {f"{test.get('classname')}.{test.get('name')}": test
                 for test in xml.etree.ElementTree.parse(report).iter("testcase")}
    skipped = {name: test.find("skipped").get("message") for name, test in tests.items() if test.find("skipped") is not None}
    found = {"tests": len(tests), "skipped": skipped,
             "failed": [name for name, test in tests.items() if test.find("failure") is not None]}
    if found["failed"] or done.returncode:
        named = ", ".join(found["failed"][:8]) or last_line(done.stderr or done.stdout)
        raise Failed(f"{len(found['failed'])} of {len(tests)} failed: {named}", found)
    return found


def all_tests(session, chosen=None, env=None):
    chosen = suites(session) if chosen is None else chosen
    found = side_by_side({name: lambda name=name: gtests(session, name, env=env) for name in chosen})
    failed = {name: str(error) for name, error in found.items() if isinstance(error, Exception)}
    details = {"failed_suites": failed, "suites": {name: getattr(value, "details", None) if name in failed else value
                                                   for name, value in found.items()}}
    if failed:
        raise Failed(f"{len(failed)} of {len(found)} suites failed: {'; '.join(f'{k}: {v}' for k, v in failed.items())}", details)
    num_skipped = sum(len(value["skipped"]) for value in found.values())
    num_tests = sum(value["tests"] for value in found.values())
    return f"{num_tests - num_skipped} passed, {num_skipped} skipped, in {len(found)} processes", details


def bench(session, *arguments, under=(), env=None, timeout=90):
    """The rows of bench_cuda_kernels' tables: [[cell, ...]]."""
    if session.rehearses:
        arguments = ["--rehearse", 1, 16, 128]
    done = session.run(*under, session.program("bench_cuda_kernels"), *arguments, timeout=timeout, env=env)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    return [row for row in rows if not set(row[0]) <= set("-")]


def kernel_table(session, batch):
    rows = bench(session, batch)
    return f"{len(rows) - 1} operations: " + ", ".join(f"{row[0]} {row[1]} us" for row in rows[1:4]), rows


COUNTED = ("adaln_kernel", "adaln_grad_kernel", "gated_residual_kernel", "gated_residual_grad_kernel", "gelu_kernel",
           "adamw_kernel")


def tool(session, name):
    """A program of CUDA's toolkit, as a command's beginning; a rehearsal does without."""
    if session.rehearses:
        return None
    found = shutil.which(name, path=session.env.get("PATH", "") + ":/usr/local/cuda/bin:/opt/cuda/bin")
    if not found:
        raise NotRun(f"there is no {name} here")
    return found


def counters(session):
    ncu = tool(session, "ncu")
    under = [ncu, "--csv", "--set", "detailed", "--kernel-name-base", "function", "--launch-count", 24, "--kernel-name",
             f"regex:^({'|'.join(COUNTED)})$"] if ncu else []
    bench(session, "--once", 32, under=under, timeout=120)
    return f"the counters of {', '.join(COUNTED)} are in output/", None


TRAINED = ["--model", "DiT-S/8", "--data", "synthetic", "--max-steps", "20", "--global-batch", "8", "--log-every", "1",
           "--checkpoint-every", "0", "--no-checkpoint", "--no-tensorboard", "--seed", "3", "--lr", "3e-4", "--max-grad-norm", "1"]
REHEARSED = ["--model", "dit", "--hidden-size", "48", "--depth", "2", "--num-heads", "3", "--patch-size", "8", "--num-classes",
             "10", "--data", "synthetic", "--max-steps", "20", "--global-batch", "4", "--log-every", "1", "--checkpoint-every",
             "0", "--no-checkpoint", "--no-tensorboard", "--no-preflight", "--peak-tflops", "1", "--threads", "1"]
COMPARED = ("loss", "loss_quartiles", "grad_norm", "lr")


def training(session):
    return REHEARSED if session.rehearses else TRAINED


def log_of(run):
    """{step: its numbers} of a run folder; a step that was repeated after a kill counts once, as it was last."""
    path = run / "log.jsonl"
    written = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [json.loads(line) for line in written if line.endswith("\n")]  # a run that goes on may be in the middle of one
    return {line["step"]: {key: line[key] for key in COMPARED} for line in lines if "loss" in line}


def train(session, folder, name, *options):
    run = folder / name.replace(" ", "-").replace(",", "")
    session.run(session.program("kiln"), "train", *training(session), "--out", run, *options, timeout=120)
    log = log_of(run)
    steps = int(TRAINED[TRAINED.index("--max-steps") + 1])
    if len(log) != steps:
        raise Failed(f"{name} logged {len(log)} steps of {steps}", log)
    return log


def worst_difference(a, b):
    """The largest relative difference of losses and norms, and its step. A number that is missing is the largest."""
    worst, where = 0.0, None
    for step, line in a.items():
        for key in ("loss", "grad_norm"):
            one, other = line[key], b.get(step, {}).get(key)
            difference = abs(one - other) / abs(other) if one is not None and other else 0.0 if one == other else float("inf")
            if difference > worst:
                worst, where = difference, f"{key} of step {step}"
    return worst, where


def as_on_the_cpu(session, dtype, allowed):
    with scratch() as folder:
        logs = [train(session, folder, f"{device} {number}", "--device", device, "--compute-dtype", dtype)
                for number, device in enumerate(("cpu", session.device))]
    details = {"cpu": logs[0], session.device + ", compared": logs[1]}
    worst, where = worst_difference(logs[1], logs[0])
    if worst > allowed:
        raise Failed(f"{where} differs by {worst:.2g}, allowed {allowed}", details)
    return f"losses and norms of {len(logs[0])} steps differ by at most {worst:.2g} (allowed {allowed})", details


def killed_and_resumed(session, folder, *options):
    run = folder / "killed"
    command = [session.program("kiln"), "train", *training(session), "--checkpoint-every", "5", "--out", run, *options]
    begin = time.monotonic()
    with session.started(*command) as (process, number):
        while process.poll() is None and max(log_of(run), default=0) < 8 and time.monotonic() - begin < 90:
            time.sleep(0.02)
        if process.poll() is not None:
            raise Failed("the run ended before it could be killed", {"output": number})
    session.run(*command, timeout=120)  # the first one was killed on leaving
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
    with scratch() as folder:
        def job(name, options):
            options = [option.format(disk=folder) for option in options]
            return lambda: train(session, folder, name, *fixed, *options)

        jobs = {name: job(name, options) for name, options in {"first": [], **EQUAL_RUNS}.items()}
        jobs["killed and resumed"] = lambda: killed_and_resumed(session, folder, *fixed)
        logs = side_by_side(jobs, 2 if session.rehearses else 4)
    different = []
    for name, log in logs.items():
        if isinstance(log, Exception):
            different.append(f"{name}: {log}")
        elif log != logs["first"] and not isinstance(logs["first"], Exception):
            worst, where = worst_difference(log, logs["first"])
            different.append(f"{name} ({where}: {worst:.2g})")
    if different:
        raise Failed(f"other numbers than the first run's: {'; '.join(different)}", logs)
    return f"{len(logs)} runs logged the same numbers", logs["first"]


def first(session):
    session.check("ceilings", ceilings, limit=60)
    session.check("CUDA tests", all_tests)
    for batch in (32, 8, 256):
        session.check(f"kernels at batch {batch}", kernel_table, batch, limit=60)
    session.check("as on the CPU, f32", as_on_the_cpu, "f32", 1e-4, limit=120)
    session.check("as on the CPU, bf16", as_on_the_cpu, "bf16", 2e-2, limit=120)
    session.check("equal lines, bf16", equal_lines, "bf16", limit=180)
    session.check("counters of six kernels", counters, limit=120)


# --- second


def failed_again(session):
    """What failed in the first run, one by one and with each launch waited for."""
    known = list(session.failed_suites)
    before = session.out / "first" / "first.json"
    if not known and before.exists():
        for check in json.loads(before.read_text())["checks"]:
            known += (check["details"] or {}).get("failed_suites", []) if check["name"].endswith("CUDA tests") else []
    if session.rehearses and not known:
        known = suites(session)[:1]
    if not known:
        raise NotRun("no suite is known to have failed (--failed SUITE,...)")
    return all_tests(session, known, {"CUDA_LAUNCH_BLOCKING": "1"})


def probe(session, model, batch, steps, *options):
    if session.rehearses:
        model, batch, steps = "DiT-S/8", 2, 3
        options = [option for option in options if option != "--untried-gpu"]  # which a CPU refuses
        options += ["--threads", "1", "--peak-tflops", "1"]
    done = session.run(session.program("kiln"), "probe", "--json", "--no-checkpoint", "--model", model, "--data", "synthetic",
                       "--device", session.device, "--compute-dtype", "bf16", "--global-batch", batch, "--micro-batch", batch,
                       "--steps", steps, "--loader-threads", "8", *options, timeout=120)
    return json.loads(done.stdout)


def speed_of(session, model, batch, steps, *options):
    result = session.probes[model, batch] = probe(session, model, batch, steps, *options)
    measured, predicted = result["measured"], result["predicted"] or {}
    text = f"{measured['images_per_s']:.1f} images/s, {measured.get('tflops', 0):.0f} TFLOP/s"
    if "mfu" in measured:
        text += f", MFU {100 * measured['mfu']:.1f} %"
    text += f", peak {measured['peak_bytes'] / 2**30:.2f} GiB"
    if predicted:
        text += f"; predicted {predicted['images_per_s']:.1f} images/s, {predicted['peak_bytes'] / 2**30:.2f} GiB"
    if "gpu" in result:
        text += f"; attention: {', '.join(result['gpu']['attention'])}"
    return text, result


def epilogues(session):
    """cuBLASLt must serve every product with an epilogue of the probes."""
    if session.rehearses:
        return f"{gtests(session, 'EpilogueProducts.*')['tests']} tests passed on the emulation", None
    counted = {f"{model}, batch {batch}": result["gpu"]["epilogues"]
               for (model, batch), result in session.probes.items() if "gpu" in result}
    if not counted:
        raise NotRun("no probe of this run has ended")
    plain = ("affine", "grad_rows")  # asked for with --untried-gpu alone
    refused = [f"{name}: {product} refused {counts['refused']} times, served {counts['served']}"
               for name, products in counted.items() for product, counts in products.items()
               if counts["refused"] or not (counts["served"] or product in plain)]
    if refused:
        raise Failed("; ".join(refused), counted)
    return f"all served at {len(counted)} batches", counted


def peer(session):
    beside = Path(__file__).resolve().parent
    for variant, name in PEERS.items():
        repository = beside / "peers" / name
        if repository.exists():
            break
    else:
        raise NotRun("the pack holds no peer (scripts/gpu build --dit DIR)")
    done = session.run(sys.executable, beside / "train_dit.py", "--worker", variant, "--worker-repo", repository, "--model",
                       "DiT-XL/2", "--batch", 32, "--device", session.device, "--steps", 10, "--warmup", 5, timeout=150)
    found = json.loads(last_line(done.stdout))
    return f"{variant}: {found['images_per_s']:.1f} images/s, peak {found['peak_bytes'] / 2**30:.2f} GiB", found


def kernels(session, model, batch):
    """The time of a step by kernel, from the profile of two of them."""
    kind = "cpu_op" if session.rehearses else "kernel"
    chosen = training(session) if session.rehearses else ["--model", model, "--data", "synthetic", "--global-batch", batch,
                                                         "--checkpoint-every", 0, "--no-checkpoint", "--no-tensorboard"]
    with scratch() as folder:
        session.run(session.program("kiln"), "train", *chosen, "--device", session.device, "--compute-dtype", "bf16",
                    "--max-steps", 6, "--profile", "5-6", "--ema-decay", "none", "--out", folder / "run", timeout=120)
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


def attention(session):
    found = session.torch("attention")
    return ", ".join(f"{name} {value['forward_ms']:.2f} + {value['backward_ms']:.2f} ms" for name, value in found.items()), found


# Tests of kernels that are Kiln's own: in cuBLASLt's, cuDNN's and fp8's products the sanitizer finds NVIDIA's.
SANITIZED = "*CudaKernels*-*LinearAndMlp*:*Epilogue*:*Cudnn*:*Attention*:*Fp8*"


def sanitized(session, name):
    sanitizer = tool(session, "compute-sanitizer")
    if not sanitizer:
        found = gtests(session, "EmulatedKernels.Gelu*")
    else:
        found = gtests(session, SANITIZED, sanitizer, "--tool", name, "--report-api-errors", "no", "--error-exitcode", "7")
    return f"{found['tests']} tests", found


def second(session):
    session.check("failed suites again", failed_again, limit=120)
    for batch, steps in ((32, 40), (256, 15), (8, 60)):
        session.check(f"DiT-XL/2 bf16, batch {batch}", speed_of, "DiT-XL/2", batch, steps, limit=120)
    session.check("epilogues served", epilogues)
    session.check("a peer, DiT-XL/2, batch 32", peer, limit=160)
    session.check("kernels of a step, batch 32", kernels, "DiT-XL/2", 32, limit=120)
    session.check("attention engines, (32, 16, 256, 72)", attention, limit=60)
    session.check("memcheck", sanitized, "memcheck", limit=120)
    session.check("racecheck", sanitized, "racecheck", limit=120)


# --- third


def algorithms(session):
    rows = bench(session, "--algorithms", 32)
    return "; ".join(" ".join(row) for row in rows[1:4]), rows


# {name: [(file, what stands there, what is tried)]}: other shapes of the kernels on rows.
VARIANTS = {
    "as built": [],
    "blocks of 8 rows forward": [("adaln.cu", "kRowsPerBlock = 16;", "kRowsPerBlock = 8;"),
                                 ("gated_residual.cu", "kRowsPerBlock = 16;", "kRowsPerBlock = 8;")],
    "2 rows at once forward": [("adaln.cu", "constexpr int kRows = 4;", "constexpr int kRows = 2;"),
                               ("gated_residual.cu", "constexpr int kRows = 4;", "constexpr int kRows = 2;")],
    "1 row at once backward": [("adaln.cu", "kRows = 2, kMostThreads = 192, kLeastBlocks = 2;",
                                "kRows = 1, kMostThreads = 192, kLeastBlocks = 3;")],
    "gelu in blocks of 512": [("gelu.cu", "constexpr int kThreads = 256;", "constexpr int kThreads = 512;")],
}
KERNELS = "libkiln_cuda_kernels.so"  # what the packed programs load


def changed_sources(source, folder, changes):
    """Copies the kernels' sources with some text replaced. Returns the files that differ."""
    shutil.copytree(source, folder)
    for name, old, new in changes:
        path = folder / "ops" / "cuda" / name
        text = path.read_text()
        if text.count(old) != 1:
            raise Failed(f"{name} has {text.count(old)} times: {old}")
        path.write_text(text.replace(old, new))
    return {name for name, _, _ in changes}


def kernel_sources():
    packed = HERE / "src"  # in a build folder a folder of CMake's
    return packed if (packed / "core" / "dtype.h").exists() else Path(__file__).resolve().parents[1] / "src"


def copy_of_kernels(folder):
    """What nvcc needs to compile the kernels."""
    source = kernel_sources()
    for name in ("ops/cuda", "ops/kernel_args.h", "core/dtype.h"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source / name, target) if (source / name).is_dir() else shutil.copy(source / name, target)
    return folder


def variants(session):
    """The kernels' times with other shapes. Only what changed is compiled, and nothing else is linked again."""
    nvcc, times = tool(session, "nvcc"), {}
    if nvcc and KERNELS not in session.run("ldd", session.program("bench_cuda_kernels")).stdout:
        raise NotRun("bench_cuda_kernels holds its kernels itself, as -DKILN_CUDA=ON builds it")
    with scratch() as folder:
        source = copy_of_kernels(folder / "source")
        objects = {}

        def compiled(name, changes):
            own = folder / name.replace(" ", "-")
            changed = changed_sources(source, own, changes)
            if session.rehearses:
                return None
            files = sorted((own / "ops" / "cuda").glob("*.cu"))
            flags = ["-std=c++17", "-O3", "-arch=native", f"-I{own}", "-Xcompiler", "-fPIC"]
            made = side_by_side({file.name: lambda file=file: session.run(nvcc, *flags, "-c", file, "-o", own / f"{file.name}.o")
                                 for file in files if file.name in changed or not objects}, 16)
            for file, done in made.items():
                if isinstance(done, Exception):
                    raise Failed(f"{name}: {done}", getattr(done, "details", None))
            own_objects = {**objects, **{file: own / f"{file}.o" for file in made}}
            if not objects:
                objects.update(own_objects)
            session.run(nvcc, "-shared", "--cudart", "none", "-Xlinker", f"-soname={KERNELS}", "-o", own / KERNELS, *own_objects.values())
            return {"LD_PRELOAD": str(own / KERNELS)}  # where the program was built, its own path comes before LD_LIBRARY_PATH

        failed = {}
        for name, changes in VARIANTS.items():
            try:
                times[name] = bench(session, 32, env=compiled(name, changes))
            except Failed as failure:
                failed[name] = str(failure)
    details = {"times": times, "failed": failed}
    if failed or not times:
        raise Failed("; ".join(f"{name}: {why}" for name, why in failed.items()), details)
    best = {}
    for name, rows in times.items():
        for row in rows[1:]:
            with contextlib.suppress(ValueError, IndexError):
                best[row[0]] = min(best.get(row[0], (float("inf"), "")), (float(row[1]), name))
    gains = [f"{operation}: {name}" for operation, (_, name) in best.items() if name != "as built"]
    return f"{len(times)} variants; faster than as built: {', '.join(gains[:6]) or 'none'}", details


def calibration(session):
    chosen = ["--model", "DiT-S/8", "--calibrate-seconds", "5"] if session.rehearses else ["--model", "DiT-S/2"]
    session.run(session.program("kiln"), "plan", "--calibrate", "--device", session.device, *chosen, timeout=150)
    profiles = list((session.folder / "profiles").glob("*.json"))
    if not profiles:
        raise Failed("no profile was written")
    return f"profiles/{profiles[0].name}", None


UNTRIED = "--untried-gpu"


def untried_lines(session):
    """In f32 --untried-gpu times no products, and the bits stay. In bf16 products are timed: a run that is killed and
    resumed gives the bits of one that was not, if both begin with the same choices."""
    if session.rehearses:
        return f"{gtests(session, 'TimedProducts.*')['tests']} tests passed on the emulation", None
    f32, bf16 = (["--device", session.device, "--deterministic", "--compute-dtype", dtype] for dtype in ("f32", "bf16"))
    with scratch() as folder:
        pairs = {"f32, with and without": [train(session, folder, "with", *f32, UNTRIED), train(session, folder, "without", *f32)]}
        whole = train(session, folder, "whole", *bf16, UNTRIED)
        (folder / "killed").mkdir()
        shutil.copy(folder / "whole" / "gpu-products-0.json", folder / "killed")
        pairs["bf16, killed and resumed"] = [killed_and_resumed(session, folder, *bf16, UNTRIED), whole]
        choices = json.loads((folder / "whole" / "gpu-products-0.json").read_text())["choices"]
    different = [f"{name} ({where}: {worst:.2g})" for name, pair in pairs.items() if pair[0] != pair[1]
                 for worst, where in [worst_difference(*pair)]]
    if different:
        raise Failed(f"other numbers: {'; '.join(different)}", {"logs": pairs, "choices": choices})
    gain = sum(choice["first_us"] for choice in choices) / sum(choice["us"] for choice in choices)
    return f"equal; {len(choices)} timed products, {gain:.3f}x as fast as cuBLASLt's first guesses", choices


def third(session):
    session.env["KILN_PROFILES"] = str((session.folder / "profiles").resolve())
    (session.folder / "profiles").mkdir(exist_ok=True)
    session.check("algorithms of products with an epilogue", algorithms, limit=60)
    session.check("equal lines with --untried-gpu", untried_lines, limit=120)
    for options in (["--keep-gelu"], [UNTRIED], ["--keep-gelu", UNTRIED]):
        session.check(f"DiT-XL/2 bf16, batch 32, {' '.join(options)}", speed_of, "DiT-XL/2", 32, 20, *options, limit=60)
    session.check("variants of kernels", variants, limit=150)
    for when in ("before", "after"):
        if when == "after":
            session.check("calibration", calibration, limit=160)
        for model, batch in (("DiT-B/2", 64), ("DiT-XL/2", 32)):
            session.check(f"{model}, batch {batch}, {when}", speed_of, model, batch, 20, limit=60)
    for graph in ([], ["--cuda-graph"]):
        session.check(f"DiT-XL/2 bf16, batch 8{', as a graph' if graph else ''}", speed_of, "DiT-XL/2", 8, 40, *graph, limit=60)


RUNS = {"first": first, "second": second, "third": third}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-results"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=7, help="end all checks after so long")
    parser.add_argument("--failed", default="", help="second: suites to run again, if the first run's results are not in --out")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, where scripts/gpu build has compiled")
    args = parser.parse_args()
    if args.rehearse:
        global HERE
        HERE = Path(os.environ.get("KILN_BUILD", Path(__file__).resolve().parents[1] / "build"))
        env, gpu = dict(os.environ), {"name": "REHEARSAL, no GPU"}
    else:
        env = environment()
        gpu = find_gpu(env)
    session = Session(args.run, args.out, args.minutes, env, gpu, args.rehearse)
    session.failed_suites = [suite for suite in args.failed.split(",") if suite]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(", ".join(session.gpu.values()), flush=True)
    try:
        RUNS[args.run](session)
    finally:
        session.end_programs()
        session.write()
    states = [check["state"] for check in session.checks]
    print(f"{'REHEARSAL: ' if args.rehearse else ''}{states.count('ok')} ok, {states.count('FAILED')} failed, "
          f"{states.count('not run')} not run: {session.out}/{args.run}.tar.gz")
    sys.exit(1 if "FAILED" in states else 0)


if __name__ == "__main__":
    main()
