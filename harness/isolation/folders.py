"""Folders that kernel processes have written in."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from pathlib import Path

from lastbit.errors import LastbitError


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
