"""What Landlock is told, for each of its versions: no process gives anything up here."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lastbit.isolation import landlock
from lastbit.isolation.landlock import (
    DEVICE,
    EXECUTE,
    READ,
    READ_FILE,
    TRUNCATE,
    WRITE,
    WRITE_FILE,
    LandlockRules,
    rules,
)

FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}


class Kernel:
    """Stands for the system: notes rulesets, and rules as path and rights."""

    def __init__(self, abi: int) -> None:
        self.abi, self.made, self.added, self.calls = abi, [], [], list[tuple[int, ...]]()

    def __call__(self, number: int, *given: Any) -> int:
        if number == 444 and given[0] is None:
            assert (given[1].value, given[2].value) == (0, 1)
            if not self.abi:
                raise OSError
            return self.abi
        if number == 444:
            own = given[0]._obj
            self.made.append((own.files, own.network, own.scoped, given[1].value, given[2].value))
            return os.open("/", os.O_PATH)
        if number == 445:
            rule = given[2]._obj
            assert (given[1].value, given[3].value) == (1, 0)
            self.added.append((os.readlink(f"/proc/self/fd/{rule.parent}"), rule.allowed))
            return 0
        assert number == 446 and given[1].value == 0
        self.calls.append((number, given[0]))
        return 0


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(7)
    monkeypatch.setattr(landlock, "syscall", made)
    return made


@pytest.mark.parametrize(
    ("abi", "files", "network", "scoped", "size"),
    [
        (1, FILES[1], 0, 0, 8),
        (2, FILES[2], 0, 0, 8),
        (3, FILES[3], 0, 0, 8),
        (4, FILES[4], 3, 0, 16),
        (5, FILES[5], 3, 0, 16),
        (6, FILES[5], 3, 3, 24),
        (9, FILES[5], 3, 3, 24),
    ],
)
def test_each_version_is_told_what_it_knows(
    abi: int, files: int, network: int, scoped: int, size: int, system: Kernel
) -> None:
    system.abi = abi
    assert landlock.version() == abi
    LandlockRules()
    LandlockRules(abstract_sockets=True)
    assert system.made == [(files, network, scoped, size, 0), (files, network, scoped & 2, size, 0)]


def test_a_system_without_it(system: Kernel) -> None:
    system.abi = 0
    assert landlock.version() == 0


def test_rights_are_those_of_files_and_folders(system: Kernel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = LandlockRules()
    before = len(os.listdir("/proc/self/fd"))
    made.allow([tmp_path, tmp_path / "gone", tmp_path / "file"], READ)
    made.allow([tmp_path / "file"], WRITE)
    made.allow([tmp_path], WRITE)
    made.allow([tmp_path / "file"], landlock.READ_DIR)  # of a file that is nothing
    assert system.added == [
        (str(tmp_path), READ),
        (str(tmp_path / "file"), EXECUTE | READ_FILE),
        (str(tmp_path / "file"), EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE),
        (str(tmp_path), WRITE),
    ]
    assert len(os.listdir("/proc/self/fd")) == before
    system.abi = 1
    LandlockRules().allow([tmp_path], WRITE)
    assert system.added[-1] == (str(tmp_path), FILES[1])


def test_they_are_enforced_once_and_their_descriptor_closed(system: Kernel) -> None:
    made = LandlockRules()
    made.enforce()
    [(number, descriptor)] = system.calls
    assert number == 446
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_rights_have_their_numbers() -> None:
    assert (EXECUTE, WRITE_FILE, READ_FILE, landlock.READ_DIR, TRUNCATE, landlock.IOCTL_DEV) == (
        1,
        2,
        4,
        8,
        1 << 14,
        1 << 15,
    )
    assert (READ, WRITE, DEVICE) == (13, (1 << 15) - 1, 14 | 1 << 14 | 1 << 15)
    assert (ctypes.sizeof(landlock._Ruleset), ctypes.sizeof(landlock._Beneath)) == (24, 12)


@pytest.mark.parametrize(
    ("device", "shared", "shm", "sockets"),
    [("cpu", False, False, 3), ("cpu", True, True, 3), ("cuda", False, True, 2), ("cuda", True, True, 2)],
)
def test_what_a_kernel_process_may_do(
    device: str, shared: bool, shm: bool, sockets: int, system: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own", "seen", "gpu", "tools"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(landlock, "accelerators", lambda: [tmp_path / "gpu"])
    monkeypatch.setenv("CUDA_HOME", f"relative{os.pathsep}{tmp_path / 'tools'}{os.pathsep}")
    rules([tmp_path / "own"], [tmp_path / "seen"], device, shared_memory=shared)
    allowed = dict(system.added)
    assert system.made[0][2] == sockets
    assert allowed[str(tmp_path / "own")] == WRITE
    assert allowed[str(tmp_path / "seen")] == allowed[str(tmp_path / "tools")] == allowed["/usr"] == READ
    assert allowed["/dev/null"] == DEVICE & ~landlock.READ_DIR
    assert allowed.get("/dev/shm", 0) == (WRITE if shm else 0)
    assert allowed.get(str(tmp_path / "gpu"), 0) == (DEVICE if device == "cuda" else 0)
    tasks = [rights for path, rights in system.added if path.endswith("/task")]
    assert tasks == ([READ | WRITE_FILE | TRUNCATE] if device == "cuda" else [])


def test_folders_of_installed_packages_are_known_by_an_installer(tmp_path: Path) -> None:
    assert not landlock._is_installed(str(tmp_path)) and not landlock._is_installed(str(tmp_path / "gone"))
    (tmp_path / "some-1.0.dist-info").mkdir()
    assert landlock._is_installed(str(tmp_path))


def test_where_python_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, checkout = tmp_path / "installed", tmp_path / "checkout"
    for folder in (installed / "some-1.0.dist-info", checkout / "mine", tmp_path / "lib" / "torch"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(installed), str(checkout), ""])
    mine, inner, torch = (type(sys)(name) for name in ("mine", "mine.inner", "torch"))
    mine.__path__, inner.__path__, torch.__path__ = (
        [str(checkout / "mine")],
        ["/inner"],
        [str(tmp_path / "lib" / "torch")],
    )
    monkeypatch.setattr(sys, "modules", {"mine": mine, "mine.inner": inner, "torch": torch, "os": os})
    found = landlock.python_folders.__wrapped__()
    assert found == sorted(found) and {Path(sys.prefix), Path(sys.base_prefix)} <= set(found)
    assert {installed, checkout / "mine", tmp_path / "lib" / "torch", tmp_path / "lib"} <= set(found)
    assert {checkout, Path("/inner")}.isdisjoint(found)
