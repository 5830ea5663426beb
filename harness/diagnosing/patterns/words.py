"""Numbers and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def number(value: float) -> str:
    """A number in few digits; all of them where it is a whole number."""
    if value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}"


def times(ratio: float) -> str:
    """A ratio in few digits, more where it is close to 1."""
    return f"{ratio:.7g}" if 0.99 < ratio < 1.01 else f"{ratio:.4g}"


def all_of(count: int, what: str) -> str:
    """`count` things that are wrong, as the subject of a sentence."""
    return f"The one {what}" if count == 1 else f"All {count:,} {what}s"


def listed(items: Sequence[object]) -> str:
    """`1`, `1 and 2`, `1, 2 and 3`."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def ordinal(n: int) -> str:
    """`1st`, `2nd`, `11th`."""
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def joined(sentence: str, count: int, of: int) -> str:
    """The sentence with the share of the wrong elements that it explains, unless these are all."""
    return f"{sentence}." if count == of else f"{sentence} ({count:,} of {of:,} wrong elements)."
