"""scripts/setup, scripts/test and scripts/demo, in a copy whose PATH holds harmless tools and stand-ins only: nothing
is downloaded, installed or built. What goes wrong ends with one clear line; what is interrupted goes on."""

import os
import re
import shutil
import signal
import subprocess

import pytest
from conftest import REPOSITORY
from interruptions import wait_until

HARMLESS = ["awk", "bash", "cat", "cp", "cut", "dirname", "env", "grep", "head", "mkdir", "mv", "rm", "sed", "sleep",
            "tail", "tee", "touch"]
# Stand-ins that succeed. `calls` gets a line for each.
WORKING = {
    "apt-get": "",
    "c++": "",
    "cmake": "mkdir -p build",
    "df": 'echo head; echo "disk 0 0 $((100 * 1048576)) 0% /"',
    "dpkg-query": "printf installed",
    "id": "echo 0",
    "ninja": "",
    "pkg-config": "",
    "python3": 'case "$*" in *--target*) mkdir -p .deps/part ;; esac',
    "uname": "echo x86_64",
}
FAILS = "exit 1"
ABSENT = None


class Checkout:
    """A copy of the scripts with a PATH of its own."""

    def __init__(self, folder):
        self.root = folder / "checkout"
        self.tools = folder / "tools"
        self.tools.mkdir()
        shutil.copytree(REPOSITORY / "scripts", self.root / "scripts")
        for name in HARMLESS:
            (self.tools / name).symlink_to(shutil.which(name))
        self.write(self.root / "tools" / "compile_commands", "")

    def write(self, path, text, shell="sh"):  # which starts sooner than Bash: a script calls a stand-in for each package
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/{shell}\necho "${{0##*/}} $*" >>"{self.root}/calls"\n{text}\n')
        path.chmod(0o755)

    def start(self, script, *arguments, asks_for_packages=True, **stand_ins):
        stand_ins = {name.replace("_", "-").replace("cxx", "c++"): text for name, text in stand_ins.items()}
        for name, text in (WORKING | stand_ins).items():
            (self.tools / name).unlink(missing_ok=True)
            if text is not ABSENT:
                self.write(self.tools / name, text)
        environment = {"PATH": str(self.tools), "HOME": str(self.root), "LC_ALL": "C", "KILN_SKIP_APT": "" if asks_for_packages else "1"}
        return subprocess.Popen(
            [self.root / "scripts" / script, *arguments], env=environment, cwd=self.root, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip

    def run(self, script, *arguments, **stand_ins):
        """-> the exit status and the lines on stderr, without colours."""
        process = self.start(script, *arguments, **stand_ins)
        return finish(process)

    def calls(self):
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []


def finish(process):
    _, stderr = process.communicate(timeout=60)
    return process.returncode, re.sub(r"\x1b\[\d*m", "", stderr).splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


NO_ROOM = 'echo head; echo "disk 0 0 $((2 * 1048576)) 0% /"'


@pytest.mark.parametrize("stand_ins, message", [
    (dict(apt_get=ABSENT), "no apt-get here: install the packages that the README lists"),
    (dict(dpkg_query=FAILS, id="echo 1000"), "installing packages needs root or sudo; as root run: apt-get install"),
    (dict(dpkg_query=FAILS, apt_get=FAILS), "apt-get update failed: check the network"),
    (dict(dpkg_query=FAILS, apt_get='[ "$1" = update ]'), "apt-get could not install: build-essential"),
    (dict(df=NO_ROOM), "has 2 GiB free, this needs 4 GiB: free some space and run again"),
    (dict(python3=FAILS), "pip could not install LibTorch"),
    (dict(ninja=ABSENT), "ninja is missing: install it"),
    (dict(cxx=ABSENT), "c++ is missing: install it"),
    (dict(cmake='echo "CMake Error: no generator"; exit 1'), "cmake could not configure build"),
    (dict(ninja='echo "FAILED: x.o"; exit 1'), "the build failed; the whole log is build/build.log"),
    (dict(uname="echo riscv64"), "built for x86-64, this machine is riscv64"),
])
def test_setup_ends_with_one_clear_line(checkout, stand_ins, message):
    packages = not stand_ins.keys().isdisjoint({"apt_get", "dpkg_query"})  # what the others stumble over, comes behind them
    status, lines = checkout.run("setup", asks_for_packages=packages, **stand_ins)
    assert status == 1
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], lines
    assert message in lines[-1]
    # The same command goes on once the cause is gone.
    status, lines = checkout.run("setup", asks_for_packages=packages)
    assert status == 0 and lines[-1] == "==> ready: build/kiln --help"


