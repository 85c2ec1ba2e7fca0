"""DiT against diffusers' DiTTransformer2DModel, a compact PyTorch DiT, and (KILN_DIT_REPO) the original's models.py."""

import json

import pytest
import torch
from closeness import (FORWARD, FORWARD_BF16, GRADIENT_BF16, assert_close, assert_equals, gradients_by_name,
                       gradients_of, violation)
from conftest import run_program
from diffusers import DiTTransformer2DModel
from dit_torch import DiT, randomise_
from safetensors.torch import save_file

TINY = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=2, num_heads=4, mlp_ratio=4.0,
            num_classes=10, class_dropout_prob=0.1, learn_sigma=True)
CONFIGS = {
    "tiny": TINY,
    "patch 4, no sigma": TINY | dict(input_size=16, patch_size=4, learn_sigma=False, num_heads=2),
    "patch 8, wide heads": TINY | dict(input_size=32, patch_size=8, hidden_size=144, num_heads=2),  # head_dim 72, as XL
    "odd sizes": TINY | dict(input_size=10, hidden_size=36, num_heads=3, depth=3, mlp_ratio=2.6, in_channels=3),
    "one token, one head": TINY | dict(input_size=2, num_heads=1, depth=1),
    "no null class": TINY | dict(class_dropout_prob=0.0),
    "the null class alone": TINY | dict(num_classes=0),  # the original keeps a table of one row
    "unconditional": TINY | dict(num_classes=0, class_dropout_prob=0.0),
}


