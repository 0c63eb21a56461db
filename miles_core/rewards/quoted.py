"""The text that a prompt asks for: what stands between its first two straight double quotes."""


def quoted_target(prompt: str) -> str | None:
    """Text between the first two `"` of the prompt; None where there are not two."""
    pieces = prompt.split('"', 2)
    return pieces[1] if len(pieces) == 3 else None


def normalized(text: str) -> str:
    """Lower-case, spaces removed: the form in which read and asked-for text are compared."""
    return text.replace(" ", "").lower()


def target_fault(prompt: str) -> str | None:
    """Why the prompt cannot be scored by OCR; None where it can."""
    target = quoted_target(prompt)
    if target is None:
        return "has no text between two straight double quotes for rm_type ocr to look for"
    if not normalized(target).strip():
        return "has nothing between its first two double quotes for rm_type ocr to look for"
    return None
