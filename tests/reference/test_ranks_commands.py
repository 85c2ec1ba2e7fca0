"""kiln extract and kiln sample on several ranks give what one rank gives, and no rank hangs or overwrites another."""

import json
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import assert_fails, matrix, program, succeed
from interruptions import until_interrupted, wait_while_running
from safetensors.numpy import load_file
from test_extract import arguments as extract_arguments
from test_extract import write_pictures
from test_images import names_of
from test_ranks import start_by_hand
from test_sample import weights  # noqa: F401


def extract(*arguments):
    return succeed(*extract_arguments(*arguments), timeout=60)


def contents(store):
    """{name: (mean, label)} in the order of the samples."""
    info = json.loads((store / "store.json").read_text())
    assert info["complete"]
    shards = [load_file(store / shard["file"]) for shard in info["shards"]]
    samples = [(name, shard["mean"][i], shard["class_labels"][i]) for shard in shards
               for i, name in enumerate(names_of(shard))]
    assert info["num_samples"] == len(samples)
    return samples


def assert_same_contents(got, want, tolerance=0):
    got, want = contents(got), contents(want)
    assert [sample[0] for sample in got] == [sample[0] for sample in want]
    assert [sample[2] for sample in got] == [sample[2] for sample in want]
    for (_, mean, _), (_, expected, _) in zip(got, want):
        np.testing.assert_allclose(mean, expected, atol=tolerance, rtol=0)


def assert_verified(store):
    succeed("store", "verify", store)
    assert not list(store.glob("part-*")) and not list(store.glob("*.partial"))


@pytest.mark.parametrize("count, batch, ranks", matrix([(23, 4, 2), (3, 2, 3)], [(5, 8, 2)]))
@pytest.mark.slow
def test_one_store_of_all_ranks(tmp_path, count, batch, ranks):
    """Uneven counts; the second and third leave a rank without work."""
    write_pictures(tmp_path / "in", count)
    options = ["pixels", "--batch", batch, "--shard-size", 5]
    extract(tmp_path / "in", tmp_path / "alone", *options)
    extract(tmp_path / "in", tmp_path / "store", *options, "--nproc", ranks)
    assert_same_contents(tmp_path / "store", tmp_path / "alone")
    assert_verified(tmp_path / "store")
    again = extract(tmp_path / "in", tmp_path / "store", *options, "--nproc", ranks)
    assert f"is complete with {count} samples: nothing to do" in again.stdout


@pytest.mark.slow
def test_latents_and_skipped_pictures(tiny_vae, tmp_path):
    folder, _ = tiny_vae
    write_pictures(tmp_path / "in", 22, broken=(3, 15), small=(20,))
    options = [folder, "--batch", 4, "--flip", "both"]
    extract(tmp_path / "in", tmp_path / "alone", *options)
    result = extract(tmp_path / "in", tmp_path / "store", *options, "--nproc", 2)
    assert "3 of 22 pictures are broken or smaller" in result.stdout
    assert_same_contents(tmp_path / "store", tmp_path / "alone", tolerance=1e-5)  # other batches: other rounding
    assert_verified(tmp_path / "store")


