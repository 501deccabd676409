# SPDX-License-Identifier: Apache-2.0
"""Which rank writes, sends, reads or compares what. Pure: integers, no files, no communication.

types.py      the terms and the data of a plan: Subject, Holding, Extent, Transfer
holders.py    a parameter's fragments by where they lie in the full tensor
shares.py     which rank writes which extent of an export
save.py       one rank's part in an export
load.py       one rank's part in a resume that reads row-parallel files cooperatively
replicas.py   elements with copies on several ranks: checksums, and what brings the copies together

Ranks work out their parts from the same descriptions and by the same rules, each only what concerns it, so no plan is
ever sent. What two ranks have to do with each other both find in the same order.
"""
