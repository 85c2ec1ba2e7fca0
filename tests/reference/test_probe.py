"""kiln probe: a few real steps beside the plan, on one machine and without leaving anything."""

import json
import os
import re
import signal
import subprocess

import pytest
from conftest import FULL, REPOSITORY, lines_of_errors, program, read_json, succeed
from interruptions import until_interrupted, wait_while_running
from run_files import read_plan

pytestmark = pytest.mark.nothing_beside

OPTIONS = ["--model", "dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 2, "--num-classes", 4,
           "--data", "synthetic", "--image-size", 64, "--global-batch", 8, "--device", "cpu", "--peak-tflops", 1]


def run(command, *arguments, temporary=None):
    arguments = [str(part) for part in [program("kiln"), command, *OPTIONS, *arguments]]
    environment = {"TMPDIR": str(temporary)} if temporary else None
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)


def ok(*arguments, **options):
    result = run(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    probed = json.loads(ok("probe", "--steps", 6, "--json", "--cost-per-hour", 2, "--max-steps", 1000,
                           temporary=folder).stdout)
    assert not list(folder.iterdir()), "the run folder is removed"
    return probed


def test_both_sides_have_the_same_shape(probed):
    predicted, measured = probed["predicted"], probed["measured"]
    for key in ("peak_bytes", "by_kind", "by_phase", "step_s", "images_per_s", "phase_s", "curve"):
        assert key in predicted and key in measured, key
    assert set(measured["by_phase"]) <= set(predicted["by_phase"])
    assert set(measured["phase_s"]) == set(predicted["phase_s"])
    assert {"load", "first step", "steady step", "checkpoint"} <= set(measured["by_phase"])
    assert measured["curve"]["phase"] == predicted["curve"]["phase"]
    assert measured["num_steps"] == 4  # two warm up
    low, median, high = measured["step_s_quartiles"]
    assert 0 < low <= median <= high and measured["step_s"] == median
    assert measured["images_per_s"] == pytest.approx(8 / median)


def test_memory_is_as_predicted(probed):
    predicted, measured = probed["predicted"], probed["measured"]
    assert measured["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.03)
    assert sum(measured["by_kind"].values()) == measured["peak_bytes"]
    for kind in ("master", "moments", "ema", "gradients"):
        assert measured["by_kind"][kind] == predicted["by_kind"][kind], kind
    for phase, tolerance in (("load", 0.1), ("first step", 0.03), ("steady step", 0.03)):
        assert measured["by_phase"][phase] == pytest.approx(predicted["by_phase"][phase], rel=tolerance), phase
    assert measured["by_phase"]["checkpoint"] > 0
    assert not [finding for finding in probed["findings"] if "memory" in finding]


def test_whole_run_is_extrapolated(probed):
    whole = probed["extrapolated"]
    assert whole["steps"] == 1000
    assert whole["days"] == pytest.approx(1000 * probed["measured"]["step_s"] / 86400)
    assert whole["cost"] == pytest.approx(whole["days"] * 24 * 2)


def test_a_probe_ends_with_advice(probed, tmp_path):
    """A line each, with what it would gain, measured or planned."""
    advice = {line["about"]: line for line in probed["advice"]}
    assert list(advice) == ["loader", "threads", "checkpoint", "precision", "recomputation"]
    assert "(measured)" in advice["loader"]["text"] and advice["loader"]["gain"] >= 1
    assert "--compute-dtype bf16" in advice["precision"]["text"] and "(planned)" in advice["precision"]["text"]
    assert "--recompute all would be 0." in advice["recomputation"]["text"] and advice["recomputation"]["gain"] < 1
    assert probed["measured"]["checkpoint_pause_s"] > 0 and "a checkpoint stops training for" in advice["checkpoint"]["text"]
    result = ok("probe", "--steps", 3, "--recompute", "all", "--no-checkpoint", "--checkpoint-every", 1, "--threads", 1,
                "--compute-dtype", "bf16", temporary=tmp_path)
    said = [line for line in result.stdout.splitlines() if line.startswith("advice: ")]
    assert len(said) == 5 and result.stdout.splitlines()[-5:] == said
    assert any("recomputation: --recompute none: 1." in line and "more memory (planned)" in line for line in said), said
    assert any("precision: bf16 already" in line for line in said) and any("checkpoint: not measured" in line for line in said)
    if os.cpu_count() > 1:
        assert any("threads: 1 of" in line and "--threads 0 is at most" in line for line in said), said


def test_the_bound_of_a_step_is_below_its_time(probed):
    """The ideal list of the model, segment by segment, and the operations that take the time."""
    bound = probed["bound"]
    assert [segment["name"] for segment in bound["segments"]] == ["embed", "blocks.0", "blocks.1", "final"]
    for segment in bound["segments"]:
        assert segment["seconds"] == pytest.approx(max(segment["flops"] / bound["flops_per_s"], segment["bytes"] / bound["bytes_per_s"]))
    assert bound["seconds"] == pytest.approx(sum(segment["seconds"] for segment in bound["segments"]))
    assert 0 < bound["share"] == pytest.approx(bound["seconds"] / probed["measured"]["step_s"]) and bound["share"] < 1
    assert bound["flops"] == pytest.approx(1e12 * probed["measured"]["tflops"] * probed["measured"]["step_s"])
    shares = [row["share"] for row in bound["operations"]]
    assert shares == sorted(shares, reverse=True) and all(share > 0.01 for share in shares) and sum(shares) <= 1.001
    assert any(row["operation"] == "kiln::affine f32" and row["num"] > 8 for row in bound["operations"]), bound["operations"]


def test_a_probe_honours_the_validation_share(tmp_path):
    """What the run holds out is not trained on, and the memory of a validation is measured."""
    from PIL import Image
    for index in range(40):
        folder = tmp_path / "pictures" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (index, 0, 0)).save(folder / f"{index}.png")
    options = ["--data", tmp_path / "pictures", "--autoencoder", "pixels", "--image-size", 16, "--objective", "flow", "--steps", 2, "--no-checkpoint",
               "--json"]
    samples = [int(re.search(r"(\d+) samples:", run("probe", *options, *share).stderr)[1])
               for share in ([], ["--validation-share", 0.4])]
    assert samples[0] == 40 and 10 < samples[1] < 40
    result = json.loads(run("probe", *options, "--validation-share", 0.4).stdout)
    assert result["measured"]["by_phase"]["validation"] > 0 and "validation" not in result["not_run"]


def test_the_price_of_a_gpu_is_taken_too(tmp_path):
    probed = ok("probe", "--steps", 3, "--json", "--price-per-gpu-hour", 3, "--max-steps", 1000, temporary=tmp_path)
    whole = json.loads(probed.stdout)["extrapolated"]
    assert whole["cost"] == pytest.approx(whole["days"] * 24 * 3)


def test_a_batch_too_large_for_one_pass_is_divided(tmp_path):
    """Without --micro-batch; with it, what does not fit is refused."""
    large = ["--global-batch", 4096, "--memory-budget", "420M", "--steps", 1]
    result = ok("probe", *large, "--json", temporary=tmp_path)
    chosen = int(re.search(r"--micro-batch (\d+) ", result.stderr)[1])
    assert 0 < chosen < 4096
    assert json.loads(result.stdout)["measured"]["peak_bytes"] < 420 << 20
    result = run("probe", *large, "--micro-batch", 4096, temporary=tmp_path)
    assert result.returncode != 0 and "this fits" in result.stderr


def test_ranks_need_no_run_folder_and_passes_are_no_larger_than_what_they_have(tmp_path):
    """The batch is of 8 images, 4 for each rank."""
    common = ["--steps", 2, "--json", "--nproc", 2, "--threads", 1]
    peaks = []
    for micro_batch in (0, 8):
        result = ok("probe", *common, "--micro-batch", micro_batch, temporary=tmp_path)
        assert ("beyond the 4 images" in result.stderr) == (micro_batch == 8)
        probed = json.loads(result.stdout)
        assert probed["measured"]["images_per_s"] > 0
        peaks.append((probed["predicted"]["peak_bytes"], probed["measured"]["peak_bytes"]))
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("batch", [[], pytest.param(["--global-batch", 256], marks=pytest.mark.skipif(
    not FULL, reason="minutes on a CPU"))])
def test_the_plain_command_works_anywhere(batch):
    """The default model; without a batch in seconds, and it says so."""
    result = succeed("probe", "--data", "synthetic", "--device", "cpu", "--steps", 4, "--json", *batch, timeout=3600)
    probed = json.loads(result.stdout)
    assert probed["measured"]["peak_bytes"] == pytest.approx(probed["predicted"]["peak_bytes"], rel=0.03)
    assert ("8 images a step, where kiln train has 256" in result.stderr) == (not batch)


def test_table_for_people():
    result = ok("probe", "--steps", 3)
    assert "not run by a probe: resume\n" in result.stdout
    for text in ("peak memory", "memory of activations", "memory in load", "memory in checkpoint", "time of backward", "steps/s", "waiting for data", "the whole run"):
        assert text in result.stdout, text
    assert re.search(r"\n1 steady step: [\d.]+ steps/s, [\d.]+ images/s\n", result.stdout), "one step has no spread"


@pytest.mark.parametrize("arguments, expected", [(["--steps", 0], "--steps"), (["--profile", "1:2"], "--profile"),
                                                 (["--image-size", 63], "--image-size")])
def test_what_cannot_be_probed_is_refused_in_one_line(arguments, expected, tmp_path):
    result = run("probe", *arguments, temporary=tmp_path)
    assert result.returncode != 0
    assert len(lines_of_errors(result.stderr)) == 1 and expected in result.stderr
    assert not list(tmp_path.iterdir())


def test_training_compares_itself_with_its_plan(tmp_path):
    out = tmp_path / "run"
    ok("train", "--out", out, "--max-steps", 4, "--log-every", 2)
    comparison = read_plan(out)
    assert comparison["measured"]["peak_bytes"] == pytest.approx(comparison["predicted"]["peak_bytes"], rel=0.03)
    report = (out / "report.html").read_text()
    assert "Plan against measurement" in report and "peak memory" in report
    for finding in comparison["findings"]:
        assert finding in report


def test_a_plan_and_a_run_compare_the_rank_with_most_images(tmp_path):
    """7 images on 2 ranks are 3 and 4: figures of the first rank made a finding of a plan that is right."""
    out = tmp_path / "run"
    result = ok("train", "--out", out, "--max-steps", 4, "--global-batch", 7, "--nproc", 2, "--threads", 1,
                "--zero-stage", 2)
    predicted, measured = (read_plan(out)[side] for side in ("predicted", "measured"))
    assert measured["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.03)
    assert sum(measured["by_kind"].values()) == measured["peak_bytes"] == measured["by_phase"]["steady step"]
    # A plan sums the squares over the ranks in the phase that adds them up.
    planned_curve, measured_curve = ([row for row in zip(curve["phase"], curve["by_kind"]["activations"], strict=True)
                                      if row[0] != "communication"] for curve in (predicted["curve"], measured["curve"]))
    assert measured_curve == planned_curve
    assert "peak memory" not in result.stdout


def test_precision_is_audited(tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    result = ok("probe", "--steps", 4, "--audit-precision", "--compute-dtype", "bf16",
                "--report", tmp_path / "report.html", "--json", temporary=folder)
    audit = json.loads(result.stdout)["precision"]
    assert audit["compute_dtype"] == "bf16" and not audit["overflows"]
    assert sum(row["share"] for row in audit["by_dtype"]) == pytest.approx(1)
    products = [row for row in audit["by_dtype"] if row["flops"] > 0]
    assert max(products, key=lambda row: row["flops"])["dtype"] == "bf16", audit["by_dtype"]
    assert {row["segment"] for row in audit["f32"]} >= {"blocks.0", "final", ""}
    assert all(row["from"] != row["to"] and row["bytes"] > 0 for row in audit["casts"])
    report = (tmp_path / "report.html").read_text()
    assert "Precision of a step in bf16" in report and "time by dtype" in report
    assert not list(folder.iterdir())


def test_the_audit_is_printed_and_needs_a_steady_step(tmp_path):
    result = ok("probe", "--steps", 3, "--audit-precision", temporary=tmp_path)
    assert "precision of one step in f32" in result.stdout and "overflows: none" in result.stdout
    assert "advice: the step computes in f32: --compute-dtype bf16" in result.stdout
    result = run("probe", "--steps", 2, "--audit-precision", temporary=tmp_path)
    assert result.returncode != 0 and "--steps expects 3 or more, got 2" in result.stderr


VARIANTS = """
compute-dtype = "f32"

[plain]

[recompute]
on = "plain"
recompute = "all"

[half]
on = "recompute"
compute-dtype = "bf16"

[broken]
zero-stage = 7
"""


def variants(tmp_path, text, *arguments):
    path = tmp_path / "variants.toml"
    path.write_text(text)
    return run("probe", "--variants", path, *arguments, temporary=tmp_path)


@pytest.mark.parametrize("how", [["--steps", 3, "--no-checkpoint"], ["--plan-for", "A100-80G"]])
def test_variants_side_by_side(tmp_path, how):
    """Run, each in its own process, or planned: one table, the gain of each over the one it starts from."""
    result = variants(tmp_path, VARIANTS, "--json", *how)
    assert result.returncode == 0, result.stderr
    table = json.loads(result.stdout)
    assert ("planned on A100-80G" if "--plan-for" in how else "measured on ") in table["source"]
    rows = {row["name"]: row for row in table["variants"]}
    assert list(rows) == ["plain", "recompute", "half", "broken"]
    assert rows["plain"]["changes"] == [] and rows["half"]["changes"] == ["compute-dtype bf16"]
    assert rows["half"]["on"] == "recompute"
    for name, on in (("recompute", "plain"), ("half", "recompute")):
        assert rows[name]["gain"] == pytest.approx(rows[name]["images_per_s"] / rows[on]["images_per_s"])
        assert rows[name]["gain_in_all"] == pytest.approx(rows[name]["images_per_s"] / rows["plain"]["images_per_s"])
    assert rows["recompute"]["memory_bytes"] <= rows["plain"]["memory_bytes"]
    assert "zero-stage" in rows["broken"]["problem"]
    assert "gain" not in rows["broken"] and "step_s" not in rows["broken"]
    if "--plan-for" in how:
        alone = run("plan", "--gpu", "A100-80G", "--json", "--compute-dtype", "bf16", "--recompute", "all")
        planned = json.loads(alone.stdout)["predicted"]
        assert rows["half"]["step_s"] == planned["step_s"] and rows["half"]["memory_bytes"] == planned["needed_bytes"]
    text = variants(tmp_path, VARIANTS, *how[-2:] if "--plan-for" in how else ["--steps", 1, "--no-checkpoint"])
    assert text.returncode == 0 and "in all" in text.stdout and "half          recompute" in text.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["variants.toml"]


def test_an_interrupt_ends_the_comparison(tmp_path):
    """What was measured before is printed; no further variant begins."""
    path = tmp_path / "variants.toml"
    path.write_text('[one]\n\n[two]\n\n[three]\n')

    def interrupted(work):
        command = [program("kiln"), "probe", *OPTIONS, "--variants", path, "--steps", 3 * work, "--no-checkpoint", "--json"]
        with open(tmp_path / "said", "wb") as said:
            process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=said, start_new_session=True)
        begun = lambda: (tmp_path / "said").read_text().count("kiln probe: ")
        if not wait_while_running(process, lambda: begun() == 2):
            return False
        os.killpg(process.pid, signal.SIGINT)
        table = json.loads(process.communicate(timeout=120)[0])
        assert process.returncode == 0
        one, two, three = table["variants"]
        if begun() > 2 or "problem" not in two:
            return False  # The second one had ended before.
        assert one["step_s"] > 0 and two["problem"] == three["problem"] == "stopped by a signal"
        return True

    until_interrupted(interrupted, tries=4)


def planned_variants(recipe):
    return read_json("probe", "--variants", REPOSITORY / "recipes" / recipe / "variants.toml", "--plan-for", "A100-80G",
                     timeout=300)["variants"]


def test_fast_dits_variants():
    """The recipe, planned for an A100: more speed and less memory row by row, pictures encoded in all but the last."""
    rows = planned_variants("fast-dit")
    assert [row["name"] for row in rows] == ["original", "recompute", "amp", "features"]
    speeds = [row["steps_per_s"] for row in rows[1:]]
    assert speeds == sorted(speeds)
    memory = [row["memory_bytes"] for row in rows]
    assert memory == sorted(memory, reverse=True)
    assert [row["encoding_share"] > 0 for row in rows] == [True, True, True, False]


def test_stable_diffusions_variants():
    """What each setting of a DeepSpeed guide brings on 8 cards: memory falls with each, and each one's price is seen."""
    rows = {row["name"]: row for row in planned_variants("sd15")}
    memory = {name: row["memory_bytes"] for name, row in rows.items()}
    order = ["ddp", "fp16", "accumulation", "recompute", "zero-1", "zero-2", "zero-3", "zero-3-cpu"]
    assert [memory[name] for name in order] == sorted((memory[name] for name in order), reverse=True)
    assert memory["zero-2-cpu"] < memory["zero-2"]
    assert rows["fp16"]["gain"] > 2
    assert 0.6 < rows["recompute"]["gain"] < 0.85, "a third more arithmetic"
    assert rows["zero-2-cpu"]["gain"] < 1
    # Of 16 bytes of state a weight, stage 2 leaves 2 and an eighth of 14.
    state = 860e6 * 14 * 7 / 8
    assert memory["recompute"] - memory["zero-2"] == pytest.approx(state, rel=0.2)


@pytest.mark.parametrize("text, expected", [
    ("depth = 2", "has no variants"),
    ('[a]\non = "b"', "on expects a variant before this one"),
    ("[a]\nmicro-bach = 2", "unknown option"),
    ("[a]\n[a.b]\ndepth = 2", "tables are not supported here"),
])
def test_variants_that_make_no_sense(tmp_path, text, expected):
    result = variants(tmp_path, text)
    assert result.returncode == 1 and len(lines_of_errors(result.stderr)) == 1
    assert expected in result.stderr and "variants.toml" in result.stderr
