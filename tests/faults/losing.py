"""Work in a process that loses its device, as through a kernel that writes where it must not."""

import os

from lastbit.verify import worker
from lastbit.verify.worker import Workplace


def process_of(place: Workplace) -> int:
    """Return the number of the process in which the work is done."""
    return os.getpid()


def losing(place: Workplace) -> None:
    """Raise as such a kernel does; from then on the process finds its device lost."""
    worker.is_lost = lambda device: True
    raise RuntimeError("an illegal memory access was encountered")
