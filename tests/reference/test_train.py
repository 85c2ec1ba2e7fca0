"""Twenty steps on recorded batches against a PyTorch training loop: dit_torch's DiT, torch.optim, an EMA by hand."""

import copy

import pytest
import torch
from closeness import trained_by_torch
from dit_torch import DiT, randomise_
from test_loss import iddpm_loss

CONFIG = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=48, depth=2, num_heads=3, mlp_ratio=4.0,
              num_classes=10, class_dropout_prob=0.1, learn_sigma=True)
IDDPM = dict(type="iddpm", beta_schedule="linear", learn_sigma=True, rescale_learned_sigmas=False,
             num_train_timesteps=1000)


def recording(num_micro, batch, seed=3):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_micro, batch, CONFIG["in_channels"], CONFIG["input_size"], CONFIG["input_size"])
    return dict(
        x_start=torch.randn(shape, generator=generator),
        noise=torch.randn(shape, generator=generator),
        # t = 0 is left out: its likelihood cancels in f32 while the model is bad.
        t=torch.randint(1, 1000, shape[:2], generator=generator),
        y=torch.randint(0, 10, shape[:2], generator=generator),
        drop=(torch.rand(shape[:2], generator=generator) < 0.2).long(),
    )


class IddpmLoss(torch.autograd.Function):
    """The f64 oracle of test_loss as a differentiable function of the model's output."""

    @staticmethod
    def forward(ctx, output, x_start, noise, t):
        with torch.enable_grad():
            result = iddpm_loss(dict(x_start=x_start, noise=noise, model_output=output, t=t), "linear", 1000, True, False)
        ctx.save_for_backward(result["grad_model_output"].to(output.dtype))
        return result["loss"].detach().mean()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad.to(ctx.saved_tensors[0].dtype), None, None, None


def mse_loss(output, x_start, noise, t):
    return ((output[:, :4] - noise) ** 2).flatten(1).mean(1).mean()


def noised(x_start, noise, t):
    bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)[t].view(-1, 1, 1, 1)
    return (bar.sqrt() * x_start + (1 - bar).sqrt() * noise).float()


def train_torch(model, batches, steps, grad_accum, ema_decay, grad_clip, warmup, loss_fn, **adamw):
    ema = copy.deepcopy(model)

    def loss_of(micro):
        x, noise, t = (batches[k][micro] for k in ("x_start", "noise", "t"))
        label = torch.where(batches["drop"][micro] == 1, 10, batches["y"][micro])
        return loss_fn(model(noised(x, noise, t), t.float(), label), x, noise, t)

    @torch.no_grad()
    def average():
        for mean, parameter in zip(ema.parameters(), model.parameters()):
            mean.mul_(ema_decay).add_(parameter, alpha=1 - ema_decay)

    parameters = [p for p in model.parameters() if p.requires_grad]
    return ema, *trained_by_torch(parameters, loss_of, steps, grad_accum, grad_clip, warmup, average, **adamw)


def comparable(key, tensor):
    """Without the key bias, whose gradient is zero in theory: Adam makes full-size steps of its noise."""
    if not key.endswith("qkv.bias"):
        return tensor
    q, _, v = tensor.chunk(3)
    return torch.cat([q, v])


def assert_moved_alike(got, want, start, tolerance, each=0.25):
    total_error = total_moved = 0.0
    for key, target in want.items():
        moved = comparable(key, target - start[key]).norm().item()
        error = comparable(key, got[key] - target).norm().item()
        assert moved > 0, key
        assert error <= each * moved, f"{key}: {error / moved:.2g}"
        total_error, total_moved = total_error + error**2, total_moved + moved**2
    assert (total_error / total_moved) ** 0.5 <= tolerance


