# SPDX-License-Identifier: Apache-2.0
"""How a model's layers are cut over tensor-parallel ranks: one file per source of truth."""
