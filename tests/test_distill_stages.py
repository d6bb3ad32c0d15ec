"""When the stages of DistillSparse change."""

import pytest

from sparrow_trl.distill_stages import StageController


def make_controller(**kwargs):
    return StageController(**{"num_stages": 3, "target": 0.86, "patience": 2, "margin": 0.01, **kwargs})


def test_the_next_stage_is_taken_after_so_many_checks_in_a_row():
    controller = make_controller()
    moves = [controller.update(0.9, tail) for tail in (0.86, 0.85, 0.87, 0.88)]
    assert moves == [0, 0, 0, 1] and controller.stage == 1 and controller.streak == 0


def test_it_goes_back_at_once_when_the_tail_breaks():
    controller = make_controller(stage=1, streak=1)
    assert controller.update(0.849, 0.9) == -1
    assert controller.stage == 0 and controller.streak == 0


def test_a_little_below_the_target_is_kept():
    controller = make_controller(stage=1)
    assert controller.update(0.851, 0.9) == 0 and controller.stage == 1


def test_the_first_stage_stays_and_a_broken_tail_ends_the_streak():
    controller = make_controller(streak=1)
    assert controller.update(0.5, 0.9) == 0
    assert controller.stage == 0 and controller.streak == 0


def test_the_last_stage_has_no_next():
    controller = make_controller(stage=2)
    assert controller.next_stage is None
    assert controller.update(0.9, None) == 0 and controller.stage == 2


def test_too_few_tokens_change_nothing():
    controller = make_controller(stage=1, streak=1)
    assert controller.update(None, None) == 0
    assert controller.stage == 1 and controller.streak == 1
    assert controller.update(None, 0.9) == 1


def test_it_goes_on_from_a_checkpoint():
    controller = make_controller(stage=1, streak=1)
    resumed = make_controller()
    resumed.load_state_dict(controller.state_dict())
    assert resumed == controller
    with pytest.raises(ValueError, match="3 stages, but 2"):
        make_controller(num_stages=2).load_state_dict(controller.state_dict())