CASES = {
    "plain": dict(grad_accum=1, grad_clip=None, warmup=1, loss="iddpm"),
    "accumulation, clipping, warm-up": dict(grad_accum=4, grad_clip=0.3, warmup=8, loss="iddpm"),
    "without learned sigma": dict(grad_accum=2, grad_clip=None, warmup=1, loss="epsilon"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_twenty_steps_equal_torch(conformance, case):
    steps, adamw = 20, dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    learn_sigma = case["loss"] == "iddpm"
    model_config = CONFIG | dict(learn_sigma=learn_sigma)
    model = randomise_(DiT(**model_config), scale=0.5)
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    batches = recording(steps * case["grad_accum"], batch=4)
    loss = IDDPM if learn_sigma else dict(type="ddpm", prediction_type="epsilon", beta_schedule="linear",
                                          beta_start=1e-4, beta_end=0.02)
    config = dict(loss=loss, optimizer=dict(type="adamw", **adamw), ema_decay=0.9, grad_accum=case["grad_accum"],
                  grad_clip=case["grad_clip"], lr_warmup_steps=case["warmup"])
    got = conformance("train", model="dit", model_config=model_config, weights=start, config=config,
                      batches_file=batches)
    ema, losses, norms = train_torch(model, batches, steps, case["grad_accum"], 0.9, case["grad_clip"],
                                     case["warmup"], IddpmLoss.apply if learn_sigma else mse_loss, **adamw)
    trainable = {key: p.detach() for key, p in model.named_parameters() if p.requires_grad}
    averaged = {key: p.detach() for key, p in ema.named_parameters() if p.requires_grad}
    assert torch.allclose(got["losses"], losses, rtol=1e-4)
    assert torch.allclose(got["grad_norms"], norms, rtol=1e-3)
    assert {key for key in got if key.startswith("param.")} == {"param." + key for key in trainable}
    assert_moved_alike({key: got["param." + key] for key in trainable}, trainable, start, tolerance=1e-2)
    assert_moved_alike({key: got["ema." + key] for key in averaged}, averaged, start, tolerance=1e-2)


def test_terms_of_a_step_equal_the_reference(conformance):
    """The mse and the bound of DiT's loss, each a mean over the micro-batches of a step."""
    model = randomise_(DiT(**CONFIG), scale=0.5)
    batches = recording(2, batch=3)
    got = conformance("train", model="dit", model_config=CONFIG, weights=model.state_dict(), batches_file=batches,
                      config=dict(loss=IDDPM, optimizer=dict(type="adamw", lr=1e-3), grad_accum=2))
    terms = []
    for micro in range(2):
        x, noise, t = (batches[key][micro] for key in ("x_start", "noise", "t"))
        label = torch.where(batches["drop"][micro] == 1, 10, batches["y"][micro])
        output = model(noised(x, noise, t), t.float(), label).detach()
        terms.append(iddpm_loss(dict(x_start=x, noise=noise, model_output=output, t=t), "linear", 1000, True, False))
    for name in ("mse", "vb"):
        want = torch.cat([of_micro[name] for of_micro in terms]).detach().mean().float()
        assert torch.allclose(got[name], want.view(1), rtol=1e-4), name
    assert torch.allclose(got["mse"] + got["vb"], got["losses"], rtol=1e-6)


@pytest.mark.parametrize("micro", [6, 2, 1])
def test_contrastive_steps_equal_torch(conformance, micro):
    """However the global batch is cut: a sample is compared with the one before it in the whole."""
    steps, weight = 5, 0.3
    model_config = CONFIG | dict(learn_sigma=False)
    model = randomise_(DiT(**model_config), scale=0.5)
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    batches = recording(steps, batch=6)
    del batches["t"]
    batches["u"] = torch.rand(steps, 6, generator=torch.Generator().manual_seed(4))
    cut = {key: tensor.reshape(-1, micro, *tensor.shape[2:]) for key, tensor in batches.items()}
    got = conformance("train", model="dit", model_config=model_config, weights=start, batches_file=cut,
                      config=dict(loss=dict(type="flow", contrastive_lambda=weight), grad_accum=6 // micro,
                                  optimizer=dict(type="adamw", lr=1e-3, weight_decay=0.01)))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    wanted = dict(losses=[], grad_norms=[], mse=[], contrastive=[])
    for step in range(steps):
        x, noise, u = (batches[key][step] for key in ("x_start", "noise", "u"))
        label = torch.where(batches["drop"][step] == 1, 10, batches["y"][step])
        sigma, target = u.view(-1, 1, 1, 1), noise - x
        velocity = model((1 - sigma) * x + sigma * noise, 1000 * u, label)
        mse, contrastive = ((velocity - target) ** 2).mean(), ((velocity - target.roll(1, 0)) ** 2).mean()
        loss = mse - weight * contrastive
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf"))
        optimizer.step()
        for name, value in zip(wanted, (loss, norm, mse, contrastive)):
            wanted[name].append(value.item())
    for name, values in wanted.items():
        assert torch.allclose(got[name], torch.tensor(values), rtol=1e-3), name
    trained = {key: p.detach() for key, p in model.named_parameters() if p.requires_grad}
    assert_moved_alike({key: got["param." + key] for key in trained}, trained, start, tolerance=1e-2)


@pytest.mark.parametrize("micro", [6, 2])
def test_steps_with_a_projector_equal_torch(conformance, micro):
    """A head beside the model: loss, gradients and updates of both, whatever the micro-batch."""
    steps, weight, width = 5, 0.5, CONFIG["hidden_size"]
    model_config = CONFIG | dict(learn_sigma=False)
    model = randomise_(DiT(**model_config), scale=0.5)
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    projector = randomise_(torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.SiLU(), torch.nn.Linear(width, width), torch.nn.SiLU(),
        torch.nn.Linear(width, 16)), seed=1)
    head = {"projector." + key: tensor.clone() for key, tensor in projector.state_dict().items()}
    tokens = []
    model.blocks[0].register_forward_hook(lambda module, inputs, output: tokens.append(output))  # a third of 4 segments
    batches = recording(steps, batch=6)
    cut = {key: tensor.reshape(-1, micro, *tensor.shape[2:]) for key, tensor in batches.items()}
    got = conformance("train", model="dit", model_config=model_config, weights=start, head=head, batches_file=cut,
                      config=dict(loss=dict(type="ddpm", prediction_type="epsilon", beta_schedule="linear",
                                            beta_start=1e-4, beta_end=0.02),
                                  align_weight=weight, grad_accum=6 // micro, grad_clip=0.3,
                                  optimizer=dict(type="adamw", lr=1e-3, weight_decay=0.01)))
    parameters = [p for p in (*model.parameters(), *projector.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    wanted = dict(losses=[], grad_norms=[], mse=[], align=[])
    for step in range(steps):
        x, noise, t = (batches[key][step] for key in ("x_start", "noise", "t"))
        label = torch.where(batches["drop"][step] == 1, 10, batches["y"][step])
        mse = mse_loss(model(noised(x, noise, t), t.float(), label), x, noise, t)
        patches = torch.nn.functional.unfold(x, 2, stride=2).transpose(1, 2)  # (B, N, C * p * p)
        align = (1 - torch.nn.functional.cosine_similarity(projector(tokens.pop()), patches, dim=-1)).mean()
        loss = mse + weight * align
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        optimizer.step()
        for name, value in zip(wanted, (loss, norm, mse, align)):
            wanted[name].append(value.item())
    for name, values in wanted.items():
        assert torch.allclose(got[name], torch.tensor(values), rtol=1e-3), name
    trained = {key: p.detach() for key, p in model.named_parameters() if p.requires_grad}
    assert_moved_alike({key: got["param." + key] for key in trained}, trained, start, tolerance=1e-2)
    projected = {"projector." + key: p.detach() for key, p in projector.named_parameters()}
    assert_moved_alike({key: got["head." + key] for key in projected}, projected, head, tolerance=1e-2)


def test_cutting_a_batch_into_micro_batches_changes_nothing(conformance):
    model = randomise_(DiT(**CONFIG), scale=0.5)
    batches = recording(8, batch=8)
    config = dict(loss=IDDPM, optimizer=dict(type="adamw", lr=1e-3), ema_decay=0.9999)
    results = []
    for micro in (8, 4, 2):
        cut = {key: tensor.reshape(-1, micro, *tensor.shape[2:]) for key, tensor in batches.items()}
        results.append(conformance("train", model="dit", model_config=CONFIG, weights=model.state_dict(),
                                   config=config | dict(grad_accum=8 // micro), batches_file=cut))
    for other in results[1:]:
        assert torch.allclose(results[0]["losses"], other["losses"], rtol=1e-5)
        assert torch.allclose(results[0]["grad_norms"], other["grad_norms"], rtol=1e-4)


@pytest.mark.slow
def test_bad_recordings_are_one_line(conformance):
    batches = recording(3, batch=2)
    arguments = dict(model="dit", model_config=CONFIG, weights=DiT(**CONFIG).state_dict())
    config = dict(loss=IDDPM, optimizer=dict(type="adamw", lr=1e-3), ema_decay=0.9)
    assert "grad_accum" in conformance("train", **arguments, config=config | dict(grad_accum=2), batches_file=batches,
                                       expect_error=True)
    missing = {key: tensor for key, tensor in batches.items() if key != "noise"}
    assert "noise" in conformance("train", **arguments, config=config, batches_file=missing, expect_error=True)
    for shape in ((2,), (3, 1), (1, 2), (6,)):
        other = batches | dict(drop=torch.ones(shape, dtype=torch.int64))
        message = conformance("train", **arguments, config=config, batches_file=other, expect_error=True)
        assert "expected drop of shape (3, 2)" in message
    late = batches | dict(t=torch.full((3, 2), 1000))
    assert "1000" in conformance("train", **arguments, config=config, batches_file=late, expect_error=True)


def test_null_is_the_default(conformance):
    model, batches = randomise_(DiT(**CONFIG), scale=0.5), recording(2, batch=2)
    config = dict(loss=IDDPM, optimizer=dict(type="adamw", lr=1e-3))
    nulls = dict(loss=IDDPM | dict(num_train_timesteps=None, beta_schedule=None),
                 optimizer=dict(type="adamw", lr=1e-3, betas=None, eps=None, weight_decay=None, grad_clip=None),
                 ema_decay=None, grad_accum=None, grad_clip=None, lr_warmup_steps=None)
    results = [conformance("train", model="dit", model_config=CONFIG, weights=model.state_dict(), config=c,
                           batches_file=batches) for c in (config, nulls)]
    assert set(results[0]) == set(results[1])
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


ADAMW = dict(type="adamw", lr=1e-3)


@pytest.mark.parametrize("change, expected", [
    (dict(ema_decay="0.9"), "expected ema_decay to be a number, got \"0.9\""),
    (dict(ema_decay=1.5), "expected ema_decay in [0, 1]"),
    (dict(grad_clip="x"), "expected grad_clip to be a number"),
    (dict(grad_clip=0), "expected grad_clip above 0"),
    (dict(grad_accum="2"), "expected grad_accum to be an integer"),
    (dict(grad_accum=0), "expected grad_accum to be at least 1"),
    (dict(lr_warmup_steps=[5]), "expected lr_warmup_steps to be an integer"),
    (dict(lr_warmup_steps=-1), "lr_warmup_steps"),
    (dict(loss="iddpm"), "expected loss to be an object"),
    (dict(loss=IDDPM | dict(num_train_timesteps="1000")), "expected num_train_timesteps to be an integer"),
    (dict(loss=dict(type=3)), "expected type to be a string"),
    (dict(optimizer=None), "expected optimizer"),
    (dict(optimizer=ADAMW | dict(lr="1e-3")), "expected lr to be a number"),
    (dict(optimizer=ADAMW | dict(betas="0.9")), "expected betas to be a list of numbers"),
    (dict(optimizer=dict(type=None, lr=1e-3)), "adamw"),
])
def test_wrong_types_name_key_and_file(conformance, tmp_path, change, expected):
    message = conformance("train", model="dit", model_config=CONFIG, weights=DiT(**CONFIG).state_dict(),
                          config=dict(loss=IDDPM, optimizer=ADAMW) | change, batches_file=recording(1, batch=1),
                          expect_error=True)
    assert expected in message and "-config.json)" in message, message
