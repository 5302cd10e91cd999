"""model.py against transformers: logits at every position, in one pass, in chunks, on several ranks; what ends a text;
what is not finite. What a checkpoint may be is test_checkpoint.py's.
"""
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
import model as M
import toys
from kv_cache import KVCache
from checkpoint import CheckpointError, LlamaConfig, load_model
from model import ForwardBatch
from nano_serve import SamplingParams
from toys import (BASE, BOS, EOS, EOT, LLAMA3_ROPE, TOYS, assert_same_ids, chain, copy_of, greedy, hf_logits, ids_of,
                  make_engine, make_toy, prompts_of, run, table_checkpoint, toy)

TEXT = prompts_of(1, seed=9, low=40, high=40)[0]


@torch.inference_mode()
def logits_of(model, ids, chunk=None):
    """Logits at every position of one sequence, [len(ids), V], through a KV pool of NaN whose blocks are in
    disorder."""
    config, size, chunk = model.config, 4, chunk or len(ids)
    num_blocks = -(-len(ids) // size)
    cache = KVCache(config.num_hidden_layers, num_blocks + 2, size, model.num_kv_heads, config.head_dim,
                    model.norm.weight.dtype, "cpu")
    cache.fill_(float("nan"))
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1                 # [B]
    rows = []
    for start in range(0, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        positions = torch.arange(start, stop)                                                          # [T]
        rows.append(model(ForwardBatch(
            torch.tensor(ids[start:stop]), positions, table[positions // size] * size + positions % size,
            torch.tensor([0, stop - start], dtype=torch.int32), torch.tensor([stop], dtype=torch.int32),
            table[None].int(), torch.arange(stop - start)), cache))
    return torch.cat(rows)


def check_logits(folder, reference=None, ids=TEXT):
    """The folder's logits through model.py are those of the reference folder (default: itself) through transformers."""
    got = logits_of(load_model(folder, torch.float32), ids)
    torch.testing.assert_close(got, hf_logits(reference or folder, ids), rtol=1e-4, atol=1e-4)
    return got


def refused(folder, *words):
    """Loading the folder is refused, with a message that has all the words in it."""
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, torch.float32)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def with_weights(folder, change):
    """A copy of the folder after change(weights), a dict by checkpoint name."""
    copy = copy_of(folder)
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


# -- The forward pass -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", TOYS)
def test_logits(name):
    """At every position, since position 0 agrees whatever the rotary layout. In one pass and in chunks."""
    whole = check_logits(toy(name))
    assert whole.std() > 0.5
    for chunk in (1, 7):
        torch.testing.assert_close(logits_of(load_model(toy(name), torch.float32), TEXT, chunk), whole, rtol=1e-4,
                                   atol=1e-4)


def test_llama3_rope_far_out():
    """300 positions, where those trained were 64: with the scaling ignored position 0 agrees and the last ones
    don't."""
    ids = prompts_of(1, seed=2, low=300, high=300)[0]
    got = check_logits(toy("llama3"), ids=ids)
    plain = copy_of(toy("llama3"), rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    difference = (logits_of(load_model(plain, torch.float32), ids) - got).abs().amax(-1)               # [300]
    assert difference[0] < 1e-4 and difference[-20:].min() > 0.01


def test_frequencies_are_those_of_transformers():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers import LlamaConfig as HFConfig
    for d, theta, factor, original in [(128, 500000.0, 8.0, 8192), (64, 500000.0, 32.0, 8192), (64, 10000.0, 4.0, 256)]:
        rope = {**LLAMA3_ROPE, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
        config = {**BASE, "model_type": "llama", "head_dim": d, "rope_parameters": rope, "max_position_embeddings": 131072}
        want, _ = ROPE_INIT_FUNCTIONS["llama3"](HFConfig(**config), device="cpu")
        torch.testing.assert_close(M.rope_frequencies(LlamaConfig.from_dict(config)), want, rtol=1e-6, atol=0)


def test_eps_comes_from_the_config():
    folder = make_toy(rms_norm_eps=1e-5)
    large = copy_of(folder, rms_norm_eps=0.3)
    assert (check_logits(folder) - check_logits(large)).abs().max() > 0.01


def test_norm_in_half_precision():
    """300 squared is more than fp16 can hold; the norm of such a row is finite all the same, and right."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 300
    got, _ = kernels.rms_norm(x.half(), torch.ones(64).half(), 1e-5)
    torch.testing.assert_close(got.float(), x / x.square().mean(-1, keepdim=True).sqrt(), rtol=4e-3, atol=4e-3)


def test_mistral():
    """The same computation under another name, as long as there is no sliding window."""
    from transformers import MistralConfig, MistralForCausalLM
    torch.manual_seed(1)
    config = {k: v for k, v in BASE.items() if k not in ("seed", "rope_parameters")}
    model = MistralForCausalLM(MistralConfig(**config, head_dim=16, sliding_window=None, initializer_range=0.25)).eval()
    folder = toys.new_folder()
    model.save_pretrained(folder)
    with torch.no_grad():
        want = model(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(logits_of(load_model(folder, torch.float32), TEXT), want, rtol=1e-4, atol=1e-4)
    check = lambda folder: torch.testing.assert_close(logits_of(load_model(folder, torch.float32), TEXT), want,
                                                      rtol=1e-4, atol=1e-4)
    check(copy_of(folder, sliding_window=BASE["max_position_embeddings"]))           # no position sees its edge
    refused(copy_of(folder, sliding_window=BASE["max_position_embeddings"] - 1), "sliding_window", "511")
    refused(copy_of(folder, sliding_window=..., max_position_embeddings=...), "sliding_window", "4096")    # by default


class ThreadComm:
    """Collectives between ranks that are threads of this process."""

    def __init__(self, size):
        self.parts, self.barrier, self.rank = [None] * size, threading.Barrier(size, timeout=20), threading.local()

    def exchange(self, x):
        self.parts[self.rank.value] = x
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts

    def all_reduce(self, x):
        return torch.stack(self.exchange(x)).sum(0)

    def gather(self, x):
        return torch.cat(self.exchange(x), -1)

    @classmethod
    def run(cls, size, rank):
        """[rank(r, comm) for every rank r], at the same time."""
        comm, results = cls(size), [None] * size

        def body(r):
            comm.rank.value = r
            results[r] = rank(r, comm)
        threads = [threading.Thread(target=body, args=(r,)) for r in range(size)]
        [t.start() for t in threads]
        [t.join(60) for t in threads]
        return results


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["gqa", "mha", "mqa", "bias", "tied", "all"])
def test_tensor_parallel_logits(name, size):
    """Ranks that hold slices of heads, biases and vocabulary (95 rows: the last rank's are padded) give what one rank
    gives; with more ranks than KV heads each head is held several times."""
    folder = make_toy(**{**TOYS[name], "vocab_size": 95})
    ids = [i % 95 for i in TEXT]
    for got in ThreadComm.run(size, lambda r, comm: logits_of(
            load_model(folder, torch.float32, tp_rank=r, tp_size=size, comm=comm), ids)):
        torch.testing.assert_close(got, hf_logits(folder, ids), rtol=1e-4, atol=1e-4)


def test_tensor_parallel_sizes():
    with pytest.raises(ValueError, match=r"--tensor-parallel-size 4 .* 6 query heads.*possible: 1, 2, 6"):
        load_model(toy("gqa3"), torch.float32, tp_size=4)
    with pytest.raises(ValueError, match="--tensor-parallel-size 0"):
        load_model(toy("gqa3"), torch.float32, tp_size=0)


# -- EOS --------------------------------------------------------------------------------------------------------------

ENDINGS = {EOS: {EOS, EOT}, EOT: {EOS, EOT}}


@pytest.mark.parametrize("where", [{"eos": [EOS, EOT]}, {"generation_eos": [EOS, EOT]},
                                   {"eos": EOS, "generation_eos": EOT},
                                   {"eos": [EOS], "generation_eos": [EOS, EOT]}], ids=str)
@pytest.mark.parametrize("end", [EOS, EOT])
def test_eos_is_the_union_of_both_files(where, end):
    """Llama-3's instruct models name <|eot_id|> only in generation_config.json. ignore_eos covers all of them, but not
    stop_token_ids."""
    engine = make_engine(table_checkpoint(chain([BOS, *b"ab", end, *b"cd"]), **where))
    at = lambda **more: run(engine, [([BOS], SamplingParams(temperature=0.0, max_tokens=5, **more))])[0].outputs[0]
    out = at()
    assert (out.token_ids, out.text, out.finish_reason, out.stop_reason) == ([*b"ab", end], "ab", "stop", None)
    out = at(ignore_eos=True)
    assert (out.token_ids, out.finish_reason) == ([*b"ab", end, *b"cd"], "length")
    out = at(ignore_eos=True, stop_token_ids=[ord("c")])
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([*b"ab", end, ord("c")], "stop", ord("c"))
    out = at(stop_token_ids=[ord("b")])
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([*b"ab"], "stop", ord("b"))


def test_min_tokens_holds_back_every_eos():
    """After BOS come EOS and EOT with all the probability; with min_tokens=3 neither may come before the fourth
    token."""
    table = {t: {EOS: 30.0, EOT: 29.0, ord("x"): 10.0} for t in (BOS, ord("x"))}
    engine = make_engine(table_checkpoint(table, eos=EOS, generation_eos=EOT))
    for params in ({"temperature": 0.0}, *({"temperature": 1.0, "seed": s} for s in range(5))):
        out = run(engine, [([BOS], SamplingParams(max_tokens=9, min_tokens=3, **params))])[0].outputs[0]
        assert out.token_ids[:3] == [*b"xxx"] and out.token_ids[3] in (EOS, EOT) and out.finish_reason == "stop"
        stopping = SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=[ord("x")], **params)
        out = run(engine, [([BOS], stopping)])[0].outputs[0]
        assert not {EOS, EOT, ord("x")} & set(out.token_ids[:3])


# -- What is not finite -----------------------------------------------------------------------------------------------

def test_overflow_in_fp16_is_reported():
    """A down_proj whose products pass 65504: infinite in fp16, and said so, rather than token 0 for ever. In fp32 the
    text is fine."""
    name = "model.layers.1.mlp.down_proj.weight"
    folder = with_weights(toy(), lambda weights: weights[name].mul_(1e5 / 4).clamp_(-6e4, 6e4))
    (output,) = run(make_engine(folder, dtype="float16"), [(TEXT[:9], greedy(4))])
    assert output.outputs[0].finish_reason == "error" and "not finite" in output.error and "--dtype" in output.error
    jobs = [(TEXT[:9], greedy(4))]
    assert_same_ids(folder, [TEXT[:9]], ids_of(run(make_engine(folder), jobs)))


def test_nan_costs_only_the_request_that_holds_it():
    """A NaN embedding row: whoever has that token fails, its neighbours don't, and its blocks are given back."""
    folder = with_weights(table_checkpoint(chain([BOS, *b"abcdefgh"])),
                          lambda w: w["model.embed_tokens.weight"][ord("X")].fill_(torch.nan))
    engine = make_engine(folder)
    jobs = [([BOS], greedy(8)), ([BOS, ord("X")], greedy(8)), ([*b"ab"], greedy(6))]
    good, bad, also_good = run(engine, jobs)
    assert (good.outputs[0].text, also_good.outputs[0].text) == ("abcdefgh", "cdefgh")
    assert (bad.outputs[0].token_ids, bad.outputs[0].finish_reason) == ([], "error")
