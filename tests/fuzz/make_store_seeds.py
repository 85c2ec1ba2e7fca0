"""Seed corpus of fuzz_store: OUT/fuzz_store/*. u16 length of store.json, store.json, then a shard.

Usage: make_store_seeds.py OUT
"""

import json
import pathlib
import struct
import sys

NUM_SAMPLES = 3


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def seed(dtype: str, num_flips: int, has_logvar: bool, class_names: list[str]) -> bytes:
    size = {"F32": 4, "BF16": 2, "F16": 2}[dtype]
    shape = [NUM_SAMPLES, num_flips, 1, 2, 2]
    latents = bytes(NUM_SAMPLES * num_flips * 4 * size)
    names, captions = [b"a.png", b"b.c.png", b"d"], [b"", b"caption", b"\xc3\xa9"]
    offsets = lambda texts: struct.pack("<4q", *(len(b"".join(texts[:i])) for i in range(4)))
    tensors = {
        "class_labels": ("I64", [NUM_SAMPLES], struct.pack("<3q", -1, len(class_names) - 1, -1)),
        "name_offsets": ("I64", [NUM_SAMPLES + 1], offsets(names)),
        "caption_offsets": ("I64", [NUM_SAMPLES + 1], offsets(captions)),
        "mean": (dtype, shape, latents),
        "logvar": (dtype, shape, latents),
        "name_bytes": ("U8", [len(b"".join(names))], b"".join(names)),
        "caption_bytes": ("U8", [len(b"".join(captions))], b"".join(captions)),
    }
    if not has_logvar:
        del tensors["logvar"]
    info = {
        "format": "kiln feature store", "format_version": 1, "complete": True, "num_samples": NUM_SAMPLES,
        "autoencoder": "autoencoder_kl", "autoencoder_fingerprint": "", "scaling_factor": 0.18215,
        "shift_factor": 0.0, "channels": 1, "height": 2, "width": 2, "image_size": 16,
        "has_logvar": has_logvar, "already_scaled": False, "num_flips": num_flips, "dtype": dtype,
        "class_names": class_names, "source": {"data": "x"},
        "shards": [{"file": "shard-00000.safetensors", "num_samples": NUM_SAMPLES, "xxh3": "0" * 16}],
    }  # fmt: skip
    text = json.dumps(info).encode()
    return struct.pack("<H", len(text)) + text + safetensors(tensors)


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) / "fuzz_store"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "f32").write_bytes(seed("F32", 1, True, ["cat", "dog"]))
    (folder / "bf16_flips").write_bytes(seed("BF16", 2, True, []))
    (folder / "fp16_plain").write_bytes(seed("F16", 1, False, ["cat"]))


if __name__ == "__main__":
    main()
