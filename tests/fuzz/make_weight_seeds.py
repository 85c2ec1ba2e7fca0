"""Seed corpora of fuzz_safetensors and fuzz_pt: OUT/fuzz_safetensors/* and OUT/fuzz_pt/*.

Usage: make_weight_seeds.py OUT
"""

import argparse
import collections
import pathlib
import sys
import zipfile

import safetensors.torch
import torch


def main() -> None:
    out = pathlib.Path(sys.argv[1])
    (out / "fuzz_safetensors").mkdir(parents=True, exist_ok=True)
    (out / "fuzz_pt").mkdir(parents=True, exist_ok=True)
    weights = {
        "blocks.0.weight": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(4, dtype=torch.float16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
    }
    safetensors.torch.save_file(weights, out / "fuzz_safetensors" / "mixed", metadata={"format": "pt"})
    safetensors.torch.save_file({}, out / "fuzz_safetensors" / "none")

    shared = torch.arange(12.0)
    files = {
        "plain": collections.OrderedDict(weights),
        "dit": {"model": weights, "ema": weights, "opt": {"state": {0: {"step": torch.tensor(3.0)}}},
                "args": argparse.Namespace(lr=1e-4, name="DiT")},
        "pixart": {"state_dict": weights, "state_dict_ema": weights, "epoch": 3},
        "views": {"t": shared.reshape(3, 4).t(), "s": shared[2:5], "p": torch.nn.Parameter(shared.clone())},
    }
    for name, content in files.items():
        path = out / "fuzz_pt" / name
        torch.save(content, path)
        with zipfile.ZipFile(path) as archive:
            pickle = next(member for member in archive.namelist() if member.endswith("data.pkl"))
            (out / "fuzz_pt" / f"{name}.pkl").write_bytes(archive.read(pickle))
            with zipfile.ZipFile(out / "fuzz_pt" / f"{name}.deflated", "w", zipfile.ZIP_DEFLATED) as packed:
                for member in archive.namelist():
                    packed.writestr(member, archive.read(member))


if __name__ == "__main__":
    main()
