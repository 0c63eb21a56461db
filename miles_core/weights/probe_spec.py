"""The fixed request of the probe, and how far from each other two answers may lie. Without torch: the driver reads it."""

from dataclasses import dataclass

from miles_core.rollout.protocol import GenerateRequest

_TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2}


@dataclass(frozen=True)
class ProbeSpec:
    """The fixed request of a run."""

    height: int
    width: int
    guidance_scale: float
    negative_prompt: str | None
    generator_device: str

    def request(self) -> GenerateRequest:
        return GenerateRequest(
            prompt="a probe",
            negative_prompt=self.negative_prompt,
            seed=2_000_000_000,
            num_outputs=1,
            height=self.height,
            width=self.width,
            num_inference_steps=1,
            guidance_scale=self.guidance_scale,
            sde_type="ode",
            noise_level=0.0,
            log_prob_no_const=True,
            sde_step_indices=None,
            generator_device=self.generator_device,
        )


@dataclass(frozen=True)
class ProbeResult:
    """diff: relative distance of the engine's output from the trainer's after the push. moved: relative distance
    that the push moved the engine's output."""

    diff: float
    moved: float


def probe_tolerance(dtype: str) -> float:
    """Largest relative distance between two correct forwards in `dtype` (fp32, bf16) of one policy.

    Measured on a tiny SD3 with guidance 4.5, engine against trainer at batch 1 and 4: fp32 at most 2.7e-6; bf16 0 at
    the same batch size and at most 1.5e-2 at another.
    """
    return _TOLERANCE[dtype]
