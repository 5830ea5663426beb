"""The environment of kernel processes: what they need, by name, and nothing else of the run's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ALLOWED = frozenset(
    {
        *("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ"),
        *("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"),
        *("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING"),
        *("NVIDIA_VISIBLE_DEVICES", "ROCM_HOME", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        *("TRITON_INTERPRET", "TRITON_LIBDEVICE_PATH", "TRITON_LIBCUDA_PATH"),
        *("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_CUOBJDUMP_PATH", "TRITON_NVDISASM_PATH"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_CUDA_ARCH_LIST"),
        *("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"),
    }
)
"""Names of variables that kernel processes have in common with the judge: where programs, libraries and devices are."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a fork server's environment. `/proc/PID/environ` shows it to all that it forks, whatever they unset."""
    return {name: value for name, value in environ.items() if name in ALLOWED}


def own_environment(folder: Path, cache: Path) -> dict[str, str]:
    """Return variables of a kernel process by which every program writes to folders of that process by default."""
    return {
        **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(folder)),
        **dict.fromkeys(("USER", "LOGNAME"), "user"),  # torch asks for a name, and its user may have none
        "TRITON_HOME": str(folder),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its processes would count, and need locks in /dev/shm
        "CUDA_CACHE_PATH": str(cache / "cuda"),
    }
