"""`lastbit calibrate`: what is measured, what is found where a premise does not hold, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lastbit.calibrate import __main__ as command
from lastbit.calibrate import kernels, measure, store
from lastbit.calibrate.measure import EVERY, FUNCTIONS, arguments, measured, ways
from lastbit.calibrate.store import SUBNORMAL_PRODUCTS, MeasuredPremise, load_premises, save
from lastbit.errors import LastbitError
from lastbit.interpret import install
from lastbit.numerics import BY_CAPABILITY, DOCUMENTED, LOOSEST, Premises

install()
CPU = torch.device("cpu")
SIZE = 1 << 11


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "_SAMPLE", {"cpu": SIZE})
    return tmp_path / "lastbit" / "premises"


def kept(premise: str, primitive: str, worst: float, *, exhaustive: bool = False) -> MeasuredPremise:
    limit = DOCUMENTED[primitive].relative if primitive else 0.0
    return MeasuredPremise(premise, primitive, worst, limit, exhaustive)


# What is measured


def test_every_primitive_is_measured_and_holds() -> None:
    found = [*measure._roots_and_quotients(CPU, SIZE), *measure.functions(CPU, SIZE)]
    assert {m.primitive for m in found} - {""} == set(DOCUMENTED)
    assert [m for m in found if not m.holds] == []
    assert all(0 < m.worst < m.limit for m in found if m.primitive)
    assert not any(m.exhaustive for m in found)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_way_to_compute_a_function_is_tried(name: str) -> None:
    x = torch.tensor([0.75, 0.3, 0.11])
    found = {way: function(x) for way, function in ways(name).items()}
    assert {way.split(maxsplit=1)[0] for way in found} - {"tl", "libdevice"} == {f"torch.{name}"}
    assert len(found) == 1 + (name in measure.BY_TL) + (name in measure.BY_LIBDEVICE) >= 2
    for result in found.values():
        torch.testing.assert_close(result, getattr(torch, name)(x), rtol=1e-6, atol=0)


def test_casts_saturation_and_small_sums_hold() -> None:
    found = [*measure._casts(CPU, SIZE), *measure._saturation(CPU, SIZE)]
    assert len(found) == 5 and all(m.holds for m in found)
    x = torch.randint(-9, 9, (3, 100)).float()
    assert kernels.sums_of_squares(x).equal(x.square().sum(1))
    a, b = torch.randint(-8, 9, (64, 64)).bfloat16(), torch.randint(-8, 9, (64, 64)).bfloat16()
    assert kernels.dot(a, b, 16).equal(a.float() @ b.float())


def test_dots_that_lose_terms_err_and_stay_within_their_bounds() -> None:
    truncated = measure._truncation(CPU, torch.bfloat16, 128)
    walked = measure._walked(CPU, torch.float16, 64)
    assert 0 < truncated.worst <= truncated.limit and walked.holds


@pytest.mark.parametrize("lost", [0, 1])
def test_sums_and_dots_on_a_lattice_are_exact_unless_a_product_is_lost(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_walked", lambda device, dtype, order: kept(f"walk {order}", "", 0.0))
    monkeypatch.setattr(kernels, "dot", lambda a, b: a[:, lost:].float() @ b[lost:].float())
    found = list(measure._sums_and_dots(CPU))
    dots = [m for m in found if m.premise.startswith("dot")]
    assert len(found) == 2 + 2 * (2 * 2 + 2) and len(dots) == 8
    assert all(m.holds != bool(lost) for m in dots) and all(m.holds for m in found if m not in dots)


def test_arguments_are_all_numbers_or_a_sample_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    [x] = arguments(CPU, 1 << 12)
    assert 0.9 * 2**12 < len(x) <= 2**12 + 1 and x.isnan().any() and (x > 1e30).any() and (x < -1e30).any()
    assert len(set((x.view(torch.int32) & 0xFF).tolist())) == 256
    monkeypatch.setattr(measure, "_TOGETHER", 4)
    blocks = arguments(CPU, EVERY)
    first = [next(blocks).view(torch.int32).tolist() for _ in range(2)]
    assert first == [[least + i for i in range(4)] for least in (-(1 << 31), 4 - (1 << 31))]


@pytest.mark.parametrize(
    ("fault", "worst", "outside"),
    [
        (lambda y: y * (1 + 2.0**-20), 2.0**-21, False),
        (lambda y: torch.where(y.isinf(), 3e38, y), 0.0, True),
        (lambda y: y.nan_to_num(nan=0.0), 0.0, True),
        (lambda y: torch.where((y > 0.5) & (y < 0.6), torch.nan, y), torch.inf, False),
    ],
)
def test_a_wrong_function_is_found(fault: object, worst: float, outside: bool) -> None:
    [found] = measured("log", {"planted": lambda x: fault(torch.log(x))}, CPU, SIZE).values()  # type: ignore[operator]
    assert found.worst >= worst and (found.outside > 0) == outside
    if worst:
        assert found.worst > DOCUMENTED["log"].relative and torch.tensor(found.at).log().isfinite()


# The command


def measurements(*, holds: bool) -> Iterator[MeasuredPremise]:
    yield kept("tl log", "log", 2.0**-24)
    yield replace(kept("casts", "", 0.0 if holds else 0.5))


@pytest.mark.parametrize("holds", [True, False])
def test_the_command_prints_keeps_and_says_what_does_not_hold(
    holds: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.setattr(command, "measure", lambda device: measurements(holds=holds))
    assert command._guarded("cpu") == (0 if holds else 1)
    text = capsys.readouterr().out
    assert "1 u" in text and "4 u" in text and ("NO" in text) != holds and "a sample" in text
    [file] = folder.iterdir()
    assert [m["premise"] for m in json.loads(file.read_text())["measurements"]] == ["tl log", "casts"]


def test_a_measurement_that_raises_is_no_premise_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(device: torch.device) -> Iterator[MeasuredPremise]:
        raise RuntimeError("no compiler")
        yield

    monkeypatch.setattr(command, "measure", fail)
    assert command._guarded("cpu") == 2
    assert "no compiler" in capsys.readouterr().err


def test_everything_is_measured_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_roots_and_quotients", "functions", "_saturation", "_casts"):
        monkeypatch.setattr(measure, name, lambda device, size, name=name: iter([kept(name, "", 0.0)]))
    monkeypatch.setattr(measure, "_sums_and_dots", lambda device: iter([kept("dots", "", 0.0)]))
    found = [m.premise for m in measure.measure(CPU)]
    assert found == ["_roots_and_quotients", "functions", "_saturation", "_casts", "dots"]


# What is kept


def test_without_figures_the_documented_bounds_hold() -> None:
    assert load_premises(CPU).bounds == {}


def test_a_sample_confirms_a_bound_and_every_number_replaces_it() -> None:
    save(CPU, [kept("tl log", "log", 2.0**-24), kept("tl tanh", "tanh", 2.0**-24, exhaustive=True)])
    premises = load_premises(CPU)
    assert set(premises.bounds) == {"tanh"} and premises.relative("tanh") == 2.0**-24
    assert premises.relative("log") == DOCUMENTED["log"].relative
    assert "calibrated" in premises.device and not premises.flushes_subnormals


def test_the_worst_of_all_ways_counts_and_a_larger_error_in_any_case() -> None:
    ways = [kept(way, "sin", worst, exhaustive=True) for way, worst in (("torch.sin", 2.0**-23), ("tl sin", 2.0**-24))]
    save(CPU, [*ways, kept("tl cos", "cos", 2.0**-12)])
    premises = load_premises(CPU)
    assert (premises.relative("sin"), premises.relative("cos")) == (2.0**-23, 2.0**-12)


def test_one_way_of_which_a_sample_was_tried_keeps_the_documented_bound() -> None:
    save(CPU, [kept("torch.sin", "sin", 2.0**-24, exhaustive=True), kept("tl sin", "sin", 2.0**-24)])
    assert load_premises(CPU).bounds == {}


def test_flushed_products_are_remembered() -> None:
    save(CPU, [kept(SUBNORMAL_PRODUCTS, "", 0.25)])
    assert load_premises(CPU).flushes_subnormals


@pytest.mark.parametrize("text", ["{", "[]", '{"device": "x"}', '{"device": "x", "measurements": [{"worst": 1}]}'])
def test_a_file_that_cannot_be_read_is_named(text: str) -> None:
    path = save(CPU, [])
    path.write_text(text)
    with pytest.raises(LastbitError, match="cannot be read"):
        load_premises(CPU)


def test_triton_of_an_unknown_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise store.PackageNotFoundError

    monkeypatch.setattr(store, "version", missing)
    assert store.device_name(CPU).endswith("CPU, triton of an unknown version interpreted")


# Which premises cover a device


@pytest.mark.parametrize(
    ("capability", "hip", "cores", "says"),
    [
        ((9, 0), None, BY_CAPABILITY[9, 0], str(BY_CAPABILITY[9, 0])),
        ((7, 3), None, LOOSEST, "not covered: no model of compute capability 7.3"),
        ((9, 4), "6.2", LOOSEST, "AMD"),
    ],
)
def test_tensor_cores_are_looked_up(
    capability: tuple[int, int], hip: str | None, cores: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    premises = store.documented_premises(torch.device("cuda"))
    assert premises.tensor_cores == cores and says in premises.device


def test_other_devices_have_the_loosest_bounds_and_the_cpu_no_tensor_cores() -> None:
    assert store.documented_premises(torch.device("xpu")).tensor_cores is LOOSEST
    assert store.documented_premises(CPU).tensor_cores is None
    assert Premises().inverse_root > DOCUMENTED["rsqrt"].relative


def test_a_device_is_named_by_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        def get_device_name(self, device: torch.device) -> str:
            return "Some GPU"

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module())
    assert store.device_name(torch.device("cuda")).startswith("Some GPU, triton ")
