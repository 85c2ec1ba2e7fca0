"""scripts/gpu: what it packs starts on its own, refuses in one line where it cannot run, and its checks tell good runs
from bad ones and keep their evidence. Runs on a CPU; what needs a GPU is in the pack.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from conftest import FULL, REPOSITORY, program
from interruptions import wait_until

sys.path.insert(0, str(REPOSITORY / "scripts"))
from gpu_checks import cuda_tests, evidence, kernel_variants, speeds, trainings  # noqa: E402
from gpu_checks.machine import environment  # noqa: E402
from gpu_checks.session import Failed, NotRun, Session, side_by_side  # noqa: E402
from pack_files import SYSTEM  # noqa: E402

BUILD = Path(os.environ.get("KILN_BUILD", REPOSITORY / "build"))
BARE = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def session(tmp_path):
    """A rehearsal, whose training a CPU is done with at once."""
    program("kiln")
    return Session("first", tmp_path / "results", 5, BUILD, dict(os.environ), {"name": "none"}, rehearses=True)


def kept(session):
    """{path: text} of the one file of a run."""
    with tarfile.open(session.out / f"{session.kind}.tar.gz") as archive:
        return {member.name: archive.extractfile(member).read().decode(errors="replace") for member in archive if member.isfile()}


@pytest.mark.slow
def test_memory_choices_and_a_kill_log_equal_lines(session, monkeypatch):
    if not FULL:  # the others do nothing else on a CPU
        few = ("recompute", "optimizer on the disk", "stage 3, weights on the host")
        monkeypatch.setattr(trainings, "EQUAL_RUNS", {name: trainings.EQUAL_RUNS[name] for name in few})
    session.check("equal lines", trainings.equal_lines, "f32")
    session.check("as on the CPU", trainings.as_on_the_cpu, "f32", 1e-6)
    assert [check["state"] for check in session.checks] == ["ok", "ok"], session.checks
    assert session.checks[0]["summary"] == f"{9 if FULL else 5} runs logged the same numbers"
    assert len(session.checks[0]["details"]) == 20


@pytest.mark.slow
def test_another_number_fails_the_check(session, monkeypatch):
    monkeypatch.setattr(trainings, "EQUAL_RUNS", {"another seed": ["--seed", "4"]})
    session.check("equal lines", trainings.equal_lines, "f32")
    session.check("as on the CPU", lambda s: trainings.as_on_the_cpu(s, "f32", -1))
    assert [check["state"] for check in session.checks] == ["FAILED", "FAILED"]
    assert "another seed (" in session.checks[0]["summary"]
    assert len(session.checks[0]["details"]["another seed"]) == len(session.checks[1]["details"]["cpu"]) == 20


def test_a_run_that_begins_again_is_not_resumed(session, tmp_path, monkeypatch):
    run = session.run

    def forgets(*command, **options):
        shutil.rmtree(tmp_path / "killed" / "checkpoints")
        return run(*command, **options)

    monkeypatch.setattr(session, "run", forgets)
    session.check("killed", trainings.killed_and_resumed, tmp_path, "--device", "cpu")
    assert session.checks[0]["state"] == "FAILED" and "and then took the steps [1, 2, 3, " in session.checks[0]["summary"]


@pytest.fixture
def plain(tmp_path):
    """A session that runs nothing of Kiln."""
    return Session("second", tmp_path / "out", 5, tmp_path, dict(os.environ), {"name": "Some GPU"})


@pytest.mark.slow
def test_every_check_leaves_its_evidence(plain, capsys):
    """One that fails, ones that raise what nobody foresaw, ones that hang, and the next ones run all the same."""
    def fails(_):
        raise Failed("too | slow", {"ms": 7})

    def lacks(_):
        raise NotRun("no tool")

    def raises(_):
        return float(None), None

    def hangs(_):
        time.sleep(60)

    def hanging_program(s):
        return s.run("sh", "-c", "echo before the end; echo why >&2; sleep 60", timeout=0.5).stdout, None

    def hanging_programs(s):
        return side_by_side({name: lambda: s.run("sleep", 60) for name in range(9)}), None

    begin = time.monotonic()
    plain.check("one", lambda s: ("fine", {"x": 1}))
    plain.check("two", fails)
    plain.check("three", raises)
    plain.check("four", hangs, limit=0.5)
    plain.check("five", hanging_program)
    plain.check("six", hanging_programs, limit=0.5)
    plain.check("seven", lambda s: ({}["epilogues"], None))
    plain.check("eight", lambda s: s.run("sh", "-c", "echo said; exit 3"))
    plain.check("nine", lacks)
    plain.deadline = 0
    plain.check("ten", lambda s: ("never", None))
    assert time.monotonic() - begin < 20
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" (", 1)[0] for line in lines] == [
        "ok      one: fine", "FAILED  two: too | slow", lines[2].rsplit(" (", 1)[0], "FAILED  four: took longer than 0 s",
        "FAILED  five: sh took longer than 1 s", "FAILED  six: took longer than 0 s", "FAILED  seven: KeyError: 'epilogues'",
        "FAILED  eight: sh ended with 3: said", "not run nine: no tool", "not run ten: no time is left"]
    assert lines[2].startswith("FAILED  three: TypeError: ")
    files = kept(plain)
    checks = {check["name"]: check for check in json.loads(files["second/second.json"])["checks"]}
    assert checks["two"]["details"] == {"ms": 7}
    assert "return float(None), None" in checks["three"]["details"]["traceback"]
    assert "time.sleep(60)" in checks["four"]["details"]["traceback"]
    hung = checks["five"]["details"]["output"]
    assert files[f"second/output/{hung}.out"] == "before the end\n" and files[f"second/output/{hung}.err"] == "why\n"
    assert f"{hung}:  sh -c echo before" in files["second/commands.txt"]
    assert "| two | FAILED | too / slow |" in files["second/second.md"]
    wait_until(lambda: not plain.running)


def test_a_run_that_is_ended_keeps_what_it_has(tmp_path):
    """The machine is given back, or somebody has enough: SIGTERM in the middle of a check."""
    script = f"""
