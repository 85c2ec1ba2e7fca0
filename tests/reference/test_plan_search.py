"""kiln plan --search and the tables of the planning pages."""

import importlib.machinery
import importlib.util
import json
import os
import resource
import shlex
import subprocess
import sys
import time

import pytest
from browser import parts_of
from conftest import FULL, REPOSITORY, assert_fails, assert_refused, program, read_json, run_program, succeed

SMALL = ["--model", "DiT-S/4", "--gpu", "T4", "--gpus", "2"]


@pytest.mark.nothing_beside
def test_a_thousand_configurations_take_seconds(tmp_path):
    """DiT-XL/2 on any number of GPUs: time and memory of the process itself."""
    command = [program("kiln"), "plan", "--search", "--model", "DiT-XL/2", "--gpu", "A100-80G", "--json"]
    output = tmp_path / "search.json"
    best = float("inf")
    for _ in range(4):  # other guests of a machine slow it for seconds
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.monotonic()
        with output.open("w") as file:
            subprocess.run(command, check=True, stdout=file)
        elapsed = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best < 10:
            break
    assert best < 10
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1 << 20
    result = json.loads(output.read_text())
    assert result["num_configurations"] >= 1000
    assert result["fits"]
    assert [choice["gpus"] for choice in result["by_gpus"]] == [2**n for n in range(9)]


def test_commands_are_planned_as_they_are_printed():
    """What a search prints, given to kiln plan, fits and takes what the search said."""
    choices = read_json("plan", "--search", *SMALL)["best"]
    assert {goal for choice in choices for goal in choice["goal"].split(", ")} == {
        "fastest that fits", "cheapest", "least memory"}  # fmt: skip
    for choice in choices:
        words = shlex.split(choice["command"].replace("--data store", "--data synthetic"))
        assert words[:2] == ["kiln", "train"]
        predicted = read_json("plan", "--gpu", "T4", "--gpus", 2, *words[2:])["predicted"]
        assert predicted["fits"] is True
        assert predicted["step_s"] == pytest.approx(choice["step_s"])
        assert predicted["needed_bytes"] == choice["needed_bytes"]


def test_commands_can_be_pasted(tmp_path):
    """The best command for this machine's CPU trains here."""
    arguments = ["--model", "dit", "--hidden-size", "48", "--depth", "2", "--num-heads", "3", "--patch-size", "8",
                 "--image-size", "64", "--global-batch", "4", "--max-steps", "2", "--data", "synthetic",
                 "--num-classes", "5", "--no-preflight", "--out", tmp_path / "run"]  # fmt: skip
    result = succeed("plan", "--search", "--gpu", "cpu", *arguments)
    command = next(line for line in result.stdout.splitlines() if line.startswith("  kiln train "))
    succeed(*shlex.split(command)[1:], "--peak-tflops", 1)
    assert (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["--search", "--model", "DiT-XL/2", "--image-size", "512", "--gpu", "T4", "--compute-dtype", "f32",
          "--gpus", "1", "--micro-batch", "256"], 0, "nothing fits"),
        (["--search", *SMALL, "--deadline-days", "0.0001"], 0, "nothing that fits takes at most 0.0001 days"),
        (["--search", *SMALL, "--max-cost", "5"], 1, "--price-per-gpu-hour"),
        (["--search", "--gpu", "T5"], 1, "T4"),
        (["--search", "--gpu", "RTX-3080"], 1, "with --gpu-memory 10G in place of --gpu"),
        (["--search", "--model", "DiT-S/2", "--gpu", "V100"], 1, "this build does not run on a V100"),
        (["--table", "prices"], 1, "sizes"),
        (["--search", *SMALL[:-2], "--cost-per-hour", "5"], 1, "--price-per-gpu-hour"),
    ],
)  # fmt: skip
def test_answers_in_one_line(kiln, arguments, status, expected):
    result = kiln("plan", *arguments)
    assert result.returncode == status
    text = result.stdout + result.stderr
    assert expected in text
    assert text.count("\n") == 1


