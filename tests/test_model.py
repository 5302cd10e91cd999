"""model.py against transformers: configurations, the weights' way from file to place, logits at every position.

What a checkpoint can be wrong in is here too: each case must be refused with a message that names what is wrong.
"""
import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import kernels
import checkpoint
import model as M
import toys
from conftest import ROOT
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
        config = {**BASE, "head_dim": d, "rope_parameters": rope, "max_position_embeddings": 131072}
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
    refused(copy_of(folder, sliding_window=4096), "sliding_window", "4096")


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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["gqa", "mha", "mqa", "bias", "tied", "all"])
def test_tensor_parallel_logits(name, size):
    """Ranks that hold slices of heads, biases and vocabulary (95 rows: the last rank's are padded) give what one rank
    gives; with more ranks than KV heads each head is held several times."""
    folder = make_toy(**{**TOYS[name], "vocab_size": 95})
    ids, comm, results = [i % 95 for i in TEXT], ThreadComm(size), [None] * size

    def rank(r):
        comm.rank.value = r
        results[r] = logits_of(load_model(folder, torch.float32, tp_rank=r, tp_size=size, comm=comm), ids)
    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    for got in results:
        torch.testing.assert_close(got, hf_logits(folder, ids), rtol=1e-4, atol=1e-4)


def test_tensor_parallel_sizes():
    with pytest.raises(ValueError, match=r"--tensor-parallel-size 4 .* 6 query heads.*possible: 1, 2, 6"):
        load_model(toy("gqa3"), torch.float32, tp_size=4)
    with pytest.raises(ValueError, match="--tensor-parallel-size 0"):
        load_model(toy("gqa3"), torch.float32, tp_size=0)


# -- The configuration ------------------------------------------------------------------------------------------------

NEW = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "dtype": "bfloat16"}
OLD = {"rope_theta": 500000.0, "rope_scaling": None, "torch_dtype": "bfloat16"}
LLAMA3_REST = {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_type", "rope_theta")}
NEW_LLAMA3 = {"rope_parameters": LLAMA3_ROPE, "dtype": "float32"}
OLD_LLAMA3 = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3_REST}, "torch_dtype": "float32"}
OLDER_LLAMA3 = {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3_REST}, "torch_dtype": "float32"}
BOTH_LLAMA3 = {**OLD_LLAMA3, "rope_parameters": LLAMA3_ROPE, "dtype": "float32"}
BLANK = {"rope_parameters": ..., "rope_theta": ..., "rope_scaling": ..., "dtype": ..., "torch_dtype": ...}


@pytest.mark.parametrize("spellings", [(NEW, OLD), (NEW_LLAMA3, OLD_LLAMA3, OLDER_LLAMA3, BOTH_LLAMA3)],
                         ids=["default", "llama3"])
def test_both_spellings(spellings):
    folders = [copy_of(toy(), **{**BLANK, **spelling}) for spelling in spellings]
    configs = [LlamaConfig.from_folder(f) for f in folders]
    assert all(c == configs[0] for c in configs) and configs[0].rope_theta == 500000.0
    first = check_logits(folders[0])
    assert (first - check_logits(toy())).abs().max() > 0.01                       # theta does make a difference
    for folder in folders[1:]:
        assert torch.equal(check_logits(folder, reference=folders[0]), first)


@pytest.mark.parametrize("fields, words", [
    ({"rope_theta": 10000.0, **NEW}, ("rope_theta", "10000.0", "500000.0")),
    ({**NEW, "torch_dtype": "float16"}, ("dtype", "bfloat16", "float16")),
    ({**OLD, "rope_scaling": {"type": "default", **LLAMA3_ROPE}}, ("rope_type", "default", "llama3")),
    ({**NEW, "rope_scaling": {"rope_type": "llama3", **LLAMA3_REST}}, ("llama3", "default")),
    ({**NEW_LLAMA3, "rope_scaling": {"rope_type": "llama3", **LLAMA3_REST, "factor": 32.0}}, ("factor", "32.0", "8.0")),
], ids=["theta", "dtype", "type", "scaling", "factor"])
def test_spellings_that_contradict_each_other(fields, words):
    refused(copy_of(toy(), **{**BLANK, **fields}), *words)


