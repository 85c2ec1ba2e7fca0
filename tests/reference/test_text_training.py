"""Text to image from captioned pictures to prompts: every family that takes captions trains, resumes, divides, validates,
is planned and draws by the same commands."""

import functools
import json
import random
import re
import shutil

import conftest
import numpy as np
import pytest
from browser import parts_of
from conftest import FULL, matrix, succeed
from interruptions import until_interrupted
from PIL import Image
from pictures import captioned_pictures, unequal_caption
from run_files import (assert_no_leftovers, events, kill_after, log_lines, losses, read_plan, saved, validation_losses,
                       weights_of)
from test_text_store import encoder_folder

SIZE, COUNT = 16, 20
UNET = {"block_out_channels": [32, 64], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "norm_num_groups": 8,
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "layers_per_block": 1, "attention_head_dim": 4}
TRANSFORMER = ["--hidden-size", 48, "--num-heads", 3, "--depth", 2, "--patch-size", 2]
FAMILIES = {
    "pixart": ("bert", [*TRANSFORMER, "--objective", "iddpm"]),
    "pixart_diffusers": ("bert", [*TRANSFORMER, "--objective", "epsilon"]),
    "sana": ("bert", [*TRANSFORMER, "--objective", "flow"]),
    "unet2d_condition": ("clip_text", ["--model-config", json.dumps(UNET), "--objective", "v_prediction"]),
}
OPTIONS = ["--image-size", SIZE, "--global-batch", 5, "--micro-batch", 2, "--lr", 1e-3, "--threads", 1, "--ema-decay", 0.9,
           "--log-every", 1, "--peak-tflops", 1, "--seed", 3, "--text-dropout-prob", 0.3]


refusal = functools.partial(conftest.refusal, code=None, lines=lambda text: [text])


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return {family: encoder_folder(family, tmp_path_factory.mktemp(family)) for family in ("bert", "clip_text")}


@pytest.fixture(scope="module")
def store(tmp_path_factory, encoders):
    """Pictures with captions of unequal length, and their features by both encoders."""
    folder = tmp_path_factory.mktemp("data")
    captioned_pictures(folder / "pictures", ({"text": unequal_caption(index)} for index in range(COUNT)),
                       [(SIZE, SIZE)])
    for encoder in encoders.values():
        succeed("extract", "--data", folder / "pictures", "--autoencoder", "pixels", "--image-size", SIZE, "--out", folder / "store",
                "--text-encoder", encoder)
    return folder / "store"


def arguments(store, family, out, steps, *extra):
    encoder, model = FAMILIES[family]
    return ["train", "--data", store, "--text", encoder, "--model", family, *model, *OPTIONS, *extra, "--out", out, "--max-steps", steps]


def train(store, family, out, steps, *extra):
    return succeed(*arguments(store, family, out, steps, *extra))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, store):
    """A run of each family, made when it is first asked for."""
    made = {}

    def run(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "run"
            train(store, family, made[family], 5, "--sample-every", 5, "--num-samples", 3, "--num-sampling-steps", 2)
        return made[family]

    return run


@pytest.mark.parametrize("family", matrix(["pixart", "sana", "unet2d_condition"], ["pixart_diffusers"]))
@pytest.mark.slow
def test_a_stopped_run_goes_on_bitwise(tmp_path, store, runs, family):
    train(store, family, tmp_path / "run", 2)
    train(store, family, tmp_path / "run", 5)
    assert losses(tmp_path / "run") == losses(runs(family))
    assert weights_of(tmp_path / "run", 5) == weights_of(runs(family), 5)


@pytest.mark.parametrize("family", matrix(["pixart_diffusers", "unet2d_condition"], ["pixart", "sana"]))
def test_memory_choices_do_not_change_a_bit(tmp_path, store, runs, family):
    train(store, family, tmp_path / "run", 5, "--recompute", "all")
    assert saved(tmp_path / "run", 5, "model.safetensors") == saved(runs(family), 5, "model.safetensors")


@pytest.mark.parametrize("family, ranks, stage", [("pixart", 2, 3), ("pixart", 3, 1), ("sana", 2, 2), ("unet2d_condition", 2, 3)])
def test_ranks_see_the_same_captions(tmp_path, store, runs, family, ranks, stage):
    train(store, family, tmp_path / "run", 5, "--nproc", ranks, "--zero-stage", stage)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(runs(family)), rtol=5e-6)


def predicted_and_measured(out):
    plan = read_plan(out)
    return plan["predicted"]["peak_bytes"], plan["measured"]["peak_bytes"]


