"""A training run that is killed, stopped or out of disk, and started again with the same command."""

import json
import math
import random
import resource
import shutil
import signal
import subprocess

import pytest
from conftest import FULL, assert_fails, assert_refused, program, run_program, succeed
from interruptions import until_interrupted, wait_while_running
from run_files import assert_no_leftovers, events, kill_after, log_lines, num_steps, read_config, saved, step_lines
from safetensors.torch import load_file

MODEL = ["--model", "dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 2, "--num-classes", 7]
OPTIONS = ["--data", "synthetic", "--image-size", 64, "--global-batch", 6, "--micro-batch", 4, "--lr", 1e-3, "--threads", 1,
           "--ema-decay", "0.99,0.5", "--log-every", 1, "--peak-tflops", 1, "--seed", 11]
STEPS = 120 if FULL else 80  # of an uninterrupted run, and of those that end as it does
WEIGHTS = ("model.safetensors", "ema.safetensors", "ema-0.5.safetensors", "train_state-00000-of-00001.safetensors")


def command(out, steps, *extra):
    """The usual options, `extra` ones in the place of those that they replace."""
    options = dict(zip(MODEL[::2] + OPTIONS[::2], MODEL[1::2] + OPTIONS[1::2])) | dict(zip(extra[::2], extra[1::2]))
    pairs = [part for pair in options.items() for part in pair]
    return ["train", *pairs, "--out", out, "--max-steps", steps]


def words(*arguments):
    return [str(part) for part in [program("kiln"), *command(*arguments)]]


def train(out, steps, *extra):
    return succeed(*command(out, steps, *extra), timeout=300)


def test_a_run_may_end_without_a_checkpoint(tmp_path):
    succeed(*command(tmp_path / "run", 3), "--no-checkpoint")
    assert [line["step"] for line in log_lines(tmp_path / "run") if "loss" in line] == [1, 2, 3]
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def losses(out):
    return [(line["step"], line["images_seen"], line["loss"], line["grad_norm"]) for line in step_lines(out)]


def checkpoint(out, step):
    return saved(out, step, *WEIGHTS)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    train(out, STEPS, "--checkpoint-every", 40)
    return out


@pytest.mark.parametrize("checkpoint_every, steps", [(17, STEPS), (1, STEPS if FULL else 40)])
def test_killed_runs_end_in_the_same_bits(uninterrupted, tmp_path, checkpoint_every, steps):
    """With a checkpoint after every step most kills fall into the writing of one."""
    chance = random.Random(checkpoint_every)
    out = tmp_path / "run"
    extra = ["--checkpoint-every", checkpoint_every, "--keep-checkpoints", 2]

    def killed(_):
        shutil.rmtree(out, ignore_errors=True)
        return all(kill_after(command(out, steps, *extra), out, chance.randrange(1, steps // 4)) for _ in range(4))

    until_interrupted(killed)
    train(out, steps, *extra)
    assert losses(out) == losses(uninterrupted)[:steps]
    assert [line[0] for line in losses(out)] == list(range(1, steps + 1))
    assert checkpoint(out, steps) == checkpoint(uninterrupted, steps)
    resumed = [line["step"] for line in events(out, "resume")]
    assert resumed and all(step % checkpoint_every == 0 or step == steps for step in resumed)
    assert_no_leftovers(out)


def test_same_seed_same_bytes(uninterrupted, tmp_path):
    train(tmp_path, 40, "--checkpoint-every", 40)
    assert checkpoint(tmp_path, 40) == checkpoint(uninterrupted, 40)
    assert losses(tmp_path) == losses(uninterrupted)[:40]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_stop_signal_checkpoints_and_exits_well(uninterrupted, tmp_path, stop):
    out = tmp_path / "run"

    def stopped(_):
        shutil.rmtree(out, ignore_errors=True)
        process = subprocess.Popen(words(out, STEPS, "--checkpoint-every", 0), stdout=subprocess.PIPE, text=True)
        wait_while_running(process, lambda: num_steps(out) >= 10)
        process.send_signal(stop)
        stdout, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return "stopped by a signal" in stdout and losses(out)[-1][0] < STEPS

    until_interrupted(stopped)
    step = losses(out)[-1][0]
    assert step >= 10
    assert set(checkpoint(out, step)) == set(WEIGHTS)
    train(out, STEPS)
    assert checkpoint(out, STEPS) == checkpoint(uninterrupted, STEPS)
    assert losses(out) == losses(uninterrupted)


def test_a_finished_run_stays_as_it_is(uninterrupted):
    before = checkpoint(uninterrupted, STEPS)
    result = train(uninterrupted, STEPS)
    assert f"finished after step {STEPS}" in result.stdout
    assert checkpoint(uninterrupted, STEPS) == before


@pytest.mark.slow
def test_a_torn_checkpoint_is_passed_over(uninterrupted, tmp_path):
    train(tmp_path, 60, "--checkpoint-every", 20)
    torn = tmp_path / "checkpoints" / "step-00000060" / "ema.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    (tmp_path / "checkpoints" / "step-00000070").mkdir()
    train(tmp_path, STEPS)
    assert {"event": "resume", "step": 40} in log_lines(tmp_path)
    assert checkpoint(tmp_path, STEPS) == checkpoint(uninterrupted, STEPS)
    assert losses(tmp_path) == losses(uninterrupted)


@pytest.mark.slow
def test_a_torn_log_line_is_cut(uninterrupted, tmp_path):
    train(tmp_path, 40)
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"step": 41, "loss": 0.9')
    train(tmp_path, STEPS)
    assert losses(tmp_path) == losses(uninterrupted)


@pytest.mark.slow
def test_losses_between_two_log_lines_survive(tmp_path):
    """A line every 10 steps is the mean over them, also when the run stopped in between."""
    (whole := tmp_path / "whole").mkdir()
    (cut := tmp_path / "cut").mkdir()
    train(whole, 20, "--log-every", 10)
    train(cut, 13, "--log-every", 10)
    train(cut, 20, "--log-every", 10)
    assert [line[0] for line in losses(cut)] == [10, 13, 20], "the last step of a run has a line"
    assert [line[2] for line in losses(cut) if line[0] != 13] == [line[2] for line in losses(whole)]
    terms = {out: {line["step"]: line["loss_by_term"] for line in step_lines(out)} for out in (whole, cut)}
    assert terms[whole] == {step: of_step for step, of_step in terms[cut].items() if step != 13}


CONTRASTIVE = ("--objective", "flow", "--contrastive-weight", 0.05)


@pytest.mark.slow
def test_a_contrastive_run_goes_on_with_the_same_partners(tmp_path):
    """The same bits after a resume; with several ranks, the same losses but for rounding."""
    for name, steps in (("whole", [9]), ("cut", [4, 9])):
        (tmp_path / name).mkdir()
        for last in steps:
            train(tmp_path / name, last, *CONTRASTIVE)
    whole = tmp_path / "whole"
    assert checkpoint(tmp_path / "cut", 9) == checkpoint(whole, 9)
    assert losses(tmp_path / "cut") == losses(whole)
    terms = [line["loss_by_term"] for line in step_lines(whole)]
    assert all(abs(of_step["mse"] - 0.05 * of_step["contrastive"] - line[2]) < 1e-5
               for of_step, line in zip(terms, losses(whole), strict=True))
    (ranks := tmp_path / "ranks").mkdir()
    train(ranks, 9, *CONTRASTIVE, "--nproc", 3, "--micro-batch", 1)
    for one, three in zip(losses(whole), losses(ranks), strict=True):
        assert math.isclose(one[2], three[2], rel_tol=1e-4), one[0]
    assert read_config(whole)["objective"]["contrastive_lambda"] == 0.05
    assert_fails("--contrastive-weight (0.05 -> 0.1)",
                 *command(whole, 12, *CONTRASTIVE[:2], "--contrastive-weight", 0.1), code=None)


def test_contrastive_flow_matching_is_for_flows(tmp_path):
    assert_refused(command(tmp_path, 2, "--objective", "iddpm", "--contrastive-weight", 0.05),
                   "--contrastive-weight has no effect with --objective iddpm", code=None)


ALIGNED = ("--align-weight", 0.5)


@pytest.mark.slow
def test_a_run_with_a_projector_goes_on_in_the_same_bits(tmp_path):
    """Its weights resume from a file of their own; nothing that is made of the run has them."""
    for name, steps in (("whole", [9]), ("cut", [4, 9])):
        (tmp_path / name).mkdir()
        for last in steps:
            train(tmp_path / name, last, *ALIGNED)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    last = "checkpoints/step-00000009"
    assert checkpoint(cut, 9) == checkpoint(whole, 9) and losses(cut) == losses(whole)
    assert (cut / last / "head.safetensors").read_bytes() == (whole / last / "head.safetensors").read_bytes()
    terms = [line["loss_by_term"] for line in step_lines(whole)]
    assert all(abs(of_step["mse"] + of_step["vb"] + 0.5 * of_step["align"] - line[2]) < 1e-5
               for of_step, line in zip(terms, losses(whole), strict=True))
    (ranks := tmp_path / "ranks").mkdir()
    train(ranks, 9, *ALIGNED, "--nproc", 3, "--micro-batch", 1, "--zero-stage", 3)
    for one, three in zip(losses(whole), losses(ranks), strict=True):
        assert math.isclose(one[2], three[2], rel_tol=1e-4), one[0]

    head = set(load_file(whole / last / "head.safetensors"))
    assert head == {f"projector.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}
    for name in ("model.safetensors", "ema.safetensors", "ema-0.5.safetensors"):
        assert not any("projector" in key for key in load_file(whole / last / name)), name
    converted = tmp_path / "converted.safetensors"
    succeed("convert", "--in", whole, "--out", converted)
    assert not any("projector" in key for key in load_file(converted))
    assert_refused(command(whole, 12, "--align-weight", 0.25), "--align-weight (0.5 -> 0.25)")


@pytest.mark.slow
def test_changed_options_are_refused_by_name(uninterrupted):
    for option, value in [("--lr", 2e-3), ("--seed", 12), ("--global-batch", 12), ("--depth", 3), ("--objective", "flow"),
                          ("--ema-decay", 0.99), ("--weight-decay", 0.1)]:
        assert_refused(command(uninterrupted, 130, option, value), option)


@pytest.mark.slow
def test_harmless_changes_pass_and_rounding_warns(uninterrupted, tmp_path):
    train(tmp_path, 10)
    result = train(tmp_path, 20, "--recompute", "all", "--log-every", 5)
    assert result.stderr == ""
    assert checkpoint(tmp_path, 20)
    result = train(tmp_path, 30, "--micro-batch", 3, "--threads", 2)
    assert "--micro-batch (4 -> 3)" in result.stderr and "2 threads" in result.stderr


@pytest.mark.slow
def test_the_compute_dtype_may_change(tmp_path):
    for steps, dtype in [(10, "f32"), (20, "bf16"), (30, "fp16"), (40, "f32")]:
        train(tmp_path, steps, "--compute-dtype", dtype)
    steps = [line[0] for line in losses(tmp_path)]
    assert steps == list(range(1, 41))
    values = [line[2] for line in losses(tmp_path)]
    assert sum(values[30:]) < sum(values[:10])


def limit_file_size(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(uninterrupted, tmp_path):
    train(tmp_path, 40)
    before = checkpoint(tmp_path, 40)
    result = subprocess.run(words(tmp_path, 60), capture_output=True, text=True, timeout=300,
                            preexec_fn=limit_file_size(len(before["model.safetensors"]) // 2))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1 and "File too large" in result.stderr
    assert checkpoint(tmp_path, 40) == before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000040"]
    train(tmp_path, STEPS)
    assert checkpoint(tmp_path, STEPS) == checkpoint(uninterrupted, STEPS)


@pytest.mark.slow
def test_finding_6_by_products_do_not_end_training(tmp_path):
    def trained_without(steps):
        """What the run warns of: {name: cause}."""
        result = train(tmp_path, steps, "--checkpoint-every", 5)
        lines = [line.split("training goes on without ")[1] for line in result.stderr.splitlines() if "goes on without" in line]
        causes = dict(line.split(": ", 1) for line in lines)
        assert len(lines) == len(causes), "once each"
        return causes

    assert trained_without(10) == {}
    (tmp_path / "plan.json").write_text("{}")  # which the report reads
    assert set(trained_without(20)) <= {"report.html"}
    for steps, name in ((30, "report.html"), (40, "plan.json")):
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
        cause = trained_without(steps)[name]
        assert cause.startswith("cannot write") and "it is a folder" in cause
    assert [line[0] for line in losses(tmp_path)] == list(range(1, 41)) and checkpoint(tmp_path, 40)
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "log.jsonl").mkdir()
    assert "it is a folder" in trained_without(50)["lines of log.jsonl"] and checkpoint(tmp_path, 50)


def test_an_unusable_run_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(command(tmp_path / "file" / "run", 10), "--out")


def test_non_finite_steps_are_named_and_stop_the_run(tmp_path):
    result = run_program("kiln", *command(tmp_path, 50, "--lr", 1e30, "--max-bad-steps", 3, "--checkpoint-every", 1))
    assert result.returncode == 1
    skipped = events(tmp_path, "skipped")
    assert len(skipped) == 4
    assert skipped[0]["sample_ids"] and len(skipped[0]["sample_ids"]) == len(skipped[0]["timesteps"])
    last = result.stderr.splitlines()[-1]
    assert "4 steps in a row" in last and "--max-bad-steps 3" in last and "step-0000" in last
    assert "not finite" in result.stderr.splitlines()[0]
    # Skipped steps moved nothing: neither weights nor averages nor moments.
    first = skipped[0]["step"]
    assert checkpoint(tmp_path, first - 1) == checkpoint(tmp_path, first) == checkpoint(tmp_path, first + 1)


def cosine(progress):
    return 1e-3 * (1 + math.cos(math.pi * min(1, progress))) / 2


@pytest.mark.slow
def test_a_time_limit_ends_the_run_and_its_schedule(tmp_path):
    train(tmp_path, 10**6, "--max-minutes", 0.03, "--lr-schedule", "cosine")
    lines = [line for line in log_lines(tmp_path) if "lr" in line]
    rates, seconds = ([line[name] for line in lines] for name in ("lr", "train_seconds"))
    assert all(passed < 1.8 for passed in seconds[:-1])
    newest = max((tmp_path / "checkpoints").iterdir()) / "train_state.json"
    assert json.loads(newest.read_text())["train_seconds"] >= 1.8
    # Of a moment between the logging of the step before and that of this one.
    for rate, earliest, latest in zip(rates, [0, *seconds], seconds):
        assert cosine(latest / 1.8) - 1e-12 <= rate <= cosine(earliest / 1.8) + 1e-12


@pytest.mark.slow
def test_impossible_options_are_one_line(tmp_path):
    cases = [
        (["--micro-batch", 7], "--micro-batch"), (["--lr", -1], "--lr"), (["--ema-decay", "1.5"], "--ema-decay"),
        (["--objective", "edm"], "--objective"), (["--recompute", "9"], "--recompute"),
        (["--compute-dtype", "f64"], "--compute-dtype"), (["--data", tmp_path / "absent"], "does not exist"),
        (["--data", tmp_path], "feature store"), (["--snr-gamma", 5], "--snr-gamma"),
        (["--model-config", "{"], "--model-config"), (["--model", "DiT-Q/2"], "DiT-S/2"),
        (["--image-size", 30], "--image-size"), (["--device", "tpu"], "--device"),
    ]
    for extra, expected in cases:
        assert_refused(command(tmp_path / "run", 10, *extra), expected, code=None)
        assert not (tmp_path / "run" / "checkpoints").exists() or not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_recipes(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('# widths\nlr = 2e-3\nglobal-batch = 4\nema-decay = [0.9]\nmicro-batch = 2\nobjective = "flow"\n')
    arguments = ["train", "--recipe", recipe, *MODEL, "--data", "synthetic", "--image-size", 64, "--max-steps", 2,
                 "--peak-tflops", 1, "--out", tmp_path / "run", "--lr", 1e-3]
    succeed(*arguments, timeout=60)
    resolved = (tmp_path / "run" / "config.toml").read_text().splitlines()
    assert "lr = 0.001" in resolved and "global-batch = 4" in resolved and 'objective = "flow"' in resolved
    # The resolved config is itself a recipe.
    again = succeed("train", "--recipe", tmp_path / "run" / "config.toml", "--max-steps", 3, timeout=60)
    assert "resuming" in again.stdout

    for text, expected in [("globalbatch = 1\n", "global-batch"), ("lr = 'fast'\n", "number"), ("lr 1\n", "line 1"),
                           ("max-step = 3\n", "max-steps"), ("[train]\n", "tables")]:
        recipe.write_text(text)
        assert_refused(arguments, expected, timeout=60)


def test_a_cosine_whose_end_moves_warns(tmp_path):
    train(tmp_path, 4, "--lr-schedule", "cosine")
    result = train(tmp_path, 8, "--lr-schedule", "cosine")
    assert "--max-steps 8 instead of 4 moves the end of the cosine" in result.stderr


def test_a_setting_without_effect_warns(tmp_path):
    tf32 = succeed(*command(tmp_path, 2), "--tf32", "--device", "cpu")
    assert "warning: --tf32 has no effect on a CPU" in tf32.stderr
