"""Facts of what the program wrote: short texts that are the same on every machine.

A whole file counts by its SHA-256 where its bytes are exact. Of a file whose numbers a processor
rounds, the header counts.
"~1.234" is a number that may round differently: four digits are written, and compared within two thousandths.
"""
import hashlib
import json
import re
import struct
import tomllib

from PIL import Image
from safetensors.numpy import load_file

NEAR = 2e-3
# Of train_state.json: what the machine, its clock and its rounding say, and sizes, which headers say. `config` is read
# by itself.
NOT_OF_STATE = {"machine", "num_threads", "train_seconds", "log_window", "checksums", "xxh3", "files", "config"}
# Of text.json: checksums of features, which are rounded.
NOT_OF_TEXT = {"shards_xxh3", "columns_xxh3", "shards"}
EVENTS = {"skipped": ["cause", "sample_ids", "timesteps"], "validation": ["images", "weights"],
          "stage": ["stage", "of", "name", "steps", "samples", "image_size", "lr"]}
# Of a plan: messages, what is measured on this machine and what follows from it, the profile, and options, which runs
# hold already.
NOT_PLANNED = re.compile(r"\b(advice|notes|options|data_rate|decode_s|file_system|is_network|taken_share|time_error|"
                         r"phase_s data|milestones|measured_by_others|machine|scaling|images_per_s|\w*days|\w*hours)\b")
IS_ROUNDED = re.compile(r"_s\b|share|speed|mfu")


def sha(content):
    return hashlib.sha256(content if isinstance(content, bytes) else content.encode()).hexdigest()[:16]


def near(*numbers):
    return "~" + " ".join("none" if number is None else f"{number:.4g}" for number in numbers)


def is_near(a, b):
    if a == b or not a[:1] == b[:1] == "~":
        return a == b
    pairs = list(zip(a[1:].split(), b[1:].split()))
    is_whole = len(a.split()) == len(b.split()) and all((x == "none") == (y == "none") for x, y in pairs)
    numbers = [(float(x), float(y)) for x, y in pairs if "none" not in (x, y)]
    return is_whole and all(abs(x - y) <= NEAR * max(abs(x), abs(y), 1e-3) for x, y in numbers)


def flat(value, name=""):
    """Leaves of JSON by their path, as text. Lists of plain values are leaves."""
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        value = {str(index): item for index, item in enumerate(value)}
    if isinstance(value, dict) and value:
        return {path: leaf for key, item in value.items() for path, leaf in flat(item, f"{name} {key}".strip()).items()}
    return {name: value if isinstance(value, str) else json.dumps(value)}


def under(prefix, facts):
    return {f"{prefix}: {name}": value for name, value in facts.items()}


def short(leaves):
    return {name: leaf if len(leaf) <= 160 else f"{leaf[:60]}... {sha(leaf)}" for name, leaf in leaves.items()}


def beside(base, facts):
    """What differs from the facts of `base`, and the sum of the names that only `base` has."""
    own = {name: value for name, value in facts.items() if base.get(name) != value}
    return own | {"without": sha(" ".join(sorted(base.keys() - facts.keys())))}


def plan_facts(plan):
    facts, curve = {}, {}
    for name, leaf in short(flat(plan)).items():
        if " curve " in name:
            curve[name] = leaf
        elif not NOT_PLANNED.search(name):
            is_number = re.fullmatch(r"-?\d[\d.e+-]*", leaf)
            facts[name] = near(float(leaf)) if is_number and IS_ROUNDED.search(name) else leaf
    nothing = ("", "0", "0.0", "~0", "[]", "null")
    return {name: leaf for name, leaf in facts.items() if leaf not in nothing} | {"curves": sha(json.dumps(curve))}


