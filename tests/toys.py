"""Checkpoints small enough for tests, the reference they are held against, and an engine that watches itself.

toy(name)            a random Llama as a checkpoint folder: two layers, hidden size 64, weights wide enough for text
table_checkpoint()   a checkpoint whose next token depends on the last one alone, so a test can programme its output
hf_greedy()          what transformers' LlamaForCausalLM.generate says, once per (checkpoint, prompt)
assert_same_ids()    token equality; a difference is accepted only where it is shown to be a tie
make_engine()        an engine with its KV pool full of NaN that checks its accounts after every step
run(engine, jobs)    all jobs to their end, in a bounded number of steps, and the pool given back
"""
import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from nano_serve import EngineArgs, LLMEngine, SamplingParams

_ROOT = Path(tempfile.mkdtemp(prefix="toys-"))
atexit.register(shutil.rmtree, _ROOT, ignore_errors=True)


def new_folder():
    """An empty folder that lives as long as the test process."""
    return Path(tempfile.mkdtemp(dir=_ROOT))


# -- Random Llamas ----------------------------------------------------------------------------------------------------

BASE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": None,
        "bos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "seed": 0}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
TOYS = {  # what differs from BASE
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "gqa3": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
    "wide_head": {"head_dim": 32},                                       # 4 x 32 = 128, not the hidden size of 64
    "narrow_head": {"head_dim": 10, "num_key_value_heads": 1},           # 4 x 10 = 40, and no power of two
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_parameters": LLAMA3_ROPE},
    "all": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
            "head_dim": 24},
}


@functools.lru_cache(None)
def toy(name="gqa"):
    """The folder of a random fp32 Llama, made by transformers."""
    return make_toy(**TOYS[name])


def make_toy(**overrides):
    """Weights are drawn ten times wider than usual, and biases, which transformers starts at zero, are drawn too: a toy
    whose text is one token over and over would agree with almost anything."""
    from transformers import LlamaConfig, LlamaForCausalLM
    _quiet()
    config = {**BASE, **overrides}
    torch.manual_seed(config.pop("seed"))
    model = LlamaForCausalLM(LlamaConfig(initializer_range=0.25, **config))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("bias"):
                value.normal_(0, 0.25)
            elif "norm" in key:
                value.uniform_(0.5, 1.5)
    folder = new_folder()
    model.save_pretrained(folder)
    return folder


def _quiet():
    from transformers.utils import logging
    logging.disable_progress_bar()


def copy_of(folder, **config_changes):
    """A copy that a test may spoil. config_changes replace fields of config.json; the value `...` takes a field
    away."""
    copy = new_folder()
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    config.update(config_changes)
    (copy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return copy


def prompts_of(n, seed=0, vocab=96, low=1, high=24):
    """n random prompts of varied lengths."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (n,), generator=g).tolist()
    return [torch.randint(0, vocab, (length,), generator=g).tolist() for length in lengths]


# -- A checkpoint that says what it is told to ------------------------------------------------------------------------

BYTES = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
# the byte-level alphabet: each byte as one visible character
BYTE_TO_CHAR = {b: chr(b) for b in BYTES}
BYTE_TO_CHAR.update({b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in BYTES)})
BOS, EOS, EOT = 256, 257, 258


def byte_tokenizer(extra_tokens=()):
    """Ids 0-255 are the bytes, 256-258 the special tokens <|bos|> <|eos|> <|eot|>, from 259 on extra_tokens (str or
    bytes of several bytes each, may be no whole character); these are decoded, but no text is encoded to them. BOS is
    put in front."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    tokenizer = Tokenizer(models.BPE({BYTE_TO_CHAR[b]: b for b in range(256)}, []))
    vocab = json.loads(tokenizer.to_str())
    vocab["model"]["vocab"].update({"<|bos|>": BOS, "<|eos|>": EOS, "<|eot|>": EOT})
    for i, token in enumerate(extra_tokens):
        token = token.encode() if isinstance(token, str) else token
        vocab["model"]["vocab"]["".join(BYTE_TO_CHAR[b] for b in token)] = 259 + i
    tokenizer = Tokenizer.from_str(json.dumps(vocab))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|bos|>", "<|eos|>", "<|eot|>")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", pair="<|bos|> $A $B",
                                                             special_tokens=[("<|bos|>", BOS)])
    return tokenizer


