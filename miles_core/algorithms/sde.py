"""One denoising transition of rectified flow as SDE, CPS or ODE step, and its log-probability.

The embedded engine samples with these functions and the trainer recomputes with them, in fp32 and in the order
of floating-point operations of sglang's flow_rollout_controller.py, so that the importance ratio starts at 1.
Notation: sigma and sigma_next are sigmas[i] and sigmas[i + 1], dt = sigma_next - sigma < 0, v the model output.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from miles_core.errors import InputError

_LOG_SQRT_2PI = math.log(math.sqrt(2 * math.pi))


@dataclass(frozen=True)
class StepStatistics:
    """The Gaussian p(x_{t+1} | x_t); every field broadcasts against the latents (B, ...), fp32.

    std: standard deviation of the transition's noise. kl_std: the one that divides the KL term, without sqrt(-dt)
    for sde (flow_grpo's form), equal to std for cps. Both are 0 for ode.
    """

    mean: Tensor
    std: Tensor
    kl_std: Tensor


def per_row(value: Tensor, like: Tensor) -> Tensor:
    """`value` of shape () or (B,) as fp32, with (B,) viewed as (B, 1, ..., 1) to broadcast against `like` (B, ...)."""
    value = value.to(torch.float32)
    return value.reshape(-1, *(1 for _ in like.shape[1:])) if value.ndim == 1 else value


def mean_over_sample(values: Tensor) -> Tensor:
    """Mean over all non-batch dims, (B, ...) -> (B,); a sum over a count, as sglang reduces its log-probs."""
    sums = values.sum(dim=tuple(range(1, values.ndim)))
    return sums / torch.full_like(sums, float(math.prod(values.shape[1:])))


def ode_step(model_output: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Euler step x + dt * v, (B, ...) -> (B, ...).

    sigma, sigma_next: () or (B,). With 0-dim sigmas the dtypes promote as in the engine (a bf16 v stays bf16 until
    it is added); with a sigma per row the step is in fp32.
    """
    return sample + per_row(sigma_next - sigma, sample) * model_output


class SdeStepBackend(ABC):
    """The dynamics of the SDE steps: --sde-step-backend-path names a subclass.

    All sigmas are fp32 tensors of shape () or (B,), so that the rows of one batch may lie at different steps.
    sigma_max is sigmas[1] of the row's schedule. Raises InputError for a noise level without a density.
    """

    def __init__(self, *, noise_level: float, log_prob_no_const: bool) -> None:
        self.noise_level = noise_level
        self.log_prob_no_const = log_prob_no_const

    @abstractmethod
    def statistics(
        self, model_output: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor
    ) -> StepStatistics:
        """Mean and standard deviations of x_{t+1} given x_t = `sample` (B, ...) and v = `model_output` (B, ...)."""

    def step(
        self,
        model_output: Tensor,
        sample: Tensor,
        sigma: Tensor,
        sigma_next: Tensor,
        sigma_max: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """x_{t+1} = mean + std * noise (B, ...) fp32, and its log-prob (B,) computed from the noise."""
        stats = self.statistics(model_output, sample, sigma, sigma_next, sigma_max)
        scaled = noise.float() * stats.std
        return stats.mean + scaled, self._mean_log_prob(-(scaled**2), stats.std)

    def log_prob(self, next_sample: Tensor, stats: StepStatistics) -> Tensor:
        """Log-prob (B,) of a stored x_{t+1} (B, ...): the mean over all non-batch dims, in nats per element."""
        return self._mean_log_prob(-((next_sample.float() - stats.mean) ** 2), stats.std)

    def _mean_log_prob(self, negative_square: Tensor, std: Tensor) -> Tensor:
        if self.log_prob_no_const:
            return mean_over_sample(negative_square)
        return mean_over_sample(negative_square / (2 * (std**2)) - torch.log(std) - _LOG_SQRT_2PI)


class DiffusersSdeStepBackend(SdeStepBackend):
    """Flow-GRPO's SDE (flow_grpo sd3_sde_with_logprob, sglang `sde`), or the ODE with log-prob 0.

    sde: s = a * sqrt(sigma / (1 - sigma~)), sigma~ = sigma_max where sigma is 1 and sigma elsewhere;
    std = s * sqrt(-dt); mean = x * (1 + s^2 / (2 sigma) * dt) + v * (1 + s^2 (1 - sigma) / (2 sigma)) * dt.
    """

    def __init__(self, *, noise_level: float, log_prob_no_const: bool, sde_type: Literal["sde", "ode"] = "sde") -> None:
        super().__init__(noise_level=noise_level, log_prob_no_const=log_prob_no_const)
        if sde_type == "sde":
            _require_noise(noise_level, sde_type, log_prob_no_const)
        self.sde_type = sde_type

    def statistics(
        self, model_output: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor
    ) -> StepStatistics:
        v, x = model_output.float(), sample.float()
        if self.sde_type == "ode":
            zero = x.new_zeros(())
            return StepStatistics(mean=ode_step(v, x, sigma, sigma_next), std=zero, kl_std=zero)
        sigma, sigma_next, sigma_max = (per_row(t, x) for t in (sigma, sigma_next, sigma_max))
        dt = sigma_next - sigma
        safe_sigma = torch.where(torch.isclose(sigma, torch.ones_like(sigma)), sigma_max, sigma)
        s = torch.sqrt(sigma / (1 - safe_sigma)) * self.noise_level
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        return StepStatistics(mean=mean, std=s * torch.sqrt(-1 * dt), kl_std=s)

    def step(
        self,
        model_output: Tensor,
        sample: Tensor,
        sigma: Tensor,
        sigma_next: Tensor,
        sigma_max: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if self.sde_type == "ode":
            zeros = torch.zeros(len(sample), dtype=torch.float32, device=sample.device)
            return ode_step(model_output, sample, sigma, sigma_next), zeros
        return super().step(model_output, sample, sigma, sigma_next, sigma_max, noise)

    def log_prob(self, next_sample: Tensor, stats: StepStatistics) -> Tensor:
        if self.sde_type == "ode":
            return torch.zeros(len(next_sample), dtype=torch.float32, device=next_sample.device)
        return super().log_prob(next_sample, stats)


class CpsSdeStepBackend(SdeStepBackend):
    """Coefficient-preserving sampling (sglang `cps`): std = sigma_next * sin(a * pi / 2).

    mean = (x - sigma v) * (1 - sigma_next) + (x + (1 - sigma) v) * sqrt(sigma_next^2 - std^2). At the last step
    sigma_next and std are 0: the log-prob with its constants is NaN there, and so is the KL term.
    """

    def __init__(self, *, noise_level: float, log_prob_no_const: bool) -> None:
        super().__init__(noise_level=noise_level, log_prob_no_const=log_prob_no_const)
        _require_noise(noise_level, "cps", log_prob_no_const)

    def statistics(
        self, model_output: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor
    ) -> StepStatistics:
        v, x = model_output.float(), sample.float()
        sigma, sigma_next = per_row(sigma, x), per_row(sigma_next, x)
        std = sigma_next * math.sin(self.noise_level * math.pi / 2)
        clean = x - sigma * v
        pure_noise = x + v * (1 - sigma)
        mean = clean * (1 - sigma_next) + pure_noise * torch.sqrt(sigma_next**2 - std**2)
        return StepStatistics(mean=mean, std=std, kl_std=std)


def sde_step_backend(args: Any) -> SdeStepBackend:
    """The stock back-end of --diffusion-sde-type: sde and ode share one class, cps has its own."""
    if args.diffusion_sde_type == "cps":
        return CpsSdeStepBackend(
            noise_level=args.diffusion_noise_level, log_prob_no_const=args.diffusion_log_prob_no_const
        )
    return DiffusersSdeStepBackend(
        noise_level=args.diffusion_noise_level,
        log_prob_no_const=args.diffusion_log_prob_no_const,
        sde_type=args.diffusion_sde_type,
    )


def _require_noise(noise_level: float, sde_type: str, log_prob_no_const: bool) -> None:
    if noise_level <= 0 and not log_prob_no_const:
        raise InputError(
            f"--diffusion-noise-level {noise_level} leaves an {sde_type} step without a density: give a level above 0"
        )
