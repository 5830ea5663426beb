"""The calls of Ray: connecting, actors, and what comes from them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import current_thread, main_thread
from typing import Any
from unittest.mock import patch

from lastbit.crew.resources import ClusterNode, DeviceKind
from lastbit.crew.team import Heard
from lastbit.crew.travel import unpacked
from lastbit.devices import usable_cores
from lastbit.errors import LastbitError, UsageError

LOCAL = "local"
"""The address of a cluster that is started on this machine, and ends with the run."""

_CLIENT = "ray://"
_KNOCK = 5.0  # seconds until an address where nothing answers is given up: Ray tries for minutes
# Arbitrary: the least of Ray is 75 MiB, and results of cases are some KB each.
_STORE = 100 << 20  # bytes of shared memory for objects: results are small


class RayActor:
    """An actor on a node, on one device, which the run calls `called`, and its process `cuda:0` if it is a GPU.

    What comes from it is text, with paths as they are where the run was started.
    """

    def __init__(self, devices: list[str], called: str, run: str) -> None:
        self._devices, self._called, self._run = devices, called, run

    def where(self) -> str:
        """Return node, process and accelerator, as Ray calls them, in JSON."""
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        accelerator = ",".join(gpus) if self._devices[-1] != "cpu" else ""
        self._files = Path.cwd() / f"{self._run}-{accelerator}"  # of those that share it, gone with what Ray has sent
        return json.dumps(
            {
                "node": context.get_node_id(),
                "host": socket.gethostname(),
                "address": ray.util.get_node_ip_address(),
                "pid": os.getpid(),
                "accelerator": accelerator,
            }
        )

    def start(self) -> str:
        """Make the plan; see `Actor.start`."""
        from lastbit.crew.actor import Actor

        self._asked = unpacked(Path.cwd(), self._devices)
        self._files.mkdir(exist_ok=True)
        caches = self._files / "compiled"
        self._actor = Actor(self._asked.config, self._devices[-1], self._files, self._called, caches)
        return self._asked.at_home(json.dumps(self._actor.start()))

    def run(self, place: int, failed: list[tuple[str, str]]) -> Iterator[str]:
        """Perform an item of the plan; see `Actor.run`."""
        for batch in self._actor.run(place, failed):
            yield self._asked.at_home(json.dumps(batch))


@contextmanager
def connected(address: str, workers: int | None, folder: Path) -> Iterator[list[ClusterNode]]:
    """Connect to a cluster and yield its nodes, on each of which actors find `folder`.

    A cluster that is started here ends with the context.

    Raises:
        UsageError: Ray is missing, or cannot be used this way.
        LastbitError: there is no cluster at the address, or it has other versions.
    """
    ray = _ray(address)
    with ExitStack() as stack:
        options: dict[str, Any] = {"address": address}
        if address == LOCAL:  # there, kernels find what lies in the working directory
            path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()]))
            stack.enter_context(patch.dict(os.environ, PYTHONPATH=path))
            files = TemporaryDirectory(prefix="lastbit-ray-", ignore_cleanup_errors=True)
            options |= {
                "num_cpus": max(usable_cores(), workers or 1),
                "include_dashboard": False,
                "object_store_memory": _STORE,
                "_temp_dir": stack.enter_context(files),
            }
        stack.callback(ray.shutdown)
        options["runtime_env"] = {"working_dir": str(folder)}
        handler = signal.getsignal(signal.SIGTERM)  # Ray would let it end this process at once, with all it has started
        try:
            _knock(address)
            ray.init(**options, logging_level="ERROR", log_to_driver=False)
            nodes = [ClusterNode.of(told) for told in ray.nodes() if told["Alive"]]
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LastbitError(f"no Ray cluster at {address!r} can be used: {error}") from error
        finally:
            if current_thread() is main_thread():
                signal.signal(signal.SIGTERM, handler)
        yield nodes


def _knock(address: str) -> None:
    """Raise `LastbitError` if nothing listens at an address of the form HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK).close()
    except (OSError, OverflowError) as error:
        raise LastbitError(
            f"nothing answers at --cluster {address} ({error}): start a cluster there with `ray start --head --port "
            f"{port}`, or let --cluster local start one on this machine"
        ) from error