def test_what_is_there_is_not_fetched_again(checkout):
    assert checkout.run("setup")[0] == 0
    (checkout.root / "calls").unlink()
    status, lines = checkout.run("setup", df=NO_ROOM)  # nothing is unpacked any more, so nothing needs room
    assert status == 0, lines
    assert not [line for line in checkout.calls() if line.startswith(("apt-get", "python3"))]


@pytest.mark.parametrize("script", ["setup", "test"])
@pytest.mark.parametrize("driver", [FAILS, "echo GPU 0"])
def test_the_cuda_parts_are_built_where_a_driver_works(checkout, script, driver):
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv" / ".complete").touch()
    checkout.run(script, asks_for_packages=False, nvidia_smi=driver, ninja=FAILS)
    configured = [line for line in checkout.calls() if line.startswith("cmake")]
    assert len(configured) == 1
    assert ("-DKILN_CUDA=ON" in configured[0]) == (driver != FAILS)
    assert any("nvidia-cuda-nvcc" in line for line in checkout.calls()) == (driver != FAILS)


@pytest.mark.parametrize("compiled", [True, False])
def test_ci_says_where_the_kernels_are_not_checked(checkout, compiled):
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv" / ".complete").touch()
    checkout.write(checkout.root / "tools" / "cuda_registers", "")
    if compiled:
        checkout.write(checkout.root / "build/src/ops/cuda/adamw.cu.o.ptxas", "")
    _, lines = checkout.run("test", "--ci", asks_for_packages=False)
    calls = checkout.calls()
    assert any("-UKILN_CUDA_ARCHITECTURES" in line for line in calls if line.startswith("cmake")), "for every kind of GPU"
    assert ("cuda_registers " in calls) == compiled
    assert any("UNCHECKED" in line and "no nvcc" in line for line in lines) != compiled


@pytest.fixture
def demo(checkout):
    """scripts/demo with programs that only say what they were asked to do."""
    checkout.write(checkout.root / "scripts" / "setup", "")
    checkout.write(checkout.root / "build" / "kiln-demo-data", "")
    checkout.write(checkout.root / "build" / "kiln", """
if [ "$1" = "$(cat interrupt-at 2>/dev/null)" ]; then
  trap 'exit 0' INT  # as kiln: what is done is kept
  touch waiting
  for ((i = 0; i < 600; ++i)); do sleep 0.1; done
fi
# kiln sample refuses a folder of other weights
[ "$1" != sample ] || { mkdir -p demo && mkdir demo/samples; }""", "bash")
    return checkout


@pytest.mark.parametrize("command", ["extract", "train"])
def test_an_interrupted_demo_stops_and_goes_on(demo, command):
    (demo.root / "interrupt-at").write_text(command)
    process = demo.start("demo")
    wait_until((demo.root / "waiting").exists, limit_s=60, running=[process])
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C: to the script and to what it runs
    status, lines = finish(process)
    assert status == 130 and lines[-1] == "==> stopped: the same command continues"
    assert demo.calls()[-1].startswith(f"kiln {command} ")

    (demo.root / "interrupt-at").unlink()
    assert demo.run("demo")[0] == 0


def test_the_demo_draws_again_after_more_training(demo):
    for minutes in ("20", "30"):
        status, lines = demo.run("demo", "--minutes", minutes)
        assert status == 0, lines
        assert (demo.root / "demo" / "samples").is_dir()


@pytest.mark.parametrize("options", [[], ["--text"]])
def test_the_demo_measures_what_it_draws(demo, options):
    status, lines = demo.run("demo", *options)
    assert status == 0, lines
    (training,) = (line for line in demo.calls() if line.startswith("kiln train "))
    assert "--evaluate-every" in training and "--evaluate-reference demo/" in training
