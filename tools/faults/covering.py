"""Which tests reach which fault, and which of them see it.

A test is "PROGRAM:Suite.Test" of the C++ tests, "FILE::test" of tests/reference, or a whole FILE of tests/paths and
tests/stations, whose tests go on from one another.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
# A fault may ask for any amount of memory, or fill the disk.
MOST_MEMORY, MOST_FILE = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.6), 16 << 30

MARKS = "not nothing_beside"
QUICK_MARKS = f"{MARKS} and not slow"  # of scripts/test without --ci

Outcome = namedtuple("Outcome", "passed failed reached seconds")  # {test: seconds}, [test], {test: faults}, of all


def group_of(test):
    """The program or file of a test."""
    return test.partition("::" if test.startswith("tests/") else ":")[0]


def all_groups(copy):
    files = [*copy.glob("tests/reference/test_*.py"), *copy.glob("tests/paths/test_*.py"), *copy.glob("tests/stations/test_*.py")]
    programs = [path.name for path in copy.glob("build/tests/test_*") if path.is_file() and os.access(path, os.X_OK)]
    return sorted(programs) + sorted(str(path.relative_to(copy)) for path in files)


def run_tests(copy, group, tests=None, fault=0, timeout=3600, until_first=False, marks=MARKS):
    """Runs tests of one group, or all of them, in a process of their own. Those that time something are left out."""
    records = Path(tempfile.mkdtemp(prefix="faults-"))
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(records),
                                "KILN_BUILD": str(copy / "build"), "KILN_FAULT": str(fault), "KILN_FAULT_RECORDS": str(records)}
    if group.startswith("tests/"):
        environment["PYTHONPATH"] = str(HERE)
        command = [copy / ".venv/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_records", "--rootdir", copy,
                   "-m", marks, "--basetemp", records / "base", *["-x"] * until_first, *(tests or [group])]
    else:
        environment["KILN_FAULT_MAP"] = str(records / "all")
        names = ":".join(test.partition(":")[2] for test in tests or ["every:*"])
        command = [copy / "build/tests" / group, *["--gtest_fail_fast"] * until_first, f"--gtest_filter={names}",
                   f"--gtest_output=json:{records}/tests.json"]
    limits = ["prlimit", f"--data={MOST_MEMORY}", f"--fsize={MOST_FILE}", "--core=0", "env", "--default-signal=INT"]
    begun = time.monotonic()
    with open(records / "says", "w") as says:
        process = subprocess.Popen(limits + command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=says,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        ended = process.poll()
        try:  # what it started and left behind, too
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    passed, failed, reached = {}, {}, defaultdict(set)
    for test, outcome, seconds, maps in (read_pytest if group.startswith("tests/") else read_gtest)(group, records):
        if outcome == "failed":
            failed[test] = True
        elif outcome == "passed":
            passed[test] = passed.get(test, 0.0) + seconds
            reached[test].update(fault for path in maps if path.exists() for fault, mark in enumerate(path.read_bytes()) if mark)
    if ended not in (0, 5) and not failed:  # 5: pytest found no test; otherwise it ended before it could name one
        failed = dict.fromkeys(tests or [group])
    shutil.rmtree(records, ignore_errors=True)
    passed = {test: seconds for test, seconds in passed.items() if test not in failed}
    return Outcome(passed, list(failed), reached, time.monotonic() - begun)


def read_gtest(group, records):
    """(test, outcome, seconds, maps) of each test."""
    try:
        suites = json.loads((records / "tests.json").read_text())["testsuites"]
    except (OSError, ValueError):  # it crashed, or it was ended
        begun = re.findall(r"^\[ RUN      \] (\S+)", (records / "says").read_text(errors="replace"), re.MULTILINE)
        yield from ((f"{group}:{name}", "failed", 0.0, []) for name in begun[-1:])
        return
    for test in (test for suite in suites for test in suite["testsuite"] if test.get("result") == "COMPLETED"):
        name = f"{test['classname']}.{test['name']}"
        outcome = "failed" if test.get("failures") else "passed"
        maps = [records / f"all~{name.replace('/', '!')}", records / "all"]
        yield f"{group}:{name}", outcome, float(test["time"].rstrip("s")), maps


def read_pytest(group, records):
    path = records / "records.jsonl"
    ends = {line["test"]: line for line in map(json.loads, path.read_text().splitlines() if path.exists() else [])}
    for name, line in ends.items():
        test = name if name.startswith("tests/reference/") else group
        # Without an outcome it began and did not end.
        yield test, line.get("outcome", "failed"), line.get("seconds", 0.0), [Path(line.get("map", ""))]


def make_map(copy, faults, say, groups=(), known=None):
    """{"tests": {test: seconds}, "start": {group: seconds}, "faults": {id: its tests}}, with what is known and of no such group."""
    known = known or {"tests": {}, "start": {}, "faults": {}}
    groups, again = groups or all_groups(copy), []
    seconds, start = known["tests"], known["start"]
    covering = {str(fault): [test for test in known["faults"].get(str(fault), []) if group_of(test) not in groups] for fault in faults}

    def take(outcome):
        seconds.update(outcome.passed)
        for test in outcome.passed:
            for fault in outcome.reached[test] & set(faults):
                covering[str(fault)].append(test)

    with ThreadPoolExecutor(2) as pool:
        for group, outcome in zip(groups, pool.map(lambda group: run_tests(copy, group), groups)):
            take(outcome)
            start[group] = max(0.0, outcome.seconds - sum(outcome.passed.values()))
            say(f"{group}: {len(outcome.passed)} passed in {outcome.seconds:.0f} s, {len(outcome.failed)} failed")
            again += [(group, outcome.failed)] if outcome.failed else []
    for group, tests in again:  # alone: some fail only where another program is busy
        outcome = run_tests(copy, group, None if tests == [group] else tests)
        take(outcome)
        for test in outcome.failed:
            say(f"{test} fails without any fault: left out")
    return {"tests": seconds, "start": start, "faults": covering}


def results_of(copy, quick):
    return copy / ("results-quick.json" if quick else "results.json")


class Runs:
    """Runs of faults against the tests that reach them, and results.json, from which they go on after an interruption."""

    def __init__(self, copy, say, anew=(), quick=False):
        self.copy, self.say, self.lock, self.quick = copy, say, threading.Lock(), quick
        self.path = results_of(copy, quick)
        self.map = json.loads((copy / "map.json").read_text())
        results = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.results = {fault: result for fault, result in results.items() if int(fault) not in anew}

    def note(self, fault, **what):
        with self.lock:
            self.results.setdefault(str(fault), {"passed": [], "seconds": 0.0}).update(what)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.results, indent=1) + "\n")
            part.rename(self.path)
            return self.results[str(fault)]

    def cost(self, group, tests):
        return self.map["start"].get(group, 0.0) + sum(self.map["tests"][test] for test in tests)

    def first_that_sees(self, fault, group, tests):
        """The first test that fails with the fault and passes without it, or None."""
        while tests:
            timeout = 60 + 6 * self.cost(group, tests)
            marks = QUICK_MARKS if self.quick else MARKS
            failed = run_tests(self.copy, group, tests, fault, timeout, until_first=True, marks=marks).failed
            if not failed:
                return None
            failed = failed[:1] if set(failed) <= set(tests) else tests
            if not run_tests(self.copy, group, failed, 0, timeout).failed:
                return failed[0]
            self.say(f"{fault:3d}  {failed[0]} fails without the fault as well: it does not count")
            tests = [test for test in tests if test not in failed]

    def try_fault(self, fault, limit, deadline):
        """Runs whole programs and files, the shortest first: to load torch takes longer than most tests do."""
        groups, begun = defaultdict(list), time.monotonic()
        for test in self.map["faults"].get(str(fault), []):
            if not (self.quick and test.startswith(("tests/paths/", "tests/stations/", "test_cuda"))):
                groups[group_of(test)].append(test)
        result = self.note(fault, state="unfinished" if groups else "not covered")
        before = result["seconds"]
        for group, tests in sorted(groups.items(), key=lambda item: self.cost(*item)):
            if group in result["passed"]:
                continue
            if time.monotonic() > min(begun + limit, deadline):
                return
            seen_by = self.first_that_sees(fault, group, tests)
            result = self.note(fault, seconds=before + time.monotonic() - begun, passed=result["passed"] + [group] * (not seen_by))
            if seen_by:
                self.note(fault, state="seen", by=seen_by)
                return self.say(f"{fault:3d}  seen by {seen_by}")
        if groups:
            self.note(fault, state="missed")
        self.say(f"{fault:3d}  {'missed by all of ' + ', '.join(groups) if groups else 'not covered by any test'}")

    def run(self, faults, hours, limit):
        deadline = time.monotonic() + hours * 3600
        for most in (limit, float("inf")):  # first each has its share of the time, then those that need more
            left = [fault for fault in faults if self.results.get(str(fault), {}).get("state", "unfinished") == "unfinished"]
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda fault: self.try_fault(fault, most, deadline), left))
