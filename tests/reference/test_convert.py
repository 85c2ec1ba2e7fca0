"""kiln convert and kiln inspect against torch.save, safetensors and diffusers themselves, offline."""

import argparse
import collections
import json
import os
import re

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from closeness import assert_close
from conftest import REPOSITORY, refusal, succeed
from dit_torch import DiT, randomise_

CONFIG = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=2, num_heads=1, num_classes=1000)


def randomized_weights(seed=0):
    return {key: value.clone() for key, value in randomise_(DiT(**CONFIG), seed).state_dict().items()}


def assert_same(actual, expected):
    assert sorted(actual) == sorted(expected)
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert torch.equal(actual[key], value), key


@pytest.fixture
def refused(tmp_path):
    """refused(in, out name, options...) -> the one line of the error; nothing may have been written."""
    def run(source, name, *options):
        before = sorted(tmp_path.iterdir())
        line = refusal("convert", "--in", source, "--out", tmp_path / name, *options)
        assert sorted(tmp_path.iterdir()) == before
        return line

    return run


@pytest.fixture
def pt_file(tmp_path):
    """A checkpoint as DiT's train.py writes it."""
    model, ema = randomized_weights(0), randomized_weights(1)
    parameters = [torch.nn.Parameter(value) for value in model.values()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = tmp_path / "0000010.pt"
    state = {"model": model, "ema": ema, "opt": optimizer.state_dict(), "args": argparse.Namespace(lr=1e-4, name="x")}
    torch.save(state, path)
    return path, model, ema


def test_training_checkpoint_to_safetensors(convert, pt_file):
    path, model, ema = pt_file
    assert_same(load_file(convert(path, "ema.safetensors")), ema)
    assert_same(load_file(convert(path, "model.safetensors", "--no-ema")), model)


def test_safetensors_to_pt_and_back(convert, tmp_path):
    weights = randomized_weights()
    save_file(weights, tmp_path / "in.safetensors")
    path = convert(tmp_path / "in.safetensors", "out.pt")
    loaded = torch.load(path, weights_only=True)
    assert isinstance(loaded, collections.OrderedDict)
    assert_same(loaded, weights)
    assert_same(torch.load(path, weights_only=True, mmap=True), weights)
    DiT(**CONFIG).load_state_dict(loaded)  # strict
    back = convert(path, "back.safetensors")
    assert_same(load_file(back), weights)
    assert back.read_bytes() == convert(tmp_path / "in.safetensors", "again.safetensors").read_bytes()


def test_state_dict_layouts(convert, tmp_path):
    weights = randomized_weights()
    base = torch.randn(3, 64, 64)
    odd = dict(weights)
    odd["blocks.0.attn.proj.weight"] = base[1].t()  # transposed, in a larger storage
    odd["blocks.1.attn.proj.weight"] = base[2]  # the same storage, at an offset
    odd["blocks.0.attn.proj.bias"] = torch.nn.Parameter(torch.randn(64))
    torch.save({"module." + key: value for key, value in odd.items()}, tmp_path / "odd.pt")
    assert_same(load_file(convert(tmp_path / "odd.pt", "odd.safetensors")),
                {key: value.detach().contiguous() for key, value in odd.items()})
    for protocol in (3, 4, 5):
        torch.save(weights, tmp_path / "p.pt", pickle_protocol=protocol)
        assert_same(load_file(convert(tmp_path / "p.pt", f"p{protocol}.safetensors")), weights)


def test_every_dtype_both_ways(convert, tmp_path):
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                      torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }  # fmt: skip
    tensors["scalar"], tensors["empty"] = torch.tensor(2.5), torch.empty(0, 3)
    torch.save(tensors, tmp_path / "in.pt")
    path = convert(tmp_path / "in.pt", "out.safetensors")
    assert_same(load_file(path), tensors)
    assert_same(torch.load(convert(path, "out.pt"), weights_only=True), tensors)


def test_dtype_is_cast(convert, tmp_path):
    weights = randomized_weights()
    save_file(weights, tmp_path / "in.safetensors")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        cast = load_file(convert(tmp_path / "in.safetensors", f"{name}.safetensors", "--dtype", name))
        assert_same(cast, {key: value.to(dtype) for key, value in weights.items()})


