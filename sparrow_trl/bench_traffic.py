"""What a decode step must read: the model's weights, the kept pages' keys and values, and the landmarks."""

from dataclasses import dataclass

from .schedule import SparsityScheduleConfig


@dataclass(frozen=True)
class ModelShape:
    """
    What of a model decides how many bytes a decode step reads.

    Args:
        num_layers (`int`): Attention layers.
        kv_heads (`int`): Key-value heads of a layer.
        head_dim (`int`): Dimensions of a head.
        weight_bytes (`int`): Weights that every step reads: all, but for an input embedding that is not the head too.
        total_weight_bytes (`int`): All weights.
        element_bytes (`int`): Bytes of a weight, and of a number in the KV cache.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    weight_bytes: int
    total_weight_bytes: int
    element_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """`int`: Keys and values of one token in all layers."""
        return self.num_layers * self.layer_kv_bytes_per_token

    @property
    def layer_kv_bytes_per_token(self) -> int:
        """`int`: Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    def page_landmark_bytes(self, schedule: SparsityScheduleConfig) -> int:
        """Landmarks of one page in one layer under `schedule` ([`SparsityScheduleConfig`])."""
        element_bytes = 1 if schedule.landmark_dtype == "fp8_e4m3" else self.element_bytes
        return schedule.landmarks_per_page * self.kv_heads * self.head_dim * element_bytes

    @classmethod
    def from_config(cls, config, element_bytes: int = 2) -> "ModelShape":
        """
        Shape of the model that a transformers `config` describes.

        Args:
            config ([`~transformers.PreTrainedConfig`]): Configuration of a causal language model.
            element_bytes (`int`, *optional*, defaults to `2`): Bytes of a weight, and of a number in the KV cache.
        """
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        total = sum(parameter.numel() for parameter in model.parameters())  # a tied head counts once
        read = total
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            read -= model.get_input_embeddings().weight.numel()
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            weight_bytes=read * element_bytes,
            total_weight_bytes=total * element_bytes,
            element_bytes=element_bytes,
        )


@dataclass(frozen=True)
class StepTraffic:
    """
    Bytes that one decode step reads.

    Args:
        dense_kv (`float`): Keys and values in layers that attend densely.
        sparse_kv (`float`): Keys and values of the kept pages in the other layers.
        landmarks (`float`): Landmarks of the candidate pages.
        weights (`float`): Weights of the model.
    """

    dense_kv: float
    sparse_kv: float
    landmarks: float
    weights: float

    @property
    def kv(self) -> float:
        """`float`: Keys and values of all layers."""
        return self.dense_kv + self.sparse_kv

    @property
    def total(self) -> float:
        """`float`: Everything."""
        return self.kv + self.landmarks + self.weights


def num_kept_pages(schedule: SparsityScheduleConfig, length: int, layer: int) -> int:
    """Pages that a query of `layer` (`int`) with `length` (`int`) cached tokens reads under `schedule`."""
    pages = -(-length // schedule.page_size)
    if schedule.is_dense_layer(layer):
        return pages
    return min(pages, schedule.sink_pages + schedule.top_k(length, layer) + schedule.recent_pages)


def kept_fraction(schedule: SparsityScheduleConfig, num_layers: int, lengths) -> float:
    """Share of the cached pages that queries of `lengths` (iterable of `int`) read, over all `num_layers` (`int`)."""
    kept = cached = 0
    for length in lengths:
        kept += sum(num_kept_pages(schedule, length, layer) for layer in range(num_layers))
        cached += num_layers * -(-length // schedule.page_size)
    return kept / cached


def step_traffic(
    shape: ModelShape, batch: int, lengths, schedule: SparsityScheduleConfig | None = None
) -> StepTraffic:
    """
    Bytes that a decode step reads, averaged over cached lengths.

    Args:
        shape ([`ModelShape`]): The model.
        batch (`int`): Sequences in the step.
        lengths (`Sequence[int]`): Cached lengths to average over; all sequences have the same.
        schedule ([`SparsityScheduleConfig`], *optional*): Sparsity schedule; dense attention by default.
    """
    dense_kv = sparse_kv = landmarks = 0
    for length in lengths:
        if schedule is None:
            dense_kv += length * shape.kv_bytes_per_token
            continue
        pages = -(-length // schedule.page_size)
        for layer in range(shape.num_layers):
            if schedule.is_dense_layer(layer):
                dense_kv += length * shape.layer_kv_bytes_per_token
                continue
            kept = num_kept_pages(schedule, length, layer)
            # The last page, always kept, may be partial.
            sparse_kv += (length - (pages - kept) * schedule.page_size) * shape.layer_kv_bytes_per_token
            if kept < pages:  # a row that keeps all its pages needs no scores
                candidates = pages - schedule.sink_pages - schedule.recent_pages
                landmarks += candidates * shape.page_landmark_bytes(schedule)
    factor = batch / len(lengths)
    return StepTraffic(dense_kv * factor, sparse_kv * factor, landmarks * factor, shape.weight_bytes)
