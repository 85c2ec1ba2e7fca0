"""kiln extract --text-encoder-memory: encoders larger than their memory give the same store, within the limit."""

import json
import math
import re
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conftest import FULL, program, refusal
from test_text_store import write_metadata
from test_tokenizers import MAKERS

MB = 1 << 20
LAYERS = 18 if FULL else 12
WIDE = dict(model_type="t5", d_model=1024, d_kv=64, d_ff=4096, num_layers=LAYERS, num_heads=16, vocab_size=4120, feed_forward_proj="gated-gelu")
XXL = WIDE | dict(d_model=4096, d_ff=10240, num_layers=24, num_heads=64, vocab_size=32128)
TINY = WIDE | dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)


def t5_shapes(config):
    width, inner, wide = config["d_model"], config["d_kv"] * config["num_heads"], config["d_ff"]
    shapes = {"shared.weight": (config["vocab_size"], width), "encoder.final_layer_norm.weight": (width,)}
    for index in range(config["num_layers"]):
        block = f"encoder.block.{index}.layer"
        shapes |= {f"{block}.0.SelfAttention.{name}.weight": (inner, width) for name in "qkv"}
        shapes |= {f"{block}.0.SelfAttention.o.weight": (width, inner), f"{block}.0.layer_norm.weight": (width,),
                   f"{block}.1.DenseReluDense.wi_0.weight": (wide, width), f"{block}.1.DenseReluDense.wi_1.weight": (wide, width),
                   f"{block}.1.DenseReluDense.wo.weight": (width, wide), f"{block}.1.layer_norm.weight": (width,)}
        if index == 0:
            shapes[f"{block}.0.SelfAttention.relative_attention_bias.weight"] = (32, config["num_heads"])
    return shapes


def write_random_weights(path, shapes, seed=0):
    """bf16, a tensor at a time: the file may be larger than memory."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))  # each tensor begins elsewhere in it
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, shape in enumerate(shapes.values()):
            count = math.prod(shape)
            drawn = pool.roll(index * 99991) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(count)
            part = drawn.bfloat16().view(torch.int16).numpy().tobytes()
            for first in range(0, 2 * count, len(part)):
                file.write(part[:2 * count - first])


def encoder_folder(folder, config):
    MAKERS["t5"](folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_random_weights(folder / "model.safetensors", t5_shapes(config))
    return folder


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return {name: encoder_folder(tmp_path_factory.mktemp(name), config) for name, config in (("wide", WIDE), ("tiny", TINY))}


@pytest.fixture
def data(tmp_path):
    words = ["a", "red", "green", "apple", "house", "by", "the", "sea"]
    texts = [" ".join(words[(i + k) % 8] for k in range(2 + i % 23)) for i in range(60 if FULL else 36)]
    return write_metadata(tmp_path / "data", texts)


def extract(data, out, encoder, *more):
    """-> (peak resident bytes, stderr). The peak is VmHWM, read every few milliseconds: rusage's counts this process too,
    of which the other was forked."""
    command = [str(program("kiln")), "extract", "--data", str(data), "--autoencoder", "pixels", "--image-size", "16", "--out", str(out),
               "--text-encoder", str(encoder), "--compute-dtype", "bf16", "--device", "cpu", "--text-max-tokens", "40", *map(str, more)]
    with tempfile.TemporaryFile("w+") as said:
        process, peak = subprocess.Popen(command, stderr=said, stdout=subprocess.DEVNULL), 0
        while process.poll() is None:
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            peak = int(found[1]) * 1024 if found else peak
            time.sleep(0.005)
        said.seek(0)
        stderr = said.read()
    assert process.returncode == 0, stderr
    return peak, stderr


def features_of(store):
    return {path.name: path.read_bytes() for path in sorted((store / "text-t5_encoder").glob("*.safetensors"))}


@pytest.mark.slow
def test_the_store_is_the_same_and_memory_within_the_limit(encoders, data, tmp_path):
    size = (encoders["wide"] / "model.safetensors").stat().st_size
    assert size > (500 if FULL else 350) * MB
    whole, said = extract(data, tmp_path / "whole", encoders["wide"])
    assert "text encoder" not in said, "it fits what is free"
    base, _ = extract(data, tmp_path / "tiny", encoders["tiny"])
    limit = base + 200 * MB
    peak, said = extract(data, tmp_path / "streamed", encoders["wide"], "--text-encoder-memory", limit, "--text-batch", 8)
    print(f"resident {whole >> 20} MiB, an encoder of nothing {base >> 20}, limit {limit >> 20}, peak {peak >> 20}")
    line = [line for line in said.splitlines() if line.startswith("text encoder:")]
    assert len(line) == 1 and "segment by segment" in line[0] and f"--text-encoder-memory {limit}" in line[0], said
    assert peak < limit < whole
    assert features_of(tmp_path / "streamed") == features_of(tmp_path / "whole")


def test_what_cannot_work_is_said(encoders, data, tmp_path):
    def error(*options):
        return refusal("extract", "--data", data, "--autoencoder", "pixels", "--image-size", 16,
                       "--out", tmp_path / "store", "--device", "cpu", "--text-encoder", encoders["wide"], *options,
                       lines=lambda text: [line for line in text.splitlines() if " images/s " not in line])

    assert "expects a size such as 3G" in error("--text-encoder-memory", "much")
    assert "takes already: give more" in error("--text-encoder-memory", "20M")
    assert "give more memory, a smaller --text-batch" in error("--text-encoder-memory", "420M", "--text-batch", 4000)


@pytest.mark.skipif(not FULL, reason="writes 9.5 GB: scripts/test --full")
def test_t5_xxl_within_3_gib(data, tmp_path):
    folder = tmp_path / "xxl"
    folder.mkdir()
    encoder_folder(folder, XXL)
    peak, said = extract(data, tmp_path / "streamed", folder, "--text-encoder-memory", "3G")
    assert peak < 3 << 30 and "segment by segment" in said
    extract(data, tmp_path / "whole", folder)
    assert features_of(tmp_path / "streamed") == features_of(tmp_path / "whole")
