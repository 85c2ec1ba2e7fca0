"""Short trainings, whose logged numbers must be those of another one: of a CPU, of other memory choices, of a run that was
killed and resumed."""
import json
import re
import shutil
import time

from .session import BESIDE, Failed, scratch, side_by_side

STEPS = 20
COMPARED = ("loss", "loss_quartiles", "grad_norm", "lr")
UNTRIED = "--untried-gpu"
WAYS = ("update", "products", "packed-gradients", "handed-on-branch", "keep-gelu")


def training_options(session):
    """The options of a short training: of DiT-S/8, or in a rehearsal of what a CPU is done with at once."""
    model, batch, more = ["DiT-S/8"], 8, ["--seed", 3, "--lr", "3e-4", "--max-grad-norm", 1]
    if session.rehearses:
        model = ["dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 8, "--num-classes", 10]
        batch, more = 4, ["--no-preflight", "--peak-tflops", 1, "--threads", 1]
    return ["--model", *model, "--data", "synthetic", "--max-steps", STEPS, "--global-batch", batch, "--log-every", 1,
            "--checkpoint-every", 0, "--no-checkpoint", "--no-tensorboard", *more]


def log_of(run):
    """{step: its numbers} of a run folder; a step that was repeated after a kill counts once, as it was last."""
    path = run / "log.jsonl"
    written = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [json.loads(line) for line in written if line.endswith("\n")]  # a run that goes on may be in the middle of one
    return {line["step"]: {key: line[key] for key in COMPARED} for line in lines if "loss" in line}


def train(session, folder, name, *options):
    run = folder / name.replace(" ", "-").replace(",", "")
    session.run(session.program("kiln"), "train", *training_options(session), "--out", run, *options, timeout=120)
    log = log_of(run)
    if len(log) != STEPS:
        raise Failed(f"{name} logged {len(log)} steps of {STEPS}", log)
    return log


def worst_difference(a, b):
    """The largest relative difference of losses and norms, and its step. A number that is missing is the largest."""
    worst, where = 0.0, None
    for step, line in a.items():
        for key in ("loss", "grad_norm"):
            one, other = line[key], b.get(step, {}).get(key)
            difference = abs(one - other) / abs(other) if one is not None and other else 0.0 if one == other else float("inf")
            if difference > worst:
                worst, where = difference, f"{key} of step {step}"
    return worst, where


def as_on_the_cpu(session, dtype, allowed):
    with scratch() as folder:
        logs = [train(session, folder, f"{device} {number}", "--device", device, "--compute-dtype", dtype)
                for number, device in enumerate(("cpu", session.device))]
    details = {"cpu": logs[0], session.device + ", compared": logs[1]}
    worst, where = worst_difference(logs[1], logs[0])
    if worst > allowed:
        raise Failed(f"{where} differs by {worst:.2g}, allowed {allowed}", details)
    return f"losses and norms of {len(logs[0])} steps differ by at most {worst:.2g} (allowed {allowed})", details


def killed_and_resumed(session, folder, *options):
    run = folder / "killed"
    command = [session.program("kiln"), "train", *training_options(session), "--checkpoint-every", "5", "--out", run, *options]

    def saved():
        return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)

    begin = time.monotonic()
    with session.started(*command) as (process, number):
        # Files are written beside the steps: the log is further than they are.
        while process.poll() is None and not saved() and time.monotonic() - begin < 90:
            time.sleep(0.005)
        if process.poll() is not None:
            raise Failed("the run ended before it could be killed", {"output": number})
    step = saved()
    resumed = session.run(*command, timeout=120).stdout  # the first one was killed on leaving
    taken = [int(number) for number in re.findall(r"^step +(\d+)", resumed, re.MULTILINE)]
    if not step or taken != list(range(step + 1, STEPS + 1)):
        raise Failed(f"the run was killed after the checkpoint of step {step}, and then took the steps {taken}")
    return log_of(run)


# Memory choices that may not change a bit. {disk}: a folder.
EQUAL_RUNS = {
    "again": [],
    "as a graph": ["--cuda-graph"],
    "recompute": ["--recompute", "all"],
    "activations on the host": ["--offload-activations", "all"],
    "optimizer on the host": ["--offload-optimizer", "cpu"],
    "optimizer on the disk": ["--offload-optimizer", "nvme", "--nvme-path", "{disk}"],
    "stage 3, weights on the host": ["--zero-stage", "3", "--offload-params", "cpu"],
}


def equal_lines(session, dtype):
    fixed = ["--device", session.device, "--compute-dtype", dtype, "--deterministic"]
    with scratch() as folder:
        def job(name, options):
            options = [option.format(disk=folder) for option in options]
            return lambda: train(session, folder, name, *fixed, *options)

        jobs = {name: job(name, options) for name, options in {"first": [], **EQUAL_RUNS}.items()}
        jobs["killed and resumed"] = lambda: killed_and_resumed(session, folder, *fixed)
        logs = side_by_side(jobs, 2 if session.rehearses else 4)
    different = []
    for name, log in logs.items():
        if isinstance(log, Exception):
            different.append(f"{name}: {log}")
        elif log != logs["first"] and not isinstance(logs["first"], Exception):
            worst, where = worst_difference(log, logs["first"])
            different.append(f"{name} ({where}: {worst:.2g})")
    if different:
        raise Failed(f"other numbers than the first run's: {'; '.join(different)}", logs)
    return f"{len(logs)} runs logged the same numbers", logs["first"]


def untried_lines(session):
    """In f32 --untried-gpu times no products, and the bits stay. In bf16 products are timed: a run that is killed and
    resumed gives the bits of one that was not, if both begin with the same choices."""
    products = "gpu-products-0.json"
    untried = [] if session.rehearses else [UNTRIED]  # a CPU refuses it, and has a file of products to be read
    f32, bf16 = (["--device", session.device, "--deterministic", "--compute-dtype", dtype] for dtype in ("f32", "bf16"))
    with scratch() as folder:
        pairs = {"f32, with and without": [train(session, folder, "with", *f32, *untried), train(session, folder, "without", *f32)]}
        whole = train(session, folder, "whole", *bf16, *untried)
        if session.rehearses:
            shutil.copy(BESIDE.parent / "tests" / "fixtures" / products, folder / "whole")
        (folder / "killed").mkdir()
        shutil.copy(folder / "whole" / products, folder / "killed")
        pairs["bf16, killed and resumed"] = [killed_and_resumed(session, folder, *bf16, *untried), whole]
        choices = json.loads((folder / "whole" / products).read_text())["choices"]
    different = [f"{name} ({where}: {worst:.2g})" for name, pair in pairs.items() if pair[0] != pair[1]
                 for worst, where in [worst_difference(*pair)]]
    if different:
        raise Failed(f"other numbers: {'; '.join(different)}", {"logs": pairs, "choices": choices})
    gain = sum(choice["first_us"] for choice in choices) / sum(choice["us"] for choice in choices)
    return f"equal; {len(choices)} timed products, {gain:.3f}x as fast as cuBLASLt's first guesses", choices
