"""Progressive data: runs of several stages, stores that grow, runs that go on with other data and another rate."""

import functools
import json
import random
import shutil
from pathlib import Path

import conftest
import numpy as np
import pytest
from conftest import FULL, REPOSITORY, program, read_json, succeed, without_warnings
from interruptions import killed_once, until_interrupted
from pictures import noise_picture, unequal_caption
from run_files import checkpoint, events, kill_after, num_steps, read_config, saved, step_lines
from test_text_store import encoder_folder

SIZE = 16
MODEL = ["--model", "dit", "--hidden-size", 32, "--depth", 2, "--num-heads", 2, "--patch-size", 4, "--objective", "flow"]
OPTIONS = ["--global-batch", 5, "--threads", 1, "--ema-decay", 0.9, "--log-every", 1, "--peak-tflops", 1, "--seed", 3,
           "--checkpoint-every", 7, "--no-tensorboard", "--no-preflight"]


refusal = functools.partial(conftest.refusal, code=None, lines=without_warnings)


def write_pictures(folder, first, count, size=SIZE):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(first)
    for index in range(first, first + count):
        noise_picture(rng, size, size).save(folder / f"{index:04}.png")


def extract(data, out, *more, size=SIZE):
    return succeed("extract", "--data", data, "--autoencoder", "pixels", "--image-size", size, "--out", out, *more)


