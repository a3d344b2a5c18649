# SPDX-License-Identifier: Apache-2.0
"""Lock an open file against other processes, where the system has such locks."""

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock.

    A system without ``flock`` (Windows) has no lock, and every call succeeds there.

    Raises:
        OSError: the file system has no locks.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
