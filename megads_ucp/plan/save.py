# SPDX-License-Identifier: Apache-2.0
"""The plan of an export: assigned writers, scheduled traffic."""

from __future__ import annotations

from collections.abc import Sequence

from megads_ucp.errors import PlanError
from megads_ucp.plan.holders import Holders
from megads_ucp.plan.ownership import assign_writers
from megads_ucp.plan.traffic import schedule, transfers_of
from megads_ucp.plan.types import MESSAGE_ALIGNMENT, Plan, Subject


def make_plan(subjects: Sequence[Subject], world: int, bucket_bytes: int) -> Plan:
    """Assign writers and schedule the traffic of one export.

    Args:
        subjects: every parameter, equal on all ranks and in the same order.
        world: number of ranks; all of them may write.
        bucket_bytes: most bytes that a rank sends, and that it receives, in one round; at least 8.

    Raises:
        PlanError: no rank holds some element of a parameter, or the bucket is too small for a single element.
    """
    if bucket_bytes < MESSAGE_ALIGNMENT:
        raise PlanError(
            f"a bucket of {bucket_bytes} bytes cannot hold an element; give it {MESSAGE_ALIGNMENT} or more."
        )
    holders = [Holders(subject) for subject in subjects]
    extents = assign_writers(holders, world)
    transfers = [
        transfer
        for index, extent in enumerate(extents)
        for transfer in transfers_of(index, extent, holders[extent.subject], bucket_bytes)
    ]
    return Plan(tuple(subjects), tuple(extents), tuple(schedule(extents, transfers, bucket_bytes)))
