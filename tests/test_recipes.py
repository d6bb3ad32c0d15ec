"""The recipes among the examples: that they parse and fit together, and that each trains in small."""

import gc
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from fresh_process import fresh_environment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainingArguments
from trl.rewards import accuracy_reward, reasoning_accuracy_reward

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.bench_plan import shape_config
from sparrow_trl.rewards import sandboxed_code_reward
from sparrow_trl.rollout import check_layers


ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import grpo_sparse  # noqa: E402


RECIPES = {path.stem: path for path in sorted((EXAMPLES / "recipes").glob("*.yaml"))}
LAUNCHES = {path.stem: path for path in sorted((EXAMPLES / "accelerate").glob("*.yaml"))}

# Of the dry runs.
SCALE = 100
LENGTHS = ("max_completion_length", "vllm_max_model_length", "max_prompt_length")
PAGE = 16


def shape_of(model: str):
    return shape_config(model.removeprefix("Qwen/").lower())


def parse(recipe: Path, *arguments: str):
    """Script, training and model arguments, as the script would get them, on a machine without a GPU."""
    return grpo_sparse.make_parser().parse_args_and_config(["--config", str(recipe), *arguments, "--use_cpu", "true"])


def commands_in(path: Path) -> list[list[str]]:
    """Arguments of each `accelerate launch` in a text, whose lines may be comments."""
    text = re.sub(r"^#", "", path.read_text(), flags=re.MULTILINE)
    commands = re.findall(r"^ *accelerate launch ((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    named = {"$RANK": "1", "$FIRST_NODE": "10.0.0.1"}
    return [[named.get(word, word) for word in shlex.split(command.replace("\\\n", " "))] for command in commands]


def launch_arguments(command: list[str]):
    """What `accelerate launch` makes of a command, and the environment of its processes."""
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        return arguments, prepare_deepspeed_cmd_env(arguments)[1]
    return arguments, prepare_multi_gpu_env(arguments)


@pytest.fixture
def on_processes(monkeypatch):
    """Makes training arguments count on a number of processes."""
    return lambda number: monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: number))


# What is in them


def test_there_is_a_recipe_for_each_training_of_the_paper():
    assert set(RECIPES) == {
        "qwen3-1.7b_polaris", "qwen3-4b_polaris", "qwen3-8b_polaris", "qwen3-14b_polaris", "qwen3-1.7b_taco",
    }  # fmt: skip
    assert len(LAUNCHES) == 5


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_arrives(name):
    groups = parse(RECIPES[name])
    for key, value in yaml.safe_load(RECIPES[name].read_text()).items():
        (found,) = (getattr(group, key) for group in groups if hasattr(group, key))
        assert found == value, key


def faults(recipe: Path) -> list[str]:
    """What does not fit together in a recipe."""
    script, training, model = parse(recipe)
    shape = shape_of(model.model_name_or_path)
    schedule = SparsityScheduleConfig.resolve(training.sparsity_schedule)
    found = []
    if schedule.base_model_name_or_path != model.model_name_or_path or schedule.target_acceptance != 0.86:
        found.append("another schedule than the model's for 0.86")
    check_layers(schedule, shape.num_hidden_layers)
    if len(schedule.top_k_pages) * schedule.bin_tokens < training.max_completion_length:
        found.append("the schedule was measured at shorter lengths")
    if training.vllm_max_model_length > shape.max_position_embeddings:
        found.append("more tokens than positions")
    if script.max_prompt_length + training.max_completion_length > training.vllm_max_model_length:
        found.append("no room for the completion")
    on_code = script.dataset_name == "BAAI/TACO"
    if (script.reward, training.max_completion_length) != (("code", 24_000) if on_code else ("reasoning", 37_000)):
        found.append("another reward or length than the dataset's")
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_model_schedule_and_lengths_fit_together(name):
    assert faults(RECIPES[name]) == []


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("sparsity_schedule", "qwen3-4b-0.86", "another schedule"),
        ("sparsity_schedule", "qwen3-1.7b-0.80", "another schedule"),
        ("vllm_max_model_length", 41_000, "positions"),
        ("max_completion_length", 38_000, "no room"),
        ("max_completion_length", 50_000, "shorter lengths"),
        ("reward", "math", "another reward"),
        ("max_completion_lenght", 37_000, "Unknown arguments"),
        ("sparsity_schedule", "qwen3-2b-0.86", "qwen3-2b-0.86"),
        ("top_p", 0.95, "top_p"),
        ("reward", "maths", "'maths'"),
        ("max_prompt_length", 0, "max_prompt_length=0"),
        ("generation_batch_size", 500, "must be divisible"),
    ],
)
def test_a_wrong_recipe_is_noticed(tmp_path, key, value, fault):
    values = yaml.safe_load(RECIPES["qwen3-1.7b_polaris"].read_text())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**values, key: value}))
    try:
        found = "; ".join(faults(recipe))
    except Exception as error:
        found = str(error)
    assert fault in found


