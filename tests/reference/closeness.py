"""When two tensors are close. docs/numerics.md says where the criterion and the tolerances come from."""

import torch

FORWARD = 5e-5  # f32 outputs
GRADIENT = 2e-4  # f32 parameter gradients
FORWARD_BF16 = 6e-2  # mixed precision against f32
GRADIENT_BF16 = 2e-1


def violation(got, want, rtol, atol=0.0, peak=True):
    """Largest of the peak and the l2 error over what is allowed: at most 1 is close."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert torch.isfinite(got).all(), "not finite"
    got, want = got.double(), want.detach().double()
    difference = got - want
    tiny = torch.finfo(torch.float64).tiny
    worst = (difference.norm() / (rtol * want.norm() + atol * want.numel() ** 0.5 + tiny)).item()
    if peak:
        worst = max(worst, (difference.abs().max() / (rtol * want.abs().max() + atol + tiny)).item())
    return worst


def assert_close(got, want, rtol=FORWARD, atol=0.0):
    worst = violation(got, want, rtol, atol)
    assert worst <= 1, f"{worst:.2f} times the tolerance {rtol}"


def gradient_violations(got, want, rtol=GRADIENT, peak=True):
    """Violation of each gradient by key. Some are zero in theory (a key bias under softmax), so an absolute
    tolerance of 2e-6 of the median gradient peak is allowed everywhere."""
    assert set(got) == set(want), f"keys differ: {sorted(set(got) ^ set(want))}"
    peaks = torch.tensor([tensor.abs().max() for tensor in want.values()])
    atol = 2e-6 * peaks.median().item() * (rtol / GRADIENT)
    return {key: violation(got[key], want[key], rtol, atol, peak) for key in want}


def assert_gradients_close(got, want, rtol=GRADIENT, peak=True):
    violations = gradient_violations(got, want, rtol, peak)
    failed = {key: round(value, 2) for key, value in violations.items() if value > 1}
    assert not failed, f"times the tolerance {rtol}: {failed}"


def gradients_of(outputs):
    """The grad.<key> tensors of a forward verb's output, by key."""
    return {name.removeprefix("grad."): tensor for name, tensor in outputs.items() if name.startswith("grad.")}


def gradients_by_name(model, loss):
    """Of `loss`, of every trainable parameter."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, trained.values())))


def assert_equals(got, want, rtol=FORWARD, gradient_rtol=GRADIENT, peak=True):
    """A forward verb's output with --backward is `want`: an output or {name: output}, and gradients by key."""
    outputs, gradients = want
    for name, output in (outputs if isinstance(outputs, dict) else {"output": outputs}).items():
        assert_close(got[name], output, rtol)
    assert_gradients_close(gradients_of(got), gradients, gradient_rtol, peak)


def trained_by_torch(parameters, loss_of, steps, micro=1, clip=None, warmup=1, after_step=lambda: None, **adamw):
    """Losses and gradient norms of steps of AdamW. loss_of(row): that of one of `micro` passes a step."""
    optimizer, losses, norms = torch.optim.AdamW(parameters, **adamw), [], []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = adamw["lr"] * min(1.0, (step + 1) / warmup)
        optimizer.zero_grad()
        total = 0.0
        for row in range(step * micro, (step + 1) * micro):
            loss = loss_of(row) / micro
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, clip or float("inf")).item())
        optimizer.step()
        after_step()
    return torch.tensor(losses), torch.tensor(norms)


@torch.no_grad()
def assert_guided_samples(conformance, name, config, model, halves, sampler, scheduler, settings, predict, steps):
    """Kiln's samples of the text model `name` against a loop with a scheduler of diffusers. halves: inputs with
    captions and masks, to follow and to be guided away from. predict(x, t, captions, mask): what is followed."""
    scale, masks = 4.5, (halves[0]["caption_mask"], halves[1]["caption_mask"].flip(0))
    captions = [(half["caption_embeds"], mask) for half, mask in zip(halves, masks)]
    inputs = {"noise": halves[0]["x"]} | {prefix + key: value for prefix, pair in zip(("", "uncond_"), captions)
                                          for key, value in zip(("caption_embeds", "caption_mask"), pair)}
    got = conformance("sample", model=name, model_config=config, weights=model.state_dict(), inputs=inputs,
                      config=dict(sampler=dict(type=sampler, steps=steps, scheduler=settings), cfg_scale=scale))
    scheduler.set_timesteps(steps)
    assert_close(got["timesteps"], scheduler.timesteps.float(), 1e-6)
    x = inputs["noise"]
    for i, t in enumerate(scheduler.timesteps):
        cond, uncond = (predict(x, t.float().expand(2), *pair) for pair in captions)
        x = scheduler.step(uncond + scale * (cond - uncond), t, x).prev_sample
        assert_close(got["samples"][i], x, 1e-3)
