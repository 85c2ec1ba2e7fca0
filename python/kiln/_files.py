"""What the program writes, as numpy arrays and plain values."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

Array = npt.NDArray[Any]


def read_log(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of ``RUN/log.jsonl``: measurements have "step" and "loss", other events "event".

    The last line is left out while it is being written.
    """
    whole, _, _ = (Path(run) / "log.jsonl").read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


def _beside(folder: Path, name: str) -> Path:
    """The path of a file that one of this folder names. Raises ValueError for a name that leads elsewhere."""
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(f"expected a plain file name of a shard in {folder}, got {name!r}")
    return folder / name


class _Shard:
    """One safetensors file, mapped. bf16, which numpy lacks, comes as f32 of the same values (by torch)."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="numpy")
        self._path = path
        self._with_torch: Any = None

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def read(self, key: str, index: Any = ...) -> Array:
        part = self._file.get_slice(key)
        if part.get_dtype() != "BF16":
            return np.asarray(part[index])
        if self._with_torch is None:
            self._with_torch = safe_open(self._path, framework="pt")
        array: Array = self._with_torch.get_slice(key)[index].float().numpy()
        return array


def read_weights(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The tensors of a safetensors file, or of all files beside it that a ``*.index.json`` names. bf16 comes as f32."""
    path = Path(path)
    files = [path]
    if path.name.endswith(".index.json"):
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        files = [_beside(path.parent, name) for name in sorted(set(names))]
    shards = [_Shard(file) for file in files]
    return {key: shard.read(key) for shard in shards for key in shard.keys()}


@dataclass(frozen=True)
class Sample:
    """A picture as a feature store has it: latents are as encoded, before scaling and shift."""

    mean: Array  # (flips, channels, height, width)
    logvar: Array | None  # likewise; None: the store has plain latents
    label: int | None
    name: str
    caption: str


class Store:
    """A feature store (docs/feature_store.md) with all its complete parts, in the order of its samples.

    ``store.info`` is store.json; ``len(store)``, ``store[i]`` and iteration give samples. What it holds is not checked
    here: ``kiln store verify`` does that. Raises ValueError for a store that is not complete.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.info: dict[str, Any] = self._read_info(self.folder)
        self._shards: list[_Shard] = []
        self._ends: list[int] = []  # of each shard's samples
        if not self.info["complete"]:
            raise ValueError(f"expected a complete store in {self.folder}: run the command that began it again")
        for part, info in self._parts():
            for shard in info["shards"]:
                self._shards.append(_Shard(_beside(part, shard["file"])))
                self._ends.append((self._ends[-1] if self._ends else 0) + shard["num_samples"])

    def _parts(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """The store, then what was appended to it, up to the first part that is not complete."""
        part, info = self.folder, self.info
        for number in itertools.count(1):
            yield part, info
            part = self.folder / f"appended-{number:05}"
            if not (part / "store.json").exists():
                return
            info = self._read_info(part)
            if not info["complete"]:
                return

    @staticmethod
    def _read_info(folder: Path) -> dict[str, Any]:
        info: dict[str, Any] = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        if info.get("format") != "kiln feature store" or info["format_version"] > 2:
            raise ValueError(f"expected a feature store of version 2 or earlier in {folder}")
        return info

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Sample:
        """Reads the sample's own bytes only. Raises IndexError beyond the last one."""
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"the store has {len(self)} samples, got index {index}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        shard = self._shards[number]
        place = index - (self._ends[number - 1] if number else 0)
        label = int(shard.read("class_labels", slice(place, place + 1))[0])
        return Sample(
            mean=shard.read("mean", slice(place, place + 1))[0],
            logvar=shard.read("logvar", slice(place, place + 1))[0] if self.info["has_logvar"] else None,
            label=None if label < 0 else label,
            name=self._text(shard, "name", place),
            caption=self._text(shard, "caption", place),
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    @staticmethod
    def _text(shard: _Shard, kind: str, place: int) -> str:
        begin, end = map(int, shard.read(f"{kind}_offsets", slice(place, place + 2)))
        return bytes(shard.read(f"{kind}_bytes", slice(begin, end))).decode("utf-8", "replace") if begin < end else ""