@pytest.mark.parametrize("processes", [1, 8, 32])
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_the_same_on_any_number_of_gpus(name, processes, on_processes):
    on_processes(processes)
    script, training, _ = parse(RECIPES[name])
    grpo_sparse.accumulate(script, training)
    completions = training.per_device_train_batch_size * processes * training.gradient_accumulation_steps
    assert completions == training.generation_batch_size == 512  # one update from each batch
    assert training.gradient_accumulation_steps == training.steps_per_generation
    assert completions // training.num_generations == 64


def test_accumulation_follows_from_the_updates(on_processes):
    on_processes(8)
    recipe = RECIPES["qwen3-1.7b_polaris"]
    script, training, _ = parse(recipe, "--updates_per_generation", "4")
    grpo_sparse.accumulate(script, training)
    assert (training.steps_per_generation, training.gradient_accumulation_steps) == (64, 16)
    script, training, _ = parse(recipe, "--updates_per_generation", "3")
    with pytest.raises(ValueError, match="updates_per_generation=3 does not divide the 64"):
        grpo_sparse.accumulate(script, training)
    training.deepspeed = "zero3.json"  # read by the arguments themselves, before
    with pytest.raises(ValueError, match="of --deepspeed zero3.json has been given already"):
        grpo_sparse.accumulate(script, training)


# How they are launched


@pytest.mark.parametrize("name", LAUNCHES)
def test_launch_configurations(name):
    config = load_config_from_file(str(LAUNCHES[name]))
    assert config.mixed_precision == "bf16"
    assert (config.num_machines, config.num_processes) == {
        "single": (1, 1), "1node": (1, 8), "4nodes": (4, 32),
    }[name.removesuffix("_gpu").rpartition("_")[2]]  # fmt: skip
    # The loader looks at the names of the outer keys alone.
    known = vars(launch_command_parser().parse_args(["script.py"]))
    assert set(config.fsdp_config) | set(config.deepspeed_config) <= set(known)


