"""Fused kernels are used where they give what their definitions give, and one warning says where not."""

import pytest
import torch

from lastbit import trust
from lastbit.trust import fuses, trusted

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_trusted", {})


class Difference:
    """Says the same at each call, or raises it, and counts the calls."""

    def __init__(self, found: str | Exception) -> None:
        self.found, self.calls = found, 0

    def __call__(self) -> str:
        self.calls += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_what_agrees_is_proven_once_for_a_device_and_a_key() -> None:
    same = Difference("")
    assert [trusted(CPU, "a", "sums", same) for _ in range(3)] == [True] * 3
    assert same.calls == 1
    assert trusted(META, "a", "sums", same)
    assert trusted(CPU, "b", "sums", same)
    assert same.calls == 3


@pytest.mark.parametrize(
    ("found", "said"), [("1 and not 2", "1 and not 2"), (ValueError("no compiler"), "ValueError: no compiler")]
)
def test_what_differs_or_raises_is_refused_with_one_warning(found: str | Exception, said: str) -> None:
    other = Difference(found)
    with pytest.warns(RuntimeWarning, match=f"no fused kernel is used for sums on cpu: {said}") as warned:
        assert [trusted(CPU, "a", "sums", other), trusted(CPU, "a", "sums", other)] == [False] * 2
    assert len(warned) == other.calls == 1
    assert warned[0].filename == __file__  # where it was asked for
    assert trusted(CPU, "b", "sums", Difference(""))


def test_lack_of_memory_says_nothing() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trusted(CPU, "a", "sums", Difference(torch.OutOfMemoryError()))
    assert trusted(CPU, "a", "sums", Difference(""))


@pytest.mark.parametrize("compiles", [True, False])
def test_kernels_are_for_gpus_and_not_interpreted(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(trust, "_compiles", lambda: compiles)
    assert fuses(OnGpu()) is compiles  # type: ignore[arg-type]
    assert not fuses(torch.zeros(1))


@pytest.mark.parametrize("interprets", [True, False])
def test_triton_compiles_unless_it_interprets(interprets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interprets)
    assert trust._compiles.__wrapped__() is not interprets
