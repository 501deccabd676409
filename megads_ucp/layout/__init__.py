# SPDX-License-Identifier: Apache-2.0
"""How a parameter's tensor-parallel shards make the full parameter, and back. Pure: integers, shapes and strides.

partition.py  which elements of which parameter each rank holds of a group's flat buffer
rule.py       Rule, one source's claim about one parameter
layout.py     Rule + shard shapes -> Layout: where every element of every shard lies in the full tensor
boxes.py      strided boxes, seen from the full tensor and from a shard
strides.py    the arithmetic of strides
padding.py    the rows that pad a vocabulary
coverage.py   proof that shards and full tensor account for each other exactly
attention.py  the two row orders of a fused query-key-value projection
info.py       Layouts -> DeepSpeed's universal_checkpoint_info (format 0.4)
"""
