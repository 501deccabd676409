# SPDX-License-Identifier: Apache-2.0
"""What is known about clients: training codes and services that the package works with."""