import sys
sys.path.insert(0, {str(REPOSITORY / "scripts")!r})
import gpu_run
def checks(session):
    session.check("done", lambda s: ("fine", None))
    session.check("long", lambda s: s.run("sh", "-c", "echo begun; sleep 60"))
gpu_run.RUNS["first"] = checks
sys.argv = ["run", "first", "--rehearse", "--out", {str(tmp_path)!r}]
gpu_run.main()
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    begun = tmp_path / "first" / "output" / "001-sh.out"
    while not begun.exists() or not begun.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert process.wait(20) == 143
    with tarfile.open(tmp_path / "first.tar.gz") as archive:
        assert {"first/first.json", "first/output/001-sh.out", "first/commands.txt"} <= set(archive.getnames())


def test_one_file_of_results_stays_small(plain, monkeypatch):
    monkeypatch.setattr(evidence, "MOST_OUTPUT", 4000)
    monkeypatch.setattr(evidence, "MOST_BYTES", 20000)
    plain.check("long", lambda s: (s.run("sh", "-c", "echo first; seq 9999; echo last").stdout[-5:-1], None))
    long = kept(plain)["second/output/001-sh.out"]
    assert long.startswith("first\n") and "bytes left out ..." in long and long.endswith("last\n") and len(long) < 4100
    for _ in range(9):
        plain.run("head", "-c", "4000", "/dev/urandom")
    plain.write()
    assert (plain.out / "second.tar.gz").stat().st_size <= 20000
    assert "left out: the file of this run would be too large\n" in kept(plain).values()


def test_suites_have_a_process_each(plain, tmp_path):
    """And a test of the allocator too. One suite that crashes costs no other, and the second run repeats it alone."""
    (tmp_path / "test_cuda").write_text(r'''#!/bin/sh
case "$*" in
  *--gtest_list_tests*) printf 'CudaStep.\n  A\n  B\nCudaAllocator.\n  C\n  D\nDtypes/CudaKernels.\n  E/0  # GetParam() = 6\n' ;;
  *CudaStep*) echo "an illegal memory access" >&2; exit 134 ;;
  *) echo "<testsuites><testsuite><testcase classname='S' name='T'/></testsuite></testsuites>" >"${3#--gtest_output=xml:}"
     echo "blocking $CUDA_LAUNCH_BLOCKING" ;;
esac
''')
    (tmp_path / "test_cuda").chmod(0o755)
    assert cuda_tests.suites(plain) == ["CudaStep.*", "CudaAllocator.C", "CudaAllocator.D", "Dtypes/CudaKernels.*"]
    plain.check("CUDA tests", cuda_tests.all_tests)
    assert plain.checks[0]["state"] == "FAILED"
    assert plain.checks[0]["details"]["failed_suites"] == {"CudaStep.*": "test_cuda ended with 134: an illegal memory access"}
    shutil.copytree(plain.folder, plain.out / "first")
    (plain.out / "first" / "second.json").rename(plain.out / "first" / "first.json")
    plain.check("again", cuda_tests.failed_again)
    assert plain.checks[1]["summary"].startswith("1 of 1 suites failed: CudaStep.*")
    assert "CUDA_LAUNCH_BLOCKING=1" in (plain.folder / "commands.txt").read_text().splitlines()[-1]


