"""Completions to measure on, from either generator."""

import copy

import numpy as np
import pytest
import torch
from tiny_models import EOS_TOKEN_ID, SHAPE, tiny_model, tiny_tokenizer
from transformers import GenerationConfig

from sparrow_trl.sequence_generation import generate_sequences


PROMPTS = ["12+34=", "a", "What is the sum of 1 and 2?", "x*y", "hello"]


def complete(*args, **kwargs):
    return generate_sequences(*args, generator="transformers", **kwargs)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3").eval()


def test_generated_sequences_are_the_models_own_samples(model):
    tokenizer = tiny_tokenizer()
    model = copy.deepcopy(model)
    # Settings that would leave a single token.
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=1, temperature=0.3, min_p=0.9, repetition_penalty=2.0, eos_token_id=EOS_TOKEN_ID
    )
    settings = model.generation_config.to_dict()

    # A first token that ends the completion would be left out.
    def never_end(module, args, output):
        output.logits[..., EOS_TOKEN_ID] = -1e4
        return output

    model.register_forward_hook(never_end)
    prompts = ["abc"] * 400
    state = torch.get_rng_state()
    generated = complete(model, tokenizer, prompts, max_length=5, batch_size=400)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.generation_config.to_dict() == settings
    ids = tokenizer("abc")["input_ids"]
    assert all(sequence.token_ids[:3] == ids and sequence.prompt_length == 3 for sequence in generated)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    counts = torch.bincount(
        torch.tensor([sequence.token_ids[3] for sequence in generated]), minlength=SHAPE["vocab_size"]
    )
    # Total variation between 400 samples and the distribution; a sharper one is much farther.
    assert (counts / counts.sum() - expected).abs().sum() / 2 < 0.25
    sharper = expected.pow(2) / expected.pow(2).sum()
    assert (sharper - expected).abs().sum() / 2 > 0.3


def test_padding_does_not_change_what_is_sampled(model):
    tokenizer = tiny_tokenizer()
    together = complete(model, tokenizer, PROMPTS, max_length=60)
    assert [s.token_ids[: s.prompt_length] for s in together] == tokenizer(PROMPTS)["input_ids"]
    longest = max(len(ids) for ids in tokenizer(PROMPTS)["input_ids"])
    for sequence in together:
        completion = sequence.token_ids[sequence.prompt_length :]
        assert EOS_TOKEN_ID not in completion[:-1]
        assert len(completion) == 60 - longest or completion[-1] == EOS_TOKEN_ID
    assert complete(model, tokenizer, PROMPTS, max_length=60) == together
    assert complete(model, tokenizer, PROMPTS, max_length=60, seed=1) != together
    # The sampled tokens are likely under the model, which left padding seen as text would prevent.
    logprobs, uniform = [], -np.log(SHAPE["vocab_size"])
    for sequence in together:
        with torch.no_grad():
            logits = model(torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
        targets = torch.tensor(sequence.token_ids[sequence.prompt_length :])
        logprobs.append(logits[sequence.prompt_length - 1 : -1].gather(-1, targets[:, None]).mean())
    assert min(logprobs) > uniform + 0.5


def test_conversations_use_the_chat_template(model):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    (sequence,) = complete(model, tokenizer, [[{"role": "user", "content": "1+1"}]], max_length=20)
    assert tokenizer.decode(sequence.token_ids[: sequence.prompt_length]) == "1+1;A"


def test_completions_of_one_token_are_left_out(model):
    model = copy.deepcopy(model)
    ending = tiny_tokenizer()("b")["input_ids"][0]

    def end_after_b(module, args, kwargs, output):
        ends = kwargs["input_ids"][:, -1] == ending
        output.logits[:, -1, EOS_TOKEN_ID] = torch.where(ends, 1e4, -1e4)
        return output

    model.register_forward_hook(end_after_b, with_kwargs=True)
    with pytest.warns(UserWarning, match="1 of 2 completions ended with their first token and are left out"):
        (sequence,) = complete(model, tiny_tokenizer(), ["ab", "a"], max_length=12)
    assert sequence.prompt_length == 1
    with pytest.raises(ValueError, match="ended every completion with its first token"):
        complete(model, tiny_tokenizer(), ["ab", "bb"], max_length=12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "`prompts` must be a list of at least one"),
        ({"prompts": "abc"}, "`prompts` must be a list of at least one"),
        ({"prompts": ["a", ""]}, r"`prompts\[1\]` has 0 tokens"),
        ({"prompts": ["a", "b" * 19]}, r"`prompts\[1\]` has 19 tokens; .* at most 18"),
        ({"max_length": 4096}, "`max_length` is 4096, but the model has 2048"),
        ({"batch_size": 0}, "`batch_size` must be positive"),
    ],
)
def test_bad_prompts_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        complete(model, tiny_tokenizer(), **{"prompts": ["a"], "max_length": 20, **changes})
