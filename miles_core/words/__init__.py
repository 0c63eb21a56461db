"""A small SD3 pipeline that draws words, trained by the code of this room: `python -m miles_core.words.train FOLDER`.

Its images come from `render`, their captions from `captions`; `architecture` makes the untrained pipeline. The trained
weights lie in checkpoint/, with their model card.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
