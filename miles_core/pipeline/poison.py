"""Which sample of a part it is that no scorer survives: halve the part until one is left."""

from collections.abc import Callable


def find_poison(rows: int, fails: Callable[[int, int], str | None]) -> tuple[int, str] | None:
    """(row, why) of the first row that fails on its own, of a part whose `rows` rows fail together.

    fails: scores the rows from `start` up to `stop` and says why that failed, None where it did not. None is returned
    where neither half of what failed together fails: the cause is no single row.
    """
    start, stop, reason = 0, rows, ""
    if rows == 1:
        alone = fails(0, 1)
        return (0, alone) if alone else None
    while stop - start > 1:
        middle = (start + stop) // 2
        for half in ((start, middle), (middle, stop)):
            told = fails(*half)
            if told:
                (start, stop), reason = half, told
                break
        else:
            return None
    return start, reason
