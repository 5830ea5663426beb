"""Compile the norms of vLLM and FlashInfer from their sources, for `kernels/external/compiled_norms.py`.

    pip download --no-deps --no-binary :all: vllm==0.33.0      # or git clone; unpack as SOURCES/vllm-0.33.0
    pip download --no-deps flashinfer-python==0.7.2.post1      # unpack as SOURCES/flashinfer-0.7.2.post1
    python3 docs/measurements/upstream/compile_norms.py SOURCES LIBRARIES
    LASTBIT_COMPILED_NORMS=LIBRARIES lastbit verify kernels/external --device cuda --kernel 'vllm*'

Of vLLM it takes `csrc/` as it is in the source archive, of FlashInfer `flashinfer/data/include/`. It needs nvcc and the
headers of the installed torch, and takes half a minute a package, all of them at the same time. A package that does not
compile is told, with the compiler's first lines, and the others are made; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
LAYERNORM = ("csrc/layernorm_kernels.cu", "csrc/libtorch_stable/layernorm_kernels.cu")
TORCH_ABI = "0x020B000000000000ULL"
"""torch 2.11, as vLLM 0.33.0 has it in CMakeLists.txt:1286: a library runs with this torch and later ones."""

STUBS = {
    "cublas_v2.h": "typedef struct cublasContext* cublasHandle_t;\n",
    "cublasLt.h": "",
    "curand_kernel.h": "",
}
"""Headers that the sources include and norms take at most the name of a type from; not every installation has them."""

FLASHINFER_OPTIONS = ("-use_fast_math", "-DENABLE_BF16", "-DENABLE_FP8", "-DNDEBUG")
"""Those of its own compilation: flashinfer/jit/core.py:708 and 747 of 0.7.2.post1, and flashinfer/jit/norm.py.

Fast math flushes subnormal fp32 numbers, and divides approximately.
"""

COMPILER_SECONDS = 300


@dataclass(frozen=True)
class UnpackedPackage:
    """One unpacked package: its folder, its name with the version, and what nvcc is to be told."""

    folder: Path
    file: Path
    options: tuple[str, ...]

    @property
    def library(self) -> str:
        """The name that torch.ops has for it: vllm_0_33_0."""
        return library_name(self.folder.name)


def library_name(package: str) -> str:
    """Name the library: vllm-0.33.0 → vllm_0_33_0."""
    return package.replace("-", "_").replace(".", "_")


def sources(folder: Path) -> list[UnpackedPackage]:
    """Return what there is to compile in the sub-folders; those of neither package are passed over."""
    found = [_vllm(path) or _flashinfer(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    return [source for source in found if source is not None]


def _vllm(folder: Path) -> UnpackedPackage | None:
    file = next((folder / name for name in LAYERNORM if (folder / name).is_file()), None)
    if not folder.name.startswith("vllm-") or file is None:
        return None
    optional = "std::optional<torch::stable::Tensor> weight" in file.read_text()
    weight = "Tensor?" if optional else "Tensor"
    includes = tuple(f"-I{path}" for path in (file.parent, folder / "csrc"))
    return UnpackedPackage(folder, HERE / "vllm_norms.cu", (f'-DLAYERNORM="{file}"', f'-DWEIGHT="{weight}"', *includes))


def _flashinfer(folder: Path) -> UnpackedPackage | None:
    include = folder / "flashinfer" / "data" / "include"
    if not folder.name.startswith("flashinfer-") or not include.is_dir():
        return None
    return UnpackedPackage(folder, HERE / "flashinfer_norms.cu", (*FLASHINFER_OPTIONS, f"-I{include}"))


def command(source: UnpackedPackage, out: Path, stubs: Path, architecture: str) -> list[str]:
    """Spell nvcc's command line. vLLM adds no option that matters to bits (CMakeLists.txt, cmake/utils.cmake:130)."""
    root = Path(torch.__file__).parent
    libraries = [f"-l{n}" for n in ("torch", "torch_cpu", "torch_cuda") if (root / "lib" / f"lib{n}.so").is_file()]
    return [
        "nvcc", "-std=c++20", "-O3", f"-arch={architecture}", "--expt-relaxed-constexpr", "-shared",
        "-Xcompiler", "-fPIC", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TORCH_ABI}", f"-DLIBRARY={source.library}",
        *source.options, f"-I{stubs}", f"-I{root / 'include'}", str(source.file), "-o", str(out),
        "-Xlinker", "--no-as-needed", f"-L{root / 'lib'}", *libraries,
    ]  # fmt: skip


def compiled(source: UnpackedPackage, folder: Path, stubs: Path, architecture: str) -> str:
    """Compile into `folder`; what went wrong, or nothing. A library that is there is kept."""
    out = folder / f"{source.library}.so"
    if out.is_file():
        return ""
    unfinished = out.with_suffix(".unfinished")
    line = command(source, unfinished, stubs, architecture)
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=COMPILER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"nvcc took longer than {COMPILER_SECONDS} s"
    if done.returncode:
        return "\n".join((done.stderr or done.stdout).splitlines()[:20])
    unfinished.replace(out)
    return ""


def write_stubs(folder: Path) -> Path:
    """Write the headers of `STUBS` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in STUBS.items():
        (folder / name).write_text(f"#pragma once\n{text}")
    return folder


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("libraries", type=Path)
    parser.add_argument("--architecture", default="sm_90", help="nvcc's -arch; an H200 is sm_90")
    given = parser.parse_args(arguments)
    if shutil.which("nvcc") is None:
        parser.error("nvcc is not on PATH; put the folder bin of a CUDA toolkit there")
    found = sources(given.sources)
    if not found:
        parser.error(f"{given.sources} holds neither vllm-VERSION/csrc nor flashinfer-VERSION/flashinfer/data/include")
    stubs = write_stubs(given.libraries / "stubs")
    began = time.monotonic()
    with ThreadPoolExecutor(min(len(found), os.cpu_count() or 1)) as pool:
        problems = list(pool.map(lambda s: compiled(s, given.libraries, stubs, given.architecture), found))
    for source, problem in zip(found, problems, strict=True):
        print(f"{source.folder.name}: {problem or 'compiled'}")
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
