"""
Times block-sparse attention over whole sequences, forward and backward, against dense causal attention, after
verifying outputs and gradients:

    python kernels/benchmarks/bench_sequence_attention.py --json sequence_attention.json

Dense attention is `scaled_dot_product_attention` with FlashAttention, which torch chooses by itself, and with cuDNN's.
Independent queries are the worst case: neighbors keep different pages, so that no block of keys can be skipped. With
`--queries drifting` they change slowly, and neighbors keep much the same pages. With `--checkpoint FOLDER --text FILE`
queries, keys and values are those of a model, in four of its layers. Without a GPU the kernels run in Triton's
interpreter (set TRITON_INTERPRET=1, and choose a small shape): then they are verified only.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

from sparrow_attention import sparse_attention  # noqa: E402
from sparrow_attention.sequence_attention import attend_to_kept_bits, sparse_sequence_attention  # noqa: E402
from sparrow_attention.sequence_selection import keep_pages_of_sequences, real_tokens  # noqa: E402


ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Triton's interpreter takes bfloat16 matrices for integers.
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
# Query heads, kv heads, head dim.
SHAPES = {"Qwen3-1.7B": (16, 8, 128), "Qwen3-4B": (32, 8, 128), "Qwen2.5-0.5B": (14, 2, 64)}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# Relative error of outputs and gradients in any block of so many tokens: weights are rounded to 16 bits. On a model's
# queries and keys twice what dense attention of that type is off by is allowed as well: where most of every key is the
# same, rounding the gradients of logits costs digits of the queries' gradients.
TOLERANCE, VERIFIED_TOKENS = 2e-2, 512


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=[*SHAPES], help="whose shape to use, by default all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--top-k", type=int, default=128, help="candidate pages that a token keeps")
    parser.add_argument("--prompt-tokens", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--page-score", default="mean_query", choices=["mean_query", "group_softmax"])
    parser.add_argument("--landmarks-per-page", type=int, default=1)
    parser.add_argument("--queries", default="independent", choices=["independent", "drifting"])
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="model whose queries and keys to use")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what the model reads: as many tokens as are timed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    args = parser.parse_args()
    if (args.checkpoint is None) != (args.text is None):
        parser.error("--checkpoint and --text go together.")
    if args.checkpoint and (args.model or args.batch != 1 or args.queries != "independent"):
        parser.error("A checkpoint has its own shape and queries, and reads one sequence.")
    results = []
    if args.checkpoint:
        # The model is causal: what it makes of fewer tokens is the start of this.
        longest = attention_inputs(args.checkpoint, args.text.read_text(), max(args.tokens))
    for model in [args.checkpoint.resolve().name] if args.checkpoint else args.model or SHAPES:
        for tokens in args.tokens:
            if args.checkpoint:
                layers = [[x[:, :, :tokens] for x in inputs] for inputs in longest]
            else:
                layers = [random_inputs(args, *SHAPES[model], tokens)]
            times = []
            for inputs in layers:
                case = Case(args, inputs)
                case.verify()
                if ON_GPU:
                    times.append(case.times())
            print(f"{model}, {args.batch} x {tokens} tokens, {args.top_k} candidates of a token kept: verified")
            if times:
                mean = {name: statistics.mean(layer[name] for layer in times) for name in times[0]}
                results.append({"model": model, "tokens": tokens, **mean, "layers": times})
    if results:
        print_table(results)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "model", "tokens")}
        device = torch.cuda.get_device_name() if ON_GPU else "interpreter"
        record = {"device": device, "torch": torch.__version__, "settings": settings, "results": results}
        args.json.write_text(json.dumps(record, indent=2, default=str) + "\n")


def random_inputs(args, q_heads, kv_heads, head_dim, tokens):
    """Queries, keys and values of random sequences."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    query, key, value = (
        torch.randn(args.batch, tokens, heads, head_dim, device=DEVICE, generator=generator)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    if args.queries == "drifting":
        # Changes by its own size over some 100 tokens.
        query = query.cumsum(1) / 10
        query = query / query.pow(2).mean(-1, keepdim=True).sqrt()
    # Heads of a token side by side, as a model's projections leave them.
    return [x.to(DTYPE).transpose(1, 2) for x in (query, key, value)]


