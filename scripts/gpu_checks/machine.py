"""What the machine must have before a run begins: torch 2.11, the libraries of the programs, a GPU. Else one line says what is
missing."""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from .session import last_line


def refuse(text):
    sys.exit(f"gpu: {text}")


def environment(pack):
    """The environment of the packed programs. Their own path leads to torch/ and nvidia/ through site/, which is linked here.
    Refuses where torch 2.11 or a library is missing."""
    found = importlib.util.find_spec("torch")
    if not found or not found.origin:
        refuse(f"there is no torch in {sys.executable}: install torch==2.11.0, or call this with a Python that has it")
    torch = Path(found.origin).parent
    version = (torch / "version.py").read_text()
    if "'2.11." not in version:
        refuse(f"the programs are linked to torch 2.11, {torch} is another: install torch==2.11.0")
    site = pack / "site"
    if not site.exists() or not site.samefile(torch.parent):
        try:
            site.unlink(missing_ok=True)
            site.symlink_to(torch.parent)
        except OSError as error:
            refuse(f"cannot link {site} to {torch.parent} ({error.strerror}): unpack into a folder that can be written")
    env = dict(os.environ)
    env["PYTHONPATH"] = ":".join(filter(None, [str(pack / "python"), env.get("PYTHONPATH")]))
    env["CPATH"] = ":".join(map(str, sorted((torch.parent / "nvidia").glob("*/include"))))  # for nvcc
    for program in ("kiln", "test_cuda", "bench_cuda_kernels"):
        lines = subprocess.run(["ldd", pack / "bin" / program], env=env, capture_output=True, text=True).stdout.splitlines()
        missing = [line.split()[0] for line in lines if "not found" in line]
        if missing:
            refuse(f"{program} does not find {', '.join(missing)}: the pack is of another system")
    started = subprocess.run([pack / "bin" / "kiln", "--help"], env=env, capture_output=True, text=True)
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
