"""What diffusers' DiTPipeline draws from an exported folder, held against kiln sample."""

from unittest import mock

from diffusers import DiTPipeline, DPMSolverMultistepScheduler
from pipelines import START, assert_pictures_of, kiln_normals, read_npz

SEED, STEPS = 6, 10


def assert_diffusers_draws_the_same(walk, folder, label, guidance, *source):
    """A picture of class `label` by the pipeline in `folder` and by kiln sample from `source`, from the same noise."""
    pipeline = DiTPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    for block in pipeline.transformer.transformer_blocks:  # DiT's own frequencies, which diffusers spaces otherwise
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    size = pipeline.transformer.config.sample_size
    noise = kiln_normals(SEED, START, [0], (4, size, size))
    with mock.patch("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda *_, **__: noise):
        wanted = pipeline([label], guidance_scale=guidance, num_inference_steps=STEPS, output_type="pt").images * 2 - 1
    walk.kiln("sample", *source, "--classes", label, "--cfg-scale", guidance, "--cfg-convention", "plain", "--sampler", "dpmpp_2m",
              "--num-sampling-steps", STEPS, "--num-images", 1, "--seed", SEED, "--threads", 1, "--out", walk / "one",
              "--npz", walk / "one.npz")
    assert_pictures_of(read_npz(walk / "one.npz"), wanted)