def inputs_of(config, batch=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    size, channels = config["input_size"], config["in_channels"]
    inputs = {
        "x": torch.randn(batch, channels, size, size, generator=generator),
        "t": torch.tensor([0.0, 17.25, 999.0][:batch]),
        "grad_output": torch.randn(batch, channels * (2 if config["learn_sigma"] else 1), size, size,
                                   generator=generator),
    }
    last = config["num_classes"] if config["class_dropout_prob"] > 0 else config["num_classes"] - 1
    if last >= 0:
        inputs["y"] = torch.tensor([min(2, last), last, min(2, last)][:batch])  # a repeated class: its gradients add up
    return inputs


def run_torch(model, inputs, autocast=False):
    """Output and the gradient of every trainable parameter."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(inputs["x"], inputs["t"], inputs.get("y"))
    return output.detach(), gradients_by_name(model, (output * inputs["grad_output"]).sum())


def output_of(conformance, weights, config=TINY, inputs=None):
    return conformance("forward", model="dit", config=config, weights=weights,
                       inputs=inputs or inputs_of(config))["output"]


def compare(conformance, config, model):
    inputs = inputs_of(config)
    got = conformance("forward", "--backward", model="dit", config=config, weights=model.state_dict(), inputs=inputs)
    assert_equals(got, run_torch(model, inputs))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_output_and_gradients_equal_torch(conformance, config):
    compare(conformance, config, randomise_(DiT(**config)).eval())


def test_bf16_is_close_to_f32(conformance):
    config = TINY | dict(hidden_size=128, depth=4)
    model = randomise_(DiT(**config)).eval()
    inputs = inputs_of(config)
    outputs = conformance("forward", "--backward", model="dit", config=config, weights=model.state_dict(),
                          inputs=inputs, dtype="bf16")
    want = run_torch(model, inputs)
    assert_equals(outputs, want, FORWARD_BF16, GRADIENT_BF16, peak=False)
    assert violation(outputs["output"], want[0], FORWARD) > 1, "it ran in f32"


@pytest.mark.parametrize("name", ["tiny", "patch 8, wide heads", "no null class"])
def test_bf16_errs_no_more_than_autocast(conformance, name):
    """Against f32, over all outputs and all gradients together: single elements are noise in either."""
    config = CONFIGS[name] | dict(depth=4)
    model = randomise_(DiT(**config)).eval()
    inputs = inputs_of(config)
    outputs = conformance("forward", "--backward", model="dit", config=config, weights=model.state_dict(),
                          inputs=inputs, dtype="bf16")
    want, want_gradients = run_torch(model, inputs)
    theirs, their_gradients = run_torch(model, inputs, autocast=True)

    def error(got, got_gradients):
        """Relative l2 errors of the output and of the gradients, each by its own size."""
        relative = lambda a, b: ((a.float() - b).norm() / b.norm()).item()
        large = [key for key in want_gradients if want_gradients[key].abs().max() > 1e-3]  # others are zero in theory
        squares = [relative(got_gradients[key], want_gradients[key]) ** 2 for key in large]
        return relative(got, want), (sum(squares) / len(squares)) ** 0.5

    ours, autocast = error(outputs["output"], gradients_of(outputs)), error(theirs, their_gradients)
    for what, mine, other in zip(("output", "gradients"), ours, autocast):
        assert 1e-4 < other, f"autocast computed the {what} in f32"
        assert 0.1 * other < mine <= 1.5 * other, f"{what}: an error of {mine:.2e}, autocast's is {other:.2e}"


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16])
def test_low_precision_files_are_computed_in_f32(conformance, storage):
    model = randomise_(DiT(**TINY)).eval()
    weights = {key: value.to(storage) for key, value in model.state_dict().items()}
    model.load_state_dict({key: value.float() for key, value in weights.items()})
    assert_close(output_of(conformance, weights), run_torch(model, inputs_of(TINY))[0])


def test_drop_uses_the_null_class(conformance):
    model = randomise_(DiT(**TINY)).eval()
    inputs = inputs_of(TINY)
    dropped = output_of(conformance, model.state_dict(), inputs=inputs | {"drop": torch.tensor([1, 0, 0])})
    assert_close(dropped, model(inputs["x"], inputs["t"], torch.tensor([10, 10, 2])))


def test_absent_position_table_is_computed(conformance):
    model = randomise_(DiT(**TINY)).eval()
    weights = {key: value for key, value in model.state_dict().items() if key != "pos_embed"}
    assert_close(output_of(conformance, weights), run_torch(model, inputs_of(TINY))[0])


def test_position_table_of_the_file_is_used(conformance):
    model = randomise_(DiT(**TINY)).eval()
    with torch.no_grad():
        model.pos_embed.mul_(-0.5)
    assert_close(output_of(conformance, model.state_dict()), run_torch(model, inputs_of(TINY))[0])


def shrink_tokens_(model, factor=1e-3):
    """Keeps the residual stream at a size at which eps is a good part of the variance."""
    with torch.no_grad():
        model.pos_embed.mul_(factor)
        for name, parameter in model.named_parameters():
            if "x_embedder" in name or "attn.proj" in name or "mlp.fc2" in name:
                parameter.mul_(factor)
    return model


def assert_notices(conformance, model, least, **wrong):
    """Kiln's output is the model's, and more than `least` tolerances from that of one that is wrong."""
    output = output_of(conformance, model.state_dict())
    assert_close(output, run_torch(model, inputs_of(TINY))[0])
    other = DiT(**TINY, **wrong)
    other.load_state_dict(model.state_dict())
    assert violation(output, run_torch(other, inputs_of(TINY))[0], FORWARD) > least


def test_norm_eps(conformance):
    model = shrink_tokens_(randomise_(DiT(**TINY))).eval()
    assert_notices(conformance, model, 100, norm_eps=1e-5)


def test_gelu_is_the_tanh_form(conformance):
    model = randomise_(DiT(**TINY)).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.fc1.weight.mul_(2)  # the two forms differ most near 2.5
            block.mlp.fc2.weight.mul_(4)
    assert_notices(conformance, model, 2, gelu="none")


def test_training_checkpoint_uses_its_ema(conformance, tmp_path):
    model, ema = randomise_(DiT(**TINY), seed=3).eval(), randomise_(DiT(**TINY), seed=4).eval()
    path = tmp_path / "0000100.pt"
    torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "opt": {}, "args": None}, path)
    assert_close(output_of(conformance, path), run_torch(ema, inputs_of(TINY))[0])


@pytest.mark.parametrize("ending, save", [("safetensors", save_file), ("bin", torch.save)])
def test_sharded_checkpoint(conformance, tmp_path, ending, save):
    model = randomise_(DiT(**TINY)).eval()
    shards = {f"a-00001-of-00002.{ending}": {}, f"a-00002-of-00002.{ending}": {}}
    for i, (key, value) in enumerate(model.state_dict().items()):
        list(shards.values())[i % 2][key] = value
    for name, tensors in shards.items():
        save(tensors, tmp_path / name)
    index = tmp_path / f"a.{ending}.index.json"
    index.write_text(json.dumps({"weight_map": {key: name for name, tensors in shards.items() for key in tensors}}))
    assert_close(output_of(conformance, index), run_torch(model, inputs_of(TINY))[0])


@pytest.mark.parametrize("dtype, tolerance", [("f32", FORWARD), ("bf16", FORWARD_BF16)])
def test_published_name(conformance, dtype, tolerance):
    config = dict(input_size=32, patch_size=4, in_channels=4, hidden_size=384, depth=12, num_heads=6)
    model = randomise_(DiT(**config)).eval()
    inputs = {"x": torch.randn(2, 4, 32, 32), "t": torch.tensor([3.0, 998.0]), "y": torch.tensor([999, 1000])}
    output = conformance("forward", model="DiT-S/4", config={"input_size": 32, "num_classes": 1000},
                         weights=model.state_dict(), inputs=inputs, dtype=dtype)["output"]
    with torch.no_grad():
        assert_close(output, model(inputs["x"], inputs["t"], inputs["y"]), tolerance)


def diffusers_dit(config):
    model = DiTTransformer2DModel(
        num_attention_heads=config["num_heads"], attention_head_dim=config["hidden_size"] // config["num_heads"],
        in_channels=config["in_channels"], out_channels=config["in_channels"] * (2 if config["learn_sigma"] else 1),
        num_layers=config["depth"], sample_size=config["input_size"], patch_size=config["patch_size"],
        num_embeds_ada_norm=config["num_classes"], norm_eps=1e-6).eval()
    for block in model.transformer_blocks:  # diffusers spaces the frequencies by 127 steps, DiT by 128
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    return model


def from_diffusers(state, depth):
    """The published names of a diffusers state dict (gradients as well: block copies of the embedders add up)."""
    names = {"pos_embed.proj": "x_embedder.proj", "proj_out_1": "final_layer.adaLN_modulation.1",
             "proj_out_2": "final_layer.linear"}
    in_block = {"norm1.linear": "adaLN_modulation.1", "attn1.to_out.0": "attn.proj", "ff.net.0.proj": "mlp.fc1",
                "ff.net.2": "mlp.fc2"}
    shared = {"timestep_embedder.linear_1": "t_embedder.mlp.0", "timestep_embedder.linear_2": "t_embedder.mlp.2",
              "class_embedder.embedding_table": "y_embedder.embedding_table"}
    published = {}
    for suffix in ("weight", "bias"):
        for theirs, ours in names.items():
            published[f"{ours}.{suffix}"] = state[f"{theirs}.{suffix}"]
        for i in range(depth):
            block = f"transformer_blocks.{i}"
            for theirs, ours in in_block.items():
                published[f"blocks.{i}.{ours}.{suffix}"] = state[f"{block}.{theirs}.{suffix}"]
            published[f"blocks.{i}.attn.qkv.{suffix}"] = torch.cat(
                [state[f"{block}.attn1.to_{part}.{suffix}"] for part in "qkv"])
        for theirs, ours in shared.items():
            copies = [state.get(f"transformer_blocks.{i}.norm1.emb.{theirs}.{suffix}") for i in range(depth)]
            if copies[0] is not None:
                published[f"{ours}.{suffix}"] = copies
    return published


@pytest.mark.parametrize("name", ["tiny", "patch 4, no sigma", "patch 8, wide heads"])
def test_output_and_gradients_equal_diffusers(conformance, name):
    config = CONFIGS[name]
    model = randomise_(diffusers_dit(config))
    first = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks:
        block.norm1.emb.load_state_dict(first)
    weights = {key: value[0] if isinstance(value, list) else value
               for key, value in from_diffusers(model.state_dict(), config["depth"]).items()}
    inputs = inputs_of(config)
    outputs = conformance("forward", "--backward", model="dit", config=config, weights=weights, inputs=inputs)

    want = model(inputs["x"], inputs["t"], class_labels=inputs["y"]).sample
    (want * inputs["grad_output"]).sum().backward()
    gradients = from_diffusers({key: value.grad for key, value in model.named_parameters()}, config["depth"])
    gradients = {key: sum(value) if isinstance(value, list) else value for key, value in gradients.items()}
    assert_equals(outputs, (want, gradients))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "unconditional"])
def test_output_and_gradients_equal_the_original(conformance, original_dit, name):
    config = CONFIGS[name]
    compare(conformance, config, randomise_(original_dit.DiT(**config)).eval())


def test_bad_weights_are_all_listed(conformance):
    weights = dict(randomise_(DiT(**TINY)).state_dict())
    del weights["blocks.1.attn.proj.bias"]
    del weights["final_layer.linear.weight"]
    weights["blocks.2.attn.proj.bias"] = torch.zeros(32)
    weights["blocks.0.mlp.fc1.weight"] = torch.zeros(4, 32)
    message = conformance("forward", model="dit", config=TINY, weights=weights, inputs=inputs_of(TINY),
                          expect_error=True)
    for part in ("blocks.1.attn.proj.bias", "final_layer.linear.weight", "blocks.2.attn.proj.bias",
                 "blocks.0.mlp.fc1.weight is (4, 32), expected (128, 32)"):
        assert part in message


@pytest.mark.parametrize("change, expected", [
    (dict(hidden_size=30), "divisible by num_heads 4"),
    (dict(patch_size=3), "divisible by patch_size 3"),
    (dict(hiden_size=32), "hiden_size"),
    (dict(depth="two"), "expected depth to be an integer"),
    (dict(depth=0), "depth > 0"),
])
def test_bad_configs_name_the_key(conformance, change, expected):
    assert expected in conformance("forward", model="dit", config=TINY | change, weights={"a": torch.zeros(1)},
                                   inputs=inputs_of(TINY), expect_error=True)


@pytest.mark.parametrize("change, expected", [
    ({"y": torch.tensor([0, 11, 1])}, "0..10"),
    ({"y": torch.tensor([0, -1, 1])}, "0..10"),
    ({"x": torch.zeros(3, 4, 8, 6)}, "expected x of shape"),
    ({"t": torch.zeros(2)}, "expected t of shape"),
    ({"y": torch.tensor([0.0, 1.5, 1.0])}, "expected y to hold integers"),
    ({"y": torch.tensor([[0, 1, 1]])}, "expected y of shape (3)"),
    ({"drop": torch.tensor([1])}, "expected drop of shape (3)"),
    ({"x": torch.zeros(0, 4, 8, 8)}, "at least one sample"),
])
def test_bad_inputs_name_the_tensor(conformance, change, expected):
    assert expected in conformance("forward", model="dit", config=TINY, weights=randomise_(DiT(**TINY)).state_dict(),
                                   inputs=inputs_of(TINY) | change, expect_error=True)


def test_unknown_models_say_so(conformance):
    for name, expected in (("clip_audio", "unknown model"), ("DiT-M/2", "unknown model")):
        assert expected in conformance("forward", model=name, config=TINY, weights={"a": torch.zeros(1)},
                                       inputs=inputs_of(TINY), expect_error=True)


def test_drop_needs_a_null_class(conformance):
    config = TINY | dict(class_dropout_prob=0)
    model = randomise_(DiT(**config)).eval()
    nothing = output_of(conformance, model.state_dict(), config,
                        inputs_of(config) | {"drop": torch.zeros(3, dtype=torch.int64)})
    assert_close(nothing, run_torch(model, inputs_of(config))[0])
    message = conformance("forward", model="dit", config=config, weights=model.state_dict(),
                          inputs=inputs_of(config) | {"drop": torch.tensor([1, 0, 0])}, expect_error=True)
    assert "neither a null class" in message


def test_null_and_whole_numbers_in_a_config(conformance):
    """Absent, null and the default are the same; other tools write 2 as 2.0; keys with "_" are comments."""
    model = randomise_(DiT(**TINY)).eval()
    config = TINY | dict(depth=2.0, mlp_ratio=None, class_dropout_prob=None, learn_sigma=None, _comment=[1])
    assert_close(output_of(conformance, model.state_dict(), config, inputs_of(TINY)),
                 run_torch(model, inputs_of(TINY))[0])


def test_command_lines_end_in_one_line():
    for verb, expected in (("measure", "unknown command 'measure'"), ("forward", "--model is required")):
        result = run_program("kiln-conformance", verb)
        assert result.returncode != 0 and len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert expected in result.stderr
