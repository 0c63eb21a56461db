"""Captions and their images."""

from collections import Counter

import pytest
import torch

from miles_core.words import captions
from miles_core.words.captions import COLOURS, SCENES, STYLES, Captions
from miles_core.words.reading import letters_right
from miles_core.words.render import CELL_WIDTH, glyphs, render, word_masks


def only(name: str) -> tuple[float, ...]:
    return tuple(float(style.name == name) for style in STYLES)


def drawn(count: int, seed: int = 0, **options: object) -> Captions:
    return captions.draw(count, torch.Generator().manual_seed(seed), **options)


def image(word: str, style: str = "clear", seed: int = 0) -> torch.Tensor:
    number = [one.name for one in STYLES].index(style)
    made = Captions(
        captions.of_words([word]),
        torch.tensor([COLOURS["blue"]]),
        torch.tensor([COLOURS["white"]]),
        torch.tensor([number]),
        [""],
    )
    return render(made, torch.Generator().manual_seed(seed))


class TestCaptions:
    def test_a_caption_says_what_the_image_shows(self) -> None:
        made = drawn(500, named=1.0, empty=0.0)
        for text, word, style in zip(made.texts, made.words(), made.style.tolist(), strict=True):
            assert f'"{word}"' in text and text.endswith(f", {STYLES[style].name}")
            assert 3 <= len(word) <= 5

    def test_shares(self) -> None:
        made = drawn(20_000)
        counts = Counter(made.style.tolist())
        assert [counts[i] / 20_000 for i in range(len(STYLES))] == pytest.approx([s.share for s in STYLES], abs=0.015)
        assert sum(style.share for style in STYLES) == pytest.approx(1)
        full = [text for text in made.texts if text]
        assert len(full) / 20_000 == pytest.approx(1 - captions.EMPTY, abs=0.01)
        named = sum(any(text.endswith(f", {s.name}") for s in STYLES) for text in full)
        assert named / len(full) == pytest.approx(captions.NAMED, abs=0.015)

    def test_held_out_words_are_never_drawn(self) -> None:
        seen = frozenset(drawn(3000, seed=1).words())
        assert seen & set(drawn(3000, seed=1).words())
        assert not seen & set(drawn(3000, seed=1, avoid=seen).words())

    def test_ink_stands_out_and_is_the_colour_that_the_caption_names(self) -> None:
        for scene in range(len(SCENES)):
            for colours in ((i, j) for i in range(len(COLOURS)) for j in range(len(COLOURS))):
                text, ground, ink = captions.describe("CAT", scene, colours)
                assert abs(captions._luminance(ground) - captions._luminance(ink)) >= 0.25, text
                if "letters" in text:
                    assert COLOURS[text.split()[0]] == ink

    def test_the_packaged_prompts_are_captions_of_scenes_it_knows(self) -> None:
        """A word of them that is no token of its own would be letters to the checkpoint."""
        from miles_core.data.prompts import load_prompts, resolve_prompt_path

        known = set(captions.vocabulary())
        for name in ("tiny-ocr", "tiny-ocr-eval"):
            for prompt in load_prompts(resolve_prompt_path(name), rm_type=None):
                said = [word for word in prompt.text.split() if '"' not in word]
                assert set(said) <= known, prompt.text


class TestRender:
    def test_the_same_draw_gives_the_same_image_and_another_gives_another(self) -> None:
        made = drawn(16, shares=only("cluttered"))
        one, two, three = (render(made, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
        assert one.shape == (16, 3, 64, 128) and one.min() >= 0 and one.max() <= 1
        assert torch.equal(one, two) and not torch.equal(one, three)

    def test_a_clear_word_stands_in_the_middle(self) -> None:
        mask = word_masks(captions.of_words(["HOH"]))[0, 0]
        columns = mask.sum(0).nonzero()[:, 0]
        assert abs(columns.float().mean() - 63.5) < 1
        assert columns.min() >= 64 - 1.5 * CELL_WIDTH and columns.max() < 64 + 1.5 * CELL_WIDTH

    def test_every_letter_has_its_own_shape(self) -> None:
        shapes = glyphs().flatten(1)
        assert shapes[26].abs().sum() == 0
        distances = torch.cdist(shapes[:26], shapes[:26]) + 99 * torch.eye(26)
        assert distances.min() > 2

    def test_what_a_style_does(self) -> None:
        clear, faded, small, tilted, cluttered = (
            image("MILES", style) for style in ("clear", "faded", "small", "tilted", "cluttered")
        )
        ground = torch.tensor(COLOURS["blue"])[None, :, None, None]
        ink = {
            name: (picture - ground).abs().sum().item()
            for name, picture in {"clear": clear, "faded": faded, "small": small, "cluttered": cluttered}.items()
        }
        assert ink["faded"] < 0.1 * ink["clear"] and ink["small"] < 0.1 * ink["clear"] < ink["cluttered"]
        rows = (tilted - ground).abs().sum((0, 1, 3)) > 0.5
        assert rows.sum() > (clear - ground).abs().sum((0, 1, 3)).gt(0.5).sum()


class TestReading:
    def test_letters_of_clear_images_are_told_and_wrong_ones_are_not_taken(self) -> None:
        made = drawn(64, shares=only("clear"))
        pictures = render(made, torch.Generator().manual_seed(0))
        assert letters_right(pictures, made) == 1.0
        others = drawn(64, seed=5, shares=only("clear"))
        others.ground, others.ink = made.ground, made.ink
        assert letters_right(pictures, others) < 0.2

    def test_blank_pictures_are_not_read(self) -> None:
        made = drawn(64, shares=only("clear"))
        assert letters_right(made.ground[..., None, None].expand(-1, -1, 64, 128), made) < 0.2
