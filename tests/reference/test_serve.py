"""kiln serve: pages that grow with their runs, requests to a run, the playground, and what a stranger can do: nothing."""

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from browser import Browser, check_report
from conftest import assert_refused, program, succeed
from interruptions import wait_until
from test_report import OPTIONS

TRAINING = [*OPTIONS[:-1], 100000, "--log-every", 1, "--sample-every", 100000, "--checkpoint-every", 0]


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("serve") / "run"
    succeed("train", *OPTIONS, "--out", out)
    return out


class Served:
    """A kiln serve of these runs. address: with the token."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([str(word) for word in (program("kiln"), "serve", "--port", 0, *arguments)],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{64})", self.address)
        assert found, self.address + self.process.stderr.read()
        self.port, self.token = int(found[1]), found[2]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        assert self.process.wait(20) == 0

    def ask(self, method, path, body=None, **headers):
        """(status, headers, body) of an answer. The token is in the header, unless headers say otherwise."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        given = {"X-Kiln-Token": self.token} | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {name: value for name, value in given.items() if value is not None})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()

    def raw(self, text):
        """The status that these bytes are answered with; 0: the connection was closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(text if isinstance(text, bytes) else text.encode())
            try:
                answer = connection.recv(4096)
            except ConnectionResetError:
                answer = b""
        return int(answer.split()[1]) if answer else 0

    def shown(self, path="/0/"):
        """What the page holds, as JSON."""
        status, _, body = self.ask("GET", path)
        assert status == 200
        return json.loads(re.search(r'id="data">(.*?)</script', body.decode(), re.DOTALL)[1])


def kinds(data):
    return {part["kind"] for section in data["sections"] for part in section["parts"]}


def texts(data):
    return " ".join(part["text"] for section in data["sections"] for part in section["parts"] if part["kind"] == "text")


def line(step, loss, **more):
    return json.dumps({"step": step, "images_seen": 8 * step, "loss": loss, "loss_quartiles": [loss, loss, loss, loss], "lr": 1e-4,
                       "grad_norm": 0.5, "images_per_s": 100.0, "tflops": 0.5, "peak_share": 0.5, "host_bytes": 10**9,
                       "peak_host_bytes": 10**9, "train_seconds": step / 10, "phase_s": {"forward": 0.02, "backward": 0.04, "data": 0.01},
                       **more}) + "\n"


def hand_made(folder, lines):
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text(lines)
    return folder


class Training(subprocess.Popen):
    """A kiln train that logs each step. It writes to files: pipes that nobody reads would stop it after 360 steps."""

    def __init__(self, out, *more):
        command = [program("kiln"), "train", *TRAINING, "--out", out, *more]
        self.said = [open(f"{out}.{name}", "w+") for name in ("stdout", "stderr")]
        super().__init__([str(word) for word in command], stdout=self.said[0], stderr=self.said[1])

    def communicate(self, input=None, timeout=None):
        self.wait(timeout)
        for file in self.said:
            file.seek(0)
        return tuple(file.read() for file in self.said)


def num_lines(run):
    return (run / "log.jsonl").read_text().count("\n") if (run / "log.jsonl").exists() else 0


def ask_by_file(run, name):
    (run / "requests" / name).touch()
    return run / "requests" / name


# --- pages ---


@pytest.mark.slow
def test_the_page_of_a_run_is_its_report(run, browser):
    with Served(run) as served:
        page = browser.open(served.address)
        assert page.evaluate("location.pathname + location.search") == "/0/", "the token does not stay in the address"
        check_report(page, headings=["run", "Ask the run", "Draw from the newest checkpoint", "Plan against measurement", "Samples over time"],
                     plots=["Loss", "Throughput", "Memory, GB", "Memory over a step"], cards=["steps"], rows={"model": "dit"},
                     pictures=[(38, 38)] * 2)
        assert "Last line at" in page.text
        assert page.evaluate("performance.getEntriesByType('resource').every(one => one.name.startsWith(location.origin))")


@pytest.mark.slow
def test_curves_arrive_while_the_page_is_open(tmp_path, browser):
    run = hand_made(tmp_path / "a run", "".join(line(step, 1 / step) for step in range(1, 11)))
    with Served(run) as served:
        page = browser.open(served.address)
        assert page.cards["steps"] == "10" and "Stalls by cause" in page.headings
        assert page.table("cause", "a step", "of the time")[0]["of the time"] == "14.3 %"
        with open(run / "log.jsonl", "a") as log:
            log.write("".join(line(step, 1 / step) for step in range(11, 31)) + '{"step": 31, "lo')
        steps = "[...document.querySelectorAll('.card')].find(card => card.innerText.endsWith('steps')).querySelector('b').innerText"
        wait_until(lambda: page.evaluate(steps) == "30", pause_s=0.1, limit_s=20)
        # A resume that cuts lines writes another file.
        (run / "new").write_text("".join(line(step, 1 / step) for step in range(1, 6)))
        (run / "new").replace(run / "log.jsonl")
        wait_until(lambda: page.evaluate(steps) == "5", pause_s=0.1, limit_s=20)


def test_several_runs_are_overlaid(run, tmp_path, browser):
    other = hand_made(tmp_path / "run", line(1, 0.5) + line(2, 0.4) + '["no object"]\n{"event": 3}\n')
    with Served(run, other) as served:
        page = browser.open(served.address)
        names = [str(run), str(other)]  # the folders share a name
        loss = next(plot for plot in page.plots if plot["title"] == "Loss")
        assert loss["legend"] == names and len(loss["points"]) == 2 and not page.errors
        assert page.pictures and all(picture["loaded"] for picture in page.pictures)
        assert page.evaluate("[...document.querySelectorAll('a')].map(link => link.pathname)") == ["/0/", "/1/"]
        page = browser.open(served.address.replace("/?", "/0/?"))  # the browser has the cookie by now
        assert page.title == names[0] and page.evaluate("document.querySelectorAll('button').length") == 4


@pytest.mark.nothing_beside
def test_ten_runs_of_100000_steps_open_in_a_second(tmp_path, browser):
    log = "".join(line(step, 1 + step % 7) for step in range(10, 100001, 10))
    runs = [hand_made(tmp_path / f"run {index}", log) for index in range(10)]
    (tmp_path / "empty.html").write_text("<p>")
    browser.open(tmp_path / "empty.html")  # its own start does not count
    with Served(*runs) as served:
        begin = time.monotonic()
        page = browser.open(served.address)
        seconds = time.monotonic() - begin
        assert seconds < 1 and len(page.plots) > 2, seconds
        wait_until(lambda: "of the log is read" not in texts(served.shown("/9/")), limit_s=60)
        data = served.shown("/9/")
        loss = next(part for section in data["sections"] for part in section["parts"] if part["kind"] == "plot" and part["title"] == "Loss")
        means, lowest, highest = (loss["series"][index] for index in (0, 3, 4))
        assert 300 <= len(means["x"]) <= 600 and means["x"][-1] > 99000
        assert set(lowest["y"][:-1]) == {1} and set(highest["y"][:-1]) == {7} and all(3.4 < value < 4.6 for value in means["y"][:-1])
        assert ["100000", "steps"] in [item for section in data["sections"] for part in section["parts"] if part["kind"] == "figures"
                                       for item in part["items"]]


def test_a_run_that_is_no_run_is_refused(tmp_path):
    assert_refused(["serve", tmp_path], "is not a run folder")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hand_made(tmp_path / "run", "")
        assert_refused(["serve", tmp_path / "run", "--port", taken.getsockname()[1]], "--port")


# --- requests ---


@pytest.mark.slow
def test_buttons_ask_a_run(tmp_path, browser):
    out = tmp_path / "run"
    process = Training(out)
    wait_until(lambda: num_lines(out) > 2, running=[process])
    with Served(out) as served:
        page = browser.open(served.address)

        def press(name):
            page.evaluate(f"[...document.querySelectorAll('button')].find(node => node.innerText === '{name}').click()")

        press("Checkpoint now")
        wait_until(lambda: list(out.glob("checkpoints/step-*/train_state.json")), running=[process])
        press("Sample now")
        grid = wait_until(lambda: list(out.glob("samples/*.png")), running=[process])[0]
        wait_until(lambda: page.evaluate("[...document.images].map(picture => picture.src).join()").endswith(f"/0/samples/{grid.name}"),
                   running=[process], limit_s=30)
        wait_until(lambda: not os.listdir(out / "requests"), running=[process])
        press("Stop")
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0 and "stopped by a request after step" in stdout and "is no request" not in stderr, stdout + stderr
        assert not os.listdir(out / "requests")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shell_asks_a_run(tmp_path, ranks):
    out = tmp_path / "run"
    (out / "requests").mkdir(parents=True)
    ask_by_file(out, "stop")  # meant for an earlier process
    process = Training(out, "--nproc", ranks)
    wait_until(lambda: num_lines(out) > 2, running=[process])
    asked = ask_by_file(out, "checkpoint")
    wait_until(lambda: not asked.exists(), running=[process])
    assert len(list(out.glob("checkpoints/step-*/train_state.json"))) == 1, "it is removed when the checkpoint is whole"
    asked = ask_by_file(out, "sample")
    wait_until(lambda: not asked.exists(), running=[process])
    assert len(list(out.glob("samples/*.png"))) == 1
    ask_by_file(out, "stop")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped by a request" in stdout, stderr
    steps = int(re.search(r"stopped by a request after step (\d+)", stdout)[1])
    assert (out / f"checkpoints/step-{steps:08}/train_state.json").exists()


@pytest.mark.slow
def test_requests_change_no_number(tmp_path):
    out, plain = tmp_path / "asked", tmp_path / "plain"
    process = Training(out)
    for name in ("checkpoint", "sample", "stop"):
        reached = num_lines(out)
        wait_until(lambda: num_lines(out) > reached + 2, running=[process])
        asked = ask_by_file(out, name)
        wait_until(lambda: not asked.exists() or process.poll() is not None)
    assert process.wait(60) == 0
    reached = json.loads((out / "log.jsonl").read_text().splitlines()[-1])["step"]
    succeed("train", *TRAINING, "--max-steps", reached, "--out", plain)
    losses = [[json.loads(text)["loss"] for text in (folder / "log.jsonl").read_text().splitlines() if '"loss"' in text]
              for folder in (out, plain)]
    assert losses[0] == losses[1]


def test_what_is_no_request_is_one_warning_and_is_left_alone(tmp_path):
    out, secret = tmp_path / "run", tmp_path / "secret"
    secret.write_text("mine")
    process = Training(out)
    wait_until(lambda: num_lines(out) > 2, running=[process])
    (out / "requests/stop").symlink_to(secret)
    (out / "requests/checkpoint").mkdir()
    os.mkfifo(out / "requests/sample")
    (out / "requests/\x1b[2J; rm -rf").touch()
    reached = num_lines(out)
    wait_until(lambda: num_lines(out) > reached + 50, running=[process])
    time.sleep(0.5)
    assert not list(out.glob("checkpoints/step-*")) and not list(out.glob("samples/*"))
    for name in os.listdir(out / "requests"):
        path = out / "requests" / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    ask_by_file(out, "stop")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and secret.read_text() == "mine"
    warnings = [text for text in stderr.splitlines() if "is no request" in text]
    assert len(warnings) == 1 and "\x1b" not in stderr, stderr


def test_a_run_that_draws_no_grids_says_so(tmp_path):
    out = tmp_path / "run"
    process = Training(out, "--sample-every", 0)
    wait_until(lambda: num_lines(out) > 2, running=[process])
    asked = ask_by_file(out, "sample")
    wait_until(lambda: not asked.exists(), running=[process])
    ask_by_file(out, "stop")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and stderr.count("no grid is drawn on request: the run has no --sample-every") == 1


# --- the playground ---


@pytest.mark.slow
def test_the_playground_draws_what_kiln_sample_draws(run, browser, tmp_path):
    with Served(run) as served:
        page = browser.open(served.address)
        for field, value in {"classes": "3,1", "seed": "5", "guidance": "2", "steps": "4", "images": "2"}.items():
            page.evaluate(f"document.querySelector('input[name={field}]').value = '{value}'")
        page.evaluate("[...document.querySelectorAll('button')].find(node => node.innerText === 'Draw').click()")
        loaded = "[...document.images].filter(picture => picture.src.includes('/draws/') && picture.complete).map(picture => picture.naturalWidth)"
        assert wait_until(lambda: page.evaluate(loaded), pause_s=0.1)[0] > 16
        assert page.evaluate("document.querySelector('input[name=seed]').value") == "5", "a form keeps what was typed"
        assert page.evaluate("[...document.querySelectorAll('figcaption')].map(node => node.innerText)").count("3,1, seed 5, guidance 2, 4 steps") == 1
        _, _, drawn = served.ask("GET", "/0/draws/1.png")
    succeed("sample", "--run", run, "--classes", "3,1", "--seed", 5, "--cfg-scale", 2, "--num-sampling-steps", 4, "--num-images", 2,
            "--grid", "--threads", 1, "--out", tmp_path / "drawn")
    assert drawn == (tmp_path / "drawn/grid.png").read_bytes()


@pytest.mark.parametrize("fields", [{"seed": "-1"}, {"seed": "1; ls"}, {"steps": "0"}, {"images": "17"}, {"guidance": "nan"}, {"classes": 3},
                                    {"classes": "x" * 3000}, [], "text"])
def test_what_cannot_be_drawn_is_refused_at_once(run, fields):
    with Served(run) as served:
        assert served.ask("POST", "/0/draw", json.dumps(fields))[0] == 400
        assert "not drawn" not in texts(served.shown())


def test_what_kiln_sample_refuses_is_said_on_the_page(run):
    with Served(run) as served:
        assert served.ask("POST", "/0/draw", json.dumps({"classes": "--out=/tmp/x"}))[0] == 200
        assert served.ask("POST", "/0/draw", "{}")[0] in (200, 400), "one at a time"
        said = wait_until(lambda: re.search(r"not drawn: .*", texts(served.shown())), pause_s=0.1)[0]
        assert "--out=/tmp/x" in said


# --- strangers ---


def test_every_address_needs_the_token(run):
    with Served(run) as served:
        for path in ("/", "/0/", "/0/events", "/0/samples/step-00000006.png", "/favicon.ico", "/?token=" + "0" * 64, "/0/?token=" + served.token):
            for token in (None, "0" * 64, served.token[:-1]):
                status, headers, body = served.ask("GET", path, X_Kiln_Token=token)
                assert status == 401 and len(body) < 100 and "Set-Cookie" not in headers, path
        assert served.ask("POST", "/0/requests/stop", "", X_Kiln_Token=None)[0] == 401
        status, headers, _ = served.ask("GET", f"/?token={served.token}", X_Kiln_Token=None)
        cookie = headers["Set-Cookie"]
        assert status == 303 and headers["Location"] == "/" and cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
        status, headers, _ = served.ask("GET", "/0/", X_Kiln_Token=None, Cookie="a=b; " + cookie.split(";")[0])
        assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"] and headers["X-Content-Type-Options"] == "nosniff"
    assert os.listdir(run / "requests") == []


@pytest.mark.parametrize("headers, status", [
    ({"Host": "evil.example"}, 421), ({"Host": "127.0.0.1"}, 421), ({"Host": "127.0.0.1.evil.example:{port}"}, 421), ({"Host": ""}, 421),
    ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Origin": "http://127.0.0.1:1"}, 403),
    ({"Origin": "https://127.0.0.1:{port}"}, 403), ({"Transfer-Encoding": "chunked"}, 411),
    ({"Origin": "http://127.0.0.1:{port}"}, 200), ({"Origin": "http://localhost:{port}", "Host": "localhost:{port}"}, 200), ({}, 200)])
def test_another_host_or_origin_can_ask_nothing(tmp_path, headers, status):
    run = hand_made(tmp_path / "run", line(1, 0.5))
    with Served(run) as served:
        given = {"Host": "127.0.0.1:{port}", "X-Kiln-Token": served.token, **headers}
        if "Transfer-Encoding" not in given:
            given["Content-Length"] = "0"
        head = "".join(f"{name}: {value.replace('{port}', str(served.port))}\r\n" for name, value in given.items())
        assert served.raw(f"POST /0/requests/stop HTTP/1.1\r\n{head}\r\n") == status
        assert (run / "requests/stop").exists() == (status == 200)
        # A page has the cookie instead, and then needs its origin.
        cookie = f"kiln-{served.port}={served.token}"
        if not headers:
            assert served.ask("POST", "/0/requests/sample", "", X_Kiln_Token=None, Cookie=cookie)[0] == 403
            assert not (run / "requests/sample").exists()


def test_no_request_names_a_file(run):
    inside = run / "samples/step-00000006.png"
    with Served(run) as served:
        assert served.ask("GET", f"/0/samples/{inside.name}")[2] == inside.read_bytes()
        for path in ("/0/samples/../config.json", "/0/samples/..%2fconfig.json", "/0/samples//etc/passwd", "/0/samples/%2e%2e/config.json",
                     "/0/config.json", "/0/samples/", "/0/draws/../config.json", "/0/draws/1.png", "/1/", "/-1/", "/99999999999999999999/",
                     "/0", "/0/requests/stop", "/..", "//", "/0/samples/step-00000006.png/", "/0/samples/step-00000006.png%00"):
            assert served.ask("GET", path)[0] in (400, 404), path
        for path in ("/0/requests/../stop", "/0/requests/..%2fstop", "/0/requests/", "/0/requests/kill", "/0/", "/", "/0/samples/a"):
            assert served.ask("POST", path, "")[0] in (400, 404), path
        for method in ("PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            assert served.ask(method, "/0/")[0] in (400, 405), method
    assert os.listdir(run / "requests") == []


@pytest.mark.slow
def test_what_is_too_much_is_refused(run):
    with Served(run) as served:
        assert served.ask("POST", "/0/draw", "x" * 20000)[0] == 413
        assert served.ask("GET", "/" + "a" * 2000)[0] == 414
        assert served.ask("GET", "/0/", Range="bytes=0-99999999")[0] == 416
        for endless in (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000, b"GET / HTTP/1.1\r\na: " + b"b" * 100000):
            with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(endless)
                assert re.match(rb"$|HTTP/1.1 4", connection.recv(4096)), "it is refused, or the connection is cut"
        slow = socket.create_connection(("127.0.0.1", served.port))  # it does not keep the server from ending, either
        slow.sendall(b"GET / HTTP/1.1\r\n")
        head = f"Host: 127.0.0.1:{served.port}\r\nX-Kiln-Token: {served.token}\r\n"
        feeds = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(16)]
        for feed in feeds:
            feed.sendall(f"GET /0/events HTTP/1.1\r\n{head}\r\n".encode())
            assert feed.recv(15) == b"HTTP/1.1 200 OK"
        assert served.raw(f"GET /0/events HTTP/1.1\r\n{head}\r\n") == 503
        for feed in feeds:
            feed.close()
        wait_until(lambda: served.raw(f"GET /0/events HTTP/1.1\r\n{head}\r\n") == 200, pause_s=0.2, limit_s=20)
        for garbage in (b"\0\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /\r\n\r\n"):
            assert served.raw(garbage + b"\r\n\r\n") in (0, 400, 421), garbage
        assert served.ask("GET", "/0/")[0] == 200, "it goes on"
    slow.close()


@pytest.mark.slow
def test_a_hostile_page_in_another_tab_can_do_nothing(tmp_path, browser):
    """The browser has the cookie, and another local server has a page that knows everything but the token."""
    run = hand_made(tmp_path / "run", line(1, 0.5))
    with Served(run) as served:
        browser.open(served.address)
        there = f"http://127.0.0.1:{served.port}"
        script = f"""<!DOCTYPE html><script>