@pytest.mark.parametrize("family", matrix(["pixart", "unet2d_condition"], ["pixart_diffusers", "sana"]))
def test_the_plan_knows_captions(tmp_path, store, family):
    """A batch of the longest captions is rehearsed before the first step, which is what the plan counts."""
    train(store, family, tmp_path / "run", 3, "--memory-budget", "auto")
    predicted, measured = predicted_and_measured(tmp_path / "run")
    assert predicted == pytest.approx(measured, rel=0.03)
    samples = read_plan(tmp_path / "run")["predicted"]["samples"]
    features = store / f"text-{FAMILIES[family][0]}"
    assert samples["text_bytes"] == sum(path.stat().st_size for path in features.glob("*.safetensors"))
    shards = sum(path.stat().st_size for path in store.glob("shard-*.safetensors"))
    assert samples["latent_bytes"] == pytest.approx(shards, rel=0.05), "shards also have labels, names and checksums"
    assert samples["assumed"] == ""


@pytest.fixture(scope="module")
def buckets(tmp_path_factory, encoders):
    """Captioned pictures of three aspect ratios."""
    folder = tmp_path_factory.mktemp("buckets")
    captioned_pictures(folder / "pictures", ({"text": "bird " * (1 + index % 4)} for index in range(26)),
                       [(16, 16), (40, 20), (12, 24)])
    succeed("extract", "--data", folder / "pictures", "--autoencoder", "pixels", "--buckets", "16x16,24x12,12x24", "--image-size", SIZE,
            "--enlarge", "--out", folder / "store", "--text-encoder", encoders["bert"])
    return folder / "store"


@pytest.mark.parametrize("family, extra", matrix([("pixart", ["--model-config", '{"micro_condition": true}'])], [("sana", [])]))
@pytest.mark.slow
def test_buckets(tmp_path, buckets, family, extra):
    train(buckets, family, tmp_path / "whole", 9, *extra, "--memory-budget", "auto", "--validation-data", buckets, "--validate-every", 9)
    train(buckets, family, tmp_path / "parts", 4, *extra)
    train(buckets, family, tmp_path / "parts", 9, *extra)
    assert saved(tmp_path / "parts", 9, "model.safetensors") == saved(tmp_path / "whole", 9, "model.safetensors")
    predicted, measured = predicted_and_measured(tmp_path / "whole")
    assert predicted == pytest.approx(measured, rel=0.03)
    validated = ["--validation-data", buckets, "--validate-every", 9]
    train(buckets, family, tmp_path / "ranks", 9, *extra, "--nproc", 2, "--zero-stage", 3, *validated)
    np.testing.assert_allclose(losses(tmp_path / "ranks"), losses(tmp_path / "whole"), rtol=5e-6)
    found = [validation_losses(tmp_path / run)[0] for run in ("whole", "ranks")]
    assert found[0] == pytest.approx(found[1], rel=5e-6)


@pytest.mark.parametrize("kills, every", [(20, 3), (20, 1)] if FULL else [(3, 2)])
@pytest.mark.slow
def test_kills_on_buckets_change_nothing(tmp_path, buckets, kills, every):
    """With a checkpoint after every step most kills fall into the writing of one."""
    chance = random.Random(kills + every)
    extra = ["--checkpoint-every", every, "--keep-checkpoints", 2]
    out, steps = tmp_path / "run", 0

    def killed(more):
        nonlocal steps
        shutil.rmtree(out, ignore_errors=True)
        steps = 20 * kills * more
        return all(kill_after(arguments(buckets, "pixart", out, steps, *extra), out, chance.randrange(1, 6)) for _ in range(kills))

    until_interrupted(killed)
    train(buckets, "pixart", out, steps, *extra)
    train(buckets, "pixart", tmp_path / "whole", steps)
    assert losses(out) == losses(tmp_path / "whole")
    assert saved(out, steps) == saved(tmp_path / "whole", steps)
    resumed = [line["step"] for line in events(out, "resume")]
    print(f"{kills} kills, a checkpoint every {every} steps, {steps} steps: resumed at {resumed}")
    assert_no_leftovers(out)


def test_validation_needs_captions_of_the_same_encoder(tmp_path, store):
    train(store, "pixart", tmp_path / "run", 2, "--validation-data", store, "--validate-every", 1)
    assert [line for line in log_lines(tmp_path / "run") if "validation_loss" in line or "validation" in line]


def test_hardening_high_2_validation_with_captions_of_other_samples_is_refused(tmp_path, store):
    held_out = shutil.copytree(store, tmp_path / "held-out")
    described = held_out / f"text-{FAMILIES['pixart'][0]}" / "text.json"
    described.write_text(described.read_text().replace(json.loads(described.read_text())["samples_xxh3"], "0" * 16))
    line = refusal(*arguments(store, "pixart", tmp_path / "run", 2, "--validation-data", held_out, "--validate-every", 1))
    assert "has captions of other samples than its features" in line


