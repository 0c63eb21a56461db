"""Trains the pipeline that draws words and writes it into FOLDER/checkpoint, fp16: a few minutes on a GPU.

    python -m miles_core.words.train FOLDER [--seed 0] [--device cuda] [--vae-steps N …]

First the VAE, then transformer and text encoders together: spelling on clear images until it is there, then all styles in
their shares. Broken off, it carries on; FOLDER/log.jsonl has the figures, FOLDER/samples what it drew on the way.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn import functional as F

from miles_core.data.prompts import load_prompts, resolve_prompt_path
from miles_core.rewards.quoted import quoted_target
from miles_core.words import captions
from miles_core.words.architecture import words_pipeline
from miles_core.words.captions import CLEAR, STYLES, Captions
from miles_core.words.denoiser import Denoiser, flow_loss, sample, tokenized
from miles_core.words.phases import Phase, run_phase
from miles_core.words.reading import letters_right
from miles_core.words.render import render

POOL = 1 << 18
WATCHED = 128
SPELLED = 0.985
MEASURED = 1024
KL = 1e-3


def main(arguments: list[str]) -> int:
    """Train, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pool", type=int, default=POOL, help="captions to draw from")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    for name, steps in (("vae", 1500), ("spelling", 6000), ("styles", 1400)):
        parser.add_argument(f"--{name}-steps", type=int, default=steps)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    torch.set_float32_matmul_precision("high")
    pipeline: Any = words_pipeline(given.seed).to(given.device)
    train_vae(pipeline, given)
    train_denoiser(pipeline, given)
    for name in ("vae", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3"):
        getattr(pipeline, name).to(torch.float16)
    pipeline.save_pretrained(given.folder / "checkpoint", safe_serialization=True)
    print(f"{given.folder / 'checkpoint'}: {(time.monotonic() - started) / 60:.1f} minutes")
    return 0


def train_vae(pipeline: Any, given: argparse.Namespace) -> None:
    """The VAE on images of all styles, then rounded to fp16, with the latents' mean and spread in its configuration."""
    vae = pipeline.vae.train()
    pool = captions.draw(1 << 14, torch.Generator().manual_seed(given.seed), shares=(0.2,) * len(STYLES))
    phase = Phase("vae", given.vae_steps, 1e-3, given.batch // 4, decay=True)

    def images(generator: torch.Generator, count: int) -> torch.Tensor:
        rows = torch.randint(len(pool), (count,), generator=generator, device=generator.device).cpu()
        return render(pool.take(rows), generator) * 2 - 1

    def loss_of(generator: torch.Generator) -> torch.Tensor:
        wanted = images(generator, phase.batch)
        with _autocast(given.device):
            posterior = vae.encode(wanted).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            noise = torch.randn(mean.shape, device=mean.device, generator=generator)
            made = vae.decode(mean + noise * (0.5 * logvar).exp(), return_dict=False)[0].float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return F.l1_loss(made, wanted) + F.mse_loss(made, wanted) + KL * kl

    @torch.no_grad()
    def watch(name: str) -> dict[str, float]:
        wanted = images(torch.Generator(given.device).manual_seed(1), WATCHED)
        made = vae.decode(vae.encode(wanted).latent_dist.mean, return_dict=False)[0]
        _sheet(given.folder, name, torch.cat([wanted[:16], made[:16]]) / 2 + 0.5)
        return {"psnr": (-10 * ((made - wanted) / 2).square().mean().log10()).item()}

    run_phase(phase, given.folder, given.seed, vae, loss_of, watch)
    vae.eval().requires_grad_(False).to(torch.float16).to(torch.float32)
    with torch.no_grad():
        latents = vae.encode(images(torch.Generator(given.device).manual_seed(2), MEASURED)).latent_dist.mean
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


def train_denoiser(pipeline: Any, given: argparse.Namespace) -> None:
    """Spelling, then styles."""
    denoiser = Denoiser(pipeline).train()
    vae = pipeline.vae
    avoid = held_out_words()
    watched = captions.draw(
        WATCHED, torch.Generator().manual_seed(1), shares=_only(CLEAR), named=1.0, empty=0.0, avoid=avoid
    )
    watched_ids = [ids.to(given.device) for ids in tokenized(pipeline, watched.texts)]
    (given.folder / "samples").mkdir(exist_ok=True)
    (given.folder / "samples" / "captions.json").write_text(json.dumps(watched.texts))

    def phase(name: str, steps: int, shares: tuple[float, ...] | None, decay: bool) -> None:
        seed = given.seed * 1000 + len(name)
        pool = captions.draw(given.pool, torch.Generator().manual_seed(seed), shares=shares, avoid=avoid)
        pool_ids = [ids.to(given.device) for ids in tokenized(pipeline, pool.texts)]

        def loss_of(generator: torch.Generator) -> torch.Tensor:
            rows = torch.randint(len(pool), (given.batch,), generator=generator, device=generator.device)
            wanted = render(_of(pool, rows), generator) * 2 - 1
            with _autocast(given.device):
                with torch.no_grad():
                    latents = vae.encode(wanted).latent_dist.mean.float()
                latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
                return flow_loss(denoiser, latents, [ids[rows] for ids in pool_ids], generator)

        def watch(label: str) -> dict[str, float]:
            denoiser.eval()
            images = sample(pipeline, denoiser, watched_ids, seed=1)
            denoiser.train()
            _sheet(given.folder, label, images)
            return {"letters_right": letters_right(images, watched)}

        def enough(figures: dict[str, float]) -> bool:
            return not decay and figures["letters_right"] >= SPELLED

        plan = Phase(name, steps, given.lr, given.batch, decay)
        run_phase(plan, given.folder, given.seed, denoiser, loss_of, watch, enough)

    phase("spelling", given.spelling_steps, _only(CLEAR), decay=False)
    phase("styles", given.styles_steps, None, decay=True)
    denoiser.eval()


def held_out_words() -> frozenset[str]:
    """The words of the packaged prompt sets: what reinforcement and its evaluation draw, training has never drawn."""
    sets = [load_prompts(resolve_prompt_path(name), rm_type=None) for name in ("tiny-ocr", "tiny-ocr-eval")]
    return frozenset(quoted_target(prompt.text) or "" for prompts in sets for prompt in prompts)


def _of(pool: Captions, rows: torch.Tensor) -> Captions:
    """The rows without their texts, which are not needed and live in Python."""
    rows = rows.cpu()
    return Captions(pool.letters[rows], pool.ground[rows], pool.ink[rows], pool.style[rows], [""] * len(rows))


def _only(style: int) -> tuple[float, ...]:
    return tuple(float(i == style) for i in range(len(STYLES)))


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu")


def _sheet(folder: Path, name: str, images: torch.Tensor) -> None:
    """All of them in one picture, eight in a row."""
    rows = [torch.cat(list(images[n : n + 8]), 2) for n in range(0, len(images), 8)]
    pixels = (torch.cat(rows, 1).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    (folder / "samples").mkdir(exist_ok=True)
    Image.fromarray(pixels).save(folder / "samples" / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
