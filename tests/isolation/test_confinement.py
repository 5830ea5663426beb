"""A confined process is kept from what a kernel has no business with: each thing is really tried, in a process."""

import ctypes
import errno
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confined import confined, limited, outcome, raised

from lastbit.isolation import confinement, landlock, seccomp
from lastbit.isolation.confinement import clean_environment, own_environment, remove

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are confined on Linux only")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "own"


@pytest.fixture
def no_namespaces(monkeypatch):
    """As in a container that gives none."""
    monkeypatch.setattr(confinement, "own_namespaces", lambda wanted: dict.fromkeys(wanted, "refused"))


def no_root():
    """As a judge that is not root, where the test is."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


# Limits


def test_fork_bomb_ends_at_the_limit(folder):
    def bomb(write):
        children = 0
        try:
            while children < 200:
                if os.fork() == 0:
                    time.sleep(60)
                children += 1
        except BlockingIOError:
            return children
        return children

    needs = "own user" if os.geteuid() == 0 else "own processes"
    assert outcome(folder, bomb, needs, limits=limited(processes=12)) < 12


def test_gigabytes_of_memory_are_not_to_be_had(folder):
    assert raised(outcome(folder, lambda write: len(bytearray(3 << 30)))) == "MemoryError"


def test_a_large_file_cannot_be_written(folder):
    answer = outcome(folder, lambda write: Path("large").write_bytes(bytes(2 << 20)))
    assert raised(answer) == "OSError" and f"Errno {errno.EFBIG}" in answer["text"]


def test_small_files_can_be_written_until_the_folder_is_full(folder):
    def fill(write):
        for number in range(10):
            Path(str(number)).write_bytes(bytes(1 << 20))

    answer = outcome(folder, fill, "own mounts", limits=limited(file_size=1 << 20))
    assert raised(answer) == "OSError" and f"Errno {errno.ENOSPC}" in answer["text"]
    assert list(folder.iterdir()) == []


def test_files_are_written_to_the_folder_where_there_are_no_mounts(folder, no_namespaces):
    assert outcome(folder, lambda write: Path("small").write_bytes(b"x")) == 1
    assert (folder / "small").read_bytes() == b"x"


# Files


def test_run_folder_cannot_be_written_or_read(folder, tmp_path):
    records = tmp_path / "records.jsonl"
    records.write_text("a record")
    records.chmod(0o666)
    tmp_path.chmod(0o777)
    assert raised(outcome(folder, lambda write: records.write_text("forged"), "files")) == "PermissionError"
    assert raised(outcome(folder, lambda write: Path("../records.jsonl").read_text(), "files")) == "PermissionError"
    assert raised(outcome(folder, lambda write: os.rename("../records.jsonl", "mine"), "files")) in (
        "PermissionError",
        "OSError",
    )
    assert raised(outcome(folder, lambda write: os.listdir(".."), "files")) == "PermissionError"
    assert records.read_text() == "a record"


def test_readable_folders_can_be_read_and_not_written(folder, tmp_path):
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "one.py").write_text("kernel")
    assert outcome(folder, lambda write: (kernels / "one.py").read_text(), readable=[kernels]) == "kernel"
    write_there = lambda write: (kernels / "one.py").write_text("other")  # noqa: E731
    assert raised(outcome(folder, write_there, "files", readable=[kernels])) == "PermissionError"


def test_what_an_installer_put_into_a_folder_of_the_path_can_be_imported(folder, tmp_path, monkeypatch):
    """As `pip install --target` does; a package that sympy asks for may lie there. A checkout has other things, too."""
    for package in ("site/installed_late", "checkout/not_installed"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
        monkeypatch.syspath_prepend(str((tmp_path / package).parent))
    (tmp_path / "site" / "installed_late-1.0.dist-info").mkdir()

    def imported(name):
        return outcome(
            folder, lambda write: importlib.import_module(name).__name__, before=landlock.python_folders.cache_clear
        )

    assert imported("installed_late") == "installed_late"
    assert raised(imported("not_installed")) in ("PermissionError", "ModuleNotFoundError")


def test_secrets_of_the_system_cannot_be_read(folder):
    if not Path("/etc/shadow").exists():
        pytest.skip("this system has no /etc/shadow")
    assert raised(outcome(folder, lambda write: Path("/etc/shadow").read_text())) == "PermissionError"


def test_processes_with_folders_of_their_own_are_different_users(tmp_path):
    users = {outcome(tmp_path / name, lambda write: os.getuid(), "own user") for name in ("one", "two")}
    assert len(users) == 2 and os.getuid() not in users


def test_cache_can_be_written(folder, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    for text in ("one", "two"):  # also by the process that follows, whose folder is another
        own = tmp_path / text
        written = outcome(own, lambda write, text=text: (cache / "compiled").write_text(text), cache=cache)
        assert written == 3
    assert (cache / "compiled").read_text() == "two"


# Other processes


@pytest.mark.parametrize("own", [True, False], ids=["namespace", "landlock"])
def test_memory_and_environment_of_the_judge_cannot_be_read(folder, own, request):
    if not own:
        request.getfixturevalue("no_namespaces")
    judge = os.getpid()

    def peep(write):
        return [path for pid in (judge, os.getppid(), 1) for path in opened(pid)]

    def opened(pid):
        for name, peep_at in {
            "mem": open,
            "environ": open,
            "maps": open,
            "fd/0": os.readlink,
            "cwd": os.readlink,
        }.items():
            try:
                peep_at(f"/proc/{pid}/{name}")
                yield f"/proc/{pid}/{name}"
            except OSError:
                pass

    assert outcome(folder, peep, "files") == []


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_no_signal_reaches_the_judge_or_the_guardian(folder, number):
    judge = os.getpid()

    def shoot(write):
        reached = []
        for pid in (judge, os.getppid()):
            try:
                os.kill(pid, number)
                reached.append(pid)
            except OSError:
                pass
        return reached

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert outcome(folder, shoot, "own processes") == []
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_signal_to_its_group_reaches_the_judge(folder):
    with confined(folder, lambda write: time.sleep(60)) as process:
        assert os.getpgid(process.guardian) == os.getsid(process.guardian) == process.guardian


def test_no_signal_reaches_others_without_a_namespace_either(folder, no_namespaces):
    judge = os.getpid()
    assert raised(outcome(folder, lambda write: os.kill(judge, 0), "own processes")) == "PermissionError"


def outlive(write):
    """Do what a daemon does: leave for a session of its own, and for a parent that is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(1, 0)  # whatever ends it with its parent, not that
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(write, b"alive\n")
            time.sleep(60)
        os._exit(0)
    return "over"


