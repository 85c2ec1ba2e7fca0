"""The readers of the Python module, on files that a run has not finished, has grown or has from elsewhere. tests/channels reads a
whole run by the installed module."""

import json
import sys

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

sys.path.insert(0, str(REPOSITORY / "python"))
import kiln as module  # noqa: E402


def test_a_log_is_read_while_it_is_written(tmp_path):
    """A name may hold what Unicode calls the end of a line; the last line may be half there."""
    lines = [{"step": 1, "loss": 0.5}, {"event": "stage", "name": "a\u2028b\x85c"}]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "log.jsonl").write_bytes((text + '{"step": 2, "lo').encode())
    assert module.read_log(tmp_path) == lines
    (tmp_path / "log.jsonl").write_bytes(b"")
    assert module.read_log(tmp_path) == []


def test_weights_without_dimensions_are_read(tmp_path):
    save_file({"scale": np.array(3, dtype=np.float32), "steps": np.arange(4)}, tmp_path / "a.safetensors")
    save_torch_file({"half": torch.tensor(1.5, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    found = module.read_weights(tmp_path / "a.safetensors")
    assert found["scale"] == 3 and found["scale"].shape == () and found["steps"].tolist() == [0, 1, 2, 3]
    assert module.read_weights(tmp_path / "b.safetensors")["half"] == 1.5


def write_part(folder, first, count, complete=True):
    texts = [f"{index}.png".encode() for index in range(first, first + count)]
    offsets = np.cumsum([0] + [len(text) for text in texts])
    folder.mkdir(parents=True)
    save_file({"mean": np.full((count, 1, 4, 2, 2), first, dtype=np.float32), "class_labels": np.full(count, -1),
               "name_offsets": offsets, "name_bytes": np.frombuffer(b"".join(texts), dtype=np.uint8),
               "caption_offsets": np.zeros(count + 1, dtype=np.int64), "caption_bytes": np.zeros(0, dtype=np.uint8)},
              folder / "shard-00000.safetensors")  # fmt: skip
    info = {"format": "kiln feature store", "format_version": 2, "complete": complete, "has_logvar": False,
            "shards": [{"file": "shard-00000.safetensors", "num_samples": count}]}  # fmt: skip
    (folder / "store.json").write_text(json.dumps(info))


def test_a_store_ends_before_the_first_part_that_is_not_complete(tmp_path):
    """As the program has it: what follows a part that is missing or being written belongs to nothing yet."""
    store = tmp_path / "store"
    write_part(store, 0, 2)
    write_part(store / "appended-00001", 2, 3)
    write_part(store / "appended-00002", 5, 1, complete=False)
    write_part(store / "appended-00003", 6, 1)
    assert [sample.name for sample in module.Store(store)] == [f"{index}.png" for index in range(5)]
    write_part(tmp_path / "begun", 0, 2, complete=False)
    with pytest.raises(ValueError, match="expected a complete store"):
        module.Store(tmp_path / "begun")


@pytest.mark.parametrize("name", ["../other.safetensors", "/other.safetensors", "", ".."])
def test_no_file_leads_out_of_its_folder(tmp_path, name):
    store = tmp_path / "store"
    write_part(store, 0, 2)
    save_file({"secret": np.zeros(1)}, tmp_path / "other.safetensors")
    info = json.loads((store / "store.json").read_text())
    info["shards"][0]["file"] = name
    (store / "store.json").write_text(json.dumps(info))
    (store / "a.index.json").write_text(json.dumps({"weight_map": {"secret": name}}))
    for read in (lambda: module.Store(store), lambda: module.read_weights(store / "a.index.json")):
        with pytest.raises(ValueError, match="expected a plain file name of a shard"):
            read()
