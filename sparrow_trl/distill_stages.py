"""When DistillSparse moves to a cheaper schedule, and when back."""

from dataclasses import dataclass


@dataclass
class StageController:
    """
    Walks along a list of stages, from lenient to cheap, by tails measured now and then.

    It goes on once the next stage has kept the target in `patience` checks in a row, and goes back one stage as soon
    as the stage in use is more than `margin` below the target.

    Args:
        num_stages (`int`):
            Number of stages.
        target (`float`):
            Tail acceptance to keep.
        patience (`int`):
            Checks in a row in which the next stage must keep it.
        margin (`float`):
            How far below the target the stage in use may fall.
        stage (`int`, *optional*, defaults to `0`):
            Stage in use, from 0.
        streak (`int`, *optional*, defaults to `0`):
            Checks in a row in which the next stage has kept the target.

    Example:

    ```python
    >>> stages = StageController(num_stages=2, target=0.86, patience=1, margin=0.01)
    >>> stages.update(tail=0.90, next_tail=0.87)
    1
    ```
    """

    num_stages: int
    target: float
    patience: int
    margin: float
    stage: int = 0
    streak: int = 0

    @property
    def next_stage(self) -> int | None:
        """`int`: The next cheaper stage; `None` at the last."""
        return self.stage + 1 if self.stage + 1 < self.num_stages else None

    def update(self, tail: float | None, next_tail: float | None) -> int:
        """
        Take one check into account.

        Args:
            tail (`float`, *optional*):
                Tail acceptance at the stage in use; `None` where too few tokens were measured.
            next_tail (`float`, *optional*):
                At the next stage, likewise; `None` too at the last.

        Returns:
            `int`: 1 after a move to the next stage, -1 after one back, 0 otherwise.
        """
        if tail is not None and tail < self.target - self.margin:
            self.streak = 0
            if not self.stage:
                return 0
            self.stage -= 1
            return -1
        if next_tail is None:
            return 0
        self.streak = self.streak + 1 if next_tail >= self.target else 0
        if self.streak < self.patience:
            return 0
        self.streak = 0
        self.stage += 1
        return 1

    def state_dict(self) -> dict[str, int]:
        """Where it stands, as JSON values."""
        return {name: getattr(self, name) for name in ("num_stages", "stage", "streak")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from what [`state_dict`] returned. Raises a `ValueError` for another number of stages."""
        if state.get("num_stages") != self.num_stages:
            raise ValueError(
                f"The checkpoint has {state.get('num_stages')} stages, but {self.num_stages} are given now. Give the "
                "same ones to go on."
            )
        self.stage, self.streak = state["stage"], state["streak"]
