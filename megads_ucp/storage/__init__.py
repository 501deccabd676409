# SPDX-License-Identifier: Apache-2.0
"""The only part of megads_ucp that writes or reads checkpoint files: atomic, checksummed, ranged.

Writing: :func:`frame` a tensor that need not exist in one piece, :func:`write_file` it or its extents into a
:class:`Staging` directory, describe it in a manifest, commit. Reading: :func:`open_tensor`, then the ranges needed.
"""

from megads_ucp.storage.checksum import BLOCK_BYTES, crc32_combine, crc32_of_blocks
from megads_ucp.storage.durable import fsync_directories, fsync_tree, write_latest
from megads_ucp.storage.format import MANIFEST
from megads_ucp.storage.framing import Frame, frame
from megads_ucp.storage.manifest import (
    FileRecord,
    check_frame,
    payload_crc32,
    read_manifest,
    verify_file,
    verify_range,
    write_manifest,
)
from megads_ucp.storage.read import (
    TensorFile,
    bytes_read,
    open_recorded,
    open_tensor,
    read_object,
    reset_bytes_read,
    state_names,
)
from megads_ucp.storage.staging import Staging, leftovers, rename_exchange, repair
from megads_ucp.storage.write import ExtentRecord, write_extent, write_file, write_frame, write_object

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST",
    "ExtentRecord",
    "FileRecord",
    "Frame",
    "Staging",
    "TensorFile",
    "bytes_read",
    "check_frame",
    "crc32_combine",
    "crc32_of_blocks",
    "frame",
    "fsync_directories",
    "fsync_tree",
    "leftovers",
    "open_recorded",
    "open_tensor",
    "payload_crc32",
    "read_manifest",
    "read_object",
    "rename_exchange",
    "repair",
    "reset_bytes_read",
    "state_names",
    "verify_file",
    "verify_range",
    "write_extent",
    "write_file",
    "write_frame",
    "write_latest",
    "write_manifest",
    "write_object",
]
