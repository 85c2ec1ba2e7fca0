"""Speed and memory of steps of DiT, beside what a plan predicts, what torch itself reaches and a peer."""
import json

from .cuda_tests import gtests
from .session import BESIDE, Failed, NotRun
from .trainings import UNTRIED


def ceilings(session):
    found = session.script("gpu_torch.py", "ceilings", session.device)
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items()), found


def attention(session):
    found = session.script("gpu_torch.py", "attention", session.device)
    return ", ".join(f"{name} {value['forward_ms']:.2f} + {value['backward_ms']:.2f} ms" for name, value in found.items()), found


PEERS = {"dit-compile": "dit", "fast-dit": "fast-dit"}  # {what is timed: its checkout}; the first that is packed is chosen


def peer(session):
    for variant, name in PEERS.items():
        repository = BESIDE / "peers" / name
        if repository.exists():
            break
    else:
        raise NotRun("the pack holds no peer (scripts/gpu build --dit DIR)")
    found = session.script("train_dit.py", "--worker", variant, "--worker-repo", repository, "--model", "DiT-XL/2", "--batch", 32,
                           "--device", session.device, "--steps", 10, "--warmup", 5, timeout=150)
    return f"{variant}: {found['images_per_s']:.1f} images/s, peak {found['peak_bytes'] / 2**30:.2f} GiB", found


def probe(session, model, batch, steps, *options):
    if session.rehearses:
        model, batch, steps = "DiT-S/8", 2, 3
        options = [option for option in options if not option.startswith(UNTRIED)]  # which a CPU refuses
        options += ["--threads", "1", "--peak-tflops", "1"]
    done = session.run(session.program("kiln"), "probe", "--json", "--no-checkpoint", "--model", model, "--data", "synthetic",
                       "--device", session.device, "--compute-dtype", "bf16", "--global-batch", batch, "--micro-batch", batch,
                       "--steps", steps, "--loader-threads", "8", *options, timeout=120)
    return json.loads(done.stdout)


def speed_of(session, model, batch, steps, *options):
    result = session.probes[model, batch] = probe(session, model, batch, steps, *options)
    measured, predicted = result["measured"], result["predicted"] or {}
    text = f"{measured['images_per_s']:.1f} images/s, {measured.get('tflops', 0):.0f} TFLOP/s"
    if "mfu" in measured:
        text += f", MFU {100 * measured['mfu']:.1f} %"
    text += f", peak {measured['peak_bytes'] / 2**30:.2f} GiB"
    if predicted:
        text += f"; predicted {predicted['images_per_s']:.1f} images/s, {predicted['peak_bytes'] / 2**30:.2f} GiB"
    if "gpu" in result:
        text += f"; attention: {', '.join(result['gpu']['attention'])}"
    return text, result


def epilogues(session):
    """cuBLASLt must serve every product with an epilogue of the probes."""
    if session.rehearses:
        return f"{gtests(session, 'EpilogueProducts.*')['tests']} tests passed on the emulation", None
    counted = {f"{model}, batch {batch}": result["gpu"]["epilogues"]
               for (model, batch), result in session.probes.items() if "gpu" in result}
    if not counted:
        raise NotRun("no probe of this run has ended")
    plain = ("affine", "grad_rows")  # asked for with --untried-gpu products alone
    refused = [f"{name}: {product} refused {counts['refused']} times, served {counts['served']}"
               for name, products in counted.items() for product, counts in products.items()
               if counts["refused"] or not (counts["served"] or product in plain)]
    if refused:
        raise Failed("; ".join(refused), counted)
    return f"all served at {len(counted)} batches", counted


def calibration(session):
    chosen = ["--model", "DiT-S/8", "--calibrate-seconds", "5"] if session.rehearses else ["--model", "DiT-S/2"]
    session.run(session.program("kiln"), "plan", "--calibrate", "--device", session.device, *chosen, timeout=150)
    profiles = list((session.folder / "profiles").glob("*.json"))
    if not profiles:
        raise Failed("no profile was written")
    return f"profiles/{profiles[0].name}", None
