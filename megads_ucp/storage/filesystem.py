# SPDX-License-Identifier: Apache-2.0
"""Which file systems let several processes, on several hosts, write disjoint ranges of one file at once.

On a local file system the page cache of its one host orders the writes. A cluster file system locks ranges of a file
among its hosts. A client of NFS or SMB promises nothing before the file is closed: it may write a whole page back of
which another host has meanwhile changed a part.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from megads_ucp.storage.durable import storage_errors

# f_type of statfs(2), from linux/magic.h and the manual page; those that are not in there, from libfuse, which lists
# what it mounts over (util/fusermount.c), and the one of BeeGFS from its client (FhgfsOpsSuper.h, BEEGFS_MAGIC).
_SHARED = {
    0x0000EF53: "ext2, ext3 or ext4",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlayfs",
    0x2FC12FC1: "ZFS",
    0xF2F52010: "F2FS",
    0xCA451A4E: "bcachefs",
    0x00C36400: "CephFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x18031977: "WekaFS",
}
"""File systems on which a file may have several writers, by magic number."""

_NOT_SHARED = {
    0x00006969: "NFS",
    0x0000517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "SMB",
    0x01021997: "9p",
    0x65735546: "FUSE",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
}
"""File systems that are known, and on which a file may have one writer only."""


class _Statfs(ctypes.Structure):
    """``struct statfs`` of 64-bit Linux (asm-generic/statfs.h, 120 bytes), of which ``f_type`` matters here.

    Where ``f_type`` has another width (s390x), no number is known, and every file has one writer.
    """

    _fields_ = (("f_type", ctypes.c_long), ("others", ctypes.c_char * 112))


def one_writer_reason(directory: Path) -> str | None:
    """Why a file in a directory may have one writer only; None where several may write disjoint ranges of it.

    Args:
        directory: that is there.

    Raises:
        StorageError: the operating system refuses.
    """
    found = _Statfs()
    with storage_errors("look at the file system of", directory):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.statfs(os.fsencode(directory), ctypes.byref(found)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    reason = reason_of(found.f_type)
    return reason and f"{directory} lies on {reason}"


def reason_of(magic: int) -> str | None:
    """What :func:`one_writer_reason` says of a file system, known by its magic number (``f_type`` of statfs(2))."""
    magic &= 0xFFFFFFFF  # it is signed
    if magic in _SHARED:
        return None
    if magic in _NOT_SHARED:
        return f"{_NOT_SHARED[magic]}, where writers on several hosts may undo each other's writes to one file"
    return f"a file system that megads_ucp does not know (magic number {magic:#x}), so files there get one writer each"
