"""What widely read guides ask of plans and probe: a test for each question of docs/guides.md, whose name is its docstring.

Most look at the answers that the page shows; that these are what the program says now is test_pages_hold_what_the_program_says.
"""

import inspect
import json
import re
import shlex
import sys

import pytest
from conftest import REPOSITORY

PLANNING, GUIDES = (
    {section.split("\n")[0]: section for section in re.split(r"\n##+ ", (REPOSITORY / "docs" / name).read_text())}
    for name in ("planning.md", "guides.md"))
QUOTED, TABLES = PLANNING["What people quote"], PLANNING["Tables"]
# Questions that tests beside what answers them are about.
ELSEWHERE = {
    "Are there needless casts, and is the gradient scaling reasonable?": "test_probe.py: test_precision_is_audited",
    "Is every GPU busy?": "test_monitor.py: test_every_gpu_of_the_machine_is_told_of",
    "Can its results be made again?": "test_plan_search.py: test_published_results_beside_the_plan",
    "What do its options give?": "test_plan_search.py: test_fast_dits_options_beside_its_figures",
}


def answers():
    """The blocks of the calling test's section: what the program printed, without the command."""
    question = getattr(sys.modules[__name__], inspect.stack()[1].function).__doc__
    return [block.partition("\n\n")[2] if block.startswith("\n") else block
            for block in re.findall(r" -->\n(.*?)<!-- end -->", GUIDES[question], re.DOTALL)]


def rows_of(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]


def days_of(text):
    """The one time of a run of so many steps, in days."""
    number, unit = re.search(r"steps: ([\d.]+) (days|h)", text).groups()
    return float(number) / (1 if unit == "days" else 24)


