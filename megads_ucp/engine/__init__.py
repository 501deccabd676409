# SPDX-License-Identifier: Apache-2.0
"""All that knows DeepSpeed's runtime, and the only place that imports it."""
