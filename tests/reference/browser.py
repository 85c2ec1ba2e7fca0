"""Reports in a real browser: what the page says and draws, and what the browser complained about.

    with Browser() as browser:
        page = browser.open(run / "report.html")   # Page; a second page costs a tenth of a second
        check_report(page, headings=["Evaluation"], plots=["Loss"], rows={"model": "DiT-S/8", "samples": None})

One headless Chromium serves all pages. It is driven over a pipe with DevTools' messages (JSON, ended by a zero byte).
"""

import base64
import json
import os
import re
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

# What stands on the page, as an object. Cells of a table are its rows' texts, the head included. A plot without a curve
# is one whose polylines and polygons hold no point.
READ_PAGE = """(() => {
  const text = node => node.innerText.trim().replace(/\\s+/g, ' ');
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  return {
    text: document.body.innerText,
    title: document.title,
    headings: all('h1, h2, h3').map(text),
    rows: all('.rows > div').map(row => all(':scope > *', row).map(text)),
    cards: all('.cards > .card').map(card => all(':scope > *', card).map(text)),
    tables: all('table').map(table => all('tr', table).map(row => all('th, td', row).map(text))),
    plots: all('svg').map(svg => ({
      title: all('.title', svg).map(title => title.textContent.trim()).join(' '),
      legend: all('.legend', svg).concat(all('.key > span', svg.parentNode)).map(entry => entry.textContent.trim()),
      ticks: all('.tick', svg).map(tick => tick.textContent.trim()),
      points: all('polyline, polygon', svg).map(line => line.getAttribute('points').trim()).filter(points => points.includes(' '))
        .concat(all('circle', svg).map(point => point.getAttribute('cx') + ',' + point.getAttribute('cy')))
    })),
    pictures: all('img').map(img => ({
      caption: img.closest('figure') ? text(img.closest('figure')) : '',
      loaded: img.complete && img.naturalWidth > 0, width: img.naturalWidth, height: img.naturalHeight
    })),
    width: document.documentElement.scrollWidth
  };
})()"""


