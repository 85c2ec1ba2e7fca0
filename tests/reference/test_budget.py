"""kiln train --memory-budget: whatever budget is possible is kept, by resident memory too.

KILN_FULL=1 tries 30 budgets instead of 6, and more kinds of runs. The tables are printed. That no mixture of choices
recomputes less is tested in tests/plan/machine_fit_test.cpp.
"""

import json
import os
import random
import re
import subprocess
import time
from pathlib import Path

import pytest
from conftest import lines_of_errors, program
from run_files import read_plan

pytestmark = pytest.mark.nothing_beside

SMALL = ["--data", "synthetic", "--device", "cpu"]
MODEL = [*SMALL, "--model", "dit", "--hidden-size", 128, "--depth", 8, "--num-heads", 2, "--patch-size", 2, "--num-classes", 10,
         "--image-size", 256, "--global-batch", 16]
# Of each as many budgets.
MODELS = {
    "f32": MODEL,
    "bf16, in passes": [*SMALL, "--model", "dit", "--hidden-size", 192, "--depth", 6, "--num-heads", 3, "--patch-size", 2,
                        "--num-classes", 10, "--image-size", 256, "--global-batch", 20, "--micro-batch", 12,
                        "--compute-dtype", "bf16"],
    "f32, patches of 4": [*SMALL, "--model", "dit", "--hidden-size", 96, "--depth", 10, "--num-heads", 2, "--patch-size", 4,
                          "--num-classes", 10, "--image-size", 512, "--global-batch", 16, "--objective", "flow"],
}
RUN = ["--sample-every", 0, "--log-every", 1, "--peak-tflops", 1]
NUM_BUDGETS = (30 if os.environ.get("KILN_FULL") else 6) // len(MODELS)
MIB = 1 << 20
PROCESS = 350e6  # what is counted where nothing was measured (src/plan/price/cpu_estimate.cpp)


