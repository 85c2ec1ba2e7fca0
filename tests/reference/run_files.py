"""What kiln train leaves in the folder of a run, and a run that is killed on its way."""

import json

from conftest import program
from interruptions import killed_once

STATE = ("model.safetensors", "ema.safetensors", "train_state-00000-of-00001.safetensors")


def log_lines(run, killed=False):
    """Those of log.jsonl, each with an end. killed: the last line may be torn, and is left out then."""
    *lines, rest = (run / "log.jsonl").read_text().split("\n")
    assert killed or not rest, f"the last line of {run}/log.jsonl is torn: {rest}"
    return [json.loads(line) for line in lines]


def step_lines(run, killed=False):
    return [line for line in log_lines(run, killed) if "loss" in line]


def losses(run):
    return [line["loss"] for line in step_lines(run)]


def validation_losses(run):
    return [line["validation_loss"] for line in log_lines(run) if "validation_loss" in line]


def events(run, name):
    return [line for line in log_lines(run) if line.get("event") == name]


def num_steps(run):
    """That are logged so far."""
    log = run / "log.jsonl"
    return sum(b'"loss"' in line for line in log.read_bytes().split(b"\n")[:-1]) if log.exists() else 0


def read_plan(run):
    return json.loads((run / "plan.json").read_text())


def read_config(run):
    return json.loads((run / "config.json").read_text())


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:08}"


def saved(run, step, *names):
    """{name: bytes} of the files of a checkpoint, by default of those of a run on one rank with one average."""
    return {name: (checkpoint(run, step) / name).read_bytes() for name in names or STATE}


def weights_of(run, step):
    return saved(run, step, "model.safetensors", "ema.safetensors")


def assert_no_leftovers(run):
    assert not [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")]


def kill_after(arguments, run, num_lines):
    """Starts kiln and kills it with -9 once the log has `num_lines` more steps; True if it was still running."""
    target = num_steps(run) + num_lines
    return killed_once(lambda: num_steps(run) >= target, [program("kiln"), *arguments])
