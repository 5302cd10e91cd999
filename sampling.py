"""From logits to tokens (chapter 7): penalties, temperature, cuts, the draw, log-probabilities.

Mirrors   vLLM: v1/sample/sampler.py:20 Sampler, v1/sample/ops/penalties.py:10 apply_all_penalties
Promises  a draw depends on the request's seed and the index of the output token, nothing else: not on the neighbours,
          the chunks, or a preemption. temperature 0 is the likeliest token.
Order     1 sample, and what it calls, in the order of a token's way.  2 top_logprobs: what is reported beside it.
"""
import hashlib
import math

import torch

GREEDY_BELOW = 1e-5      # as in vLLM: a smaller temperature would overflow the division; its argmax is certain anyway
LARGE = 1e30             # what a larger parameter is taken for: in fp32 it would be inf, and -inf / inf is no logit


def sample(logits, requests):
    """One token for each row.  logits [S', V], the rows' requests  →  list of ids, None where logits aren't finite.

    temperature 0 is argmax, in any mixture with sampled rows. A draw is one uniform number that depends on the
    request's seed and the index of the output token, nothing else: not on the neighbours, the chunks, or a preemption.
    vLLM: v1/sample/sampler.py:20 Sampler, which draws per-request generators' exponentials instead."""
    logits = logits.float()                                                          # [S', V]
    if any(adjusts_logits(r) for r in requests):
        logits = logits.clone()                  # the caller still wants the raw ones, for the log-probabilities
        for row, request in zip(logits, requests):
            adjust_logits(row, request)
    best, ids = likeliest(logits)                                                    # [S'] each
    token_ids = [i if ok else None for i, ok in zip(ids.tolist(), best.isfinite().tolist())]
    rows = [i for i, r in enumerate(requests)
            if r.sampling_params.temperature >= GREEDY_BELOW and token_ids[i] is not None]
    if rows:
        for i, token_id in zip(rows, draw(logits[rows], [requests[i] for i in rows])):
            token_ids[i] = token_id
    return token_ids


def likeliest(logits):
    """The largest logit of each row and the first id that has it; a NaN counts as largest.  [n, V]  →  [n], [n].

    PyTorch finds a maximum several elements at a time, but its index one by one. So take the maxima of stretches of K
    first, and look for the index in one stretch a row. K divides V and is 256 at most; an odd V gains nothing."""
    K = math.gcd(logits.shape[1], 256)
    stretches = logits.reshape(len(logits), logits.shape[1] // K, K)                 # [n, V/K, K]
    maxima = stretches.amax(-1)                                                      # [n, V/K]
    first = maxima.argmax(-1)                                                        # [n]
    within = stretches[torch.arange(len(logits), device=logits.device), first].argmax(-1)               # [n]
    return maxima.amax(-1), first * K + within


def draw(logits, requests):
    """Temperature, then top_k and min_p (which commute), then top_p, then the draw.  logits [n, V] fp32  →  n ids.

    Walk down the sorted probabilities until the uniform number is used up. The sort is stable, so that of equal
    probabilities the lower id comes first and a cut between them is the same every time."""
    column = lambda name: logits.new_tensor([[float(min(getattr(r.sampling_params, name), LARGE))] for r in requests])
    probs, ids = (logits / column("temperature")).softmax(-1).sort(dim=-1, descending=True, stable=True)   # [n, V] each
    top_k, top_p, min_p = column("top_k"), column("top_p"), column("min_p")          # [n, 1]
    rank = torch.arange(probs.shape[1], device=logits.device)                        # [V]
    probs = probs.where((rank < top_k) | (top_k <= 0), 0.0)                          # top_k 0 and -1: off
    probs = probs.where(probs >= min_p * probs[:, :1], 0.0)
    total = probs.cumsum(-1, dtype=torch.float64)                                    # [n, V] fp64: 1e5 tiny ones add up
    # Keep a token while the mass of the likelier ones is below top_p of what is left, as in vLLM; the likeliest always.
    probs = probs.where((total - probs < top_p * total[:, -1:]) | (rank == 0), 0.0)
    cumulative = probs.cumsum(-1, dtype=torch.float64)                               # [n, V]
    u = cumulative.new_tensor([[uniform(r.sampling_params.seed, len(r.output_token_ids))] for r in requests])   # [n, 1]
    index = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)       # [n, 1]
    index = index.minimum((probs > 0).sum(-1, keepdim=True) - 1)                     # u < 1; the product may round up
    return ids.gather(1, index).flatten().tolist()


def uniform(seed, index):
    """A number in [0, 1) from (seed, output index): 53 bits of a hash, so no generator has a state to carry along."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2 ** 53


def adjusts_logits(request):
    p = request.sampling_params
    return (p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
            or len(request.output_token_ids) < p.min_tokens)


def adjust_logits(row, request):
    """What changes even a greedy choice; row [V], in place.  vLLM: v1/sample/ops/penalties.py:10 apply_all_penalties"""
    p, outputs = request.sampling_params, request.output_token_ids
    if len(outputs) < p.min_tokens:              # not yet allowed to end: no EOS, no stop token
        row[sorted({*p.stop_token_ids, *request.eos_token_ids})] = -torch.inf        # the latter: empty if ignore_eos
    if p.repetition_penalty != 1:                # over prompt and output; the sign decides which way is "less likely"
        seen = torch.tensor(sorted(set(request.all_token_ids)), device=row.device)
        penalty = min(p.repetition_penalty, LARGE)
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    if outputs and (p.presence_penalty or p.frequency_penalty):     # over the output alone
        seen, count = torch.tensor(outputs, device=row.device).unique(return_counts=True)
        row[seen] -= p.presence_penalty + p.frequency_penalty * count


def top_logprobs(logits, token_ids, n):
    """Log-probabilities of the raw logits (before temperature, penalties and cuts, vLLM's default `raw_logprobs`).

    logits [m, V], token_ids m chosen ids, n how many of the likeliest  →  for each row [(id, logprob, rank)]: the
    chosen one first, then the n likeliest in order; rank 1 is the likeliest."""
    logprobs = logits.float().log_softmax(-1)                                        # [m, V]
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])     # [m, 1]
    ranks = (logprobs > chosen).sum(-1) + 1                                          # [m]
    values, ids = logprobs.topk(min(n, logprobs.shape[1]), dim=-1)                   # [m, n] each
    columns = token_ids, chosen.flatten().tolist(), ranks.tolist(), ids.tolist(), values.tolist()
    return [[(t, c, r)] + [(i, v, k + 1) for k, (i, v) in enumerate(zip(row_ids, row_values))]
            for t, c, r, row_ids, row_values in zip(*columns)]
