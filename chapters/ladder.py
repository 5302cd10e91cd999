"""Four engines in one file (chapter 1): what each idea adds, and what it is worth.

    1 stateless    every token computes the whole text again
    2 KV cache     every token computes itself; K and V of the others are kept                    (chapter 5)
    3 static batch several requests side by side, padded to one length, until the longest is done (chapter 1)
    4 paged        KV in blocks, tokens in a ragged batch, who is done makes room at once         (chapters 4, 5)

Each is complete: prompts in, greedy ids out, the same ids from all four. `python chapters/ladder.py` runs them in turn
on the embedded model, one thread, warmed, and shows tokens a second side by side.
"""
import argparse
import pathlib
import sys
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from checkpoint import load_model  # noqa: E402
from engine_args import EMBEDDED_MODEL  # noqa: E402
from kernels import apply_rope, rms_norm, silu_and_mul  # noqa: E402
from kv_cache import KVCache, KVCacheManager  # noqa: E402
from nano_serve import build_batch  # noqa: E402
from request import Request, SamplingParams  # noqa: E402
from scheduler import Scheduler, SchedulerConfig  # noqa: E402


# %% The model, dense: what rungs 1 to 3 share

def forward(model, ids, positions, visible, cache):
    """ids, positions [B, T], visible [B, T, L] (may row t look at key l?), cache: a list with K and V of each layer,
    [B, L - T, Hkv, d] before, [B, L, Hkv, d] after  →  logits [B, V] of the last column."""
    c, (B, T) = model.config, ids.shape
    H, Hkv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    cos, sin = model.rope_cos_sin(positions.flatten())                                   # [B * T, d]
    x, residual = F.embedding(ids.flatten(), model.embed_tokens.weight), None            # [B * T, D]
    for layer, kv in zip(model.layers, cache):
        x, residual = rms_norm(x, layer.input_layernorm.weight, c.rms_norm_eps, residual)
        q, k, v = F.linear(x, layer.qkv_proj.weight).view(B * T, -1, d).split((H, Hkv, Hkv), 1)
        q, k = apply_rope(q, cos, sin).view(B, T, H, d), apply_rope(k, cos, sin).view(B, T, Hkv, d)
        kv[:] = torch.cat((kv[0], k), 1), torch.cat((kv[1], v.view(B, T, Hkv, d)), 1)    # [B, L, Hkv, d]
        keys, values = (part.transpose(1, 2).repeat_interleave(H // Hkv, 1) for part in kv)          # [B, H, L, d]
        x = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, visible[:, None])        # [B, H, T, d]
        x = F.linear(x.transpose(1, 2).reshape(B * T, H * d), layer.o_proj.weight)       # [B * T, D]
        x, residual = rms_norm(x, layer.post_attention_layernorm.weight, c.rms_norm_eps, residual)
        x = F.linear(silu_and_mul(F.linear(x, layer.gate_up_proj.weight)), layer.down_proj.weight)
    x, _ = rms_norm(x, model.norm.weight, c.rms_norm_eps, residual)
    return F.linear(x.view(B, T, -1)[:, -1], model.lm_head.weight)                       # [B, V]


def empty_cache(model, batch):
    """K and V of no token yet, for each layer."""
    shape = batch, 0, model.config.num_key_value_heads, model.config.head_dim
    return [[torch.empty(shape), torch.empty(shape)] for _ in model.layers]


# %% Rung 1: stateless. n tokens behind a prompt of p cost p + (p + 1) + … + (p + n - 1) rows.

def stateless(model, prompts, lengths):
    answers = []
    for prompt, n in zip(prompts, lengths):
        ids = list(prompt)
        for _ in range(n):
            T = len(ids)
            causal = torch.ones(1, T, T, dtype=torch.bool).tril()
            logits = forward(model, torch.tensor([ids]), torch.arange(T)[None], causal, empty_cache(model, 1))
            ids.append(int(logits.argmax()))
        answers.append(ids[len(prompt):])
    return answers


# %% Rung 2: a KV cache. The same cost p rows, then one a token; memory grows with the text instead.

def cached(model, prompts, lengths):
    answers = []
    for prompt, n in zip(prompts, lengths):
        cache, ids, computed = empty_cache(model, 1), list(prompt), 0
        for _ in range(n):
            new = torch.arange(computed, len(ids))                                       # the gap: p rows, then 1
            visible = torch.arange(len(ids))[None] <= new[:, None]                       # [T, L]
            logits = forward(model, torch.tensor([ids[computed:]]), new[None], visible[None], cache)
            computed = len(ids)
            ids.append(int(logits.argmax()))
        answers.append(ids[len(prompt):])
    return answers


# %% Rung 3: a static batch. The weights are read once for all, but all run as long as the longest.

def static_batch(model, prompts, lengths):
    B, width = len(prompts), max(map(len, prompts))
    pad = torch.tensor([width - len(p) for p in prompts])                                # [B], on the left
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])              # [B, width]
    cache, new, answers = empty_cache(model, B), ids, []
    for step in range(max(lengths)):
        L = width + step
        rows, keys = torch.arange(L - new.shape[1], L), torch.arange(L)
        visible = (keys[None, None] <= rows[None, :, None]) & (keys[None, None] >= pad[:, None, None])       # [B, T, L]
        visible |= (rows[:, None] == keys)[None]      # a padding row sees itself, or its softmax would be 0 / 0
        logits = forward(model, new, (rows[None] - pad[:, None]).clamp(min=0), visible, cache)
        new = logits.argmax(-1, keepdim=True)                                            # [B, 1]
        answers.append(new)
    return [row[:n] for row, n in zip(torch.cat(answers, 1).tolist(), lengths)]


