"""How many letters of clear images are the right ones, told by comparing each cell with the font: fast, and only for
images whose letters stand where `render` puts clear ones. What counts in the end is OCR."""

import torch

from miles_core.words.captions import BLANK, LETTERS, Captions
from miles_core.words.render import CELL_HEIGHT, CELL_WIDTH, HEIGHT, WIDTH, glyphs


def letters_right(images: torch.Tensor, captions: Captions) -> float:
    """Share of the letters that are nearest to their own template. images (N, 3, 64, 128) in [0, 1]."""
    device = images.device
    ground, ink = (colour.to(device)[..., None, None] for colour in (captions.ground, captions.ink))
    axis = ink - ground
    mask = ((images - ground) * axis).sum(1) / (axis * axis).sum(1)
    letters = captions.letters.to(device)
    length = (letters != BLANK).sum(1)
    templates = glyphs().to(device)[: len(LETTERS)].flatten(1)
    templates = _normal(templates)
    above, right, of = (HEIGHT - CELL_HEIGHT) // 2, 0, 0
    for slot in range(letters.shape[1]):
        there = (slot < length).nonzero()[:, 0]
        left = (WIDTH - length[there] * CELL_WIDTH) // 2 + slot * CELL_WIDTH
        columns = left[:, None] + torch.arange(CELL_WIDTH, device=device)
        rows = mask[there, above : above + CELL_HEIGHT]
        cells = rows.gather(2, columns[:, None].expand(-1, CELL_HEIGHT, -1)).transpose(1, 2).flatten(1)
        found = (_normal(cells) @ templates.T).argmax(1)
        right += int((found == letters[there, slot]).sum())
        of += len(there)
    return right / of


def _normal(rows: torch.Tensor) -> torch.Tensor:
    rows = rows - rows.mean(1, keepdim=True)
    return rows / (rows.norm(dim=1, keepdim=True) + 1e-6)