def test_a_search_writes_the_report_of_what_it_finds(tmp_path):
    report = tmp_path / "search.html"
    result = succeed("plan", "--search", *SMALL, "--html", report, "--json")
    html = report.read_text()
    assert len(parts_of(report, "plot")) >= 2 and "DiT-S/4" in html
    assert f": {json.loads(result.stdout)['best'][0]['needed_bytes'] / 2**30:.2f} of " in html


@pytest.mark.parametrize("arguments", [["--json"], ["--html", "table.html"]])
def test_a_table_is_printed_as_it_is(kiln, arguments, tmp_path):
    result = kiln("plan", "--table", "quoted", *[tmp_path / part if "." in part else part for part in arguments])
    assert result.returncode != 0 and result.stderr.count("\n") == 1
    assert "--table" in result.stderr and arguments[0] in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_pages_hold_what_the_program_says(monkeypatch, capsys):
    tool = REPOSITORY / "tools" / "plan_tables"
    if FULL:  # what takes long, too
        result = subprocess.run([tool, "--check", "--all"], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return
    loader = importlib.machinery.SourceFileLoader("plan_tables", str(tool))
    plan_tables = importlib.util.module_from_spec(importlib.util.spec_from_loader("plan_tables", loader))
    loader.exec_module(plan_tables)
    monkeypatch.setattr(plan_tables, "run", lambda arguments, environment: run_program("kiln", *arguments, env=environment, cwd=REPOSITORY))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # of a loaded program one runs at a time
    monkeypatch.setattr(sys, "argv", [str(tool), "--check"])
    assert plan_tables.main() == 0, capsys.readouterr().err


# Models and kinds of GPU


def compared(*arguments):
    return read_json("plan", "--search", *arguments)


@pytest.mark.slow
def test_a_table_over_models_and_gpus_equals_searching_each_alone():
    common = ["--gpus", 2, "--global-batch", 64, "--micro-batch", 16, "--compute-dtype", "fp16"]
    table = compared("--model", "DiT-S/4,DiT-B/8", "--gpu", "T4,RTX-3060", *common)
    assert len(table["ranked"]) == 4
    configurations = 0
    for row in table["ranked"]:
        alone = compared("--model", row["model"], "--gpu", row["gpu"], *common)
        fastest = next(choice for choice in alone["best"] if "fastest" in choice["goal"])
        configurations += alone["num_configurations"]
        for figure in ("command", "step_s", "needed_bytes", "days", "gpus"):
            assert row[figure] == fastest[figure], figure
    assert table["num_configurations"] == configurations


def test_a_beginning_names_all_models():
    table = compared("--model", "DiT-S", "--gpu", "T4", "--gpus", 1, "--micro-batch", 16, "--compute-dtype", "fp16")
    assert {row["model"] for row in table["ranked"]} == {"DiT-S/2", "DiT-S/4", "DiT-S/8"}


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--model", "DiX", "--gpu", "any"], "did you mean"),
    (["--model", "DiT-S/8", "--gpu", "any,A100-80H"], "A100-80G"),
    (["--model", "DiT-S/8", "--gpu", "T4", "--gpu-prices", "T4"], "--gpu-prices expects GPU=PRICE"),
    (["--model", "DiT-S/8", "--gpu", "T4", "--gpu-memory", "much"], "--gpu-memory expects a size"),
])
def test_a_comparison_refuses_in_one_line(arguments, expected):
    assert_refused(["plan", "--search", *arguments], expected)


def test_any_card_by_its_memory():
    machine = read_json("plan", "--model", "DiT-B/4", "--gpu-memory", "12G", "--compute-dtype", "bf16")["machine"]
    assert machine["memory_bytes"] == 12 << 30 and machine["name"] in ("RTX-3060", "RTX-4070")


