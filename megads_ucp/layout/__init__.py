# SPDX-License-Identifier: Apache-2.0
"""Layouts: how a parameter's tensor-parallel shards make the full parameter, and back."""