def test_defaults_are_those_of_transformers():
    """Fields that old checkpoints leave out: theta, head_dim, KV heads, eps."""
    folder = copy_of(toy("mha"), **BLANK, head_dim=..., num_key_value_heads=..., rms_norm_eps=..., attention_bias=...,
                     mlp_bias=...)
    check_logits(folder)
    config = LlamaConfig.from_folder(folder)
    assert (config.rope_theta, config.head_dim, config.num_key_value_heads, config.rms_norm_eps,
            config.dtype) == (10000.0, 16, 4, 1e-6, "float32")


@pytest.mark.parametrize("fields, words", [
    ({"architectures": ["Qwen2ForCausalLM"]}, ("Qwen2ForCausalLM", "LlamaForCausalLM")),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, ("yarn", "llama3")),
    ({"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear", "llama3")),
    ({"rope_parameters": {k: v for k, v in LLAMA3_ROPE.items() if k != "factor"}}, ("llama3", "factor")),
    ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
    ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
    ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
    ({"num_key_value_heads": 3}, ("4 query heads", "3 KV heads")),
    ({"head_dim": 7}, ("size 7", "even")),
    ({"vocab_size": ...}, ("vocab_size", "None")),
    ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
    ({"hidden_size": "64"}, ("hidden_size", "'64'")),
    ({"rms_norm_eps": None}, ("rms_norm_eps", "None")),
    ({"dtype": "int4"}, ("dtype", "int4", "bfloat16")),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_configurations_that_are_refused(fields, words):
    refused(copy_of(toy(), **fields), *words)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_names(key, dtype):
    config = LlamaConfig.from_folder(copy_of(toy(), **{"dtype": ..., "torch_dtype": ..., key: dtype}))
    assert checkpoint.auto_dtype(config, "cuda") == getattr(torch, dtype) and checkpoint.auto_dtype(config, "cpu") == torch.float32


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00\x01", '"config"'])
def test_files_that_hold_no_configuration(content):
    for name in ("config.json", "generation_config.json"):
        folder = copy_of(toy())
        (folder / name).write_text(content)
        refused(folder, name)


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


# -- Loading ----------------------------------------------------------------------------------------------------------

def test_missing_tensor():
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"):
        refused(with_weights(toy(), lambda w: w.pop(name)), name, "missing")
    refused(with_weights(toy("bias"), lambda w: w.pop("model.layers.0.mlp.up_proj.bias")),
            "model.layers.0.mlp.up_proj.bias", "missing")


def test_left_over_tensor():
    refused(with_weights(toy(), lambda w: w.update({"model.layers.0.foo": torch.zeros(2)})), "model.layers.0.foo")
    refused(copy_of(toy(), num_hidden_layers=1), "model.layers.1.")
    refused(copy_of(toy("bias"), attention_bias=False), ".self_attn.", ".bias")
    refused(copy_of(toy("bias"), mlp_bias=False), ".mlp.", ".bias")


@pytest.mark.parametrize("name, shape", [("model.layers.0.mlp.up_proj.weight", (64, 96)), ("model.norm.weight", (63,)),
                                         ("lm_head.weight", (97, 64)),
                                         ("model.layers.1.self_attn.q_proj.weight", (4, 16, 64))])
def test_wrong_shape(name, shape):
    refused(with_weights(toy(), lambda w: w.update({name: torch.zeros(shape)})), name, str(list(shape)))


def test_integer_weights():
    refused(with_weights(toy(), lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
            "model.norm.weight", "I8")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights(dtype):
    """Converted on the way: fp32 computing with fp16 weights is what transformers makes of the same file; and fp16
    stays fp16."""
    def halve(weights):
        weights.update({k: v.to(dtype) for k, v in weights.items()})
    folder = with_weights(toy(), halve)
    check_logits(folder)
    weight = load_model(folder, dtype).layers[1].o_proj.weight
    assert torch.equal(weight, load_file(folder / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"])


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 10**9))
def test_truncated_file(seed):
    """Cut anywhere, it is refused by name; where the header is whole, so is the tensor that lost something."""
    folder = copy_of(toy())
    whole = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    at = seed % (header if seed % 2 else len(whole))
    (folder / "model.safetensors").write_bytes(whole[:at])
    refused(folder, "model.safetensors", "truncated", *["tensor"] * (at > header))


def header_file(header):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + bytes(64)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("content", [
    b"", b"hello", b"\x89PNG\r\n\x1a\n" + bytes(100), b"\xff" * 100, header_file([]), header_file(b"nonsense"),
    header_file("text"), header_file({"a": 3}), header_file({"a": {}}),
    header_file({"a": {**GOOD, "data_offsets": None}}), header_file({"a": {**GOOD, "shape": 2}}),
    header_file({"a": {**GOOD, "dtype": None}}), header_file({"a": {**GOOD, "data_offsets": [0]}}),
], ids=itertools.count())
def test_files_that_hold_no_weights(content):
    folder = copy_of(toy())
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors")


def test_header_that_lies_about_the_place():
    """The offsets don't fit the shape: nothing is read past them."""
    folder = copy_of(toy())
    whole = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:8 + length])
    header["model.norm.weight"]["data_offsets"][1] -= 4
    data = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + whole[8 + length:])
    refused(folder, "model.safetensors")


