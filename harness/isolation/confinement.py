"""The confinement of a process: it gives up all that a kernel does not need, before it loads the kernel's code.

Every measure is taken where the system has it; what it lacks is told, and stops nothing. It is no sandbox against code
that attacks the operating system.
"""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lastbit.errors import LastbitError
from lastbit.isolation import landlock, limits, seccomp, system
from lastbit.isolation.guardian import close_all_but, guarded
from lastbit.isolation.limits import GB, MB, Limits

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


PROCESSES, MOUNTS = "processes", "mounts"

FOR_CPU: Mapping[str, int] = {
    PROCESSES: system.CLONE_NEWPID,
    "network": system.CLONE_NEWNET,
    "shared memory": system.CLONE_NEWIPC,
}
"""What is a process's own → its namespace."""

FOR_ACCELERATORS: Mapping[str, int] = {PROCESSES: system.CLONE_NEWPID, "shared memory": system.CLONE_NEWIPC}

# Arbitrary: queues take some KB, and data there would count against no other limit.
_SHARED_MEMORY = 64 * MB  # locks and queues of multiprocessing; not for data
# Arbitrary: Triton's cache has some eight files for a compiled variant; inodes are memory of the host.
_MOST_FILES = 1 << 15  # in a folder of a kernel process


def own_namespaces(wanted: Mapping[str, int]) -> dict[str, str]:
    """Enter namespaces; return which of them the system refuses, and why. That of processes begins with the next child.

    Who is not root gets all or none, with a user namespace, in which the user is the same one.
    """
    user, group = os.geteuid(), os.getegid()
    if user:
        try:
            system.prctl(system.PR_SET_DUMPABLE, 1)  # who is shielded from itself cannot write the maps
            system.unshare(sum(wanted.values(), system.CLONE_NEWUSER))
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        except OSError as error:
            return dict.fromkeys(wanted, f"no user namespace: {error.strerror}")
        return {}
    refused = {}
    for name, flag in wanted.items():
        try:
            system.unshare(flag)
        except OSError as error:
            refused[name] = str(error.strerror)
    return refused


def own_mounts(folder: Path, size: int) -> dict[str, str]:
    """Mount a `/proc` of this namespace of processes, whose first process this is, and new `/dev/shm` and `folder`.

    Both are in memory, of limited size, and go with the process. What the system refuses and why, as `own_namespaces`
    says it.
    """
    private = system.MS_NOSUID | system.MS_NODEV
    try:
        system.unshare(system.CLONE_NEWNS)
        system.mount("", "/", system.MS_REC | system.MS_PRIVATE)
        system.mount("proc", "/proc", private | system.MS_NOEXEC)
        system.mount("tmpfs", "/dev/shm", private, f"size={_SHARED_MEMORY},mode=1777")
        system.mount("tmpfs", str(folder), private, f"size={size},nr_inodes={_MOST_FILES},mode=700")
    except OSError as error:
        return {MOUNTS: str(error.strerror)}
    return {}


@dataclass(frozen=True)
class Measure:
    """One restriction of a kernel process.

    Attributes:
        name: in a word or two, such as `network`.
        holds: whether it is.
        how: what keeps it (`own namespace`), or why nothing does.
    """

    name: str
    holds: bool
    how: str


@dataclass(frozen=True)
class Confinement:
    """All measures that were taken before a kernel's code was loaded, whether or not they hold."""

    measures: tuple[Measure, ...] = ()

    @property
    def holds(self) -> str:
        """`files (Landlock 7), network (own namespace)`: what holds, for a header."""
        return ", ".join(f"{measure.name} ({measure.how})" for measure in self.measures if measure.holds)

    @property
    def lacks(self) -> str:
        """`own user (lastbit does not run as root)`: what does not hold, and why; empty if everything does."""
        return ", ".join(f"{measure.name} ({measure.how})" for measure in self.measures if not measure.holds)

    def __str__(self) -> str:
        lacks = f"not {self.lacks}" if self.lacks else ""
        return "; ".join(filter(None, (self.holds, lacks))) or "nothing"

    def has(self, name: str) -> bool:
        """Return whether the measure of that name holds."""
        return any(measure.name == name and measure.holds for measure in self.measures)

    @property
    def as_json(self) -> dict[str, dict[str, bool | str]]:
        """Name of each measure → whether it holds, and how."""
        return {measure.name: {"holds": measure.holds, "how": measure.how} for measure in self.measures}

    @staticmethod
    def from_json(fields: Mapping[str, Mapping[str, bool | str]]) -> Confinement:
        """Return the confinement that `as_json` wrote, in a process that had not loaded a kernel yet."""
        measures = (Measure(name, bool(field["holds"]), str(field["how"])) for name, field in fields.items())
        return Confinement(tuple(measures))


