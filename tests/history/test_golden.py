"""`lastbit golden check` on real kernels: each change of a kernel or of a file gets the right answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from golden_bench import FP32_MULTIPLY, OTHER_SUM, SAME_SUM, TRITON, Bench, output

from lastbit.commands import golden
from lastbit.history.golden_file import read, write
from lastbit.verify.worker import WorkerEnded


@pytest.fixture
def triton(tmp_path: Path) -> Bench:
    return Bench(tmp_path, TRITON)


@pytest.fixture
def plain(tmp_path: Path) -> Bench:
    return Bench(tmp_path, "mine")


# What the kernel does


def test_an_unchanged_kernel_is_the_same(triton: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    triton.record()
    output(capsys)
    assert triton("check", triton.kernels(), "--exact") == 0
    assert f"SAME {TRITON} 2 cases goldens: 1 same" in output(capsys)


def test_another_block_size_is_legal(triton: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    triton.record()
    blocks = triton.kernels(
        "rows, block, num_warps = tile(n, quantized=quant is not None)", "rows, block, num_warps = 32, 64, 2"
    )
    output(capsys)
    assert triton("check", blocks) == 0
    shown = output(capsys)
    assert f"CHANGED {TRITON} 2 cases changed, still legal" in shown
    assert "variance fp32[" in shown
    assert "by at most 1 ulp" in shown
    assert "provenance source" in shown
    assert triton("check", blocks, "--exact") == 1


def test_a_multiplication_in_fp32_is_broken_and_named(triton: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    triton.record()
    output(capsys)
    assert triton("check", triton.kernels(*FP32_MULTIPLY)) == 1
    shown = output(capsys)
    assert f"BROKEN {TRITON} 1 of 2 cases" in shown
    assert "explained by fp32_multiply: this contract" in shown
    assert "have a value that is not possible under native_multiply; worst" in shown
    assert f"::{TRITON}' 'rms_norm x=bf16[6,200]" in shown
    assert "x=fp32[5,300]" not in shown, "in fp32 the two contracts are one"


def before_returning(statement: str) -> tuple[str, str]:
    return "    present = [name", f"    {statement}\n    present = [name"


@pytest.mark.parametrize(
    ("statement", "place"),
    [
        ('results["output"][[3, 4]] = results["output"][[4, 3]].clone()', "[2, 170] to [5, 25]"),
        ('results["output"][3, 77].neg_()', "[3, 46] to [3, 83]"),
    ],
    ids=["swapped rows", "flipped sign"],
)
def test_swapped_rows_and_flipped_signs_are_broken_and_located(
    triton: Bench, capsys: pytest.CaptureFixture[str], statement: str, place: str
) -> None:
    triton.record()
    output(capsys)
    assert triton("check", triton.kernels(*before_returning(statement))) == 1
    shown = output(capsys)
    assert f"BROKEN {TRITON} 2 cases" in shown
    assert place in shown
    assert "explained by" not in shown


def test_a_kernel_that_raises_is_an_error(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    plain.record()
    assert plain("check", plain.kernels("xf = x.float()", "raise RuntimeError('too slow')")) == 2
    assert "RuntimeError: too slow" in output(capsys)


def test_a_kernel_that_ends_its_process_is_an_error(
    plain: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.record()

    def ends(*_: object, **__: object) -> None:
        raise WorkerEnded("the process died without an exception", "rms_norm x=bf16[6,200]")

    monkeypatch.setattr(golden, "propose_held", ends)
    output(capsys)
    assert plain("check", plain.kernels()) == 2
    assert "ERRORED mine not checked reason the process died without an exception, in rms_norm" in output(capsys)


def test_a_case_that_is_turned_down_now_is_gone(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    plain.record()
    refusing = plain.kernels(
        "    xf = x", "    if x.dtype == torch.float32: raise UnsupportedCase('no fp32')\n    xf = x"
    )
    assert plain("check", refusing) == 1
    shown = output(capsys)
    assert "GONE mine 1 of 2 cases" in shown
    assert "no fp32" in shown


def test_results_of_atomic_additions_are_held_to_the_contract_only(
    plain: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = 'name="mine"', 'name="mine", unordered=("output",)'
    assert plain("record", plain.kernels(*declared), "--cases", plain.lines) == 0
    assert "NEW mine 2 cases recorded unordered output: summed by atomic additions" in output(capsys)
    reordered = plain.kernels(*declared)
    source = reordered / "rms_norm.py"
    source.write_text(source.read_text().replace(SAME_SUM, OTHER_SUM))
    assert plain("check", reordered, "--exact") == 0
    assert "SAME mine 2 cases unordered output: summed by atomic additions" in output(capsys)
    source.write_text(source.read_text().replace("product.to(x.dtype)", "-product.to(x.dtype)"))
    output(capsys)
    assert plain("check", reordered) == 1
    assert "unordered output: summed by atomic additions" in output(capsys)


def test_declaring_a_result_unordered_is_a_change_that_approve_takes(
    plain: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    plain.record()
    source = plain.kernels('name="mine"', 'name="mine", unordered=("output",)') / "rms_norm.py"
    source.write_text(source.read_text().replace(SAME_SUM, OTHER_SUM))
    output(capsys)
    assert plain("check", source.parent, "--exact") == 1
    assert "now declared unordered" in output(capsys)
    assert plain("approve", source.parent, "--yes") == 0
    assert plain("check", source.parent, "--exact") == 0


def test_progress_speaks_of_one_case(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    plain.lines.write_text("rms_norm x=bf16[6,200] weight=bf16[200] eps=1e-06 seed=3\n")
    plain.record()
    assert "1 case: 1 passed" in capsys.readouterr().err


def test_another_contract_is_told(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    plain.record()
    claims = plain.kernels('"fp32_multiply"', '"fp32_multiply+unrounded_sum"')
    assert plain("check", claims) == 1
    shown = output(capsys)
    assert "CONTRACT mine 2 cases under another contract" in shown
    assert "contract fp32_multiply+rounded_sum → fp32_multiply+unrounded_sum" in shown
    assert plain("approve", claims, "--yes") == 0
    assert plain("check", claims) == 0


# What the file holds


def test_other_input_bits_are_told(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = plain.record()
    old = read(path)
    write(replace(old, cases=(replace(old.cases[0], inputs="0123456789abcdef"), *old.cases[1:])), path.parent)
    assert plain("check", plain.kernels()) == 1
    shown = output(capsys)
    assert "INPUTS mine 1 of 2 cases made from other input bits" in shown
    assert "input bits were 0123456789abcdef, and are" in shown


def test_another_version_of_triton_is_told_first(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = plain.record()
    old = read(path)
    write(replace(old, provenance={**old.provenance, "triton": "3.0.0"}), path.parent)
    assert plain("check", plain.kernels(SAME_SUM, OTHER_SUM)) == 0
    assert f"triton 3.0.0 → {old.provenance['triton']}" in output(capsys)


def test_a_line_that_means_nothing_now_is_an_error(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = plain.record()
    old = read(path)
    write(replace(old, cases=(replace(old.cases[0], line="rms_norm x=fp3[2] seed=1"), *old.cases[1:])), path.parent)
    assert plain("check", plain.kernels()) == 2
    assert "fp3" in output(capsys)


@pytest.mark.parametrize("action", ["check", "record", "approve"])
def test_a_changed_byte_in_the_file_stops_every_action(
    plain: Bench, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    path = plain.record()
    damaged = bytearray(path.read_bytes())
    damaged[-30] ^= 1
    path.write_bytes(damaged)
    assert plain(action, plain.kernels(), *(["--yes"] if action == "approve" else [])) == 2
    assert "is damaged: its content does not fit its checksum; restore it" in output(capsys)
    assert path.read_bytes() == damaged


def test_a_damaged_file_does_not_hide_the_others(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = plain.record()
    (path.parent / "another.safetensors").write_bytes(b"nothing")
    assert plain("check", plain.kernels()) == 2
    shown = output(capsys)
    assert "ERRORED another" in shown
    assert "SAME mine 2 cases" in shown


def test_a_file_in_the_place_of_another_is_told(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = plain.record()
    write(replace(read(path), kind="nvidia-h200"), path.parent)
    assert plain("check", plain.kernels()) == 2
    assert "is of 'mine' on nvidia-h200, and its place is that of 'mine' on cpu" in output(capsys)
