"""Feature rows close to the device: which to keep (pure policies), what that saves (simulation), cache."""

from __future__ import annotations

from plait.features.advise import Advice, Network, advise
from plait.features.cache import Cache
from plait.features.counters import Counters
from plait.features.lookup import slot_table
from plait.features.policies import Policy, Step
from plait.features.scores import degree, inclusion_probability, presample
from plait.features.simulate import POLICIES, Outcome, make_policy, simulate
from plait.features.trace import Trace, pack
from plait.features.tune import Choice, Seen, Setting

__all__ = [
    "POLICIES", "Advice", "Cache", "Choice", "Counters", "Network", "Outcome", "Policy", "Seen", "Setting",
    "Step", "Trace", "advise", "degree", "inclusion_probability", "make_policy", "pack", "presample",
    "simulate", "slot_table",
]  # fmt: skip
