"""
Block-sparse attention written from its definition with loops, one row and one kv head at a time.

Arithmetic is in double precision, which is exact for sums over small multiples of a power of two, which the tests use
where a tie must be a tie. A mean over 3, 5 or 7 heads is none of those and is taken in fractions.
"""

import math
from fractions import Fraction

import numpy as np


def page_landmarks(keys, landmarks_per_page):
    """Mean keys, a list of lists, of one full page's `keys`, a list of lists."""
    run_tokens = len(keys) // landmarks_per_page
    landmarks = []
    for start in range(0, len(keys), run_tokens):
        run = keys[start : start + run_tokens]
        landmarks.append([sum(key[i] for key in run) / run_tokens for i in range(len(run[0]))])
    return landmarks


def candidate_pages(length, page_size, sink_pages, recent_pages):
    num_pages = math.ceil(length / page_size)
    return list(range(sink_pages, num_pages - recent_pages))


def page_scores(queries, landmarks, candidates, page_score):
    """Score of each candidate, a dict; `landmarks` maps a page to its list of landmarks."""

    def dot(left, right):
        return sum(a * b for a, b in zip(left, right, strict=True))

    if page_score == "mean_query":
        mean = [sum(map(Fraction, column)) / len(queries) for column in zip(*queries, strict=True)]
        return {page: dot(mean, map(Fraction, landmarks[page][0])) for page in candidates}
    scores = dict.fromkeys(candidates, 0.0)
    for query in queries:
        logits = {
            page: [dot(query, landmark) / math.sqrt(len(query)) for landmark in landmarks[page]] for page in candidates
        }
        highest = max((max(runs) for runs in logits.values()), default=0.0)
        weights = {page: sum(math.exp(logit - highest) for logit in runs) for page, runs in logits.items()}
        total = sum(weights.values())
        for page in candidates:
            scores[page] += weights[page] / total
    return scores


def kept_pages(length, top_k, scores, page_size, sink_pages, recent_pages):
    """Kept pages in ascending order."""
    num_pages = math.ceil(length / page_size)
    candidates = candidate_pages(length, page_size, sink_pages, recent_pages)
    best = sorted(candidates, key=lambda page: (-scores[page], page))[:top_k]
    return sorted({*best, *(page for page in range(num_pages) if page not in candidates)})


def same_up_to_close_scores(kept, expected, scores, tolerance):
    """
    Whether two selections of pages are the same, where pages may be exchanged if their scores are not equal but differ
    by less than `tolerance`.
    """
    dropped, added = sorted(set(expected) - set(kept)), sorted(set(kept) - set(expected))
    if len(dropped) != len(added) or not scores.keys() >= {*dropped, *added}:
        return False
    return all(0 < abs(scores[a] - scores[b]) < tolerance for a in dropped for b in added)


def attention(query, keys, values, tokens, scale=None):
    """Softmax attention of one query to the listed tokens, in double precision."""
    logits = keys[tokens] @ query * (len(query) ** -0.5 if scale is None else scale)
    weights = np.exp(logits - logits.max())
    return weights @ values[tokens] / weights.sum()


def tokens_of(pages, length, page_size):
    return [token for page in pages for token in range(page * page_size, min((page + 1) * page_size, length))]
