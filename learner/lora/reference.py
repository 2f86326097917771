"""The reference of a policy with adapters is the policy without them: there is no second copy of the weights."""

from __future__ import annotations

from typing import Any


class BasePolicy:
    """Computes what `policy` did before any training, with its adapters off."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.policy.adapters.off():
            return self.policy(*args, **kwargs)
