# SPDX-License-Identifier: Apache-2.0
"""The only part of megads_ucp that reads or writes checkpoint files: atomic, checksummed, by ranges.

Writing: :func:`frame` a tensor that need not exist in one piece, write its extents with :class:`FileWriter` into a
:class:`Staging` directory, list the files in a :class:`Manifest`, commit. Reading: :func:`open_tensor` or, with a
manifest, :func:`check_frame`, then the ranges needed.
"""

from megads_ucp.storage.durable import read_latest
from megads_ucp.storage.filesystem import one_writer_reason
from megads_ucp.storage.format import MANIFEST
from megads_ucp.storage.framing import PAYLOAD_ALIGNMENT, Frame, frame
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
from megads_ucp.storage.records import ExtentRecord, FileRecord, file_records, payload_crc32, split_crc32
from megads_ucp.storage.staging import Staging, directories_of, share
from megads_ucp.storage.verify import check_frame, verify_file, verify_range
from megads_ucp.storage.write import FileWriter, serialized, write_bytes, write_object

__all__ = [
    "MANIFEST",
    "PAYLOAD_ALIGNMENT",
    "Export",
    "ExtentRecord",
    "FileRecord",
    "FileWriter",
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
    "directories_of",
    "file_records",
    "frame",
    "has_checkpoints",
    "is_universal",
    "one_writer_reason",
    "open_tensor",
    "parameter_names",
    "payload_crc32",
    "read_latest",
    "read_manifest",
    "read_object",
    "serialized",
    "share",
    "split_crc32",
    "state_names",
    "to_read",
    "verify_file",
    "verify_range",
    "what_is_missing",
    "write_bytes",
    "write_manifest",
    "write_object",
]
