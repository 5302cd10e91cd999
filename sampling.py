"""From logits to tokens (chapter 7): what a request bans or favours, penalties, temperature, cuts, the draw, and the
log-probabilities reported beside it.

Mirrors   vLLM: v1/sample/sampler.py:20 Sampler, v1/sample/ops/topk_topp_sampler.py:349 apply_top_k_top_p
Promises  a draw depends on the request's seed and the index of the output token, nothing else: not on the neighbours,
          the chunks, a preemption, or how the row was searched. temperature 0 is the likeliest token.
Order     1 sample: a token's way.  2 What changes the logits.  3 The draw.  4 What is reported beside it.
"""
import hashlib
import math

import torch

GREEDY_BELOW = 1e-5      # as in vLLM: a smaller temperature would overflow the division; its argmax is certain anyway
LARGE = 1e30             # what a larger parameter is taken for: in fp32 it would be inf, and -inf / inf is no logit
BUCKETS = 4096           # into how many ranges of likelihood `draw` sorts a row before it sorts a single one of them


# -- 1. A token's way -------------------------------------------------------------------------------------------------

def sample(logits, requests):
    """One token for each row.  logits [S', V], the rows' requests  →  list of ids, None where there is none to choose
    (`why_no_token` says why).

    temperature 0 is argmax, in any mixture with sampled rows. A draw is one uniform number that depends on the
    request's seed and the index of the output token. vLLM: v1/sample/sampler.py:72 Sampler.forward, which draws
    per-request generators' exponentials instead."""
    logits = logits.float()                                                          # [S', V]
    if any(adjusts_logits(r) for r in requests):
        logits = logits.clone()                  # the caller still wants the raw ones, for the log-probabilities
        for row, request in zip(logits, requests):
            adjust_logits(row, request)
    best, ids = likeliest(logits)                                                    # [S'] each
    token_ids = [i if ok else None for i, ok in zip(ids.tolist(), best.isfinite().tolist())]
    rows = [i for i, r in enumerate(requests)
            if r.sampling_params.temperature >= GREEDY_BELOW and token_ids[i] is not None]
    # A core's cache holds about a MB, one row of a large vocabulary in fp64; a GPU wants many rows at once.
    piece = 64 if logits.is_cuda else max(1, 2 ** 17 // logits.shape[1])
    for start in range(0, len(rows), piece):
        part = rows[start:start + piece]
        where = slice(start, start + piece) if len(rows) == len(requests) else part     # a slice costs no copy
        for i, token_id in zip(part, draw(logits[where], best[where], [requests[i] for i in part])):
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


def why_no_token(row, request):
    """Whose fault it is that `sample` found none in this raw row [V]: a sentence for the request's error."""
    if row.isfinite().any() and not (row.isnan() | (row == torch.inf)).any():
        p = request.sampling_params
        given = [f"{name}={getattr(p, name)!r:.60}" for name in (
            "repetition_penalty", "allowed_token_ids", "bad_words", "min_tokens", "logit_bias") if _is_set(p, name)]
        return f"this request's own settings leave no token with a finite logit: {', '.join(given)}"
    return "the model's logits are not finite (NaN or inf); try --dtype float32 or bfloat16"


# -- 2. What changes the logits, and with them even a greedy choice ---------------------------------------------------

def _is_set(params, name):
    return getattr(params, name) not in (None, [], {}, 1 if name == "repetition_penalty" else 0)


def adjusts_logits(request):
    p = request.sampling_params
    return (len(request.output_token_ids) < p.min_tokens or p.allowed_token_ids is not None
            or bool(request.bad_words_token_ids or p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0
            or p.frequency_penalty != 0)


def adjust_logits(row, request):
    """row [V], in place, in vLLM's order: bans, biases, penalties.
    vLLM: v1/sample/sampler.py:371 Sampler.apply_logits_processors, v1/sample/ops/penalties.py:10 apply_all_penalties"""
    p, outputs, on = request.sampling_params, request.output_token_ids, {"device": row.device}
    if p.allowed_token_ids is not None:
        allowed = torch.tensor(p.allowed_token_ids, **on)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    if banned := [ids[-1] for ids in request.bad_words_token_ids if completes(ids, outputs)]:
        row[banned] = -torch.inf
    if len(outputs) < p.min_tokens:              # not yet allowed to end: no EOS, no stop token
        row[sorted({*p.stop_token_ids, *request.eos_token_ids})] = -torch.inf        # the latter: empty if ignore_eos
    if p.logit_bias:
        row[torch.tensor(list(p.logit_bias), **on)] += torch.tensor(list(p.logit_bias.values()), **on)
    if p.repetition_penalty != 1:                # over prompt and output; the sign decides which way is "less likely"
        seen = torch.tensor(sorted(set(request.all_token_ids)), **on)
        penalty = min(p.repetition_penalty, LARGE)
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    if outputs and (p.presence_penalty or p.frequency_penalty):     # over the output alone
        seen, count = torch.tensor(outputs, **on).unique(return_counts=True)
        row[seen] -= p.presence_penalty + p.frequency_penalty * count


def completes(ids, outputs):
    """Whether the output ends in all of these ids but the last, so that the last would complete a bad word.
    vLLM: v1/sample/ops/bad_words.py:9 _apply_bad_words_single_batch"""
    head = len(ids) - 1
    return head <= len(outputs) and outputs[len(outputs) - head:] == ids[:-1]


# -- 3. The draw ------------------------------------------------------------------------------------------------------

def draw(logits, best, requests):
    """Temperature, then top_k and min_p (which commute), then top_p, then the draw.  logits [n, V] fp32 and their
    maxima best [n], finite  →  n ids.

    Walk down the tokens, likeliest first, of equals the lower id first, until the uniform number's share of their
    weight is used up. Weights are whole numbers, so sums are exact in any order, and nobody has to walk: sum them by
    ranges of likelihood, find the range in which the walk would end, and sort that one alone.
    Example, weights 8 4 4 2 with u = 0.7: of 18, 12.6 are used up; after 8 and 4 and within the second 4, the answer.
    vLLM: v1/sample/ops/topk_topp_sampler.py:349 apply_top_k_top_p, which sorts"""
    column = lambda name: [getattr(r.sampling_params, name) for r in requests]
    fp64 = lambda values: best.new_tensor(values, dtype=torch.float64)[:, None]      # [n, 1]
    bits = 62 - logits.shape[1].bit_length()                                         # V weights of 2^bits: below 2^62
    halvings = fp64([math.log2(math.e) / min(t, LARGE) for t in column("temperature")])      # e^(x/T) = 2^(x halvings)
    # In place, since a fresh MB costs as much as what is computed in it.
    weights = logits.double().sub_(best[:, None]).mul_(halvings).add_(bits).exp2_()  # [n, V] fp64, best: 2^bits
    if any(min_p := column("min_p")):
        weights.masked_fill_(weights < fp64(min_p) * 2.0 ** bits, 0)
    weights = weights.view(torch.int64).copy_(weights)                               # [n, V] rounded down, in place
    for row, k, weight in zip(logits, column("top_k"), weights):
        if 0 < k < len(row):                     # all that equal the k-th stay
            weight.masked_fill_(row < row.topk(k).values[-1], 0)
    walk = Walk(logits, best[:, None], weights, bits / halvings)
    totals, top_p = walk.totals, [p.as_integer_ratio() for p in column("top_p")]     # exact: a float is a fraction
    if any(n < d for n, d in top_p):
        # Keep a token while the weight of the likelier ones is below n/d of all: the last one kept is the one that
        # holds the last unit of weight below it.
        totals = [end for _, end in walk.find([(total * n - 1) // d for total, (n, d) in zip(totals, top_p)])]
    u = [uniform(r.sampling_params.seed, len(r.output_token_ids)).as_integer_ratio() for r in requests]
    return [token_id for token_id, _ in walk.find([total * n // d for total, (n, d) in zip(totals, u)])]


class Walk:
    """Rows of weighted tokens, ready to be walked down in the order of their logits.  logits [n, V], best [n, 1] their
    maxima, weights [n, V] int64, faint [n, 1]: who is so far below the best weighs nothing."""

    def __init__(self, logits, best, weights, faint):
        self.logits, self.weights = logits, weights
        buckets = min(BUCKETS, logits.shape[1])
        # The farther below the best the higher the bucket, never the other way round: rounding keeps the order.
        width = (best - logits.amin(-1, keepdim=True)).double().minimum(faint).clamp(1e-30)  # [n, 1]
        bucket = (best - logits).mul_((buckets / width).float())                     # [n, V] fp32
        bucket = bucket.clamp_(max=buckets - 1)
        self.bucket = bucket.view(torch.int32).copy_(bucket)                         # [n, V] int32, in place
        by_bucket = weights.new_zeros(len(weights), buckets)                         # [n, buckets]
        for row, index, weight in zip(by_bucket, self.bucket, weights):
            row.index_add_(0, index, weight)
        self.reached = by_bucket.cumsum(-1)                                          # [n, buckets]
        self.totals = self.reached[:, -1].tolist()

    def find(self, targets):
        """For each row the token that holds unit `target` of the row's weight, 0 the first, and the weight up to its
        end: n pairs (id, weight)."""
        targets = self.reached.new_tensor(targets)[:, None]                          # [n, 1]
        buckets = torch.searchsorted(self.reached, targets, right=True)                   # [n, 1] the bucket
        found = []
        for row, bucket in enumerate(buckets.flatten().tolist()):
            ids = (self.bucket[row] == bucket).nonzero().flatten()                   # [m] ascending
            ids = ids[self.logits[row, ids].sort(descending=True, stable=True).indices]
            ends = self.weights[row, ids].cumsum(0)                                  # [m]
            if bucket:
                ends += self.reached[row, bucket - 1]
            i = torch.searchsorted(ends, targets[row], right=True)                   # [1]
            found.append((ids[i].item(), ends[i].item()))
        return found


def uniform(seed, index):
    """A number in [0, 1) from (seed, output index): 53 bits of a hash, so no generator has a state to carry along."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2 ** 53


# -- 4. What is reported beside it ------------------------------------------------------------------------------------

def top_logprobs(logits, token_ids, n):
    """Log-probabilities of the raw logits (before temperature, penalties and cuts, vLLM's default `raw_logprobs`).

    logits [m, V], token_ids m chosen ids, n how many of the likeliest (-1: all)  →  for each row
    [(id, logprob, rank)]: the chosen one first, then the n likeliest in order, of equals the lower id first; rank 1 is
    the likeliest. A chosen one that is neither the likeliest nor reported among the n ranks behind all its equals.
    vLLM: v1/sample/sampler.py:309 Sampler.gather_logprobs"""
    V = logits.shape[1]
    n = V if n == -1 else min(n, V)
    logprobs = logits.float().log_softmax(-1)                                        # [m, V]
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])     # [m, 1]
    ranks = (logprobs >= chosen).sum(-1).tolist()                                    # [m]
    edges = logprobs.topk(max(n, 1), dim=-1).values[:, -1:]                          # [m, 1]
    reported = []
    for row, edge, token_id, logprob, rank in zip(logprobs, edges, token_ids, chosen.flatten().tolist(), ranks):
        ids = (row >= edge).nonzero().flatten()                                      # [n or more] ascending
        values, order = row[ids].sort(descending=True, stable=True)
        top = [(i, v, k + 1) for k, (i, v) in enumerate(zip(ids[order[:max(n, 1)]].tolist(), values.tolist()))]
        rank = next((k for i, _, k in top if i == token_id), rank)
        reported.append([(token_id, logprob, rank)] + top[:n])
    return reported


def prompt_logprobs(logits, token_ids, n, piece=128):
    """top_logprobs of a prompt's tokens, each under the logits of the position before it.  logits [m, V], token_ids the
    m tokens that came next.  A chunk's log-probabilities would be as large as its logits, 1 GB for 2,048 rows of
    128,256: hence in pieces. vLLM: v1/worker/gpu_model_runner.py:5620 GPUModelRunner._get_prompt_logprobs_dict"""
    return [entry for start in range(0, len(token_ids), piece)
            for entry in top_logprobs(logits[start:start + piece], token_ids[start:start + piece], n)]


if __name__ == "__main__":       # draw's example: four tokens of weights 8 4 4 2, and what a cut leaves of them
    from request import Request, SamplingParams
    demo = torch.tensor([[8.0, 4.0, 4.0, 2.0]]).log()                                # [1, 4]
    for cut in ({}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.4}, {"logit_bias": {0: -100}}):
        drawn = [sample(demo, [Request("r", [], SamplingParams(seed=i, **cut))])[0] for i in range(180)]
        bars = [f"{i}: {drawn.count(i):3} {'█' * (drawn.count(i) // 10):14}" for i in range(4)]
        print(f"{str(cut or '180 draws, uncut'):28}", *bars)
    print("reported beside token 2:", *top_logprobs(demo, [2], 2)[0])
