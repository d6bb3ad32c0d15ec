"""Tail acceptance of sparse rollouts, as a metric of [`evaluate`](https://huggingface.co/docs/evaluate)."""

import datasets
import evaluate
import torch

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.acceptance import AcceptanceTracker


_DESCRIPTION = """
The acceptance rate of a token is the share that the dense policy's and the sparse sampler's distributions of the next
token have in common, the sum over the vocabulary of min(p, q). The tail acceptance is a low quantile of it, the 5th
percentile, in a bin of cached length: training on sparse rollouts is stable as long as no bin falls below about 0.86.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[float]`):
        Acceptance rates in [0, 1], one per token.
    references (`list[int]`):
        Cached tokens at each, its own included.
    bin_tokens (`int`, *optional*, defaults to `2048`):
        Tokens in a bin of cached length, a multiple of 16.
    tail_quantile (`float`, *optional*, defaults to `0.05`):
        Quantile.
    min_tokens (`int`, *optional*, defaults to `200`):
        Tokens that a bin needs to have a tail.

Returns:
    `dict`: `tail_acceptance` (that of the lowest bin), `mean_acceptance`, `share_below_0.5`, and `tail_by_bin`, by the
    start of each bin. Bins with too few tokens are left out; without any there is no `tail_acceptance`.

Example:

>>> metric = evaluate.load("path/to/tail_acceptance")
>>> metric.compute(predictions=[0.8] * 20 + [1.0] * 180, references=[1000] * 200)
{'tail_acceptance': 0.8, 'mean_acceptance': 0.98, 'share_below_0.5': 0.0, 'tail_by_bin': {0: 0.8}}
"""

_CITATION = """
@article{zhou2026sparrow,
    title  = {{Sparrow: Sparse Rollout for Stable and Efficient Long-context RL of Large Language Models}},
    author = {Yang Zhou and Ranajoy Sadhukhan and Zhaofeng Sun and Zhuoming Chen and Souvik Kundu and Saket Dingliwal
              and Sai Muralidhar Jayanthi and Aram Galstyan and Haizhong Zheng and Beidi Chen},
    year   = 2026,
    eprint = {arXiv:2606.08446},
}
"""


class TailAcceptance(evaluate.Metric):
    """The metric; `evaluate.load` finds it by its file."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
            reference_urls=["https://huggingface.co/papers/2606.08446"],
        )

    def _compute(self, predictions, references, bin_tokens=2048, tail_quantile=0.05, min_tokens=200):
        schedule = SparsityScheduleConfig(top_k_pages=[0], bin_tokens=bin_tokens, tail_quantile=tail_quantile)
        tracker = AcceptanceTracker(schedule, min_tokens=min_tokens)
        rates, lengths = torch.tensor(predictions, dtype=torch.float64), torch.tensor(references)
        tracker.update(rates, rates, lengths)
        metrics = tracker.end_step()
        prefix = "acceptance/tail_bin_"
        result = {
            "mean_acceptance": metrics["acceptance/mean"],
            "share_below_0.5": metrics["acceptance/share_below_0.5"],
            "tail_by_bin": {
                int(name.removeprefix(prefix)): value for name, value in metrics.items() if name.startswith(prefix)
            },
        }
        if result["tail_by_bin"]:
            result = {"tail_acceptance": min(result["tail_by_bin"].values()), **result}
        return result