def ok(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_question_has_a_test():
    asked = {question for question, section in GUIDES.items() if question.endswith("?")}
    tested = {function.__doc__ for name, function in globals().items() if name.startswith("test_") and function.__doc__}
    assert len(asked) > 15 and asked == tested | set(ELSEWHERE)
    for place in ELSEWHERE.values():
        file, name = place.split(": ")
        assert f"\ndef {name}(" in (REPOSITORY / "tests" / "reference" / file).read_text(), place


# Planning


def test_models(kiln):
    """Which model can my cards train in time?"""
    table = ok(kiln("plan", "--search", "--model", "DiT-S/2,DiT-B/2,DiT-XL/2", "--gpu", "RTX-3090", "--gpus", 2,
                    "--deadline-days", 5, "--json"))
    meets = [row["meets"] for row in table["ranked"]]
    assert meets == sorted(meets, reverse=True) and set(meets) == {True, False}
    for row in table["ranked"]:
        assert (row["days"] <= 5) == row["meets"]
    models = [row["model"] for row in table["ranked"] if row["meets"]]
    assert models == [model for model in ("DiT-XL/2", "DiT-B/2", "DiT-S/2") if model in models]


def test_cards(kiln):
    """Which card for my model?"""
    arguments = ["plan", "--search", "--model", "DiT-B/4", "--gpu", "A100-80G,RTX-4090,T4,V100", "--gpus", 2,
                 "--gpu-prices", "A100-80G=2,RTX-4090=0.5,T4=0.2"]
    table = ok(kiln(*arguments, "--json"))
    costs = [row["cost"] for row in table["ranked"]]
    assert costs == sorted(costs) and len(costs) == 3
    assert any("V100" in line and "Turing" in line for line in table["left_out"])
    assert all(row["command"].startswith("kiln train --model DiT-B/4") for row in table["ranked"])


def test_small_cards(kiln):
    """What goes on a card of 8, 10 or 12 GB?"""
    too_large, refused, fits = answers()
    assert "DOES NOT FIT" in too_large and "of 10.00 GiB" in too_large and "fits in" in too_large
    searched = shlex.split(re.search(r"how fast it is: kiln (plan --search .*)", too_large)[1])
    assert searched[searched.index("--gpu-memory") + 1] == str(10 << 30)
    assert ok(kiln(*searched, "--micro-batch", 8, "--compute-dtype", "bf16", "--recompute", "all", "--offload-optimizer", "cpu", "--json"))["best"], "with the state offloaded"
    assert "RTX-3080" in refused and "--gpu-memory 10G" in refused
    assert "  FITS: " in fits and "of 10.00 GiB" in fits
    for gpu, gib in (("RTX-4060", 8), ("RTX-3060", 12)):
        plan = ok(kiln("plan", "--model", "DiT-S/8", "--gpu", gpu, "--compute-dtype", "fp16", "--global-batch", 8, "--json"))
        assert 0.9 * gib < plan["machine"]["memory_bytes"] / 2**30 <= gib
    # The nearest of those that multiply in what is asked for.
    nearest = [ok(kiln("plan", "--model", "DiT-S/8", "--gpu-memory", "11G", "--compute-dtype", dtype, "--json"))["machine"]
               for dtype in ("fp16", "bf16")]
    assert nearest[0]["name"] == "RTX-2080-Ti" and nearest[1]["name"] in ("RTX-3060", "RTX-4070")
    least = re.search(r"the least that works is --memory-budget (\d+M)", kiln(
        "plan", "--model", "DiT-B/2", "--gpu-memory", "10G", "--compute-dtype", "bf16", "--memory-budget", "500M").stderr)[1]
    assert kiln("plan", "--model", "DiT-B/2", "--gpu-memory", "10G", "--compute-dtype", "bf16", "--memory-budget", least,
                "--micro-batch", -1).returncode == 0


def test_a_table():
    """Is there a table for my card?"""
    head, _, *rows = rows_of(answers()[0])
    assert "RTX-4060 for 100000 steps" in head and len(rows) == 24
    assert all(int(row[5]) <= 64 for row in rows), "images of a pass are of the batch"


def test_one_to_eight():
    """How do 400,000 steps go on 1 to 8 GPUs?"""
    _, _, *rows = rows_of(answers()[0])
    fixed = {row[0]: (float(row[4]), float(row[5].split()[0])) for row in rows}
    assert list(fixed)[:8] == [str(n) for n in range(1, 9)]
    assert [round(fixed[n][1]) for n in "1248"] == [46, 30, 22, 18]
    assert fixed["8"][0] < fixed["4"][0] < fixed["2"][0] < fixed["1"][0]
    assert len({round(float(row[9].split()[0])) for row in rows}) == 1, "the same images take the same of each"


def test_batches():
    """Are batches of 64, 32, 16 and 8, and the weights, as the guide has them?"""
    quoted = [row for row in rows_of(QUOTED) if row[1] == "quoted"]
    planned = [row for row in rows_of(QUOTED) if row[1] == "planned"]
    assert [row[3] for row in quoted] == ["64", "32", "16", "8"]
    assert [row[2] for row in quoted] == ["33 M", "79 M", "369 M", "1.06 B"]
    assert [row[2] for row in planned] == ["33 M", "130 M", "458 M", "675 M"]
    assert all(int(mine[3]) > int(theirs[3]) for mine, theirs in zip(planned, quoted))


def test_days():
    """Are 5 days on one GPU, 3 on four and 7 on eight right?"""
    *online, measured = answers()
    # At the guide's own batches, 64, 128 and 64 images on all cards: it says 5, 3 and 7 days.
    for text, days in zip(online, (1.6, 0.94, 4.6)):
        assert days_of(text) == pytest.approx(days, rel=0.05), text
    table = [row for row in rows_of(QUOTED) if len(row) == 9 and row[1] in ("quoted", "planned")]
    assert [row[6] for row in table if row[6]] == ["64", "128", "64"]
    for column, expected in ((7, (0.022, 0.045, 0.172)), (8, (1.6, 0.94, 4.6))):
        planned = [float(row[column].split()[0]) for row in table if row[1] == "planned" and row[column]]
        assert planned == pytest.approx(expected, rel=0.05)
    shares = [int(re.search(r"encoding pictures (\d+) %", text)[1]) for text in online]
    assert shares == sorted(shares, reverse=True) and shares[0] > 90 and shares[-1] > 5
    assert re.search(r"measured by others: fast-DiT's README.* 0\.84 steps/s; planned like that: ", measured)
    assert 0.84 * 128 == pytest.approx(107.5, abs=0.1) and 400e3 * 256 / (6.8 * 107.5) / 86400 == pytest.approx(1.6, abs=0.05)


def test_milestones():
    """What is there after a day, three days, a week?"""
    text = answers()[0]
    for milestone in ("smoke test (1000 steps)", "after 1 day", "after 3 days", "after 7 days",
                      "published FID 19.47 without guidance, at 400K", "published FID 9.62 without guidance, at 7M"):
        assert milestone in text


def test_advice(kiln):
    """Should a run stay below 85 % of the memory, and its batch be a multiple of 8?"""
    text = answers()[0]
    assert "% of the memory is used" in text and "micro-batch 36 is not a multiple of 8" in text
    assert int(re.search(r"needed \((\d+) %\)", text)[1]) > 85
    least = ok(kiln("plan", "--model", "DiT-XL/2", "--gpu", "A100-80G", "--compute-dtype", "bf16", "--micro-batch", 1,
                    "--recompute", "all", "--gpu-memory", "15G", "--json"))
    assert not any(word in line for line in least["advice"] for word in ("--micro-batch", "--recompute all", "multiple of 8"))


def test_speed_up():
    """Are 1.8, 3.5 and 6.8 times the speed on 2, 4 and 8 GPUs right?"""
    rows = [row for row in rows_of(QUOTED) if row[0] in ("2", "4", "8")]
    assert [row[1] for row in rows] == ["1.8x", "3.5x", "6.8x"]
    for row, most in zip(rows, (2, 4, 8)):
        assert float(row[1][:-1]) <= float(row[2][:-1]) <= most
    on_four = next(row for row in rows if row[0] == "4")
    assert 2 < float(on_four[-2][:-1]) < 3 and 1 < float(on_four[-1][:-1]) < 1.5, "DiT-B/4, 64 images each and 128 in all"
    assert "1.83x on two A100" in QUOTED and "assumes four cards in a machine" in QUOTED


def test_rates(kiln):
    """Which learning rate and batch does my model take?"""
    dit, sana = answers()
    assert "global batch 32 is outside" in dit and "guides say 64 or more" in dit and "--lr 4e-05" in dit
    assert re.search(r"learning rate 0.001 does not suit global batch 64 .*--lr 5e-05", sana)


def test_this_machine(kiln):
    """What of this machine?"""
    plan = ["plan", "--model", "DiT-S/8", "--depth", 1, "--global-batch", 8, "--json"]
    here, this = (ok(kiln(*plan, *more))["machine"] for more in ([], ["--gpu", "this"]))
    assert here["name"] == this["name"]
    listed = kiln("plan", "--gpu", "RTX-3080").stderr.split("(all: ")[1].split(")")[0].split(", ")
    assert len(listed) > 20 and {"RTX-4060", "L4", "RTX-5090", "H200"} <= set(listed)


# fast-DiT


def test_less_memory():
    """Is it 60 % less memory?"""
    rows = [row for row in rows_of(TABLES) if len(row) == 5 and row[3].endswith("MB")]
    quoted, planned = ([float(row[column].split()[0]) for row in rows] for column in (3, 4))
    assert 1 - quoted[-1] / quoted[0] == pytest.approx(0.38, abs=0.005) and 1 - quoted[1] / quoted[0] == pytest.approx(0.08, abs=0.005)
    assert 1 - planned[-1] / planned[0] == pytest.approx(0.55, abs=0.01) and 1 - planned[1] / planned[0] == pytest.approx(0.34, abs=0.01)


def test_true_f32():
    """Is its f32 true f32?"""
    seconds = [float(re.search(r"Time: ([\d.]+) s", text)[1]) for text in answers()]
    assert seconds[0] > 3 * seconds[1], "fast-DiT: 0.12 steps/s and 0.43"


# PixArt


def test_where_time_goes():
    """Where do six minutes an iteration go?"""
    text = answers()[0]
    shares = [int(re.search(rf"encoding {what} (\d+) %", text)[1]) for what in ("pictures", "captions")]
    said = int(re.search(r"encoding pictures and captions takes (\d+) % of every step: kiln extract", text)[1])
    assert min(shares) > 5 and said == pytest.approx(sum(shares), abs=1)
    assert "IN f32 IT TAKES" in text


def test_measures(kiln):
    """What does each measure gain?"""
    small = ["--model", "PixArt-Sigma-XL/2-256", "--image-size", 256, "--depth", 2, "--global-batch", 4]
    rows = ok(kiln("probe", "--variants", REPOSITORY / "recipes" / "pixart" / "variants.toml", "--plan-for", "A800-80G", *small,
                   "--json"))["variants"]
    assert [row["name"] for row in rows] == ["online", "features", "loader", "bf16", "budget", "f32"]
    assert [row["encoding_share"] > 0 for row in rows] == [True, False, False, False, False, True]
    gains = {row["name"]: row["gain_in_all"] for row in rows}
    assert gains["features"] > 1.5 and gains["bf16"] == pytest.approx(gains["loader"], rel=0.05) and gains["f32"] < 0.3
