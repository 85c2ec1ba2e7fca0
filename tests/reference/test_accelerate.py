"""kiln train --accelerate: the default_config.yaml that accelerate itself writes, given to the real program."""

import json

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DeepSpeedPlugin, write_basic_config
from conftest import assert_fails, assert_refused, succeed
from test_deepspeed import GUIDES, TRAIN

SECTION = dict(zero_stage=2, offload_optimizer_device="cpu", offload_param_device="none", gradient_accumulation_steps=2,
               gradient_clipping=1.0, zero3_init_flag=False, zero3_save_16bit_model=True)


def cluster(folder, section=None, **changes):
    settings = dict(compute_environment="LOCAL_MACHINE", distributed_type="DEEPSPEED" if section else "NO", mixed_precision="bf16",
                    use_cpu=False, debug=False, num_processes=2, machine_rank=0, num_machines=1, main_training_function="main",
                    downcast_bf16="no", same_network=True, rdzv_backend="static", enable_cpu_affinity=False, tpu_use_cluster=False,
                    tpu_use_sudo=False) | changes
    if section:
        settings["deepspeed_config"] = section
    path = folder / "default_config.yaml"
    ClusterConfig(**settings).to_yaml_file(path)
    return path


def command(folder, path, *more):
    return ["train", *TRAIN, "--out", folder / "run", "--accelerate", path, *more]


def train(folder, path, *more):
    return succeed(*command(folder, path, *more), timeout=60)


def assert_one_line(folder, path, expected):
    assert_refused(command(folder, path), expected, code=None, timeout=60)


def options_of(folder):
    return (folder / "run/config.toml").read_text().splitlines()


def test_deepspeed_through_accelerate(tmp_path):
    result = train(tmp_path, cluster(tmp_path, SECTION))
    for line in ("zero-stage = 2", 'compute-dtype = "bf16"', 'offload-optimizer = "cpu"', "nproc = 2", "micro-batch = 2",
                 "max-grad-norm = 1.0"):
        assert line in options_of(tmp_path), line
    assert "--zero-stage 2  (deepspeed_config.zero_stage)" in result.stderr
    assert result.stderr.count("--zero-stage 2") == 1  # said once for both ranks


def test_copied_from_a_web_page(tmp_path):
    path = cluster(tmp_path, SECTION)
    text = path.read_text()
    assert "\n  zero_stage" in text
    path.write_text("\n".join(line.replace("  ", "\u00a0\u00a0") if line.startswith("  ") else line for line in text.splitlines()))
    train(tmp_path, path)
    assert "zero-stage = 2" in options_of(tmp_path)


def test_it_names_a_deepspeed_file(tmp_path):
    (tmp_path / "ds_config.json").write_text(json.dumps(GUIDES))
    own = str(tmp_path / "ds_config.json")
    path = cluster(tmp_path, dict(deepspeed_config_file=own, zero3_init_flag=False), mixed_precision=None)
    result = train(tmp_path, path)
    assert "zero-stage = 2" in options_of(tmp_path) and 'compute-dtype = "fp16"' in options_of(tmp_path)
    assert f"--zero-stage 2  (zero_optimization.stage of {own})" in result.stderr  # not of accelerate's own file
    assert "--nproc 2  (num_processes)" in result.stderr


@pytest.mark.parametrize("section, changes, key", [
    (dict(zero_stage=3), {}, "deepspeed_config.zero_stage"), ({}, dict(mixed_precision="bf16"), "mixed_precision bf16"),
    (dict(gradient_clipping=1.0), {}, "deepspeed_config.gradient_clipping"),
])
def test_keys_beside_a_deepspeed_file_are_refused(tmp_path, monkeypatch, section, changes, key):
    """As accelerate refuses them."""
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", ",".join([*section, *changes]))
    with pytest.raises(ValueError, match="will be ignored"):
        DeepSpeedPlugin._deepspeed_config_checks(None)
    own = tmp_path / "ds_config.json"
    own.write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}))
    path = cluster(tmp_path, dict(deepspeed_config_file=str(own)) | section, **dict(mixed_precision="no") | changes)
    assert_one_line(tmp_path, path, f"{key} has no effect beside deepspeed_config_file {own}: say it there")


def test_an_empty_name_of_a_deepspeed_file_is_none(tmp_path):
    path = cluster(tmp_path, dict(zero_stage=1))
    path.write_text(path.read_text().replace("  zero_stage", "  deepspeed_config_file:\n  zero_stage"))
    assert "deepspeed_config_file:\n" in path.read_text()
    train(tmp_path, path)
    assert "zero-stage = 1" in options_of(tmp_path)


def test_the_basic_config(tmp_path):
    """What accelerate writes by itself, of this machine."""
    write_basic_config(mixed_precision="no", save_location=str(tmp_path / "basic.yaml"))
    train(tmp_path, tmp_path / "basic.yaml")


@pytest.mark.parametrize("section, changes, expected", [
    (None, dict(distributed_type="FSDP"), "distributed_type FSDP is not supported"),
    (None, dict(num_machines=2, num_processes=4), "num_machines 2: start the ranks of several machines"),
    (SECTION | dict(zero_stag=1), {}, "did you mean 'zero_stage'"),
    (SECTION | dict(zero_stage=5), {}, "zero-stage"),
    (dict(deepspeed_config_file="ds.json", zero_stag=1), dict(mixed_precision="no"), "did you mean 'zero_stage'"),
    (dict(deepspeed_config_file=3), dict(mixed_precision="no"), "deepspeed_config_file expects a path, got 3"),
])
def test_what_cannot_be_had_is_one_line(tmp_path, section, changes, expected):
    assert_one_line(tmp_path, cluster(tmp_path, section, **changes), expected)


@pytest.mark.parametrize("text, expected", [
    ("num_processes 2\n", "line 1 is no \"key: value\""), ("num_procesess: 2\n", "did you mean 'num_processes'"),
    ("num_processes: two\n", "num_processes expects a positive number"),
    ("mixed_precision: bf16\nmixed_precision: fp16\n", "line 2 gives mixed_precision a second time"),
    ("mixed_precision: int8\n", "mixed_precision expects no, fp16, bf16 or fp8, got int8"),
])
def test_damaged_files_are_one_line(tmp_path, text, expected):
    (tmp_path / "config.yaml").write_text(text)
    assert_one_line(tmp_path, tmp_path / "config.yaml", expected)


@pytest.mark.slow
def test_the_command_line_may_not_contradict(tmp_path):
    assert_fails("the command line says", *command(tmp_path, cluster(tmp_path, SECTION), "--zero-stage", 3), timeout=60,
                 code=None)