def test_grids_show_captions_or_prompts(tmp_path, store, runs, encoders):
    assert (runs("pixart") / "samples/step-00000005.png").exists()
    prompts = ["--sample-every", 2, "--num-samples", 2, "--num-sampling-steps", 2, "--sample-prompts", "red, green", "two birds"]
    train(store, "pixart", tmp_path / "run", 2, *prompts)
    assert (tmp_path / "run/samples/step-00000002.png").exists()
    other = encoder_folder("bert", tmp_path / "other", seed=1)
    line = refusal("train", "--data", store, "--text", "bert", "--model", "pixart", *FAMILIES["pixart"][1], *OPTIONS, *prompts,
                   "--text-encoder", other, "--out", tmp_path / "refused", "--max-steps", 2)
    assert "is another text encoder" in line and "--text-encoder" in line


@pytest.mark.slow
def test_evaluation_draws_captions(tmp_path, store):
    """--evaluate-every of a model that takes captions: those of the data, which the protocol counts and hashes."""
    out, real = tmp_path / "run", store.parent / "pictures"
    train(store, "pixart", out, 1, "--evaluate-every", 1, "--evaluate-images", 8, "--evaluate-reference", real,
          "--num-sampling-steps", 2)
    (event,) = events(out, "evaluation")
    assert "fd_random" in event["metrics"] and event["protocol"]["samples"]["label_sampling"] == "prompts in turn"
    assert event["protocol"]["samples"]["prompts"]["count"] == 8
    report = (out / "report.html").read_text()
    assert '"title":"Evaluation"' in report and "samples.prompts.texts" in report
    hashes = []
    for prompt in ("a bird", "a fence"):
        succeed("sample", "--run", out, "--prompt", prompt, "--num-images", 8, "--num-sampling-steps", 2, "--sampler", "ddim",
                "--out", tmp_path / prompt)
        result = succeed("evaluate", tmp_path / prompt, "--reference", real, "--net", "random")
        samples = json.loads(result.stdout)["protocol"]["samples"]
        assert not {"classes", "label_sampling"} & set(samples), "the model takes no labels"
        hashes.append(samples["prompts"])
    assert hashes[0] != hashes[1] and hashes[0]["count"] == 1


@pytest.mark.slow
def test_a_text_run_is_evaluated_on_its_own_captions(tmp_path, store):
    """kiln evaluate RUN draws for the captions that the run holds out, or for --prompts; without its data it names that."""
    data = shutil.copytree(store, tmp_path / "data")
    out, real = tmp_path / "run", store.parent / "pictures"
    train(data, "pixart", out, 2, "--validation-share", 0.4, "--validate-every", 2)
    (validated,) = events(out, "validation")
    captions = [json.loads(line)["text"] for line in (real / "metadata.jsonl").read_text().splitlines()]
    evaluate = ["evaluate", out, "--reference", real, "--net", "random", "--num-sampling-steps", 2, "--sampler", "ddim"]

    def prompts(*options):
        before = set(out.glob("evaluation/*/sampling.json"))
        result = succeed(*evaluate, *options)
        (made,) = set(out.glob("evaluation/*/sampling.json")) - before
        return json.loads(made.read_text())["prompts"], result.stderr

    drawn, said = prompts("--num-pictures", COUNT)
    assert len(drawn) == validated["images"] < COUNT and set(drawn) < set(captions)
    assert f"draws for {len(drawn)} captions that --validation-share 0.4 holds out of {data}" in said
    (tmp_path / "prompts.txt").write_text("red\na green apple\n")
    assert prompts("--prompts", tmp_path / "prompts.txt")[0] == ["red", "a green apple"]
    shutil.rmtree(data)
    line = refusal(*evaluate, "--num-pictures", 4)
    assert "which do not exist any more: give --prompts FILE" in line and len(line.splitlines()) == 1
    assert prompts("--prompt", "red", "--num-pictures", 4)[0] == ["red"]


def pictures(folder):
    return {path.name: np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))}


