"""Rights on a SQLite file, and the file system below it."""

from __future__ import annotations

import ctypes
import os
import pwd
from pathlib import Path

_RIGHTS = {os.R_OK: "read", os.W_OK: "write", os.X_OK: "enter"}
_STATFS_BYTES = 256
"""More than the size of `struct statfs` on any Linux. Its first field, a long, is the file system's number."""
UNKNOWN = "a FUSE file system"
_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x564C: "NCP",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x73757245: "Coda",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x65735546: UNKNOWN,
}
"""Numbers of statfs(2) for file systems that several machines share."""


def files(file: Path) -> list[Path]:
    """The existing files of a database."""
    return [path for path in (file, Path(f"{file}-wal"), Path(f"{file}-shm")) if exists(path) is True]


def user() -> str:
    """The effective user, by name and number."""
    try:
        return f"user {pwd.getpwuid(os.geteuid()).pw_name} ({os.geteuid()})"
    except KeyError:
        return f"user {os.geteuid()}"


def missing_right(file: Path) -> str | None:
    """The user, the right and the path that keep SQLite from opening a file; None if all rights are there."""
    if exists(file.parent) is False:
        return f"{user()} finds no folder {file.parent}: create it"
    if os.access(file.parent, os.X_OK, effective_ids=True) and file.is_dir():
        return f"{file} is a folder: name a file in it"
    needed = [(file.parent, (os.R_OK, os.W_OK, os.X_OK)), *((path, (os.R_OK, os.W_OK)) for path in files(file))]
    for path, rights in needed:
        missing = [_RIGHTS[right] for right in rights if not os.access(path, right, effective_ids=True)]
        if missing:
            return f"{user()} cannot {' or '.join(missing)} {path}"
    return None


def exists(path: Path) -> bool | None:
    """Whether a path exists; None if this user may not see it."""
    try:
        path.stat()
    except PermissionError:
        return None
    except OSError:
        return False
    return True


def network_file_system(folder: Path) -> str | None:
    """Name of the network file system that holds a folder; None for a local one, and on other systems than Linux."""
    number = _file_system_number(folder)
    return None if number is None else _NETWORK.get(number)


def _file_system_number(folder: Path) -> int | None:
    statfs = getattr(ctypes.CDLL(None), "statfs", None)
    if statfs is None or os.uname().sysname != "Linux":
        return None
    result = (ctypes.c_byte * _STATFS_BYTES)()
    if statfs(os.fsencode(folder), ctypes.byref(result)) != 0:
        return None
    return ctypes.c_long.from_buffer(result).value & 0xFFFFFFFF
