"""kiln extract: what it writes, what it refuses, and that an interrupted run ends with the same bytes."""

import json
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch
from conftest import assert_fails, assert_refused, matrix, program, succeed
from interruptions import killed_once, until_interrupted, wait_while_running
from PIL import Image
from pictures import noise_picture
from run_files import losses
from safetensors.numpy import load_file
from test_images import center_crop, extract_pixels, names_of

SIZE = 32
TRAIN = ["train", "--model", "dit", "--hidden-size", 32, "--depth", 1, "--num-heads", 2, "--patch-size", 4,
         "--image-size", SIZE, "--global-batch", 6, "--log-every", 1, "--device", "cpu", "--peak-tflops", 1]


def write_pictures(folder, count, broken=(), small=()):
    rng = np.random.default_rng(0)
    for index in range(count):
        path = folder / f"class-{index % 3}" / f"{index:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        side = SIZE // 2 if index in small else SIZE + index % 5
        noise_picture(rng, side, side).save(path)
        if index in broken:
            path.write_bytes(path.read_bytes()[:60])


def arguments(data, out, autoencoder="pixels", *more):
    options = ["extract", "--data", data, "--autoencoder", autoencoder, "--image-size", SIZE, "--out", out, *more]
    return [str(option) for option in options]


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_latents_are_those_of_diffusers(tiny_vae, tmp_path):
    folder, vae = tiny_vae
    write_pictures(tmp_path / "in", 11)
    succeed(*arguments(tmp_path / "in", tmp_path / "out", folder, "--flip", "both", "--batch", 4))
    info = json.loads((tmp_path / "out" / "store.json").read_text())
    assert (info["scaling_factor"], info["num_flips"], info["num_samples"]) == (0.3, 2, 11)
    store = load_file(tmp_path / "out" / info["shards"][0]["file"])
    from torchvision.transforms import functional as F

    for index, name in enumerate(names_of(store)):
        image = Image.open(tmp_path / "in" / name)
        # Nearly square pictures slightly larger than SIZE: test_images.py compares the crop itself.
        scale = SIZE / min(image.size)
        image = image.resize(tuple(round(x * scale) for x in image.size), Image.BICUBIC)
        for flip in range(2):
            pixels = F.normalize(F.to_tensor(F.hflip(image) if flip else image), [0.5] * 3, [0.5] * 3)
            with torch.no_grad():
                moments = vae._encode(pixels[None])[0]
            mean, logvar = moments.chunk(2)
            np.testing.assert_allclose(store["mean"][index, flip], mean, atol=2e-5, rtol=1e-4)
            np.testing.assert_allclose(store["logvar"][index, flip], logvar, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_large_pictures_through_a_dc_ae(tmp_path):
    """Sana's f32c32 at 1024 px, twice the side of a tile: by default it walks on meta to see whether a whole picture fits."""
    from diffusers import AutoencoderDC

    side, widths = 1024, (8, 8, 16, 16, 32, 32)
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    torch.manual_seed(0)
    vae = AutoencoderDC(latent_channels=32, attention_head_dim=8, encoder_block_types=blocks, decoder_block_types=blocks,
                        encoder_block_out_channels=widths, decoder_block_out_channels=widths, encoder_layers_per_block=(1,) * 6,
                        decoder_layers_per_block=(1,) * 6, encoder_qkv_multiscales=((),) * 3 + ((5,),) * 3,
                        decoder_qkv_multiscales=((),) * 3 + ((5,),) * 3, upsample_block_type="interpolate",
                        downsample_block_type="conv", scaling_factor=0.41407).eval()
    vae.save_pretrained(tmp_path / "dc-ae")
    coarse = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.BICUBIC)
    (tmp_path / "in").mkdir()
    image.save(tmp_path / "in" / "0.png")
    stores = {}
    for name, more in {"auto": [], "off": ["--tiles", "off"], "512": ["--tiles", 512]}.items():
        succeed("extract", "--data", tmp_path / "in", "--autoencoder", tmp_path / "dc-ae", "--image-size", side,
                "--out", tmp_path / name, *more)
        info = json.loads((tmp_path / name / "store.json").read_text())
        stores[name] = load_file(tmp_path / name / info["shards"][0]["file"])["mean"][0, 0]
    with torch.no_grad():
        pixels = torch.tensor(np.asarray(image), dtype=torch.float32).permute(2, 0, 1) / 127.5 - 1
        latent = vae.encode(pixels[None]).latent[0].numpy()
    assert stores["auto"].shape == (32, 32, 32)
    np.testing.assert_allclose(stores["auto"], latent, atol=1e-4 * np.abs(latent).max())
    np.testing.assert_array_equal(stores["auto"], stores["off"])
    assert np.abs(stores["512"] - latent).max() > 1e-3 * np.abs(latent).max(), "tiles do not see the whole picture"


