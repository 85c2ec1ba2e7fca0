"""The pages at the root and in docs/: links lead somewhere, files exist, commands have the program's options, none is long."""

import re
import shlex

import numpy as np
import pytest
from conftest import REPOSITORY, succeed
from PIL import Image
from pipelines import tiny_kl

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]
FOLDERS = "src|tests|tools|scripts|recipes|benchmarks|examples|docs"


def anchors_of(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(linked), f"{target}#{anchor}"
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text):
        assert list(REPOSITORY.glob(path.rstrip("/"))), path


def test_every_page_is_in_the_index():
    index = (REPOSITORY / "docs" / "README.md").read_text()
    pages = [page.name for page in PAGES if page.parent.name == "docs" and page.name != "README.md"]
    assert [name for name in pages if f"]({name}" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_page_is_long(page):
    """700 words in the README, 1,500 in others, without what kiln plan prints and the tables that the program writes."""
    text = re.sub(r"<!-- kiln .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    most = 700 if page == REPOSITORY / "README.md" else 1500
    assert page.name in ("deepspeed_keys.md", "options.md") or len(text.split()) <= most


@pytest.mark.slow
def test_options_of_commands_exist():
    options = {}
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for command, arguments in re.findall(r"(?:^|[`\s(])kiln ([a-z]+(?:-[a-z]+)*)\b([^`|#\n]*)", text, re.MULTILINE):
            named = re.findall(r"(?<![\w-])--[a-z][\w-]*", arguments)
            if named and command not in options:
                shown = succeed(command, "--help", "all")
                options[command] = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", shown.stdout))
            assert set(named) <= options.get(command, set()), f"{page.name}: kiln {command}{arguments}"
    assert len(options) > 8


@pytest.mark.parametrize("command", ["train", "plan", "probe", "sample", "extract", "evaluate"])
def test_help_shows_fifteen_options_and_help_all_the_rest(kiln, command):
    first, rest = kiln(command, "--help").stdout, kiln(command, "--help", "all").stdout
    shown, every = (re.findall(r"^  (?:-h,)?(--[a-z][\w-]*)", text, re.MULTILINE) for text in (first, rest))
    assert len(shown) == 15 and set(shown) < set(every) and first.splitlines()[-1] == f"kiln {command} --help all: the rest"
    if command in ("train", "plan", "probe"):
        page = (REPOSITORY / "docs" / "options.md").read_text()
        assert set(re.findall(r"^\| `(--[\w-]+)`", page, re.MULTILINE)) <= set(every)


def test_every_recipe_is_in_the_catalogue():
    catalogue = (REPOSITORY / "docs" / "recipes.md").read_text()
    recipes = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "recipes").rglob("*.toml")}
    assert set(re.findall(r"`(recipes/[^`]+)`", catalogue)) == recipes


SMALL = {  # of what each command of the README gets, so that its run takes seconds
    "extract": ["--image-size", "64"],
    "train": ["--model", "dit", "--hidden-size", "48", "--depth", "2", "--num-heads", "3", "--patch-size", "4", "--image-size", "64",
              "--num-classes", "2", "--global-batch", "4", "--max-steps", "2", "--peak-tflops", "1"],
    "sample": ["--num-images", "3", "--num-sampling-steps", "2"],
    "convert": [],
}


@pytest.mark.slow
def test_the_run_of_the_readme_runs(tmp_path):
    block = re.search(r"^```\nvae=(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    for place in ("a", "b"):
        (tmp_path / "imagenet/train" / place).mkdir(parents=True)
        for index in range(3):
            picture = np.random.default_rng(index).integers(0, 256, (72, 80, 3), dtype=np.uint8)
            Image.fromarray(picture).save(tmp_path / "imagenet/train" / place / f"{index}.png")
    tiny_kl(tmp_path / "vae")
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    commands = [shlex.split(line.replace("$vae", "vae"), comments=True) for line in block.splitlines()[1:]]
    assert [command[1] for command in commands] == list(SMALL)
    for _, name, *options in commands:
        given = [option for option in SMALL[name] if option.startswith("--")]
        kept = [part for index, part in enumerate(options)
                if part not in given and (index == 0 or options[index - 1] not in given)]
        succeed(name, *kept, *SMALL[name], cwd=tmp_path)
    assert len(np.load(tmp_path / "samples.npz")["arr_0"]) == 3
    assert (tmp_path / "dit-xl-2/model_index.json").exists()


def test_environment_variables_are_on_their_page():
    page = (REPOSITORY / "docs" / "environment.md").read_text()
    sources = "\n".join(path.read_text() for path in (REPOSITORY / "src").rglob("*.cpp"))
    read = set(re.findall(r'"(KILN_[A-Z_]+)"', sources)) - {"KILN_ERROR_FD"}  # how a launcher hears of its ranks' errors
    assert len(read) > 4 and [name for name in read if f"`{name}`" not in page] == []
