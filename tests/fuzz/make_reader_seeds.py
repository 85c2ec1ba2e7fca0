"""Seed corpora of the fuzzers whose inputs are small: OUT/<fuzzer>/*. They are the same bytes every time.

Usage: make_reader_seeds.py OUT
"""

import io
import json
import pathlib
import struct
import sys
import tarfile
import zipfile

PICTURE = b"\x89PNG\r\n\x1a\n"  # its bytes are read, not decoded


def npy(dtype, shape, data):
    header = str({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npz(method, arrays):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in arrays.items():
            archive.writestr(zipfile.ZipInfo(name + ".npy"), content, compress_type=method)
    return file.getvalue()


def tar(kind, members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def field(number, content):
    """A field of a protocol buffer: a text or message, a number, or a float."""
    if isinstance(content, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", content)
    if isinstance(content, int):
        return bytes([number << 3, content])
    return bytes([number << 3 | 2, len(content)]) + content


def sentencepiece(kind, charsmap=b""):
    special = [("<unk>", 2), ("<pad>", 3), ("<s>", 3), ("</s>", 3), ("<bos>", 3), ("<eos>", 3), ("<mask>", 4)]
    plain = [("\u2581", 1), ("a", 1), ("b", 1), ("ab", 1), ("\u2581ab", 1), ("<0x61>", 6)]
    pieces = [field(1, text.encode()) + field(2, -float(i)) + field(3, which) for i, (text, which) in enumerate(special + plain)]
    return b"".join(field(1, piece) for piece in pieces) + field(2, field(3, kind)) + field(3, field(2, charsmap))


# A trie of one unit, which leads nowhere, and no replacement.
CHARSMAP = struct.pack("<II", 4, 0) + b"\0"


def cut_folder(names, files):
    """As cut_folder.h divides an input into the files of a folder."""
    cut = b""
    for name, content in files.items():
        content = content if isinstance(content, bytes) else content.encode()
        cut += struct.pack("<BH", names.index(name), len(content)) + content
    return cut


TOKENIZER_FILES = ["vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model", "tokenizer_config.json",
                   "special_tokens_map.json", "added_tokens.json", "tokenizer.json", "text"]  # fmt: skip


def tokenizer_folders():
    vocabulary = {character: i for i, character in enumerate([*"ab", *(c + "</w>" for c in "ab"), "ab</w>", "<|startoftext|>", "<|endoftext|>"])}
    token = {"content": "<x>", "single_word": True, "lstrip": True, "rstrip": False, "normalized": True}
    kinds = {
        "wordpiece": {"vocab.txt": "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "ab"]) + "\n",
                      "tokenizer_config.json": json.dumps({"do_lower_case": True, "strip_accents": False, "model_max_length": 64,
                                                           "added_tokens_decoder": {"8": token}}),
                      "text": "Ab, \u00e9 \u4e2d a"},
        "clip": {"vocab.json": json.dumps(vocabulary), "merges.txt": "#version: 0.2\na b</w>\n",
                 "special_tokens_map.json": json.dumps({"pad_token": "<|endoftext|>", "additional_special_tokens": [token]}),
                 "text": "ab it's 12 <|endoftext|>"},
        "t5": {"spiece.model": sentencepiece(1, CHARSMAP), "tokenizer_config.json": json.dumps({"extra_ids": 2, "padding_side": "left"}),
               "added_tokens.json": json.dumps({"<extra_id_0>": 14}), "text": "ab <extra_id_0> ab"},
        "gemma": {"tokenizer.model": sentencepiece(2), "tokenizer_config.json": json.dumps({"add_bos_token": True}),
                  "tokenizer.json": json.dumps({"added_tokens": [token | {"id": 13, "special": True}], "model": {"vocab": {}}}), "text": "ab  ba"},
    }
    return {name: cut_folder(TOKENIZER_FILES, files) for name, files in kinds.items()}


def safetensors(tensors):
    """{name: (shape)} -> ones, as F32."""
    header, data = {}, b""
    for name, shape in tensors.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += struct.pack("<f", 1.0) * (size // 4)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def adapters():
    names = ["adapter_config.json", "adapter_model.safetensors", "kohya.safetensors"]
    peft = {"base_model.model.blocks.0.proj.lora_A.weight": [2, 4], "base_model.model.blocks.0.proj.lora_B.weight": [4, 2]}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "bias": "none", "use_rslora": True, "rank_pattern": {"conv": 1}, "alpha_pattern": {}}
    kohya = {"lora_unet_blocks_0_proj.lora_down.weight": [2, 4], "lora_unet_blocks_0_proj.lora_up.weight": [4, 2],
             "lora_unet_blocks_0_proj.alpha": []}
    diffusers = {"transformer.blocks.0.conv.lora_A.weight": [2, 4, 3, 3], "transformer.blocks.0.conv.lora_B.weight": [4, 2, 1, 1]}
    return {"peft": cut_folder(names, {"adapter_config.json": json.dumps(config), "adapter_model.safetensors": safetensors(peft)}),
            "kohya": cut_folder(names, {"kohya.safetensors": safetensors(kohya)}),
            "diffusers": cut_folder(names, {"kohya.safetensors": safetensors(diffusers)})}


def run_folders():
    names = ["log.jsonl", "evaluations.jsonl", "checkpoints/step-00000002/train_state.json",
             "checkpoints/step-00000002/model.safetensors", "checkpoints/step-00000004/train_state.json",
             "checkpoints/step-00000004/model.safetensors", "checkpoints/step-00000004/ema.safetensors"]  # fmt: skip
    state = {"format_version": 1, "seed": 0, "step": 2, "images_seen": 8, "updates": 2, "loss_scale": 1.0, "scaler_good_steps": 0,
             "scaler_overflows": 0, "bad_steps": 0, "train_seconds": 1.5, "num_threads": 1, "world_size": 1, "machine": "x", "log_window": [1.0],
             "config": {"options": {"sample-every": 1}, "record": {"drawing": {"sampler": "ddim"}}}, "files": {"model.safetensors": 3}}
    log = [{"event": "start", "step": 0}, {"step": 1, "loss": 1.0, "images_seen": 4, "train_seconds": 0.5}, {"step": 2, "loss": 0.5, "validation_loss": 0.4},
           {"event": "evaluation", "step": 2, "metrics": {"fid": 1.0}, "protocol": {"num_samples": 4}}]
    result = {"metrics": {"fid": 1.0}, "protocol": {"num_samples": 4}, "subject": {"samples": "run/evaluation/step-00000002-0123"}}
    files = {"log.jsonl": "".join(json.dumps(line) + "\n" for line in log), "evaluations.jsonl": json.dumps(result) + "\n"}
    one = {"checkpoints/step-00000002/train_state.json": json.dumps(state), "checkpoints/step-00000002/model.safetensors": "abc"}
    torn = {"checkpoints/step-00000004/train_state.json": json.dumps(state | {"files": {"ema.safetensors": 2}, "checksums": {"ema.safetensors": "0" * 16}}),
            "checkpoints/step-00000004/ema.safetensors": "ab"}
    return {"log": cut_folder(names, files), "whole": cut_folder(names, files | one), "torn": cut_folder(names, files | one | torn)}


def answers(which, *texts):
    """As fuzz_http.cpp divides an input into the answers of a server."""
    return bytes([which]) + b"".join(struct.pack("<H", len(text)) + text for text in texts)


def http():
    def ok(body, *headers, status="200 OK", length=None):
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
        return "\r\n".join(lines).encode() + body

    tag = 'ETag: "1"'
    moved = b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    rest = ok(b"lo", tag, "Content-Range: bytes 3-4/5", status="206 Partial Content")
    tree = [{"type": "file", "path": "config.json", "oid": "a" * 40, "size": 5},
            {"type": "file", "path": "unet/model.safetensors", "oid": "b" * 40, "size": 5, "lfs": {"oid": "2cf24dba5fb0a30e26e83b2ac5b9e29e"
                                                                                                  "1b161e5c1fa7425e73043362938b9824", "size": 5}}]
    listing = [ok(json.dumps({"sha": "c" * 40}).encode()), ok(json.dumps(tree).encode()), ok(b"{...}"), ok(b"hello", tag)]
    return {"text": answers(0, ok(b"{}")), "moved": answers(0, moved, chunked), "missing": answers(0, ok(b"", status="404 Not Found")),
            "whole": answers(1, ok(b"hello", tag)), "rest": answers(1, ok(b"hel", tag, length=5), rest),
            "other_version": answers(1, ok(b"hel", tag, length=5), ok(b"world", 'ETag: "2"')),
            "beyond": answers(1, ok(b"hel", tag, length=5), ok(b"", "Content-Range: bytes */3", status="416 Range Not Satisfiable")),
            "hashed": answers(2, ok(b"hello", tag)), "mirror": answers(2, ok(b"", status="403 Forbidden"), ok(b"hello")),
            "unlimited": answers(2, b"HTTP/1.0 200 OK\r\n\r\nhello"), "hub": answers(3, *listing)}  # fmt: skip


def text_stores():
    info = {"format": "kiln text store", "format_version": 1, "encoder": "bert", "encoder_fingerprint": "x", "tokenizer_fingerprint": "y",
            "encoder_path": "", "width": 8, "max_tokens": 4, "padded": False, "dtype": "BF16", "prefix": "", "suffix": "", "instruction": "",
            "compute_dtype": "f32", "captions_fingerprint": "z", "num_samples": 3, "num_entries": 4, "entries_per_shard": 2, "num_truncated": 1,
            "num_without_caption": 0, "kinds": ["caption"], "samples_xxh3": "0" * 16, "captions_xxh3": "0" * 16, "shards_xxh3": ["0" * 16] * 2,
            "columns_xxh3": ["0" * 16] * 2, "complete": True}
    return {"complete": json.dumps(info).encode(),
            "begun": json.dumps(info | {"complete": False, "shards_xxh3": [], "columns_xxh3": []}).encode()}


def seeds():
    values = npy("<f4", (2, 3), struct.pack("<6f", *range(6)))
    arrays = {"mu": values, "sigma": npy("<f8", (), struct.pack("<d", 2.0))}
    pictures = {"arr_0": npy("|u1", (1, 2, 2, 3), bytes(12)), "arr_1": npy("<i8", (1,), struct.pack("<q", 7))}
    sample = {"a.png": PICTURE, "a.txt": b"a caption", "a.cls": b"3", "b/c.jpg": PICTURE, "b/c.json": b'{"text": "two", "label": 1}', "README": b"x"}
    long_name = {"x" * 120 + ".png": PICTURE, "x" * 120 + ".txt": b"long"}
    return {
        "fuzz_npz": {"stored": npz(zipfile.ZIP_STORED, arrays), "deflated": npz(zipfile.ZIP_DEFLATED, pictures)},
        "fuzz_tar": {"ustar": tar(tarfile.USTAR_FORMAT, sample), "gnu": tar(tarfile.GNU_FORMAT, long_name), "pax": tar(tarfile.PAX_FORMAT, long_name)},
        "fuzz_tokenizer": {"unigram": sentencepiece(1, CHARSMAP), "bpe": sentencepiece(2)},
        "fuzz_tokenizer_folder": tokenizer_folders(),
        "fuzz_text_store": text_stores(),
        "fuzz_adapter": adapters(),
        "fuzz_run_folder": run_folders(),
        "fuzz_http": http(),
        "fuzz_yaml": {"recipe": b"model:\n  depth: 2\n  sizes: [1, 2.5, -3e-2]\n  name: 'it''s' # why\nlist:\n- a: true\n- ~\ntext: |\n  two\n  lines\n",
                      "anchors": b"base: &b {x: 1}\nother:\n  <<: *b\n  y: \"\\u00e9\"\n---\nsecond: 1\n"},
        "fuzz_json": {"values": b'{"a": [1, -2.5e3, true, null, "\\u00e9\\n"], "b": {"c": {}}}', "list": b"[[[1]], 18446744073709551615]"},
        "fuzz_toml": {"recipe": b'lr = 1e-4\n[model]\nname = "dit"\nsizes = [1, 2]\n[[stages]]\nsteps = 0x10\nwhen = 2020-01-01\n'},
        "fuzz_name_pattern": {"names": b"blocks\\.[0-9]+\\.(attn|mlp).*\nblocks.12.attn.to_q", "classes": b"^(?:a|b){2,3}\\w+?$\nabaz"},
    }  # fmt: skip


def main():
    for fuzzer, files in seeds().items():
        folder = pathlib.Path(sys.argv[1]) / fuzzer
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / f"seed-{name}").write_bytes(content)


if __name__ == "__main__":
    main()