def recipe(path, *stages, **options):
    """Writes a recipe; each stage is a dict."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    for stage in stages:
        lines += ["", "[[stage]]", *(f"{key} = {json.dumps(value)}" for key, value in stage.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def command(out, *extra):
    return ["train", *MODEL, *OPTIONS, *extra, "--out", out]


def losses(out, killed=False):
    return [(line["step"], line["loss"], line["lr"]) for line in step_lines(out, killed)]


def remove_checkpoints_after(out, step):
    for folder in (out / "checkpoints").iterdir():
        if folder.name > f"step-{step:08}":
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """20 pictures, 12 others, and a third of another size."""
    folder = tmp_path_factory.mktemp("stores")
    write_pictures(folder / "pictures-a", 0, 20)
    write_pictures(folder / "pictures-b", 100, 12)
    write_pictures(folder / "pictures-large", 200, 10, size=2 * SIZE)
    extract(folder / "pictures-a", folder / "a")
    extract(folder / "pictures-b", folder / "b")
    extract(folder / "pictures-large", folder / "large", size=2 * SIZE)
    return folder


@pytest.fixture(scope="module")
def two_stages(stores, tmp_path_factory):
    """20 pictures for 4 epochs, then both stores, the second one twice as often, for one pass at another rate."""
    folder = tmp_path_factory.mktemp("two")
    path = recipe(folder / "recipe.toml",
                  {"name": "small", "data": str(stores / "a"), "epochs": 4},
                  {"name": "more", "data": [str(stores / "a"), str(stores / "b")], "data-weights": [1, 2], "epochs": 1,
                   "lr": 5e-4, "lr-schedule": "cosine"}, lr=1e-3)
    result = succeed(*command(folder / "run", "--recipe", path))
    return path, folder / "run", result.stdout


FIRST, SECOND = 16, 9  # steps: 4 * 20 / 5; (20 + 2 * 12) / 5


def test_the_first_stage_is_the_run_of_one_stage(two_stages, stores, tmp_path):
    _, out, stdout = two_stages
    succeed(*command(tmp_path / "one", "--data", stores / "a", "--lr", 1e-3, "--epochs", 4))
    assert saved(out, FIRST) == saved(tmp_path / "one", FIRST)
    assert losses(out)[:FIRST] == losses(tmp_path / "one")
    assert "stage 1 (small) is done after step 16" in stdout and "finished after step 25" in stdout
    assert not events(out, "resume")
    assert [(e["step"], e["stage"], e["steps"], e["samples"]) for e in events(out, "stage")] == [
        (1, 1, FIRST, 20), (FIRST + 1, 2, SECOND, 44)]


def test_a_run_without_stages_knows_nothing_of_them(stores, tmp_path):
    succeed(*command(tmp_path / "one", "--data", stores / "a", "--lr", 1e-3, "--max-steps", 4))
    config = json.loads((tmp_path / "one/checkpoints/step-00000004/train_state.json").read_text())["config"]
    assert set(config) == {"options", "data", "record"}
    assert not {"first_step", "earlier"} & set(config["record"]["trained_on"])
    assert "[[stage]]" not in (tmp_path / "one/config.toml").read_text()
    assert not events(tmp_path / "one", "stage")


def test_each_stage_has_its_rate(two_stages):
    _, out, _ = two_stages
    rates = [lr for _, _, lr in losses(out)]
    assert rates[:FIRST] == [1e-3] * FIRST
    expected = 5e-4 * (1 + np.cos(np.pi * np.arange(SECOND) / SECOND)) / 2
    np.testing.assert_allclose(rates[FIRST:], expected, rtol=1e-12)


def test_losses_are_told_apart_by_source(two_stages, stores):
    _, out, _ = two_stages
    lines = step_lines(out)
    assert all("loss_by_source" not in line for line in lines[:FIRST])
    named = {name for line in lines[FIRST:] for name in line["loss_by_source"]}
    assert named == {str(stores / "a"), str(stores / "b")}
    report = (out / "report.html").read_text()
    for text in ("Loss by stage", "Loss by source", "stage 1 (small)", "stage 2 (more)"):
        assert text in report


@pytest.mark.parametrize("kills, every", [(30, 3), (10, 1)] if FULL else [(4, 3)])
@pytest.mark.slow
def test_kills_across_boundaries_change_nothing(two_stages, tmp_path, kills, every):
    """Every other kill that is near enough hits the step between the stages. A run that ends before its next kill is compared and
    begun afresh."""
    path, whole, _ = two_stages
    out = tmp_path / "run"
    arguments = command(out, "--recipe", path, "--checkpoint-every", every)
    chance = random.Random(kills)
    last_steps = []  # that were logged before the kills

    def assert_whole():
        assert saved(out, FIRST + SECOND) == saved(whole, FIRST + SECOND)
        assert losses(out) == losses(whole)
        assert [e["step"] for e in events(out, "stage")] == [1, FIRST + 1]

    def killed(_):
        shutil.rmtree(out, ignore_errors=True)
        last_steps.clear()
        ended = 0
        while len(last_steps) < kills and ended < kills:
            to_boundary = FIRST - num_steps(out)
            lines = to_boundary if len(last_steps) % 2 == 0 and 0 < to_boundary < 8 else chance.randrange(1, 8)
            if kill_after(arguments, out, lines):
                last_steps.append(losses(out, killed=True)[-1][0])
            else:
                ended += 1
                assert_whole()
                shutil.rmtree(out)
        return len(last_steps) == kills

    until_interrupted(killed)
    succeed(*arguments)
    assert_whole()
    print(f"{kills} kills, a checkpoint every {every} steps, stages of {FIRST} and {SECOND} steps; "
          f"killed after step {last_steps}")


def test_recomputing_changes_nothing(two_stages, tmp_path):
    path, whole, _ = two_stages
    succeed(*command(tmp_path / "run", "--recipe", path, "--recompute", "all"))
    assert saved(tmp_path / "run", FIRST + SECOND) == saved(whole, FIRST + SECOND)


def test_ranks_go_through_the_same_stages(two_stages, tmp_path):
    path, whole, _ = two_stages
    succeed(*command(tmp_path / "run", "--recipe", path, "--nproc", 2, "--zero-stage", 2))
    np.testing.assert_allclose([l for _, l, _ in losses(tmp_path / "run")], [l for _, l, _ in losses(whole)], rtol=5e-6)


def test_a_stop_between_the_stages_resumes(two_stages, tmp_path):
    """A checkpoint of the first stage's end is where the second begins."""
    path, whole, _ = two_stages
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    remove_checkpoints_after(out, FIRST)
    succeed(*command(out, "--recipe", path))
    assert saved(out, FIRST + SECOND) == saved(whole, FIRST + SECOND)
    assert losses(out) == losses(whole)


