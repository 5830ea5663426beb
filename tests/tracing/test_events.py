"""Writes find the element at an address."""

import numpy as np
import pytest

from lastbit.tracing.events import Log


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("step", [1, 4, 5, 8, 12])
@pytest.mark.parametrize("lanes", [None, [5, 3, 4, 1, 2, 0]])
@pytest.mark.parametrize("moved", [0, 1])
def test_an_address_is_that_of_the_last_element_that_covers_it(
    width: int, step: int, lanes: list[int] | None, moved: int
) -> None:
    """Evenly spaced or not; elements may overlap, as those of a view do."""
    addresses = 100 + np.arange(6) * step
    addresses[-1] += moved
    log = Log()
    log.written(None, addresses, None if lanes is None else np.array(lanes), width=width)
    for wanted in range(95, 100 + 6 * step + 10):
        covering = [i for i, start in enumerate(addresses) if start <= wanted < start + width]
        expected = -1 if not covering else covering[-1] if lanes is None else lanes[covering[-1]]
        assert log.writes[0].find(np.array([wanted]))[0] == expected