_SINCE_TCP, _SINCE_SCOPES = 4, 6  # ABIs of Landlock


def confine(
    most: Limits,
    folder: Path,
    readable: Sequence[Path],
    device_type: str,
    *,
    cache: Path | None = None,
    kept: Collection[int] | None = None,
) -> Confinement:
    """Confine this process for good, and say what holds. It returns in a grandchild: see `guardian`.

    The process must be freshly forked and have one thread. What it has imported it can use; later imports find Python,
    what is installed, packages of which something is imported, and `readable`.

    Args:
        most: how much it may use.
        folder: empty; its working folder from now on, and the only one that it can write. Where it has mounts of its
            own, what it writes there is in memory, and never seen from outside.
        readable: further folders and files that it can read and start programs of, such as the kernel's.
        device_type: `cpu`, or that of the accelerator that it needs.
        cache: a folder for compiled kernels that it can write, too, and that outlives it; in `folder` if None. Where
            the judge is root, processes with the same cache are of the same user.
        kept: descriptors that stay open besides the three standard ones; all if None.
    """
    if not system.LINUX:
        return Confinement((Measure("confinement", False, f"there is none for {sys.platform}"),))
    if kept is not None:
        close_all_but(*kept)
    own = [cache, folder] if cache else [folder]
    user = user_of(own[0])
    seccomp.new_session_keyring()
    # Name of a view of the system → why this process does not have it to itself; empty for those that it has.
    wanted = FOR_CPU if device_type == "cpu" else FOR_ACCELERATORS
    refused = {**dict.fromkeys(FOR_CPU, "not with an accelerator"), **dict.fromkeys(wanted, "")}
    refused.update(own_namespaces(wanted))
    own_processes = not refused[PROCESSES]
    refused[MOUNTS] = "" if own_processes else "no own processes"
    guarded(own_processes, lambda: refused.update(own_mounts(folder, most.folder_size)))  # now a child of its guardian
    os.chdir(folder)
    os.environ.update(own_environment(folder, cache or folder))
    tempfile.tempdir = None  # it is looked for anew
    limits.apply(most, device_type)
    abi = landlock.version()
    rules = landlock.rules(own, readable, device_type, shared_memory=not refused[MOUNTS]) if abi else None
    rights = _give_up_rights(user, own, readable, landlocked=rules is not None)
    if rules:
        rules.enforce()
    settle()
    unfiltered = seccomp.enforce()
    how_much = f"{most.memory / GB:.3g} GB, {most.processes} processes, {most.file_size / MB:.3g} MB a file"
    measures = [
        Measure("limits", True, how_much),
        *rights,
        Measure("files", abi > 0, f"Landlock {abi}" if abi else "this system has no Landlock"),
        Measure("system calls", not unfiltered, unfiltered or "seccomp"),
    ]
    for view, why in refused.items():
        instead = ""  # the restriction of Landlock that stands in for a missing namespace
        if why and view == "network" and abi >= _SINCE_TCP:
            instead = "Landlock: no TCP"
        elif why and view == PROCESSES and abi >= _SINCE_SCOPES:
            instead = "Landlock: no signals to others"
        measures.append(Measure(f"own {view}", not why or bool(instead), instead or why or "namespace"))
    return Confinement(tuple(measures))


