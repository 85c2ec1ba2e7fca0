"""report.html in a real browser: its plots are drawn and nothing is complained about."""

import json
import re
import shutil

import numpy as np
import pytest
from browser import Browser, check_report, read_data
from conftest import succeed
from PIL import Image, PngImagePlugin
from pictures import noise_picture
from run_files import read_config
from test_text_store import encoder_folder

OPTIONS = ["--model", "dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 4, "--num-classes", 4,
           "--data", "synthetic", "--autoencoder", "pixels", "--image-size", 16, "--global-batch", 8, "--objective", "flow",
           "--log-every", 2, "--sample-every", 6, "--num-samples", 4, "--num-sampling-steps", 3, "--peak-tflops", 1,
           "--device", "cpu", "--max-steps", 12]
PLOTS = ["Loss", "Loss by timestep", "Throughput, images/s", "Memory, GB", "Time of a step, ms", "Waiting for data",
         "Batches ready", "Learning rate", "Gradient norm", "Memory over a step, MB"]


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "run"
    succeed("train", *OPTIONS, "--out", out)
    return out


@pytest.fixture(scope="module")
def page(run, browser):
    return browser.open(run / "report.html")


@pytest.mark.slow
def test_every_plot_is_in_the_page(page):
    check_report(page, plots=PLOTS, pictures=[(38, 38)] * 2)
    assert len(page.plots) == len(PLOTS)
    memory = next(plot for plot in page.plots if plot["title"].startswith("Memory over a step"))
    for kind in ("master", "moments", "activations", "measured"):
        assert kind in memory["legend"], kind
    assert page.evaluate("document.querySelectorAll('polygon').length") > 4, "memory is stacked by kind"


def test_the_page_is_painted(run, page):
    picture = run.parent / "report.png"
    page.screenshot(picture)
    colors = Image.open(picture).convert("RGB").getcolors(maxcolors=1 << 24)
    shown = {color for count, color in colors if count > 200}
    assert (0x0e, 0xa5, 0xe9) in shown, "the backward part of the step's time"
    assert len(shown) > 8


def test_the_page_fits_a_phone(run, browser):
    """Nothing is wider than 360 pixels, and so nothing has to be pushed aside to be read."""
    assert browser.open(run / "report.html", width=360, height=800).width <= 360


@pytest.mark.parametrize("body, fault", [
    ("<script>console.error('bad')</script>", "bad"),
    ("<script>nothing.at.all</script>", "nothing is not defined"),
    ("<figure><img src='lost.png'></figure>", "not loaded: Image"),
    ("<figure><img src='data:image/png;base64,AAAA'></figure>", "a picture does not load"),
    ("<p>it took nan seconds</p>", "no values"),
    ("<div class='rows'><div><span>model</span><b>null</b></div></div>", "no values"),
    ("<div class='rows'><div><span>model</span><b></b></div></div>", "a row without a name or value"),
    ("<div class='rows'><div><span>&lt;div</span><b>1</b></div></div>", "markup as a name"),
    ("<table><tr><th>run</th><th>loss</th></tr><tr><td>a</td></tr></table>", "cells are missing"),
    ("<table><tr><th>run</th><th>loss</th></tr><tr><td>a</td><td>-</td></tr></table>", "no loss in"),
    ("<svg><text class='title'>Loss</text><polyline points=''/></svg>", "a plot without a curve"),
    ("<svg><text class='title'>Loss</text><text class='tick'>1</text><circle cx='1' cy='2'/></svg>", "a plot without a scale"),
    ("<svg><text class='title'>Loss</text><polyline points='1,2'/></svg>", "a plot without a curve"),
])
def test_what_is_wrong_with_a_page_is_found(body, fault, browser, tmp_path):
    (tmp_path / "page.html").write_text(f"<!DOCTYPE html><html><body>{body}</body></html>")
    with pytest.raises(AssertionError, match=re.escape(fault)):
        check_report(browser.open(tmp_path / "page.html"))


