"""The judge's watch ends kernel processes that use more than they may, in ways that the system does not bound."""

import mmap
import os
import signal
import sys
import threading
import time

import pytest
from confined import confined, limited

from lastbit.isolation import confinement
from lastbit.isolation.confinement import remove
from lastbit.isolation.limits import GB, MB, Limits, ProcessWatch, look

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are confined on Linux only")


def in_children(write):
    """60 MB in each of four processes: little for one, too much for all."""
    for _ in range(4):
        if os.fork() == 0:
            held = b"x" * (60 * MB)
            os.write(write, b"ready\n")
            time.sleep(60)
            os._exit(len(held))
    time.sleep(60)


def in_shared_pages(write):
    """Fill pages that the limit on a process's data does not count."""
    held = mmap.mmap(-1, 200 * MB)
    for at in range(0, 200 * MB, mmap.PAGESIZE):
        held[at] = 1
    os.write(write, b"ready\n" * 4)
    time.sleep(60)


def in_threads(write):
    for _ in range(40):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    os.write(write, b"ready\n" * 4)
    time.sleep(60)


def in_files(write):
    """Write what a cache of compiled kernels is for; no limit is on all files together."""
    for number in range(3):
        os.makedirs(f"{number}/triton")
        with open(f"{number}/triton/compiled", "wb") as file:
            file.write(bytes(1 << 20))
    os.write(write, b"ready\n" * 4)
    time.sleep(60)


def in_nested_folders(write):
    for _ in range(1500):
        os.mkdir("deeper")
        os.chdir("deeper")
    os.write(write, b"ready\n" * 4)
    time.sleep(60)


@pytest.mark.parametrize(
    ("use", "hit"),
    [
        (in_files, "it wrote 0.00293 GB of files, where 0.00195 GB are allowed"),
        (in_nested_folders, "folders nested more than 64 deep"),
    ],
)
def test_what_fills_the_disk_is_ended_and_the_limit_told(tmp_path, monkeypatch, use, hit):
    monkeypatch.setattr(confinement, "own_namespaces", lambda wanted: dict.fromkeys(wanted, "refused"))
    watch = ProcessWatch()
    with confined(tmp_path / "own", use) as process:
        ready = [process.line() for _ in range(4)]
        watched = watch.begin(process.guardian, Limits(file_size=1 << 19), (tmp_path / "own",))
        assert process.line() == "" and process.ended() == -signal.SIGKILL
        watch.over(watched)
    remove(tmp_path / "own")  # which pytest could not, as it is nested too deep
    assert ready == ["ready"] * 4 and watched.hit.endswith(hit)


@pytest.mark.parametrize(
    ("use", "hit"),
    [
        (in_children, "GB of memory, where 0.146 GB are allowed"),
        (in_shared_pages, "GB of memory, where 0.146 GB are allowed"),
        (in_threads, "processes and threads, where 20 are allowed"),
    ],
)
def test_what_uses_too_much_is_ended_and_the_limit_told(tmp_path, use, hit):
    watch = ProcessWatch()
    with confined(tmp_path / "own", use) as process:
        ready = [process.line() for _ in range(4)]
        watched = watch.begin(process.guardian, Limits(memory=150 * MB, processes=20))
        assert process.line() == "" and process.ended() == -signal.SIGKILL
        watch.over(watched)
    assert ready == ["ready"] * 4 and watched.hit.endswith(hit)


def test_memory_of_the_judge_does_not_count(tmp_path):
    shared = mmap.mmap(-1, 100 * MB)

    def read(write):
        total = sum(shared[at] for at in range(0, 100 * MB, mmap.PAGESIZE))
        os.write(write, b"ready\n")
        time.sleep(60)
        return total

    watch = ProcessWatch()
    with confined(tmp_path / "own", read) as process:
        assert process.line() == "ready"
        watched = watch.begin(process.guardian, limited(memory=60 * MB))
        watched.shared = 100 * MB
        look([watched])
        assert not watched.hit
        watched.shared = 0
        look([watched])
        assert watched.hit
        watch.over(watched)


def test_one_that_has_ended_is_nothing_to_the_watch(tmp_path):
    watch = ProcessWatch()
    with confined(tmp_path / "own", lambda write: 1) as process:
        watched = watch.begin(process.guardian, Limits(memory=GB))
        assert process.answer() == 1 and process.ended() == 0
        look([watched])
        watch.over(watched)
    assert not watched.hit
