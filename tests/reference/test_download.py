"""kiln download against a server on this machine: whole files or none, one line for what goes wrong."""

import hashlib
import http.server
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FULL, REPOSITORY, program, run_program

COMMIT = "a" * 40
FIDS = REPOSITORY / "examples/check_published_fids.sh"
OWN = "DiT-XL-2-512x512.pt"  # a file without a published hash
HASHED = "DiT-XL-2-256x256.pt"


class Server:
    """Serves `files` by path. `cuts` connections end in the middle; those of `moved` are redirected to `redirect`. `wrong`
    answers, by path, come from functions of the request instead, one a request."""

    def __init__(self):
        self.files, self.log, self.cuts, self.status, self.ranges = {}, [], 0, {}, True
        self.redirect, self.moved, self.etag, self.wrong = None, set(), True, {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                outer.answer(self)

            def do_CONNECT(self):  # as a proxy, which lets nothing through
                outer.log.append((self.path, dict(self.headers)))
                self.send_error(502)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request):
        path = request.path.split("?")[0]
        self.log.append((path, dict(request.headers)))
        if self.wrong.get(path):
            self.wrong[path].pop(0)(request)
            return
        status = self.status.get(path)
        if isinstance(status, list):  # of the next requests
            status = status.pop(0) if status else None
        if status or path not in self.files:
            request.send_error(status or 404)
            return
        if path in self.moved:
            request.send_response(302)
            request.send_header("Location", self.redirect + path)
            request.end_headers()
            return
        body = self.files[path]
        tag = '"' + hashlib.md5(body).hexdigest() + '"'
        first = 0
        wanted = re.match(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if wanted and self.ranges and request.headers.get("If-Range", tag) == tag:
            first = int(wanted.group(1))
        request.send_response(206 if first else 200)
        if self.etag:
            request.send_header("ETag", tag)
        rest = body[first:]
        request.send_header("Content-Length", str(len(rest)))
        if first:
            request.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        request.end_headers()
        if self.cuts and len(rest) > 1:
            self.cuts -= 1
            request.wfile.write(rest[: max(1, len(rest) // 2)])
            request.wfile.flush()
            request.connection.shutdown(2)
            return
        request.wfile.write(rest)

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def requests_of(self, path):
        return [headers for asked, headers in self.log if asked == path]


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def caches_of_its_own(folder, server):
    return {"HF_HOME": str(folder / "hf"), "KILN_CACHE": str(folder / "own"), "HF_ENDPOINT": server.url,
            "HOME": str(folder), "PATH": os.environ["PATH"], "OMP_WAIT_POLICY": "passive",
            "https_proxy": "http://127.0.0.1:9"}  # the authors' own address is never reached


@pytest.fixture
def run(tmp_path, server):
    """run(*arguments) of kiln with caches of its own and the server as hub and mirror."""
    def call(*arguments, mirror=True, limit_bytes=None, timeout=300, **environment):
        names = caches_of_its_own(tmp_path, server) | ({"KILN_MIRROR": server.url} if mirror else {})
        if not limit_bytes:
            return run_program("kiln", *arguments, timeout=timeout, env=names | environment, cwd=tmp_path)
        limited = ["bash", "-c", f'trap "" XFSZ; ulimit -f {limit_bytes // 1024}; exec "$@"', "_", program("kiln"), *map(str, arguments)]
        return subprocess.run(limited, capture_output=True, text=True, timeout=timeout, env=names | environment, cwd=tmp_path)
    return call


def answer(status, body, **headers):
    """Sends exactly this: a length is among the headers or there is none."""
    def send(request):
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)
        request.close_connection = True
    return send


def leave_partial(tmp_path, content, known):
    partial = tmp_path / "own" / (OWN + ".incomplete")
    partial.parent.mkdir()
    partial.write_bytes(content)
    Path(str(partial) + ".etag").write_text(known)


def kept(tmp_path):
    return sorted(str(path.relative_to(tmp_path)) for folder in ("own", "hf") for path in (tmp_path / folder).rglob("*")
                  if not path.is_dir() and not path.name.endswith(".lock"))


def error_line(result):
    assert result.returncode == 1, result.stdout
    lines = [line for line in result.stderr.splitlines() if not re.match(r"kiln download: \S+ \(.*\) from |DiT-XL|sd-vae", line)]
    assert len(lines) == 1, result.stderr
    return lines[0]


def content(result):
    """Of the file that a download names."""
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip()).read_bytes()


def assert_nothing_left(run, tmp_path, expected, *arguments, **options):
    """Of a download that ends with one line."""
    assert expected in error_line(run("download", *arguments, **options))
    assert kept(tmp_path) == []


BODY = bytes(range(256)) * 5000
TAG = '"' + hashlib.md5(BODY).hexdigest() + '"'
HALF = len(BODY) // 2


@pytest.mark.slow
def test_a_file_is_fetched_once_and_trusted(run, server, tmp_path):
    server.files["/" + OWN] = BODY
    result = run("download", "DiT-XL-2-512x512")
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip())
    assert path.read_bytes() == BODY and "CC BY-NC 4.0" in result.stderr
    digest = hashlib.sha256(BODY).hexdigest()
    assert f"trusted from now on: {digest}" in result.stderr
    assert run("download", "DiT-XL-2-512x512", "--offline").stdout.strip() == str(path)
    assert len(server.requests_of("/" + OWN)) == 1
    path.unlink()  # fetched anew, it must be the same
    server.files["/" + OWN] = BODY[::-1]
    assert "SHA-256" in error_line(run("download", "DiT-XL-2-512x512"))
    assert kept(tmp_path) == [f"own/{OWN}.sha256"]


def test_cut_connections_go_on(run, server):
    server.files["/" + OWN] = BODY
    server.cuts = 3
    assert content(run("download", "DiT-XL-2-512x512")) == BODY
    asked = server.requests_of("/" + OWN)
    assert [headers.get("Range") for headers in asked] == [None, "bytes=640000-", "bytes=960000-", "bytes=1120000-"]
    assert all("If-Range" in headers for headers in asked[1:])


def test_a_process_that_ended_goes_on(run, server, tmp_path):
    server.files["/" + OWN] = BODY
    leave_partial(tmp_path, BODY[:1000], TAG)
    assert content(run("download", "DiT-XL-2-512x512")) == BODY
    assert server.requests_of("/" + OWN)[0]["Range"] == "bytes=1000-"


@pytest.mark.parametrize("how", ["changed", "no ranges", "no etag"])
def test_a_rest_that_does_not_fit_is_not_appended(run, server, tmp_path, how):
    server.files["/" + OWN] = BODY
    server.ranges, server.etag = how != "no ranges", how != "no etag"
    leave_partial(tmp_path, b"x" * 1000, '"another"' if how == "changed" else "")
    assert content(run("download", "DiT-XL-2-512x512")) == BODY


REST = {"Content_Length": HALF, "Content_Range": f"bytes {HALF}-{len(BODY) - 1}/{len(BODY)}", "ETag": TAG}


@pytest.mark.parametrize("rest", [
    answer(206, BODY[HALF:], **REST),  # of the new version, whatever If-Range said
    answer(206, BODY[HALF:], **REST | {"ETag": 'W/"old"'}),
    answer(206, BODY[HALF:], Content_Length=HALF, Content_Range=REST["Content_Range"]),
    answer(206, BODY, Content_Length=len(BODY), Content_Range=f"bytes 0-{len(BODY) - 1}/{len(BODY)}", ETag='"old"'),
    answer(206, BODY, Content_Length=len(BODY), ETag='"old"'),
    answer(206, BODY[HALF:], **REST | {"ETag": '"old"', "Content_Range": f"bytes {HALF}-{len(BODY) - 1}/*"}),
    answer(206, b"", Content_Length=0, ETag='"old"'),
    answer(416, b"", Content_Length=0, Content_Range=f"bytes */{HALF - 1}", ETag='"old"'),
    answer(416, b"", Content_Length=0, Content_Range=f"bytes */{HALF}", ETag='"new"'),
    answer(416, b"", Content_Length=0),
], ids=["other tag", "weak tag", "no tag", "other place", "no range", "no total", "empty", "416 other total", "416 other tag", "416 no total"])
def test_finding_4_versions_are_not_joined(run, server, tmp_path, rest):
    leave_partial(tmp_path, b"x" * HALF, '"old"')
    server.files["/" + OWN], server.wrong["/" + OWN] = BODY, [rest]
    assert content(run("download", "DiT-XL-2-512x512")) == BODY
    asked = server.requests_of("/" + OWN)
    assert asked[0]["Range"] == f"bytes={HALF}-" and "Range" not in asked[1]
    assert kept(tmp_path) == [f"own/{OWN}", f"own/{OWN}.sha256"]


def test_finding_4_the_total_is_that_of_the_beginning(run, server, tmp_path):
    """The same tag with another length: the server says 400 kB where 500 kB have come."""
    leave_partial(tmp_path, BODY[:HALF], f"{TAG}\n{len(BODY)}\n")
    server.files["/" + OWN] = BODY
    server.wrong["/" + OWN] = [answer(416, b"", Content_Length=0, Content_Range=f"bytes */{HALF}", ETag=TAG),
                               answer(200, BODY[:HALF], Content_Length=len(BODY), ETag=TAG),
                               answer(206, BODY[HALF:], **REST | {"Content_Range": f"bytes {HALF}-{len(BODY) - 1}/{len(BODY) + 1}"})]
    assert content(run("download", "DiT-XL-2-512x512")) == BODY
    assert [headers.get("Range") for headers in server.requests_of("/" + OWN)] == [f"bytes={HALF}-", None, f"bytes={HALF}-", None]


def test_finding_4_a_rest_that_fits_is_appended(run, server, tmp_path):
    leave_partial(tmp_path, BODY[:HALF], f"{TAG}\n{len(BODY)}\n")
    server.wrong["/" + OWN] = [answer(206, BODY[HALF:HALF + 1000], **REST | {"Content_Length": 1000}),  # a part of the rest
                               answer(206, BODY[HALF + 1000:], Content_Length=HALF - 1000, ETag=TAG,
                                      Content_Range=f"bytes {HALF + 1000}-{len(BODY) - 1}/{len(BODY)}")]
    assert content(run("download", "DiT-XL-2-512x512")) == BODY


def test_finding_4_what_is_whole_needs_its_name_only(run, server, tmp_path):
    leave_partial(tmp_path, BODY, f"{TAG}\n{len(BODY)}\n")
    assert content(run("download", "DiT-XL-2-512x512")) == BODY
    assert server.log == []


@pytest.mark.slow
def test_finding_4_a_server_that_always_mixes_versions_is_given_up(run, server, tmp_path):
    server.wrong["/" + OWN] = [answer(200, BODY[:HALF], Content_Length=len(BODY), ETag=f'"{n}"') if n % 2 == 0 else
                               answer(206, BODY[HALF:], **REST) for n in range(20)]
    assert_nothing_left(run, tmp_path, "sends parts of different versions", "DiT-XL-2-512x512")


def test_finding_4_a_length_is_required(run, server, tmp_path):
    """Where neither size nor hash is known, half a file would look like all of it."""
    server.wrong["/" + OWN] = [answer(200, BODY[:HALF], ETag=TAG)]
    assert_nothing_left(run, tmp_path, "does not say how long", "DiT-XL-2-512x512")
    serve_hub(server)
    path = f"/stabilityai/sd-vae-ft-mse/resolve/{COMMIT}/diffusion_pytorch_model.safetensors"
    server.wrong[path] = [answer(200, BODY[:HALF], ETag=TAG)]  # its size is listed: the rest is asked for
    result = run("download", "sd-vae-ft-mse")
    assert (Path(result.stdout.strip()) / "diffusion_pytorch_model.safetensors").read_bytes() == BODY
    assert [headers.get("Range") for headers in server.requests_of(path)] == [None, f"bytes={HALF}-"]


def test_finding_4_weights_without_a_hash_are_said(run, server):
    serve_hub(server)
    assert "SHA-256" not in run("download", "sd-vae-ft-mse").stderr
    tree = f"/api/models/stabilityai/sd-vae-ft-ema/tree/{COMMIT}"
    serve_hub(server, repository="stabilityai/sd-vae-ft-ema")
    entries = json.loads(server.files[tree])
    del entries[-1]["lfs"]
    server.files[tree] = json.dumps(entries).encode()
    result = run("download", "sd-vae-ft-ema")
    assert result.returncode == 0, result.stderr
    assert "warning: stabilityai/sd-vae-ft-ema names no SHA-256 of diffusion_pytorch_model.safetensors: only its size is checked" in result.stderr


@pytest.mark.parametrize("entries", [[{"type": "file", "path": 1}], [{"type": "file", "path": "config.json", "oid": "b" * 40, "size": "x"}]])
def test_finding_4_a_strange_listing_is_one_line(run, server, tmp_path, entries):
    serve_hub(server)
    server.files[f"/api/models/stabilityai/sd-vae-ft-mse/tree/{COMMIT}"] = json.dumps(entries).encode()
    assert_nothing_left(run, tmp_path, "lists files in another form", "sd-vae-ft-mse")


def test_finding_5_a_partial_file_follows_no_link(run, server, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "own" / (OWN + ".incomplete")).symlink_to(tmp_path / "victim")
    server.files["/" + OWN] = BODY
    assert "cannot write" in error_line(run("download", "DiT-XL-2-512x512"))
    assert (tmp_path / "victim").read_text() == "precious"


def test_finding_15_a_variant_alone_is_not_the_weights(run, server, tmp_path):
    """Another tool may have fetched only that, or not all pieces."""
    repository, name = "Efficient-Large-Model/Sana_600M_512px_diffusers", "diffusion_pytorch_model.safetensors"
    snapshot = tmp_path / "hf/hub" / ("models--" + repository.replace("/", "--")) / "snapshots" / COMMIT
    for part in ("transformer", "vae"):
        (snapshot / part).mkdir(parents=True)
        (snapshot / part / "config.json").write_text("{}")
        (snapshot / part / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"half")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text(COMMIT)
    assert "--offline forbids" in error_line(run("download", "Sana-600M-512", "--offline"))
    (snapshot / "vae" / name).write_bytes(b"whole")
    pieces = [f"diffusion_pytorch_model-{n:05}-of-00002.safetensors" for n in (1, 2)]
    (snapshot / "transformer" / (name + ".index.json")).write_text(json.dumps({"weight_map": dict(zip("ab", pieces))}))
    (snapshot / "transformer" / pieces[0]).write_bytes(b"one")
    assert "--offline forbids" in error_line(run("download", "Sana-600M-512", "--offline"))
    (snapshot / "transformer" / pieces[1]).write_bytes(b"two")
    assert Path(run("download", "Sana-600M-512", "--offline").stdout.strip()).samefile(snapshot / "transformer")


def test_a_wrong_hash_or_size_leaves_nothing(run, server, tmp_path):
    server.files["/" + HASHED] = BODY
    assert_nothing_left(run, tmp_path, "1280000 bytes, 2700611775 are published", "DiT-XL-2-256x256")


@pytest.mark.skipif(not FULL, reason="2.7 GB: scripts/test --full")
def test_a_wrong_hash_at_the_published_size(run, server, tmp_path):
    server.files["/" + HASHED] = bytes(2_700_611_775)
    assert_nothing_left(run, tmp_path, "9ec1876e4c03", "DiT-XL-2-256x256")


def test_another_hash_at_the_same_size(run, server, tmp_path):
    """What was trusted at the first download is what every later one must be."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / (OWN + ".sha256")).write_text(hashlib.sha256(BODY).hexdigest() + "\n")
    server.files["/" + OWN] = BODY[:-1] + b"x"
    assert hashlib.sha256(BODY).hexdigest() in error_line(run("download", "DiT-XL-2-512x512"))
    assert kept(tmp_path) == [f"own/{OWN}.sha256"]
    server.files["/" + OWN] = BODY
    assert run("download", "DiT-XL-2-512x512").returncode == 0


@pytest.mark.parametrize("broken", ["http://127.0.0.1:9", None])
def test_a_failed_mirror_falls_back(run, server, broken):
    """To the next mirror: one that cannot be reached, or has not got the file."""
    other = Server()
    try:
        server.files["/" + OWN] = BODY
        assert content(run("download", "DiT-XL-2-512x512", "--mirror", broken or other.url, "--mirror", server.url,
                           mirror=False)) == BODY
        assert len(other.log) == (0 if broken else 1)
    finally:
        other.close()


@pytest.mark.slow
def test_a_failed_mirror_falls_back_to_the_origin(run, server):
    """The authors' own address is asked last, here through a proxy that lets nothing through."""
    line = error_line(run("download", "DiT-XL-2-512x512", https_proxy=server.url))
    asked = [path for path, _ in server.log]
    assert asked[0] == "/" + OWN and asked[1].endswith(":443"), asked
    assert "there is no such file; https://" in line


def test_an_error_of_the_server_passes(run, server, tmp_path):
    """Status 503, then the file."""
    server.files["/" + OWN], server.status["/" + OWN] = BODY, [503, 503]
    assert content(run("download", "DiT-XL-2-512x512")) == BODY
    assert len(server.requests_of("/" + OWN)) == 3


def test_a_full_disk_leaves_nothing(run, server, tmp_path):
    server.files["/" + OWN] = BODY
    line = error_line(run("download", "DiT-XL-2-512x512", limit_bytes=500 * 1024))
    assert "cannot write" in line and OWN in line
    assert kept(tmp_path) == []


def test_redirects_are_followed_without_the_token(run, server):
    elsewhere = Server()
    try:
        serve_hub(server)
        server.moved = {path for path in server.files if "/resolve/" in path}
        server.redirect = elsewhere.url.replace("127.0.0.1", "localhost")
        elsewhere.files = server.files
        result = run("download", "sd-vae-ft-mse", HF_TOKEN="secret")
        assert result.returncode == 0, result.stderr
        assert all(headers.get("Authorization") == "Bearer secret" for _, headers in server.log)
        assert len(elsewhere.log) == 2 and all("Authorization" not in headers for _, headers in elsewhere.log)
    finally:
        elsewhere.close()


@pytest.mark.parametrize("status, expected", [(404, "no such file"), (401, "set HF_TOKEN"), (418, "status 418")])
def test_refusals(run, server, tmp_path, status, expected):
    server.status["/" + OWN] = status
    assert_nothing_left(run, tmp_path, expected, "DiT-XL-2-512x512")


def test_no_network(run, tmp_path):
    assert_nothing_left(run, tmp_path, "cannot reach http://127.0.0.1:9", "sd-vae-ft-ema",
                        HF_ENDPOINT="http://127.0.0.1:9")


def test_offline_and_unknown_names(run, tmp_path):
    assert "--offline forbids" in error_line(run("download", "DiT-XL-2-512x512", "--offline"))
    assert "--offline forbids" in error_line(run("download", "sd-vae-ft-mse", "--offline"))
    assert "the nearest is sd-vae-ft-mse" in error_line(run("download", "sd-vae-ft-mze"))
    listed = run("download", "--list").stdout
    assert "DiT-XL-2-256x256" in listed and "licence: MIT" in listed and "2.7 GB" in listed
    for encoder in ("t5-v1_1-xxl", "gemma-2-2b-it", "clip-vit-large-patch14", "all-MiniLM-L6-v2"):
        assert encoder in listed, "the docs name where each text encoder comes from"
    assert kept(tmp_path) == []


def serve_hub(server, repository="stabilityai/sd-vae-ft-mse", weights=BODY, config=b'{"_class_name": "AutoencoderKL"}'):
    server.files[f"/api/models/{repository}/revision/main"] = json.dumps({"sha": COMMIT}).encode()
    name = "diffusion_pytorch_model.safetensors"
    tree = [{"type": "directory", "path": "other", "oid": "c" * 40},
            {"type": "file", "path": "config.json", "oid": "b" * 40, "size": len(config)},
            {"type": "file", "path": "README.md", "oid": "d" * 40, "size": 3},
            {"type": "file", "path": name, "oid": "e" * 40, "size": len(weights),
             "lfs": {"oid": hashlib.sha256(weights).hexdigest(), "size": len(weights)}}]
    server.files[f"/api/models/{repository}/tree/{COMMIT}"] = json.dumps(tree).encode()
    server.files[f"/{repository}/resolve/{COMMIT}/config.json"] = config
    server.files[f"/{repository}/resolve/{COMMIT}/{name}"] = weights


@pytest.mark.slow
def test_the_cache_is_that_of_the_hub(run, server, tmp_path):
    """What Kiln fetched, huggingface_hub finds, and the other way round."""
    serve_hub(server)
    result = run("download", "sd-vae-ft-mse")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "hf" / "hub" / "models--stabilityai--sd-vae-ft-mse"
    assert Path(result.stdout.strip()).samefile(folder / "snapshots" / COMMIT)
    link = folder / "snapshots" / COMMIT / "diffusion_pytorch_model.safetensors"
    assert link.is_symlink() and not os.path.isabs(os.readlink(link))
    assert link.resolve().name == hashlib.sha256(BODY).hexdigest() and link.resolve().parent == folder / "blobs"
    assert (folder / "refs" / "main").read_text() == COMMIT

    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    found = try_to_load_from_cache("stabilityai/sd-vae-ft-mse", "config.json", cache_dir=tmp_path / "hf" / "hub")
    assert Path(found).read_bytes() == b'{"_class_name": "AutoencoderKL"}'
    assert hf_hub_download("stabilityai/sd-vae-ft-mse", "diffusion_pytorch_model.safetensors",
                           cache_dir=tmp_path / "hf" / "hub", local_files_only=True) == str(link)
    asked = len(server.log)
    assert run("download", "sd-vae-ft-mse").stdout == result.stdout
    assert len(server.log) == asked, "what is in the cache is not asked for"
    by_cache = run("download", "sd-vae-ft-mse", "--offline", HF_HOME="/nowhere", HF_HUB_CACHE=str(tmp_path / "hf" / "hub"))
    assert by_cache.stdout == result.stdout


def test_a_hub_whose_file_is_another(run, server, tmp_path):
    serve_hub(server)
    path = f"/stabilityai/sd-vae-ft-mse/resolve/{COMMIT}/diffusion_pytorch_model.safetensors"
    server.files[path] = BODY[::-1]
    assert "published is " + hashlib.sha256(BODY).hexdigest() in error_line(run("download", "sd-vae-ft-mse"))
    assert not any("incomplete" in name or "snapshots" in name and "safetensors" in name for name in kept(tmp_path))


def test_a_listing_cannot_leave_the_cache(run, server, tmp_path):
    serve_hub(server)
    tree = f"/api/models/stabilityai/sd-vae-ft-mse/tree/{COMMIT}"
    entries = json.loads(server.files[tree])
    entries[1]["oid"] = "../../../escape"
    server.files[tree] = json.dumps(entries).encode()
    assert_nothing_left(run, tmp_path, "a file that cannot be", "sd-vae-ft-mse")


def tiny_vae():
    from diffusers import AutoencoderKL
    torch.manual_seed(0)
    return AutoencoderKL(in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 4,
                         up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[8, 8, 8, 8], layers_per_block=1,
                         act_fn="silu", latent_channels=4, norm_num_groups=4, scaling_factor=0.18215)


@pytest.mark.parametrize("depth", [1, pytest.param(28, marks=pytest.mark.skipif(not FULL, reason="2.7 GB"))])
@pytest.mark.slow
def test_published_model_in_one_command(run, server, tmp_path, depth):
    """DiT-XL/2's keys (a narrow block of the 28, which --model-config says, or all in its shapes), through the whole path."""
    from dit_torch import DiT, randomise_
    from safetensors.torch import save
    vae = tiny_vae()
    serve_hub(server, weights=save(vae.state_dict()), config=json.dumps(dict(vae.config)).encode())
    torch.manual_seed(0)
    narrow = dict(hidden_size=288, num_heads=4, depth=1)
    model = DiT(input_size=64, patch_size=2, in_channels=4, **narrow if depth == 1 else dict(hidden_size=1152, num_heads=16, depth=depth))
    randomise_(model, scale=0.5)
    torch.save(model.state_dict(), tmp_path / OWN)
    del model
    server.files["/" + OWN] = (tmp_path / OWN).read_bytes()
    result = run("sample", "--model", "DiT-XL/2-512", "--seed", 1, "--num-sampling-steps", 1,
                 *(["--model-config", json.dumps(narrow)] if depth == 1 else []), timeout=3600)
    assert result.returncode == 0, result.stderr
    assert "kiln download: DiT-XL-2-512x512 (size not published, CC BY-NC 4.0)" in result.stderr
    out = tmp_path / "DiT-XL-2-512-seed1"
    assert sorted(path.name for path in out.glob("0*.png")) == [
        f"{i:06}-class-{label}.png" for i, label in enumerate([207, 360, 387, 974, 88, 979, 417, 279])]
    from PIL import Image
    assert Image.open(out / "000000-class-207.png").size == (512, 512) and (out / "grid.png").exists()
    assert json.loads((out / "sampling.json").read_text())["cfg_scale"] == 4


@pytest.mark.parametrize("name, expected", [
    ("PixArt-Sigma-XL-2-512", "--weights $(kiln download PixArt-Sigma-XL-2-512) --model PixArt-Sigma-XL/2-512 --autoencoder"),
    ("Sana-600M-512", "--model Sana-600M-512 --autoencoder"),
    ("sd-vae-ft-ema", "--autoencoder $(kiln download sd-vae-ft-ema)"),
    ("adm-imagenet-256", "--reference $(kiln download adm-imagenet-256)"),
    ("DiT-XL/2", "--weights FILE; those of DiT-XL/2-256, DiT-XL/2-512 are fetched"),
])
def test_sample_says_how_to_draw_from_other_names(run, tmp_path, name, expected):
    assert expected in error_line(run("sample", "--model", name, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_name_of_the_weights_is_that_of_the_model(run):
    assert "DiT-XL-2-512x512 is not in" in error_line(run("sample", "--model", "DiT-XL-2-512x512", "--offline"))


@pytest.mark.slow
def test_the_check_of_published_fids_is_rehearsed(server, tmp_path):
    """The script on made-up weights in published keys and shapes (one block of 28), few pictures, one step."""
    from dit_torch import DiT, randomise_
    from safetensors.torch import save
    from test_features import random_inception_weights
    vae = tiny_vae()
    serve_hub(server, repository="stabilityai/sd-vae-ft-ema", weights=save(vae.state_dict()), config=json.dumps(dict(vae.config)).encode())

    def serve(name, write):
        write(tmp_path / name)
        server.files["/" + name] = (tmp_path / name).read_bytes()

    for size, weights, reference in ((256, HASHED, "VIRTUAL_imagenet256_labeled.npz"), (512, OWN, "VIRTUAL_imagenet512.npz")):
        model = randomise_(DiT(input_size=size // 8, patch_size=2, in_channels=4, hidden_size=1152, depth=1, num_heads=16), scale=0.5)
        serve(weights, lambda path: torch.save(model.state_dict(), path))
        pictures = np.random.default_rng(size).integers(0, 256, (4, size, size, 3), dtype=np.uint8)
        serve(reference, lambda path: np.savez(path, arr_0=pictures))
    (tmp_path / "own").mkdir()
    (tmp_path / HASHED).rename(tmp_path / "own" / HASHED)  # as fetched before: its published hash is known
    serve("pt_inception-2015-12-05-6726825d.pth", lambda path: torch.save(random_inception_weights(), path))
    names = caches_of_its_own(tmp_path, server) | {
        "KILN_MIRROR": server.url, "KILN_BUILD": str(program("kiln").parent), "FID_IMAGES": "3", "FID_DEVICE": "cpu",
        "FID_OPTIONS": '--num-sampling-steps 1 --model-config {"depth":1}'}
    result = subprocess.run([FIDS, "1", tmp_path / "fid"], capture_output=True, text=True, timeout=600, env=names)
    fids = [json.loads((tmp_path / f"fid/{size}/result.json").read_text())["metrics"]["fid"] for size in (256, 512)]
    lines = [line for line in result.stdout.splitlines() if line.startswith(("DiT-XL/2 at", "of 3"))]
    assert lines == [f"DiT-XL/2 at 256 px: FID {fids[0]}, published 2.27: not ok", f"DiT-XL/2 at 512 px: FID {fids[1]}, published 3.04: not ok",
                     "of 3 pictures: the published figures are of 50000"], result.stderr
    assert result.returncode == 1 and result.stderr.count("as DiT-XL/2 is published: objective iddpm; sampler ddpm") == 2, result.stderr
    settings = json.loads((tmp_path / "fid/512/samples.npz.json").read_text())
    assert settings["cfg_scale"] == 1.5 and settings["sampler"]["type"] == "iddpm" and settings["label_sampling"] == "random"
    assert len(settings["classes"]) == 1000


@pytest.mark.parametrize("fids, verdicts", [((2.3, 3.1), ("ok", "ok")), ((2.2, 3.15), ("ok", "not ok")), ((2.16, 2.95), ("not ok", "ok"))])
def test_the_check_of_published_fids_compares(tmp_path, fids, verdicts):
    """With what a program says that draws nothing."""
    (tmp_path / "kiln").write_text(f"""#!/bin/sh
for out; do :; done
case $1 in download) echo "$2"; exit;; sample) exit;; esac
mkdir -p "${{out%/*}}"
case $out in */256/*) fid={fids[0]};; *) fid={fids[1]};; esac
printf '{{"metrics": {{\n  "fid": %s\n}}}}' $fid >"$out"
""")
    (tmp_path / "kiln").chmod(0o755)
    result = subprocess.run([FIDS, "8", tmp_path / "fid"], capture_output=True, text=True, env={"PATH": os.environ["PATH"], "KILN_BUILD": str(tmp_path)})
    assert result.stdout.splitlines() == [f"DiT-XL/2 at {size} px: FID {fid}, published {published}: {verdict}" for size, fid, published, verdict in
                                          zip((256, 512), fids, (2.27, 3.04), verdicts)], result.stderr
    assert result.returncode == ("not ok" in verdicts)