# %% Rung 4: the paged engine. Nobody waits for the longest, nobody is padded, memory goes by the block.

def paged(model, prompts, lengths):
    c = model.config
    manager = KVCacheManager(num_blocks=1 + sum(-(-(len(p) + n) // 16) for p, n in zip(prompts, lengths)))
    pool = KVCache(c.num_hidden_layers, manager.num_usable_blocks + 1, 16, c.num_key_value_heads, c.head_dim,
                   torch.float32, "cpu")
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048), manager)
    requests = [Request(str(i), p, SamplingParams(max_tokens=n)) for i, (p, n) in enumerate(zip(prompts, lengths))]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        ends = [r.request_id for r in output.scheduled_requests if r.num_computed_tokens == r.num_tokens]
        logits = model(build_batch(output, manager, "cpu"), pool)                        # [S', V]
        scheduler.update_from_output(output, dict(zip(ends, logits.argmax(-1).tolist())))
    return [request.output_token_ids for request in requests]


# %% Side by side

RUNGS = {"1 stateless": stateless, "2 KV cache": cached, "3 static batch": static_batch, "4 paged": paged}


@torch.inference_mode()
def climb(prompts, lengths, turns=2):
    """{rung: (ids, tokens a second)}: one thread, each rung once to warm up, then in turns; the best turn counts."""
    torch.set_num_threads(1)
    model, result, seconds = load_model(EMBEDDED_MODEL, torch.float32, attention_backend="torch"), {}, {}
    for turn in range(turns + 1):
        for name, rung in RUNGS.items():
            start = time.perf_counter()
            result[name] = rung(model, prompts, lengths)
            if turn:
                seconds[name] = min(seconds.get(name, 1e9), time.perf_counter() - start)
    return {name: (ids, sum(lengths) / seconds[name]) for name, ids in result.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8, help="how many [8]")
    parser.add_argument("--turns", type=int, default=2, help="measured turns of each rung [2]")
    args = parser.parse_args(argv)
    if args.requests < 1 or args.turns < 1:
        parser.error("--requests and --turns are whole numbers from 1")
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))
    prompts = [torch.randint(0, 2000, (draw(20, 120),), generator=generator).tolist() for _ in range(args.requests)]
    lengths = [draw(4, 49) for _ in prompts]
    sizes = [len(prompt) for prompt in prompts]
    print(f"{len(prompts)} prompts of {min(sizes)} to {max(sizes)} tokens, answers of {min(lengths)} to "
          f"{max(lengths)}, {sum(lengths)} in all; one thread; each rung runs {args.turns + 1} times", flush=True)
    rungs = climb(prompts, lengths, args.turns)
    first = next(iter(rungs.values()))
    fastest = max(speed for _, speed in rungs.values())
    for name, (ids, speed) in rungs.items():
        print(f"  {name:16}{speed:8.0f} tokens/s  {'█' * max(round(40 * speed / fastest), 1):40}"
              f"  {speed / first[1]:5.1f}x   {'the same ids' if ids == first[0] else 'OTHER IDS'}")
    return 0 if all(ids == first[0] for ids, _ in rungs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
