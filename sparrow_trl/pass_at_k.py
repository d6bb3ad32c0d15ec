"""avg@k and pass@k from several samples of each problem, with their confidence intervals."""

import numpy as np
from scipy.stats import bootstrap


def pass_at_k(num_samples: int, num_correct: np.ndarray, k: int) -> np.ndarray:
    """
    Unbiased estimate of the probability that at least one of `k` samples is right, problem by problem: one minus the
    share of the subsets of `k` samples in which none is ([Evaluating Large Language Models Trained on
    Code](https://huggingface.co/papers/2107.03374), equation 1).

    Args:
        num_samples (`int`):
            Samples of each problem.
        num_correct (`numpy.ndarray`):
            How many of them are right, integers `[problems]`.
        k (`int`):
            Size of the subsets, at most `num_samples`.

    Returns:
        `numpy.ndarray`: the estimates `[problems]`, in [0, 1].

    Raises:
        ValueError: for `k` below 1 or above `num_samples`, and counts outside of 0 to `num_samples`.

    Example:

    ```python
    >>> pass_at_k(4, [0, 1, 4], k=2)
    array([0. , 0.5, 1. ])
    ```
    """
    num_correct = np.asarray(num_correct)
    if not 1 <= k <= num_samples:
        raise ValueError(f"`k` must be between 1 and the {num_samples} samples of a problem, got {k}.")
    if num_correct.size and not (0 <= num_correct.min() and num_correct.max() <= num_samples):
        raise ValueError(f"`num_correct` must lie between 0 and {num_samples}, got {num_correct.tolist()!r:.200}.")
    # C(n - c, k) / C(n, k) as a product, which overflows for no n.
    wrong = num_samples - num_correct[..., None]
    taken = np.arange(k)
    return 1 - np.prod(np.clip((wrong - taken) / (num_samples - taken), 0, 1), axis=-1)


def mean_interval(values: np.ndarray, confidence: float = 0.95) -> tuple[float, float] | None:
    """
    Confidence interval of a mean over problems, by resampling the problems (percentile bootstrap, 9,999 resamples).

    Args:
        values (`numpy.ndarray`):
            One value a problem.
        confidence (`float`, *optional*, defaults to `0.95`):
            Confidence.

    Returns:
        `tuple[float, float]`, or `None` where there is nothing to resample: fewer than two problems, or all alike.
    """
    values = np.asarray(values, dtype=float)
    if len(values) < 2 or not np.ptp(values):
        return None
    result = bootstrap((values,), np.mean, confidence_level=confidence, method="percentile", rng=0, batch=1000)
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
