"""Which images of a run fit a page: numbers alone."""

from collections.abc import Mapping, Sequence

# Of each group at least the best, the worst and the one in the middle.
ALWAYS = 3


def fair_shares(total: float, needs: Sequence[float]) -> list[float]:
    """`total` split so that nobody gets more than it needs, and all who get less than they need get the same."""
    shares, left = [0.0] * len(needs), total
    for place, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        shares[index] = min(needs[index], left / (len(needs) - place))
        left -= shares[index]
    return shares


def in_turn(groups: Mapping[int, Sequence[int]]) -> list[int]:
    """The members of all groups: the first of each, then the second of each, and so on."""
    longest = max(map(len, groups.values()), default=0)
    return [group[turn] for turn in range(longest) for group in groups.values() if turn < len(group)]


def always(groups: Mapping[int, Sequence[int]]) -> int:
    """How many images must be shown."""
    return sum(min(ALWAYS, len(group)) for group in groups.values())
