"""Phases carry on where they were broken off; the pipeline's parts fit together; the packaged weights are what the card
says."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from miles_core.families.resolve import checkpoint_digest, family_of, resolve_checkpoint
from miles_core.words import CHECKPOINT, phases, train
from miles_core.words.architecture import TOKENS, clip_tokenizer, t5_tokenizer, words_pipeline
from miles_core.words.captions import vocabulary
from miles_core.words.denoiser import TOKENIZERS, Denoiser, flow_loss, sample, tokenized
from miles_core.words.phases import Phase, run_phase

PLAN = Phase("some", 12, 1e-2, 8, decay=True)


class Broken(Exception):
    pass


def regression(folder: Path, stop_at: int | None = None, enough: float = -1.0) -> tuple[nn.Linear, list[float]]:
    torch.manual_seed(0)
    module, losses = nn.Linear(4, 1), []

    def loss_of(generator: torch.Generator) -> torch.Tensor:
        if len(losses) == stop_at:
            raise Broken
        x = torch.randn(PLAN.batch, 4, generator=generator)
        loss = (module(x) - x.sum(1, keepdim=True)).square().mean()
        losses.append(loss.item())
        return loss

    run_phase(PLAN, folder, 3, module, loss_of, lambda name: {"told": 1.0}, lambda figures: figures["loss"] < enough)
    return module, losses


class TestPhases:
    @pytest.fixture(autouse=True)
    def often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(phases, "EVERY", 4)

    def test_one_that_was_broken_off_ends_with_the_same_weights(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        whole, losses = regression(tmp_path / "a")
        with pytest.raises(Broken):
            regression(tmp_path / "b", stop_at=6)
        again, rest = regression(tmp_path / "b")
        assert losses[4:] == rest and len(rest) == 8
        assert torch.equal(whole.weight, again.weight) and torch.equal(whole.bias, again.bias)

    def test_a_finished_one_is_not_trained_again(self, tmp_path: Path) -> None:
        whole, _ = regression(tmp_path)
        again, losses = regression(tmp_path)
        assert losses == [] and torch.equal(whole.weight, again.weight)
        assert (tmp_path / "log.jsonl").read_text().count("\n") == 3

    def test_one_that_reached_its_aim_ends(self, tmp_path: Path) -> None:
        _, losses = regression(tmp_path, enough=1e9)
        assert len(losses) == 4 and regression(tmp_path)[1] == []

    def test_the_weights_are_the_mean_of_the_last_steps(self, tmp_path: Path) -> None:
        from safetensors import safe_open

        torch.manual_seed(0)
        start = nn.Linear(4, 1).weight
        module, _ = regression(tmp_path)

        with safe_open(tmp_path / "some.safetensors", "pt") as kept:
            assert torch.equal(module.weight, kept.get_tensor("mean.weight"))
            assert not torch.equal(module.weight, kept.get_tensor("weights.weight"))
        assert not torch.equal(module.weight, start)

    def test_the_rate_warms_up_and_falls_to_nothing(self) -> None:
        long = Phase("x", 1000, 1.0, 1, decay=True)
        rates = [long.lr_at(step) for step in range(1000)]
        assert rates[0] < 0.02 and max(rates) > 0.9 and rates[-1] < 1e-4
        assert Phase("x", 1000, 1.0, 1, decay=False).lr_at(999) == 1.0


class TestPipeline:
    def test_a_word_of_the_captions_is_one_token(self) -> None:
        clip, t5 = clip_tokenizer("!"), t5_tokenizer()
        for word in vocabulary():
            assert len(t5(word).input_ids) == 2, word
        single = [len(clip(word).input_ids) == 3 for word in vocabulary()]
        assert sum(single) >= len(single) - 1

    def test_every_letter_of_the_longest_caption_is_read(self) -> None:
        longest = 'white letters on a purple wall that spell "QUEEN", cluttered'
        pipeline = words_pipeline()
        other = [ids.tolist() for ids in tokenized(pipeline, [longest, longest.replace("QUEEN", "QUEEM")])]
        assert all(len(a) == TOKENS and a != b for a, b in other)
        assert all(getattr(pipeline, name).model_max_length == TOKENS for name in TOKENIZERS)

    def test_a_loss_reaches_every_part(self) -> None:
        pipeline = words_pipeline()
        denoiser = Denoiser(pipeline).train()
        ids = tokenized(pipeline, ['a red sign that says "CAT"', ""])
        generator = torch.Generator().manual_seed(0)
        flow_loss(denoiser, torch.randn(2, 16, 8, 16, generator=generator), ids, generator).backward()
        still = {name.split(".")[0] for name, p in denoiser.named_parameters() if p.grad is None or not p.grad.any()}
        moved = {name.split(".")[0] for name, p in denoiser.named_parameters() if p.grad is not None and p.grad.any()}
        assert moved == {"encoders", "transformer"}, still

    def test_seeds_make_pipelines(self) -> None:
        one, two, three = (words_pipeline(seed).transformer.state_dict() for seed in (0, 0, 1))
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert any(not torch.equal(one[name], three[name]) for name in one)

    def test_training_writes_a_checkpoint_that_the_product_knows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(train, "WATCHED", 8)
        monkeypatch.setattr(train, "MEASURED", 8)
        few = ["--device", "cpu", "--pool", "64", "--batch", "4"]
        few += ["--vae-steps", "1", "--spelling-steps", "1", "--styles-steps", "1"]
        assert train.main([str(tmp_path), *few]) == 0
        made = resolve_checkpoint(str(tmp_path / "checkpoint"), tmp_path)
        assert family_of(made) == family_of(CHECKPOINT)
        assert [line.split('"')[3] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
            "vae",
            "spelling",
            "styles",
        ]
        assert {path.stem for path in (tmp_path / "samples").glob("*.png")} == {
            "vae-00001",
            "spelling-00001",
            "styles-00001",
        }
        before = checkpoint_digest(made)
        assert train.main([str(tmp_path), *few]) == 0
        assert checkpoint_digest(made) == before


class TestPackaged:
    def test_the_card_tells_of_these_weights(self) -> None:
        card = (CHECKPOINT / "README.md").read_text()
        told = dict(re.findall(r"\| `([\w/.]+\.safetensors)` \| `([0-9a-f]{64})` \|", card))
        files = {str(path.relative_to(CHECKPOINT)): path for path in CHECKPOINT.rglob("*.safetensors")}
        assert told == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}

    def test_it_is_small(self) -> None:
        assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*.safetensors")) < 15e6

    def test_its_parts_are_the_architecture(self) -> None:
        from diffusers import SD3Transformer2DModel

        kept = SD3Transformer2DModel.from_pretrained(CHECKPOINT / "transformer", local_files_only=True)
        made = words_pipeline().transformer
        assert {n: p.shape for n, p in kept.named_parameters()} == {n: p.shape for n, p in made.named_parameters()}

    def test_it_spells(self) -> None:
        from diffusers import StableDiffusion3Pipeline

        from miles_core.words import captions
        from miles_core.words.reading import letters_right

        pipeline = StableDiffusion3Pipeline.from_pretrained(
            CHECKPOINT, torch_dtype=torch.float32, local_files_only=True
        )
        shares = tuple(float(style.name == "clear") for style in captions.STYLES)
        asked = captions.draw(16, torch.Generator().manual_seed(9), shares=shares, named=1.0, empty=0.0)
        images = sample(pipeline, Denoiser(pipeline).eval(), tokenized(pipeline, asked.texts), seed=1)
        assert letters_right(images, asked) > 0.95
