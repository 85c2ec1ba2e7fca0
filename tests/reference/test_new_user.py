"""What a new user stumbled over: each thing once, on the real program."""

import functools
import json
import re

import conftest
import pytest
from browser import parts_of
from conftest import read_json, succeed, without_warnings
from PIL import Image
from run_files import read_plan

TINY = ["--model", "dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 4, "--num-classes", 4,
        "--data", "synthetic", "--image-size", 64, "--global-batch", 8, "--peak-tflops", 1, "--device", "cpu", "--threads", 1]
PIXELS = [*TINY, "--autoencoder", "pixels", "--image-size", 16, "--objective", "flow"]
# Its state is much of what it needs, so that a disk helps.
HEAVY = ["--model", "dit", "--hidden-size", 512, "--depth", 10, "--num-heads", 8, "--patch-size", 4, "--num-classes", 4,
         "--data", "synthetic", "--image-size", 64, "--global-batch", 4, "--peak-tflops", 1, "--device", "cpu"]


refusal = functools.partial(conftest.refusal, lines=without_warnings, timeout=300)


# Budgets


@pytest.mark.slow
def test_a_budget_means_the_same_in_plan_and_in_train(tmp_path):
    choice = re.compile(r"--recompute (\S+) --offload-activations (\S+): ([\d.]+) GiB, ([\d.]+) GiB of it tensors")
    budget = ["--memory-budget", "1T"]
    planned = succeed("plan", *TINY, "--gpu", "cpu", *budget)
    trained = succeed("train", *TINY, *budget, "--max-steps", 1, "--out", tmp_path / "run")
    said, did = choice.search(planned.stderr).groups(), choice.search(trained.stdout).groups()
    assert said[:2] == did[:2] and said[3] == did[3]
    too_little = ["--memory-budget", "20M"]
    assert "too little" in refusal("plan", *TINY, "--gpu", "cpu", *too_little)
    assert "too little" in refusal("train", *TINY, *too_little, "--max-steps", 1, "--out", tmp_path / "none")


def test_a_budget_chooses_on_a_gpu_that_is_planned():
    model = ["--model", "DiT-B/2", "--gpu", "A100-80G", "--compute-dtype", "bf16", "--global-batch", 128]
    plan = read_json("plan", *model, "--memory-budget", "10G")
    assert plan["options"]["recompute"] != "none"
    assert plan["machine"]["memory_bytes"] == 10 << 30
    assert plan["predicted"]["fits"] and plan["predicted"]["needed_bytes"] <= 10 << 30
    found = read_json("plan", "--search", *model, "--gpus", 1, "--memory-budget", "10G")
    assert all(choice["needed_bytes"] <= 10 << 30 for choice in found["best"])


@pytest.mark.slow
def test_a_refused_budget_names_what_works(tmp_path):
    """A disk where that is enough, else the least that is enough: both are followed."""
    out = ["--max-steps", 1, "--out", tmp_path / "run"]
    least = refusal("train", *HEAVY, *out, "--memory-budget", "30M")
    assert "nor the optimizer's state elsewhere" in least
    enough = re.search(r"the least that works is (--memory-budget \d+M --micro-batch -1);", least)[1].split()
    megabytes = int(enough[1][:-1])
    succeed("train", *HEAVY, *out, *enough)
    budget = ["--memory-budget", f"{int(0.8 * megabytes)}M"]
    command = ["train", *HEAVY, "--max-steps", 1, "--out", tmp_path / "disk", *budget]
    message = refusal(*command)
    options = re.search(r"with the optimizer's state elsewhere this fits, [\d.]+ GiB: (.*)$", message)[1].split()
    assert options[options.index("--offload-optimizer") + 1] == "nvme"
    succeed(*command, *options, timeout=300)


def test_training_says_how_much_of_the_memory_it_takes(tmp_path):
    result = succeed("train", *TINY, "--max-steps", 1, "--out", tmp_path / "run")
    assert re.search(r"memory: [\d.]+ of the [\d.]+ GiB that are free \(\d+ %\)", result.stdout)
    assert "% of the memory" not in result.stderr


