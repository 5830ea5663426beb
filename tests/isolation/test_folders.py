"""Folders that kernel processes have written in."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from lastbit.errors import LastbitError
from lastbit.isolation.confinement import cache_of, remove


def test_a_folder_is_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    deepest = full.joinpath(*"abcdefgh")
    deepest.mkdir(parents=True)
    (deepest / "-rf").touch()
    for folder in (empty, full, tmp_path / "gone"):
        remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_each_file_has_a_folder_that_others_cannot_look_into(tmp_path: Path) -> None:
    caches, file = tmp_path / "caches", tmp_path / "mine.py"
    folder = cache_of(file, caches)
    assert folder == caches / hashlib.sha256(str(file).encode()).hexdigest()[:16]
    assert (caches.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o711, 0o700)
    (folder / "kept").touch()
    assert cache_of(tmp_path / "x" / ".." / "mine.py", caches) == folder and (folder / "kept").exists()
    assert cache_of(tmp_path / "other.py", caches) != folder


@pytest.mark.parametrize("mode", [0o722, 0o720, 0o702])
def test_where_others_can_write_nothing_is_kept(mode: int, tmp_path: Path) -> None:
    caches = tmp_path / "caches"
    caches.mkdir()
    caches.chmod(mode)
    with pytest.raises(LastbitError, match="belongs to somebody else, or others can write there; remove it"):
        cache_of(tmp_path / "mine.py", caches)
    assert list(caches.iterdir()) == []
    caches.chmod(0o755)
    assert cache_of(tmp_path / "mine.py", caches).is_dir()


def test_a_link_and_a_folder_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir(mode=0o711)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(LastbitError, match="link belongs to somebody else"):
        cache_of(tmp_path / "mine.py", tmp_path / "link")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(LastbitError, match="own belongs to somebody else"):
        cache_of(tmp_path / "mine.py", tmp_path / "own")