def test_the_run_folder_holds_its_recipe(two_stages):
    _, out, _ = two_stages
    result = succeed("train", "--recipe", out / "config.toml")
    assert "finished after step 25" in result.stdout


def damage(checkpoint):
    path = checkpoint / "ema.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(content)


def test_damaged_checkpoints_lead_back_to_a_stage_that_is_fitted_then(stores, tmp_path):
    """The stage before that of the newest checkpoint was done: its micro-batch is chosen only now."""
    path = recipe(tmp_path / "recipe.toml", {"data": str(stores / "a"), "steps": 4}, {"data": str(stores / "b"), "steps": 4})
    out = tmp_path / "run"
    arguments = command(out, "--recipe", path, "--checkpoint-every", 2, "--memory-budget", "2G", "--micro-batch", -1)
    succeed(*arguments)
    whole = saved(out, 8)
    for step in (4, 6, 8):
        damage(checkpoint(out, step))
    result = succeed(*arguments)
    assert result.stderr.count("passed over, it is damaged") == 3
    assert saved(out, 8) == whole


@pytest.mark.slow
def test_what_slows_the_machine_is_said_once(stores, tmp_path, monkeypatch):
    """Beside a profile of a much faster moment there is always something to say."""
    monkeypatch.setenv("KILN_PROFILES", str(tmp_path / "profiles"))
    succeed("plan", "--model", "DiT-S/8", "--global-batch", 8, "--device", "cpu", "--gpu", "cpu", "--calibrate", "--calibrate-seconds", 3)
    (profile,) = (tmp_path / "profiles").glob("*.json")
    profile.write_text(json.dumps(json.loads(profile.read_text()) | {"clock": [1e-9, 1e-9]}))
    path = recipe(tmp_path / "recipe.toml", {"data": str(stores / "a"), "steps": 1}, {"data": str(stores / "b"), "steps": 1})
    said = succeed(*command(tmp_path / "run", "--recipe", path, "--memory-budget", "2G", "--threads", 0, "--device", "cpu")).stdout
    assert said.count("this machine: ") == 1 and said.count("memory budget 2.00 GiB") == 2, said