def sharded(name="gqa"):
    """The toy in several files with an index, as transformers writes them."""
    folder = copy_of(toy(name))
    toys.hf_model(toy(name)).save_pretrained(folder, max_shard_size="60KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return folder


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_sharded():
    for name in ("gqa", "tied"):
        folder = sharded(name)
        assert len(list(folder.glob("model-*.safetensors"))) > 2
        check_logits(folder, reference=toy(name))


def test_the_index_decides():
    """A file it doesn't name is ignored, and a tensor in a file where the index doesn't place it, too."""
    folder = sharded()
    wrong = {k: torch.randn_like(v) for k, v in load_file(toy() / "model.safetensors").items()}
    save_file(wrong, folder / "model.safetensors")                                # left from an earlier download
    save_file(wrong, folder / "consolidated.safetensors")
    index = index_of(folder)["weight_map"]
    name = "model.norm.weight"
    other = next(f for f in set(index.values()) if f != index[name])
    save_file({**load_file(folder / other), name: torch.zeros(64), "junk": torch.zeros(1)}, folder / other,
              metadata={"format": "pt"})
    check_logits(folder, reference=toy())


def test_index_that_is_wrong():
    folder = sharded()
    index = index_of(folder)
    name, file = next(iter(index["weight_map"].items()))
    (folder / file).rename(folder / "away")
    refused(folder, file, "missing")
    (folder / "away").rename(folder / file)

    def change(weight_map):
        (folder / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": weight_map}))
    elsewhere = next(f for f in index["weight_map"].values() if f != file)
    change({**index["weight_map"], name: elsewhere})
    refused(folder, name, elsewhere, "index")
    change({k: v for k, v in index["weight_map"].items() if k != name})
    refused(folder, name, "missing")
    change({})
    refused(folder, "model.safetensors.index.json")
    for content in ("", "[]", '{"weight_map": []}', '{"weight_map": {"model.norm.weight": 3}}'):
        (folder / "model.safetensors.index.json").write_text(content)
        refused(folder, "model.safetensors.index.json")


def test_stray_files_are_ignored():
    folder = copy_of(toy())
    for name in ("pytorch_model.bin", "model-00001-of-00002.safetensors", "README.md", "optimizer.pt",
                 "consolidated.00.pth", "params.json"):
        (folder / name).write_bytes(b"stray")
    (folder / "original").mkdir()
    check_logits(folder, reference=toy())


def test_folders_without_weights_that_can_be_read():
    # as Meta ships it: interleaved RoPE, other names
    meta = toys.new_folder()
    (meta / "consolidated.00.pth").write_bytes(b"")
    refused(meta, "config.json")
    (meta / "params.json").write_text("{}")
    refused(meta, "config.json", "Meta")
    for name in ("consolidated.00.pth", "pytorch_model.bin", "model.gguf"):
        folder = copy_of(toy())
        (folder / "model.safetensors").rename(folder / name)
        refused(folder, "model.safetensors", name)


def test_tied_and_untied_heads():
    """Tied: the embedding is the head, and a stored one is ignored. Untied: it must be there."""
    for name in ("gqa", "tied"):
        check_logits(toy(name))
    check_logits(with_weights(toy("tied"), lambda w: w.update({"lm_head.weight": torch.randn(96, 64)})),
                 reference=toy("tied"))
    refused(with_weights(toy("gqa"), lambda w: w.pop("lm_head.weight")), "lm_head.weight", "missing")
    model = load_model(toy("tied"), torch.float32)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_stored_rope_frequencies_are_ignored():
    """Checkpoints of 2023 carry what is computed here."""
    check_logits(with_weights(toy(),
                              lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})),
                 reference=toy())


