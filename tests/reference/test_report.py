"""report.html in a real browser: its plots are drawn and nothing is complained about."""

import re
import shutil
import subprocess

import pytest
from conftest import program
from PIL import Image

OPTIONS = ["--model", "dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 4, "--num-classes", 4,
           "--data", "synthetic", "--autoencoder", "pixels", "--image-size", 16, "--global-batch", 8, "--objective", "flow",
           "--log-every", 2, "--sample-every", 6, "--num-samples", 4, "--num-sampling-steps", 3, "--peak-tflops", 1,
           "--device", "cpu", "--max-steps", 12]
PLOTS = ["Loss", "Loss by timestep", "Throughput, images/s", "Memory, GB", "Time of a step, ms", "Waiting for data",
         "Batches ready", "Learning rate", "Gradient norm", "Memory over a step, MB"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "run"
    arguments = [str(part) for part in [program("kiln"), "train", *OPTIONS, "--out", out]]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return out


def browse(run, *arguments):
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.fail("chromium is not installed: scripts/test installs it")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars",
               f"--user-data-dir={run.parent / 'browser'}", *arguments, (run / "report.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    complaints = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints, complaints
    return result.stdout


def test_every_plot_is_in_the_page(run):
    page = browse(run, "--dump-dom")
    titles = re.findall(r'class="title">([^<]*)<', page)
    for title in PLOTS:
        assert any(found.startswith(title) for found in titles), title
    assert page.count("<svg") == len(titles)
    assert "NaN" not in page and ">nan" not in page and ">inf" not in page
    for kind in ("master", "moments", "activations", "measured"):
        assert f"</i>{kind}</span>" in page, kind
    assert re.search(r"<polygon points=\"[\d., -]+\"", page), "memory is stacked by kind"


def test_the_page_is_painted(run):
    picture = run.parent / "report.png"
    browse(run, f"--screenshot={picture}", "--window-size=1300,2400")
    colors = Image.open(picture).convert("RGB").getcolors(maxcolors=1 << 24)
    shown = {color for count, color in colors if count > 200}
    assert (0x0e, 0xa5, 0xe9) in shown, "the backward part of the step's time"
    assert len(shown) > 8


def test_every_plot_has_a_scale(run):
    """Of one line across a plot nobody can read a value."""
    for plot in re.findall(r"<svg.*?</svg>", (run / "report.html").read_text(), re.DOTALL):
        title = re.search(r'class="title">([^<]*)<', plot)[1]
        assert len(set(re.findall(r'text-anchor="end">([^<]*)<', plot))) >= 2, title


def test_the_page_fits_a_phone(run):
    """Nothing is wider than 360 pixels, and so nothing has to be pushed aside to be read."""
    wrapper = run.parent / "phone.html"
    wrapper.write_text(f"""<html><body><iframe id="page" width="360" height="800" src="{(run / 'report.html').as_uri()}"></iframe>
<script>onload = () => {{ document.title = "width " +
document.getElementById("page").contentDocument.documentElement.scrollWidth; }}</script></body></html>""")
    result = subprocess.run([shutil.which("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                             "--allow-file-access-from-files", f"--user-data-dir={run.parent / 'phone'}", "--dump-dom",
                             wrapper.as_uri()], capture_output=True, text=True, timeout=120)
    width = re.search(r"<title>width (\d+)</title>", result.stdout)
    assert width, result.stdout[:300]
    assert int(width[1]) <= 360
