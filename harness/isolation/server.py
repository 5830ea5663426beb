"""The fork server of a judge: it has imported what kernels need, and forks kernel processes when it is asked.

It has one thread, and neither a CUDA context nor threads of OpenMP: of these a forked process would have half.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lastbit.children import channel as channels
from lastbit.children.channel import Channel
from lastbit.files import IMPORTED_FROM
from lastbit.interpret.faults import collected
from lastbit.isolation import runner, system
from lastbit.isolation.confinement import confine, remove, shield
from lastbit.isolation.inside import KernelWork
from lastbit.isolation.landlock import python_folders
from lastbit.isolation.limits import Limits

_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02  # seconds between two looks at a process that is ending
# Twice that of process.py, since the guardian ends what the process has started.
_PARTING = 2.0  # seconds that a guardian has to end its kernel process

MAIN = "import sys\nexec(sys.stdin.read())\nexec(*globals().pop('program'))\n"
"""What a fork server runs: `preparation`, which it reads, then what that leaves. All kernel processes can see this."""


def preparation(descriptor: int) -> str:
    """Return the text that makes a process a fork server, and leaves what each of its kernel processes shall execute.

    Packages that kernels need are imported first: they are there for good. What lastbit imports after them goes where
    a bare process forgets lastbit.
    """
    return f"""
import gc, importlib.util
import torch
if importlib.util.find_spec("triton"):
    import triton
    del triton
gc.collect()
gc.freeze()  # pages that no collection writes to are shared with kernel processes
sys.path.insert(0, {str(IMPORTED_FROM)!r})
from lastbit.isolation.server import forked
program = forked({descriptor}) or ("",)
del gc, importlib, torch, forked
"""


Program = tuple[Any, dict[str, Any]]


def forked(descriptor: int) -> Program | None:
    """Fork what the judge asks for; return in each kernel process the program that it executes, at the end None."""
    shield()
    _prepare()
    connection = socket.socket(fileno=descriptor)
    channel, running, server = Channel(connection, takes_fds=True), dict[int, str](), os.getpid()
    channel.send({"ready": os.getpid()})
    while True:
        message, fds = channel.receive()
        if message is None:
            break
        if "end" in message:
            channel.send({"status": _ended(message["end"], running, message["patience"])})
            continue
        if (pid := os.fork()) == 0:
            connection.close()
            return _kernel_process(message["start"], fds, server)
        running[pid] = message["start"]["folder"]
        for fd in fds:
            os.close(fd)
        channel.send({"pid": pid})
    for pid, folder in list(running.items()):  # of a judge that has left them
        _ended(pid, running, 0.0)
        remove(Path(folder))
    return None


def _prepare() -> None:
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from lastbit.interpret import install

        install()
        from lastbit.shadows import programs  # noqa: F401, which kernel processes could not read later
    python_folders()


def _ended(pid: int, running: dict[int, str], patience: float) -> int | None:
    """End a kernel process with all that it has started, and reap it; `pid` is that of its guardian.

    The status that `os.waitpid` gives if it ends by itself within some seconds, otherwise None.
    """
    if pid not in running:
        return None
    del running[pid]
    if (status := _waited(pid, patience)) is not None:
        return status
    os.kill(pid, signal.SIGTERM)
    if _waited(pid, _PARTING) is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _waited(pid: int, patience: float) -> int | None:
    """Wait some seconds for a child to end, and return its status; None if it has not ended."""
    latest, pause = time.monotonic() + patience, _PAUSE
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() >= latest:
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _kernel_process(asked: Mapping[str, Any], fds: list[int], parent: int) -> Program:
    """Set up this new process as a kernel process, and return the program that it shall execute."""
    own, output = fds
    if system.LINUX:  # it ends when its parent does, which may have happened already
        system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    confinement = confine(
        Limits(**asked["limits"]),
        Path(asked["folder"]),
        [Path(path) for path in asked["readable"]],
        asked["device_type"],
        cache=Path(asked["cache"]) if asked["cache"] else None,
        kept=[own],
    )
    connection = socket.socket(fileno=own)
    Channel(connection).send({"confinement": confinement.as_json})
    if asked["bare"]:
        return _bare(connection)
    known = {"serve": runner.serve, "connection": connection, "work": KernelWork()}
    return compile("serve(connection, work)", "<kernel process>", "exec"), known


_FORGOTTEN = ("lastbit", "hypothesis", "pytest", "_pytest")
"""What a bare process forgets: whatever speaks of a test."""


_FORGET = """
import gc, sys, typing
for forget in typing._cleanups:
    forget()
for forget in sys.path_importer_cache.keys() - sys.path:
    del sys.path_importer_cache[forget]
gc.collect()
gc.freeze()
del gc, sys, typing, forget
"""
"""What a bare process does first: objects of what it has forgotten go, and nobody finds what the interpreter needs.

What was found of the folders of sys.path stays: a confined process may not list that of a checkout, and a kernel's file
may import lastbit from there, where it is not installed.
"""


def _bare(connection: socket.socket) -> Program:
    """Make this process forget lastbit, and return the text of the runner as its program."""
    texts = [Path(str(module.__file__)).read_text() for module in (channels, runner)]
    texts = [text.replace("from __future__ import annotations\n", "") for text in texts]  # this file's holds for them
    text = "\n\n".join([_FORGET, *texts, "memory = Mapped()\nserve(connection, Bare(memory), memory)\n"])
    if os.environ.get("TRITON_INTERPRET") == "1":
        faults = collected()
        faults.__enter__()  # for good: a fault of an interpreted program raises nothing; the other process tells of it
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(faults))  # which nothing else holds
    for name in [name for name in sys.modules if name.partition(".")[0] in _FORGOTTEN]:
        del sys.modules[name]
    return compile(text, "<string>", "exec"), {"__name__": "__main__", "connection": connection}
