"""
A slow model of block-sparse attention, written from its definition with loops over tokens, layers, heads and pages.

The tests compare the reference, the kernels, the engine and the training-side attention with it, so it shares no code
with any of them. It decodes a Qwen3, Qwen2 or Llama checkpoint in NumPy float64, one token at a time, with an explicit
list of keys and values per kv head. Torch serves for reading weights and for rounding to dtypes that NumPy lacks.

The definition, for one kv head at a query with L cached tokens (its own included) and P = ceil(L / page_size) pages:

- A token attends sparsely if and only if its position is at least the prompt length and its layer is not dense.
- The landmark of a full page is the mean of its keys after RoPE; cut into `landmarks_per_page` equal runs, a page has
  one mean per run. Partial pages have none.
- The first `sink_pages` and the last `recent_pages` are reserved. The candidates are the pages between them.
- The `top_k` candidates with the highest scores are kept, ties going to the lower page; `top_k` is the schedule's for
  the bin ceil(L / page_size) // (bin_tokens / page_size), the last bin extending to infinity.
- Every query head of the group attends to all tokens of the kept pages.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch


PARAMETER_MODULES = {
    *("embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "gate_proj", "up_proj", "down_proj"),
}
LANDMARK_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Selection:
    """
    What one query reads of one kv head.

    Attributes:
        kept (`list[int]`):
            Kept pages in increasing order, the reserved ones included; all pages where attention is dense.
        margin (`float`):
            Score of the last candidate kept minus that of the first one dropped: how far the choice is from a tie.
            Infinite when no score decided.
    """

    kept: list[int]
    margin: float = math.inf


@dataclass
class HeadCache:
    """Keys after RoPE (`[head_dim]` each), values, and one `[landmarks_per_page, head_dim]` array per full page."""

    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    landmarks: list[np.ndarray] = field(default_factory=list)


def count_pages(cached_tokens, page_size):
    return -(-cached_tokens // page_size)


def bin_index(cached_tokens, schedule):
    return count_pages(cached_tokens, schedule.page_size) // (schedule.bin_tokens // schedule.page_size)


def top_k(cached_tokens, layer, schedule):
    """Number of candidates that `layer` keeps at a query with `cached_tokens`, from its own table if it has one."""
    own_tables = []
    for layers, table in (getattr(schedule, "layer_top_k_pages", None) or {}).items():
        first, _, last = str(layers).partition("-")
        if int(first) <= layer <= int(last or first):
            own_tables.append(table)
    if len(own_tables) > 1:
        raise ValueError(f"layer {layer} has {len(own_tables)} tables in layer_top_k_pages; give it one.")
    table = own_tables[0] if own_tables else schedule.top_k_pages
    return table[min(bin_index(cached_tokens, schedule), len(table) - 1)]


def page_landmarks(page_keys, landmarks_per_page=1, landmark_dtype=None):
    """
    Landmarks of one full page.

    Args:
        page_keys (`np.ndarray` of shape `[page_size, head_dim]`):
            Keys of the page after RoPE.
        landmarks_per_page (`int`, *optional*, defaults to `1`):
            Number of equal runs of tokens, one mean each.
        landmark_dtype (`str` or `torch.dtype`, *optional*):
            The means are taken in float32 and rounded to this dtype; without it they stay in float64.

    Returns:
        `np.ndarray` of shape `[landmarks_per_page, head_dim]`, float64.
    """
    page_size = len(page_keys)
    if page_size % landmarks_per_page:
        raise ValueError(f"a page of {page_size} tokens cannot be cut into {landmarks_per_page} equal runs.")
    run_tokens = page_size // landmarks_per_page
    runs = [page_keys[run * run_tokens : (run + 1) * run_tokens] for run in range(landmarks_per_page)]
    if landmark_dtype is None:
        return np.stack([run.mean(axis=0) for run in runs])
    means = np.stack([run.mean(axis=0, dtype=np.float32) for run in runs])
    dtype = LANDMARK_DTYPES.get(landmark_dtype, landmark_dtype)
    if np.abs(means).max() > torch.finfo(dtype).max:
        raise ValueError(f"a landmark as large as {np.abs(means).max():.4g} does not fit in {landmark_dtype}.")
    return torch.from_numpy(means).to(dtype).double().numpy()


def page_scores(queries, landmarks, candidates, schedule):
    """Score of each candidate page, from the group's `queries` of shape `[group, head_dim]`."""
    if schedule.page_score == "mean_query":
        if schedule.landmarks_per_page != 1:
            raise ValueError(f"mean_query takes 1 landmark a page, not {schedule.landmarks_per_page}.")
        mean_query = queries.mean(axis=0)
        return {page: float(landmarks[page][0] @ mean_query) for page in candidates}

    if schedule.page_score == "group_softmax":
        scores = dict.fromkeys(candidates, 0.0)
        for query in queries:
            logits = {}
            for page in candidates:
                run_logits = landmarks[page] @ query / math.sqrt(len(query))
                logits[page] = float(np.logaddexp.reduce(run_logits))
            highest = max(logits.values(), default=0.0)
            weights = {page: math.exp(logit - highest) for page, logit in logits.items()}
            total = sum(weights.values())
            for page in candidates:
                scores[page] += weights[page] / total
        return scores

    raise ValueError(f"page_score is {schedule.page_score!r}; it must be 'mean_query' or 'group_softmax'.")


