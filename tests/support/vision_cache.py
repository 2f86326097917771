"""A check for any engine that speaks the protocol: no image's features outlive the weights that made them."""

from __future__ import annotations

import torch

from learner.distributed import Ranks
from learner.model.policy import Policy
from learner.weights.canary import gap
from learner.weights.publisher import Publisher, PublishSettings
from learner.weights.verify import WeightVerifier


def check_no_stale_image(url: str, policy: Policy, model_path: str, ranks: Ranks, settings: PublishSettings) -> None:
    """Shows the canary's image, changes the vision tower alone, and shows it again.

    WrongWeights if the engine serves what the old tower saw. The policy's tower stays changed.
    """
    verifier = WeightVerifier(policy, model_path, ranks)
    publisher = Publisher(policy, ranks, settings, verifier)
    try:
        assert publisher.publish(1, [url])["publish/unproven"] == 0
        before = verifier.canary.expected()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in policy.named_weights():
                if ".visual." in name and parameter.ndim > 1:
                    parameter += parameter.std() * torch.randn(parameter.shape, generator=generator)
        assert gap(before, verifier.canary.expected()) > 10 * verifier.tolerance, "the tower makes no difference"
        assert publisher.publish(2, [url])["publish/unproven"] == 0
    finally:
        publisher.close()