@pytest.mark.parametrize("family", matrix(["pixart", "sana", "unet2d_condition"], ["pixart_diffusers"]))
@pytest.mark.slow
def test_a_prompt_and_seed_give_one_picture(tmp_path, runs, family):
    def draw(name, *options):
        succeed("sample", "--run", runs(family), "--seed", 4, "--out", tmp_path / name, *options)
        return list(pictures(tmp_path / name).values())

    (tmp_path / "prompts.txt").write_text("red\n\na green apple\r\n")
    few = ["--num-images", 4, "--num-sampling-steps", 3]
    both = draw("both", "--prompt", "red", "--prompt", "a green apple", *few, "--grid")[:4]
    (grid,) = parts_of(tmp_path / "both/grid.html", "pictures")
    assert [caption for _, caption, _ in grid["items"]].count("a green apple") == 2
    alone = draw("alone", "--prompts", tmp_path / "prompts.txt", *few, "--batch", 1)
    assert sorted(pictures(tmp_path / "both"))[:4] == [f"00000{i}-{'a_green_apple' if i % 2 else 'red'}.png" for i in range(4)]
    for one, other in zip(both, alone):
        assert np.abs(one.astype(int) - other).max() <= 1
    twice = draw("twice", *(2 * ["--prompt", "red", "--prompt", "a green apple"]), *few)
    assert all((one == other).all() for one, other in zip(both, twice, strict=True))
    # A model of five steps hardly heeds its prompts: the guidance is strong enough to show them.
    strong = ["--prompt", "red", "--num-images", 1, "--cfg-scale", 300, "--num-sampling-steps", 8]
    assert (draw("strong", *strong)[0] != draw("negative", *strong, "--negative-prompt", "two birds")[0]).any()


def test_a_prompt_is_encoded_once(tmp_path, runs):
    """However often it is given and drawn: the warning counts the texts that the encoder cut."""
    long = 200 * "red "
    result = succeed("sample", "--run", runs("pixart"), "--prompt", long, "--prompt", "red", "--prompt", long, "--num-images", 6,
                     "--num-sampling-steps", 1, "--batch", 1, "--out", tmp_path / "samples")
    assert re.findall(r"warning: (\d+) of \d+ prompts have more than", result.stderr) == ["1"]


@pytest.mark.slow
def test_other_sizes(tmp_path, runs):
    succeed("sample", "--run", runs("pixart"), "--num-sampling-steps", 2, "--prompt", "red", "--num-images", 1, "--height", 24,
            "--width", 12, "--out", tmp_path / "wide")
    assert pictures(tmp_path / "wide")["000000-red.png"].shape == (24, 12, 3)
    shape = ["sample", "--run", runs("pixart"), "--num-sampling-steps", 2, "--prompt", "red", "--num-images", 1, "--aspect-ratio"]
    succeed(*shape, "4:1", "--out", tmp_path / "ratio")
    assert pictures(tmp_path / "ratio")["000000-red.png"].shape == (8, 32, 3)
    assert "such as 16:9" in refusal(*shape, "wide", "--out", tmp_path / "odd")
    assert "leave out --height" in refusal(*shape, "4:1", "--height", 24, "--out", tmp_path / "odd")
    assert "multiple of 2, got 15" in refusal("sample", "--run", runs("pixart"), "--prompt", "red", "--height", 15, "--out",
                                               tmp_path / "odd")


@pytest.mark.slow
def test_bad_input_is_one_line(tmp_path, store, runs):
    arguments = ["--model", "pixart", *FAMILIES["pixart"][1], *OPTIONS, "--out", tmp_path / "run", "--max-steps", 1]
    assert "choose one of bert, clip_text with --text" in refusal("train", "--data", store, *arguments)
    assert "no text store 'bart'" in refusal("train", "--data", store, "--text", "bart", *arguments)
    assert "takes no captions" in refusal("train", "--data", store, "--text", "bert", "--model", "DiT-S/2", *OPTIONS, "--out", tmp_path / "run")
    bare = tmp_path / "bare"
    shutil.copytree(store, bare, ignore=shutil.ignore_patterns("text-*"))
    line = refusal("train", "--data", bare, *arguments)
    assert "takes captions" in line and "kiln extract" in line and "--text-encoder" in line
    assert not (tmp_path / "run").exists()
    line = refusal("train", "--data", bare, "--model", "dit", *TRANSFORMER, *OPTIONS, "--out", runs("pixart"), "--max-steps", 9)
    assert "holds a run of pixart, not of dit" in line, "the folder of another run is named as that"
    padded = ["--model", "unet2d_condition", *FAMILIES["unet2d_condition"][1], *OPTIONS, "--out", tmp_path / "run"]
    assert "attends to padding" in refusal("train", "--data", store, "--text", "bert", *padded)

    sample = ["sample", "--run", runs("pixart"), "--out", tmp_path / "samples"]
    assert "give --prompt" in refusal(*sample)
    assert "has no classes" in refusal(*sample, "--prompt", "red", "--classes", "1")
    (tmp_path / "broken.txt").write_bytes(b"red\ngr\xffn\n")
    assert "broken.txt, line 2" in refusal(*sample, "--prompts", tmp_path / "broken.txt")
    (tmp_path / "empty.txt").write_text("\n")
    assert "has no prompts" in refusal(*sample, "--prompts", tmp_path / "empty.txt")
    assert not (tmp_path / "samples").exists()