def test_which_folder(monkeypatch, tmp_path):
    assert checkpoint.find_checkpoint(str(toy())) == toy()
    (tmp_path / "file").write_text("")
    for name in (tmp_path / "nothing", tmp_path / "file", "./a/b", "no-such-name", "a/b/c"):
        with pytest.raises(CheckpointError, match="no folder with a checkpoint"):
            checkpoint.find_checkpoint(str(name))
    import huggingface_hub
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **kw: asked.append(repo) or str(toy()))
    assert checkpoint.find_checkpoint("owner/name") == toy() and asked == ["owner/name"]

    def offline(repo, **kw):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match="hf download owner/name"):
        checkpoint.find_checkpoint("owner/name")


# Runs in a process of its own. RssAnon is memory of the process itself: pages of the mapped file are not in it.
MEASURE = """
import sys, threading, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from checkpoint import load_model

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
before, peak, done = anonymous(), 0, False
thread = threading.Thread(target=watch)
thread.start()
model = load_model(sys.argv[2], torch.float32)
done = True
thread.join()
print(before, max(peak, anonymous()), sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_no_second_copy_in_memory(stored):
    """Loading 200 MB takes 200 MB and one tensor, whether the weights are converted or not."""
    D, I, layers = 1024, 4096, 3
    shapes = {"model.embed_tokens.weight": (1000, D), "lm_head.weight": (1000, D), "model.norm.weight": (D,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm.weight": (D,), at + "post_attention_layernorm.weight": (D,)}
        shapes |= {f"{at}self_attn.{p}_proj.weight": (D, D) for p in "qkvo"}
        shapes |= {at + "mlp.gate_proj.weight": (I, D), at + "mlp.up_proj.weight": (I, D),
                   at + "mlp.down_proj.weight": (D, I)}
    folder = toys.new_folder()
    save_file({name: torch.ones(shape, dtype=stored) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 1000,
                                                    "hidden_size": D, "intermediate_size": I,
                                                    "num_hidden_layers": layers,
                                                    "num_attention_heads": 16}))
    result = subprocess.run([sys.executable, "-c", MEASURE, str(ROOT), str(folder)], capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == 0, result.stderr
    before, peak, size = map(int, result.stdout.split())
    assert size == 4 * sum(int(np.prod(s)) for s in shapes.values()) > 190e6
    assert size <= peak - before < 1.25 * size, f"{(peak - before) / 1e6:.0f} MB for {size / 1e6:.0f} MB of weights"