# DeepSpeed's file


def test_advice_beside_a_deepspeed_file_names_its_keys(tmp_path):
    path = tmp_path / "ds_config.json"
    config = {"train_batch_size": 256, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    path.write_text(json.dumps(config))
    arguments = ["plan", "--model", "DiT-XL/2", "--gpu", "RTX-3060", "--gpus", 8, "--recompute", "all"]
    plan = read_json(*arguments, "--deepspeed", path)
    advice = "\n".join(plan["advice"])
    assert not plan["predicted"]["fits"]
    stage = int(re.search(rf'fits in [\d.]+ of [\d.]+ GiB each: --gpus 8 "zero_optimization.stage": (\d) in {path}', advice)[1])
    rate = float(re.search(rf'"optimizer.params.lr": (\S+) in {path}', advice)[1])
    for option in ("--zero-stage", "--lr "):
        assert option not in advice
    config["zero_optimization"]["stage"], config["optimizer"]["params"]["lr"] = stage, rate
    path.write_text(json.dumps(config))
    plan = read_json(*arguments, "--deepspeed", path)
    assert plan["predicted"]["fits"] and "lr" not in "\n".join(plan["advice"])


# Runs


def test_a_short_run_draws_its_grid_at_the_end(tmp_path):
    succeed("train", *PIXELS, "--max-steps", 3, "--sample-every", 1000, "--num-samples", 4, "--num-sampling-steps", 2,
            "--out", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "samples").iterdir()] == ["step-00000003.png"]


def test_the_report_is_as_far_as_the_run(tmp_path):
    succeed("train", *TINY, "--max-steps", 13, "--log-every", 5, "--out", tmp_path / "run")
    (figures,) = parts_of(tmp_path / "run" / "report.html", "figures")
    assert ["13", "steps"] in figures["items"] and ["104", "images seen"] in figures["items"]
    # What happened is told in words.
    succeed("train", *TINY, "--max-steps", 14, "--log-every", 5, "--out", tmp_path / "run")
    (figures,) = parts_of(tmp_path / "run" / "report.html", "figures")
    assert ["14", "steps"] in figures["items"]
    (events,) = [table for table in parts_of(tmp_path / "run" / "report.html", "table") if "event" in table["columns"]]
    assert ["step 13", "resume"] in events["rows"]


def test_two_steps_say_nothing_against_the_plan(tmp_path):
    result = succeed("train", *TINY, "--max-steps", 2, "--out", tmp_path / "run")
    assert "than the plan said" not in result.stdout
    assert not [finding for finding in read_plan(tmp_path / "run")["findings"] if finding.startswith("a step")]


def test_a_finished_run_keeps_its_settings(tmp_path):
    out = tmp_path / "run"
    succeed("train", *TINY, "--max-steps", 4, "--out", out)
    before = (out / "config.toml").read_bytes()
    again = succeed("train", *TINY, "--max-steps", 3, "--out", out)
    assert "finished after step 4" in again.stdout
    assert (out / "config.toml").read_bytes() == before
    succeed("train", *TINY, "--max-steps", 5, "--out", out)
    assert (out / "config.toml").read_bytes() != before


def pictures(folder, count, side):
    folder.mkdir()
    for i in range(count):
        Image.new("RGB", (side, side), (i * 7 % 256, 50, 90)).save(folder / f"{i:03}.png")
    return folder