@pytest.mark.parametrize("seed", matrix([0], [1, 2]))
@pytest.mark.slow
def test_killed_and_continued_gives_the_same_bytes(tiny_vae, tmp_path, seed):
    """kill -9 at random moments, until a run ends by itself. Broken pictures in between, small shards."""
    folder, _ = tiny_vae
    write_pictures(tmp_path / "in", 120, broken={0, 7, 8, 31, 119}, small={20, 44})
    more = (folder, "--batch", 7, "--shard-size", 9, "--device", "cpu")
    whole = succeed(*arguments(tmp_path / "in", tmp_path / "whole", *more))
    assert "7 of 120 pictures are broken or smaller" in whole.stdout

    rng = np.random.default_rng(seed)
    cut = tmp_path / "cut"
    log = cut / "unfinished-shard.log"
    command = arguments(tmp_path / "in", cut, *more)

    def killed():
        """Once the log, which grows with every batch and begins again with every shard, has changed some times."""
        sizes = []

        def has_changed(times):
            size = log.stat().st_size if log.exists() else 0
            if size != (sizes or [0])[-1]:
                sizes.append(size)
            return len(sizes) > times

        return killed_once(lambda times=rng.integers(1, 4): has_changed(times), [program("kiln"), *command])

    def killed_often(_):
        shutil.rmtree(cut, ignore_errors=True)
        return all(killed() for _ in range(3))

    until_interrupted(killed_often)
    assert "7 of 120 pictures are broken or smaller" in succeed(*command).stdout
    assert bytes_of(cut) == bytes_of(tmp_path / "whole")


