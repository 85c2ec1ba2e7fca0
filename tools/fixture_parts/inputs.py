"""What the fixtures' runs read: pictures, captions, text encoders, an autoencoder, caches of other trainers, weights.

Their bytes follow from names, by SHAKE-256. Generators of numpy and torch may draw other numbers in another version,
and torch draws other normals with AVX2 than with AVX-512. Compressors, too, write other bytes in another version.
"""
import hashlib
import json
import math
import struct
import subprocess
import zlib

import numpy as np
from safetensors.numpy import load_file, save_file

SIZE = 16
COUNT = 14
CAPTIONS = ["red", "a green apple", "two birds on a long fence"]
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 64, "type_vocab_size": 2}
CLIP = {"model_type": "clip_text_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 24, "eos_token_id": 2}
VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [8, 8, 16, 16], "layers_per_block": 1,
       "norm_num_groups": 4, "latent_channels": 4, "scaling_factor": 0.18215,
       "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}


def drawn(name, count):
    """Bytes that belong to the name."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(count), np.uint8)


def values(name, shape):
    """Numbers in [-1, 1) that every machine writes with the same bits."""
    return (drawn(name, math.prod(shape)).astype(np.float32) / 128 - 1).reshape(shape)


def weight(key, shape):
    """Values of about 1 / sqrt(inputs), so that what passes through many layers stays of about one."""
    scale = 2.0 ** -round(math.log2(math.prod(shape[1:])) / 2) if len(shape) > 1 else 1 / 16
    scale *= 16 if key.startswith("y_embedder") else 1  # a label or caption must show in the loss
    centre = 1 if "norm" in key.lower() and key.endswith("weight") else 0
    return (values(key, shape) * scale + centre).astype(np.float32)


def save_weights(like, path):
    """Weights of the keys and shapes of another file. Without the table of positions, which the program computes."""
    save_file({key: weight(key, value.shape) for key, value in load_file(like).items() if key != "pos_embed"}, path)


def write_json(path, content):
    path.write_text(json.dumps(content))


def save_network(program, name, folder, file, config):
    """The folder of a network with weights, whose keys the program lists."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config)
    command = [program, "inspect", "--model", name, "--config", folder / "config.json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    shapes = {key: tuple(map(int, sides.split(","))) for key, sides in (line.split("\t")[:2] for line in listed)}
    save_file({key: weight(key, shape) for key, shape in shapes.items()}, folder / file)


def png(pixels):
    """A PNG file of (H, W, 3) bytes, stored as they are."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 0)) + chunk(b"IEND", b"")


def write_picture(path, height=SIZE, width=SIZE):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(drawn(path.name, height * width * 3).reshape(height, width, 3)))


def class_pictures(folder, first=0, count=COUNT, flawed=True):
    """A folder for each of three classes; a broken picture and one that is too small, if `flawed`."""
    for index in range(first, first + count):
        write_picture(folder / f"class-{index % 3}/{index:03}.png", SIZE + index % 3, SIZE + index % 2)
    if flawed:
        path = folder / "class-0/broken.png"
        write_picture(path)
        path.write_bytes(path.read_bytes()[:90])
        write_picture(folder / "class-1/small.png", SIZE // 2, SIZE)
    return folder


def captioned_pictures(folder, sizes):
    """Pictures with a caption each, or with several of unequal weight; one has none."""
    lines = []
    for index in range(COUNT):
        write_picture(folder / f"{index:03}.png", *sizes[index % len(sizes)])
        captions = [{"text": f"{CAPTIONS[index % 3]} {index}", "weight": 3, "kind": "long"}, CAPTIONS[index % 2]]
        lines.append({"file_name": f"{index:03}.png", "captions": captions[:1 + index % 2] if index != 5 else []})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def wordpiece_tokenizer(folder):
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "apple", *letters, *("##" + x for x in letters)]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    return len(tokens)


def clip_tokenizer(folder):
    """As CLIP's, whose tokens are bytes here."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = [*map(chr, printable), *(chr(256 + index) for index in range(256 - len(printable)))]
    tokens = [*alphabet, *(byte + "</w>" for byte in alphabet), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir()
    write_json(folder / "vocab.json", {text: index for index, text in enumerate(tokens)})
    (folder / "merges.txt").write_text("#version: 0.2\n")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77})
    return len(tokens)


def fast_dit_cache(folder):
    for kind in ("features", "labels"):
        (folder / f"cache_{kind}").mkdir(parents=True)
    for index in range(5):
        np.save(folder / f"cache_features/{index}.npy", values(f"latent {index}", (1, 4, 4, 4)))
        np.save(folder / f"cache_labels/{index}.npy", np.array([index % 3]))
    return folder


def pixart_cache(folder):
    """Means and standard deviations, all 1: their logarithm is exact on every machine."""
    folder.mkdir(parents=True)
    for index in range(COUNT):
        mean = values(f"mean {index}", (4, 4, 4))
        np.save(folder / f"{index:03}.npy", np.concatenate([mean, np.ones_like(mean)]))
    return folder


def make_inputs(folder, program):
    class_pictures(folder / "classes")
    class_pictures(folder / "whole", flawed=False)
    class_pictures(folder / "held-out", first=100, count=5, flawed=False)
    class_pictures(folder / "grown")
    captioned_pictures(folder / "captioned", [(SIZE, SIZE)])
    captioned_pictures(folder / "shapes", [(16, 16), (24, 12), (12, 24), (25, 13)])
    bert = BERT | {"vocab_size": wordpiece_tokenizer(folder / "bert")}
    save_network(program, "bert", folder / "bert", "model.safetensors", bert)
    clip = CLIP | {"vocab_size": clip_tokenizer(folder / "clip_text")}
    save_network(program, "clip_text", folder / "clip_text", "model.safetensors", clip)
    save_network(program, "autoencoder_kl", folder / "vae", "diffusion_pytorch_model.safetensors", VAE)
    fast_dit_cache(folder / "fast-dit")
    pixart_cache(folder / "pixart")