def read_data(path):
    """What a page holds, as the program wrote it for its own script: {"title", "sections": [{"title", "parts"}]}."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script', Path(path).read_text(), re.DOTALL)[1])


def parts_of(path, kind):
    """The parts of a kind on a page, in their order."""
    return [part for section in read_data(path)["sections"] for part in section["parts"] if part["kind"] == kind]


class Page:
    """What a browser made of a page.

    errors: what the console and the network complained about. text, title, headings: strings as a reader sees them.
    rows: {label: value} of the lists of names and values (the last one counts where a label stands twice); cards: {name:
    value} of the figures on top; tables: for each one its rows, each a list of cells, the head first. plots: [{title,
    legend, ticks, points}]; pictures: [{caption, loaded, width, height}]; width: the widest content in pixels.
    """

    def __init__(self, browser, session, found, errors):
        self._browser, self._session = browser, session
        self.errors = errors
        self.text, self.title, self.headings = found["text"], found["title"], found["headings"]
        self.row_list, self.tables, self.plots = found["rows"], found["tables"], found["plots"]
        self.rows = {row[0]: row[1] if len(row) > 1 else "" for row in found["rows"]}
        self.cards = {name: value for value, name in found["cards"]}
        self.pictures, self.width = found["pictures"], found["width"]

    def evaluate(self, expression):
        """The value of a JavaScript expression, by way of JSON."""
        return self._browser.evaluate(self._session, expression)

    def screenshot(self, png):
        """Writes the whole page as a picture."""
        made = self._browser.send("Page.captureScreenshot", self._session, captureBeyondViewport=True)
        Path(png).write_bytes(base64.b64decode(made["data"]))

    def table(self, *columns):
        """The first table whose head has these columns, as a list of {column: cell}."""
        for head, *rows in self.tables:
            if set(columns) <= set(head):
                assert all(len(row) == len(head) for row in rows), (head, rows)
                return [dict(zip(head, row)) for row in rows]
        raise AssertionError(f"no table with {columns}; there are {[table[0] for table in self.tables]}")


class Browser:
    """A headless Chromium. open(path) -> Page."""

    def __init__(self, timeout=60):
        program = shutil.which("chromium")
        assert program, "chromium is not installed: scripts/test installs it"
        self.timeout, self._events, self._last_id, self._rest = timeout, [], 0, b""
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                 "--disable-dev-shm-usage", f"--user-data-dir={self._folder.name}"]
        # Chromium reads messages on descriptor 3 and writes its own on 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{read} 4>&{write}', program, *flags], pass_fds=(read, write),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        try:
            self.send("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def open(self, path, width=1300, height=1000, scripts=True):
        """Opens a file or an address in a window of this size and waits until the page and its pictures have loaded. scripts: those of the
        page run."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(domain + ".enable", session)
        self.send("Emulation.setDeviceMetricsOverride", session, width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setScriptExecutionDisabled", session, value=not scripts)
        self._events.clear()
        url = str(path) if str(path).startswith("http://") else Path(path).resolve().as_uri()
        answer = self.send("Page.navigate", session, url=url)
        assert "errorText" not in answer, f"{path}: {answer['errorText']}"
        self._wait(lambda event: event.get("method") == "Page.loadEventFired" and event.get("sessionId") == session)
        found = self.evaluate(session, READ_PAGE)
        return Page(self, session, found, self._complaints(session))

    def evaluate(self, session, expression):
        answer = self.send("Runtime.evaluate", session, expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def send(self, method, session=None, **parameters):
        self._last_id += 1
        number = self._last_id
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda event: event.get("id") == number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _complaints(self, session):
        complaints = []
        for event in self._events:
            method, of = event.get("method"), event.get("params", {})
            if event.get("sessionId") != session:
                continue
            if method == "Runtime.exceptionThrown":
                complaints.append(of["exceptionDetails"].get("exception", {}).get("description") or of["exceptionDetails"]["text"])
            elif method == "Runtime.consoleAPICalled" and of["type"] in ("error", "warning", "assert"):
                complaints.append(" ".join(str(part.get("value", part.get("description"))) for part in of["args"]))
            elif method == "Log.entryAdded" and of["entry"]["level"] in ("error", "warning"):
                complaints.append(of["entry"]["text"] + " " + of["entry"].get("url", ""))
            elif method == "Network.loadingFailed":
                complaints.append(f"not loaded: {of['type']}, {of['errorText']}")
        return complaints

    def _wait(self, wanted):
        """The first message that is wanted; earlier ones are kept as events."""
        deadline = time.monotonic() + self.timeout
        while True:
            while b"\0" in self._rest:
                raw, self._rest = self._rest.split(b"\0", 1)
                message = json.loads(raw)
                self._events.append(message)
                if wanted(message):
                    return message
            ready = select.select([self._in], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"chromium did not answer in {self.timeout} s"
            part = os.read(self._in, 1 << 20)
            assert part, "chromium ended"
            self._rest += part


# A number that is none, or a name of nothing, where a reader expects a value.
NO_VALUE = re.compile(r"(?<![\w/.-])(null|undefined|-?nan|-?inf(inity)?|\[object \w+\])(?![\w/.-])", re.IGNORECASE)


def check_report(page, headings=(), plots=(), rows=(), cards=(), tables=(), pictures=None, may_be_empty=()):
    """Fails unless the page is whole: no complaint, every picture loaded, every plot drawn with a scale, every row, card
    and cell filled with something that is a value, and what is listed is there.

    headings, plots: their beginnings. rows, cards: names, or {name: regular expression that the whole value matches, or
    None}. tables: for each one the columns that it has at least and how many rows. pictures: their own sizes in pixels,
    (width, height), in order; None: any. may_be_empty: names of columns whose cells may be empty or "-".
    """
    assert not page.errors, page.errors
    for picture in page.pictures:
        assert picture["loaded"], f"a picture does not load: {picture}"
    assert pictures is None or [(picture["width"], picture["height"]) for picture in page.pictures] == pictures, page.pictures
    parts = [part for row in page.row_list + [cells for table in page.tables for cells in table] for part in row]
    nothing = [part for part in page.text.splitlines() + parts if NO_VALUE.search(part)]
    assert not nothing, f"no values: {nothing}"
    for row in page.row_list:
        assert len(row) == 2 and all(row), f"a row without a name or value: {row}"
        assert "<" not in row[0] and ">" not in row[0], f"markup as a name: {row}"
    assert all(page.cards.values()), page.cards
    for head, *body in page.tables:
        assert body, f"a table without rows: {head}"
        for cells in body:
            assert len(cells) == len(head), f"cells are missing: {head}, {cells}"
            for column, cell in zip(head, cells):
                assert cell not in ("", "-") or column in may_be_empty or not column, f"no {column} in {cells}"
    for plot in page.plots:
        assert plot["points"], f"a plot without a curve: {plot['title']}"
        assert len(set(plot["ticks"])) >= 2, f"a plot without a scale: {plot}"
        assert not any(NO_VALUE.search(part) for part in plot["legend"] + plot["ticks"] + plot["points"]), plot
    titles = [plot["title"] for plot in page.plots]
    for title in plots:
        assert any(found.startswith(title) for found in titles), f"no plot {title!r} among {titles}"
    for heading in headings:
        assert any(found.startswith(heading) for found in page.headings), f"no heading {heading!r} among {page.headings}"
    for wanted, found in ((rows, page.rows), (cards, page.cards)):
        for name in wanted:
            assert name in found, f"no {name!r} among {list(found)}"
            pattern = wanted[name] if isinstance(wanted, dict) else None
            assert pattern is None or re.fullmatch(pattern, found[name]), f"{name}: {found[name]!r} is not {pattern!r}"
    for columns, num_rows in tables:
        assert len(page.table(*columns)) == num_rows, page.table(*columns)