@pytest.mark.slow
def test_hints_lead_to_commands_that_work(kiln):
    """What a search says where nothing fits, and what a plan's advice says, is planned as it is printed."""
    refused = kiln("plan", "--search", "--model", "DiT-XL/2", "--image-size", 512, "--gpu", "T4", "--gpus", 1, "--compute-dtype",
                   "f32", "--micro-batch", 256)
    command = shlex.split(refused.stdout.split("it fits, ")[1].split(": ", 1)[1])
    gpu = refused.stdout.split("; on 1 x ")[1].split(" ")[0]
    words = [word if word != "store" else "synthetic" for word in command[2:]]
    assert read_json("plan", "--gpu", gpu, "--gpus", 1, *words)["predicted"]["fits"]
    advised = kiln("plan", "--model", "DiT-XL/2", "--gpu", "RTX-4060", "--compute-dtype", "bf16", "--recompute", "all")
    hint = next(line for line in advised.stdout.splitlines() if "kiln plan --search" in line)
    fewer = ["--micro-batch", 4, "--offload-optimizer", "cpu"]  # of what it would try
    succeed(*shlex.split(hint.split("it is: kiln ")[1]), *fewer, "--json")


@pytest.mark.parametrize("model", [
    ["sd15", "--objective", "epsilon", "--image-size", 256],
    ["pixart", "--hidden-size", 1152, "--depth", 3],
    ["sana", "--hidden-size", 1152, "--depth", 3, "--objective", "flow"],
], ids=["sd15", "pixart", "sana"])
def test_every_family_is_searched(model):
    """Also where passes of other sizes are other programs; what is found is planned with the same figures."""
    found = read_json("plan", "--search", "--model", *model, "--gpu", "A40", "--gpus", 1, "--global-batch", 16,
                      "--compute-dtype", "bf16")
    assert found["num_configurations"] > 5
    fastest = found["best"][0]
    words = [word if word != "store" else "synthetic" for word in shlex.split(fastest["command"])[2:]]
    plan = read_json("plan", "--gpu", "A40", "--gpus", 1, *words)["predicted"]
    assert plan["fits"] and plan["needed_bytes"] == fastest["needed_bytes"]


@pytest.mark.slow
def test_winners_leave_room_unless_asked():
    """At most 85 % of the memory; with --memory-share as much as that, which is faster or as fast."""
    command = ["plan", "--search", "--model", "DiT-L/2", "--gpu", "RTX-3090", "--gpus", 1, "--compute-dtype", "bf16",
               "--offload-optimizer", "none"]
    usual, full = (read_json(*command, *more)["best"] for more in ([], ["--memory-share", 0.97]))
    share = [choice["needed_bytes"] / (23.56 * 2**30) for choices in (usual, full) for choice in choices]
    assert all(part <= 0.85 for part in share[:len(usual)]) and all(part <= 0.97 for part in share)
    assert full[0]["step_s"] <= usual[0]["step_s"]
    assert_fails("--memory-share expects", *command, "--json", "--memory-share", 1.5)


# Tables


def rows_of(name, *arguments):
    result = succeed("plan", "--table", name, *arguments)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if line.startswith("|")]


def test_tables_are_of_what_is_given():
    head, _, *rows = rows_of("gpus", "--model", "DiT-B/4", "--gpu", "T4", "--compute-dtype", "fp16",
                             "--global-batch", 64, "--steps", 1000, "--price-per-gpu-hour", 1)
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "6", "7", "8", "16", "32", "64"]
    for gpus in ("2", "4"):
        row = next(row for row in rows if row[0] == gpus)
        plan = read_json("plan", "--model", "DiT-B/4", "--gpu", "T4", "--gpus", gpus, "--compute-dtype", "fp16",
                         "--global-batch", 64, "--steps", 1000)["predicted"]
        assert row[2] == f"{plan['step_s']:.3f}" and row[5].startswith(f"{plan['needed_bytes'] / 2**30:.1f} GiB")
        assert ", cost " in row[4]
    memory = [float(row[5].split()[0]) for row in rows if row[0] in ("2", "4", "8")]
    assert memory == sorted(memory, reverse=True), "a fixed batch takes less of each of more GPUs"
    weak = [row[9] for row in rows if row[0] in ("2", "4", "8")]
    assert len(set(weak)) == 1, "the same images take the same of each"


