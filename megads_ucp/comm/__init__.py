# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks, and the exchange of fragments: the only place that communicates."""