def test_a_whole_page_passes(browser, tmp_path):
    (tmp_path / "page.html").write_text("""<!DOCTYPE html><html><body><h2>Settings</h2><p>nullable, infinite, run/null</p>
<div class='rows'><div><span>model</span><b>dit</b></div></div><table><tr><th>run</th><th>loss</th></tr><tr><td>a</td><td>0.1</td>
</tr></table></body></html>""")
    page = browser.open(tmp_path / "page.html")
    check_report(page, headings=["Settings"], rows={"model": "d.t"}, tables=[(["run", "loss"], 1)], pictures=[])
    for asked in ({"headings": ["Events"]}, {"rows": ["lr"]}, {"rows": {"model": "unet"}}, {"plots": ["Loss"]}, {"tables": [(["mfu"], 1)]},
                  {"tables": [(["run"], 2)]}, {"pictures": [(8, 8)]}, {"cards": ["steps"]}):
        with pytest.raises(AssertionError):
            check_report(page, **asked)


def test_axes_have_round_numbers(page):
    for low, high, count, ticks in ((0, 10, 5, [0, 2, 4, 6, 8, 10]), (130, 480, 4, [200, 300, 400]), (-1, 4, 4, [0, 2, 4])):
        assert page.evaluate(f"nice_ticks({low}, {high}, {count})") == pytest.approx(ticks)
    assert page.evaluate("log_ticks(0.09, 3)") == pytest.approx([0.1, 0.2, 0.5, 1, 2])
    assert page.evaluate("log_ticks(0.009, 30)") == pytest.approx([0.01, 0.1, 1, 10]), "a wide axis has powers of ten alone"
    assert page.evaluate("log_ticks(0.71, 0.79)") == pytest.approx([0.72, 0.74, 0.76, 0.78]), "one tick does not show how an axis is spaced"
    shown = {0: "0", 1e-13: "0", 0.00125: "0.00125", 250: "250", 12000: "12k", 3500000: "3.5M", -20000: "-20k"}
    assert page.evaluate(f"{list(shown)}.map(tick_text)") == list(shown.values())


def test_a_page_is_drawn_anew_from_newer_data(run, browser):
    page = browser.open(run / "report.html")
    data = read_data(run / "report.html")
    page.evaluate(f"draw({json.dumps({'title': 'newer', 'sections': [data['sections'][0]] * 2})})")
    found = page.evaluate("[document.title, document.querySelectorAll('h1').length, document.querySelectorAll('svg').length]")
    assert found == ["newer", 1, 2 * sum(part["kind"] == "plot" for part in data["sections"][0]["parts"])]


def test_a_page_can_be_heard(page):
    """Heads of rows and columns say so, plots and pictures have a name."""
    count = "(selector => document.querySelectorAll(selector).length)"
    assert page.evaluate(f"{count}('thead th[scope=col]')") == page.evaluate(f"{count}('thead th')") > 0
    assert page.evaluate(f"{count}('tbody tr > :first-child[scope=row]')") == page.evaluate(f"{count}('tbody tr')") > 0
    names = page.evaluate("[...document.querySelectorAll('svg')].map(svg => svg.getAttribute('role') + ' ' + svg.querySelector('title').textContent)")
    assert len(names) == len(PLOTS) and names[0] == "img Loss, logged, smoothed"
    assert page.evaluate("[...document.querySelectorAll('img')].every(img => img.alt)")


def test_without_scripts_the_page_says_what_to_do(run, browser):
    page = browser.open(run / "report.html", scripts=False)
    assert "Allow JavaScript" in page.text and '"kind":"plot"' in page.text and not page.plots and not page.errors


# Whatever comes from outside may be made by somebody else: the name of a model, a prompt, an event, a folder.
HOSTILE = "</script><img src=x onerror='ran=1'><!--<script>ran=1</script>&lt;b&gt;\u202egnp\x1b[2J"