class Facts:
    """Reads files below `root`, whose path is no fact."""

    def __init__(self, root):
        self.root = str(root)

    def bytes(self, path):
        return path.read_bytes().replace(self.root.encode(), b"DIR")

    def json(self, path, leave_out=()):
        content = json.loads(self.bytes(path))
        return short(flat({key: value for key, value in content.items() if key not in leave_out}))

    def header(self, path):
        """Keys, types and shapes of a safetensors file, and its metadata."""
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size).replace(self.root.encode(), b"DIR"))
        metadata = header.pop("__metadata__", {})
        record = json.loads(metadata.pop("kiln_record", "{}"))
        metadata |= {f"record {key}": json.dumps(value) for key, value in record.items()}
        dtypes = " ".join(sorted({tensor["dtype"] for tensor in header.values()}))
        tensors = f"{len(header)} of {dtypes}, keys {sha(' '.join(header))}, places {sha(json.dumps(header))}"
        return {"tensors": tensors} | (short(flat(metadata)) if metadata else {})

    def file(self, path, exact=True):
        facts = self.header(path) if path.suffix == ".safetensors" else {}
        return under(path.name, facts | ({"bytes": sha(self.bytes(path))} if exact else {}))

    def store(self, folder):
        facts = under("store.json", self.json(folder / "store.json"))
        for path in sorted(folder.glob("shard-*")):
            facts |= self.file(path)
        for part in sorted(folder.glob("appended-*")):
            facts |= under(part.name, self.store(part))
        for part in sorted(folder.glob("text-*")):
            facts |= under(part.name, self.text_store(part))
        return facts | self.left_out(folder)

    def text_store(self, folder):
        facts = under("text.json", self.json(folder / "text.json", NOT_OF_TEXT))
        facts |= self.file(folder / "captions.safetensors")
        for path in sorted(folder.glob("features-*")):
            facts |= self.file(path, exact=False)
            facts[f"{path.name}: rows"] = sha(load_file(path)["row_offsets"].tobytes())
        return facts

    def left_out(self, folder):
        """Names of the pictures that are left out. Why is a message."""
        if not (folder / "skipped.jsonl").exists():
            return {}
        lines = map(json.loads, (folder / "skipped.jsonl").read_text().splitlines())
        return {"skipped.jsonl: names": " ".join(sorted(line["picture"] for line in lines))}

    def run(self, folder, exact):
        """exact: no weight has moved, so files of weights and moments have the same bytes everywhere."""
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        facts = {"files": " ".join(names)} | under("config.json", self.json(folder / "config.json"))
        facts |= under("config.toml", short(flat(tomllib.loads(self.bytes(folder / "config.toml").decode()))))
        *earlier, last = sorted(folder.glob("checkpoints/*"))
        for checkpoint in earlier:
            facts |= under(checkpoint.name, self.checkpoint(checkpoint, exact))
        facts |= under("last checkpoint", self.checkpoint(last, exact))
        for path in sorted(folder.glob("pictures-*.xxh3")):
            facts |= self.file(path)
        for path in sorted(folder.glob("samples/*.png")):
            facts |= under(path.name, self.drawing(path))
        return facts | self.left_out(folder) | under("log.jsonl", self.log(folder / "log.jsonl", exact))

    def checkpoint(self, folder, exact):
        facts = under("train_state.json", self.json(folder / "train_state.json", NOT_OF_STATE))
        for key, value in json.loads(self.bytes(folder / "train_state.json"))["config"].items():
            facts[f"train_state.json: config {key}"] = value if key == "data" else sha(json.dumps(value))
        for path in sorted(folder.glob("*.safetensors")):
            facts |= self.file(path, exact)
        return facts

    def drawing(self, path):
        with Image.open(path) as picture:
            return {"size": str(picture.size)} | short(flat(json.loads(picture.text["kiln"].replace(self.root, "DIR"))))

    def log(self, path, exact):
        lines = [json.loads(line) for line in self.bytes(path).splitlines()]
        keys = {key for line in lines if "loss" in line for key in line}
        of_machine = {key for key in keys if "share" in key or key.startswith("gpu")}
        facts = {"keys": " ".join(sorted(keys - of_machine))}
        for line in lines:
            read = self.event if "event" in line else self.measurements
            if "event" in line or exact or line["step"] == 1:
                facts |= {f"step {line['step']} {name}": value for name, value in read(line).items()}
        return facts

    def event(self, line):
        facts = {f"{line['event']} {key}": json.dumps(line[key]) for key in EVENTS.get(line["event"], [])}
        if any(t != int(t) for t in line.get("timesteps", [])):
            facts["skipped timesteps"] = near(*line["timesteps"])
        if "validation_loss" in line:
            facts["validation loss"] = near(line["validation_loss"])
        return facts

    def measurements(self, line):
        facts = {"loss and quartiles": near(line["loss"], *line["loss_quartiles"])}
        for key in ("loss_by_source", "loss_by_bucket"):
            facts |= {f"{key} {name}": near(loss) for name, loss in line.get(key, {}).items()}
        return facts

    def export(self, path, exact):
        """A file of weights, with the record beside it, or a folder."""
        files = [path, path.with_name(path.name + ".json")] if path.is_file() else sorted(path.rglob("*"))
        files = [file for file in files if file.is_file()]
        facts = {"files": " ".join(str(file.relative_to(path.parent)) for file in files)}
        for file in files:
            if file.suffix == ".json":
                read = under(file.name, self.json(file, {"_diffusers_version"}))
            else:
                read = self.file(file, exact) if file.suffix in (".safetensors", ".pt") else {}
            facts |= {f"{file.parent.name}/{name}": value for name, value in read.items()}
        return facts
