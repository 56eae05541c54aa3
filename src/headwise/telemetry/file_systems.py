"""Detection of network file systems, on which SQLite's write-ahead log does not work."""

from __future__ import annotations

import os
from pathlib import Path

_REMOTE = set(
    (
        "nfs nfs4 cifs smb3 smbfs 9p afs ceph lustre beegfs gpfs glusterfs ocfs2 gfs2 orangefs "
        "pvfs2 webdav davfs virtiofs wekafs"
    ).split()
)
_MOUNTS = Path("/proc/self/mountinfo")


def is_remote(path: Path) -> bool:
    """Return True if a file is on a network file system, or on one served by a program (FUSE).

    SQLite's write-ahead log requires shared memory between all readers, which two machines do not
    have. Detected on Linux, and for network names on Windows; elsewhere a file counts as local.
    """
    whole = os.path.realpath(path)
    if whole.startswith("\\\\"):
        return True
    return _MOUNTS.exists() and _is_remote(whole, _MOUNTS.read_text())


def _is_remote(path: str, mounts: str) -> bool:
    """Return the same from the lines of `/proc/self/mountinfo` (proc(5)).

    >>> mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\\n2 1 0:5 / /a\\\\040b rw - nfs4 host:/a rw"
    >>> _is_remote("/a b/heads.sqlite", mounts), _is_remote("/a/heads.sqlite", mounts)
    (True, False)
    """
    longest, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        place = before.split()[4].encode().decode("unicode_escape")
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= longest:  # the later of two mounts in one place is on top
            longest, kind = len(place), after.split()[0]
    return kind in _REMOTE or kind.startswith("fuse")
