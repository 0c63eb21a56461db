"""What OCR reads in the pictures of the checkpoint that draws words, by style, noise level and guidance.

    python benchmarks/words.py [--checkpoint FOLDER] [--seed 0] [--per-prompt 8] [--styles any,clear] [--settings 0.7:1.0]
    python benchmarks/words.py --training FOLDER [FOLDER …]

Held-out prompts (the packaged set tiny-ocr-eval, 32 words that the checkpoint was never trained on), as they are ("any":
the checkpoint picks a style) and with each style named; the embedded engine on the CPU, 10 steps, every one an SDE step
where there is noise. Writes benchmarks/results/words.json, or into the folder that the environment variable OUT names:
the mean OCR reward, the share of groups of 8 whose rewards differ, and the mean spread within a group. With --sheet PNG
the first pictures of each style at the first setting. --training: what OCR reads in the pictures that a training left in
its folder, beside its own log, into words_training.json.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

from miles_core.data.prompts import load_prompts, resolve_prompt_path
from miles_core.rewards.ocr import OcrReader, ocr_reward
from miles_core.rewards.ocr_models import ocr_model_dirs
from miles_core.rewards.quoted import quoted_target
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.protocol import GenerateRequest
from miles_core.words import CHECKPOINT
from miles_core.words.captions import STYLES

ANY = "any"
GUIDANCE = 2.0


def main() -> int:
    """Draw, read, write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-prompt", type=int, default=8)
    parser.add_argument("--styles", default=",".join([ANY, *(style.name for style in STYLES)]))
    parser.add_argument("--settings", default=f"0.7:1.0,0.7:{GUIDANCE},0.0:1.0,0.0:{GUIDANCE}", help="noise:guidance")
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--training", type=Path, nargs="+")
    given = parser.parse_args()
    torch.set_num_threads(1)
    reader = OcrReader(*ocr_model_dirs(Path(tempfile.gettempdir()) / "miles-words-ocr"))
    if given.training:
        write("words_training", {folder.name: by_step(folder, reader) for folder in given.training})
        return 0
    engine = DiffusersEngine(name="words", checkpoint=str(given.checkpoint), family="sd3", dtype="fp32", device="cpu")
    engine.start()
    prompts = [prompt.text for prompt in load_prompts(resolve_prompt_path("tiny-ocr-eval"), rm_type=None)]
    figures: dict[str, Any] = {}
    rows = []
    for setting in given.settings.split(","):
        noise, guidance = (float(part) for part in setting.split(":"))
        for style in given.styles.split(","):
            texts = [text if style == ANY else f"{text}, {style}" for text in prompts]
            started = time.monotonic()
            groups, pictures = [], []
            for i, text in enumerate(texts):
                images = draw(engine, text, given.seed + 1000 * i, given.per_prompt, noise, guidance)
                groups.append([ocr_reward(reader.read(image.numpy()), quoted_target(text) or "") for image in images])
                pictures.append(images[0])
            figures.setdefault(f"noise {noise}, guidance {guidance}", {})[style] = {
                "images": sum(map(len, groups)),
                "reward": round(statistics.mean(r for group in groups for r in group), 3),
                "groups_with_spread": round(statistics.mean(len(set(group)) > 1 for group in groups), 3),
                "spread": round(statistics.mean(statistics.pstdev(group) for group in groups), 3),
                "images_per_second": round(sum(map(len, groups)) / (time.monotonic() - started), 2),
            }
            print(setting, style, figures[f"noise {noise}, guidance {guidance}"][style], flush=True)
            rows.append(torch.cat(pictures[:8], 1))
    if given.sheet:
        Image.fromarray(torch.cat(rows[: len(given.styles.split(","))], 0).numpy()).save(given.sheet)
    weights = given.checkpoint / "transformer" / "diffusion_pytorch_model.safetensors"
    write("words", figures, transformer_sha256=hashlib.sha256(weights.read_bytes()).hexdigest())
    return 0


def by_step(folder: Path, reader: OcrReader) -> list[dict[str, object]]:
    """The training's log, a line with pictures of clear words with what OCR reads in them (Euler steps, no guidance)."""
    texts = json.loads((folder / "samples" / "captions.json").read_text())
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for line in lines:
        sheet = folder / "samples" / f"{line['phase']}-{line['step']:05}.png"
        if line["phase"] == "vae" or not sheet.exists():
            continue
        pixels = np.asarray(Image.open(sheet).convert("RGB"))
        images = [pixels[i // 8 * 64 :][:64, i % 8 * 128 :][:, :128] for i in range(len(texts))]
        read = [
            ocr_reward(reader.read(image), quoted_target(text) or "") for image, text in zip(images, texts, strict=True)
        ]
        line["ocr"] = round(statistics.mean(read), 3)
        print(line, flush=True)
    return lines


def draw(
    engine: DiffusersEngine, prompt: str, seed: int, count: int, noise: float, guidance: float
) -> list[torch.Tensor]:
    """Images (64, 128, 3) uint8."""
    request = GenerateRequest(
        prompt=prompt,
        negative_prompt="",
        seed=seed,
        num_outputs=count,
        height=64,
        width=128,
        num_inference_steps=10,
        guidance_scale=guidance,
        sde_type="sde" if noise else "ode",
        noise_level=noise,
        log_prob_no_const=False,
        sde_step_indices=None,
        generator_device="cpu",
    )
    outputs = engine.generate(request).outputs
    return [(output.image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous() for output in outputs]


def write(name: str, figures: dict[str, object], **more: str) -> None:
    """The figures, and how they were made."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "figures": figures,
        "command": " ".join(["python benchmarks/words.py", *sys.argv[1:]]),
        "commit": done.stdout.strip(),
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    target = Path(os.environ.get("OUT") or Path(__file__).parent / "results") / f"{name}.json"
    target.write_text(json.dumps(report | more, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
