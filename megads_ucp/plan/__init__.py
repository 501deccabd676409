# SPDX-License-Identifier: Apache-2.0
"""Which rank writes, sends, reads or compares what. Pure: integers, no files, no communication."""