def table_checkpoint(table, vocab_size=None, eos=None, generation_eos=None, extra_tokens=(), tokenizer=None,
                     chat_template=None, **config):
    """A checkpoint folder whose logits depend on the last token alone.

    table: {token: next token} or {token: {token: logit, …}}; a logit that isn't given is 0 (the next token's own is 20,
    so that it has all but 1e-6 of the probability), and a token that isn't in the table is followed by equal logits, so
    greedily by token 0.
    eos, generation_eos: eos_token_id of config.json and of generation_config.json (None: no such entry, no such file).
    tokenizer: a tokenizers.Tokenizer; by default byte_tokenizer(extra_tokens). False: the folder has none, V =
    vocab_size.

    How: embedding = identity, attention and MLP add nothing (o_proj and down_proj are zero), so the last norm makes of
    token i the unit vector i times 1/sqrt(1/V + eps), and column i of the head, divided by that factor, is what comes
    out.
    """
    if tokenizer is None:
        tokenizer = byte_tokenizer(extra_tokens)
    V, eps = vocab_size or tokenizer.get_vocab_size(), 1e-6
    logits = torch.zeros(V, V)                                           # [last token, V]
    for token, row in table.items():
        for next_token, logit in (row.items() if isinstance(row, dict) else [(row, 20.0)]):
            logits[token, next_token] = logit
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": V,
              "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
              "head_dim": 4, "rms_norm_eps": eps, "max_position_embeddings": 4096, "tie_word_embeddings": False,
              "rope_theta": 10000.0, "torch_dtype": "float32",
              **({} if eos is None else {"eos_token_id": eos}), **config}
    at = "model.layers.0."
    weights = {"model.embed_tokens.weight": torch.eye(V),
               "lm_head.weight": (logits.T * (1 / V + eps) ** 0.5).contiguous(),
               "model.norm.weight": torch.ones(V), at + "input_layernorm.weight": torch.ones(V),
               at + "post_attention_layernorm.weight": torch.ones(V), at + "self_attn.o_proj.weight": torch.zeros(V, 4),
               at + "mlp.down_proj.weight": torch.zeros(V, 4)}
    random = torch.Generator().manual_seed(0)
    weights |= {f"{at}self_attn.{p}_proj.weight": torch.randn(4, V, generator=random) for p in "qkv"}
    weights |= {f"{at}mlp.{p}_proj.weight": torch.ones(4, V) for p in ("gate", "up")}
    folder = new_folder()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    if tokenizer:
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<|eos|>"}))
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def chain(ids):
    """The table that walks through `ids`, which must all differ: chain([5, 9, 2]) = {5: 9, 9: 2}."""
    assert len(set(ids)) == len(ids), "after one token a table knows just one next token"
    return dict(zip(ids, ids[1:]))


# -- The reference ----------------------------------------------------------------------------------------------------

@functools.lru_cache(None)
def hf_model(folder):
    from transformers import LlamaForCausalLM
    _quiet()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


_GREEDY = {}        # (folder, prompt) → the ids that follow it, as many as anyone has asked for


def hf_greedy(folder, prompts, n):
    """transformers' n greedy tokens for each prompt. Prompts of one length run as one batch (no padding, so nothing to
    go wrong)."""
    todo = {}
    for p in prompts:
        if len(_GREEDY.get((folder, tuple(p)), ())) < n:
            todo.setdefault(len(p), set()).add(tuple(p))
    for length, group in todo.items():
        ids = torch.tensor(sorted(group))                                # [n, length]
        out = hf_model(folder).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False,
                                        pad_token_id=0)
        _GREEDY.update({(folder, tuple(row[:length])): row[length:] for row in out.tolist()})
    return [_GREEDY[folder, tuple(p)][:n] for p in prompts]


@torch.no_grad()
def hf_logits(folder, ids):
    """Logits at every position of one sequence: [len(ids), V]."""
    return hf_model(folder)(torch.tensor([ids])).logits[0]


TIE = 1e-4
ties = []           # the flips that were shown to be ties: (folder, ids before it, the two tokens, their logits' gap)


def assert_same_ids(folder, prompts, got):
    """got: a list of id lists, each to be transformers' greedy continuation of its prompt.

    At a difference the two tokens' reference logits must lie within 1e-4, both at the top: then either is right, and
    what follows is held against transformers' continuation of the very text that was chosen. Otherwise the test fails.
    """
    for prompt, ids in zip(prompts, got, strict=True):
        done = 0                                                         # ids[:done] are right
        while True:
            want = hf_greedy(folder, [prompt + ids[:done]], len(ids) - done)[0] if done < len(ids) else []
            wrong = next((i for i, (a, b) in enumerate(zip(ids[done:], want)) if a != b), None)
            if wrong is None:
                break
            known = prompt + ids[:done + wrong]
            logits = hf_logits(folder, known)[-1]                        # [V]
            gap = float(logits.max() - logits[ids[done + wrong]])
            assert gap < TIE, (f"prompt {prompt}: output token {done + wrong} is {ids[done + wrong]}, "
                               f"not {want[wrong]} (gap {gap:.4g})")
            ties.append((folder, known, (ids[done + wrong], want[wrong]), gap))
            done += wrong + 1