def _give_up_rights(
    user: int, own: Sequence[Path], readable: Sequence[Path], *, landlocked: bool
) -> tuple[Measure, ...]:
    """Become a user of its own, where root started the process, and give up all capabilities."""
    if os.geteuid():
        return _same_user("lastbit does not run as root")
    open_to_all = readable_by_all([*landlock.python_folders(), *readable, *(path.parent for path in own)])
    if not (open_to_all or landlocked):
        return _same_user("only root can read Python or the kernel, and there is no Landlock")
    for path in own:
        os.chown(path, user, user)
    become(user, groups_of(landlock.accelerators()), keep_reading=not open_to_all)
    kept = "none" if open_to_all else "only to read what Landlock allows"
    return Measure("own user", True, str(user)), Measure("capabilities", True, kept)


def _same_user(why: str) -> tuple[Measure, ...]:
    become(None, (), keep_reading=False)
    return Measure("own user", False, why), Measure("capabilities", True, "none")


# Folders that kernel processes have written in


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, where no process writes any more.

    `shutil.rmtree` calls itself for each level, and ends with an error after a thousand. A kernel may have nested more.
    """
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def cache_of(file: Path, caches: Path) -> Path:
    """Make the folder below `caches` for what the kernels of a file compile, one for each file, and return it.

    The user of kernel processes gets to it, but sees no other one.

    Raises:
        LastbitError: somebody else made `caches` first, whose name can be known, and could plant programs there.
    """
    folder = caches / hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    caches.mkdir(mode=0o711, exist_ok=True)
    known = caches.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.geteuid() or known.st_mode & 0o022:
        raise LastbitError(f"{caches} belongs to somebody else, or others can write there; remove it")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


# The rights of a process by its identity: user, groups, capabilities


USERS = range(61184, 65520)
"""Users that belong to nobody: what systemd gives to services for as long as they run."""


def shield() -> None:
    """Keep other processes of the same user from reading this one's memory or environment, and from debugging it.

    Judges call it before they start kernel processes. Root's processes are shielded from other users anyway.
    """
    if system.LINUX:
        system.prctl(system.PR_SET_DUMPABLE, 0)


def readable_by_all(paths: Iterable[Path]) -> bool:
    """Return whether a user without rights of its own gets to these places, as far as they exist."""
    found = [one for path in paths if path.exists() for one in (path.resolve(), *path.resolve().parents)]
    return all(one.stat().st_mode & (stat.S_IXOTH if one.is_dir() else stat.S_IROTH) for one in found)


def user_of(folder: Path) -> int:
    """Return a user for root to become, who shall have this folder and nothing else: always the same for a folder."""
    return USERS[folder.stat().st_ino % len(USERS)]


def become(user: int | None, groups: Sequence[int], *, keep_reading: bool) -> None:
    """Give up every capability and the groups of root, and become the user if one is named.

    `keep_reading`: but the right to read every file, also in what this process starts. It is for where Python itself
    lies in a folder of root's, and only safe where Landlock says which files there are.
    """
    kept = (system.CAP_DAC_READ_SEARCH,) if keep_reading else ()
    if user is not None:
        system.prctl(system.PR_SET_KEEPCAPS, 1)
        _drop_bounding(kept)
        os.setgroups(list(groups))
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    else:
        _drop_bounding(kept)
    system.set_capabilities(*kept)
    for capability in kept:
        system.prctl(system.PR_CAP_AMBIENT, system.PR_CAP_AMBIENT_RAISE, capability)
    system.prctl(system.PR_SET_NO_NEW_PRIVS, 1)


def _drop_bounding(kept: Sequence[int]) -> None:
    """Drop all capabilities but `kept`, so that no program that the process starts can have them again. Who may not
    drop them has none to give up.
    """
    with suppress(OSError):
        for capability in range(64):
            if capability not in kept:
                system.prctl(system.PR_CAPBSET_DROP, capability)


def groups_of(devices: Iterable[Path]) -> list[int]:
    """Return the groups of those devices that not everybody may use."""
    found = [device.stat() for device in devices if device.is_char_device()]
    return sorted({state.st_gid for state in found if not state.st_mode & stat.S_IWOTH and state.st_gid})


def settle() -> None:
    """Set anew what a change of the user has undone: end with the guardian, and be open to itself.

    Drivers look at `/proc/self`, which a process that is shielded cannot.
    """
    system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
    system.prctl(system.PR_SET_DUMPABLE, 1)