def original_timestep_frequencies(transformer):
    """diffusers spaces DiT's timestep frequencies by half - 1 instead of half; undone here to compare the weights."""
    for block in transformer.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    return transformer


@pytest.mark.slow
def test_diffusers_folder_gives_the_same_model(convert, tmp_path):
    weights = randomized_weights()
    save_file(weights, tmp_path / "in.safetensors")
    folder = convert(tmp_path / "in.safetensors", "pipeline")
    transformer, info = diffusers.DiTTransformer2DModel.from_pretrained(
        folder / "transformer", output_loading_info=True, local_files_only=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    model = DiT(**CONFIG).eval()
    model.load_state_dict(weights)
    x, t, y = torch.randn(3, 4, 8, 8), torch.tensor([0, 17, 999]), torch.tensor([0, 5, 1000])
    with torch.no_grad():
        expected = model(x, t.float(), y)
        actual = original_timestep_frequencies(transformer)(x, timestep=t, class_labels=y).sample
    assert_close(actual, expected, 5e-5)
    assert_same(load_file(convert(folder, "back.safetensors")), weights)
    assert_same(load_file(convert(folder / "transformer", "back2.safetensors")), weights)


def test_folder_of_diffusers_itself_is_read(convert, tmp_path):
    torch.manual_seed(3)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    ).eval()  # fmt: skip
    embedder = transformer.transformer_blocks[0].norm1.emb.state_dict()
    transformer.transformer_blocks[1].norm1.emb.load_state_dict(embedder)
    transformer.save_pretrained(tmp_path / "transformer", max_shard_size="200KB")
    assert (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json").exists()
    model = DiT(**{**CONFIG, "num_heads": 2, "num_classes": 10}).eval()
    model.load_state_dict(load_file(convert(tmp_path / "transformer", "dit.safetensors")))
    x, t, y = torch.randn(2, 4, 8, 8), torch.tensor([3, 700]), torch.tensor([1, 10])
    with torch.no_grad():
        expected = original_timestep_frequencies(transformer)(x, timestep=t, class_labels=y).sample
        assert_close(model(x, t.float(), y), expected, 5e-5)


@pytest.fixture
def vae(tmp_path):
    torch.manual_seed(4)
    model = diffusers.AutoencoderKL(
        block_out_channels=[8, 8], layers_per_block=1, norm_num_groups=4, latent_channels=4, scaling_factor=0.18215,
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "some-vae")
    return tmp_path / "some-vae"


def test_pipeline_loads_and_samples(convert, vae, tmp_path):
    save_file(randomized_weights(), tmp_path / "in.safetensors")
    folder = convert(tmp_path / "in.safetensors", "pipeline", "--vae", vae)
    pipeline = diffusers.DiTPipeline.from_pretrained(folder, local_files_only=True)
    assert isinstance(pipeline.scheduler, diffusers.DDPMScheduler)  # as DiT is published
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    image = pipeline([3], num_inference_steps=2, generator=generator, output_type="np").images[0]
    assert image.shape == (16, 16, 3)


@pytest.mark.parametrize("objective, scheduler, prediction", [
    ("v_prediction", "DDPMScheduler", "v_prediction"), ("x_0", "DDPMScheduler", "sample"),
    ("flow", "DPMSolverMultistepScheduler", "flow_prediction")])  # DiTPipeline cannot run FlowMatchEuler
def test_scheduler_follows_the_objective(convert, vae, tmp_path, objective, scheduler, prediction):
    save_file(randomized_weights(), tmp_path / "in.safetensors")
    folder = convert(tmp_path / "in.safetensors", "pipeline", "--vae", vae, "--objective", objective)
    pipeline = diffusers.DiTPipeline.from_pretrained(folder, local_files_only=True)
    assert type(pipeline.scheduler).__name__ == scheduler
    assert pipeline.scheduler.config.get("prediction_type") == prediction


def changed_weights(change):
    weights = randomized_weights()
    change(weights)
    return weights


def some_keys_wrong(weights):
    del weights["blocks.0.attn.qkv.bias"], weights["t_embedder.mlp.0.weight"]
    weights["extra"] = torch.ones(1)
    weights["blocks.1.mlp.fc2.bias"] = torch.ones(3)


class TestRefusals:
    @pytest.mark.parametrize("change, out, more, parts", [
        (lambda weights: weights["pos_embed"].add_(0.01), "pipeline", [],
         ["pos_embed differs from the sine-cosine table by 0.01"]),
        (lambda weights: weights.pop("y_embedder.embedding_table.weight"), "pipeline", [], ["no label table"]),
        (some_keys_wrong, "out.safetensors", [],
         ["blocks.0.attn.qkv.bias", "t_embedder.mlp.0.weight", "extra", "blocks.1.mlp.fc2.bias is (3)"]),
        (lambda weights: None, "out.pt", ["--model", "DiT-S/2"], ["holds a dit, not a DiT-S/2"]),
    ], ids=["changed position table", "unconditional model", "missing, unknown and wrong keys", "another model"])
    def test_weights(self, refused, tmp_path, change, out, more, parts):
        save_file(changed_weights(change), tmp_path / "in.safetensors")
        message = refused(tmp_path / "in.safetensors", out, *more)
        for part in parts:
            assert part in message

    def test_existing_folder(self, refused, tmp_path):
        save_file(randomized_weights(), tmp_path / "in.safetensors")
        (tmp_path / "pipeline").mkdir()
        assert "exists: remove it" in refused(tmp_path / "in.safetensors", "pipeline")

    @pytest.mark.slow
    def test_the_same_command_again(self, refused, tmp_path):
        """A command that ended before its last line, or between its two files, is repeated; other content stays."""
        save_file(randomized_weights(), tmp_path / "in.safetensors")
        for out in ("again", "again.pt"):
            succeed("convert", "--in", tmp_path / "in.safetensors", "--out", tmp_path / out)
        card = (tmp_path / "again/README.md").read_text()
        (tmp_path / "again.pt").unlink()
        for out in ("again", "again.pt"):
            succeed("convert", "--in", tmp_path / "in.safetensors", "--out", tmp_path / out)
        (tmp_path / "again/README.md").write_text(card + "mine")
        assert "exists: remove it" in refused(tmp_path / "in.safetensors", "again")
        assert (tmp_path / "again/README.md").read_text() == card + "mine"

    def test_diffusers_embedders_that_differ(self, refused, tmp_path):
        diffusers.DiTTransformer2DModel(num_attention_heads=1, attention_head_dim=64, num_layers=2, sample_size=8,
                                        num_embeds_ada_norm=10).save_pretrained(tmp_path / "transformer")  # fmt: skip
        assert "differs between block 0 and block 1" in refused(tmp_path / "transformer", "out.pt")

    def test_diffusers_setting_that_dit_lacks(self, refused, convert, tmp_path):
        save_file(randomized_weights(), tmp_path / "in.safetensors")
        folder = convert(tmp_path / "in.safetensors", "pipeline")
        config = json.loads((folder / "transformer" / "config.json").read_text())
        (folder / "transformer" / "config.json").write_text(json.dumps(config | {"activation_fn": "geglu"}))
        assert 'activation_fn is "geglu"' in refused(folder, "out.pt")

    @pytest.mark.parametrize("content, options, parts", [
        (randomized_weights, dict(_use_new_zipfile_serialization=False), ["before 1.6"]),
        (lambda: {"model": randomized_weights(), "args": Attack()}, {}, ["system", "attack"]),
        (lambda: torch.nn.Linear(2, 2), {}, ["save model.state_dict()"]),
    ], ids=["old format", "pickle that runs code", "whole module"])
    def test_pt_files(self, refused, tmp_path, content, options, parts):
        torch.save(content(), tmp_path / "in.pt", **options)
        message = refused(tmp_path / "in.pt", "out.safetensors")
        for part in parts:
            assert part in message


class Attack:
    def __reduce__(self):
        return os.system, ("true",)


def test_inspect_lists_a_file(tmp_path):
    weights = randomized_weights()
    torch.save(weights, tmp_path / "w.pt")
    result = succeed("inspect", tmp_path / "w.pt")
    lines = dict(line.split("\t", 1) for line in result.stdout.splitlines())
    assert lines == {key: ",".join(map(str, value.shape)) + "\tF32" for key, value in weights.items()}
    assert "num_classes 1000" in result.stderr and "PyTorch" in result.stderr
    assert f"{sum(value.numel() for value in weights.values())} elements" in result.stderr


@pytest.mark.parametrize("patch", [2, 4, 8])
@pytest.mark.parametrize("width, depth, hidden_size, num_heads", [
    ("S", 12, 384, 6), ("B", 12, 768, 12), ("L", 24, 1024, 16), ("XL", 28, 1152, 16)])  # fmt: skip
def test_inspect_prints_the_published_keys(width, depth, hidden_size, num_heads, patch):
    with torch.device("meta"):
        reference = DiT(input_size=32, patch_size=patch, in_channels=4, hidden_size=hidden_size, depth=depth,
                        num_heads=num_heads, num_classes=1000)  # fmt: skip
    result = succeed("inspect", "--model", f"DiT-{width}/{patch}")
    expected = [f"{key}\t{','.join(map(str, value.shape))}" for key, value in reference.state_dict().items()]
    assert sorted(result.stdout.splitlines()) == sorted(expected)
    trainable = sum(value.numel() for key, value in reference.state_dict().items() if key != "pos_embed")
    assert f"{trainable} trainable parameters" in result.stderr


def test_inspect_takes_names_of_published_files(kiln):
    assert kiln("inspect", "--model", "dit-xl-2").stdout == kiln("inspect", "--model", "DiT-XL/2").stdout


def lines_of(state):
    return sorted(f"{key}\t{','.join(map(str, value.shape))}" for key, value in state.items())


def sd_vae():
    with torch.device("meta"):
        return diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[128, 256, 512, 512], layers_per_block=2)  # fmt: skip