def test_nothing_hostile_runs_and_all_of_it_is_text(run, browser, tmp_path):
    hostile = shutil.copytree(run, tmp_path / "<img src=x onerror=ran=1>")
    with open(hostile / "log.jsonl", "a") as log:
        for line in ({"event": HOSTILE, "step": 12, HOSTILE: HOSTILE},
                     {"step": 12, "loss": 1, "loss_by_source": {HOSTILE: 1, "b": 2}, "phase_s": {}, "host_bytes": 1e9}):
            log.write(json.dumps(line) + "\n")
    state = max((hostile / "checkpoints").glob("*/train_state.json"))
    saved = json.loads(state.read_text())
    saved["config"]["options"]["model"] = HOSTILE
    del saved["xxh3"]
    state.write_text(json.dumps(saved))
    grid = max((hostile / "samples").glob("*.png"))
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("kiln", json.dumps({"seed": 1, "sampler": HOSTILE, "num_sampling_steps": 2, "cfg_scale": 1, "weights": "ema", "prompts": [HOSTILE]}))
    Image.new("RGB", (8, 8)).save(grid, pnginfo=texts)
    succeed("report", hostile)
    succeed("report", hostile, run, "--out", tmp_path / "runs.html")
    page = browser.open(hostile / "report.html")
    seen = HOSTILE.replace("\x1b", "\\u001b").replace("\u202e", "\\u202e")  # a browser would hide the one and obey the other
    check_report(page, headings=["<img src=x onerror=ran=1>", "Events"], rows={"model": re.escape(seen)})
    (event,) = [row["event"] for row in page.table("when", "event") if row["when"] == "step 12"]
    assert event == f"{seen}: {seen} {seen}"
    assert any(seen in plot["legend"] for plot in page.plots if plot["title"] == "Loss by source")
    assert page.text.count(seen) >= 5, "the prompt is under the grids"
    several = browser.open(tmp_path / "runs.html")
    check_report(several, headings=["2 runs"], may_be_empty=["validation loss, last"])
    assert several.table("option", "run")[0]
    for opened in (page, several):
        assert opened.evaluate("typeof ran") == "undefined"
        assert opened.evaluate("document.querySelectorAll('img:not([src^=\"data:image/png;base64,\"])').length") == 0
        assert opened.evaluate("document.querySelectorAll('script').length") == 2, "the data and what draws them"


def test_a_plans_page(browser, tmp_path):
    succeed("plan", "--model", "DiT-S/8", "--gpu", "RTX-4090", "--gpus", 1, "--price-per-gpu-hour", 1, "--html", tmp_path / "plan.html")
    page = browser.open(tmp_path / "plan.html")
    check_report(page, headings=["DiT-S/8 on 1 x RTX-4090", "Memory of one device", "By phase", "Time", "Milestones", "The same images", "Disk"],
                 plots=["Memory over a step", "Images/s"], pictures=[])
    assert re.search(r"Fits: [\d.]+ of [\d.]+ GiB needed", page.text)
    assert {"forward", "backward"} <= {row["phase of the step"] for row in page.table("phase of the step", "ms", "share")}
    assert [row["GPUs"] for row in page.table("GPUs", "efficiency", "cost")][:2] == ["1", "2"]