def test_fast_dits_options_beside_its_figures(kiln):
    _, _, *rows = rows_of("options")
    assert [row[1] for row in rows] == ["out of memory", "0.43", "0.56", "0.84"]
    planned = [float(row[2].split()[0]) for row in rows[1:]]
    assert planned == sorted(planned) and all(speed > 0 for speed in planned)
    text = kiln("plan", "--model", "DiT-XL/2", "--gpu", "A100-80G", "--compute-dtype", "bf16").stdout
    assert "measured by others: fast-DiT's README, 1 x A100-80G, 128 images a step" in text and "0.84 steps/s; planned like that: " in text


@pytest.mark.slow
def test_a_gpus_step_by_kinds_of_operations():
    """The rows sum to the step of the plan, with and without what no GPU has run yet."""
    _, _, *rows = rows_of("gpu-step")
    (*kinds, total, images, _, memory), each = rows[:-5], rows[-5:]
    for column, more in ((2, []), (3, ["--untried-gpu"])):
        plan = read_json("plan", "--model", "DiT-XL/2", "--gpu", "H200", "--compute-dtype", "bf16", "--global-batch", 32, *more)["predicted"]
        assert total[column] == f"{1e3 * plan['step_s']:.1f}" and images[column] == f"{plan['images_per_s']:.0f}"
        assert memory[column] == f"{plan['needed_bytes'] / 2**30:.1f} GiB"
        assert abs(sum(float(row[column]) for row in kinds) - float(total[column])) < 0.5
    assert len({row[0] for row in each}) == 5 and all(float(total[3]) <= float(row[3]) < float(total[2]) for row in each), each
    before, after = ({row[0].split(":")[0]: float(row[column]) for row in kinds} for column in (2, 3))
    assert after["update"] < before["update"] and after["products"] < before["products"] and "GELU apart from products" in before and after["GELU apart from products"] == 0
    # Attention packs its own gradients, and a block's last residual is added in the pass of the next norm.
    for kind in ("attention, its gradients packed", "adaLN and gates, forward", "adaLN and gates, backward"):
        assert after[kind] < before[kind]
    for more in (["--autoencoder", "sd-vae-ft-mse"], ["--offload-optimizer", "cpu"], ["--model", "PixArt-Sigma-XL/2-512"]):
        _, _, *rows = rows_of("gpu-step", *more)
        kinds, (total, images) = rows[:-9], rows[-9:-7]
        model = [] if "--model" in more else ["--model", "DiT-XL/2"]
        plan = read_json("plan", *model, "--gpu", "H200", "--compute-dtype", "bf16", "--global-batch", 32, *more)["predicted"]
        assert abs(sum(float(row[2]) for row in kinds) - float(total[2])) < 0.5 and images[2] == f"{plan['images_per_s']:.0f}", more
    assert_fails("--table gpu-step is about a GPU, got --gpu cpu", "plan", "--table", "gpu-step", "--gpu", "cpu")
    assert_fails("--global-batch", "plan", "--table", "gpu-step", "--global-batch", 0)
    assert_fails("not in fp8", "plan", "--table", "gpu-step", "--gpu", "A100-80G", "--compute-dtype", "fp8")
    assert_fails("give a --micro-batch", "plan", "--table", "gpus", "--micro-batch", -1, "--memory-budget", "40G")