def published(name):
    """Lines "key, shape" of a table in which blocks.[0-27].x stands for blocks.0.x to blocks.27.x, x.{weight,bias} for both."""
    def each(line):
        if not (found := re.search(r"\[(\d+)-(\d+)\]|\{([^}]*)\}", line)):
            return [line]
        members = found[3].split(",") if found[3] else range(int(found[1]), int(found[2]) + 1)
        return [key for member in members for key in each(f"{line[:found.start()]}{member}{line[found.end():]}")]

    rows = (REPOSITORY / "tests/models/keys" / f"{name}.tsv").read_text().splitlines()
    return [key for row in rows for key in each(row.rsplit("\t", 1)[0])]


@pytest.mark.parametrize("name, table, told", [
    *((name, name.replace("autoencoder_kl", "sd-vae"), "248 tensors, 83653863 elements, 83653863 trainable parameters")
      for name in ("autoencoder_kl", "sd-vae", "sd-vae-oldkeys")),
    ("inception", "fid-inception", "566 tensors.* 23850960 trainable parameters"),
    ("fid-inception", "fid-inception", "566 tensors.* 23850960 trainable parameters")])
def test_inspect_prints_the_keys_of_published_files(name, table, told):
    result = succeed("inspect", "--model", name)
    assert sorted(result.stdout.splitlines()) == sorted(published(table))
    if table == "sd-vae":
        assert sorted(published(table)) == lines_of(sd_vae().state_dict())
    assert re.search(told, result.stderr)


def test_inspect_takes_an_autoencoders_config(tmp_path):
    with torch.device("meta"):
        vae = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
            block_out_channels=[32, 64], layers_per_block=1, latent_channels=16, use_quant_conv=False)  # fmt: skip
    config = tmp_path / "config.json"
    vae.save_config(tmp_path)
    result = succeed("inspect", "--model", "autoencoder_kl", "--config", config)
    assert sorted(result.stdout.splitlines()) == lines_of(vae.state_dict())


@pytest.mark.parametrize("arguments, message", [
    (["--model", "sd-vea"], 'did you mean "sd-vae"?'),
    (["--model", "autoencoder_kl", "--config", '{"layers_per_block": "two"}'], "layers_per_block to be an integer"),
    (["--model", "autoencoder_kl", "--config", "[1]"], "--config expects a JSON object"),
])  # fmt: skip
def test_inspect_names_what_it_does_not_know(kiln, arguments, message):
    result = kiln("inspect", *arguments)
    assert result.returncode != 0 and result.stdout == ""
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1
