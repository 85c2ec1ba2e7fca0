"""The CUDA tests: a process for each suite, those that failed again, and some under NVIDIA's sanitizer."""
import json
import re
import xml.etree.ElementTree

from .session import Failed, NotRun, last_line, scratch, side_by_side


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
    if not tests:
        raise Failed(f"no test is named {test_filter}")
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


def without_library_path(session):
    """cuDNN's kernels are compiled by libnvrtc, which opens its builtins by name: the program's own path must lead there."""
    chosen = "PackedAttentionGrads.*" if session.rehearses else "*/CudaAttention.*/cudnn_BFloat16_*"
    found = gtests(session, chosen, "env", "-u", "LD_LIBRARY_PATH")
    if len(found["skipped"]) == found["tests"]:
        raise NotRun(last_line(next(iter(found["skipped"].values()))))
    return f"{found['tests'] - len(found['skipped'])} tests passed", found


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


# Tests of kernels that are Kiln's own: in cuBLASLt's, cuDNN's and fp8's products the sanitizer finds NVIDIA's.
SANITIZED = "*CudaKernels*-*LinearAndMlp*:*Epilogue*:*Cudnn*:*Attention*:*Fp8*"


def sanitized(session, name):
    sanitizer = session.tool("compute-sanitizer")
    under = [sanitizer, "--tool", name, "--report-api-errors", "no", "--error-exitcode", "7"] if sanitizer else []
    found = gtests(session, SANITIZED if sanitizer else "EmulatedKernels.Gelu*", *under)
    return f"{found['tests']} tests", found
