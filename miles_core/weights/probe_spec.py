"""The fixed request of the probe."""

from dataclasses import dataclass

from miles_core.rollout.protocol import GenerateRequest


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
