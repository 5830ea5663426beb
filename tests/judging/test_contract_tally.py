"""Tallies of a contract add up, field by field."""

from __future__ import annotations

from dataclasses import fields

from lastbit.reports.identification import ContractTally


def test_tallies_of_two_cases_are_added_field_by_field() -> None:
    names = [field.name for field in fields(ContractTally)]
    first = ContractTally(*range(1, len(names) + 1))
    both = first + ContractTally(*(10 * n for n in range(1, len(names) + 1)))
    assert [getattr(both, name) for name in names] == [11 * n for n in range(1, len(names) + 1)]
