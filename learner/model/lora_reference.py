"""The reference of a policy with adapters: the same policy with its adapters off, so there is no second copy of the
weights."""

from __future__ import annotations

from typing import Any


class BasePolicy:
    """Computes the outputs that `policy` had before any training, by switching its adapters off."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.policy.adapters.off():
            return self.policy(*args, **kwargs)