def select_pages(queries, landmarks, cached_tokens, num_kept, schedule):
    """
    Pages of one kv head that the group's queries read.

    Args:
        queries (`np.ndarray` of shape `[group, head_dim]`):
            Query heads of the group after RoPE.
        landmarks (sequence or `dict` of `np.ndarray` of shape `[landmarks_per_page, head_dim]`):
            Landmarks by page; only the candidates' are read.
        cached_tokens (`int`):
            Number of cached tokens, the query's own included.
        num_kept (`int`):
            Number of candidates to keep.
        schedule (`SparsityScheduleConfig`):
            Gives the page size, the score and the reserved pages.

    Returns:
        [`Selection`]
    """
    if schedule.recent_pages < 1:
        raise ValueError("recent_pages is 0: the query's own page may be partial, and such a page has no score.")
    num_pages = count_pages(cached_tokens, schedule.page_size)
    first_recent = num_pages - schedule.recent_pages
    reserved = [page for page in range(num_pages) if page < schedule.sink_pages or page >= first_recent]
    candidates = range(schedule.sink_pages, first_recent)
    if num_kept >= len(candidates):
        return Selection(list(range(num_pages)))

    scores = page_scores(queries, landmarks, candidates, schedule)
    ranked = sorted(candidates, key=lambda page: (-scores[page], page))
    kept = sorted(reserved + ranked[:num_kept])
    margin = scores[ranked[num_kept - 1]] - scores[ranked[num_kept]] if num_kept else math.inf
    return Selection(kept, margin)


def attend(queries, cache, kept, page_size):
    """Softmax attention of the group's queries over all cached tokens of the kept pages: `[group, head_dim]`."""
    cached_tokens = len(cache.keys)
    tokens = [t for page in kept for t in range(page * page_size, min((page + 1) * page_size, cached_tokens))]
    keys = np.stack([cache.keys[t] for t in tokens])
    values = np.stack([cache.values[t] for t in tokens])
    outputs = []
    for query in queries:
        logits = keys @ query * len(query) ** -0.5
        weights = np.exp(logits - logits.max())
        outputs.append(weights @ values / weights.sum())
    return np.stack(outputs)


def rotary_table(config, head_dim, num_tokens):
    """Cosines and sines of the rotary angles, `[num_tokens, head_dim / 2]` each."""
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type {rope['rope_type']!r} is not modelled; use a checkpoint with the default one.")
    # Torch float32 on purpose: transformers and vLLM both tabulate RoPE so whatever the model's dtype, and angles in
    # float64 would differ by more than the margin at which selections are compared.
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(num_tokens, dtype=torch.float32), frequencies)
    return angles.cos().double().numpy(), angles.sin().double().numpy()