# -- The engine -------------------------------------------------------------------------------------------------------

def poison(engine, value=float("nan")):
    """Overwrite every KV slot. Afterwards a value that nobody wrote can't be read without showing in the output."""
    engine.executor.kv_cache.fill_(value)


def make_engine(folder, poison_value=float("nan"), clock=None, **options):
    """An LLMEngine over a poisoned pool which checks its accounts after every step. options: EngineArgs fields; the
    defaults are a block size of 4 and a pool of 200 blocks besides the null block. With `num_kv_blocks=nb + 1` just nb
    blocks can be used."""
    options = {"block_size": 4, "num_kv_blocks": 201, "dtype": "float32", "device": "cpu", "check_invariants": True,
               **options}
    engine = LLMEngine(EngineArgs(str(folder), **options), **({"clock": clock} if clock else {}))
    poison(engine, poison_value)
    return engine


def poison_unused(engine):
    """NaN into every slot that holds nobody's K/V: free blocks without a name, and what lies beyond a sequence's
    computed tokens. Between steps this may be done at any time, and then even a slot that was valid a step ago shows if
    it is read."""
    manager, cache = engine.scheduler.kv_cache_manager, engine.executor.kv_cache
    size, unused = manager.block_size, torch.ones(cache.num_blocks * cache.block_size, dtype=torch.bool)
    for block in manager.block_pool.blocks[1:]:
        if block.block_hash is not None:
            unused[block.block_id * size:(block.block_id + 1) * size] = False
    for request in engine.scheduler.requests.values():
        for i, block_id in enumerate(manager.get_block_ids(request.request_id)):
            unused[block_id * size:block_id * size + min(max(request.num_computed_tokens - i * size, 0), size)] = False
    rows = unused.nonzero().flatten()
    cache.k.flatten(1, 2)[:, rows] = torch.nan                           # [L, slots, Hkv, d]
    cache.v.flatten(1, 2)[:, rows] = torch.nan


def preempt(engine, request_id):
    """Preempt a running request between two steps, as the scheduler does when the pool is exhausted."""
    request = engine.scheduler.requests[request_id]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request)


def greedy(n, **more):
    """SamplingParams: n greedy tokens, come what may."""
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, **more)


def run(engine, jobs, arrivals=None, each_step=None):
    """Run jobs, a list of (prompt, SamplingParams) or (prompt, SamplingParams, priority), to their end: list of final
    RequestOutput (None for one that each_step aborted: it has none).

    arrivals: the step at which each job is added (default: all at once). each_step: called with (step, that step's
    outputs).
    Request ids are "<steps run before>-<index of the job>". After every step the plan is held against its budget, and
    all slots that hold nobody's K/V are poisoned again. Reaching the bound on steps is a failure, so that what hangs
    fails; at the end the pool must be whole again.
    """
    final, first = {}, len(engine.records)
    todo = sorted(range(len(jobs)), key=lambda i: arrivals[i] if arrivals else 0)
    total = sum(len(job[0]) + (job[1].max_tokens or 500) for job in jobs)
    bound, step = 50 * total + max(arrivals or [0]), 0
    while todo or engine.has_unfinished_requests():
        while todo and (not arrivals or arrivals[todo[0]] <= step):
            i = todo.pop(0)
            prompt, params, *priority = jobs[i]
            engine.add_request(f"{first}-{i}", prompt, params, priority=priority[0] if priority else 0)
        outputs = engine.step()
        final.update({o.request_id: o for o in outputs if o.finished})
        if each_step:
            each_step(step, outputs)
        record = engine.records[-1] if engine.records else None         # a step with nothing to do leaves no record
        assert record is None or record.used == sum(r.scheduled for r in record.requests) <= record.budget
        assert record is None or all(r.scheduled > 0 for r in record.requests)
        poison_unused(engine)
        step += 1
        assert step <= bound, f"{step} steps for {total} tokens: {engine.scheduler.requests}"
    check_drained(engine)
    return [final.get(f"{first}-{i}") for i in range(len(jobs))]


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def check_drained(engine):
    """Nobody holds a block, and each block id is in the free list exactly once."""
    manager = engine.scheduler.kv_cache_manager
    pool = manager.block_pool
    free = sorted(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    assert free == list(range(1, pool.num_blocks)), f"free: {free} of {pool.num_blocks} with the null block"
    assert all(block.ref_cnt == 0 for block in pool.blocks[1:]) and manager.num_free_blocks == manager.num_usable_blocks
    assert not engine.scheduler.requests and not engine.scheduler.running and not len(engine.scheduler.waiting)