def test_pictures_can_be_encoded_in_a_plan():
    """Without data, with an autoencoder that need not be there: its time and memory."""
    common = ["plan", "--model", "DiT-B/4", "--gpu", "A100-80G", "--compute-dtype", "bf16"]
    features, pictures = (read_json(*common, *more) for more in ([], ["--autoencoder", "sd-vae-ft-mse"]))
    assert "encoding" not in features["predicted"]["phase_s"]
    seconds = pictures["predicted"]["phase_s"]["encoding"]
    assert pictures["predicted"]["step_s"] == pytest.approx(features["predicted"]["step_s"] + seconds)
    assert pictures["predicted"]["needed_bytes"] > features["predicted"]["needed_bytes"]
    assert any("encoding pictures takes" in line for line in pictures["advice"])
    alone = next(point for point in pictures["predicted"]["scaling"] if point["gpus"] == 1)
    assert alone["step_s"] == pytest.approx(pictures["predicted"]["step_s"])
    assert alone["images_per_s"] == pytest.approx(pictures["predicted"]["images_per_s"])


@pytest.mark.parametrize("gpu", ["A100-80G", "cpu"])
def test_sana_with_its_autoencoder_resident(gpu):
    """Pictures of 1024 px encoded on the way and sample grids decoded: Sana's DC-AE takes part in plan and search."""
    run = ["--model", "Sana-1600M", "--image-size", 1024, "--depth", 1, "--objective", "flow", "--gpu", gpu, "--gpus", 1,
           "--global-batch", 4, "--micro-batch", 4]
    pictures = [*run, "--autoencoder", "dc-ae"]
    features, encoded, drawn = (read_json("plan", *more)["predicted"]
                                for more in (run, pictures, [*pictures, "--sample-every", 100]))
    weights = encoded["by_kind"]["autoencoder"]
    assert weights == pytest.approx(4 * 312.25e6, rel=0.01), "312 M weights, in f32"
    assert encoded["step_s"] > features["step_s"] and encoded["needed_bytes"] > features["needed_bytes"] + weights
    assert "validation sampling" in drawn["by_phase"]
    found = read_json("plan", "--search", *pictures, "--sample-every", 100)
    assert found["best"] or found["nearest"], "fits, or says what is missing"


# What is published of each family


def planned_options(command):
    """The options that a printed command stands for."""
    words = shlex.split(command.replace("--data store", "--data synthetic"))
    return read_json("plan", "--gpu", "A100-80G", *words[2:])["options"]


@pytest.mark.slow
def test_every_family_is_compared_under_its_own_objective():
    """Where none is given; what is given stays, and what cannot train with it says why."""
    arguments = ["--gpu", "A100-80G", "--gpus", 1, "--global-batch", 4, "--micro-batch", 4, "--compute-dtype", "bf16",
                 "--recompute", "all", "--offload-optimizer", "none"]
    table = compared("--model", "DiT-S/8,Sana-600M-512,sd21-v", *arguments)
    commands = {row["model"]: row["command"] for row in table["ranked"]}
    assert set(commands) == {"DiT-S/8", "Sana-600M-512", "sd21-v"} and not table["left_out"]
    for model, expected in {"DiT-S/8": {"objective": "iddpm"}, "Sana-600M-512": {"objective": "flow", "flow-shift": 3},
                            "sd21-v": {"objective": "v_prediction", "beta-schedule": "scaled_linear"}}.items():
        assert "--objective" not in commands[model], "the model brings it"
        planned = planned_options(commands[model])
        assert {name: planned[name] for name in expected} == expected
    table = compared("--model", "DiT-S/8,Sana-600M-512", "--objective", "iddpm", *arguments)
    assert [row["model"] for row in table["ranked"]] == ["DiT-S/8"]
    assert len(table["left_out"]) == 1 and "train it with flow" in table["left_out"][0]


