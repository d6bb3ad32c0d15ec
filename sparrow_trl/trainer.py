"""GRPO on sparse rollouts: TRL's [`~trl.GRPOTrainer`] with the rollout engine swapped and its mismatch measured."""

import logging
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from .versions import check_version


check_version("trl")
check_version("vllm")

import torch  # noqa: E402
from accelerate.utils import is_peft_model  # noqa: E402
from datasets import Dataset  # noqa: E402
from huggingface_hub import ModelCard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import ProcessorMixin  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl.models.utils import disable_gradient_checkpointing  # noqa: E402
from trl.trainer import grpo_trainer  # noqa: E402
from trl.trainer.utils import maybe_gather_lm_head_ctx  # noqa: E402

from .acceptance import AcceptanceTracker, gather_dense_logprobs, top_k_acceptance_bounds  # noqa: E402
from .acceptance_report import PAPER_THRESHOLD, acceptance_table  # noqa: E402
from .callbacks import HubFilesCallback, TailAcceptanceCallback  # noqa: E402
from .config import SparseRolloutGRPOConfig  # noqa: E402
from .guard import AUTO_SCHEDULE, ScheduleGuardCallback, starting_schedule  # noqa: E402
from .hub_cards import PAPER, add_rollouts, is_hub_id  # noqa: E402
from .published_files import CARD_NAME, PUBLISHED_FILES  # noqa: E402
from .rollout import (  # noqa: E402
    RolloutLLM,
    SparseVLLMGeneration,
    check_engine_arguments,
    check_policy,
    swapped,
)
from .schedule import SCHEDULE_NAME, SparsityScheduleConfig  # noqa: E402
from .tables import Table  # noqa: E402


logger = logging.getLogger(__name__)

# Mean absolute difference between two ways of scoring the same tokens from the same hidden states. One bfloat16 logit
# may well be rounded to its neighbour; a head with a scale or a cap is further off.
HEAD_TOLERANCE = 5e-2


def check_text_only(processing_class, *datasets) -> None:
    """Refuse, with a `ValueError`, a processor and datasets with images.

    Args:
        processing_class ([`~transformers.PreTrainedTokenizerBase`], [`~transformers.ProcessorMixin`] or `None`):
            Processing class of the trainer.
        *datasets ([`~datasets.Dataset`], `dict[str, Dataset]` or `None`):
            Datasets of the trainer. Of the prompts only the first is looked at.
    """
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"processing_class is a {type(processing_class).__name__}, which prepares more than text. Sparse rollouts "
            "support text only; pass the tokenizer."
        )
    for group in datasets:
        for dataset in group.values() if isinstance(group, dict) else [group]:
            images = {"image", "images"} & set(getattr(dataset, "column_names", None) or ())
            if images:
                raise ValueError(
                    f"The dataset has the column {images.pop()!r}. Sparse rollouts support text only; remove the "
                    "column, or use TRL's GRPOTrainer."
                )
            prompt = dataset[0].get("prompt") if isinstance(dataset, Dataset) and len(dataset) else None
            for message in prompt if isinstance(prompt, list) else ():
                content = message.get("content")
                kinds = {part["type"] for part in content} - {"text"} if isinstance(content, list) else set()
                if kinds:
                    raise ValueError(
                        f"The dataset's prompts have content of type {kinds.pop()!r}. Sparse rollouts support text "
                        "only; use TRL's GRPOTrainer."
                    )