@pytest.mark.parametrize("own", [True, False], ids=["namespace", "guardian"])
def test_nothing_outlives_the_kernel_process(folder, own, request):
    if not own:
        request.getfixturevalue("no_namespaces")
    with confined(folder, outlive) as process:
        lines = {process.line(), process.line()}
        assert process.line() == ""  # nobody has the other end of the pipe any more
        assert process.ended() == 0
    assert lines <= {"alive", '"over"', ""}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("own", [True, False], ids=["namespace", "guardian"])
def test_all_end_when_the_guardian_is_told_to(folder, own, number, request):
    if not own:
        request.getfixturevalue("no_namespaces")

    def stay(write):
        if own or number == signal.SIGTERM:
            outlive(write)
        else:
            os.write(write, b"alive\n")
        time.sleep(60)

    with confined(folder, stay) as process:
        if number == signal.SIGKILL and own and not process.confinement.has("own processes"):
            pytest.skip(f"without a namespace nothing ends with a guardian: {process.confinement.lacks}")
        assert process.line() == "alive"
        os.kill(process.guardian, number)
        assert process.line() == ""
        assert process.ended() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda write: os._exit(3), 3),
        (lambda write: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
        (lambda write: os.abort(), -signal.SIGABRT),
        (lambda write: ctypes.string_at(0), -signal.SIGSEGV),
    ],
    ids=["exit", "kill", "abort", "segv"],
)
def test_guardian_ends_as_the_kernel_process_did(folder, end, code):
    with confined(folder, end) as process:
        assert process.line() == ""
        assert process.ended() == code


# System calls


def refused(call, *arguments):
    """Return the name of the error that a function of the C library gives; empty if it gives none."""
    if ctypes.CDLL(None, use_errno=True)[call](*arguments) != -1:
        return ""
    return errno.errorcode[ctypes.get_errno()]


REFUSED = {
    "inotify": lambda: refused("inotify_init1", 0),
    "fanotify": lambda: refused("fanotify_init", 0, 0),
    "namespaces": lambda: refused("unshare", 0x10000000),
    "keys": lambda: refused("syscall", 250 if os.uname().machine == "x86_64" else 219, 0, -3, 1),
    "io_uring": lambda: refused("syscall", 425, 1, 0),
    "debugging": lambda: refused("ptrace", 0, 0, 0, 0),
    "other memory": lambda: refused("process_vm_readv", os.getpid(), 0, 0, 0, 0, 0),
    "machine": lambda: errno.errorcode[raises(lambda: socket.socket(socket.AF_VSOCK)).errno],
}


def raises(function):
    try:
        function()
    except OSError as error:
        return error
    return None


@pytest.mark.parametrize("call", REFUSED)
def test_calls_that_reach_beyond_the_process_are_refused(folder, call):
    assert outcome(folder, lambda write: REFUSED[call](), "system calls") == "EPERM"


def test_keys_of_the_judges_session_are_not_those_of_a_kernel(folder, monkeypatch):
    """Also where no filter refuses all calls about keys."""
    monkeypatch.setattr(seccomp, "enforce", lambda: "not here")
    number = 250 if os.uname().machine == "x86_64" else 219
    session = lambda: ctypes.CDLL(None).syscall(number, 0, -3, 1)  # noqa: E731
    assert outcome(folder, lambda write: session()) != session()