def test_pictures_beside_a_page_are_shown(run, browser, tmp_path):
    data = {"title": "Samples", "sections": [{"title": "", "parts": [{"kind": "pictures", "items": [["a b#1.png", "a bird", 2], ["c.png", "c", 2]]}]}]}
    (tmp_path / "grid.html").write_text(
        re.sub(r'(id="data">).*?(</script)', lambda found: found[1] + json.dumps(data) + found[2], (run / "report.html").read_text(), flags=re.DOTALL))
    for name in ("a b#1.png", "c.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    page = browser.open(tmp_path / "grid.html")
    check_report(page, headings=["Samples"], pictures=[(8, 8)] * 2)
    assert [picture["caption"] for picture in page.pictures] == ["a bird", "c"]


def test_pictures_come_from_the_page_or_from_beside_it(page):
    addresses = {"a b#c?.png": "./a%20b%23c%3F.png", "javascript:alert(1)": "./javascript%3Aalert(1)", "//host/a.png": ".///host/a.png",
                 "data:text/html,a": "./data%3Atext/html%2Ca", "data:image/png;base64,AAAA": "data:image/png;base64,AAAA"}
    assert page.evaluate(f"{json.dumps(list(addresses))}.map(address)") == list(addresses.values())


# --- runs that have everything ---

NASTY = "<img src=x onerror=alert(1)>"  # in captions, prompts and names: a page must show it as text
MODEL = ["--model", "pixart", "--hidden-size", 48, "--num-heads", 3, "--depth", 2, "--patch-size", 4, "--objective", "iddpm"]
COMMON = ["--global-batch", 4, "--threads", 1, "--peak-tflops", 1, "--seed", 3, "--num-samples", 2, "--num-sampling-steps", 2,
          "--log-every", 4, "--device", "cpu", "--cost-per-hour", 2]


def write_pictures(folder, count):
    rng = np.random.default_rng(count)
    folder.mkdir()
    with open(folder / "metadata.jsonl", "w") as file:
        for index in range(count):
            noise_picture(rng, *((16, 16), (12, 24))[index % 2]).save(folder / f"{index}.png")
            file.write(json.dumps({"file_name": f"{index}.png", "text": f"picture {index} {NASTY}"}) + "\n")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Captions, buckets, stages of several stores, two ranks, validation, evaluation, grids; an adapter trained on that; a run
    that goes on with another stage and was evaluated by command; and a page of all three."""
    root = tmp_path_factory.mktemp("everything")
    encoder_folder("bert", root / "encoder")
    for name, count in (("a", 18), ("b", 12)):
        write_pictures(root / name, count)
        succeed("extract", "--data", root / name, "--autoencoder", "pixels", "--buckets", "16x16,12x24", "--out", root / f"store-{name}",
                "--text-encoder", root / "encoder")
    (root / "recipe.toml").write_text(f"""
[[stage]]
name = "low <b>"
data = "{root / 'store-a'}"
steps = 6
[[stage]]
name = "high"
data = ["{root / 'store-a'}", "{root / 'store-b'}"]
data-weights = [1, 2]
steps = 7
lr = 5e-4
""")
    succeed("train", *MODEL, *COMMON, "--recipe", root / "recipe.toml", "--nproc", 2, "--validation-share", 0.2, "--validate-every", 3,
            "--sample-every", 4, "--sample-prompts", NASTY, "--evaluate-every", 6, "--evaluate-images", 8, "--evaluate-reference", root / "a",
            "--text", "bert", "--out", root / "all & <b>")
    succeed("train", *MODEL, *COMMON, "--data", root / "store-a", "--text", "bert", "--max-steps", 5, "--lora-rank", 2,
            "--weights", root / "all & <b>/checkpoints/step-00000013/model.safetensors", "--sample-every", 5, "--sample-prompts", "a bird",
            "--validation-share", 0.2, "--out", root / "lora")
    succeed("extract", "--data", root / "a", "--autoencoder", "pixels", "--image-size", 16, "--out", root / "square")
    dit = ["train", "--model", "dit", "--hidden-size", 48, "--num-heads", 3, "--depth", 2, "--patch-size", 4, "--objective", "flow", *COMMON,
           "--data", root / "square", "--out", root / "continued"]
    succeed(*dit, "--max-steps", 5)
    (root / "more.toml").write_text('[[stage]]\nname = "more"\nsteps = 7\nlr = 2e-4\n')
    succeed(*dit, "--continue-with", root / "more.toml")
    succeed("evaluate", root / "continued", "--reference", root / "a", "--crop", 16, "--net", "random", "--num-pictures", 8,
            "--sampler", "flow_euler", "--num-sampling-steps", 25)
    succeed("report", root / "continued")
    succeed("report", root / "all & <b>", root / "lora", root / "continued", "--out", root / "runs.html")
    return root


@pytest.mark.slow
def test_a_run_with_everything_has_it_on_its_page(everything, browser):
    page = browser.open(everything / "all & <b>/report.html")
    check_report(
        page, headings=["all & <b>", "Stages, sources, buckets", "Plan against measurement", "Evaluation", "Samples over time", "Events"],
        plots=[*PLOTS, "Loss by stage", "Loss by source", "Loss by bucket", "fd_random", "kd_random", "precision", "recall"],
        cards={"steps": "13", "images seen": "52", "validation loss, last": r"0\.\d+|1\.\d+", "images/s, median": r"\d+\.\d",
               "cost of a million images": r"\d+\.\d\d"},
        rows={"feature_net.name": "random", "reference.num_pictures": "18", "samples.prompts.count": "8", "samples.cfg_scale": "4.5",
              "model": "pixart", "nproc": "2", "sample-prompts": re.escape(NASTY), "data-weights": "1, 2"}, pictures=[(38, 20)] * 5)
    assert "2 ranks" in page.text and "pixart, iddpm, 16 px" in page.text
    assert re.search(rf"seed 3, \w+ in 2 steps, guidance 4.5, ema-[\d.]+: {re.escape(NASTY)}\n", page.text), "under the grids"
    stages = page.table("stage", "from step", "steps", "samples", "px", "learning rate")
    assert [row["stage"] for row in stages] == ["stage 1 (low <b>)", "stage 2 (high)"]
    assert [(row["from step"], row["steps"], row["learning rate"]) for row in stages] == [("1", "6", "0.0001"), ("7", "7", "0.0005")]
    (by_stage,) = [plot for plot in page.plots if plot["title"] == "Loss by stage"]
    assert len(by_stage["points"]) == 2, "a line of each, though six steps are no multiple of --log-every"
    assert page.evaluate("document.querySelectorAll('img[src=x]').length") == 0


def test_an_adapters_page(everything, browser):
    check_report(browser.open(everything / "lora/report.html"), plots=["Loss", "Loss by bucket", "Memory over a step"], pictures=[(38, 20)],
                 rows={"lora-rank": "2", "sample-prompts": "a bird"}, cards={"steps": "5", "images seen": "20"})


def test_a_continued_run_shows_all_stages_and_its_evaluation(everything, browser):
    page = browser.open(everything / "continued/report.html")
    drawing = read_config(everything / "continued")["drawing"]
    assert drawing["num_sampling_steps"] != 2, "a run without grids does not draw as its options say"
    for option, key in (("sampler", "sampler"), ("num-sampling-steps", "num_sampling_steps"), ("cfg-scale", "cfg_scale")):
        assert page.rows[option] == str(drawing[key])
    check_report(page, rows={"samples.sampler.sigmas": r"1, 0\.96, 0\.92, \.\.\., 0\.04 \(25 values\)", "samples.sampler.steps": "25",
                             "samples.guidance_interval": "none"}, may_be_empty=["samples"])
    assert not [name for name in page.rows if re.search(r"sigmas\.\d", name)]
    assert [(row["stage"], row["from step"], row["steps"], row["samples"]) for row in page.table("stage", "steps")] == [
        ("stage 1", "1", "5", "9"), ("stage 2 (more)", "6", "7", "9")]  # half of the pictures are too small
    (result,) = page.table("samples", "fd_random", "precision")
    assert float(result["fd_random"]) > 0 and 0 <= float(result["precision"]) <= 1


def test_several_runs_on_one_page(everything, browser):
    page = browser.open(everything / "runs.html")
    check_report(page, headings=["3 runs", "Speed and memory", "Options that differ", "Stages", "Metrics", "Newest samples"], pictures=[(38, 20)] * 2,
                 plots=["Loss", "Validation loss", "Throughput", "Host memory", "Learning rate"],
                 may_be_empty=["validation loss, last", "samples"])
    rows = {row["run"]: row for row in page.table("run", "steps", "images", "loss, last", "validation loss, last")}
    assert {name: row["steps"] for name, row in rows.items()} == {"all & <b>": "13", "lora": "5", "continued": "12"}
    assert float(rows["lora"]["validation loss, last"]) > 0 and rows["continued"]["validation loss, last"] == "-"
    options = {row["option"]: row for row in page.table("option", "lora", "continued")}
    assert options["lora-rank"] | {"option": ""} == {"option": "", "all & <b>": "0", "lora": "2", "continued": "0"}
    assert options["model"]["continued"] == "dit" and "out" not in options and "seed" not in options
    configs = {name: list(row.values())[1:] for name, row in options.items() if name.startswith("model-config")}
    assert configs and "model-config" not in configs and all(len(set(row)) > 1 for row in configs.values()), "only keys that differ"
    assert "model-config.hidden_size" not in configs
    assert page.width <= 1300, "a table is wider than the page"


def test_an_option_that_a_run_lacks_is_as_an_empty_one(everything, tmp_path):
    shutil.copytree(everything / "lora", tmp_path / "earlier")
    state = max((tmp_path / "earlier/checkpoints").glob("*/train_state.json"))
    saved = json.loads(state.read_text())
    options = saved["config"]["options"]
    del options[next(name for name, value in options.items() if value == "")], saved["xxh3"]
    state.write_text(json.dumps(saved))
    succeed("report", everything / "lora", tmp_path / "earlier", "--out", tmp_path / "runs.html")
    assert "Options that differ" not in (tmp_path / "runs.html").read_text()