def rotate(head, cos, sin):
    """RoPE in the Hugging Face convention: channel i is paired with channel i + head_dim / 2."""
    first, second = np.split(head, 2)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


class LoopModel:
    """
    One sequence being decoded.

    Args:
        model_or_state_dict (`torch.nn.Module` or `dict[str, torch.Tensor]`):
            A `Qwen3ForCausalLM`, `Qwen2ForCausalLM` or `LlamaForCausalLM`, or its weights. The query and key norms and
            the biases are applied where the weights have them.
        config (`PreTrainedConfig`):
            Its configuration.
        prompt_length (`int`):
            Number of prompt tokens, which attend densely.
        schedule (`SparsityScheduleConfig`):
            Any object with its attributes.
        max_tokens (`int`):
            Number of positions to prepare rotary angles for.
        landmark_dtype (`str` or `torch.dtype`, *optional*):
            Dtype of the landmarks: `"float32"`, `"bfloat16"`, `"float16"`, `"fp8_e4m3"` or a torch dtype. Defaults to
            the schedule's own; where that is `"auto"` or missing, landmarks stay in float64.
    """

    def __init__(self, model_or_state_dict, config, prompt_length, schedule, max_tokens, landmark_dtype=None):
        state_dict = model_or_state_dict
        if isinstance(model_or_state_dict, torch.nn.Module):
            state_dict = model_or_state_dict.state_dict()
        unknown = sorted(name for name in state_dict if name.split(".")[-2] not in PARAMETER_MODULES)
        if unknown:
            raise ValueError(f"not a Qwen3, Qwen2 or Llama checkpoint: it has {unknown[0]!r}.")
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not modelled; only 'silu' is.")
        if set(getattr(config, "layer_types", None) or []) - {"full_attention"}:
            raise ValueError(f"layer_types {config.layer_types} has layers that do not see the whole context.")
        self.weights = {name: tensor.detach().cpu().double().numpy() for name, tensor in state_dict.items()}
        self.config = config
        self.prompt_length = prompt_length
        self.schedule = schedule
        schedule_dtype = getattr(schedule, "landmark_dtype", "auto")
        self.landmark_dtype = landmark_dtype or (None if schedule_dtype == "auto" else schedule_dtype)
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.cos, self.sin = rotary_table(config, self.head_dim, max_tokens)
        self.caches = [
            [HeadCache() for _ in range(config.num_key_value_heads)] for _ in range(config.num_hidden_layers)
        ]
        self.position = 0
        self.selections: dict[tuple[int, int, int], Selection] = {}

    def step(self, token_id):
        """Appends one token to the sequence and returns the logits of the next, `[vocab_size]`."""
        hidden = self.weights["model.embed_tokens.weight"][token_id]
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            hidden = hidden + self._attention(layer, self._norm(f"{prefix}.input_layernorm", hidden))
            hidden = hidden + self._mlp(layer, self._norm(f"{prefix}.post_attention_layernorm", hidden))
        self.position += 1
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self._linear(head, self._norm("model.norm", hidden))

    def _attention(self, layer, hidden):
        prefix = f"model.layers.{layer}.self_attn"
        query_heads = self._linear(f"{prefix}.q_proj", hidden).reshape(-1, self.head_dim)
        key_heads = self._linear(f"{prefix}.k_proj", hidden).reshape(-1, self.head_dim)
        value_heads = self._linear(f"{prefix}.v_proj", hidden).reshape(-1, self.head_dim)
        outputs = []
        for kv_head, cache in enumerate(self.caches[layer]):
            cache.keys.append(self._norm_and_rotate(f"{prefix}.k_norm", key_heads[kv_head]))
            cache.values.append(value_heads[kv_head])
            if len(cache.keys) % self.schedule.page_size == 0:
                page_keys = np.stack(cache.keys[-self.schedule.page_size :])
                cache.landmarks.append(
                    page_landmarks(page_keys, self.schedule.landmarks_per_page, self.landmark_dtype)
                )
            first = kv_head * self.group
            group = query_heads[first : first + self.group]
            queries = np.stack([self._norm_and_rotate(f"{prefix}.q_norm", query) for query in group])
            selection = self._select(layer, queries, cache)
            self.selections[layer, self.position, kv_head] = selection
            outputs.append(attend(queries, cache, selection.kept, self.schedule.page_size))
        return self._linear(f"{prefix}.o_proj", np.concatenate(outputs).reshape(-1))

    def _select(self, layer, queries, cache):
        cached_tokens = len(cache.keys)
        dense_layer = self.schedule.dense_layers == "all" or layer in self.schedule.dense_layers
        if self.position < self.prompt_length or dense_layer:
            return Selection(list(range(count_pages(cached_tokens, self.schedule.page_size))))
        num_kept = top_k(cached_tokens, layer, self.schedule)
        return select_pages(queries, cache.landmarks, cached_tokens, num_kept, self.schedule)

    def _mlp(self, layer, hidden):
        prefix = f"model.layers.{layer}.mlp"
        gate = self._linear(f"{prefix}.gate_proj", hidden)
        return self._linear(
            f"{prefix}.down_proj", gate / (1 + np.exp(-gate)) * self._linear(f"{prefix}.up_proj", hidden)
        )

    def _norm_and_rotate(self, norm, head):
        if f"{norm}.weight" in self.weights:
            head = self._norm(norm, head)
        return rotate(head, self.cos[self.position], self.sin[self.position])

    def _norm(self, name, hidden):
        return self.weights[f"{name}.weight"] * hidden / np.sqrt(np.mean(hidden**2) + self.config.rms_norm_eps)

    def _linear(self, name, hidden):
        return self.weights[f"{name}.weight"] @ hidden + self.weights.get(f"{name}.bias", 0.0)


