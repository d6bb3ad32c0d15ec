"""A step of the rollout adapter against the same losses from whole logits in float64."""

import math

import pytest
import torch
from test_rollout_adapter import make_adapter
from tiny_models import PAD_TOKEN_ID, random_token_ids, tiny_model
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from sparrow_trl import DistillSparseConfig, RolloutAdapter, SparsityScheduleConfig
from sparrow_trl.attention import sparse_attention_context
from sparrow_trl.distill_step import DIVERGENCES, AdapterTrainer, Trajectories


SCHEDULE = SparsityScheduleConfig(top_k_pages=[1], bin_tokens=64, dense_layers=[])
PROMPT_LENGTHS, COMPLETION_LENGTHS = [40, 61, 50], [70, 90, 1]
TEMPERATURE = 0.8
DIVERGENCE_NAMES = [*DIVERGENCES, "k3"]


def divergence_reference(name, student, teacher, targets):
    """Per token, from log-probs `[tokens, vocab]`."""
    if name == "k3":
        log_ratio = (teacher - student).gather(1, targets[:, None]).squeeze(1)
        return log_ratio.exp() - 1 - log_ratio
    if name == "forward_kl":
        return (teacher.exp() * (teacher - student)).sum(-1)
    if name == "reverse_kl":
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(student, teacher) - math.log(2)
    return sum((side.exp() * (side - mixture)).sum(-1) for side in (student, teacher)) / 2


@pytest.fixture
def model():
    return tiny_model("qwen3").train()


@pytest.fixture
def trajectories():
    rows = random_token_ids(*(a + b for a, b in zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)))
    width, longest = max(PROMPT_LENGTHS), max(COMPLETION_LENGTHS)
    input_ids = torch.full((len(rows), width + longest), PAD_TOKEN_ID)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(rows):
        span = slice(width - PROMPT_LENGTHS[row], width + COMPLETION_LENGTHS[row])
        input_ids[row, span], attention_mask[row, span] = torch.tensor(ids), 1
    generator = torch.Generator().manual_seed(1)
    sampler_logprobs = -5 * torch.rand((len(rows), longest), generator=generator)
    sampler_logprobs[0, 0] = torch.nan
    return Trajectories(
        input_ids,
        attention_mask,
        attention_mask[:, width:],
        advantages=torch.tensor([1.0, -0.5, 2.0]),
        sampler_logprobs=sampler_logprobs,
    )


def make_adapter_trainer(model, adapter, rows_per_pass=2, **kwargs):
    config = DistillSparseConfig(**{"warmup_steps": 0, "max_grad_norm": 1e9, "ppo_weight": 0.0, **kwargs})
    return AdapterTrainer(
        model, adapter, config, num_steps=20, rows_per_pass=rows_per_pass, temperature=TEMPERATURE, clip=(0.2, 0.28)
    )


def recorded_gradients(trainer, batches):
    """Metrics and the adapter's gradients of a step that does not change it."""
    gradients = []
    trainer.optimizer.step = lambda: gradients.extend(p.grad.clone() for p in trainer.adapter.parameters)
    return trainer.step(batches, SCHEDULE), gradients


def reference(model, adapter, batch, divergence, kl_weight=1.0, ppo_weight=0.0):
    """Sums of both losses and the adapter's gradients: row by row, without padding, in float64."""
    model.eval()
    tokens = sum(COMPLETION_LENGTHS)
    sums = torch.zeros(2, dtype=torch.float64)
    gradients = [torch.zeros_like(p) for p in adapter.parameters]
    for row, (prompt, completion) in enumerate(zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)):
        ids = batch.input_ids[row][batch.attention_mask[row].bool()][None]
        span = slice(prompt - 1, prompt + completion - 1)
        with torch.no_grad():
            teacher = (model(input_ids=ids).logits[0, span].double() / TEMPERATURE).log_softmax(-1)
        with (
            adapter.active(),
            sparse_attention_context(model, SCHEDULE, prompt_lengths=torch.tensor([prompt])),
        ):
            student = (model(input_ids=ids).logits[0, span].double() / TEMPERATURE).log_softmax(-1)
            targets = ids[0, prompt:]
            kl = divergence_reference(divergence, student, teacher, targets).sum()
            logprobs = student.gather(1, targets[:, None]).squeeze(1)
            old = batch.sampler_logprobs[row, :completion].double()
            ratio = (logprobs - torch.where(old.isnan(), logprobs.detach(), old)).exp()
            advantage = batch.advantages[row].double()
            policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
            loss = (kl_weight * kl + ppo_weight * policy_loss) / tokens
            for total, gradient in zip(gradients, torch.autograd.grad(loss, adapter.parameters), strict=True):
                total += gradient
        sums += torch.stack([kl, policy_loss]).detach()
    return sums / tokens, gradients


