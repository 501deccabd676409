# SPDX-License-Identifier: Apache-2.0
"""A manifest with one thing of each kind."""

from __future__ import annotations

import dataclasses
from typing import Any

from megads_ucp.storage import FileRecord, GroupRecord, LayoutRecord, Manifest, ParameterRecord

SPLIT = LayoutRecord("split", 0, (4, 6), None, None, {"order": "blocks", "groups": 1}, "test", ((5, 3), (5, 3)))
CUT = LayoutRecord("split", 0, None, 61, 64, None, "test", ((32, 9), (32, 9)))
_FILE = FileRecord("zero/w/fp32.pt", 300, 64, 120, "float32", (10, 3), 7, ((0, 120, (42,)),))


def manifest(**changes: Any) -> Manifest:
    """The same with other values of some fields."""
    return dataclasses.replace(
        Manifest(
            run_id="r1",
            created="2026-01-01T00:00:00+00:00",
            versions={"torch": "2"},
            topology={"world": 2},
            run={"base_optimizer": "Adam"},
            parameters={
                "w": ParameterRecord((10, 3), True, {"fp32": "float32", "exp_avg": "bfloat16"}, SPLIT),
                "embedding": ParameterRecord((61, 9), False, {"fp32": "float32"}, CUT),
            },
            absent=("frozen",),
            groups=(GroupRecord(0, 0, ("w",), {"lr": 0.1, "betas": [0.9, 0.99]}),),
            files={_FILE.path: _FILE},
        ),
        **changes,
    )
