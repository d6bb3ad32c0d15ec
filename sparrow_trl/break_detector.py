"""Sudden breaks of a training run, from what each of its rollouts measured."""

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any


# Steps that levels are medians of, and how many of them there must be before anything is compared with a level.
HISTORY = 20
WARMUP = 5

# A median absolute deviation times this is the standard deviation of a normal distribution.
NORMAL_DEVIATION = 1.4826


@dataclass(frozen=True)
class RolloutSignals:
    """
    What one step's rollouts measured; `None` for what was not.

    Args:
        tail (`float`, *optional*):
            Lowest tail acceptance of the bins with enough tokens, by the rates' upper bounds.
        kl (`float`, *optional*):
            KL divergence of the sparse sampler from the dense policy, per token.
        length (`float`, *optional*):
            Mean length of the completions, in tokens.
        reward (`float`, *optional*):
            Mean reward.
    """

    tail: float | None = None
    kl: float | None = None
    length: float | None = None
    reward: float | None = None


@dataclass(frozen=True)
class BreakLimits:
    """
    What counts as a break.

    Args:
        tail_floor (`float`):
            The tail acceptance must not be below it.
        kl_factor (`float`):
            The divergence must not be more than this many times its level, the median of the last 20 steps,
        kl_limit (`float`):
            nor, at once, above this.
        length_drop (`float`):
            Completions must not be shorter than this share of their level, twice in a row.
        reward_drop (`float`):
            Nor must the reward be further below its level than this share of it, or than four standard deviations
            where that is more, twice in a row.
    """

    tail_floor: float
    kl_factor: float
    kl_limit: float
    length_drop: float
    reward_drop: float


class BreakDetector:
    """
    Compares each step's rollouts with limits and with the level of the steps before.

    Steps with a break do not count towards the level. Numbers must be finite.

    Args:
        limits ([`BreakLimits`]): What counts as a break.
    """

    def __init__(self, limits: BreakLimits):
        self.limits = limits
        self._levels = {name: deque(maxlen=HISTORY) for name in ("kl", "length", "reward")}
        self._low = dict.fromkeys(("length", "reward"), 0)

    def update(self, signals: RolloutSignals) -> list[str]:
        """
        Take a step's rollouts into account.

        Args:
            signals ([`RolloutSignals`]): What they measured.

        Returns:
            `list[str]`: reasons to call it a break, in words; empty without one.
        """
        limits, reasons = self.limits, []
        if signals.tail is not None and signals.tail < limits.tail_floor:
            reasons.append(f"the tail acceptance is at most {signals.tail:.3f}, below {limits.tail_floor:.3f}")
        level = self._level("kl")
        if signals.kl is not None and signals.kl > limits.kl_limit:
            if level is None or signals.kl > limits.kl_factor * level:
                usual = "" if level is None else f", where {level:.2g} is usual"
                reasons.append(f"the divergence from the dense policy is {signals.kl:.2g} per token{usual}")
        drops = {
            "length": ("completions have", "tokens", self._length_limit()),
            "reward": ("the reward is", "", self._reward_limit()),
        }
        suspicious = bool(reasons)
        for name, (subject, unit, limit) in drops.items():
            value = getattr(signals, name)
            if value is None or limit is None:
                continue
            # Once may be the step's prompts.
            self._low[name] = self._low[name] + 1 if value < limit else 0
            suspicious |= bool(self._low[name])
            if self._low[name] > 1:
                usual = f"{self._level(name):.4g} {unit}".strip()
                reasons.append(f"{subject} {value:.4g}{' ' + unit if unit else ''}, where {usual} is usual")
        if not suspicious:
            self.learn(signals)
        if reasons:
            # What follows is compared anew, by two steps in a row.
            self._low = dict.fromkeys(self._low, 0)
        return reasons

    def learn(self, signals: RolloutSignals) -> None:
        """
        Let a step count towards the level, without looking for a break.

        Args:
            signals ([`RolloutSignals`]): What its rollouts measured.
        """
        for name, values in self._levels.items():
            value = getattr(signals, name)
            if value is not None:
                values.append(value)

    def _level(self, name: str) -> float | None:
        values = self._levels[name]
        return median(values) if len(values) >= WARMUP else None

    def _length_limit(self) -> float | None:
        level = self._level("length")
        return None if level is None else self.limits.length_drop * level

    def _reward_limit(self) -> float | None:
        level = self._level("reward")
        if level is None:
            return None
        deviation = NORMAL_DEVIATION * median(abs(value - level) for value in self._levels["reward"])
        return level - max(self.limits.reward_drop * abs(level), 4 * deviation)

    def state_dict(self) -> dict[str, Any]:
        """The levels, as JSON values."""
        return {"levels": {name: list(values) for name, values in self._levels.items()}, "low": dict(self._low)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what [`state_dict`] returned."""
        for name, values in self._levels.items():
            values.clear()
            values.extend(state["levels"][name])
        self._low = {name: int(state["low"][name]) for name in self._low}
