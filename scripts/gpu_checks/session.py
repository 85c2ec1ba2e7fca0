"""A run's session: it starts programs, keeps each check within its time, and keeps what it found, whatever it raises."""
import concurrent.futures
import contextlib
import contextvars
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from . import evidence

BESIDE = Path(__file__).resolve().parents[1]  # the unpacked pack, or scripts/


class Failed(Exception):
    """A check's condition does not hold. `details` is the evidence."""

    def __init__(self, text, details=None):
        super().__init__(text)
        self.details = details


class NotRun(Exception):
    """A check lacks what it needs here."""


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1] if lines else "nothing"


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

    def __init__(self, kind, out, minutes, programs, env, gpu, rehearses=False):
        self.kind, self.out, self.programs = kind, Path(out), programs
        self.env, self.gpu, self.rehearses = env, gpu, rehearses
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
        return self.programs / (stand_ins.get(name, name) if self.rehearses else name)

    def tool(self, name):
        """A program of CUDA's toolkit, as a command's beginning; a rehearsal does without."""
        if self.rehearses:
            return None
        found = shutil.which(name, path=self.env.get("PATH", "") + ":/usr/local/cuda/bin:/opt/cuda/bin")
        if not found:
            raise NotRun(f"there is no {name} here")
        return found

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
        except Exception as error:  # a mistake of a check costs that check alone
            what = "" if isinstance(error, TimeoutError) else f"{type(error).__name__}: "
            summary, details = what + last_line(str(error)), {"traceback": traceback.format_exc()}
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
            evidence.shorten(out)
            evidence.shorten(err)

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

    def script(self, name, *arguments, timeout=120):
        """The JSON that a packed script prints last."""
        done = self.run(sys.executable, BESIDE / name, *arguments, timeout=timeout)
        return json.loads(last_line(done.stdout))

    def write(self):
        evidence.write_report(self)
        evidence.pack(self.folder, self.out / f"{self.kind}.tar.gz")


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