def assert_same_gradients(gradients, expected):
    for gradient, other in zip(gradients, expected, strict=True):
        assert (gradient - other).norm() <= 1e-4 * other.norm() + 1e-9


@pytest.mark.parametrize("divergence", DIVERGENCE_NAMES)
def test_a_step_has_the_losses_and_gradients_of_whole_logits(model, trajectories, divergence):
    adapter = make_adapter(model)
    trainer = make_adapter_trainer(model, adapter, divergence=divergence, kl_weight=0.7, ppo_weight=1.3)
    metrics, gradients = recorded_gradients(trainer, [trajectories])
    (kl, policy_loss), expected = reference(model, adapter, trajectories, divergence, 0.7, 1.3)
    assert metrics["kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert metrics["policy_loss"] == pytest.approx(policy_loss.item(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.7 * kl.item() + 1.3 * policy_loss.item(), rel=1e-4)
    assert metrics["tokens"] == sum(COMPLETION_LENGTHS)
    assert metrics["kl"] > 1e-2
    assert_same_gradients(gradients, expected)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_trl_kernel_gives_divergences_and_gradients_of_float64(divergence):
    # trl 1.16: the share of the teacher in the mixture comes seventh, the temperature eighth.
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn((50, 16), generator=generator) for _ in range(2))
    heads = [torch.randn((200, 16), generator=generator) for _ in range(2)]
    student.requires_grad_(True)
    values, _ = ChunkedDivergenceFunction.apply(
        student, heads[0], None, teacher, heads[1], None, DIVERGENCES[divergence], 0.7
    )
    (gradient,) = torch.autograd.grad(values.sum(), student)
    exact = student.detach().double().requires_grad_(True)
    logprobs = [
        (states @ head.double().T / 0.7).log_softmax(-1)
        for states, head in zip((exact, teacher.double()), heads, strict=True)
    ]
    expected = divergence_reference(divergence, *logprobs, None)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), exact)
    assert (values - expected).abs().max() < 1e-4 * expected.max()
    assert (gradient - expected_gradient).norm() < 1e-4 * expected_gradient.norm()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_but_the_adapter_has_gradients(model, trajectories, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    adapter = make_adapter(model)
    before = [parameter.clone() for parameter in adapter.parameters]
    make_adapter_trainer(model, adapter, ppo_weight=1.0).step([trajectories], SCHEDULE)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all((parameter != old).any() for parameter, old in zip(adapter.parameters, before, strict=True))


def test_gradient_checkpointing_changes_no_gradient(model, trajectories, monkeypatch):
    adapter = make_adapter(model)
    _, expected = recorded_gradients(make_adapter_trainer(model, adapter), [trajectories])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    layer = model.model.layers[1]
    monkeypatch.setattr(layer.mlp, "forward", lambda x, forward=layer.mlp.forward: (calls.append(1), forward(x))[1])
    trainer = make_adapter_trainer(model, adapter, rows_per_pass=3)
    calls.clear()
    _, gradients = recorded_gradients(trainer, [trajectories])
    assert len(calls) == 3  # the teacher once, the student twice
    assert_same_gradients(gradients, expected)


def test_how_rows_are_split_changes_nothing(model, trajectories):
    adapter = make_adapter(model)
    metrics, expected = recorded_gradients(make_adapter_trainer(model, adapter, rows_per_pass=3), [trajectories])
    batches = list(trajectories.split(2))
    assert [len(batch.input_ids) for batch in batches] == [2, 1]
    other, gradients = recorded_gradients(make_adapter_trainer(model, adapter, rows_per_pass=1), batches)
    assert other == pytest.approx(metrics, rel=1e-4)
    assert_same_gradients(gradients, expected)


def test_old_log_probs_can_be_the_teacher(model, trajectories):
    adapter = make_adapter(model)
    trajectories.teacher_logprobs = torch.full(trajectories.completion_mask.shape, -2.0)
    trainer = make_adapter_trainer(model, adapter, divergence="k3", teacher="old")
    metrics, _ = recorded_gradients(trainer, [trajectories])
    with adapter.active(), sparse_attention_context(model.eval(), SCHEDULE, prompt_width=61), torch.no_grad():
        logits = model(input_ids=trajectories.input_ids, attention_mask=trajectories.attention_mask).logits
    logprobs = (logits[:, 60:-1].double() / TEMPERATURE).log_softmax(-1)
    log_ratio = -2.0 - logprobs.gather(2, trajectories.input_ids[:, 61:, None]).squeeze(2)
    expected = (log_ratio.exp() - 1 - log_ratio)[trajectories.completion_mask.bool()].mean()
    assert metrics["kl"] == pytest.approx(expected.item(), rel=1e-4)


def test_rows_without_tokens_are_left_out(model, trajectories):
    adapter = make_adapter(model)
    trajectories.completion_mask = torch.zeros_like(trajectories.completion_mask)
    before = [parameter.clone() for parameter in adapter.parameters]
    trainer = make_adapter_trainer(model, adapter)
    assert trainer.step([trajectories], SCHEDULE) == {"tokens": 0.0}
    assert trainer.step([], SCHEDULE) == {"tokens": 0.0}
    assert all(map(torch.equal, adapter.parameters, before))


def test_a_gradient_that_is_not_finite_leaves_the_adapter(model, trajectories, caplog):
    adapter = make_adapter(model)
    trajectories.advantages[0] = torch.inf
    before = [parameter.clone() for parameter in adapter.parameters]
    make_adapter_trainer(model, adapter, ppo_weight=1.0).step([trajectories], SCHEDULE)
    assert all(map(torch.equal, adapter.parameters, before)) and "not finite" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_bring_the_student_to_the_teacher(model, trajectories, dtype):
    # In bfloat16 the first steps are rounded away in the weights that the student has.
    model.to(dtype)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapter = RolloutAdapter(model)
    trainer = make_adapter_trainer(model, adapter, learning_rate=3e-3)
    divergences = [trainer.step([trajectories], SCHEDULE)["kl"] for _ in range(15)]
    assert divergences[-1] < 0.6 * divergences[0]


def test_a_norm_of_0_does_not_clip(model, trajectories):
    adapter = make_adapter(model)
    before = [parameter.clone() for parameter in adapter.parameters]
    make_adapter_trainer(model, adapter, max_grad_norm=0).step([trajectories], SCHEDULE)
    assert all((parameter != old).any() for parameter, old in zip(adapter.parameters, before, strict=True))


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(model, trajectories):
    def run(steps, adapter, trainer):
        for _ in range(steps):
            trainer.step([trajectories], SCHEDULE)
        return adapter.state_dict()

    def make():
        adapter = make_adapter(model)
        return adapter, make_adapter_trainer(model, adapter, lr_scheduler_type="linear", warmup_steps=2)

    expected = run(4, *make())
    adapter, trainer = make()
    half = {name: value.clone() for name, value in run(2, adapter, trainer).items()}
    state = trainer.state_dict()
    adapter, trainer = make()
    adapter.load_state_dict(half)
    trainer.load_state_dict(state)
    resumed = run(2, adapter, trainer)
    assert all(torch.equal(value, expected[name]) for name, value in resumed.items())


def test_a_head_that_scales_its_logits_is_refused(model, monkeypatch):
    forward = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda states: 2 * forward(states))
    with pytest.raises(ValueError, match="transforms the logits"):
        make_adapter_trainer(model, make_adapter(model))
