"""What a run leaves: a report as JSON and Markdown, all that its programs wrote, and one file of them that stays small."""
import json
import os
import tarfile
import time

MOST_BYTES = 16_000_000  # of a run's file
MOST_OUTPUT = 2_000_000  # bytes that are kept of what a program writes


def shorten(path):
    """Leaves the beginning and the end of a file that is too long to be kept."""
    size = path.stat().st_size
    if size <= MOST_OUTPUT:
        return
    with open(path, "rb") as file:
        head = file.read(MOST_OUTPUT // 4)
        file.seek(size - MOST_OUTPUT * 3 // 4)
        tail = file.read()
    path.write_bytes(head + f"\n... {size - MOST_OUTPUT} bytes left out ...\n".encode() + tail)


def write_report(session):
    result = {"run": session.kind, "date": time.strftime("%Y-%m-%d %H:%M"), "gpu": session.gpu, "rehearsal": session.rehearses,
              "checks": session.checks}
    (session.folder / f"{session.kind}.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    lines = [f"# scripts/gpu run {session.kind}{': REHEARSAL' if session.rehearses else ''}", "",
             f"{result['date']}, " + ", ".join(session.gpu.values()), "", "| check | | |", "|---|---|---|"]
    lines += [f"| {c['name']} | {c['state']} | {c['summary'].replace('|', '/')} |" for c in session.checks]
    (session.folder / f"{session.kind}.md").write_text("\n".join(lines) + "\n")


def pack(folder, path):
    """Writes the run's one file, without the longest outputs if it would be too large."""
    outputs = sorted((folder / "output").iterdir(), key=lambda file: -file.stat().st_size)
    while True:
        with tarfile.open(f"{path}.part", "w:gz", compresslevel=3) as archive:
            archive.add(folder, folder.name)
        if os.path.getsize(f"{path}.part") <= MOST_BYTES or not outputs:
            break
        outputs.pop(0).write_text("left out: the file of this run would be too large\n")
    os.replace(f"{path}.part", path)
