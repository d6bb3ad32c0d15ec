"""
Times the kernels of a decode step, each by itself and together, after verifying what they return:

    python kernels/benchmarks/bench_paged_decode.py --workload 64x16384:221 --workload 35x30720:253

A workload is ROWSxTOKENS:TOP_K, TOP_K being the candidate pages to keep. Block tables are random, two caches take
turns so that no read is served from the L2 cache, and launches are replayed from a CUDA graph. Without a GPU the
kernels run in Triton's interpreter (set TRITON_INTERPRET=1, and choose a small workload): then they are verified only.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

from sparrow_attention import page_landmarks, select_pages  # noqa: E402
from sparrow_attention.paged_attention import attend_to_kept_pages, num_splits  # noqa: E402
from sparrow_attention.paged_decode import PagedDecoder  # noqa: E402
from sparrow_attention.paged_landmarks import update_landmarks  # noqa: E402
from sparrow_attention.paged_selection import choose_pages, score_pages, select_scored_pages  # noqa: E402


ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Rows that are compared with the reference, in double precision.
VERIFIED_ROWS = 4
# Relative error of an output: weights and values are rounded to 16 bits once each. Interpreted, all is float32.
TOLERANCE = 1e-2 if ON_GPU else 1e-5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", required=True, metavar="ROWSxTOKENS:TOP_K")
    parser.add_argument("--q-heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--page-score", default="mean_query", choices=["mean_query", "group_softmax"])
    parser.add_argument("--landmarks-per-page", type=int, default=1)
    parser.add_argument("--landmark-dtype", default="auto", choices=["auto", "fp8_e4m3"])
    args = parser.parse_args()
    for workload in args.workload:
        size, _, top_k = workload.partition(":")
        rows, tokens = map(int, size.split("x"))
        run(args, rows, tokens, int(top_k))


def run(args, rows, tokens, top_k):
    step = Step(args, rows, tokens, top_k)
    step.verify()
    print(f"{rows} x {tokens}, {top_k} candidates kept: verified")
    if not ON_GPU:
        return
    print(f"  {'':34}{'us':>9}{'TB/s':>8}")
    for name, (function, num_bytes) in step.stages().items():
        seconds = time(function)
        print(f"  {name:34}{seconds * 1e6:9.1f}{num_bytes / seconds / 1e12:8.2f}")


class Step:
    """A decode step over two random caches."""

    def __init__(self, args, rows, tokens, top_k):
        self.args, self.rows, self.tokens, self.top_k = args, rows, tokens, top_k
        self.pages = -(-tokens // args.page_size)
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        blocks = rows * self.pages
        shape = (blocks, args.kv_heads, args.page_size, 2 * args.head_dim)
        self.caches = [torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(2)]
        landmark_dtype = torch.float8_e4m3fn if args.landmark_dtype == "fp8_e4m3" else dtype
        shape = (blocks, args.kv_heads, 1, args.landmarks_per_page, args.head_dim)
        self.landmarks = [torch.empty(shape, device=DEVICE, dtype=landmark_dtype) for _ in range(2)]
        self.slots = torch.arange(args.page_size - 1, blocks * args.page_size, args.page_size, device=DEVICE)
        for index in range(2):
            update_landmarks(self.keys(index), self.landmarks[index], self.slots)
        self.block_table = torch.randperm(blocks, device=DEVICE).int().view(rows, self.pages)
        self.seq_lens = torch.full((rows,), tokens, dtype=torch.int32, device=DEVICE)
        self.query = torch.randn(rows, args.q_heads, args.head_dim, device=DEVICE, dtype=dtype)
        self.output = torch.full_like(self.query, torch.nan)
        self.table = torch.full((self.pages + 1,), top_k, dtype=torch.int32, device=DEVICE)
        self.decoder = PagedDecoder(
            max_rows=rows,
            max_tokens=tokens,
            q_heads=args.q_heads,
            kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            page_size=args.page_size,
            page_score=args.page_score,
            landmarks_per_page=args.landmarks_per_page,
            device=DEVICE,
        )

    def keys(self, index):
        return self.caches[index % 2].split(self.args.head_dim, -1)[0]

    def values(self, index):
        return self.caches[index % 2].split(self.args.head_dim, -1)[1]

    def decode(self, index=0):
        cache = self.keys(index), self.values(index), self.block_table, self.seq_lens, self.table
        self.decoder(self.query, *cache, self.landmarks[index % 2], output=self.output)

    def verify(self):
        """Compare some rows with the definition; raise if they differ."""
        args, rows = self.args, slice(0, VERIFIED_ROWS)
        self.decode()
        blocks = self.block_table[rows].long()
        keys, values = (cache[blocks].transpose(1, 2) for cache in (self.keys(0), self.values(0)))
        expected = page_landmarks(keys, args.landmarks_per_page, self.landmarks[0].dtype)
        found = self.landmarks[0][blocks].transpose(1, 2).squeeze(3)
        if not torch.equal(found.float(), expected.float()):
            sys.exit("The landmarks are not the means of their pages. No speed is printed.")
        kept = select_pages(
            self.query[rows].double(),
            expected.double(),
            self.seq_lens[rows],
            self.table[-1:].expand(len(blocks)),
            page_size=args.page_size,
            page_score=args.page_score,
        )
        listed = torch.zeros_like(kept)
        for row, head in torch.cartesian_prod(torch.arange(len(blocks)), torch.arange(args.kv_heads)).tolist():
            if self.decoder._counts[row, head] == self.pages:
                listed[row, head] = True
                continue
            pages = self.decoder._kept[row, head, : self.decoder._counts[row, head]]
            listed[row, head] = torch.isin(blocks[row], pages.long())
        # In less than double precision a page may take the place of one with nearly its score.
        if (listed.sum(-1) != kept.sum(-1)).any() or (listed & kept).sum() < 0.99 * kept.sum():
            sys.exit("The kernels keep other pages than the definition. No speed is printed.")
        grouped = self.query[rows].double().unflatten(1, (args.kv_heads, -1))
        logits = torch.einsum("rhgd,rhptd->rhgpt", grouped, keys.double()) * args.head_dim**-0.5
        logits = logits.masked_fill(~listed[:, :, None, :, None], -torch.inf).flatten(-2)
        logits[..., self.tokens :] = -torch.inf
        weights = logits.softmax(-1)
        expected = torch.einsum("rhgt,rhtd->rhgd", weights, values.double().flatten(2, 3)).flatten(1, 2)
        error = ((self.output[rows].double() - expected).norm() / expected.norm()).item()
        if not error < TOLERANCE:
            sys.exit(f"The outputs are off by {error:.2g} of their norm. No speed is printed.")

    def stages(self):
        """Name of each stage: what launches it, and the bytes it has to move."""
        args, decoder = self.args, self.decoder
        budget = (self.table, decoder._reserved, decoder._never_dense)
        place = self.block_table, self.seq_lens, budget, decoder._scores
        lists = decoder._kept, decoder._counts, decoder.totals
        common = {"page_size": args.page_size, "softmax": decoder.softmax}
        element = self.query.element_size()
        page_bytes = 2 * args.page_size * args.head_dim * element
        kept_bytes = self.rows * args.kv_heads * min(self.pages, self.top_k + 3) * page_bytes
        landmark_bytes = self.rows * self.landmarks[0][: self.pages].nbytes
        finished = self.slots[: self.rows]
        return {
            "landmark update": (
                lambda i: update_landmarks(self.keys(i), self.landmarks[i % 2], finished),
                len(finished) * args.kv_heads * page_bytes / 2,
            ),
            "scoring alone": (
                lambda i: score_pages(self.query, self.landmarks[i % 2], *place, **common),
                landmark_bytes,
            ),
            "selection alone": (
                lambda i: select_scored_pages(
                    decoder._scores, self.block_table, self.seq_lens, budget, *lists, pages_per_block=1, **common
                ),
                decoder._scores.nbytes,
            ),
            "scoring and selection": (
                lambda i: choose_pages(
                    self.query, self.landmarks[i % 2], *place, *lists, **common, arrived=decoder._arrived
                ),
                landmark_bytes,
            ),
            f"attention and merge, {num_splits(self.rows, args.kv_heads)} splits": (
                lambda i: attend_to_kept_pages(
                    self.query,
                    self.keys(i),
                    self.values(i),
                    self.block_table,
                    self.seq_lens,
                    decoder._kept,
                    decoder._counts,
                    decoder._partial_output,
                    decoder._partial_lse,
                    self.output,
                    page_size=args.page_size,
                    scale=args.head_dim**-0.5,
                ),
                kept_bytes,
            ),
            "whole step, launches overlapping": (self.decode, kept_bytes + landmark_bytes),
        }


def time(function, launches=20, replays=9):
    """Median seconds of a launch, of `function(index)` replayed from a CUDA graph."""
    function(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            function(index)
    graph.replay()
    seconds = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) * 1e-3 / launches)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