def test_a_wrong_launch_configuration_is_noticed(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(LAUNCHES["fsdp2_1node"].read_text() + "num_procesess: 8\n")
    with pytest.raises(ValueError, match="num_procesess"):
        load_config_from_file(str(path))


@pytest.mark.parametrize("name", [*RECIPES, "recipes.md"])
def test_commands(name, monkeypatch, on_processes):
    """Those in the recipes' heads and in the documentation, as far as they go without GPUs."""
    monkeypatch.chdir(ROOT)
    commands = commands_in(RECIPES.get(name, ROOT / "docs" / name))
    processes = []
    for command in commands:
        arguments, environment = launch_arguments(command)
        assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
        if arguments.num_machines > 1:
            assert arguments.rdzv_backend == "static" and arguments.rdzv_endpoint == "10.0.0.1:29500"
            assert (arguments.node_rank, arguments.nnodes, arguments.nproc_per_node) == (1, "4", "8")
        if arguments.use_fsdp:
            assert environment["FSDP_VERSION"] == "2"
            assert environment["FSDP_RESHARD_AFTER_FORWARD"].lower() == "true"
        elif arguments.use_deepspeed:
            assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
            assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environment  # which makes it the trainer's
        assert arguments.training_script == "examples/grpo_sparse.py"
        on_processes(arguments.num_processes)
        option, recipe, *rest = arguments.training_script_args
        assert option == "--config"
        if name in RECIPES:
            assert recipe == f"examples/recipes/{name}.yaml"
        script, training, model = parse(ROOT / recipe, *rest)
        grpo_sparse.accumulate(script, training)
        processes.append(arguments.num_processes)
        assert fits(model, training, arguments.num_processes, gigabytes=141)
    assert set(processes) == {1, 8, 32}


def fits(model, training, processes: int, gigabytes: float) -> bool:
    """Whether a GPU has room for the engine beside what training keeps, with a tenth to spare."""
    shape = shape_of(model.model_name_or_path)
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    layer = shape.hidden_size * (shape.head_dim * (heads + shape.num_attention_heads) + 3 * shape.intermediate_size)
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    parameters = shape.num_hidden_layers * layer + embeddings
    # Weights, gradients and two moments in float32, shared by the processes; under a LoRA bfloat16 weights alone.
    training_bytes = 2 * parameters if model.use_peft else 16 * parameters / processes
    engine_bytes = training.vllm_gpu_memory_utilization * gigabytes * 1e9
    sequence = (
        training.vllm_max_model_length * 4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    )
    room_for_two = 2 * parameters + 2 * sequence + 4e9 <= engine_bytes
    return room_for_two and training_bytes + engine_bytes <= 0.9 * gigabytes * 1e9


@pytest.mark.parametrize(
    ("name", "processes", "gigabytes", "arguments", "fit"),
    [
        ("qwen3-1.7b_polaris", 1, 80, ["--vllm_gpu_memory_utilization", "0.5"], True),
        ("qwen3-1.7b_polaris", 1, 80, [], False),
        ("qwen3-1.7b_taco", 1, 80, ["--vllm_gpu_memory_utilization", "0.5"], True),
        ("qwen3-4b_polaris", 1, 141, [], False),
        ("qwen3-4b_polaris", 8, 80, [], True),
        ("qwen3-8b_polaris", 1, 141, [], False),
        ("qwen3-8b_polaris", 8, 80, [], True),
        ("qwen3-14b_polaris", 8, 80, [], False),
        ("qwen3-14b_polaris", 8, 141, [], True),
    ],
)
def test_estimated_memory(name, processes, gigabytes, arguments, fit):
    _, training, model = parse(RECIPES[name], *arguments)
    assert fits(model, training, processes, gigabytes) == fit


# What they train on

POLARIS = [
    {"problem": f"Let $n = {a}$. What is $n + {b}$?", "answer": str(a + b), "difficulty": f"{a}/8"}
    for a in range(8)
    for b in range(2)
]
TACO = [
    {
        "question": f"Print the sum of the numbers of a line and {a}.",
        "solutions": "[]",
        "starter_code": "",
        "input_output": json.dumps({"inputs": ["1 2\n", "3\n"], "outputs": [f"{3 + a}\n", f"{3 + a}\n"]}),
        "difficulty": "EASY",
    }
    for a in range(16)
]
STARTER = "class Solution:\n    def add(self, a):\n"
DATA = {"POLARIS-Project/Polaris-Dataset-53K": POLARIS, "BAAI/TACO": TACO}


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def script_arguments(path: str, **kwargs):
    return grpo_sparse.GRPOScriptArguments(dataset_name=path, **kwargs)


def test_math_problems(tmp_path):
    path = write_rows(tmp_path / "polaris.jsonl", POLARIS + [{**POLARIS[0], "answer": "(1,2)"}])
    dataset, reward = grpo_sparse.load_problems(script_arguments(path, reward="reasoning"), "no model")
    assert dataset.column_names == ["prompt", "solution"] and len(dataset) == 17
    (message,) = dataset[3]["prompt"]
    assert message["content"].startswith(POLARIS[3]["problem"]) and "\\boxed{}" in message["content"]
    right, wrong = dataset[3]["solution"], "\\boxed{99}"
    texts = [f"<think>{wrong}</think>{right}", f"<think>{right}</think>{wrong}", f"<think>{right}"]
    assert reward is reasoning_accuracy_reward
    assert reward([[{"content": text}] for text in texts], [right] * 3) == [1, 0, 0]
    assert dataset[16]["solution"] == "\\boxed{(1,2)}"
    dataset, reward = grpo_sparse.load_problems(script_arguments(path), "no model")
    assert reward is accuracy_reward


def test_gsm8k_and_prepared_datasets_as_before(tmp_path):
    row = {"question": "How many?", "answer": "All.\n#### 1,200"}
    dataset, _ = grpo_sparse.load_problems(script_arguments(write_rows(tmp_path / "gsm8k.jsonl", [row])), "no model")
    assert dataset[0]["solution"] == "\\boxed{1200}"
    row = {"prompt": "How many?", "solution": "$1$", "level": "hard"}
    dataset, _ = grpo_sparse.load_problems(script_arguments(write_rows(tmp_path / "ready.jsonl", [row])), "no model")
    assert dataset[0] == row


def test_code_problems(tmp_path):
    rows = TACO[:1] + [
        {**TACO[1], "input_output": json.dumps({"inputs": [], "outputs": []})},
        {**TACO[2], "starter_code": STARTER, "input_output": json.dumps({"fn_name": "add", "inputs": [[1]],
                                                                          "outputs": [3]})},
        {**TACO[3], "input_output": json.dumps({"fn_name": "add", "inputs": [[1]], "outputs": [4]})},
        {**TACO[4], "input_output": '{"inputs": ["1"], "outputs": [' + "9" * 5000 + "]}"},
        {**TACO[5], "input_output": "{}"},
    ]  # fmt: skip
    path = write_rows(tmp_path / "taco.jsonl", rows)
    dataset, reward = grpo_sparse.load_problems(script_arguments(path, reward="code"), "no model")
    assert reward is sandboxed_code_reward
    assert set(dataset.column_names) == {"prompt", "tests"}
    assert list(dataset["tests"]) == [rows[index]["input_output"] for index in (0, 2, 3)]
    contents = [prompt[0]["content"] for prompt in dataset["prompt"]]
    assert all("```python" in content for content in contents)
    assert ["standard input" in content for content in contents] == [True, False, False]
    assert STARTER.strip("\n") in contents[1] and "function `add`" in contents[2]
    program = "print(sum(map(int, input().split())) + 0)"
    completions = [[{"role": "assistant", "content": f"So:\n```python\n{text}\n```"}] for text in (program, "1")]
    rewards = reward(prompts=[None] * 2, completions=completions, tests=[dataset[0]["tests"]] * 2)
    assert rewards == [1, 0]


def test_long_prompts_are_left_out(tmp_path, small_models):
    long = {**POLARIS[0], "problem": "Why? " * 400}
    path = write_rows(tmp_path / "polaris.jsonl", [long, *POLARIS])
    model = small_models("Qwen/Qwen3-1.7B")
    dataset, _ = grpo_sparse.load_problems(script_arguments(path, max_prompt_length=30), model)
    assert len(dataset) == len(POLARIS)
    with pytest.raises(ValueError, match="max_prompt_length=1"):
        grpo_sparse.load_problems(script_arguments(path, max_prompt_length=1), model)


# The same in small


@pytest.fixture(scope="module")
def small_models(tmp_path_factory):
    """Maps a model's name to the folder of one with two layers, its ratio of heads and a small vocabulary."""
    root = tmp_path_factory.mktemp("small_models")
    texts = [row["problem"] + "\n" + grpo_sparse.INSTRUCTION for row in POLARIS]
    texts += [row["question"] + "\n\nWrite a Python program that reads standard input and writes standard output. "
              "Put it in one ```python block." for row in TACO]  # fmt: skip

    def build_tokenizer() -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=512, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
            ),
        )
        template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=template
        )

    def path(name: str) -> str:
        folder = root / name.rpartition("/")[2]
        if not folder.exists():
            shape, tokenizer = shape_of(name), build_tokenizer()
            config = Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2 * shape.num_attention_heads // shape.num_key_value_heads,
                num_key_value_heads=2,
                head_dim=32,
                tie_word_embeddings=shape.tie_word_embeddings,
                max_position_embeddings=math.ceil(shape.max_position_embeddings / SCALE),
                initializer_range=0.2,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(0)
                model = Qwen3ForCausalLM(config)
                for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
                    embeddings.weight[tokenizer.eos_token_id] = 0  # completions as long as they may be
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return str(folder)

    return path


