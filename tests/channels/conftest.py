"""What the ways to install Kiln share. Each test installs what scripts/pack or CMake makes of the built programs, in a folder
of its own, and runs it without the build folder.

KILN_BUILD names the build folder (default: build/ of this checkout).
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KILN_BUILD", REPOSITORY / "build")).resolve()
FULL = os.environ.get("KILN_FULL_TESTS") == "yes"  # scripts/test --full
TINY = ["--model", "dit", "--hidden-size", "48", "--depth", "2", "--num-heads", "3", "--patch-size", "8", "--num-classes", "10",
        "--data", "synthetic", "--max-steps", "4", "--global-batch", "4", "--log-every", "1", "--checkpoint-every", "0",
        "--no-tensorboard", "--no-preflight", "--peak-tflops", "1", "--threads", "1", "--device", "cpu", "--seed", "3"]  # fmt: skip
# Of a user who has set nothing.
BARE = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"}


def run(*command, env=None, cwd=None, timeout=300, check=True):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env or BARE, cwd=cwd, timeout=timeout)
    assert not check or done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done


def pack(what):
    """The path that scripts/pack prints."""
    done = run(REPOSITORY / "scripts" / "pack", what, "--no-build", timeout=900,
               env={**os.environ, "KILN_BUILD": str(BUILD), "KILN_SKIP_APT": "1"})  # fmt: skip
    return REPOSITORY / done.stdout.splitlines()[-1].split(":")[0]


def libraries_outside(program, *folders):
    """Libraries that the loader finds for a program elsewhere than in these folders."""
    lines = run("ldd", program).stdout.splitlines()
    assert not [line for line in lines if "not found" in line], lines
    paths = [line.split()[2] for line in lines if "=> /" in line]
    return {Path(path).name for path in paths if not any(os.path.realpath(path).startswith(str(folder)) for folder in folders)}


def losses(folder):
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.fixture(scope="session")
def debian(tmp_path_factory):
    """debian(path): makes that folder the root of a Debian 12 with its essential packages and apt."""
    if not FULL:
        pytest.skip("scripts/test --full")
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("debootstrap needs root")
    mirror = re.search(r"^ *\d+ (https?://\S+) bookworm/main", run("apt-cache", "policy").stdout, re.MULTILINE)
    root = tmp_path_factory.mktemp("debian") / "root"
    run("debootstrap", "--variant=minbase", "bookworm", root, *([mirror[1]] if mirror else []), timeout=900,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"})  # fmt: skip
    roots = [root]

    def copy(path):
        run("cp", "-a", root, path)
        roots.append(path)
        return path

    yield copy
    for made in roots:  # gigabytes
        shutil.rmtree(made)


def run_inside(root, *command):
    """In namespaces of its own, with the kernel's /proc and this machine's devices."""
    script = 'root=$1 && shift && mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" && exec chroot "$root" "$@"'
    return run("unshare", "--mount", "--pid", "--fork", "sh", "-c", script, "sh", root, *command,
               env={**BARE, "PATH": f"{BARE['PATH']}:/usr/sbin:/sbin"})  # fmt: skip


@pytest.fixture(scope="session")
def built():
    """The version of the built program."""
    program = BUILD / "kiln"
    if not program.exists():
        pytest.fail(f"{program} is not built; set KILN_BUILD to the build folder")
    return run(program, "--version").stdout


@pytest.fixture(scope="session")
def site():
    """The folder of the torch wheel that the programs were built against."""
    lines = (BUILD / "CMakeCache.txt").read_text().splitlines()
    return Path(next(line.split("=", 1)[1] for line in lines if line.startswith("KILN_SITE:PATH=")))