const done = [], attempt = (name, promise) => promise.then(() => done.push(name + ' worked'), () => done.push(name + ' failed'));
const tries = [
  attempt('read', fetch('{there}/0/', {{credentials: 'include'}}).then(reply => reply.text())),
  attempt('ask', fetch('{there}/0/requests/stop', {{method: 'POST', credentials: 'include', body: '{{}}'}}).then(reply => reply.text())),
  attempt('ask blindly', fetch('{there}/0/requests/stop', {{method: 'POST', mode: 'no-cors', credentials: 'include'}})
    .then(reply => {{ if (reply.type === 'opaque') throw 0; }})),
  attempt('preflight', fetch('{there}/0/requests/stop', {{method: 'POST', headers: {{'X-Kiln-Token': 'x'}}}})),
  attempt('feed', new Promise((resolve, reject) => {{ const feed = new EventSource('{there}/0/events', {{withCredentials: true}});
    feed.onmessage = resolve; feed.onerror = reject; }})),
];
Promise.all(tries).then(() => document.title = done.sort().join(', '));
</script><form method="post" action="{there}/0/requests/checkpoint" target="frame"></form><iframe name="frame" src="{there}/0/"></iframe>
<script>document.forms[0].submit();</script>"""

        class Hostile(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(script.encode())

            def log_message(self, *_):
                pass

        hostile = HTTPServer(("127.0.0.1", 0), Hostile)
        threading.Thread(target=hostile.serve_forever, daemon=True).start()
        try:
            page = browser.open(f"http://127.0.0.1:{hostile.server_port}/")
            said = wait_until(lambda: page.evaluate("document.title"), pause_s=0.1, limit_s=30)
        finally:
            hostile.shutdown()
        assert said == "ask blindly failed, ask failed, feed failed, preflight failed, read failed"
        assert not (run / "requests").exists()


def test_read_only_shows_and_does_nothing(run, browser):
    with Served(run, "--read-only") as served:
        data = served.shown()
        assert not kinds(data) & {"forms"} and "plot" in kinds(data)
        for path in ("/0/requests/stop", "/0/draw"):
            assert served.ask("POST", path, "{}")[0] == 403
        page = browser.open(served.address)
        check_report(page, plots=["Loss"])
        assert page.evaluate("document.querySelectorAll('button, input').length") == 0
    assert os.listdir(run / "requests") == []


@pytest.mark.slow
def test_a_run_of_a_stranger_is_shown_as_text(tmp_path, browser):
    nasty = "<img src=x onerror=alert(1)>"
    run = hand_made(tmp_path / "run", line(1, 0.5, event=nasty, **{nasty: nasty}) + '{"step": "x", "loss": {}}\n{"event": "stage", "step": "1"}\n'
                    + "x" * (5 << 20) + "\n" + line(2, 0.25))
    (run / "samples").mkdir()
    (run / "samples" / f"{nasty.replace('/', '')}.png").write_text("no picture")
    with Served(run) as served:
        wait_until(lambda: served.process.poll() is None and "of the log is read" not in texts(served.shown()), limit_s=20)
        page = browser.open(served.address)
        assert not any("alert" in error for error in page.errors)
        assert page.evaluate("document.querySelectorAll('[onerror]').length") == 0