def small_schedule(name: str, folder: Path) -> str:
    """A schedule for lengths divided by 100, in whole pages, that leaves the second of two layers sparse."""
    schedule = SparsityScheduleConfig.resolve(name).to_dict()
    schedule |= {
        "top_k_pages": [max(1, round(pages / SCALE)) for pages in schedule["top_k_pages"]],
        "bin_tokens": PAGE * round(schedule["bin_tokens"] / SCALE / PAGE),
        "dense_layers": [0],
    }
    SparsityScheduleConfig.from_dict(schedule).save_pretrained(folder)
    return str(folder)


def small_arguments(recipe: Path, model: str, folder: Path) -> list[str]:
    """Arguments that make a recipe small."""
    values = yaml.safe_load(recipe.read_text())
    changes = {name: values[name] // SCALE for name in LENGTHS}
    changes |= {
        "model_name_or_path": model,
        "dataset_name": write_rows(folder / "rows.jsonl", DATA[values["dataset_name"]]),
        "sparsity_schedule": small_schedule(values["sparsity_schedule"], folder / "schedule"),
        "output_dir": str(folder / "output"),
        "generation_batch_size": 8,
        "max_steps": 2,
        "acceptance_min_tokens": 10,
        "weight_sync_check_interval": 1,
        # Without a GPU.
        "use_cpu": "true",
        "bf16": "false",
        "vllm_enable_sleep_mode": "false",
        "vllm_engine_kwargs": json.dumps({"enforce_eager": True, "kv_cache_memory_bytes": 2**26}),
        "disable_tqdm": "true",
        "report_to": "none",
    }
    return ["--config", str(recipe), *(word for name, value in changes.items() for word in (f"--{name}", str(value)))]


@pytest.fixture
def one_thread(monkeypatch):
    """Small models are slower on several threads, far slower when others have the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(threads)


def check_dry_run(recipe: Path, output: Path, history: list[dict]) -> None:
    values = yaml.safe_load(recipe.read_text())
    logs = [entry for entry in history if "reward" in entry]
    assert len(logs) == 2
    reward = "sandboxed_code_reward" if values["reward"] == "code" else "reasoning_accuracy_reward"
    for log in logs:
        assert f"rewards/{reward}/mean" in log
        assert 48 < log["completions/max_length"] <= values["max_completion_length"] // SCALE
        assert 0 < log["sparsity/kept_fraction"] < 0.9
        assert 0 < log["acceptance/tail"] < 1
        assert log["learning_rate"] == values["learning_rate"]  # constant
    assert SparsityScheduleConfig.from_pretrained(output).dense_layers == [0]
    assert (output / "model.safetensors").exists()


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "qwen3-4b_polaris"])
def test_dry_run(name, small_models, tmp_path, monkeypatch, one_thread):
    """Two steps through the script with an engine on the CPU."""

    def replace_reward(function):
        # A random model never gets anything right, so it is rewarded for something that its completions differ in.
        original = getattr(grpo_sparse, function)

        def reward(completions, **kwargs):
            texts = [completion[0]["content"] for completion in completions]
            true = original(completions=completions, **kwargs)
            assert len(true) == len(completions) == 8 and set(true) <= {0.0, None}
            return [sum(character.islower() for character in text) / 100 for text in texts]

        reward.__name__ = function
        monkeypatch.setattr(grpo_sparse, function, reward)

    replace_reward("reasoning_accuracy_reward")
    replace_reward("sandboxed_code_reward")
    values = yaml.safe_load(RECIPES[name].read_text())
    arguments = small_arguments(RECIPES[name], small_models(values["model_name_or_path"]), tmp_path)
    trainer = grpo_sparse.main(*grpo_sparse.make_parser().parse_args_and_config(arguments))
    assert trainer.args.gradient_accumulation_steps == 8 and trainer.state.global_step == 2
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "reward" in entry)
    check_dry_run(RECIPES[name], tmp_path / "output", trainer.state.log_history)
    del trainer
    gc.collect()


def test_dry_run_by_accelerate(small_models, tmp_path, one_thread):
    """The remaining one as its command starts it."""
    recipe = RECIPES["qwen3-4b_polaris"]
    arguments = small_arguments(recipe, small_models("Qwen/Qwen3-4B"), tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCHES["single_gpu"]), "--cpu",
         "--mixed_precision", "no", "examples/grpo_sparse.py", *arguments, "--save_strategy", "steps",
         "--save_steps", "2"],
        env=fresh_environment(), cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    state = json.loads((tmp_path / "output" / "checkpoint-2" / "trainer_state.json").read_text())
    check_dry_run(recipe, tmp_path / "output", state["log_history"])