@pytest.mark.parametrize(("model", "more", "milestone", "rate"), [
    ("DiT-XL/2", [], "published FID 19.47 without guidance, at 400K steps of 256", 1e-4),
    ("PixArt-Alpha-XL/2-256", [], "PixArt-alpha's 150K and 90K steps at 256 px", 2e-5),
    ("PixArt-Sigma-XL/2-256", [], None, 2e-5),
    ("Sana-600M-512", ["--image-size", 512, "--objective", "flow"], None, 1e-4),
    ("sd15", ["--image-size", 512, "--objective", "epsilon"], "Stable Diffusion 1.5's 194K, 515K and 595K steps", 1e-4 / 8**0.5),
])
def test_what_is_published_of_a_model(model, more, milestone, rate):
    """Its own milestones, or plainly none; a learning rate far from its authors' is told, and theirs is not."""
    depth = [] if model == "sd15" else ["--depth", 1]
    common = ["plan", "--model", model, *more, *depth, "--gpu", "A100-80G", "--compute-dtype", "bf16"]
    plan = read_json(*common, "--lr", 1e-2)
    names = [entry["name"] for entry in plan["predicted"]["milestones"]]
    assert any(name.startswith(milestone) for name in names) if milestone else not any("steps" in name for name in names)
    unknown = [note for note in plan["notes"] if "no figure is known" in note]
    if model.startswith("DiT"):
        assert not unknown
    else:
        assert len(unknown) == 1 and not any("FID" in name for name in names)
    assert not any("useful" in name for name in names), "nobody has published after how many epochs"
    learns = [entry["steps"] for entry in plan["predicted"]["milestones"] if "a guide" in entry["name"]]
    assert learns == ([10_000] if model.startswith("Sana") else [])
    advised = next(line for line in plan["advice"] if "learning rate 0.01 does not suit" in line)
    assert float(advised.split("--lr ")[1]) == pytest.approx(rate, rel=0.2)
    assert not any("learning rate" in line for line in read_json(*common, "--lr", rate)["advice"])
    adapter = read_json(*common, "--lr", 1e-2, "--lora-rank", 4)
    assert not any("learning rate" in line for line in adapter["advice"])


@pytest.mark.slow
def test_sizes_say_what_quality_they_buy():
    """Published FIDs beside each size, and SDXL's size, which people compare Sana's with."""
    head, _, *rows = rows_of("sizes", "--global-batch", 8)
    begin = next(i for i, row in enumerate(rows) if row[0] == "model with captions")
    rows, (_, _, *text) = rows[:begin], rows[begin:]
    assert head[-1] == "published FID" and len(rows) == 24
    quality = {(row[0], row[1]): row[-1] for row in rows}
    assert quality["DiT-S/8", "256"] == "153.60 at 400K" and quality["DiT-XL/2", "256"] == "19.47 at 400K"
    assert quality["DiT-XL/2", "512"] == "12.03 at 3M" and quality["DiT-L/2", "512"] == ""
    weights = {row[0]: float(row[1].split()[0]) * (1000 if row[1].endswith("B") else 1) for row in text}
    assert weights["Sana-1600M"] == pytest.approx(1604, abs=2) and weights["sd15"] == pytest.approx(860, abs=1)
    sdxl = next(name for name in weights if name.startswith("SDXL"))
    assert weights[sdxl] == 2600 > weights["Sana-1600M"]
    assert {row[0]: row[2] for row in text}["Sana-1600M"] == "5.76 MJHQ"


def test_published_results_beside_the_plan():
    _, _, *rows = rows_of("results", "--price-per-gpu-hour", 1)
    assert [row[:4] for row in rows] == [["DiT-XL/2", "42", "19.47", "18.1"], ["DiT-B/4", "42", "68.38", "68.9"],
                                         ["DiT-B/4", "100", "68.38", "68.3"]]
    plan = read_json("plan", "--model", "DiT-B/4", "--gpu", "A100-80G", "--gpus", 8, "--micro-batch", 32,
                     "--compute-dtype", "bf16")["predicted"]
    assert rows[1][5] == f"{plan['days']:.3g}, cost {plan['days'] * 24 * 8:.2f}"
