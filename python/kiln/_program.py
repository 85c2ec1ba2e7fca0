"""Where the programs are, and how they are run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn, Union

Argument = Union[str, int, float, "os.PathLike[str]"]


class KilnError(RuntimeError):
    """A run of the program failed. The text is the line in which it says why; ``status`` its exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def _can_use_gpus() -> bool:
    """Whether this machine has an NVIDIA driver, and torch the libraries for it."""
    torch = importlib.util.find_spec("torch")
    if not torch or not torch.origin or not Path("/proc/driver/nvidia/version").exists():
        return False
    folder = Path(torch.origin).parent
    return (folder / "lib" / "libtorch_cuda.so").exists() and (folder.parent / "nvidia" / "cudnn").exists()


def program(name: str = "kiln") -> Path:
    """The path of ``kiln`` or ``kiln-conformance``. On a machine with an NVIDIA driver ``kiln`` is ``kiln-cuda``, if it is here.

    Raises FileNotFoundError for another name.
    """
    folder = Path(__file__).resolve().parent / "bin"
    for_gpus = folder / f"{name}-cuda"
    path = for_gpus if for_gpus.exists() and _can_use_gpus() else folder / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: this wheel has no program of that name")
    return path


def run(*arguments: Argument, capture: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs ``kiln ARGUMENTS`` and waits for its end.

    Its output goes where this process's goes, or with ``capture`` into ``stdout`` and ``stderr`` of what is returned.
    ``options``: those of subprocess.run, such as cwd, env and timeout. Raises KilnError if the exit status is not 0.
    """
    command = [str(program()), *map(str, arguments)]
    done = subprocess.run(command, capture_output=capture, text=True, **options)
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines()
        raise KilnError(lines[-1] if lines else f"kiln ended with status {done.returncode}", done.returncode)
    return done


def plan(*arguments: Argument, **options: Argument | bool | None) -> dict[str, Any]:
    """What ``kiln plan --json`` prints: the memory, time and cost of a run, without running it.

    ``plan("--recipe", "dit.toml", gpu="H100", global_batch=256)`` passes on its arguments and then ``--gpu H100 --global-batch
    256``. True is an option without a value; None and False leave it out. Raises KilnError with the program's own line.
    """
    named: list[Argument] = []
    for key, value in options.items():
        if value is None or value is False:
            continue
        named.append("--" + key.replace("_", "-"))
        if value is not True:
            named.append(value)
    printed = run("plan", *arguments, *named, "--json", capture=True).stdout
    result: dict[str, Any] = json.loads(printed)
    return result


def _become(name: str) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the program would inherit that
    os.execv(program(name), [name, *sys.argv[1:]])


def main() -> NoReturn:
    _become("kiln")


def conformance() -> NoReturn:
    _become("kiln-conformance")