def test_every_variant_changes_the_sources(tmp_path):
    for number, changes in enumerate(kernel_variants.VARIANTS.values()):
        kernel_variants.changed_sources(tmp_path / str(number), changes)


def test_epilogues_must_be_served(plain):
    def probed(served, refused):
        return {("DiT-XL/2", 32): {"gpu": {"epilogues": {"affine_gelu": {"served": served, "refused": refused}}}}}

    for counts in ((20, 0), (20, 1), (0, 0)):
        plain.probes = probed(*counts)
        plain.check("epilogues", speeds.epilogues)
    assert [check["state"] for check in plain.checks] == ["ok", "FAILED", "FAILED"]
    assert plain.checks[1]["summary"] == "DiT-XL/2, batch 32: affine_gelu refused 1 times, served 20"


def test_a_program_that_fails_says_why(session):
    session.check("bad", lambda s: trainings.train(s, s.out, "bad", "--device", "cpu", "--lr", "-1"))
    assert session.checks[0]["state"] == "FAILED" and "kiln ended with" in session.checks[0]["summary"]


def test_a_rehearsal_leaves_out_what_a_cpu_refuses(session):
    session.check("speed", lambda s: s.run(s.program("kiln"), "probe", "--model", "DiT-S/8", "--data", "synthetic", "--device", "cpu",
                                           trainings.UNTRIED))
    assert "--untried-gpu changes what a GPU does" in session.checks[0]["summary"]
    assert speeds.probe(session, "DiT-XL/2", 32, 20, f"{trainings.UNTRIED}=all")["measured"]["images_per_s"] > 0


def test_untried_lines_are_compared_as_on_a_gpu(plain, monkeypatch):
    """The trainings are stand-ins: {step: loss}, with another loss where a run is named."""
    asked, different = {}, ""

    def train(_, folder, name, *options):
        asked[name] = options
        (folder / name).mkdir()
        shutil.copy(REPOSITORY / "tests" / "fixtures" / "gpu-products-0.json", folder / name)
        return {1: {"loss": 2.0 if name == different else 1.0, "grad_norm": 1.0}}

    def killed(session, folder, *options):
        assert (folder / "killed" / "gpu-products-0.json").exists()
        return train(session, folder / "killed", "killed", *options)

    monkeypatch.setattr(trainings, "train", train)
    monkeypatch.setattr(trainings, "killed_and_resumed", killed)
    for different in ("", "with", "killed"):
        plain.check("untried", trainings.untried_lines)
    assert {name for name, options in asked.items() if trainings.UNTRIED in options} == {"with", "whole", "killed"}
    assert [check["state"] for check in plain.checks] == ["ok", "FAILED", "FAILED"]
    assert [check["summary"].split(": ", 1)[1] for check in plain.checks[1:]] == [
        "f32, with and without (loss of step 1: 1)", "bf16, killed and resumed (loss of step 1: 1)"]


@pytest.mark.parametrize("run", ["first", *(pytest.param(run, marks=pytest.mark.slow) for run in ("second", "third"))])
def test_a_rehearsal_runs_every_check_and_says_so_in_every_row(run, tmp_path):
    for needed in ("kiln", "tests/test_cuda_emulation", "benchmarks/bench_cuda_kernels"):
        if not (BUILD / needed).exists():
            pytest.skip(f"{needed} is not built")
    done = subprocess.run([sys.executable, REPOSITORY / "scripts" / "gpu_run.py", run, "--rehearse", "--out", tmp_path,
                           "--minutes", "30"], capture_output=True, text=True, env={**os.environ, "KILN_BUILD": str(BUILD)})
    assert done.returncode == 0, done.stdout
    rows = done.stdout.splitlines()
    assert all("REHEARSAL" in row for row in rows), rows
    assert {row for row in rows[1:-1] if not row.startswith("ok")} <= {row for row in rows if "no peer" in row}
    with tarfile.open(tmp_path / f"{run}.tar.gz") as archive:
        page = archive.extractfile(f"{run}/{run}.md").read().decode()
    table = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(table) == len(rows) - 2 and all(line.startswith("| REHEARSAL: ") for line in table)


def test_no_rehearsal_is_among_the_results():
    assert not [path for path in (REPOSITORY / "benchmarks" / "results").iterdir() if "REHEARSAL" in path.read_text()]


