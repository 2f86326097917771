"""Environments and rewards."""

import shared.this_python  # noqa: F401
