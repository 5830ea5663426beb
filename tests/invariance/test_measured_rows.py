"""The independent measurement of row independence, and the compilation that feeds it, as far as they need no GPU."""

from pathlib import Path

import pytest

from lastbit.kernel import load_file, load_kernels
from tests.planted_properties import FOLDER

MEASUREMENTS = Path(__file__).resolve().parents[2] / "docs" / "measurements"
rows = load_file(MEASUREMENTS / "invariance_rows.py")
compiling = load_file(MEASUREMENTS / "upstream" / "compile_norms.py")
SMALL = ["--device", "cpu", "--kernels", str(FOLDER), "--width", "512", "--dtype", "fp16", "--rows", "32"]


def printed(kernel: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert rows.main([*SMALL, "--kernel", kernel]) == 0
    return capsys.readouterr().out


def test_every_threshold_is_found_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    """24 processors for M rows, up to 8 parts a row; parts of one row are counted by the division."""
    line = printed("planted[split by occupancy]", capsys)
    parts = {count: min(24 // count, 8) or 1 for count in range(1, 33)}
    changed = [count for count in range(1, 32) if parts[count] != parts[count + 1]]
    found = [count for count in changed if f"between {count} and {count + 1} rows" in line]
    assert found
    assert line.count("changes between") == len(found)


def test_a_norm_of_which_no_row_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the same bits for every number of rows" in printed("planted[vectors or scalars]", capsys)


def test_launches_have_exactly_so_many_rows() -> None:
    sizes = []

    class Recording:
        name = "recording"
        requires = frozenset({"x", "weight", "eps"})

        @staticmethod
        def call(x, weight, eps):
            sizes.append(len(x))
            return x

    given = rows.inputs(Recording, 10, 8, rows.DTYPES["bf16"], "cpu")
    found = rows.in_launches(Recording, given, 4, launches=256)
    assert sizes == [4, 4, 4]
    assert rows.change(4, 10, found, {"output": given["x"]}) is None


def test_an_unknown_kernel_is_told() -> None:
    with pytest.raises(SystemExit):
        rows.main([*SMALL, "--kernel", "no such"])


def test_sources_are_recognised(tmp_path: Path) -> None:
    plain, optional = "torch::stable::Tensor& weight", "std::optional<torch::stable::Tensor> weight"
    for version, place, text in (("0.1", "csrc/libtorch_stable", plain), ("0.2", "csrc", optional)):
        folder = tmp_path / f"vllm-{version}" / place
        folder.mkdir(parents=True)
        (folder / "layernorm_kernels.cu").write_text(text)
    (tmp_path / "flashinfer-0.3" / "flashinfer" / "data" / "include").mkdir(parents=True)
    (tmp_path / "other-1.0").mkdir()
    flashinfer, first, second = compiling.sources(tmp_path)
    assert [flashinfer.library, first.library, second.library] == ["flashinfer_0_3", "vllm_0_1", "vllm_0_2"]
    assert '-DWEIGHT="Tensor"' in first.options
    assert '-DWEIGHT="Tensor?"' in second.options
    assert "-use_fast_math" in flashinfer.options


def test_libraries_have_the_names_that_kernels_ask_for() -> None:
    kernels = load_kernels(MEASUREMENTS.parent.parent / "kernels" / "external")
    names = {k.name.partition("[")[0] for k in kernels if k.name.startswith("vllm-")}
    assert "vllm_0_33_0" in {compiling.library_name(name) for name in names}
