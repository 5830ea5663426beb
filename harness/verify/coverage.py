"""Coverage: the options of cases' choices that a run has judged, and those that it has missed."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress

from lastbit.case import Case, Choices, Option, parse_case
from lastbit.errors import UsageError
from lastbit.inputs.choices import Feature, all_features, features_of
from lastbit.result import TURNED_DOWN, CaseResult
from lastbit.run import Coverage
from lastbit.verify.plan import Planned

Subject = tuple[str, str]


def coverage_of(planned: Iterable[Planned], results: Iterable[CaseResult]) -> tuple[Coverage, ...]:
    """Make one entry per kernel, device, choice and dtype of the planned groups."""
    declared: dict[Subject, list[Choices]] = {}
    for item in planned:
        declared.setdefault((item.kernel, item.device), []).append(item.choices)
    judged, declined = defaultdict[Subject, list[Case]](list), defaultdict[Subject, list[Case]](list)
    parsed = functools.cache(parse_case)  # kernels have cases in common
    for result in results:
        with suppress(UsageError):  # of cases that could not be made there is no line
            kind = declined if result.verdict in TURNED_DOWN else judged
            if result.counted:
                kind[result.kernel, result.device].append(parsed(result.case))
    return tuple(one for key, own in declared.items() for one in covered(key, own, judged[key], declined[key]))


def covered(
    subject: Subject, declared: Iterable[Choices], judged: Iterable[Case], declined: Iterable[Case] = ()
) -> Iterator[Coverage]:
    """Yield the coverage of a kernel on a device, from the cases it was judged on and those it turned down."""
    options: dict[str, dict[Option, None]] = {}
    wanted: dict[tuple[str, str], dict[Option, None]] = {}
    for choices in declared:
        for choice, own in choices.items():
            options.setdefault(choice, {}).update(dict.fromkeys(own))
        for one in all_features(choices):
            wanted.setdefault((one.choice, one.dtype), {})[one.option] = None
    merged = {choice: tuple(own) for choice, own in options.items()}
    seen, refused = ({f for case in some for f in features_of(case, merged)} for some in (judged, declined))
    for (choice, dtype), found in wanted.items():
        features = [Feature(choice, option, dtype) for option in found]
        unseen = [one for one in features if one not in seen]
        yield Coverage(
            *subject,
            choice,
            dtype,
            judged=_spelled(one for one in features if one in seen),
            declined=_spelled(one for one in unseen if one in refused),
            missing=_spelled(one for one in unseen if one not in refused),
        )


def _spelled(features: Iterable[Feature]) -> tuple[str, ...]:
    return tuple("none" if one.option is None else str(one.option) for one in features)
