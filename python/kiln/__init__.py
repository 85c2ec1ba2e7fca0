"""Runs the program ``kiln`` and reads the files that it writes. Nothing is computed here: there is one implementation.

    import kiln
    plan = kiln.plan(model="DiT-XL/2", gpu="H100", global_batch=256)
    kiln.run("train", "--recipe", "dit-s.toml", "--data", "store", "--out", "runs/s")
    losses = [line["loss"] for line in kiln.read_log("runs/s") if "loss" in line]

Options, files and their keys are those of the program; docs/ of the repository describes them.
"""

from typing import TYPE_CHECKING, Any

from ._program import KilnError, plan, program, run

if TYPE_CHECKING:
    from ._files import Sample, Store, read_log, read_weights

__all__ = ["KilnError", "Sample", "Store", "plan", "program", "read_log", "read_weights", "run"]


def __getattr__(name: str) -> Any:
    """Loads what reads files, and numpy, with its first use: the command ``kiln`` starts without it."""
    if name not in __all__:
        raise AttributeError(f"module 'kiln' has no attribute '{name}'")
    from . import _files

    return getattr(_files, name)