class SparseRolloutGRPOTrainer(GRPOTrainer):
    """
    Trainer for GRPO on block-sparse rollouts, as in [Sparrow: Sparse Rollout for Stable and Efficient Long-context RL
    of Large Language Models](https://huggingface.co/papers/2606.08446).

    vLLM generates the rollouts under block-sparse attention whose page budget follows a sparsity schedule; the policy
    is trained with dense attention. On a share of the sequences the acceptance rate between the two is measured and
    logged.

    Example:

    ```python
    from datasets import load_dataset
    from sparrow_trl import SparseRolloutGRPOTrainer
    from trl.rewards import accuracy_reward

    trainer = SparseRolloutGRPOTrainer(
        model="Qwen/Qwen3-1.7B",
        reward_funcs=accuracy_reward,
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        schedule="qwen3-1.7b-0.86",
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Policy, as in [`~trl.GRPOTrainer`]. Text-only, not quantised, with full attention in every layer.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Reward functions, as in [`~trl.GRPOTrainer`].
        args ([`SparseRolloutGRPOConfig`], *optional*):
            Configuration. If `None`, a default one is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Training prompts, as in [`~trl.GRPOTrainer`], which requires them. Text only.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Evaluation prompts, as in [`~trl.GRPOTrainer`]. Text only.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer. If `None`, the model's.
        schedule ([`SparsityScheduleConfig`] or `str`, *optional*):
            Sparsity schedule of the rollouts: an object, the name of a published preset, a local path or a Hub id, or
            `"auto"` to have a [`ScheduleGuardCallback`] find one during the first steps. If `None`,
            `args.sparsity_schedule` is used.
        engine ([`~sparrow_trl.rollout.RolloutLLM`], *optional*):
            Engine to go on with, `trainer.vllm_generation.llm` of an earlier trainer of a model of the same kind with
            the same engine settings, whose place this trainer takes. By default a new one is started.
        **kwargs:
            Further arguments of [`~trl.GRPOTrainer`], such as `callbacks`, `optimizers` and `peft_config`. A callback
            with a method `attach` is given the trainer through it, at the end of construction.

    Attributes:
        acceptance ([`AcceptanceTracker`]): Statistics of the measured acceptance rates, over all processes.
        resume_checkpoint (`str`, *optional*): Checkpoint that training was resumed from.
        trajectory_listeners (`list[Callable]`):
            Called with the inputs of each forward pass that the policy learns from.
        rollout_listeners (`list[Callable]`):
            Called, without arguments, once the rollouts of a training step are scored and measured.
        is_auto_schedule (`bool`): Whether the schedule is to be found during the first steps (`schedule="auto"`).
    """

    _tag_names = ["trl", "grpo", "sparrow-trl", "sparse-rollout"]
    _name = "GRPO on sparse rollouts"
    _paper = PAPER

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: SparseRolloutGRPOConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        *,
        schedule: SparsityScheduleConfig | str | None = None,
        engine: RolloutLLM | None = None,
        **kwargs,
    ):
        for name in ("tools", "rollout_func", "environment_factory"):
            if kwargs.get(name):
                raise ValueError(
                    f"{name} is not supported with sparse rollouts: the completions would not all come from the "
                    "sparse engine that the acceptance rate is measured on. Remove it, or use TRL's GRPOTrainer."
                )
        if kwargs.get("quantization_config"):
            raise ValueError(
                "quantization_config is not supported with sparse rollouts: acceptance rates and importance ratios "
                "need the engine and the policy to hold the same weights. Remove it."
            )
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = SparseRolloutGRPOConfig(f"{name.split('/')[-1]}-GRPO-sparse")
        if not isinstance(args, SparseRolloutGRPOConfig):
            raise ValueError(
                f"args is a {type(args).__name__}, but SparseRolloutGRPOTrainer needs a SparseRolloutGRPOConfig, "
                "whose defaults suit sparse rollouts. It takes the same arguments."
            )
        if schedule is None:
            schedule = args.sparsity_schedule
        elif args.sparsity_schedule is not None and args.sparsity_schedule != schedule:
            raise ValueError(
                f"The trainer got schedule={schedule!r} and args.sparsity_schedule={args.sparsity_schedule!r}. Give "
                "one of them."
            )
        if schedule is None:
            raise ValueError(
                "No sparsity schedule. Pass `schedule` (an object, a preset name such as 'qwen3-1.7b-0.86', a path or "
                "a Hub id), or set `sparsity_schedule` in the config. SparsityScheduleConfig.dense() gives dense "
                "rollouts."
            )
        self.is_auto_schedule = schedule == AUTO_SCHEDULE
        if self.is_auto_schedule:
            schedule = starting_schedule(args)
        schedule = SparsityScheduleConfig.resolve(schedule)
        # All this before TRL creates the output folder.
        check_engine_arguments(schedule, args.vllm_block_size, args.vllm_engine_kwargs)
        check_text_only(processing_class, train_dataset, eval_dataset)
        if not isinstance(model, str):
            check_policy(model)
        self.acceptance = AcceptanceTracker(schedule, min_tokens=args.acceptance_min_tokens)
        self.resume_checkpoint = None
        self.trajectory_listeners = []
        self.rollout_listeners = []
        self._probes = []
        self._sparse_kl = []
        # Step and number of synchronisations at the last rollouts.
        self._synchronised = -1, -1
        # Checkpoints to push once the callbacks have written their files; `None` outside of a step's end.
        self._checkpoints_to_push = None
        self._reported_pushes = []

        if args.vllm_mode == "server" and engine is not None:
            raise ValueError("engine is given, and vllm_mode='server' says that a server generates. Give one of them.")

        def build_generation(**generation_kwargs):
            generation_class = SparseVLLMGeneration
            if args.vllm_mode == "server":
                from .rollout_server import ServerSparseVLLMGeneration as generation_class
            return generation_class(
                schedule=schedule,
                block_size=args.vllm_block_size,
                engine_kwargs=args.vllm_engine_kwargs,
                probe_top_k=args.acceptance_top_k,
                weight_sync_check_interval=args.weight_sync_check_interval,
                engine=engine,
                **generation_kwargs,
            )

        create_model = grpo_trainer.create_model_from_path

        def create_policy(*args, **kwargs):
            model = create_model(*args, **kwargs)
            check_policy(model)
            return model

        with (
            swapped(grpo_trainer, "create_model_from_path", create_policy),
            swapped(grpo_trainer, "VLLMGeneration", build_generation),
        ):
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)

        if not any(isinstance(callback, TailAcceptanceCallback) for callback in self.callback_handler.callbacks):
            self.add_callback(TailAcceptanceCallback())
        if self.is_auto_schedule and not any(
            isinstance(callback, ScheduleGuardCallback) for callback in self.callback_handler.callbacks
        ):
            self.add_callback(ScheduleGuardCallback())
        self.add_callback(HubFilesCallback())
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "attach"):
                callback.attach(self)

    @property
    def schedule(self) -> SparsityScheduleConfig:
        """[`SparsityScheduleConfig`]: The schedule in use. Assign another one to change the rollouts that follow."""
        return self.vllm_generation.schedule

    @schedule.setter
    def schedule(self, schedule: SparsityScheduleConfig | str):
        schedule = SparsityScheduleConfig.resolve(schedule)
        self.vllm_generation.set_schedule(schedule)
        self.acceptance.set_schedule(schedule)

    # Rollouts

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        generation = self.vllm_generation
        training = self.model.training
        generation.probe_rows = self._choose_probe_rows if training and not generation.state.dense else None
        with nullcontext() if training or not self.args.dense_evaluation else generation.dense_rollouts():
            output = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        if training:
            self._check_synchronised()
        self._probes = generation.probes
        self._log_kept_fraction(generation.counters, "train" if training else "eval")
        return output

    def _check_synchronised(self) -> None:
        """Notice a step whose rollouts were made without a synchronisation; what one did, the generation checks."""
        step, count = self.state.global_step, self.vllm_generation.num_syncs
        last_step, last_count = self._synchronised
        if step != last_step and count == last_count:
            raise RuntimeError(
                f"The rollout engine has not had the policy's weights since step {last_step}, and training is at step "
                f"{step}. Training on such rollouts stops here. Check that nothing overrides `sync_weights`."
            )
        self._synchronised = step, count

    def _choose_probe_rows(self, num_rows: int) -> list[int]:
        """
        A random share of the engine's next batch to probe, known to all processes whose rows are in it. Each has the
        same number of them: scoring them gathers a sharded head, in which all processes must take part.
        """
        args = self.args
        # TRL's `_step` starts again at 0 when training resumes.
        accumulation = args.gradient_accumulation_steps
        step = self.state.global_step * accumulation + self._step % accumulation
        generation_batch = step // (args.steps_per_generation * self.num_iterations)
        if not args.acceptance_probe_fraction or generation_batch % args.acceptance_probe_interval:
            return []
        generator = torch.Generator().manual_seed(args.seed + step)
        own_rows = num_rows // self.vllm_generation.num_sharing
        num_probes = max(1, round(own_rows * args.acceptance_probe_fraction))
        starts = range(0, num_rows, own_rows)
        chosen = [start + torch.randperm(own_rows, generator=generator)[:num_probes] for start in starts]
        return sorted(torch.cat(chosen).tolist())

    def _log_kept_fraction(self, counters, mode: str):
        pages = torch.tensor([counters.kept_pages, counters.cached_pages], device=self.accelerator.device)
        kept, cached = self.accelerator.gather(pages).view(-1, 2).sum(0).tolist()
        if cached:
            self._metrics[mode]["sparsity/kept_fraction"].append(kept / cached)

    def _compute_loss(self, model, inputs):
        if self.model.training:
            for listener in self.trajectory_listeners:
                listener(inputs)
        return super()._compute_loss(model, inputs)

    # Acceptance

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        if self._probes:
            # TRL did not score this batch in the way needed, so the probed rows alone are scored here.
            rows = torch.tensor([probe.row for probe in self._probes], device=output["prompt_ids"].device)
            lengths = torch.tensor([len(probe.token_ids) for probe in self._probes], device=rows.device)
            completion_ids = output["completion_ids"][rows]
            width = completion_ids.size(1)
            completion_mask = (torch.arange(width, device=rows.device) < lengths[:, None]).long()
            probes = [replace(probe, row=index) for index, probe in enumerate(self._probes)]
            self._probes = []
            with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                self._score_and_measure(
                    probes,
                    self.model,
                    torch.cat([output["prompt_ids"][rows], completion_ids], dim=1),
                    torch.cat([output["prompt_mask"][rows], completion_mask], dim=1),
                    width,
                    batch_size=self.args.per_device_train_batch_size,
                )
        self._log_acceptance()
        for listener in self.rollout_listeners:
            listener()
        return output

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        # With its correction on, TRL first scores each rollout with the policy. With it off, the first scores may be
        # the reference's, from the same module when that is a PEFT model. Masked completions are not scored at all.
        correction, masked = self.args.vllm_importance_sampling_correction, self.args.mask_truncated_completions
        if not self._probes or not correction or masked:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        probes, self._probes = self._probes, []
        return self._score_and_measure(probes, *args, **kwargs)

    def _score_and_measure(self, probes, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        """Score a batch as TRL does, and measure the acceptance rate of its probed rows from the hidden states."""
        hidden_states = {}
        num_rows = 0

        def keep_probed(module, inputs, output):
            nonlocal num_rows
            states = output.last_hidden_state
            for probe in probes:
                if num_rows <= probe.row < num_rows + len(states):
                    start = states.size(1) - logits_to_keep - 1
                    hidden_states[probe.row] = states[probe.row - num_rows, start : start + len(probe.token_ids)]
            num_rows += len(states)

        policy = self.accelerator.unwrap_model(model)
        policy = policy.get_base_model() if is_peft_model(policy) else policy
        hook = policy.base_model.register_forward_hook(keep_probed)
        try:
            output = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        finally:
            hook.remove()
        lm_head = policy.get_output_embeddings()
        # As TRL's fused head does: FSDP2 and ZeRO-3 shard the head between forward passes.
        weight, bias = (x.full_tensor() if isinstance(x, DTensor) else x for x in (lm_head.weight, lm_head.bias))
        with maybe_gather_lm_head_ctx(weight, bias):
            for probe in probes:
                self._measure_acceptance(probe, weight, bias, hidden_states[probe.row], output[0][probe.row])
        return output

    def _measure_acceptance(self, probe, weight, bias, hidden_states, policy_logprobs):
        """Compare one probed completion's sampler with the dense policy, from the second token on."""
        length = len(probe.token_ids)
        if length < 2:  # the first token comes from the dense prefill
            return
        with torch.no_grad(), self.accelerator.autocast():
            token_ids = torch.cat([probe.sampled_ids[:, None], probe.token_ids], dim=1).to(hidden_states.device)
            dense = gather_dense_logprobs(hidden_states, weight, token_ids, self.temperature, bias=bias)
        sampled, dense = dense[:, 0], dense[:, 1:]
        # TRL scores the sampled tokens from the same hidden states; a head that scales or caps its logits shows here.
        difference = (sampled - policy_logprobs[:length]).abs().mean().item()
        if not difference <= HEAD_TOLERANCE:
            raise RuntimeError(
                "The dense log-probs computed for the acceptance rate differ from those the trainer uses, by "
                f"{difference:.2g} on average. The model transforms its logits in a way that is not supported here. "
                "Set acceptance_probe_fraction=0 to train without measuring acceptance."
            )
        lower, upper = top_k_acceptance_bounds(dense[1:], probe.logprobs[1:].to(dense.device))
        self.acceptance.update(lower, upper, probe.prompt_length + torch.arange(1, length))
        log_ratio = sampled[1:] - probe.sampled_logprobs[1:].to(sampled.device)
        # Schulman's k3 estimator of KL(sparse || dense) on the sampler's tokens.
        self._sparse_kl.append(log_ratio.exp() - 1 - log_ratio)

    def _log_acceptance(self):
        kl = torch.cat(self._sparse_kl).double() if self._sparse_kl else torch.zeros(0, dtype=torch.float64)
        self._sparse_kl = []
        total = torch.tensor([kl.sum(), len(kl)], dtype=torch.float32, device=self.accelerator.device)
        total, count = self.accelerator.gather(total).view(-1, 2).sum(0).tolist()
        metrics = self.acceptance.end_step(self.accelerator)
        if count:
            metrics["kl/sparse_dense"] = total / count
            starts = [int(name.rpartition("_")[2]) for name in metrics if name.startswith("acceptance/tail_bin_")]
            metrics |= {f"sparsity/budget_tokens_bin_{start}": self.schedule.budget(start) for start in starts}
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    # Checkpoints

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.schedule.save_pretrained(output_dir if output_dir is not None else self.args.output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint):
        # Weights come by different ways (DeepSpeed has its own), the optimizer by this one.
        super()._load_optimizer_and_scheduler(checkpoint)
        self.resume_checkpoint = checkpoint
        if checkpoint is not None:
            self._restore_schedule(checkpoint)

    def _restore_schedule(self, resume_from_checkpoint):
        path = os.path.join(resume_from_checkpoint, SCHEDULE_NAME)
        if not os.path.exists(path):
            logger.warning("%s has no %s: rollouts use the schedule given now.", resume_from_checkpoint, SCHEDULE_NAME)
            return
        schedule = SparsityScheduleConfig.from_pretrained(path)
        if schedule != self.schedule:
            logger.warning("Rollouts use the schedule saved in %s, not the one given now.", resume_from_checkpoint)
            self.schedule = schedule

    # Pushing to the Hub

    def push_to_hub(
        self, commit_message="End of training", blocking=True, token=None, revision=None, private=None, **kwargs
    ):
        # Callbacks write the name of the repository into files that are pushed.
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        super().create_model_card(model_name, dataset_name if is_hub_id(dataset_name) else None, tags)
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        columns, rows = acceptance_table(self.acceptance)
        target = PAPER_THRESHOLD if self.schedule.target_acceptance is None else self.schedule.target_acceptance
        card = ModelCard.load(folder / CARD_NAME)
        add_rollouts(
            card,
            self.schedule,
            repo_id=self.hub_model_id,
            acceptance=Table(f"Acceptance rates (target of the tail: {target:g})", columns, rows) if rows else None,
            files=[file.path for file in PUBLISHED_FILES if (folder / file.path).is_file()],
        )
        card.save(folder / CARD_NAME)

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self._checkpoints_to_push = []
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            checkpoints, self._checkpoints_to_push = self._checkpoints_to_push, None
        for checkpoint in checkpoints:
            self._push_from_checkpoint(checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder):
        # transformers pushes before the callbacks' `on_save`, which writes what resuming needs: it waits for them.
        if self._checkpoints_to_push is not None:
            self._checkpoints_to_push.append(checkpoint_folder)
            return
        self._report_failed_pushes()
        super()._push_from_checkpoint(checkpoint_folder)

    def _finalize_training(self, *args, **kwargs):
        # The callbacks write into the output folder at the end, which may still be read.
        self._finish_current_push()
        return super()._finalize_training(*args, **kwargs)

    def _finish_current_push(self):
        super()._finish_current_push()
        self._report_failed_pushes()

    def _report_failed_pushes(self):
        """transformers drops what goes wrong in the background."""
        push = getattr(self, "push_in_progress", None)
        for job in push.jobs if push is not None else ():
            if job in self._reported_pushes or not job.done() or job.cancelled() or job.exception() is None:
                continue
            self._reported_pushes.append(job)
            logger.warning(
                "A push to %s failed: %s. The repository has the files of the push before; the next one, or "
                "`trainer.push_to_hub()`, brings these.",
                self.hub_model_id,
                job.exception(),
            )
