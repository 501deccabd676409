# SPDX-License-Identifier: Apache-2.0
"""Which rank writes which extent of which file, and what travels to it. Pure: integers, no files, no communication.

A *file* is one state of one parameter, whole. It usually has one writer; a file larger than a rank's share of the whole
checkpoint is cut into *extents*, ranges of its elements, with a writer each. A *holding* is a fragment of the parameter
on some rank. A *transfer* is the part of a holding that lies in one extent; it travels in some *round*, and no rank
sends or receives more than a bounded number of bytes in a round.

Every rank computes the same plan from the same descriptions, so nothing of it is ever sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from megads_ucp.errors import PlanError
from megads_ucp.plan.holders import Holders
from megads_ucp.plan.ownership import assign_writers
from megads_ucp.plan.traffic import schedule, transfers_of
from megads_ucp.plan.types import MESSAGE_ALIGNMENT, Plan, Subject


def make_plan(subjects: Sequence[Subject], world: int, bucket_bytes: int) -> Plan:
    """Assign writers and schedule the traffic.

    Args:
        subjects: every parameter, equal on all ranks and in the same order.
        world: number of ranks; all of them may write.
        bucket_bytes: the most a rank sends, and the most it receives, in one round; at least 8.

    Raises:
        PlanError: some element of a parameter is held by nobody, or the bucket is too small for a single element.
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
