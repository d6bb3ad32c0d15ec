"""The character tokenizer of the tiny reasoner: one token per character, and none that the text does not have."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "\n " + string.digits + string.ascii_lowercase + ":>+=,.?"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """
    Build the tokenizer: one token per character, `<pad>`, `<eos>` and `<unk>` (anything not in `CHARACTERS`).

    Returns:
        [`~transformers.PreTrainedTokenizerFast`], padding on the left as generation needs.
    """
    vocab = {token: index for index, token in enumerate([PAD, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    # Not ".", so that a line break is a character like any other.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
