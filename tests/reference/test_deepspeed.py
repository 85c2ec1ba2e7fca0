"""kiln train --deepspeed: the files that DeepSpeed's users have, given to the real program."""

import json
import re

import pytest
from conftest import assert_fails, read_json, refusal, succeed
from run_files import step_lines

# As guides on training Stable Diffusion with DeepSpeed have it.
GUIDES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": 5e7,
        "allgather_bucket_size": 5e7,
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "wall_clock_breakdown": True,
}
TRAIN = ["--model", "dit", "--hidden-size", 32, "--depth", 2, "--num-heads", 4, "--patch-size", 2, "--num-classes", 5,
         "--data", "synthetic", "--image-size", 64, "--global-batch", 8, "--max-steps", 3, "--log-every", 1, "--peak-tflops", 1,
         "--no-tensorboard", "--device", "cpu", "--threads", 1, "--seed", 5]


@pytest.fixture
def command(tmp_path):
    def arguments(config, *more, command="train"):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        target = [] if command == "plan" else ["--out", tmp_path / "run"]
        return [command, *TRAIN, *target, "--deepspeed", path, *more]

    return arguments


@pytest.mark.parametrize("ranks", [[], ["--nproc", 2]], ids=["alone", "two-ranks"])
@pytest.mark.slow
def test_the_guides_file_trains(command, tmp_path, ranks):
    result = succeed(*command(GUIDES, *ranks), timeout=60)
    config = (tmp_path / "run" / "config.toml").read_text()
    micro_batch = 1 if ranks else 2
    for line in ("zero-stage = 2", "lr = 1e-05", 'compute-dtype = "fp16"', 'offload-optimizer = "cpu"',
                 'offload-activations = "all"', "reduce-bucket-size = 50000000", "weight-decay = 0.01",
                 f"micro-batch = {micro_batch}", "global-batch = 8", "loss-scale-hysteresis = 2"):
        assert line in config.splitlines(), line
    assert "--zero-stage 2  (zero_optimization.stage)" in result.stderr
    assert result.stderr.count("--zero-stage 2") == 1  # said by one rank
    for key in ("allgather_bucket_size", "partition_activations"):
        assert re.search(rf"warning: .*{key} has no effect here: ", result.stderr)
    assert [line["step"] for line in step_lines(tmp_path / "run")] == [1, 2, 3]
    # The saved options are the whole of it: the file is not needed again.
    again = succeed("train", "--recipe", tmp_path / "run" / "config.toml", "--max-steps", 4, timeout=60)
    assert "resuming" in again.stdout


def test_it_plans_and_probes(command):
    result = succeed(*command(GUIDES, "--gpu", "A100-80G", "--gpus", 4, "--global-batch", 32, "--json", command="plan"),
                     timeout=60)
    assert "--micro-batch 2 " in result.stderr  # 32 / (4 x 4)
    json.loads(result.stdout)
    read_json(*command(GUIDES, "--steps", 2, command="probe"), timeout=60)


@pytest.mark.parametrize("change, more, parts", [
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, [], ["train_batch_size 64", "= 16"]),
    ({}, ["--lr", 1e-4], ["optimizer.params.lr makes --lr 1e-05", "the command line says 0.0001"]),
    ({"zero_optimisation": {"stage": 2}}, [], ["zero_optimisation", "did you mean 'zero_optimization'"]),
    ({"optimizer": {"type": "OneBitAdam"}}, [], ["OneBitAdam", "AdamW"]),
    ({"bf16": {"enabled": True}}, [], ["fp16.enabled", "bf16.enabled"]),
    ({"zero_optimization": {"stage": 4}}, [], ["zero-stage", "4"]),
])
def test_what_cannot_be_is_named(command, tmp_path, change, more, parts):
    last = refusal(*command(GUIDES | change, *more), code=None, lines=lambda text: text.splitlines()[-1:], timeout=60)
    assert all(part in last for part in parts), last
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there(tmp_path):
    assert_fails("cannot read --deepspeed", "train", *TRAIN, "--out", tmp_path / "run",
                 "--deepspeed", tmp_path / "absent.json", code=None)


def test_the_copied_name_is_read_with_a_warning(command):
    result = succeed(*command({"zero_optimization": {"stage": 3, "stage3_max_reuse_parameters": 1e9}}), timeout=60)
    assert "stage3_max_reuse_parameters is read as zero_optimization.stage3_max_reuse_distance" in result.stderr
