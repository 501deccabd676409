# SPDX-License-Identifier: Apache-2.0
"""Measurements, run by hand: `make bench`, `make bench-resume`. Pytest collects nothing here.

Every table compares with something measured in the same run: disks and neighbours drift, ratios drift less.
"""

import sys
from pathlib import Path

import tests.support.ranks  # noqa: F401  (first: it sets the environment that torch and DeepSpeed read when they are imported)

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # for cpu_shims, as pytest's own `pythonpath` does