def highest_resident(process_id):
    try:
        status = Path(f"/proc/{process_id}/status").read_text(errors="replace")
    except OSError:  # it has ended
        return 0
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def train(out, *arguments, model=MODEL, steps=2, checkpoint_every=2):
    """Returns (return code, output, highest resident bytes): of several ranks the sum of theirs."""
    length = ["--max-steps", steps, "--checkpoint-every", checkpoint_every]
    command = [str(part) for part in [program("kiln"), "train", "--out", out, *model, *RUN, *length, *arguments]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        highest = {}
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None:  # getrusage would count the memory of this process, which forked it
            ranks = children.read_text().split() if "--nproc" in command else [process.pid]
            for rank in ranks:
                highest[rank] = max(highest.get(rank, 0), highest_resident(rank))
            time.sleep(0.01)
        return process.returncode, process.stdout.read(), sum(highest.values())


def trained(*arguments, **options):
    """(output, highest resident bytes) of a run that ends well."""
    code, output, resident = train(*arguments, **options)
    assert code == 0, output
    return output, resident


def planned(recompute, *more, model=MODEL):
    command = [program("kiln"), "plan", *model, *more, "--recompute", recompute, "--json"]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["predicted"]


def planned_peak(recompute, *more, model=MODEL):
    return planned(recompute, *more, model=model)["peak_bytes"]


def enough(*more, model=MODEL, beside=280e6):
    """A budget in which freed memory is given back: not so much that it would be kept."""
    return int(max(planned("none", *more, model=model)["by_phase"].values()) + beside)


def needed_bytes(output):
    """What the chosen plan needs in all, and its tensors."""
    found = re.search(r"--offload-activations \S+: ([\d.]+) GiB, ([\d.]+) GiB of it tensors", output)
    return [float(number) * 2**30 for number in found.groups()]


def range_of_budgets(folder, model):
    """From the least that every choice leaves to what keeps everything, and what is no tensor of it."""
    output, _ = trained(folder / "run", "--memory-budget", enough(model=model), model=model)
    needed, tensors = needed_bytes(output)
    return planned_peak("all", model=model), planned_peak("none", model=model), needed - tensors


@pytest.fixture(scope="module")
def budget_range(tmp_path_factory):
    return range_of_budgets(tmp_path_factory.mktemp("budget"), MODEL)


@pytest.mark.parametrize("name", MODELS)
def test_every_budget_is_kept(name, tmp_path):
    """One in each part of the range, so that a few of them say something too."""
    model = MODELS[name]
    least, most, beside = range_of_budgets(tmp_path, model)
    part = (most - least) / NUM_BUDGETS
    budgets = random.Random(5)
    rows = []
    for i in range(NUM_BUDGETS):
        budget = int(least + part * (i + budgets.random()) + beside + 16 * MIB)
        output, resident = trained(tmp_path / str(i), "--memory-budget", budget, model=model)
        measured = measured_tensors(tmp_path / str(i))
        chosen = re.search(r"--recompute (\S+)", output)[1]
        rows.append((budget, measured, resident, chosen))
        print(f"| {name} | {budget / MIB:7.0f} | {measured / MIB:7.0f} | {resident / MIB:7.0f} | {chosen} |")
    assert any(chosen != "none" for *_, chosen in rows) and any(chosen != "all" for *_, chosen in rows)
    for budget, measured, resident, chosen in rows:
        assert measured + beside <= budget + 32 * MIB, f"tensors of --recompute {chosen}"  # two decimals of GiB
        assert resident < budget, f"--recompute {chosen}"


def test_less_than_the_least_is_refused_before_anything_is_made(budget_range, tmp_path):
    least, _, beside = budget_range
    budget = int(0.7 * least + beside)
    code, output, resident = train(tmp_path / "run", "--memory-budget", budget)
    assert code != 0 and not (tmp_path / "run").exists()
    assert len(lines_of_errors(output)) == 1 and "--micro-batch" in output
    if "this fits, " in output:
        nearest = output.split("this fits, ")[1].split()
        assert "--recompute" in nearest or "--micro-batch" in nearest
    assert resident < budget


def test_the_micro_batch_is_chosen_when_asked(budget_range, tmp_path):
    least, _, beside = budget_range
    output, resident = trained(tmp_path / "run", "--micro-batch", -1, "--memory-budget", int(0.9 * least + beside))
    assert 0 < int(re.search(r"--micro-batch (\d+) ", output)[1]) < 16
    assert resident < 0.9 * least + beside


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_of_a_machine_share_the_budget(stage, tmp_path):
    ranks = ["--nproc", 2, "--zero-stage", stage]
    one_rank = ["--gpus", 2, "--zero-stage", stage]
    output, _ = trained(tmp_path / "ample", "--memory-budget", 2 * enough(*one_rank), *ranks)
    needed, tensors = needed_bytes(output)
    least, most = planned_peak("all", *one_rank), planned_peak("none", *one_rank)
    budget = 2 * int((least + most) / 2 + needed - tensors + 16 * MIB)
    output, resident = trained(tmp_path / "run", "--memory-budget", budget, *ranks)
    assert "for each of 2 ranks" in output
    assert re.search(r"--recompute (\S+)", output)[1] != "none"
    print(f"| 2 ranks, stage {stage} | {budget / MIB:.0f} | {resident / MIB:.0f} |")
    assert 0 < resident < budget


def measured_tensors(out):
    return read_plan(out)["measured"]["peak_bytes"]


# Widths, batches, dtypes, recomputation, threads: of each what a process holds beside its tensors.
RUNS = [
    ["--model", "DiT-S/8", "--depth", 2, "--global-batch", 4],
    ["--model", "DiT-S/4", "--depth", 3, "--global-batch", 16, "--compute-dtype", "bf16", "--threads", 1],
    ["--model", "DiT-B/4", "--depth", 2, "--global-batch", 12, "--compute-dtype", "bf16", "--recompute", "all"],
]
if os.environ.get("KILN_FULL"):
    RUNS += [
        ["--model", "DiT-S/2", "--depth", 4, "--global-batch", 8],
        ["--model", "DiT-S/2", "--depth", 4, "--global-batch", 8, "--compute-dtype", "bf16"],
        ["--model", "DiT-S/2", "--depth", 4, "--global-batch", 16, "--micro-batch", 4, "--compute-dtype", "fp16"],
        ["--model", "DiT-S/8", "--global-batch", 64, "--compute-dtype", "bf16"],
        ["--model", "DiT-B/4", "--depth", 4, "--global-batch", 16],
        ["--model", "DiT-B/2", "--depth", 3, "--global-batch", 6, "--compute-dtype", "bf16"],
        ["--model", "DiT-L/4", "--depth", 2, "--global-batch", 8, "--compute-dtype", "bf16", "--recompute", "all"],
        ["--model", "DiT-L/8", "--depth", 3, "--global-batch", 16, "--threads", 1],
        ["--model", "DiT-XL/8", "--depth", 2, "--global-batch", 8, "--compute-dtype", "fp16"],
        ["--model", "DiT-XL/4", "--depth", 2, "--global-batch", 4, "--checkpoint-copy", "memory"],
    ]


@pytest.mark.parametrize("options", RUNS, ids=lambda options: " ".join(map(str, options)).replace("--", ""))
def test_a_run_holds_no_more_than_is_counted(options, tmp_path):
    """With freed memory given back what is counted; without a budget no more than the tensors twice."""
    model = [*SMALL, *options]
    kept_all = [option for option in model if option not in ("--recompute", "all")]
    output, resident = trained(tmp_path / "run", "--memory-budget", enough(model=kept_all, beside=PROCESS), model=model)
    needed, _ = needed_bytes(output)
    tensors = measured_tensors(tmp_path / "run")
    output, kept = trained(tmp_path / "kept", model=model)
    print(f"| {' '.join(map(str, options)).replace('--', '')} | {tensors / MIB:.0f} | {needed / MIB:.0f} | "
          f"{resident / MIB:.0f} | {(resident - tensors) / MIB:.0f} | {(kept - tensors) / MIB:.0f} |")
    assert resident < needed + 6 * MIB  # two decimals of GiB
    assert kept < 2 * tensors + PROCESS


def test_freed_memory_is_kept_where_there_is_room(tmp_path):
    """The budget counts it: resident memory stays below what the choice says."""
    output, resident = trained(tmp_path / "run", "--memory-budget", "1T")
    needed, tensors = needed_bytes(output)
    assert resident < needed and needed > 2 * tensors


def test_a_checkpoint_that_is_copied_to_memory_counts(budget_range, tmp_path):
    """Steps go on while the copy is written: it is part of what the budget holds."""
    least, most, beside = budget_range
    copying = ["--checkpoint-copy", "memory"]
    output, _ = trained(tmp_path / "ample", "--memory-budget", enough(*copying), *copying)
    needed, tensors = needed_bytes(output)
    copied = needed - tensors - beside
    state = read_plan(tmp_path / "ample")["predicted"]["by_kind"]
    assert copied == pytest.approx(sum(state[kind] for kind in ("master", "moments", "ema")), abs=20 * MIB)
    budget = int((least + most) / 2 + beside + copied)
    for copy in ("memory", "page-cache"):
        output, resident = trained(tmp_path / copy, "--memory-budget", budget, "--checkpoint-copy", copy, steps=4,
                                   checkpoint_every=1)
        assert resident < budget
        if copy == "memory":
            chosen = re.search(r"--recompute (\S+)", output)[1]
    assert chosen != re.search(r"--recompute (\S+)", output)[1], "room for the copy is taken from activations"
