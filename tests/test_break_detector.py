"""What counts as a break of a run, and what does not."""

import json

import numpy as np
import pytest

from sparrow_trl.break_detector import BreakDetector, BreakLimits, RolloutSignals


LIMITS = BreakLimits(tail_floor=0.7, kl_factor=5, kl_limit=0.1, length_drop=0.5, reward_drop=0.5)
USUAL = {"tail": 0.88, "kl": 0.01, "length": 1000.0, "reward": 0.5}


def steady(steps=10, **changes):
    detector = BreakDetector(LIMITS)
    for _ in range(steps):
        assert detector.update(RolloutSignals(**{**USUAL, **changes})) == []
    return detector


def test_a_noisy_run_that_learns_has_no_breaks():
    generator = np.random.default_rng(0)
    detector = BreakDetector(LIMITS)
    for step in range(300):
        signals = RolloutSignals(
            tail=0.87 + 0.03 * generator.standard_normal(),
            kl=0.01 * generator.lognormal(0, 0.7),
            length=800 * generator.lognormal(0, 0.15) * (1 + step / 100),
            reward=float(np.clip(0.3 + step / 600 + 0.1 * generator.standard_normal(), 0, 1)),
        )
        assert detector.update(signals) == [], step


@pytest.mark.parametrize(
    ("change", "steps", "reason"),
    [
        ({"tail": 0.69}, 1, "tail acceptance is at most 0.690, below 0.700"),
        ({"kl": 0.2}, 1, "divergence from the dense policy is 0.2 per token, where 0.01 is usual"),
        ({"length": 400.0}, 2, "completions have 400 tokens, where 1000 tokens is usual"),
        ({"reward": 0.1}, 2, "the reward is 0.1, where 0.5 is usual"),
        ({"reward": -2.0}, 2, "the reward is -2"),
    ],
)
def test_a_break_is_noticed(change, steps, reason):
    detector = steady()
    for _ in range(steps - 1):
        assert detector.update(RolloutSignals(**{**USUAL, **change})) == []
    (found,) = detector.update(RolloutSignals(**{**USUAL, **change}))
    assert reason in found
    # What is broken does not become usual,
    found = [detector.update(RolloutSignals(**{**USUAL, **change})) for _ in range(30)]
    assert sum(map(bool, found)) == 30 // steps
    assert detector.update(RolloutSignals(**USUAL)) == []
    # unless it is learned, as from dense rollouts. Hard limits stay.
    for _ in range(20):
        detector.learn(RolloutSignals(**{**USUAL, **change}))
    again = [detector.update(RolloutSignals(**{**USUAL, **change})) for _ in range(4)]
    assert any(again) == ("tail" in change)


def test_the_first_steps_are_held_to_absolute_limits_alone():
    detector = BreakDetector(LIMITS)
    assert detector.update(RolloutSignals(length=1.0, reward=0.0, kl=0.05, tail=0.9)) == []
    assert len(detector.update(RolloutSignals(kl=0.2, tail=0.2))) == 2


def test_one_bad_step_is_no_collapse():
    detector = steady()
    for _ in range(5):
        assert detector.update(RolloutSignals(**{**USUAL, "reward": 0.0})) == []
        assert detector.update(RolloutSignals(**USUAL)) == []


def test_a_high_divergence_that_is_usual_is_none():
    detector = BreakDetector(LIMITS)
    state = detector.state_dict()
    state["levels"]["kl"] = [0.15] * 9
    detector.load_state_dict(state)
    assert detector.update(RolloutSignals(kl=0.2)) == []
    assert detector.update(RolloutSignals(kl=0.8))


def test_rewards_below_zero_have_a_level_too():
    detector = steady(reward=-1.0)
    assert detector.update(RolloutSignals(reward=-1.4)) == []
    assert detector.update(RolloutSignals(reward=-1.6)) == []
    assert detector.update(RolloutSignals(reward=-1.6))


def test_what_is_not_measured_is_not_judged():
    detector = steady()
    assert detector.update(RolloutSignals()) == []


def test_the_state_is_json_and_complete():
    detector, other = steady(), BreakDetector(LIMITS)
    detector.update(RolloutSignals(**{**USUAL, "reward": 0.1}))
    other.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    assert other.update(RolloutSignals(**{**USUAL, "reward": 0.1}))
