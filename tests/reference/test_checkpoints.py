"""Checkpoints of several ranks: resumed by any other number of them, cut short by a full disk, converted."""

import json
import os
import resource
import shutil
import subprocess

import numpy as np
import pytest
from conftest import matrix, succeed
from PIL import Image
from run_files import STATE, checkpoint, losses, saved
from safetensors.torch import load_file
from test_ranks import command, environment_of_ranks, train

STEPS = 24


def ranks_of(nproc, stage):
    return ["--nproc", nproc, "--zero-stage", stage] if nproc > 1 else []


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    train(out, STEPS, "--checkpoint-every", 12)
    return out


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("two_ranks")
    train(out, STEPS, *ranks_of(2, 2), "--checkpoint-every", 12)
    return out


@pytest.mark.slow
def test_any_ranks_resume_what_any_others_saved(alone, tmp_path):
    """1 rank -> 2 at stage 3 -> 3 at stage 1 -> 1: samples, noise and losses are those of one rank throughout."""
    for steps, division in [(6, ranks_of(1, 0)), (12, ranks_of(2, 3)), (18, ranks_of(3, 1)), (STEPS, ranks_of(1, 0))]:
        result = train(tmp_path, steps, *division)
        assert ("sums over ranks round differently" in result.stderr) == (steps > 6)
        state = json.loads((checkpoint(tmp_path, steps) / "train_state.json").read_text())
        assert state["images_seen"] == 6 * steps
        assert state["world_size"] == (division[1] if division else 1)
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=5e-6)
    for name in STATE:
        one, other = load_file(checkpoint(alone, STEPS) / name), load_file(checkpoint(tmp_path, STEPS) / name)
        assert one.keys() == other.keys()
        for key in one:
            assert (one[key] - other[key]).norm() <= 1e-4 * one[key].norm() + 1e-7, key


@pytest.mark.parametrize("copy", ["memory", "page-cache"])
@pytest.mark.slow
def test_both_copies_write_the_same(alone, tmp_path, copy):
    train(tmp_path, STEPS, "--checkpoint-copy", copy, "--checkpoint-every", 1)
    for step in (12, STEPS):
        assert saved(tmp_path, step) == saved(alone, step)


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_ends_all(two_ranks, tmp_path):
    train(tmp_path, 12, *ranks_of(2, 2))
    size = (checkpoint(tmp_path, 12) / "model.safetensors").stat().st_size
    processes = []
    for rank, environment in enumerate(environment_of_ranks(2)):
        limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))) if rank == 1 else None
        processes.append(subprocess.Popen(command(tmp_path, STEPS, "--zero-stage", 2), stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, text=True, preexec_fn=limit,
                                          env=os.environ | environment))
    for process in processes:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "rank 1 of 2: cannot write" in stderr and "File too large" in stderr, stderr
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000012"]
    train(tmp_path, STEPS, *ranks_of(2, 2))
    assert saved(tmp_path, STEPS) == saved(two_ranks, STEPS)


def turn_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FILES_OF_RANKS = [(name, ranks) for ranks in (1, 2) for name in STATE]


@pytest.mark.parametrize("name, ranks", matrix(FILES_OF_RANKS[::2], FILES_OF_RANKS[1::2]))
def test_a_bit_that_a_disk_turned_over_is_noticed(two_ranks, alone, tmp_path, name, ranks):
    """The run goes on from the checkpoint before, to the same bytes, and the next pruning does not take that for an old one."""
    source, division = (two_ranks, ranks_of(2, 2)) if ranks == 2 else (alone, [])
    shutil.copytree(source, tmp_path / "run")
    out = tmp_path / "run"
    turn_a_bit(checkpoint(out, STEPS) / name)
    damage = f"{name} of {checkpoint(out, STEPS)} has other bytes than were written"
    if name == STATE[1]:
        converted = succeed("convert", "--in", out, "--out", tmp_path / "model.safetensors")
        assert f"passed over, it is damaged: {damage}" in converted.stderr
        before = load_file(checkpoint(out, 12) / name)
        assert all(value.equal(before[key]) for key, value in load_file(tmp_path / "model.safetensors").items())
    resumed = train(out, STEPS, *division, "--checkpoint-every", 18, "--keep-checkpoints", 1)
    assert f"passed over, it is damaged: {damage}" in resumed.stderr and "from step 12 " in resumed.stdout
    assert saved(out, STEPS) == saved(source, STEPS)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [f"damaged-step-{STEPS:08}", f"step-{STEPS:08}"]


def test_convert_takes_what_several_ranks_saved(two_ranks, tmp_path):
    succeed("convert", "--in", two_ranks, "--out", tmp_path / "model.safetensors")
    converted, saved = load_file(tmp_path / "model.safetensors"), load_file(checkpoint(two_ranks, STEPS) / STATE[1])
    assert converted.keys() == saved.keys()
    assert all(converted[key].equal(saved[key]) for key in saved)


@pytest.mark.slow
def test_sample_grids_of_divided_weights(tmp_path):
    """Every rank draws its share of the pictures with whole weights."""
    options = ["--autoencoder", "pixels", "--image-size", 16, "--num-classes", 7, "--sample-every", 4, "--num-samples", 5,
               "--num-sampling-steps", 3, "--patch-size", 4]
    grids = []
    for division in (ranks_of(1, 0), ranks_of(2, 3), ranks_of(3, 1)):
        out = tmp_path / str(len(grids))
        train(out, 4, *options, *division)
        grids.append(np.asarray(Image.open(out / "samples" / "step-00000004.png")).astype(int))
    assert grids[0].std() > 5
    for grid in grids[1:]:
        assert abs(grid - grids[0]).max() <= 2
