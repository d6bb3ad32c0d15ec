"""
A LoRA that is beside a model and not in it: active in the rollout engine and in chosen forward passes alone.

PEFT puts an adapter into a model for good, which renames the weights that it wraps and hands its own to the optimizer
and the checkpoints. [`RolloutAdapter`] lets PEFT make its layers, puts the model's own back at once, and swaps PEFT's
in within [`RolloutAdapter.active`] only. Outside of it the model is the one that there was: the same modules, the same
names, the same bits. On disk it is an ordinary PEFT adapter.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer, LoraModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME, load_peft_weights
from peft.utils.constants import CONFIG_NAME
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel

from .engine_linear import ADAPTER_NAME, EngineLinear
from .json_files import write_atomically


# What PEFT writes before the name of a module in an adapter's file.
_PREFIX = "base_model.model."

# Options of a `LoraConfig` under which W + BA is not all that the adapter is, or which change W, with the only value
# that is supported.
_PLAIN_LORA = {
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "layer_replication": None,
    "megatron_config": None,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
}

# What the weights of an adapter are multiplied by.
_SCALE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")

# Other ways to initialize take the base weights apart.
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal")


class RolloutAdapter:
    """
    A LoRA for the rollouts of a model (DistillSparse, section 4.5 of the
    [Sparrow paper](https://huggingface.co/papers/2606.08446)).

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model, which is left as it is.
        config ([`~peft.LoraConfig`], *optional*):
            Rank, scale, targets and dropout. By default rank 16, alpha 32 and all linear layers but the head.

    Attributes:
        config ([`~peft.LoraConfig`]): The configuration, with the targets that were found.
        parameters (`list[torch.nn.Parameter]`): Weights of the adapter, float32.
        engine_dtype (`torch.dtype`): Dtype of the engine's weights, by default that of the model. In forward passes
            with the adapter, W + BA is rounded to it as in the engine.

    Raises:
        ValueError: for a PEFT model, a config of another method or with options beyond W + BA, and targets that match
            nothing or another kind of layer than a linear one inside the model's backbone.

    Example:

    ```python
    >>> adapter = RolloutAdapter(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    >>> with adapter.active():
    ...     student = model(input_ids).logits
    >>> teacher = model(input_ids).logits  # without the adapter, bit for bit
    ```
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig | None = None):
        if any(isinstance(module, LoraLayer) or hasattr(module, "peft_config") for module in model.modules()):
            raise ValueError(
                "The model has PEFT adapters of its own. A rollout adapter needs a model whose weights are all its "
                "own: fine-tune all weights, or merge the adapter into them first."
            )
        if config is None:
            config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        _check_plain_lora(config)
        self.config = copy.deepcopy(config)
        self.config.target_modules = self.config.target_modules or "all-linear"
        self.config.task_type = "CAUSAL_LM"
        self.config.base_model_name_or_path = model.name_or_path or None
        self.engine_dtype = model.dtype
        self._layers, self._owners = self._make_layers(model)
        self._depth = 0
        for layer in self._layers.values():
            for part in (layer.lora_A, layer.lora_B):
                part.float().requires_grad_(True)
        self.parameters = [
            parameter
            for layer in self._layers.values()
            for part in (layer.lora_A, layer.lora_B)
            for parameter in part.parameters()
        ]

    def _make_layers(self, model):
        """PEFT's layers by the name of the module they wrap, and the parents of those, with the model as it was."""
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        children = {module: dict(module._modules) for module in model.modules()}
        try:
            LoraModel(model, self.config, ADAPTER_NAME)
            layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        except ValueError as error:
            raise ValueError(f"No rollout adapter can be made for this model: {error}") from error
        finally:
            # Also what was wrapped before an error.
            for module, own in children.items():
                module._modules.update(own)
            for parameter, requires_grad in trainable:
                parameter.requires_grad_(requires_grad)
            if "peft_config" in vars(model):
                del model.peft_config
        head = model.get_output_embeddings()
        for name in layers:
            if name not in linear or linear[name] is head:
                kind = "the head" if name in linear else "no linear layer"
                raise ValueError(
                    f"`target_modules` matches {name!r}, which is {kind}. A rollout adapter takes linear layers of "
                    "the backbone, such as 'q_proj' or 'all-linear'."
                )
        owners = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in layers}
        return layers, owners

    @property
    def target_names(self) -> list[str]:
        """`list[str]`: Names of the adapted modules."""
        return list(self._layers)

    def to(self, device: torch.device | str) -> "RolloutAdapter":
        """Move the adapter's weights to `device` (`torch.device` or `str`), and return the adapter."""
        for layer in self._layers.values():
            for part in (layer.lora_A, layer.lora_B):
                part.to(device)
        return self

    @contextmanager
    def active(self, *, dropout: bool = False) -> Iterator[None]:
        """
        Context in which the model's forward passes have the adapter. The backward passes of those with gradient
        checkpointing must run inside, too.

        Args:
            dropout (`bool`, *optional*, defaults to `False`):
                Whether the adapter's dropout acts.
        """
        for layer in self._layers.values():
            layer.lora_dropout.train(dropout)
        self._depth += 1
        try:
            if self._depth == 1:
                for name, (owner, attribute) in self._owners.items():
                    owner._modules[attribute] = self._active_layer(name)
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for name, (owner, attribute) in self._owners.items():
                    owner._modules[attribute] = self._layers[name].base_layer

    def _active_layer(self, name: str) -> nn.Module:
        layer = self._layers[name]
        if self.engine_dtype in (torch.float32, torch.float64):
            return layer
        return EngineLinear(layer, partial(self._engine_weight, name))

    def _engine_weight(self, name: str) -> torch.Tensor:
        return self.merged(f"{name}.weight", self._layers[name].get_base_layer().weight).to(self.engine_dtype)

    @torch.no_grad()
    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """
        W + BA, computed in float32, as a new tensor; or `weight` itself where the adapter adds nothing.

        Args:
            name (`str`):
                Name of the weight in the model, such as `"model.layers.0.self_attn.q_proj.weight"`.
            weight (`torch.Tensor`):
                Its full value.

        Returns:
            `torch.Tensor`: of the shape and dtype of `weight`.
        """
        module, _, kind = name.rpartition(".")
        layer = self._layers.get(module)
        if layer is None or kind != "weight":
            return weight
        # Inside autocast, B times A would be computed in bfloat16.
        with torch.autocast(weight.device.type, enabled=False):
            delta = layer.get_delta_weight(ADAPTER_NAME).to(weight.device)
        return (weight.float() + delta).to(weight.dtype)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The adapter's weights, by the names that PEFT gives them in its files."""
        return {
            f"{_PREFIX}{name}.{part}.weight": getattr(layer, part)[ADAPTER_NAME].weight.detach()
            for name, layer in self._layers.items()
            for part in ("lora_A", "lora_B")
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor], source: str = "The state") -> None:
        """
        Take over the weights of another adapter.

        Args:
            state (`dict[str, torch.Tensor]`):
                As [`state_dict`] returns them.
            source (`str`, *optional*, defaults to `"The state"`):
                Where `state` comes from, for the error message.

        Raises:
            ValueError: when names or shapes differ. Nothing has changed then.
        """
        own = self.state_dict()
        for name in (*own, *state):
            shapes = [tuple(side[name].shape) if name in side else None for side in (own, state)]
            if shapes[0] != shapes[1]:
                here, there = (f"of shape {list(shape)}" if shape else "missing" for shape in shapes)
                raise ValueError(
                    f"{source} belongs to another adapter or model: {name} is {there} in it, but {here} here."
                )
        for name, value in state.items():
            own[name].copy_(value)

    def save_pretrained(self, folder: str | Path, *, base_model: str | Path | None = None) -> None:
        """
        Write a PEFT adapter, `adapter_model.safetensors` and `adapter_config.json`.

        Args:
            folder (`str` or `pathlib.Path`):
                Folder to write to.
            base_model (`str` or `pathlib.Path`, *optional*):
                Name or folder of the model that the adapter is for, where that has been trained since it was loaded.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        if base_model is not None:
            config.base_model_name_or_path = str(base_model)
        state = {name: value.cpu().contiguous() for name, value in self.state_dict().items()}
        write_atomically(folder / SAFETENSORS_WEIGHTS_NAME, save(state, metadata={"format": "pt"}))
        config.save_pretrained(str(folder))

    def load_pretrained(self, folder: str | Path) -> None:
        """
        Take over the weights of a PEFT adapter of the same form.

        Args:
            folder (`str` or `pathlib.Path`):
                Local folder, or an id on the Hub.

        Raises:
            ValueError: when it adds something else to the model, by its shapes or its scale. Nothing has changed then.
        """
        saved = LoraConfig.from_pretrained(str(folder))
        for name in _SCALE:
            if getattr(saved, name) != getattr(self.config, name):
                raise ValueError(
                    f"The adapter in {str(folder)!r} has {name}={getattr(saved, name)!r}, but {name}="
                    f"{getattr(self.config, name)!r} is given now. Give the same to go on with it."
                )
        self.load_state_dict(load_peft_weights(str(folder), device="cpu"), source=str(folder))

    @classmethod
    def from_pretrained(cls, model: PreTrainedModel, folder: str | Path) -> "RolloutAdapter":
        """
        Read a PEFT adapter.

        Args:
            model ([`~transformers.PreTrainedModel`]):
                The model that it was made for.
            folder (`str` or `pathlib.Path`):
                Local folder, or an id on the Hub.

        Raises:
            ValueError: as in the constructor, and for an adapter of another model.
        """
        config = LoraConfig.from_pretrained(str(folder))
        base, own = config.base_model_name_or_path, model.name_or_path
        # Folders may be moved or copied. In the model's own folder an adapter may have the name of its repository.
        beside = bool(own) and Path(folder).resolve().parent == Path(own).resolve()
        if base and own and Path(base).name != Path(own).name and not beside:
            raise ValueError(
                f"The adapter {str(folder)!r} was made for {base!r}, but the model is {own!r}. If they are the same, "
                f"set `base_model_name_or_path` in its {CONFIG_NAME}."
            )
        config.inference_mode = False
        adapter = cls(model, config)
        adapter.load_state_dict(load_peft_weights(str(folder), device="cpu"), source=str(folder))
        return adapter


def _check_plain_lora(config: LoraConfig) -> None:
    if not isinstance(config, LoraConfig):
        raise ValueError(f"A rollout adapter is a LoRA and needs a `LoraConfig`, got {type(config).__name__}.")
    for name, value in _PLAIN_LORA.items():
        given = getattr(config, name, value)
        if given != value and given not in ([], {}):
            raise ValueError(
                f"`{name}={given!r}` is not supported in the LoRA of the rollouts, which reach the engine as W + BA. "
                f"Leave it at {value!r}."
            )
    if config.init_lora_weights not in _INITIALIZATIONS:
        raise ValueError(
            f"`init_lora_weights={config.init_lora_weights!r}` changes the base weights, which must stay as they are. "
            "Use True, False, 'gaussian' or 'orthogonal'."
        )