@pytest.mark.slow
def test_the_size_of_a_store_is_taken(tmp_path):
    store = ["extract", "--data", pictures(tmp_path / "pictures", 8, 40), "--autoencoder", "pixels", "--image-size", 24]
    succeed(*store, "--out", tmp_path / "store")
    model = ["--model", "dit", "--hidden-size", 48, "--depth", 1, "--num-heads", 3, "--patch-size", 4, "--global-batch", 4,
             "--data", tmp_path / "store"]
    assert read_json("plan", *model, "--gpu", "cpu")["options"]["image-size"] == 24
    succeed("train", *model, "--max-steps", 1, "--peak-tflops", 1, "--device", "cpu", "--out", tmp_path / "run")
    assert "image-size = 24\n" in (tmp_path / "run" / "config.toml").read_text()
    message = refusal("train", *model, "--image-size", 32, "--max-steps", 1, "--out", tmp_path / "other")
    assert "[plan]" not in message and "--image-size 24" in message
    # With --max-minutes alone the number of steps is not known, and with it not that of epochs.
    timed = succeed("train", *model, "--max-minutes", 0.01, "--peak-tflops", 1, "--device", "cpu",
                    "--out", tmp_path / "timed")
    assert "8 samples: 2.0 steps an epoch, at most 0.01 minutes" in timed.stdout and "epochs in" not in timed.stdout
    # Another store of other settings says what differs in words.
    assert "enlarge (off there, on asked for)" in refusal(*store, "--enlarge", "--out", tmp_path / "store")


@pytest.mark.parametrize("command", [["train", "--out", "run"], ["plan"]])
def test_messages_of_data_name_no_other_command(tmp_path, command):
    arguments = [*TINY, "--data", tmp_path / "nowhere"]
    message = refusal(*command, *arguments)
    assert "[plan]" not in message and "does not exist" in message


def test_a_compressed_archive_is_named(tmp_path):
    (tmp_path / "pictures.tar.gz").write_bytes(b"\x1f\x8b")
    message = refusal("extract", "--data", tmp_path / "pictures.tar.gz", "--autoencoder", "pixels", "--image-size", 16,
                      "--out", tmp_path / "store")
    assert "pictures.tar.gz: unpack it first" in message


# Plans


def test_a_family_alone_says_how_large_it_is(kiln):
    text = kiln("plan", "--model", "dit", "--gpu", "A100-80G", "--compute-dtype", "bf16").stdout
    assert "--model dit without a size is as large as DiT-XL/2" in text
    assert "without a size" not in kiln("plan", "--model", "DiT-XL/2", "--gpu", "A100-80G").stdout
    assert "without a size" not in kiln("plan", "--model", "dit", "--depth", 4, "--gpu", "A100-80G").stdout


@pytest.mark.slow
def test_a_slow_precision_is_in_the_headline(kiln):
    model = ["plan", "--model", "DiT-XL/2", "--gpu", "A100-80G", "--micro-batch", 32]
    head = kiln(*model).stdout.splitlines()[:6]
    told = next(line for line in head if line.startswith("IN f32 IT TAKES"))
    factor = float(re.search(r"TAKES ([\d.]+) TIMES", told)[1])
    days = [read_json(*model, "--compute-dtype", dtype)["predicted"]["days"] for dtype in ("f32", "bf16")]
    assert factor == pytest.approx(days[0] / days[1], abs=0.06) and factor > 5
    assert "IT TAKES" not in kiln(*model, "--compute-dtype", "bf16").stdout


@pytest.mark.slow
def test_advice_is_not_what_is_set(kiln):
    """Not a micro-batch of 8 where a GPU has fewer images, nor less of what is least already."""
    text = kiln("plan", "--model", "DiT-S/2", "--gpu", "A100-80G", "--gpus", 64, "--compute-dtype", "bf16").stdout
    assert "is not a multiple of 8" not in text
    # Raising it to 8 and halving it for the memory would go round in circles.
    small = ["plan", "--model", "DiT-XL/2", "--gpu", "RTX-4090", "--compute-dtype", "bf16", "--global-batch", 64]
    assert "is not a multiple of 8" in kiln(*small, "--micro-batch", 4, "--gpu-memory", "30G").stdout
    for memory in ("18G", "14G"):
        assert "is not a multiple of 8" not in kiln(*small, "--micro-batch", 4, "--gpu-memory", memory).stdout
    full = kiln("plan", "--model", "DiT-XL/2", "--gpu", "A100-80G", "--compute-dtype", "bf16", "--micro-batch", 1,
                "--recompute", "all", "--gpu-memory", "14G").stdout
    for line in full.splitlines():
        if "% of the memory is used" in line:
            assert "--micro-batch 1" not in line and "--recompute all" not in line