def run_sequence(model_or_state_dict, config, token_ids, prompt_length, schedule, landmark_dtype=None):
    """
    Decodes a sequence token by token. The arguments are those of [`LoopModel`], with the `token_ids` (`list[int]`) of
    prompt and completion.

    Returns:
        `tuple`: the logits (`np.ndarray` of shape `[T, vocab_size]`, row t predicting token t + 1), and a `dict` from
        (layer, position, kv head) to [`Selection`].
    """
    decoder = LoopModel(model_or_state_dict, config, prompt_length, schedule, len(token_ids), landmark_dtype)
    logits = np.stack([decoder.step(token_id) for token_id in token_ids])
    return logits, decoder.selections


def sequence_logits(model_or_state_dict, config, token_ids, prompt_length, schedule, landmark_dtype=None):
    """Logits of [`run_sequence`], `[T, vocab_size]`."""
    return run_sequence(model_or_state_dict, config, token_ids, prompt_length, schedule, landmark_dtype)[0]


def kept_pages(model_or_state_dict, config, token_ids, prompt_length, schedule, landmark_dtype=None):
    """Selections of [`run_sequence`], by (layer, position, kv head)."""
    return run_sequence(model_or_state_dict, config, token_ids, prompt_length, schedule, landmark_dtype)[1]


def token_logprobs(logits, token_ids, temperature=1.0):
    """Log-prob of token t + 1 under row t of `logits`, `[T - 1]`."""
    scaled = logits[:-1] / temperature
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    log_totals = np.log(np.exp(scaled).sum(axis=-1))
    return scaled[np.arange(len(token_ids) - 1), token_ids[1:]] - log_totals


def sequence_logprobs(
    model_or_state_dict, config, token_ids, prompt_length, schedule, temperature=1.0, landmark_dtype=None
):
    """
    Log-prob of every token of a sequence but the first, given those before it, `[T - 1]`.

    The token at position t is predicted by the query at position t - 1. So the first completion token, predicted by
    the last prompt token, has its dense log-prob.
    """
    logits = sequence_logits(model_or_state_dict, config, token_ids, prompt_length, schedule, landmark_dtype)
    return token_logprobs(logits, token_ids, temperature)