@pytest.mark.parametrize("name", ["kiln-cuda", "kiln"])
def test_what_libraries_open_is_found_through_the_program(name):
    """libnvrtc opens its builtins by name: an RPATH of the program serves it, a RUNPATH does not."""
    if not (BUILD / name).exists():
        pytest.skip(f"{name} is not built")
    entries = subprocess.run(["readelf", "-d", BUILD / name], capture_output=True, text=True, check=True).stdout
    if "libtorch_cuda" not in entries:
        pytest.skip(f"{name} is for CPUs")
    assert "(RPATH)" in entries and "(RUNPATH)" not in entries and "nvidia/cu13/lib" in entries


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """What scripts/gpu build packs, unpacked elsewhere."""
    for name in ("kiln-cuda", "tests/test_cuda"):
        if not (BUILD / name).exists():
            pytest.skip(f"{name} is not built: there is no nvcc")
    if BUILD != REPOSITORY / "build":
        pytest.skip("scripts/gpu packs what is in build/")
    done = subprocess.run([REPOSITORY / "scripts" / "gpu", "build"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("build/kiln-gpu.tar.xz: ")
    folder = tmp_path_factory.mktemp("elsewhere")
    with tarfile.open(BUILD / "kiln-gpu.tar.xz") as archive:
        archive.extractall(folder)
    return folder / "kiln-gpu"


def no_gpu(folder):
    """An environment whose nvidia-smi finds nothing."""
    folder.mkdir(exist_ok=True)
    fake = folder / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    fake.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}


def run_pack(pack, tmp_path, *arguments):
    return subprocess.run([sys.executable, pack / "run", *arguments, "--out", tmp_path / "out"], capture_output=True,
                          text=True, env=no_gpu(tmp_path / "bin"))


@pytest.mark.parametrize("run", ["first", "second", "third"])
def test_the_pack_refuses_in_one_line_without_a_gpu(pack, tmp_path, run):
    done = run_pack(pack, tmp_path, run)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpu: no GPU: nvidia-smi says: NVIDIA-SMI has failed\n"
    assert not (tmp_path / "out").exists()


def test_the_pack_needs_nothing_of_its_environment(pack, tmp_path):
    """Unpacked by Python's tarfile, and begun with nothing but the system's programs and a Python that has torch."""
    path = no_gpu(tmp_path / "bin")["PATH"].split(":")[0]
    done = subprocess.run([sys.executable, pack / "run", "first", "--out", tmp_path / "out"], capture_output=True, text=True,
                          env={"PATH": f"{path}:/usr/bin:/bin"})
    assert (done.returncode, done.stderr) == (1, "gpu: no GPU: nvidia-smi says: NVIDIA-SMI has failed\n")
    done = subprocess.run([pack / "bin" / "bench_cuda_kernels"], capture_output=True, text=True, env=BARE)
    assert (done.returncode, done.stderr) == (1, "bench_cuda_kernels: no GPU, or a build without CUDA\n")


def test_the_pack_takes_nothing_of_this_machine(pack):
    """Nothing but torch's wheels, which it links to, and what every machine has: libc and the compiler's runtime."""
    environment(pack)
    for program in (pack / "bin").iterdir():
        lines = subprocess.run(["ldd", program], capture_output=True, text=True, env=BARE).stdout
        found = dict(re.findall(r"^\s*(\S+) => (/\S+)", lines, re.MULTILINE))
        outside = [name for name, path in found.items() if not path.startswith(f"{pack}/") and not SYSTEM.fullmatch(name)]
        assert "libtorch_cuda.so" in found and not outside and "not found" not in lines, program.name


def test_the_packed_programs_start_from_the_pack_alone(pack, tmp_path):
    env = {**environment(pack), **no_gpu(tmp_path / "bin")}
    done = subprocess.run([pack / "bin" / "kiln", "train", "--data", "synthetic", "--device", "cuda", "--out", tmp_path / "run"],
                          capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stderr.startswith("kiln train: expected a CUDA GPU, found none")
    assert len(done.stderr.splitlines()) == 1
    session = Session("first", tmp_path / "results", 5, pack / "bin", env, {"name": "none"})
    summary, details = cuda_tests.all_tests(session)
    assert summary.startswith("0 passed, ")
    skipped = {name: reason for suite in details["suites"].values() for name, reason in suite["skipped"].items()}
    assert len(skipped) > 50 and {reason.splitlines()[-1] for reason in skipped.values()} == {"no GPU"}
    session.check("attention", cuda_tests.without_library_path)
    assert (session.checks[0]["state"], session.checks[0]["summary"]) == ("not run", "no GPU")


def test_the_pack_names_a_library_that_is_missing(pack, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(pack, copy, symlinks=True)
    (copy / "lib" / kernel_variants.KERNELS).unlink()  # the one that lies in no folder of the system
    done = run_pack(copy, tmp_path, "first")
    assert f"does not find {kernel_variants.KERNELS}" in done.stderr and len(done.stderr.splitlines()) == 1
