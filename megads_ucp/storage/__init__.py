# SPDX-License-Identifier: Apache-2.0
"""The only part of megads_ucp that reads or writes checkpoint files: atomic, checksummed, by ranges.

Writing: :func:`frame` a tensor that need not exist in one piece, :func:`write_file` it or its extents into a
:class:`Staging` directory, list the files in a :class:`Manifest`, commit. Reading: :func:`open_tensor` or, with a
manifest, :func:`check_frame`, then the ranges needed.
"""

from megads_ucp.storage.durable import read_latest
from megads_ucp.storage.format import MANIFEST
from megads_ucp.storage.framing import Frame, frame
from megads_ucp.storage.manifest import (
    GroupRecord,
    LayoutRecord,
    Manifest,
    ParameterRecord,
    read_manifest,
    write_manifest,
)
from megads_ucp.storage.read import TensorFile, open_tensor, read_object, state_names
from megads_ucp.storage.records import ExtentRecord, FileRecord, file_records, split_crc32
from megads_ucp.storage.staging import Staging, repair
from megads_ucp.storage.verify import check_frame, verify_file, verify_range
from megads_ucp.storage.write import write_extent, write_file, write_frame, write_object

__all__ = [
    "MANIFEST",
    "ExtentRecord",
    "FileRecord",
    "Frame",
    "GroupRecord",
    "LayoutRecord",
    "Manifest",
    "ParameterRecord",
    "Staging",
    "TensorFile",
    "check_frame",
    "file_records",
    "frame",
    "open_tensor",
    "read_latest",
    "read_manifest",
    "read_object",
    "repair",
    "split_crc32",
    "state_names",
    "verify_file",
    "verify_range",
    "write_extent",
    "write_file",
    "write_frame",
    "write_manifest",
    "write_object",
]
