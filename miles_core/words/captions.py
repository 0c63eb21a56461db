"""What the images show and how they are described: a word, on something, in a style."""

from dataclasses import dataclass

import torch

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHORTEST, LONGEST = 3, 5
BLANK = len(LETTERS)

COLOURS = {
    "red": (0.80, 0.12, 0.12),
    "green": (0.10, 0.50, 0.20),
    "blue": (0.12, 0.25, 0.75),
    "yellow": (0.95, 0.85, 0.20),
    "orange": (0.95, 0.55, 0.10),
    "purple": (0.45, 0.15, 0.60),
    "white": (0.97, 0.97, 0.97),
    "black": (0.04, 0.04, 0.04),
}
NAMES = tuple(COLOURS)
DARK = (0.06, 0.06, 0.10)


@dataclass(frozen=True)
class Scene:
    """A caption's form. `ground` and `ink` are colours; None: any of COLOURS, named in the caption where it says
    {ground} or {ink}, and the ink black or white, whichever stands out, where the caption names none."""

    text: str
    ground: tuple[float, float, float] | None = None
    ink: tuple[float, float, float] | None = None


SCENES = (
    Scene('a {ground} sign that says "{word}"'),
    Scene('{ink} letters on a {ground} wall that spell "{word}"'),
    Scene('a wooden board with the word "{word}"', ground=(0.55, 0.35, 0.17), ink=(0.97, 0.93, 0.80)),
    Scene('a neon light in a window that reads "{word}"', ground=DARK, ink=(0.20, 1.00, 0.75)),
    Scene('a poster with the title "{word}"', ground=(0.97, 0.80, 0.80), ink=(0.25, 0.10, 0.35)),
    Scene('chalk on a blackboard saying "{word}"', ground=(0.15, 0.22, 0.19), ink=(0.92, 0.92, 0.88)),
    Scene('a {ground} street sign that says "{word}"'),
    Scene('a cardboard box labelled "{word}"', ground=(0.76, 0.60, 0.42), ink=(0.12, 0.08, 0.05)),
)


@dataclass(frozen=True)
class Style:
    """How the word is drawn. share: of the images whose caption names no style."""

    name: str
    share: float


STYLES = (
    Style("clear", 0.40),
    Style("faded", 0.20),
    Style("small", 0.15),
    Style("cluttered", 0.15),
    Style("tilted", 0.10),
)
CLEAR = 0
NAMED, EMPTY = 0.3, 0.1
"""Shares of the captions that name their style, and of those that are empty (for classifier-free guidance)."""


@dataclass
class Captions:
    """N captions and what their images must show: letters (N, 5) with BLANK after the word's end, ground and ink
    (N, 3) in [0, 1], style (N,). texts are the captions, some of them empty."""

    letters: torch.Tensor
    ground: torch.Tensor
    ink: torch.Tensor
    style: torch.Tensor
    texts: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    def words(self) -> list[str]:
        return _words(self.letters)

    def take(self, rows: torch.Tensor) -> "Captions":
        """The rows (n,) of them."""
        texts = [self.texts[i] for i in rows.tolist()]
        return Captions(self.letters[rows], self.ground[rows], self.ink[rows], self.style[rows], texts)


def vocabulary() -> list[str]:
    """Every word that a caption can hold beside the drawn one, longest first."""
    words = {word for scene in SCENES for word in scene.text.split() if word.isalpha()}
    return sorted(words | set(NAMES) | {style.name for style in STYLES}, key=lambda word: (-len(word), word))


def draw(
    count: int,
    generator: torch.Generator,
    *,
    shares: tuple[float, ...] | None = None,
    named: float = NAMED,
    empty: float = EMPTY,
    avoid: frozenset[str] = frozenset(),
) -> Captions:
    """`count` captions of random letters. shares: of the styles, their own where not given; avoid: words that are held
    out, replaced by another draw."""
    shares = shares or tuple(style.share for style in STYLES)
    letters = _letters(count, generator)
    while held := [i for i, word in enumerate(_words(letters)) if word in avoid]:
        letters[held] = _letters(len(held), generator)
    style = torch.multinomial(torch.tensor(shares), count, replacement=True, generator=generator)
    scene = torch.randint(len(SCENES), (count,), generator=generator).tolist()
    colours = torch.randint(len(NAMES), (count, 2), generator=generator).tolist()
    says_style = (torch.rand(count, generator=generator) < named).tolist()
    is_empty = (torch.rand(count, generator=generator) < empty).tolist()
    made = [
        describe(word, scene[i], colours[i], STYLES[int(style[i])].name if says_style[i] else None)
        for i, word in enumerate(_words(letters))
    ]
    return Captions(
        letters=letters,
        ground=torch.tensor([ground for _, ground, _ in made]),
        ink=torch.tensor([ink for _, _, ink in made]),
        style=style,
        texts=["" if is_empty[i] else text for i, (text, _, _) in enumerate(made)],
    )


def describe(
    word: str, scene: int, colours: tuple[int, int] | list[int], style: str | None = None
) -> tuple[str, tuple[float, float, float], tuple[float, float, float]]:
    """The caption, and the colours of ground and ink, of one image. colours: indices into COLOURS, used where the scene
    leaves them open; an ink that would not stand out against the ground becomes black or white."""
    form = SCENES[scene]
    ground_name, ink_name = NAMES[colours[0]], NAMES[colours[1]]
    ground = form.ground or COLOURS[ground_name]
    contrast = "white" if _luminance(ground) < 0.45 else "black"
    if "{ink}" not in form.text or abs(_luminance(COLOURS[ink_name]) - _luminance(ground)) < 0.3:
        ink_name = contrast
    text = form.text.format(word=word, ground=ground_name, ink=ink_name)
    return text + (f", {style}" if style else ""), ground, form.ink or COLOURS[ink_name]


def of_words(words: list[str]) -> torch.Tensor:
    """Letters (N, 5) of words of up to five capital letters."""
    rows = [[LETTERS.index(c) for c in word] + [BLANK] * (LONGEST - len(word)) for word in words]
    return torch.tensor(rows, dtype=torch.long)


def _letters(count: int, generator: torch.Generator) -> torch.Tensor:
    letters = torch.randint(len(LETTERS), (count, LONGEST), generator=generator)
    length = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    return torch.where(torch.arange(LONGEST) < length, letters, BLANK)


def _words(letters: torch.Tensor) -> list[str]:
    return ["".join(LETTERS[i] for i in row if i != BLANK) for row in letters.tolist()]


def _luminance(colour: tuple[float, float, float]) -> float:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue
