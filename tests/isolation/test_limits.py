"""The judge's watch ends kernel processes that use more than they may, in ways that the system does not bound."""

import mmap
import os
import resource
import signal
import sys
import threading
import time
from typing import NamedTuple

import pytest
from confined import confined, limited

from lastbit.isolation import confinement, limits
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


# What a look at processes and folders finds, without any process


class Children(NamedTuple):
    """Stands in place of the processes of the system: those that a guardian has started."""

    started: dict[int, limits._Usage]

    def descendants(self, _: int) -> list[int]:
        return [pid for pid in self.started if pid]


def found(monkeypatch, *used, shared=0, **bounds):
    """Return why a guardian with 10 private bytes, as pid 0, and processes that use this much are ended."""
    usages = {pid: limits._Usage(*one) for pid, one in enumerate([(10, 7, 1), *used])}
    monkeypatch.setattr(limits, "_usage", usages.get)
    watched = limits.Watched(0, Limits(**bounds), shared=shared, seen=time.monotonic())
    return limits._hit(watched, Children(usages))


def test_private_memory_counts_beyond_that_of_the_guardian(monkeypatch):
    assert found(monkeypatch, (60, 0, 1), (60, 0, 1), memory=100) == ""
    assert found(monkeypatch, (60, 0, 1), (61, 0, 1), memory=100).startswith("it used ")
    assert found(monkeypatch, (110, 0, 1), (2, 0, 1), memory=100) == ""  # what one has less is no room for others
    one = found(monkeypatch, (10 + 3 * GB, 0, 1), memory=2 * GB)
    assert one == "it used 3 GB of memory, where 2 GB are allowed"


def test_shared_memory_counts_beyond_that_of_the_judge(monkeypatch):
    assert found(monkeypatch, (10, 80, 1), (10, 80, 1), shared=30, memory=100) == ""
    assert found(monkeypatch, (10, 80, 1), (10, 81, 1), shared=30, memory=100)
    assert found(monkeypatch, (90, 20, 1), (10, 20, 1), shared=30, memory=80) == ""
    assert found(monkeypatch, (91, 20, 1), (10, 20, 1), shared=30, memory=80)


def test_threads_of_all_processes_count(monkeypatch):
    assert found(monkeypatch, (0, 0, 3), (0, 0, 2), processes=5) == ""
    told = found(monkeypatch, (0, 0, 3), (0, 0, 3), processes=5)
    assert told == "it had 6 processes and threads, where 5 are allowed"


def test_files_are_looked_at_every_now_and_then(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    monkeypatch.setattr(limits, "_usage", {0: limits._Usage(0, 0, 1)}.get)
    watched = limits.Watched(0, Limits(file_size=1 << 13), (tmp_path,))
    now = time.monotonic()
    watched.seen = now
    assert limits._hit(watched, Children({})) == "" and watched.seen == now
    watched.seen = now - 1.1
    assert limits._hit(watched, Children({})).startswith("it wrote ") and watched.seen > now - 0.5
    monkeypatch.setattr(limits, "_usage", {}.get)  # the guardian has ended
    assert limits._hit(limits.Watched(0, Limits(file_size=1), (tmp_path,)), Children({})) == ""


def test_files_and_folders_are_counted_up_to_their_limits(monkeypatch, tmp_path):
    def written(**bounds):
        return limits._written(limits.Watched(0, Limits(**bounds), (tmp_path,)))

    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_bytes(bytes(1 << 16))
    (tmp_path / "link").symlink_to(inner)
    held = 512 * ((inner / "file").stat().st_blocks + (tmp_path / "link").lstat().st_blocks)
    assert written(file_size=held // 4) == "" and written(file_size=held // 4 - 1).startswith("it wrote ")
    monkeypatch.setattr(limits, "_MOST_FILES", 4)
    assert written() == ""
    monkeypatch.setattr(limits, "_MOST_FILES", 3)
    assert written() == "it made more than 3 files, or folders nested more than 64 deep"
    monkeypatch.setattr(limits, "_MOST_FILES", 9)
    monkeypatch.setattr(limits, "_DEEPEST", 2)
    assert written() == ""
    monkeypatch.setattr(limits, "_DEEPEST", 1)
    assert written().endswith("nested more than 1 deep")
    assert limits._written(limits.Watched(0, Limits(), (tmp_path / "gone",))) == ""


def test_the_use_of_a_process_is_that_which_the_system_tells():
    usage = limits._usage(os.getpid())
    assert usage is not None and usage.threads == len(os.listdir("/proc/self/task"))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert held / 20 < usage.private <= held  # pages of files are no memory of its own
    assert limits._usage(2**22 + 1) is None


def test_limits_by_default_leave_the_judge_half(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.get)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    found = Limits()
    assert (found.memory, found.processes, found.folder_size) == (2 * GB, 192, GB)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 30}.get)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert (Limits().memory, Limits().processes) == (8 * GB, 132)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_limits_are_set_as_far_as_there_are_no_lower_ones(monkeypatch, device_type):
    hard = {resource.RLIMIT_NPROC: 100, resource.RLIMIT_CPU: resource.RLIM_INFINITY}
    made = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, hard.get(kind, 10**9)))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, ends: made.update({kind: ends}))
    monkeypatch.setattr(limits.Path, "write_text", lambda path, text: made.update({str(path): text}))
    limits.apply(Limits(memory=10**8, processes=150, open_files=64, seconds=7), device_type)
    assert made.pop("/proc/self/oom_score_adj") == "1000"
    of_cpu = {resource.RLIMIT_DATA: (10**8,) * 2, resource.RLIMIT_FSIZE: (256 * MB,) * 2}
    assert made == {
        resource.RLIMIT_NPROC: (100, 100),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CPU: (7, 7),
        resource.RLIMIT_CORE: (0, 0),
        **(of_cpu if device_type == "cpu" else {}),
    }


def test_the_thread_that_watches_ends_with_the_judge():
    watch = ProcessWatch()
    watched = watch.begin(os.getpid(), Limits())
    thread = watch._thread
    assert thread is not None and thread.daemon and watch._watched == [watched]
    second = watch.begin(os.getpid(), Limits())
    assert watch._thread is thread
    watch.over(watched)
    assert watch._watched == [second]
    watch.over(second)