@pytest.mark.slow
def test_an_interrupted_extraction_goes_on(kiln, tiny_vae, tmp_path):
    folder, _ = tiny_vae
    command = extract_arguments(tmp_path / "in", tmp_path / "store", folder, "--nproc", 2)

    def ended_by(end):
        process = subprocess.Popen([program("kiln"), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        logs = [tmp_path / "store" / f"part-0000{rank}-of-00002" / "unfinished-shard.log" for rank in range(2)]
        sizes = [log.stat().st_size if log.exists() else 0 for log in logs]
        wait_while_running(process, lambda: all(log.exists() and log.stat().st_size > s for log, s in zip(logs, sizes)))
        process.send_signal(end)
        process.wait(timeout=30)
        return all(log.exists() for log in logs) and not (tmp_path / "store" / "store.json").exists()

    def ended_twice(more):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        write_pictures(tmp_path / "in", 300 * more)
        return ended_by(signal.SIGTERM) and ended_by(signal.SIGKILL)

    until_interrupted(ended_twice, tries=4)
    assert_fails("begun by another number of ranks", *command[:-1], 3, code=None)
    assert_fails("part-0000", *command[:-2], code=None)
    # The ranks of the killed launcher end by themselves.
    deadline = time.monotonic() + 30
    while (result := kiln(*command)).returncode != 0 and time.monotonic() < deadline:
        assert "another process is writing this store" in result.stderr
        time.sleep(0.2)
    assert "going on behind them" in result.stderr
    extract(tmp_path / "in", tmp_path / "alone", folder)
    assert_same_contents(tmp_path / "store", tmp_path / "alone", tolerance=1e-5)
    assert_verified(tmp_path / "store")


def test_a_broken_picture_ends_all_ranks(tmp_path):
    write_pictures(tmp_path / "in", 12, broken=(8,))
    assert_fails("(--strict)",
                 *extract_arguments(tmp_path / "in", tmp_path / "store", "pixels", "--strict", "--nproc", 2), code=None,
                 timeout=60)
    assert not (tmp_path / "store" / "store.json").exists()


def sample_arguments(weights, out, *more, steps=3):
    path, config, _ = weights
    options = ["sample", "--weights", path, "--model", "dit", "--model-config", json.dumps(config), "--autoencoder", "pixels",
               "--num-images", 11, "--batch", 2, "--sampler", "ddim", "--num-sampling-steps", steps, "--out", out, *more]
    return [str(option) for option in options]


@pytest.mark.parametrize("more", [[], ["--no-png"]], ids=["png", "npz-only"])
@pytest.mark.slow
def test_one_npz_of_all_ranks(weights, tmp_path, more):
    def run(name, *extra):
        succeed(*sample_arguments(weights, tmp_path / name, "--npz", tmp_path / f"{name}.npz", *more, *extra),
                timeout=60)
        return (tmp_path / f"{name}.npz").read_bytes()

    def images(name):
        return np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int)

    alone = run("alone", "--threads", 1)
    assert run("both", "--nproc", 2, "--threads", 1) == alone
    names = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == names
    # A part of the images is there: by other numbers of ranks, of an interrupted run.
    (tmp_path / "both.npz").unlink()
    for path in sorted((tmp_path / "both").glob("*.png"))[3:8]:
        path.unlink()
    run("both", "--nproc", 3, "--threads", 1)
    assert np.abs(images("both") - images("alone")).max() <= 1  # other batches: other rounding


@pytest.mark.slow
def test_an_interrupted_npz_goes_on_with_other_ranks(weights, tmp_path):
    """Without --no-png's files: what the ranks drew waits in a folder, which one rank alone takes up, too."""
    arguments = sample_arguments(weights, tmp_path / "out", "--npz", tmp_path / "out.npz", "--no-png", "--threads", 1, steps=60)

    def interrupted(_):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out.npz").unlink(missing_ok=True)
        process = subprocess.Popen([program("kiln"), *arguments, "--nproc", "2"], stderr=subprocess.DEVNULL)
        wait_while_running(process, lambda: len(list((tmp_path / "out").glob("passing/*.png"))) >= 3)
        process.terminate()
        process.wait(timeout=30)
        return not (tmp_path / "out.npz").exists()

    until_interrupted(interrupted)
    result = succeed(*arguments)
    assert "of 11 images are there already" in result.stderr, result.stderr
    assert not (tmp_path / "out" / "passing").exists()
    fresh = [part.replace(str(tmp_path / "out"), str(tmp_path / "fresh")) for part in arguments]
    succeed(*fresh)
    got, want = (np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int) for name in ("out", "fresh"))
    assert np.abs(got - want).max() <= 1


@pytest.mark.slow
def test_other_builds_are_refused_on_every_rank(kiln, weights, tmp_path):
    """A copy of the program whose name says that it is another build."""
    build = kiln("--version").stdout.split()[1]
    other = tmp_path / "kiln"
    other.write_bytes(program("kiln").read_bytes().replace(build.encode(), build[:-3].encode() + b"zzz"))
    other.chmod(0o755)
    write_pictures(tmp_path / "in", 3)
    for arguments in (extract_arguments(tmp_path / "in", tmp_path / "store", "pixels"), sample_arguments(weights, tmp_path / "out")):
        for (_, stderr), code in start_by_hand([[program("kiln"), *arguments], [other, *arguments]]):
            assert code == 1 and "mixed versions or options among ranks: kiln is" in stderr, stderr
    assert not (tmp_path / "store").exists() and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_other_settings_are_refused_on_every_rank(weights, tmp_path):
    def with_seed(seed):
        return start_by_hand([[program("kiln"), *sample_arguments(weights, tmp_path / "out", "--seed", seed)]] * 2)

    assert [code for _, code in with_seed(1)] == [0, 0]
    for (_, stderr), code in with_seed(2):
        assert code == 1 and "drawn with other settings: seed" in stderr
