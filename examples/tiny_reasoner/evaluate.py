"""Accuracy of a policy on the dial task, sampled with dense attention by transformers' own `generate`."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .task import MAX_COMPLETION_TOKENS, DialTask, accuracy_reward, sample_tasks


@torch.no_grad()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    temperature: float = 0.0,
    max_new_tokens: int = MAX_COMPLETION_TOKENS,
    batch_size: int = 256,
) -> list[str]:
    """
    Complete prompts.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The policy.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts (`list[str]`):
            Plain text.
        temperature (`float`, *optional*, defaults to `0.0`):
            0 decodes greedily.
        max_new_tokens (`int`, *optional*, defaults to `MAX_COMPLETION_TOKENS`):
            Where a completion is cut.
        batch_size (`int`, *optional*, defaults to `256`):
            Prompts decoded together.

    Returns:
        `list[str]`: the completions without special tokens.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    completions = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(prompts[start : start + batch_size], return_tensors="pt", padding=True).to(model.device)
        ids = model.generate(**batch, max_new_tokens=max_new_tokens, **sampling)
        completions += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return completions


def held_out_tasks(size: int, seed: int = 0) -> list[DialTask]:
    """The tasks of `make_dataset("test", size, seed)`."""
    return sample_tasks("test", size, seed)


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: list[DialTask], temperature: float = 0.0
) -> dict[str, float]:
    """
    Accuracy of a policy on tasks.

    Returns:
        `dict[str, float]`: `accuracy`, `mean_length` (characters of a completion) and `worked_steps` (the share of
        additions that were worked digit by digit).
    """
    completions = complete(model, tokenizer, [task.prompt for task in tasks], temperature)
    rewards = accuracy_reward(completions, [task.answer for task in tasks])
    steps = [line for text in completions for line in text.split("\n") if ">" in line]
    return {
        "accuracy": sum(rewards) / len(rewards),
        "mean_length": sum(map(len, completions)) / len(completions),
        "worked_steps": sum("," in step for step in steps) / max(len(steps), 1),
    }
