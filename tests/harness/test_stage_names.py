"""Names of stages that the source of a reference can spell."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lastbit.stage_names import Blank, StageNames, stage_names

SUMS = ("first_sum", "second_sum")
MORE = {"key": ["listed", "nested"], 3: {"deep"}}


def known(x: Any, *, stage: Any) -> None:
    y = stage("mean", x)
    stage("large" if y else "small", stage(name="total", value=y), result=True)


def handing_on(x: Any, *, stage: Any) -> None:
    known(x, stage=stage)
    stage("last", x)


def put_together(x: Any, number: int, *, prefix: str, stage: Any) -> None:
    """Words of a docstring are no names."""
    for part in ("left", "right"):
        stage(f"sum_{part}", x)
        stage("half_" + part, x)
        stage("%s_scaled" % part, x)  # noqa: UP031 - as references may
        stage("{}_shifted".format(part), x)  # noqa: UP032 - as references may
    for name in SUMS:
        stage(name, x)
    if part == "compared":
        raise ValueError("raised")
    stage(MORE["key"][number], x)


def free(x: Any, *, prefix: str, stage: Any) -> None:
    stage(f"{prefix}_of", x)


def joined(x: Any, *, stage: Any) -> None:
    stage("_".join(["a", "b"]), x)


def kept(x: Any, *, stage: Any) -> None:
    record = stage
    record("kept", x)


def attribute(x: Any, *, contract: Any, stage: Any) -> None:
    x.stage("of_an_object", x)
    if contract.has("an_option"):
        stage("plain", x)


class Reference:
    def __call__(self, x: Any, *, stage: Any) -> None:
        stage("of_a_class", x)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (known, {"mean", "large", "small", "total"}),
        (handing_on, {"mean", "large", "small", "total", "last"}),
    ],
)
def test_names_that_are_recorded_and_no_others(reference: Callable[..., Any], words: set[str]) -> None:
    found = stage_names(reference)
    assert found is not None and found.words == words and found.spellings == ()
    assert all(word in found for word in words) and "first_sum" not in found and "mea" not in found and "" not in found


def test_names_that_are_put_together() -> None:
    found = stage_names(put_together)
    assert found is not None
    for name in (
        *("left", "right", "sum_left", "sum_right", "half_left", "left_scaled", "right_shifted", *SUMS),
        *("listed", "nested", "deep", "sum_first_sum", "7", "sum_12"),
    ):
        assert name in found, name
    for name in ("compared", "raised", "sum_", "sum_middle", "Words of a docstring are no names.", "_scaled", "half_x"):
        assert name not in found, name
    assert {"sum_left", "half_right", "left_scaled"} <= set(found.known)
    assert "half_sum_left" in found.known


def test_what_the_source_does_not_tell_may_be_anything() -> None:
    found = stage_names(free)
    assert found is not None
    assert "anything_of" in found and "_of" not in found and "anything_off" not in found
    own = stage_names(attribute)
    assert own is not None and {"of_an_object", "plain"} <= own.words and "an_option" not in own
    taken, with_words = stage_names(kept), stage_names(joined)
    assert taken is not None and with_words is not None
    assert "kept" in taken and "a_b" in with_words and "a_c" not in with_words


def test_sources_that_cannot_be_read_and_references_that_say_so() -> None:
    made: dict[str, Any] = {}
    exec("def unreadable(x, *, stage):\n    stage('a', x)", made)
    assert stage_names(made["unreadable"]) is None
    assert stage_names(Reference()) is not None and "of_a_class" in (stage_names(Reference()) or ())
    own = SimpleNamespace(stage_names=lambda: StageNames(frozenset({"own"})), __hash__=None)
    assert "own" in (stage_names.__wrapped__(own) or ())


@pytest.mark.parametrize(
    ("spelling", "name", "spelled"),
    [
        (("a_", Blank()), "a_word", True),
        (("a_", Blank()), "a_other", False),
        (("a_", Blank(free=True)), "a_other", True),
        (("a_", Blank(free=True)), "a_", False),
        ((Blank(), "_", Blank()), "word_word", True),
        ((Blank(), "_", Blank()), "word_", False),
        ((Blank(), "_", Blank()), "word_word_word", True),
        (("a", "b"), "ab", True),
        (("a", "b"), "abc", False),
    ],
)
def test_spellings(spelling: tuple[str | Blank, ...], name: str, spelled: bool) -> None:
    assert (name in StageNames(frozenset({"word"}), (spelling,))) == spelled


def test_suggestions_put_one_word_in_once_or_twice() -> None:
    found = StageNames(frozenset({"word", "no name"}), (("a_", Blank()), (Blank(), Blank())))
    assert found.known == ("word", "a_word", "a_a_word")
