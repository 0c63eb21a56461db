"""How large a family's tensors are, from a pipeline's JSON and safetensors headers: no torch, so that a driver can ask."""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shapes:
    """What a family's file takes over: the VAE's channels and factor, the tokens that its published models read of a text
    by tokenizer, LoRA targets."""

    latent_channels: int
    vae_scale_factor: int
    longest_texts: Mapping[str, int]
    lora_target_modules: tuple[str, ...]

    def latent_elements(self, height: int, width: int) -> int:
        """Numbers in one latent of an image of height x width pixels."""
        return self.latent_channels * (height // self.vae_scale_factor) * (width // self.vae_scale_factor)

    def text_tokens(self, folder: Path) -> dict[str, int]:
        """Tokens that are read of a text, by tokenizer: fewer than the published models' where the pipeline's own say so."""
        found = dict(self.longest_texts)
        for name, most in found.items():
            path = folder / name / "tokenizer_config.json"
            own = json.loads(path.read_text()).get("model_max_length") if path.is_file() else None
            found[name] = min(most, own or most)
        return found

    def conditioning_elements(self, folder: Path) -> int:
        """Numbers in the conditioning of one text: tokens of the transformer's width, and the pooled projections."""
        config = json.loads((folder / "transformer" / "config.json").read_text())
        return int(
            sum(self.text_tokens(folder).values()) * config["joint_attention_dim"] + config["pooled_projection_dim"]
        )


SHAPES = {
    "sd3": Shapes(
        latent_channels=16,
        vae_scale_factor=8,
        longest_texts={"tokenizer": 77, "tokenizer_2": 77, "tokenizer_3": 256},
        lora_target_modules=(
            "attn.to_q",
            "attn.to_k",
            "attn.to_v",
            "attn.to_out.0",
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
        ),
    )
}


def lora_parameters(folder: Path, targets: Sequence[str], rank: int) -> list[int]:
    """Parameters of each pair B A that a LoRA of `rank` adds to the transformer's linear layers named by `targets`."""
    endings = tuple(f".{target}.weight" for target in targets)
    return [
        rank * (shape[0] + shape[1])
        for name, shape in _weights(folder / "transformer")
        if f".{name}".endswith(endings) and len(shape) == 2
    ]


def component_parameters(folder: Path) -> dict[str, int]:
    """Parameters of each component of a pipeline that has weights, by its folder."""
    found = {
        path.name: sum(math.prod(shape) for _, shape in _weights(path))
        for path in sorted(folder.iterdir())
        if path.is_dir()
    }
    return {name: count for name, count in found.items() if count}


def _weights(folder: Path) -> Iterator[tuple[str, list[int]]]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")