def test_a_stage_that_is_done_needs_none_of_its_stores(stores, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(stores / name, tmp_path / name)
    path = recipe(tmp_path / "recipe.toml", {"data": [str(tmp_path / "a"), str(tmp_path / "b")], "steps": 4},
                  {"data": str(tmp_path / "a"), "steps": 4})
    out = tmp_path / "run"
    arguments = command(out, "--recipe", path, "--checkpoint-every", 6)
    succeed(*arguments)
    whole = saved(out, 8)
    shutil.rmtree(out / "checkpoints/step-00000008")
    shutil.rmtree(tmp_path / "b")
    succeed(*arguments)
    assert saved(out, 8) == whole


# --- what lies ahead may change


def test_an_edited_recipe_may_add_stages_and_says_so(two_stages, stores, tmp_path):
    path, whole, _ = two_stages
    first = {"name": "small", "data": str(stores / "a"), "epochs": 4}
    one = recipe(tmp_path / "one.toml", first, lr=1e-3)
    out = tmp_path / "run"
    succeed(*command(out, "--recipe", one))
    result = succeed(*command(out, "--recipe", path))
    assert "stage 2 (more) follows: " in result.stdout
    assert saved(out, FIRST + SECOND) == saved(whole, FIRST + SECOND)
    (change,) = events(out, "changes")
    assert change["step"] == FIRST + 1 and "stage 2 (more) follows" in change["changes"][0]


def test_what_is_done_cannot_change(two_stages, stores, tmp_path):
    path, whole, _ = two_stages
    second = {"name": "more", "data": str(stores / "b"), "steps": 9}
    for change, said in [({"lr": 2e-3}, "stage 1 (small) of"), ({"epochs": 5}, "what is done cannot change"),
                         ({"data": str(stores / "b")}, "what is done cannot change")]:
        first = {"name": "small", "data": str(stores / "a"), "epochs": 4} | change
        edited = recipe(tmp_path / "edited.toml", first, second, lr=1e-3)
        assert said in refusal(*command(whole, "--recipe", edited))
    assert "give --recipe" in refusal(*command(whole, "--data", stores / "a", "--lr", 1e-3, "--epochs", 4))


def test_going_on_with_other_data_and_another_rate(stores, tmp_path):
    """The run stands at step 7 of 16; what follows is a stage of the other store. Killed at once, the same command goes on."""
    out, data = tmp_path / "run", ["--data", stores / "a", "--lr", 1e-3]
    succeed(*command(out, *data, "--max-steps", 7))
    more = recipe(tmp_path / "more.toml", data=str(stores / "b"), lr=1e-4, steps=5)
    result = succeed("train", "--out", out, "--continue-with", more)
    assert "stage 2 follows" in result.stdout and "finished after step 12" in result.stdout
    assert [lr for _, _, lr in losses(out)] == [1e-3] * 7 + [1e-4] * 5
    again = succeed("train", "--out", out, "--continue-with", more)
    assert "finished after step 12" in again.stdout and len(losses(out)) == 12
    third = recipe(tmp_path / "third.toml", {"steps": 2, "lr": 1e-5}, {"steps": 1})
    succeed("train", "--out", out, "--continue-with", third)
    assert [lr for _, _, lr in losses(out)][12:] == [1e-5] * 2 + [1e-4]
    assert [e["step"] for e in events(out, "stage")] == [8, 13, 15]


def test_stages_ahead_follow_each_other_without_a_checkpoint_at_the_end(stores, tmp_path):
    """Each stage but the last is saved, since the next one begins with it."""
    out = tmp_path / "run"
    succeed(*command(out, "--data", stores / "a", "--lr", 1e-3, "--max-steps", 7))
    more = recipe(tmp_path / "more.toml", {"steps": 2, "lr": 1e-4}, {"steps": 1, "lr": 1e-5})
    result = succeed("train", "--out", out, "--continue-with", more, "--no-checkpoint", timeout=300)
    assert "finished after step 10" in result.stdout
    assert [lr for _, _, lr in losses(out)] == [1e-3] * 7 + [1e-4] * 2 + [1e-5]
    assert sorted(folder.name for folder in (out / "checkpoints").iterdir()) == ["step-00000007", "step-00000009"]


def test_going_on_ends_the_stage_under_way(two_stages, stores, tmp_path):
    path, whole, _ = two_stages
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    remove_checkpoints_after(out, 7)
    more = recipe(tmp_path / "more.toml", {"steps": 3, "data": str(stores / "b")})
    result = succeed("train", "--out", out, "--continue-with", more)
    assert "stage 1 (small) ends here, at step 7 of 16" in result.stdout
    assert "finished after step 10" in result.stdout
    assert saved(out, 7) == saved(whole, 7)
    assert "which is not given" in refusal("train", "--continue-with", more)
    assert "has no config.toml" in refusal("train", "--out", tmp_path / "absent", "--continue-with", more)


def test_going_on_needs_minutes(stores, tmp_path):
    out, more = tmp_path / "run", recipe(tmp_path / "more.toml", steps=5)
    succeed(*command(out, "--data", stores / "a", "--lr", 1e-3, "--max-minutes", 0.005))
    done = losses(out)[-1][0]
    assert "--max-minutes 0.005 is used up" in refusal("train", "--out", out, "--continue-with", more)
    result = succeed("train", "--out", out, "--continue-with", more, "--max-minutes", 0)
    assert f"finished after step {done + 5} " in result.stdout


# --- stores that grow


@pytest.mark.slow
def test_a_store_grows_and_a_run_keeps_what_it_had(stores, tmp_path):
    write_pictures(tmp_path / "pictures", 0, 20)
    store = tmp_path / "store"
    extract(tmp_path / "pictures", store)
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    out = tmp_path / "run"
    whole = ["--data", store, "--lr", 1e-3]
    succeed(*command(tmp_path / "whole", *whole, "--epochs", 4))
    succeed(*command(out, *whole, "--max-steps", 6))

    write_pictures(tmp_path / "pictures", 50, 7)
    result = extract(tmp_path / "pictures", store, "--append")
    assert "7 samples" in result.stdout
    assert all((store / name).read_bytes() == content for name, content in before.items())
    assert "has all pictures" in extract(tmp_path / "pictures", store, "--append").stdout
    assert "27 samples in 2 parts" in succeed("store", "inspect", store).stdout
    succeed("store", "verify", store)

    result = succeed(*command(out, *whole, "--epochs", 4))
    assert "goes on with the 20 samples that it began with; its data have grown to 27" in result.stdout
    assert saved(out, FIRST) == saved(tmp_path / "whole", FIRST)
    assert losses(out) == losses(tmp_path / "whole")

    grown = succeed(*command(tmp_path / "grown", *whole, "--epochs", 1))
    assert "finished after step 6 " in grown.stdout  # 27 / 5
    plan = read_json("plan", *MODEL, "--data", store, "--global-batch", 9, "--epochs", 2, "--gpu", "cpu")
    assert plan["predicted"]["steps"] == 6


def test_an_interrupted_append_leaves_the_store_and_goes_on(stores, tmp_path):
    write_pictures(tmp_path / "pictures", 0, 4)
    store = tmp_path / "store"
    extract(tmp_path / "pictures", store)
    write_pictures(tmp_path / "pictures", 10, 300)
    arguments = [program("kiln"), "extract", "--data", tmp_path / "pictures", "--autoencoder", "pixels", "--image-size", SIZE,
                 "--out", store, "--append", "--shard-size", 50]
    part = store / "appended-00001"
    has_begun = (part / "shard-00001.safetensors").exists

    def killed(_):
        shutil.rmtree(part, ignore_errors=True)
        return killed_once(has_begun, arguments) and has_begun()

    until_interrupted(killed)
    if not json.loads((part / "store.json").read_text())["complete"]:
        succeed(*command(tmp_path / "run", "--data", store, "--max-steps", 1))  # as if nothing had begun
    extract(tmp_path / "pictures", store, "--append", "--shard-size", 50)
    assert json.loads((part / "store.json").read_text())["num_samples"] == 300


@pytest.mark.slow
def test_the_way_of_the_guide(tmp_path):
    """So many pictures for 4 epochs, a look, half as many more, 5 epochs at another rate. In full with Openclipart."""
    pictures, count = tmp_path / "pictures", 40
    write_pictures(pictures, 0, count)
    store, out = tmp_path / "store", tmp_path / "run"
    extract(pictures, store)
    result = succeed(*command(out, "--data", store, "--lr", 1e-3, "--epochs", 4, "--sample-every", 16, "--num-samples", 2,
                              "--num-sampling-steps", 2))
    assert "finished after step 32" in result.stdout
    assert list((out / "samples").glob("*.png"))  # the look
    write_pictures(pictures, 1000, count // 2)
    extract(pictures, store, "--append")
    more = recipe(tmp_path / "more.toml", epochs=5, lr=2e-4)
    result = succeed("train", "--out", out, "--continue-with", more)
    assert "finished after step 92" in result.stdout  # 32 + 5 * 60 / 5
    assert events(out, "stage")[-1]["samples"] == 60


CLIPART = "/usr/share/openclipart/png"


@pytest.mark.skipif(not FULL, reason="only with --full")
def test_the_way_of_the_guide_with_openclipart(tmp_path):
    found = sorted(Path(CLIPART).rglob("*.png"))
    if len(found) < 6000:
        pytest.skip("Debian's openclipart-png is not installed")
    pictures, store, out = tmp_path / "pictures", tmp_path / "store", tmp_path / "run"
    pictures.mkdir()
    for index, path in enumerate(found[:4000]):
        shutil.copy(path, pictures / f"{index:05}.png")
    extract(pictures, store, "--enlarge")
    batch = ["--global-batch", 50, "--checkpoint-every", 100]
    succeed(*command(out, "--data", store, "--lr", 1e-3, "--epochs", 4, *batch))
    for index, path in enumerate(found[4000:6000]):
        shutil.copy(path, pictures / f"{4000 + index:05}.png")
    extract(pictures, store, "--append", "--enlarge")
    succeed("train", "--out", out, "--continue-with", recipe(tmp_path / "more.toml", epochs=8, lr=2e-4))
    assert losses(out)[-1][0] >= 1000
    assert np.mean([l for _, l, _ in losses(out)[-50:]]) < np.mean([l for _, l, _ in losses(out)[:50]])


# --- plans


def test_a_plan_of_stages_has_the_worst_memory_and_the_sum_of_times(two_stages):
    path, _, _ = two_stages
    plan = read_json("plan", *MODEL, "--global-batch", 5, "--recipe", path, "--gpu", "RTX-4090")
    assert plan["steps"] == FIRST + SECOND
    alone = [stage["predicted"] for stage in plan["stages"]]
    assert [stage["steps"] for stage in alone] == [FIRST, SECOND]
    assert plan["needed_bytes"] == max(stage["needed_bytes"] for stage in alone)
    assert plan["days"] == pytest.approx(sum(stage["days"] for stage in alone))
    alone = ["plan", *MODEL, "--global-batch", 5, "--recipe", path, "--gpu", "RTX-4090"]
    assert "--steps has no effect on a recipe of 2 stages" in refusal(*alone, "--steps", 5)
    text = succeed(*alone).stdout
    assert "stage 1 (small)" in text and "all 2 stages: 25 steps" in text


# --- bad input, one line each


@pytest.mark.slow
def test_bad_stages_are_refused_before_anything_is_trained(stores, tmp_path):
    first = {"data": str(stores / "a"), "steps": 2}

    def refused(*stages, **options):
        path = recipe(tmp_path / "bad.toml", *stages, **options)
        return refusal(*command(tmp_path / "run", "--recipe", path))

    assert "stage 2" in (line := refused(first, {"data": str(stores / "absent"), "steps": 2})) and "does not exist" in line
    assert "has epochs 1 and steps 2: give one" in refused({"epochs": 1, "steps": 2})
    assert "stage 2 has no end" in refused(first, {"data": str(stores / "a")})
    assert "cannot change its size" in (line := refused(first, {"data": str(stores / "large"), "steps": 2})) and "stage 2" in line
    assert "a stage cannot set 'hidden-size'" in refused(first | {"hidden-size": 64})
    assert "did you mean 'epochs'" in refused(first | {"epoch": 2})
    assert "--max-steps has no effect on a run of 1 stages" in refused(first, **{"max-steps": 5})
    assert "unknown table [[stages]]" in refusal(
        *command(tmp_path / "run", "--recipe", write(tmp_path / "x.toml", "[[stages]]\nsteps = 1\n")))
    assert "give one" in refusal(*command(tmp_path / "run", "--data", stores / "a", "--epochs", 2, "--max-steps", 3))
    assert "synthetic data are endless" in refused({"data": "synthetic", "epochs": 2}, **{"image-size": 16})
    assert "--data-weights expects 2 numbers" in refused(
        {"data": [str(stores / "a"), str(stores / "b")], "data-weights": [1], "steps": 2})
    assert not (tmp_path / "run").exists()


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.slow
def test_stores_that_do_not_fit_are_refused(stores, tmp_path):
    from diffusers import AutoencoderKL

    AutoencoderKL(block_out_channels=(32,), down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
                  latent_channels=3, norm_num_groups=32).save_pretrained(tmp_path / "vae")
    store = tmp_path / "store"
    write_pictures(tmp_path / "pictures", 0, 6)
    append = ["extract", "--data", tmp_path / "pictures", "--image-size", SIZE, "--out", store, "--append", "--autoencoder"]
    assert "is none: leave --append out" in refusal(*append, "pixels")
    extract(tmp_path / "pictures", store)
    write_pictures(tmp_path / "pictures", 10, 4)
    assert "of the autoencoder" in refusal(*append, tmp_path / "vae")
    assert not list(store.glob("appended*"))
    write_pictures(tmp_path / "elsewhere", 0, 3)
    append[2] = tmp_path / "elsewhere"
    assert "has the name of a sample" in refusal(*append, "pixels")
    run = command(tmp_path / "run", "--data", store, "--max-steps", 2)
    assert "pictures of size 32" in refusal(*run, "--more-data", stores / "large")
    assert "is not a feature store" in refusal(*run, "--more-data", tmp_path / "pictures")


# --- captions and sizes


@pytest.fixture(scope="module")
def captioned(tmp_path_factory):
    """A folder of captioned pictures that gets more of them, at two sizes, and two text encoders."""
    folder = tmp_path_factory.mktemp("captioned")
    for name, seed in (("bert", 0), ("other", 1)):
        encoder_folder("bert", folder / name, seed)
    return folder


def caption_pictures(folder, first, count):
    write_pictures(folder, first, count, size=2 * SIZE)
    with open(folder / "metadata.jsonl", "a") as file:
        for index in range(first, first + count):
            file.write(json.dumps({"file_name": f"{index:04}.png", "text": unequal_caption(index)}) + "\n")


@pytest.mark.slow
def test_captions_grow_with_their_store_and_stages_change_size(captioned, tmp_path):
    pictures, small, large = tmp_path / "pictures", tmp_path / "small", tmp_path / "large"
    caption_pictures(pictures, 0, 10)
    encoder = ["--text-encoder", captioned / "bert"]
    extract(pictures, small, *encoder)
    extract(pictures, large, *encoder, size=2 * SIZE)
    caption_pictures(pictures, 10, 6)
    assert "text-bert yet: run kiln extract --append" in extract(pictures, small, "--append").stdout
    append = ["extract", "--data", pictures, "--out", small, "--append", "--text-encoder"]
    model = ["--model", "pixart", "--hidden-size", 48, "--num-heads", 3, "--depth", 2, "--patch-size", 2, "--objective", "iddpm"]
    train = ["train", *model, *OPTIONS, "--out", tmp_path / "run"]
    assert "appended-00001 has none" in refusal(*train, "--data", small, "--max-steps", 1)
    assert "by another encoder" in refusal(*append, captioned / "other")
    succeed(*append, captioned / "bert")

    path = recipe(tmp_path / "recipe.toml", {"data": str(small), "epochs": 1},
                  {"data": str(large), "epochs": 1, "position-scale": 2, "micro-batch": 2})
    result = succeed(*train, "--recipe", path)
    assert "finished after step 6 " in result.stdout  # 16 / 5 and 10 / 5
    config = read_config(tmp_path / "run")
    assert config["image_size"] == 2 * SIZE and config["model_config"]["pe_interpolation"] == 2
    shutil.rmtree(large / "text-bert")
    succeed("extract", "--data", pictures, "--out", large, "--text-encoder", captioned / "other", "--text-name", "bert")
    shutil.rmtree(tmp_path / "run")
    assert "by another encoder" in (line := refusal(*train, "--recipe", path)) and "stage 2" in line


def test_many_pictures_first_the_best_last(stores, tmp_path):
    """docs/progressive.md's recipe, on tiny stores: the second stage sees the best alone, at its own rate."""
    page = (REPOSITORY / "docs/progressive.md").read_text()
    text = page[page.index("# recipe.toml"):]
    text = text[:text.index("```")].replace('model = "Sana-600M-512"\n', "").replace("image-size = 512", f"image-size = {SIZE}")
    for name, store in (("low", "a"), ("high", "b")):
        text = text.replace(f'"{name}"', json.dumps(str(stores / store)))
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    result = succeed(*command(tmp_path / "run", "--recipe", path))
    first, second = 10 * (20 + 12) // 5, -(-3 * 12 // 5)
    stages = events(tmp_path / "run", "stage")
    assert [(e["stage"], e["steps"], e["samples"]) for e in stages] == [(1, first, 32), (2, second, 12)], result.stdout
    rates = [lr for _, _, lr in losses(tmp_path / "run")]
    assert set(rates[:first]) == {5e-5} and set(rates[first:]) == {1e-5}
