"""compute-sanitizer's text, read into reports and findings; version 2025.3.1 on an H200 wrote it, shortened here."""

from __future__ import annotations

import pytest

from lastbit.sanitize.sanitizer_reports import (
    InstructionPlace,
    NamedAllocation,
    Nearest,
    Report,
    findings,
    remarks,
    reports,
)

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at copy_kernel+0x110 in kernels.py:9
=========     by thread (116,0,0) in block (3,0,0)
=========     Access to 0x7f3a16800fa0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3a16800000 of size 4,000 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x1dbe] in __triton_launcher.cpython-312-x86_64-linux-gnu.so
=========         Host Frame: PyObject_Call [0x14b12b] in python3
========= 
========= Invalid __global__ write of size 4 bytes
=========     at copy_kernel+0x170 in kernels.py:10
=========     by thread (116,0,0) in block (3,0,0)
=========     Access to 0x7f3a16803fa0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3a16803000 of size 4,000 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x1dbe] in __triton_launcher.cpython-312-x86_64-linux-gnu.so
========= 
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuMemFree_v2.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: target in kernels.py:26
========= 
========= ERROR SUMMARY: 3 errors
"""

INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 2 bytes
=========     at norm_kernel+0x140 in out_of_sight.py:27
=========     by thread (8,0,0) in block (4,0,0)
=========     Address 0x7ff1ca8000e0
========= 
========= Uninitialized __global__ memory read of size 2 bytes
=========     at norm_kernel+0x140 in out_of_sight.py:27
=========     by thread (8,0,0) in block (5,0,0)
=========     Address 0x7ff1ca800110
========= 
"""

RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Potential WAW hazard detected at __shared__ 0x2 in block (0,0,0) :
=========     Write Thread (32,0,0) at race_kernel+0x300 in kernels.py:20
=========     Write Thread (33,0,0) at race_kernel+0x300 in kernels.py:20
=========     Current Value : 0, Incoming Value : 4
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x1d7e] in __triton_launcher.cpython-312-x86_64-linux-gnu.so
========= 
========= Error: Potential WAW hazard detected at __shared__ 0x2 in block (0,0,0) :
=========     Write Thread (33,0,0) at race_kernel+0x300 in kernels.py:20
=========     Write Thread (34,0,0) at race_kernel+0x300 in kernels.py:20
=========     Current Value : 4, Incoming Value : 8
"""

NOT_STARTED = """\
========= COMPUTE-SANITIZER
========= Target application doesn't exist or is not a valid executable
"""

CLEAN = """\
========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
"""

X, Y = 0x7F3A16800000, 0x7F3A16803000


def test_memcheck() -> None:
    read, write = reports(MEMCHECK)
    assert read == Report(
        "Invalid __global__ read of size 4 bytes",
        InstructionPlace("copy_kernel", "kernels.py", 9),
        thread="thread (116,0,0) in block (3,0,0)",
        address=X + 4000,
        nearest=Nearest("1 bytes after", X, 4000),
    )
    assert (write.what, write.place.line) == ("Invalid __global__ write of size 4 bytes", 10)


def test_initcheck() -> None:
    [finding] = findings("initcheck", reports(INITCHECK), [NamedAllocation("x", 0x7FF1CA800000, 400)])
    assert finding.stage == "x" and finding.sentence == (
        "initcheck: Uninitialized __global__ memory read of size 2 bytes in norm_kernel (out_of_sight.py:27), by "
        "thread (8,0,0) in block (4,0,0): byte 224 of x, an allocation of 400 bytes (2 such accesses)."
    )


def test_racecheck() -> None:
    found = reports(RACECHECK)
    assert [(r.what, r.place, r.warning) for r in found] == [
        ("Potential WAW hazard in __shared__ memory", InstructionPlace("race_kernel", "kernels.py", 20), False)
    ] * 2
    [finding] = findings("racecheck", found, [])
    assert finding.sentence == (
        "racecheck: Potential WAW hazard in __shared__ memory: write in race_kernel (kernels.py:20) and write in "
        "race_kernel (kernels.py:20), by threads (32,0,0) and (33,0,0) in block (0,0,0) (2 such accesses)."
    )
    [first, _] = reports(RACECHECK.replace("Error:", "Warning:"))
    assert first.warning and findings("racecheck", [first], [])[0].notice


def test_what_is_about_no_kernel_is_a_remark() -> None:
    assert reports(NOT_STARTED) == reports(CLEAN) == reports("") == []
    assert remarks(NOT_STARTED) == ["Target application doesn't exist or is not a valid executable"]
    assert remarks(CLEAN) == []
    [call] = remarks(MEMCHECK)
    assert call.startswith("Program hit CUDA_ERROR_INVALID_VALUE")


def test_a_finding_names_the_tensor_that_was_missed() -> None:
    read, write = findings("memcheck", reports(MEMCHECK), [NamedAllocation("weight", X, 4000)])
    assert (read.kind, read.stage, read.notice) == ("memcheck", "weight", False)
    assert read.sentence == (
        "memcheck: Invalid __global__ read of size 4 bytes in copy_kernel (kernels.py:9), by thread (116,0,0) in block "
        "(3,0,0): 1 byte after weight, an allocation of 4,000 bytes."
    )
    assert write.stage == "" and write.sentence.endswith("1 byte after the nearest allocation, of 4,000 bytes.")


def test_reports_of_one_line_are_one_finding() -> None:
    [read, _] = reports(MEMCHECK)
    [finding] = findings("memcheck", [read] * 3, [])
    assert finding.sentence.endswith("of 4,000 bytes (3 such accesses).")
    [finding] = findings("memcheck", [read] * 100, [])
    assert finding.sentence.endswith("(100 or more such accesses).")


@pytest.mark.parametrize("place", ["void at::native::f<(int)4>(T1 *, T2) [clone]", "k"])
def test_a_kernel_without_line_numbers_is_named_as_it_is(place: str) -> None:
    [report] = reports(MEMCHECK.split("========= \n")[0].replace("copy_kernel+0x110 in kernels.py:9", f"{place}+0x70"))
    assert report.place == InstructionPlace(place)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (
            "0xda0 in /srv/fused_moe.py:175:fused_moe_kernel",
            InstructionPlace("fused_moe_kernel", "/srv/fused_moe.py", 175),
        ),
        ("0x2400 in _ZN2at6native1fIflEEvPT_", InstructionPlace("_ZN2at6native1fIflEEvPT_")),
    ],
)
def test_places_as_older_versions_write_them(place: str, expected: InstructionPlace) -> None:
    [report] = reports(MEMCHECK.split("========= \n")[0].replace("copy_kernel+0x110 in kernels.py:9", place))
    assert report.place == expected