def test_a_thread_and_a_socket_of_the_own_process_can_be_made(folder):
    def work(write):
        with ThreadPoolExecutor(1) as threads, socket.socket(socket.AF_UNIX), socket.socket():
            return threads.submit(lambda: "worked").result()

    assert outcome(folder, work) == "worked"


# The network


@pytest.mark.parametrize("own", [True, False], ids=["namespace", "landlock"])
def test_no_connection_is_made(folder, own, request):
    if not own:
        request.getfixturevalue("no_namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        answer = outcome(folder, lambda write: socket.create_connection(address, 2).fileno(), "own network")
        assert raised(answer) in ("OSError", "PermissionError", "ConnectionRefusedError")
        assert raised(outcome(folder, lambda write: socket.create_server(("127.0.0.1", 0)).fileno(), "own network"))


# What is left to it


def test_programs_can_be_started(folder):
    def start(write):
        said = subprocess.run([sys.executable, "-c", "import json, os; print(os.getcwd())"], capture_output=True)
        return [said.returncode, said.stdout.decode().strip(), said.stderr.decode()]

    assert outcome(folder, start) == [0, str(folder.resolve()), ""]


def test_modules_can_be_imported_and_temporary_files_made(folder):
    def work(write):
        import xml.dom.minidom

        with tempfile.NamedTemporaryFile() as file:
            return [xml.dom.minidom.__name__, os.path.dirname(file.name)]

    assert outcome(folder, work) == ["xml.dom.minidom", str(folder)]


def test_locks_of_multiprocessing_can_be_made(folder):
    def lock(write):
        with multiprocessing.get_context("fork").Lock():
            return "locked"

    assert outcome(folder, lock, "own mounts") == "locked"


def test_drivers_of_accelerators_can_name_their_threads(folder):
    """That of CUDA does, in one of these ways, and does not work without."""

    def name(write):
        for mode in ("w", "r+"):
            with open(f"/proc/self/task/{os.getpid()}/comm", mode) as comm:
                comm.write("named")
        return Path("/proc/thread-self/comm").read_text().strip()

    assert outcome(folder, name, device_type="cuda") == "named"


def test_a_judge_that_is_not_root_confines_as_well(tmp_path, folder):
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.geteuid() and not above.stat().st_mode & 1:
            above.chmod(0o711)
    with confined(folder, lambda write: Path("x").write_text("mine"), before=no_root) as process:
        assert process.answer() == 4
        assert "lastbit does not run as root" in process.confinement.lacks


def test_what_a_system_lacks_is_told_and_stops_nothing(folder, no_namespaces, monkeypatch):
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with confined(folder, lambda write: "done") as process:
        assert process.answer() == "done"
        lacks = process.confinement.lacks
    assert "files (this system has no Landlock)" in lacks and "own network (refused)" in lacks


def test_confinement_survives_json(folder):
    with confined(folder, lambda write: None) as process:
        held = process.confinement
    assert confinement.Confinement.from_json(json.loads(json.dumps(held.as_json))) == held
    assert held.has("limits") and "64 processes" in held.holds


def test_measures_in_words():
    user, files = confinement.Measure("own user", False, "not root"), confinement.Measure("files", True, "Landlock 7")
    both, network = confinement.Confinement((user, files)), confinement.Measure("network", True, "own namespace")
    assert (both.holds, both.lacks) == ("files (Landlock 7)", "own user (not root)")
    assert str(both) == "files (Landlock 7); not own user (not root)"
    assert str(confinement.Confinement((files, network))) == "files (Landlock 7), network (own namespace)"
    assert str(confinement.Confinement()) == "nothing"
    assert str(confinement.Confinement((user,))) == "not own user (not root)"
    assert both.has("files") and not both.has("own user") and not both.has("network")
    assert both.as_json == {
        "own user": {"holds": False, "how": "not root"},
        "files": {"holds": True, "how": "Landlock 7"},
    }
    assert confinement.Confinement.from_json(both.as_json) == both


# The environment


def test_environment_has_no_secrets():
    kept = clean_environment(
        {"PATH": "/bin", "LANG": "C", "GITHUB_TOKEN": "secret", "LASTBIT_SEED": "7", "HOME": "/root"}
    )
    assert kept == {"PATH": "/bin", "LANG": "C"}


def test_every_folder_of_the_environment_is_its_own():
    own = own_environment(Path("/own"), Path("/own/cache"))
    assert all(value.startswith("/own") for value in own.values() if value not in ("user", "1"))


# What it leaves


def test_folders_nested_without_end_are_removed(folder, no_namespaces):
    def dig(write):
        for _ in range(1500):
            os.mkdir("deeper")
            os.chdir("deeper")

    assert outcome(folder, dig) is None
    assert (folder / "deeper").exists()
    remove(folder)
    assert not folder.exists()


def test_what_a_link_leads_to_is_not_removed(folder, tmp_path):
    folder.mkdir()
    (tmp_path / "mine").write_text("kept")
    (folder / "link").symlink_to(tmp_path, target_is_directory=True)
    remove(folder)
    remove(folder)
    assert (tmp_path / "mine").exists() and not folder.exists()
