"""What a message says to somebody who gave a name that is not there."""

from __future__ import annotations

from lastbit.errors import MOST_NAMES, no_such


def test_few_names_are_all_told() -> None:
    assert (
        no_such("axis", "wait", ["weight", "sum"]) == "unknown axis 'wait'; did you mean 'weight'? Known: sum, weight."
    )
    assert no_such("axis", "zzz", []) == "unknown axis 'zzz'. Known: none."


def test_of_many_names_the_most_alike_are_told() -> None:
    names = [f"triton[{n}]" for n in range(90)] + ["eager[softmax]"]
    said = no_such("kernel", "eager[sofmax]", names)
    assert said.startswith("unknown kernel 'eager[sofmax]'; did you mean 'eager[softmax]'? Known: eager[softmax], ")
    assert said.endswith(f" and {91 - MOST_NAMES} more.") and said.count(", ") == MOST_NAMES - 1
