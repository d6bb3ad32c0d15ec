"""Random models of a few hundred thousand parameters with a character tokenizer, the same at every build."""

import string

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)


CHARACTERS = string.ascii_letters + string.digits + " +-*/=.,:;?!()\n"

PAD_TOKEN_ID, EOS_TOKEN_ID = 0, 1

SHAPE = {
    "vocab_size": 2 + len(CHARACTERS),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    # Ten times the usual range: attention and next-token distributions come out far from uniform.
    "initializer_range": 0.2,
    "pad_token_id": PAD_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": None,
}


def tiny_config(name: str) -> AutoConfig:
    """Configuration of the tiny model `name`."""
    match name:
        case "qwen3":
            return Qwen3Config(**SHAPE, tie_word_embeddings=True)
        case "qwen3_untied":
            return Qwen3Config(**SHAPE, tie_word_embeddings=False)
        case "qwen2":
            return Qwen2Config(**SHAPE, tie_word_embeddings=True)
        case "llama":
            return LlamaConfig(**SHAPE, tie_word_embeddings=True)
        case "mistral_window":
            return MistralConfig(**SHAPE, sliding_window=256)
        case "qwen3_mixed_window":  # the last two layers slide
            return Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=256, max_window_layers=2)
        case "gpt_oss":  # learned attention sinks, and a window in every second layer
            return GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1)
        case "gpt_oss_full":  # learned attention sinks alone
            layer_types = ["full_attention"] * SHAPE["num_hidden_layers"]
            return GptOssConfig(
                **SHAPE, num_local_experts=2, num_experts_per_tok=1, layer_types=layer_types, sliding_window=None
            )
        case "qwen3_moe":
            return Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
        case "head_dim_48":  # a head size that vLLM has no CPU kernel for
            return Qwen3Config(**{**SHAPE, "head_dim": 48})
    raise ValueError(f"There is no tiny model {name!r}.")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    vocab = {"<pad>": PAD_TOKEN_ID, "<eos>": EOS_TOKEN_ID}
    vocab.update({character: len(vocab) + index for index, character in enumerate(CHARACTERS)})
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_model(name: str, seed: int = 0) -> AutoModelForCausalLM:
    """The tiny model `name` in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32)


def save_tiny_model(name: str, folder) -> str:
    """Write the tiny model `name` and its tokenizer to `folder`, and return the folder."""
    tiny_model(name).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def model_of_one_layer(layer: int):
    """A tiny model of four layers, of which the attention of `layer` alone matters."""
    model = tiny_model("qwen3").eval()
    with torch.no_grad():
        for index, module in enumerate(model.model.layers):
            module.self_attn.o_proj.weight *= 1 if index == layer else 1e-4
    return model


def random_token_ids(*lengths: int) -> list[list[int]]:
    """Rows of tokens for the tiny models, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 70, (length,), generator=generator).tolist() for length in lengths]
