"""report.html in a real browser: its plots are drawn and nothing is complained about."""

import re
import subprocess

import pytest
from browser import Browser, check_report
from conftest import program
from PIL import Image

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
    arguments = [str(part) for part in [program("kiln"), "train", *OPTIONS, "--out", out]]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def page(run, browser):
    return browser.open(run / "report.html")


def test_every_plot_is_in_the_page(page):
    check_report(page, plots=PLOTS, num_pictures=2)
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
    ("<svg><text class='title'>Loss</text><text class='tick'>1</text><polyline points='1,2'/></svg>", "a plot without a scale"),
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
    check_report(page, headings=["Settings"], rows={"model": "d.t"}, tables=[["run", "loss"]], num_pictures=0)
    for asked in ({"headings": ["Events"]}, {"rows": ["lr"]}, {"rows": {"model": "unet"}}, {"plots": ["Loss"]},
                  {"tables": [["mfu"]]}, {"num_pictures": 1}, {"cards": ["steps"]}):
        with pytest.raises(AssertionError):
            check_report(page, **asked)
