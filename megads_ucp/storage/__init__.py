# SPDX-License-Identifier: Apache-2.0
"""The only part of megads_ucp that reads or writes checkpoint files: atomic, checksummed, by ranges.

Writing: :func:`frame` a tensor that need not exist in one piece, :func:`write_file` it or its extents into a
:class:`Staging` directory, list the files in a :class:`Manifest`, commit. Reading: :func:`open_tensor` or, with a
manifest, :func:`check_frame`, then the ranges needed.
"""

from megads_ucp.storage.durable import read_latest
from megads_ucp.storage.format import MANIFEST
from megads_ucp.storage.framing import Frame, frame
from megads_ucp.storage.leftovers import to_read
from megads_ucp.storage.listing import (
    Export,
    complete_exports,
    has_checkpoints,
    is_universal,
    what_is_missing,
)
from megads_ucp.storage.manifest import (
    GroupRecord,
    LayoutRecord,
    Manifest,
    ParameterRecord,
    read_manifest,
    write_manifest,
)
from megads_ucp.storage.names import check_names, check_tag
from megads_ucp.storage.read import TensorFile, open_tensor, parameter_names, read_object, state_names
from megads_ucp.storage.records import ExtentRecord, FileRecord, file_records, split_crc32
from megads_ucp.storage.staging import Staging
from megads_ucp.storage.verify import check_frame, verify_file, verify_range
from megads_ucp.storage.write import write_extent, write_file, write_frame, write_object

__all__ = [
    "MANIFEST",
    "Export",
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
    "check_names",
    "check_tag",
    "complete_exports",
    "file_records",
    "frame",
    "has_checkpoints",
    "is_universal",
    "open_tensor",
    "parameter_names",
    "read_latest",
    "read_manifest",
    "read_object",
    "split_crc32",
    "state_names",
    "to_read",
    "verify_file",
    "verify_range",
    "what_is_missing",
    "write_extent",
    "write_file",
    "write_frame",
    "write_manifest",
    "write_object",
]