def _ray(address: str) -> Any:
    """Import Ray, set up so that it sends no usage statistics and prints nothing of other processes."""
    if address.startswith(_CLIENT):
        raise UsageError(
            f"--cluster {address}: results cannot be streamed through Ray Client; run lastbit on a node of the "
            "cluster, with --cluster auto, or as a job of Ray"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--cluster needs Ray ({error}): pip install 'lastbit[cluster]'") from error
    from ray._private import worker

    worker.print_to_stdstream = lambda *said, **options: None  # that actors die is no news: a run says what comes of it
    return ray


@dataclass
class _One:
    """An actor as Ray knows it, and what it was asked last."""

    handle: Any
    kind: DeviceKind
    asked: Any = None  # a reference, or a generator of references
    asks: str = ""  # what the answer means


class RayPool:
    """The actors of the cluster that this process is connected to, each known by a handle."""

    def __init__(self, devices: Sequence[str]) -> None:
        import ray

        self._ray, self._remote = ray, ray.remote(RayActor)
        self._devices, self._run = list(devices), secrets.token_hex(4)
        self._actors: dict[Hashable, _One] = {}
        self._started = 0

    def start(self, kind: DeviceKind) -> int:
        """Start an actor for a kind of device, as soon as there is room for it."""
        interpreted = "1" if kind.type == "cpu" else "0"
        options = {
            "num_cpus": 1,
            "num_gpus": kind.share,
            "runtime_env": {"env_vars": {"TRITON_INTERPRET": interpreted, "PYTHONSAFEPATH": "1"}},
        }
        if kind.model:
            options["accelerator_type"] = kind.model
        cpu = ["cpu"] if "cpu" in self._devices and kind.type != "cpu" else []
        handle = self._remote.options(**options).remote([*cpu, kind.here], kind.device, self._run)
        self._started += 1
        self._actors[self._started] = _One(handle, kind, handle.where.remote(), "placed")
        return self._started

    def run(self, actor: Hashable, place: int, failed: Sequence[tuple[str, str]]) -> None:
        """Let an actor run an item."""
        one = self._actors[actor]
        # One batch at a time: the next one is made when this one was taken, so that none is lost with its process.
        method = one.handle.run.options(num_returns="streaming", _generator_backpressure_num_objects=1)
        one.asked, one.asks = method.remote(place, list(failed)), "events"

    def warn(self, actor: Hashable, failed: Sequence[tuple[str, str]]) -> None:
        """Do nothing: an actor of a cluster learns with its next item which kernels have failed."""

    def kill(self, actor: Hashable) -> None:
        """End the process of an actor; nothing more is heard of it."""
        one = self._actors.pop(actor, None)
        if one is not None:
            self._ray.kill(one.handle)

    def hear(self, seconds: float) -> Sequence[Heard]:
        """Return the messages that arrive within so many seconds."""
        waiting = {one.asked: actor for actor, one in self._actors.items() if one.asked is not None}
        if not waiting:
            return ()
        ready, _ = self._ray.wait(list(waiting), timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        return [heard for asked in ready if (heard := self._heard(waiting[asked])) is not None]

    def _heard(self, actor: Hashable) -> Heard | None:
        one = self._actors[actor]
        try:
            reference = next(one.asked) if one.asks == "events" else one.asked
            content = json.loads(self._ray.get(reference))
        except StopIteration:
            one.asked = None
            return None
        except self._ray.exceptions.RayError as error:
            one.asked = None
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            if isinstance(error, self._ray.exceptions.RayTaskError):
                return Heard(actor, "failed" if one.asks != "events" else "gone", lines[-1])
            said = next((line for line in lines if " because " in line), lines[0]).partition(" Some common causes")[0]
            died = "node has died" in str(error) or "node died" in str(error)
            return Heard(actor, "gone", said, node_died=died)
        asks = one.asks
        if asks == "placed":
            one.asked, one.asks = one.handle.start.remote(), "ready"
        elif asks == "ready":
            one.asked = None
        return Heard(actor, asks, content)

    def close(self) -> None:
        """End all actors."""
        for actor in list(self._actors):
            with suppress(Exception):
                self.kill(actor)
