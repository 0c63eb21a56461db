"""Images of captions, drawn by tensor operations: a font's letters in fixed cells, bent and hidden as the style has it."""

from functools import cache

import torch
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as F

from miles_core.words.captions import BLANK, LETTERS, LONGEST, STYLES, Captions

HEIGHT, WIDTH = 64, 128
CELL_HEIGHT, CELL_WIDTH = 36, 24
_FINE = 2
_STROKES = 10
NAMES = [style.name for style in STYLES]
CLUTTERED = NAMES.index("cluttered")


def render(captions: Captions, generator: torch.Generator) -> torch.Tensor:
    """Images (N, 3, 64, 128) in [0, 1], on the generator's device."""
    device = generator.device
    count = len(captions)
    letters, style = captions.letters.to(device), captions.style.to(device)
    ground, ink = (colour.to(device)[..., None, None] for colour in (captions.ground, captions.ink))

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(count, device=device, generator=generator) * (high - low) + low

    def where(name: str, value: torch.Tensor, other: float) -> torch.Tensor:
        return torch.where(style == NAMES.index(name), value, other)

    scale = where("small", uniform(0.15, 0.23), 1.0) * where("tilted", uniform(0.42, 0.50), 1.0)
    angle = where("tilted", uniform(0.8, 1.4) * uniform(-1, 1).sign(), 0.0)
    right, down = where("small", uniform(-0.5, 0.5), 0.0), where("small", uniform(-0.5, 0.5), 0.0)
    contrast = where("faded", uniform(0.01, 0.06), 1.0)[:, None, None, None]
    mask = _bent(word_masks(letters, _FINE), scale, angle, right, down)
    image = ground + mask * contrast * (ink - ground)
    if (captions.style == CLUTTERED).any():
        image = _cluttered(image, ink, style == CLUTTERED, generator)
    return image.clamp(0, 1)


def word_masks(letters: torch.Tensor, fine: int = 1) -> torch.Tensor:
    """Where the ink is, (N, 1, 64 fine, 128 fine) in [0, 1]: words in the middle, a cell of 24 x 36 pixels a letter."""
    atlas = glyphs(fine).to(letters.device)
    cell_height, cell_width = CELL_HEIGHT * fine, CELL_WIDTH * fine
    length = (letters != BLANK).sum(1, keepdim=True)
    column = torch.arange(WIDTH * fine, device=letters.device) - (WIDTH * fine - length * cell_width) // 2
    slot = column.div(cell_width, rounding_mode="floor")
    inside = (slot >= 0) & (slot < length)
    letter = torch.where(inside, letters.gather(1, slot.clamp(0, LONGEST - 1)), BLANK)
    lines = atlas[letter, column.remainder(cell_width)].transpose(1, 2)
    above = (HEIGHT * fine - cell_height) // 2
    return F.pad(lines, (0, 0, above, above))[:, None]


@cache
def glyphs(fine: int = 1) -> torch.Tensor:
    """The font's letters, (27, 24 fine, 36 fine): letter, column, row; the last is blank. Pillow's own font (Aileron,
    CC0), made narrow."""
    size = 200
    font = ImageFont.load_default(size)
    made = []
    for letter in LETTERS:
        left, top, right, bottom = font.getbbox(letter, stroke_width=6)
        page = Image.new("L", (int(right - left), int(bottom - top)))
        ImageDraw.Draw(page).text((-left, -top), letter, fill=255, font=font, stroke_width=6)
        width = round(min(page.width * 0.12, CELL_WIDTH - 3) * fine)
        height = round((CELL_HEIGHT - 6) * fine)
        cell = Image.new("L", (CELL_WIDTH * fine, CELL_HEIGHT * fine))
        cell.paste(page.resize((width, height), Image.Resampling.LANCZOS), ((cell.width - width) // 2, 3 * fine))
        made.append(torch.frombuffer(bytearray(cell.tobytes()), dtype=torch.uint8).view(cell.height, cell.width).T)
    return torch.stack([*made, torch.zeros_like(made[0])]).float() / 255


def _bent(
    fine: torch.Tensor, scale: torch.Tensor, angle: torch.Tensor, right: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The masks scaled, turned (radians) and moved (as parts of half the picture, less the room the word needs)."""
    cos, sin, wide = angle.cos() / scale, angle.sin() / scale, WIDTH / HEIGHT
    x, y = right * (1 - scale), down * (1 - scale)
    rows = [
        torch.stack([cos, sin / wide, -(cos * x + sin / wide * y)], -1),
        torch.stack([-sin * wide, cos, -(-sin * wide * x + cos * y)], -1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(fine.shape), align_corners=False)
    return F.avg_pool2d(F.grid_sample(fine, grid, align_corners=False), _FINE)


def _cluttered(image: torch.Tensor, ink: torch.Tensor, on: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Strokes of the ink's colour across the pictures that are `on`."""
    count, device, on = len(image), image.device, on[:, None, None]
    y = torch.arange(HEIGHT, device=device)[:, None] + 0.5
    x = torch.arange(WIDTH, device=device)[None, :] + 0.5
    for _ in range(_STROKES):
        ends = torch.rand(count, 4, device=device, generator=generator)
        half = (torch.rand(count, device=device, generator=generator) * 1.2 + 0.8)[:, None, None]
        x0, x1 = (ends[:, i, None, None] * WIDTH for i in (0, 1))
        y0, y1 = (ends[:, i, None, None] * HEIGHT for i in (2, 3))
        dx, dy = x1 - x0, y1 - y0
        along = (((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy + 1e-6)).clamp(0, 1)
        distance = ((x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2).sqrt()
        stroke = ((half + 0.5 - distance).clamp(0, 1) * on)[:, None]
        image = image + stroke * (ink - image)
    return image
