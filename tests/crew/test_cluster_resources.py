"""What of a cluster a run uses, and what travels to it."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from lastbit import cli
from lastbit.config import Config
from lastbit.crew import ray_calls
from lastbit.crew.campaign import _lacking
from lastbit.crew.resources import ClusterNode, DeviceKind, chosen, device_plan, kinds_of, side_by_side
from lastbit.crew.travel import packed, unpacked
from lastbit.errors import LastbitError, UsageError
from lastbit.files import BUILT_IN

HOPPERS, AMPERES, CORES = (
    ClusterNode("h", "10.0.0.1", 16, 2, "H200"),
    ClusterNode("a", "10.0.0.2", 64, 1, "A100"),
    ClusterNode("c", "10.0.0.3", 8, 0),
)
ALL = [HOPPERS, AMPERES, CORES]


def test_a_node_is_known_by_its_resources() -> None:
    resources = {"CPU": 16.0, "GPU": 2.0, "accelerator_type:H200": 1.0, "memory": 1e9, "TPU": 4.0}
    told = {"NodeID": "h", "NodeManagerAddress": "10.0.0.1", "Resources": resources, "Alive": True}
    assert ClusterNode.of(told) == replace(HOPPERS, others=("TPU",))


def test_each_kind_of_device_runs_once() -> None:
    cpu, hoppers, amperes = kinds_of(ALL, None)
    assert (cpu.device, cpu.count, cpu.actors) == ("cpu", 88, 88)
    assert (hoppers.device, hoppers.model, hoppers.count, hoppers.actors) == ("cuda:0", "H200", 2, 16)
    assert (amperes.device, amperes.model, amperes.count, amperes.actors) == ("cuda:1", "A100", 1, 8)
    assert [kind.actors for kind in kinds_of(ALL, 3)] == [3, 3, 3]
    assert hoppers.share == amperes.share == 0.125
    assert replace(hoppers, actors=3).share == 0.5  # as two have to fit on one of them
    assert replace(amperes, actors=3).share * 3 <= 1


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("any", ["cpu", "cuda:0", "cuda:1"]),
        ("auto", ["cuda:0", "cuda:1"]),
        ("cuda", ["cuda:0", "cuda:1"]),
        ("cuda:1,cpu", ["cuda:1", "cpu"]),
    ],
)
def test_devices_are_those_of_the_cluster(text: str, devices: list[str]) -> None:
    found = chosen(text, kinds_of(ALL, None))
    assert [kind.device for kind in found] == devices
    assert device_plan(text, found).devices == tuple(devices)


def test_a_device_that_the_cluster_lacks_is_an_error_that_says_what_it_has() -> None:
    with pytest.raises(UsageError, match=r"'cuda' was asked for, but the cluster has cpu \(8 cores\)$"):
        chosen("cuda", kinds_of([CORES], None))
    assert [kind.device for kind in chosen("auto", kinds_of([CORES], None))] == ["cpu"]


def test_what_a_cluster_lacks_is_said() -> None:
    small = [replace(CORES, others=("TPU",))]
    assert [note.what for note in _lacking("any", kinds_of(small, None), small)] == [
        "every kernel on an accelerator",
        "every kernel on TPU",
    ]


def test_all_kinds_find_a_core() -> None:
    kinds = side_by_side(kinds_of([ClusterNode("n", "", 4, 1)], None), 4)
    assert [(kind.device, kind.actors) for kind in kinds] == [("cpu", 1), ("cuda:0", 3)]
    assert [kind.actors for kind in side_by_side(kinds_of(ALL, None), 88)] == [64, 16, 8]
    assert [kind.actors for kind in side_by_side([DeviceKind("cpu", "", 2, 2)], 2)] == [2]


def test_folders_are_found_on_a_node_and_called_as_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine/k.py", "mine/.git/x", "mine/golden/y", "project/kernels/k.py", "project/data/big"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")
    asked = Config(folder="run", kernel_folders=("mine",), projects=("project",), revision="main", tree="tree", seed=7)
    with packed(asked) as folder:
        there = unpacked(folder, ["cpu", "cuda:0"])
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there.config.seed == 7 and there.config.folder == "" and there.config.devices == ("cpu", "cuda:0")
    [mine], [project] = there.config.kernel_folders, there.config.projects
    assert there.at_home(f"{mine}/k.py:3") == f"{tmp_path}/mine/k.py:3"
    assert there.at_home(f"{project}/kernels/k.py") == f"{tmp_path}/project/kernels/k.py"
    assert there.at_home(f"{folder}/lastbit/ops.py") == f"{BUILT_IN}/harness/ops.py"
    own = {name for name in files if name.startswith("travelled")}
    assert own == {"travelled/5/mine/k.py", "travelled/6/project/kernels/k.py"}
    assert (there.config.revision, there.config.tree) == ("main", ""), "no node has the worktree"
    assert there.at_home(f"{folder}/lastbit/references/softmax.py") == f"{BUILT_IN}/references/softmax.py"
    assert {"lastbit/cli.py", "lastbit/references/rms_norm.py", "lastbit/cases/shapes.toml"} <= files
    assert not any(name.startswith("lastbit/checkout") for name in files), "there, it is as if installed"
    assert not any("golden/" in name or name.startswith(("tests", "docs")) for name in files)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-x", "-k", "right"), "--cluster runs no pytest, which -x -k right is for"),
        (("--sanitize",), "--sanitize looks at processes of this machine"),
        (("--cluster", "ray://head:10001"), "results cannot be streamed through Ray Client"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["verify", "--cluster", "local", "--run-folder", str(tmp_path / "run"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'lastbit\[cluster\]'"):
        ray_calls._ray("local")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            Config(folder="run", kernel_folders=("no_such",)),
            "kernel file or folder 'no_such' does not exist",
        ),
        (Config(folder="run", projects=("no_such",)), "project folder 'no_such' does not exist or is not a folder"),
    ],
)
def test_a_folder_that_does_not_exist_does_not_travel(given: Config, said: str) -> None:
    with pytest.raises(UsageError, match=said), packed(given):
        pass


def _refusing(**options: object) -> NoReturn:
    raise RuntimeError("Version mismatch")


def test_only_what_connecting_raises_is_an_error_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[bool] = []
    ray = SimpleNamespace(init=lambda **options: None, nodes=list, shutdown=lambda: ended.append(True))
    monkeypatch.setattr(ray_calls, "_ray", lambda address: ray)
    with pytest.raises(RuntimeError, match=r"^of the run$"), ray_calls.connected("auto", None, tmp_path):
        raise RuntimeError("of the run")
    ray.init = _refusing
    with (
        pytest.raises(LastbitError, match=r"no Ray cluster at 'auto'.*mismatch"),
        ray_calls.connected("auto", None, tmp_path),
    ):
        pass
    assert ended == [True, True]


def test_an_address_where_nothing_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ray_calls._knock(address)
    monkeypatch.setattr(ray_calls, "_ray", lambda address: SimpleNamespace(shutdown=lambda: None))
    with (
        pytest.raises(LastbitError, match=rf"nothing answers at --cluster {address} .*`ray start --head --port"),
        ray_calls.connected(address, None, tmp_path),
    ):
        pass
