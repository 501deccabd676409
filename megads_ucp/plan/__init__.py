# SPDX-License-Identifier: Apache-2.0
"""Which rank writes, sends, reads or compares what. Pure: integers, no files, no communication.

types.py      the terms and the data of a plan: Subject, Holding, Extent, Transfer, Plan
holders.py    a parameter's fragments by where they lie in the full tensor
ownership.py  which rank writes which extent of an export
traffic.py    what travels to the rank that needs it, and in which round
save.py       the plan of an export
load.py       the plan of a resume that reads row-parallel files cooperatively
replicas.py   elements with copies on several ranks: checksums, and the plan that brings the copies together

Every rank computes the same plan from the same descriptions, so no plan is ever sent.
"""
