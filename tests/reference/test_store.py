"""kiln store: fast-DiT's and PixArt's caches as numpy writes them, what inspect and verify say, and kill -9."""

import json
import os
import shutil

import numpy as np
import pytest
from conftest import assert_fails, assert_refused, program, succeed
from interruptions import killed_once, until_interrupted
from safetensors.numpy import load_file
from test_images import names_of


def write_fast_dit(folder, count, size=32, seed=0):
    """What fast-DiT's extract_features.py leaves: N.npy (1, 4, h, w) f32 times 0.18215, and labels (1,) int64."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((count, 4, size, size), dtype=np.float32)
    labels = rng.integers(0, 10, count)
    for kind in ("features", "labels"):
        (folder / f"imagenet256_{kind}").mkdir(parents=True, exist_ok=True)
    for index in range(count):
        np.save(folder / "imagenet256_features" / f"{index}.npy", features[index : index + 1])
        np.save(folder / "imagenet256_labels" / f"{index}.npy", labels[index : index + 1])
    return features, labels


def import_fast_dit(source, out, *more):
    succeed("store", "import", "--from", "fast-dit", source / "imagenet256_features", source / "imagenet256_labels",
            "--out", out, "--image-size", 256, *more)


def shards_of(store):
    info = json.loads((store / "store.json").read_text())
    return info, [load_file(store / shard["file"]) for shard in info["shards"]]


def test_fast_dit_import_keeps_every_bit(tmp_path):
    features, labels = write_fast_dit(tmp_path / "in", 25)
    import_fast_dit(tmp_path / "in", tmp_path / "store", "--num-classes", 1000)
    info, (shard,) = shards_of(tmp_path / "store")
    assert info["already_scaled"] and not info["has_logvar"] and info["scaling_factor"] == 0.18215
    assert len(info["class_names"]) == 1000
    assert names_of(shard) == [f"{index}.npy" for index in range(25)]
    np.testing.assert_array_equal(shard["mean"][:, 0], features)
    np.testing.assert_array_equal(shard["class_labels"], labels)


def test_pixart_import_gives_the_same_posterior(tmp_path):
    rng = np.random.default_rng(1)
    moments = {}
    for index in range(5):
        mean = rng.standard_normal((4, 8, 8), dtype=np.float32) * 5
        std = np.exp(rng.standard_normal((4, 8, 8), dtype=np.float32) - 5)
        moments[f"a/{index}.x.npy"] = mean, std
        (tmp_path / "in" / "a").mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "in" / "a" / f"{index}.x.npy", np.concatenate([mean, std]))
    arguments = ("store", "import", "--from", "pixart", tmp_path / "in", "--out", tmp_path / "store")
    assert_fails("--scaling-factor is needed", *arguments, "--image-size", 64)
    succeed(*arguments, "--image-size", 64, "--scaling-factor", 0.13025)
    info, (shard,) = shards_of(tmp_path / "store")
    assert info["scaling_factor"] == 0.13025 and not info["already_scaled"]
    for index, name in enumerate(names_of(shard)):
        mean, std = moments[name]
        np.testing.assert_array_equal(shard["mean"][index, 0], mean)
        np.testing.assert_allclose(np.exp(0.5 * shard["logvar"][index, 0]), std, rtol=2e-6)


def test_pixart_caption_features_become_a_text_store(tmp_path):
    """As tools/extract_features.py saves them: padded, with a mask, compressed; the third caption is the first again."""
    rng = np.random.default_rng(2)
    prompts, counts = ["a dog", "", "a dog", "two birds"], [3, 5, 3, 8]
    features, listed = [], []
    for folder in ("in", "captions"):
        (tmp_path / folder).mkdir()
    for index, (prompt, count) in enumerate(zip(prompts, counts)):
        np.save(tmp_path / f"in/{index}.npy", rng.random((8, 8, 8), dtype=np.float32) + 0.1)
        features.append(features[0] if index == 2 else rng.standard_normal((1, 8, 16)).astype(np.float16))
        mask = (np.arange(8) < count).astype(np.int16)[None]
        np.savez_compressed(tmp_path / f"captions/{index}.npz", caption_feature=features[-1], attention_mask=mask)
        listed.append({"path": f"{index}.png", "height": 64, "width": 64, "ratio": 1, "prompt": prompt})
    (tmp_path / "data_info.json").write_text(json.dumps(listed))
    arguments = ["store", "import", "--from", "pixart", tmp_path / "in", "--data-info", tmp_path / "data_info.json",
                 "--image-size", 64, "--scaling-factor", 0.13025, "--caption-features", tmp_path / "captions"]  # fmt: skip
    succeed(*arguments, "--out", tmp_path / "store")
    folder = tmp_path / "store/text-t5"
    info = json.loads((folder / "text.json").read_text())
    assert (info["num_entries"], info["max_tokens"], info["width"], info["complete"]) == (4, 8, 16, True)
    shard = load_file(folder / "features-00000.safetensors")
    offsets = shard["row_offsets"].tolist()
    assert offsets == [0, 0, 3, 8, 16]  # no features of the empty caption
    for entry, index in ((1, 0), (2, 1), (3, 3)):
        np.testing.assert_array_equal(shard["features"][offsets[entry] : offsets[entry + 1]], features[index][0, : counts[index]])
    captions = load_file(folder / "captions.safetensors")
    of_sample = dict(zip(names_of(shards_of(tmp_path / "store")[1][0]), captions["entry_of_caption"].tolist()))
    assert of_sample == {"0.npy": 1, "1.npy": 2, "2.npy": 1, "3.npy": 3}

    train = ["train", "--data", tmp_path / "store", "--device", "cpu", "--threads", 1, "--global-batch", 2, "--max-steps", 2,
             "--hidden-size", 32, "--depth", 2, "--num-heads", 2, "--objective", "flow", "--peak-tflops", 1, "--no-tensorboard",
             "--out"]  # fmt: skip
    succeed(*train, tmp_path / "run", "--model", "pixart", "--patch-size", 2)
    assert_fails("no features of the empty caption", *train, tmp_path / "sana", "--model", "sana", "--patch-size", 1)
    np.savez(tmp_path / "captions/3.npz", caption_feature=features[3], attention_mask=np.ones((1, 5), np.int16))
    assert_fails("attention_mask of 8 rows, got 5", *arguments, "--out", tmp_path / "mask")
    np.savez(tmp_path / "captions/3.npz", features=features[3])
    assert_fails("expected an array caption_feature", *arguments, "--out", tmp_path / "array")
    (tmp_path / "captions/3.npz").write_bytes(b"no archive")
    assert_fails("expected an archive of numpy.savez", *arguments, "--out", tmp_path / "archive")
    (tmp_path / "captions/3.npz").unlink()
    assert_fails("the caption of 3.npy is missing", *arguments, "--out", tmp_path / "missing")


@pytest.mark.slow
def test_pixart_multi_scale_import_makes_lanes(kiln, tmp_path):
    """Caches of tools/extract_features.py --multi_scale, with the data_info.json that they were made of."""
    rng = np.random.default_rng(4)
    (tmp_path / "in").mkdir()
    sizes = [(64, 64, 1.0), (52, 72, 0.72), (32, 128, 0.25)]  # of ASPECT_RATIO_512, with their keys
    moments, listed = {}, []
    for index in range(11):
        height, width, key = sizes[index % 3]
        moments[f"{index}.npy"] = rng.random((8, height, width), dtype=np.float32) + 0.1, key, [8 * height + 5, 8 * width + 1]
        np.save(tmp_path / "in" / f"{index}.npy", moments[f"{index}.npy"][0])
        listed.append({"path": f"dir/{index}.png", "height": 8 * height + 5, "width": 8 * width + 1, "ratio": 1,
                       "prompt": f"picture {index}"})  # fmt: skip
    (tmp_path / "data_info.json").write_text(json.dumps(listed))
    arguments = ["store", "import", "--from", "pixart", tmp_path / "in", "--data-info", tmp_path / "data_info.json",
                 "--image-size", 512, "--scaling-factor", 0.13025]  # fmt: skip
    succeed(*arguments, "--out", tmp_path / "store")
    info, shards = shards_of(tmp_path / "store")
    assert info["has_image_size"]
    assert [(lane["height"], lane["width"], lane["aspect_ratio"]) for lane in info["lanes"]] == [sizes[2], sizes[1], sizes[0]]
    found = set()
    for described, shard in zip(info["shards"], shards):
        offsets, text = shard["caption_offsets"], shard["caption_bytes"].tobytes().decode()
        for index, name in enumerate(names_of(shard)):
            latents, key, hw = moments[name]
            assert info["lanes"][described["lane"]]["aspect_ratio"] == key
            np.testing.assert_array_equal(shard["mean"][index, 0], latents[:4])
            np.testing.assert_allclose(np.exp(0.5 * shard["logvar"][index, 0]), latents[4:], rtol=2e-6)
            assert shard["image_hw"][index].tolist() == hw
            assert text[offsets[index] : offsets[index + 1]] == f"picture {name[:-4]}"
            found.add(name)
    assert found == moments.keys()

    def refused(change):
        changed = [dict(entry) for entry in listed]
        change(changed)
        (tmp_path / "data_info.json").write_text(json.dumps(changed))
        result = kiln(*arguments, "--out", tmp_path / "refused")
        assert result.returncode != 0
        return result.stderr.strip()

    assert "10.npy belongs to no picture in" in refused(lambda changed: changed.pop())
    assert "3.npy may belong to dir/3.png or to 3.jpg" in refused(lambda changed: changed.append({**changed[3], "path": "3.jpg"}))
    assert "expected a height in pixels" in refused(lambda changed: changed[2].pop("height"))
    assert "picture 1)" in refused(lambda changed: changed.insert(1, "no object"))
    succeed(*arguments[:5], *arguments[7:], "--out", tmp_path / "latents")
    assert len(json.loads((tmp_path / "latents" / "store.json").read_text())["lanes"]) == 3


def test_inspect_measures_the_latents(tmp_path):
    features, _ = write_fast_dit(tmp_path / "in", 40)
    import_fast_dit(tmp_path / "in", tmp_path / "store")
    result = succeed("store", "inspect", tmp_path / "store")
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()}
    assert rows["samples"][:4] == ["40", "in", "1", "shards,"]
    for channel in range(4):
        mean, std = features[:, channel].mean(), features[:, channel].std()
        assert float(rows[str(channel)][0]) == pytest.approx(mean, abs=1e-4)
        assert float(rows[str(channel)][1]) == pytest.approx(std, abs=1e-4)
    assert float(rows["all"][4]) == pytest.approx(features.std(), abs=1e-4)


def test_verify_names_what_is_broken(kiln, tmp_path):
    write_fast_dit(tmp_path / "in", 6, size=8)
    import_fast_dit(tmp_path / "in", tmp_path / "store")
    result = succeed("store", "verify", tmp_path / "store")
    assert "6 samples in 1 shards" in result.stdout
    shard = tmp_path / "store" / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-40] ^= 1
    shard.write_bytes(content)
    result = kiln("store", "verify", tmp_path / "store")
    assert result.returncode == 1
    assert "shard-00000.safetensors" in result.stdout and "checksum" in result.stdout
    assert len(result.stderr.strip().splitlines()) == 1
    shard.unlink()
    assert_fails("is missing", "store", "verify", tmp_path / "store")


def test_a_folder_that_is_no_store(tmp_path):
    for verb in ("inspect", "verify"):
        assert_refused(["store", verb, tmp_path], "expected a folder with store.json")


def test_killed_imports_end_with_the_same_bytes(tmp_path):
    command = ["store", "import", "--from", "fast-dit", tmp_path / "in", "--out", tmp_path / "store", "--image-size", 256]
    log = tmp_path / "store" / "unfinished-shard.log"

    def killed():
        before = log.stat().st_size if log.exists() else 0
        return killed_once(lambda: log.exists() and log.stat().st_size > before + 2_000, [program("kiln"), *command])

    def killed_twice(more):
        for folder in ("in", "store"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        write_fast_dit(tmp_path / "in", 600 * more)
        return killed() and killed()

    until_interrupted(killed_twice, tries=5)
    import_fast_dit(tmp_path / "in", tmp_path / "whole")
    succeed(*command)
    for name in sorted(os.listdir(tmp_path / "whole")):
        assert (tmp_path / "store" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "store")) == sorted(os.listdir(tmp_path / "whole"))