def attention_inputs(folder, text, tokens):
    """Queries, keys and values of four layers of a model, evenly spaced, on a text."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    token_ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"][:, :tokens]
    if token_ids.shape[1] < tokens:
        sys.exit(f"The text has {token_ids.shape[1]} tokens, fewer than the {tokens} to time.")
    found = []

    def keep_inputs(module, query, key, value, *args, **kwargs):
        if module.layer_idx in layers:
            found.append([x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)])
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("keep_inputs", keep_inputs)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, attn_implementation="keep_inputs").to(DEVICE)
    layers = {layer * model.config.num_hidden_layers // 4 for layer in range(4)}
    with torch.no_grad():
        model.model(token_ids.to(DEVICE))
    return found


class Case:
    """Sequences, and what attends to them."""

    def __init__(self, args, inputs):
        self.args = args
        self.inputs = [x.detach().requires_grad_() for x in inputs]
        query = self.inputs[0]
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.grad = torch.randn(
            *query.transpose(1, 2).shape, device=DEVICE, generator=generator, dtype=query.dtype
        ).transpose(1, 2)
        self.prompt_lengths = torch.full((args.batch,), args.prompt_tokens, device=DEVICE)
        self.recipe = {
            "prompt_lengths": self.prompt_lengths,
            "top_k_table": torch.tensor([args.top_k], device=DEVICE),
            "page_size": args.page_size,
            "page_score": args.page_score,
            "landmarks_per_page": args.landmarks_per_page,
        }

    def sparse(self):
        return sparse_sequence_attention(*self.inputs, **self.recipe)

    def dense(self):
        return F.scaled_dot_product_attention(*self.inputs, is_causal=True, enable_gqa=True)

    def gradients(self, attend):
        output = attend()
        return output, *torch.autograd.grad(output, self.inputs, self.grad)

    def verify(self):
        """Compare the first row's first kv head, and its group, with the definition in float64."""
        names = ("outputs", "gradients of queries", "gradients of keys", "gradients of values")
        found = self.errors(self.sparse, self.recipe)
        allowed = [TOLERANCE] * len(names)
        if self.args.checkpoint:
            all_pages = {
                **self.recipe,
                "top_k_table": torch.full_like(self.recipe["top_k_table"], self.inputs[0].shape[2]),
            }
            allowed = [max(TOLERANCE, 2 * error) for error in self.errors(self.dense, all_pages)]
        for name, error, limit in zip(names, found, allowed, strict=True):
            if not error < limit:
                sys.exit(f"The {name} are off by {error:.2g} of their norm, {limit:.2g} allowed. No speed is printed.")

    def errors(self, attend, recipe):
        """Largest relative error of outputs and of each gradient in any block of tokens."""
        found = self.gradients(attend)
        query, key, value = self.inputs
        group = query.shape[1] // key.shape[1]
        inputs = [
            x[:1, :heads].detach().double().requires_grad_() for x, heads in ((query, group), (key, 1), (value, 1))
        ]
        recipe = {**recipe, "prompt_lengths": self.prompt_lengths[:1]}
        output = sparse_attention(*inputs, **recipe, landmark_dtype=key.dtype)
        expected = (output, *torch.autograd.grad(output, inputs, self.grad[:1, :group].double()))
        errors = []
        for x, expected_x in zip(found, expected, strict=True):
            blocks = (y.split(VERIFIED_TOKENS, 2) for y in (x[:1, : expected_x.shape[1]].double(), expected_x))
            errors.append(max(((y - z).norm() / z.norm()).item() for y, z in zip(*blocks, strict=True)))
        return errors

    def times(self):
        """Milliseconds of what there is to compare, and MiB that a forward and backward pass takes at its peak."""
        starts, lengths = real_tokens(self.inputs[0].shape[2], None, None, like=self.prompt_lengths)
        query, key, value = self.inputs
        selection = {"sink_pages": 1, "recent_pages": 2, **self.recipe}

        def select():
            return keep_pages_of_sequences(query, key, starts, lengths, **selection)

        mask = select()

        def attend():
            return attend_to_kept_bits(query, key, value, mask, starts, lengths, page_size=self.args.page_size)

        with torch.no_grad():
            times = {"selection_ms": time(select), "attention_ms": time(attend), "forward_ms": time(self.sparse)}
        times["forward_backward_ms"] = time(lambda: self.gradients(self.sparse))
        times["peak_mib"] = peak_mib(lambda: self.gradients(self.sparse))
        for name, backend in BACKENDS.items():
            try:
                with sdpa_kernel(backend):
                    with torch.no_grad():
                        times[f"{name}_forward_ms"] = time(self.dense)
                    times[f"{name}_forward_backward_ms"] = time(lambda: self.gradients(self.dense))
                    times[f"{name}_peak_mib"] = peak_mib(lambda: self.gradients(self.dense))
            except RuntimeError as error:  # not in this build, or not for this shape
                print(f"  no {name} attention: {str(error).splitlines()[0]}")
        return times


def time(function, repeats=9):
    """Median milliseconds of a call."""
    for _ in range(2):
        function()
    milliseconds = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        stop.synchronize()
        milliseconds.append(start.elapsed_time(stop))
    return statistics.median(milliseconds)


def peak_mib(function):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def print_table(results):
    """Milliseconds, and in brackets how many times those of each dense backend the sparse attention takes."""
    console = Console(width=200)
    table = Table("model", "tokens", "pass", *BACKENDS, "sparse", "of it selection", "peak MiB, dense", "sparse")
    for result in results:
        peaks = [result[f"{name}_peak_mib"] for name in BACKENDS if f"{name}_peak_mib" in result]
        for kind, key in (("forward", "forward_ms"), ("and backward", "forward_backward_ms")):
            dense = [result.get(f"{name}_{key}") for name in BACKENDS]
            table.add_row(
                result["model"], str(result["tokens"]), kind,
                *("-" if ms is None else f"{ms:.2f} ({result[key] / ms:.2f}x)" for ms in dense), f"{result[key]:.2f}",
                f"{result['selection_ms']:.2f}", f"{min(peaks, default=math.nan):.0f}", f"{result['peak_mib']:.0f}",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
