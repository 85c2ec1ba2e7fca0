"""The peak memory that a plan predicts is what steps take, for each family that takes captions: a few configurations that cover
what benchmarks/plan_memory.py draws at random."""

import statistics

import pytest
from planned_memory import make_stores, planned_and_measured, relative_error, state_bytes

UNET = {"block_out_channels": [32, 64], "norm_num_groups": 8, "layers_per_block": 1, "attention_head_dim": 4,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]}
COVERING = [
    {"store": "buckets", "model": "pixart", "objective": "iddpm", "hidden-size": 144, "num-heads": 3, "depth": 2, "patch-size": 2,
     "model-config": {"qk_norm": True, "micro_condition": True,
                      "kv_compress_config": {"sampling": "conv", "scale_factor": 2, "kv_compress_layer": [1]}},
     "compute-dtype": "bf16", "optimizer": "came", "global-batch": 4, "micro-batch": 2, "recompute": "0", "ema-decay": "0.99,0.999"},
    {"store": "buckets", "model": "sana", "objective": "flow", "optimizer": "adamw-8bit", "global-batch": 3, "recompute": "all",
     "model-config": {"num_attention_heads": 6, "attention_head_dim": 32, "num_cross_attention_heads": 4, "cross_attention_head_dim": 48,
                      "cross_attention_dim": 192, "num_layers": 2, "patch_size": 2, "qk_norm": "rms_norm_across_heads"}},
    {"store": "square", "model": "unet2d_condition", "objective": "epsilon", "model-config": UNET | {"upcast_attention": True},
     "compute-dtype": "bf16", "optimizer": "adamw", "global-batch": 2, "ema-decay": "none", "offload-optimizer": "nvme"},
    {"store": "square", "model": "unet2d_condition", "objective": "v_prediction", "model-config": UNET, "optimizer": "came-sana",
     "global-batch": 4, "micro-batch": 2, "ema-decay": "none", "lora-rank": 4},
]  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


@pytest.mark.slow
def test_peaks_are_as_planned(stores, tmp_path):
    errors = []
    for number, configuration in enumerate(COVERING):
        folder = tmp_path / str(number)
        folder.mkdir()
        plan = planned_and_measured(configuration | {"threads": 1}, stores, folder)
        assert state_bytes(plan["predicted"]) == state_bytes(plan["measured"]), configuration
        errors.append(abs(relative_error(plan)))
    assert statistics.median(errors) < 0.01 and max(errors) < 0.03, errors