@pytest.mark.slow
def test_sigint_ends_cleanly_and_the_same_command_continues(kiln, tiny_vae, tmp_path):
    folder, _ = tiny_vae
    command = [program("kiln"), *arguments(tmp_path / "in", tmp_path / "cut", folder, "--batch", 2)]
    log = tmp_path / "cut" / "unfinished-shard.log"

    def interrupted(more):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        write_pictures(tmp_path / "in", 60 * more)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_while_running(process, lambda: log.exists() and log.stat().st_size > 0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return "stopped: the same command continues" in errors

    until_interrupted(interrupted)
    assert not json.loads((tmp_path / "cut" / "store.json").read_text())["complete"]
    again = kiln(*command[1:])
    assert "going on behind them" in again.stderr
    succeed(*arguments(tmp_path / "in", tmp_path / "whole", folder, "--batch", 2))
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_broken_pictures_are_named_and_counted_or_refused(kiln, tmp_path):
    write_pictures(tmp_path / "in", 12, broken={4}, small={7})
    result = succeed(*arguments(tmp_path / "in", tmp_path / "out"))
    assert "skipped: cannot decode" in result.stderr and "class-1/0004.png" in result.stderr
    assert "class-1/0007.png is too small: 16 x 16, expected at least 32" in result.stderr
    assert "2 of 12 pictures are broken or smaller than 32 pixels" in result.stdout
    store = load_file(next((tmp_path / "out").glob("*.safetensors")))
    # By class: those of class-1 are 1, 4, 7, 10, without the two.
    assert [int(name[-8:-4]) for name in names_of(store)] == [0, 3, 6, 9, 1, 10, 2, 5, 8, 11]
    assert store["class_labels"].tolist() == [0] * 4 + [1] * 2 + [2] * 4
    strict = kiln(*arguments(tmp_path / "in", tmp_path / "strict", "pixels", "--strict"))
    assert strict.returncode != 0
    assert strict.stderr.strip().splitlines()[-1].endswith("(--strict)") and "0004.png" in strict.stderr


def test_small_pictures_are_enlarged_as_dit_does(tmp_path):
    """ImageNet has many below 256 pixels: DiT's transform enlarges them, and they belong to its data."""
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(3)
    pictures = {}
    for index, (height, width) in enumerate([(SIZE, SIZE), (9, 9), (SIZE - 1, 3 * SIZE), (40, 17), (SIZE + 3, SIZE - 9)]):
        pictures[f"{index}.png"] = noise_picture(rng, height, width)
        pictures[f"{index}.png"].save(tmp_path / "in" / f"{index}.png")
    pixels = extract_pixels(tmp_path / "in", tmp_path / "out", SIZE, "--enlarge")
    assert pixels.keys() == pictures.keys()
    for name, picture in pictures.items():
        np.testing.assert_array_equal(pixels[name], center_crop(picture, SIZE))
    assert_fails("source enlarge (on there, off asked for)", *arguments(tmp_path / "in", tmp_path / "out"), code=None)


@pytest.mark.parametrize("ranks", [0, 2])
def test_pictures_of_which_none_can_be_used_leave_nothing(kiln, tmp_path, ranks):
    write_pictures(tmp_path / "in", 6, broken={2}, small={0, 1, 3, 4, 5})
    more = ["--nproc", ranks] if ranks else []
    result = kiln(*arguments(tmp_path / "in", tmp_path / "out", "pixels", *more))
    assert result.returncode != 0
    assert f"none of the 6 pictures in {tmp_path / 'in'} can be used" in result.stderr
    assert f"smaller than --image-size {SIZE} (--enlarge takes small ones" in result.stderr
    assert not (tmp_path / "out").exists()
    smaller = arguments(tmp_path / "in", tmp_path / "out", "pixels", *more)
    smaller[smaller.index("--image-size") + 1] = str(SIZE // 2)
    succeed(*smaller)


@pytest.mark.slow
def test_other_settings_and_other_pictures_are_refused(kiln, tiny_vae, tmp_path):
    folder, _ = tiny_vae
    write_pictures(tmp_path / "in", 6)
    out = tmp_path / "out"
    succeed(*arguments(tmp_path / "in", out))
    before = bytes_of(out)
    done = succeed(*arguments(tmp_path / "in", out))
    assert "complete with 6 samples" in done.stdout
    for more in (("pixels", "--flip", "both"), ("pixels", "--dtype", "bf16"), (folder,)):
        assert_refused(arguments(tmp_path / "in", out, *more), "store of other settings", code=None)
    write_pictures(tmp_path / "in", 7)
    assert "images_xxh3" in kiln(*arguments(tmp_path / "in", out)).stderr
    assert bytes_of(out) == before


@pytest.mark.parametrize("change, message", [
    ({"--data": "nowhere"}, "expected a folder of images or a .tar, got nothing"),
    ({"--image-size": "33"}, "multiple of 2, got 33"),
    ({"--flip": "left"}, "--flip: expected none or both, got left"),
    ({"--dtype": "int8"}, "int8"),
    ({"--autoencoder": "nowhere"}, "nowhere does not exist"),
    ({"--shard-size": "0"}, "--shard-size"),
])
def test_impossible_options_leave_nothing_behind(tiny_vae, tmp_path, change, message):
    folder, _ = tiny_vae
    write_pictures(tmp_path / "in", 2)
    options = {"--data": tmp_path / "in", "--autoencoder": folder, "--image-size": 32, "--out": tmp_path / "out"}
    assert_refused(["extract", *sum((options | change).items(), ())], message, code=None)
    assert not (tmp_path / "out").exists()


def test_processes_cannot_overwrite_each_other(kiln, tiny_vae, tmp_path):
    """Peers' multi-rank extraction writes the same file names from every rank."""
    folder, _ = tiny_vae
    command = [program("kiln"), *arguments(tmp_path / "in", tmp_path / "out", folder)]

    def refused(more):
        """The first one is stopped while the second one tries."""
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        write_pictures(tmp_path / "in", 50 * more)
        first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_while_running(first, (tmp_path / "out" / "unfinished-shard.log").exists)
        first.send_signal(signal.SIGSTOP)
        second = kiln(*command[1:])
        first.send_signal(signal.SIGCONT)
        assert first.wait() == 0
        return second.returncode != 0 and "another process is writing this store" in second.stderr

    until_interrupted(refused, tries=5)


@pytest.mark.slow
def test_training_on_images_is_training_on_their_store(tiny_vae, tmp_path):
    """The same order and draws: with pixels the same bits, with an autoencoder the same up to rounding."""
    folder, _ = tiny_vae
    write_pictures(tmp_path / "in", 10)
    for autoencoder, tolerance in (("pixels", 0), (folder, 1e-4)):
        found = []
        name = "pixels" if autoencoder == "pixels" else "kl"
        out = tmp_path / f"store-{name}"
        succeed(*arguments(tmp_path / "in", out, autoencoder, "--flip", "both"))
        for data in (tmp_path / "in", out):
            run = tmp_path / f"run-{name}-{data.name}"
            succeed(*TRAIN, "--data", data, "--autoencoder", autoencoder, "--out", run, "--max-steps", 4)
            found.append(losses(run))
        assert len(found[0]) == 4
        np.testing.assert_allclose(found[0], found[1], rtol=tolerance)


@pytest.mark.slow
def test_training_on_small_images_enlarges_them_when_asked(tmp_path):
    """fast-DiT's recipe without a store, on pictures as ImageNet's are: as training on their store."""
    write_pictures(tmp_path / "in", 6, small={3})
    options = [*TRAIN, "--max-steps", 2]
    without = succeed(*options, "--data", tmp_path / "in", "--autoencoder", "pixels", "--out", tmp_path / "without")
    assert "0003.png is too small" in without.stderr and "--enlarge" in without.stderr
    assert "5 samples" in without.stdout
    store = arguments(tmp_path / "in", tmp_path / "store", "pixels", "--enlarge")
    succeed(*store)
    found = []
    for data, more in [(tmp_path / "in", ["--autoencoder", "pixels", "--enlarge"]), (tmp_path / "store", [])]:
        run = tmp_path / f"run-{data.name}"
        result = succeed(*options, "--data", data, "--out", run, *more)
        assert "6 samples: 1.0 steps an epoch, 2.0 epochs in 2 steps" in result.stdout
        found.append(losses(run))
    assert len(found[0]) == 2 and found[0] == found[1]
