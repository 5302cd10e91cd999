"""checkpoint.py against transformers: configurations, the weights' way from file to place.

What a checkpoint can be wrong in is here too: each case must be refused with a message that names what is wrong.
"""
import itertools
import json
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import checkpoint
import toys
from checkpoint import CheckpointError, LlamaConfig, load_model, parse_dtype
from conftest import ROOT
from test_model import TEXT, ThreadComm, check_logits, logits_of, refused, with_weights
from toys import BASE, LLAMA3_ROPE, copy_of, hf_logits, make_toy, prompts_of, toy


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
    ({"vocab_size": None}, ("vocab_size", "None")),
    ({"vocab_size": ...}, ("embed_tokens", "32000")),
    ({"architectures": None, "model_type": "granite"}, ("model_type", "granite", "mistral")),
    ({"architectures": None, "model_type": None}, ("model_type", "None")),
    ({"model_type": "mistral"}, ("model_type", "mistral", "llama")),
    ({"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, ("low_freq_factor 4.0", "high_freq_factor 4.0")),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}}, ("full_attention",)),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ("partial_rotary_factor", "0.5")),
    *[({key: value}, (key, str(value))) for key, value in {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 1.0,
        "logit_scale": 0.0625, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "clip_qkv": 8.0,
        "use_qk_norm": True, "qkv_bias": True, "no_rope_layers": [1, 0], "num_local_experts": 8, "alibi": True,
        "use_parallel_residual": True, "sliding_window": 64, "is_causal": False, "quantization": {"bits": 4},
        "layer_types": ["full_attention", "sliding_attention"], "scale_embedding": True}.items()],
    ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
    ({"hidden_size": "64"}, ("hidden_size", "'64'")),
    ({"rms_norm_eps": None}, ("rms_norm_eps", "None")),
    ({"dtype": "int4"}, ("dtype", "int4", "bfloat16")),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_configurations_that_are_refused(fields, words):
    refused(copy_of(toy(), **fields), *words)


def test_fields_that_real_checkpoints_carry():
    """Bookkeeping, training's fields, and such that would change something but are switched off."""
    fields = {"_name_or_path": "x", "_attn_implementation_autoset": True, "attn_implementation": "sdpa",
              "transformers_version": "4.40.0", "use_cache": True, "pretraining_tp": 2, "unsloth_fixed": True,
              "auto_map": {"AutoModel": "m.M"}, "attention_dropout": 0.1, "hidden_dropout": 0.1, "rope_interleaved": False,
              "is_llama_config": True, "initializer_range": 0.02, "max_sequence_length": 2048, "neftune_noise_alpha": 5,
              "use_flash_attention": True, "output_attentions": True, "sliding_window": None, "quantization_config": None,
              "logits_scaling": 1.0, "residual_multiplier": 1, "qk_layernorm": False, "is_causal": True,
              "layer_types": ["full_attention"] * 2, "partial_rotary_factor": 1.0, "transformers.js_config": {"a": 1},
              "architectures": ["LLaMAForCausalLM"], "clip_qkv": None, "rope_parameters": {
                  "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    assert LlamaConfig.from_folder(copy_of(toy(), **fields)) == LlamaConfig.from_folder(toy())


@pytest.mark.parametrize("family", checkpoint.FAMILIES)
def test_defaults_of_each_family_are_those_of_its_class(family):
    """A config that says no more than its family, and one of a class default and no more, mean the same."""
    from transformers import AutoConfig
    theirs = AutoConfig.for_model(family)
    window = {} if theirs.to_dict().get("sliding_window") is None else {"sliding_window": None}
    for names in ({"model_type": family}, {"architectures": list(checkpoint.FAMILIES[family][0])}):
        ours = LlamaConfig.from_dict({**names, **window})
        for key in (*checkpoint.SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"):
            assert getattr(ours, key) == getattr(theirs, key), key
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"] and ours.eos_token_ids == {theirs.eos_token_id}
        assert LlamaConfig.from_dict({**names, **window, "num_key_value_heads": None}).num_key_value_heads == 32
    if window:
        with pytest.raises(CheckpointError, match=f"sliding_window = {theirs.sliding_window}"):
            LlamaConfig.from_dict({"model_type": family})


def test_eos_of_the_class_is_the_last_resort():
    silent = copy_of(toy(), eos_token_id=...)
    (silent / "generation_config.json").unlink(missing_ok=True)
    assert LlamaConfig.from_folder(silent).eos_token_ids == {2}
    (silent / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert LlamaConfig.from_folder(silent).eos_token_ids == {7}
    assert LlamaConfig.from_dict({"model_type": "llama", "eos_token_id": None}).eos_token_ids == set()


def test_dtype_takes_the_spellings_of_vllm():
    for spelling, dtype in {"half": torch.float16, "float16": torch.float16, "Half": torch.float16,
                            "bfloat16": torch.bfloat16, "float": torch.float32, "float32": torch.float32,
                            torch.float16: torch.float16, torch.bfloat16: torch.bfloat16, "auto": None}.items():
        assert parse_dtype(spelling) is dtype
    for wrong in ("fp16", "int8", "", torch.int8, torch.float64, None, 16, ["half"]):
        with pytest.raises(ValueError, match="--dtype = .* is not one of auto, float32, .*half"):
            parse_dtype(wrong)


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
    """A file it doesn't name is ignored, and a tensor in a file where the index doesn't place it, too. But beside a
    whole model.safetensors it is stale: transformers takes that, and so do we, saying so."""
    folder = sharded()
    wrong = {k: torch.randn_like(v) for k, v in load_file(toy() / "model.safetensors").items()}
    save_file(wrong, folder / "consolidated.safetensors")
    index = index_of(folder)["weight_map"]
    name = "model.norm.weight"
    other = next(f for f in set(index.values()) if f != index[name])
    save_file({**load_file(folder / other), name: torch.zeros(64), "junk": torch.zeros(1)}, folder / other,
              metadata={"format": "pt"})
    check_logits(folder, reference=toy())
    save_file(wrong, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="both model.safetensors and .*index.json: the single file is taken"):
        check_logits(folder)
    (folder / "model.safetensors.index.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_logits(folder)


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
    refused(folder, name, "is missing from", "model.safetensors.index.json")       # it is in the folder all right
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
    """Untied: the head must be there. Tied: the embedding is the head, unless another one is stored."""
    for name in ("gqa", "tied"):
        check_logits(toy(name))
    refused(with_weights(toy("gqa"), lambda w: w.pop("lm_head.weight")), "lm_head.weight", "missing")
    equal = with_weights(toy("tied"), lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    check_logits(equal, reference=toy("tied"))
    for folder in (toy("tied"), equal):
        model = load_model(folder, torch.float32)
        assert model.lm_head.weight is model.embed_tokens.weight
    head_alone = with_weights(toy("tied"), lambda w: w.update({"lm_head.weight": w.pop("model.embed_tokens.weight")}))
    check_logits(head_alone)
    check_logits(head_alone, reference=toy("tied"))
    refused(with_weights(toy("tied"), lambda w: w.pop("model.embed_tokens.weight")), "model.embed_tokens.weight")
    refused(with_weights(toy("tied"), lambda w: w.update({"lm_head.weight": torch.zeros(97, 64)})), "lm_head", "97")


@pytest.mark.parametrize("row", [0, 40, 94])
def test_a_stored_head_that_differs_is_used(row):
    """Though the config calls it tied, and on whichever rank the one row lies that differs (95 rows, 3 ranks' worth
    of them equal): what transformers makes of the same folder."""
    def change(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["lm_head.weight"][row] *= -1
    folder, tied = make_toy(vocab_size=95, tie_word_embeddings=True), make_toy(vocab_size=95, tie_word_embeddings=True)
    folder, ids = with_weights(folder, change), [i % 95 for i in TEXT]
    want = hf_logits(folder, ids)
    assert (want - hf_logits(tied, ids)).abs().amax(0).nonzero().flatten().tolist() == [row]
    torch.testing.assert_close(logits_of(load_model(folder, torch.float32), ids), want, rtol=1e-4, atol=1e-4)
    for got in ThreadComm.run(4, lambda r, comm: logits_of(
            load_model(folder, torch.float32, tp_rank=r, tp_size=4, comm=comm), ids)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_rotary_caches_are_ignored():
    """Checkpoints of 2023 carry what is computed here, under several names; nothing else may be left over."""
    caches = {f"model.layers.0.self_attn.rotary_emb.{name}": torch.zeros(8)
              for name in ("inv_freq", "cos_cached", "sin_cached", "_cos_cached")}
    caches |= {"rotary_emb.inv_freq": torch.zeros(8), "model.rotary_pos_emb.inv_freq": torch.zeros(8, dtype=torch.int64)}
    check_logits(with_weights(toy(), lambda w: w.update(caches)), reference=toy())
    folder = sharded()
    index = index_of(folder)
    index["weight_map"]["model.rotary_emb.inv_freq"] = next(iter(index["weight_map"].values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_logits(folder, reference=toy())
    for name in ("model.rotary_emb_proj.weight", "model.layers.0.rotary_emb"):
        refused(with_weights(toy(), lambda w: w.update({name: torch.zeros(8)})), name, "1 tensor of ")
    refused(with_weights(toy(), lambda w: w.update(a=torch.zeros(1), b=torch.zeros(1))), "2 tensors of ", "first: a")


def test_bombs():
    """Refused at once, by the file's name and the limit: brackets in brackets, a header of terabytes, a billion layers."""
    start = time.monotonic()
    deep = b"[" * 200_000
    for content, words in ((header_file(deep), ("nested", str(sys.getrecursionlimit()))),
                           ((1 << 40).to_bytes(8, "little") + bytes(99), ("100,000,000", f"{1 << 40:,}"))):
        folder = copy_of(toy())
        (folder / "model.safetensors").write_bytes(content)
        refused(folder, "model.safetensors", *words)
    folder = copy_of(toy())
    (folder / "config.json").write_bytes(deep)
    refused(folder, "config.json", "recursion")
    for layers in (3, 10**9, 10**30):
        refused(copy_of(toy(), num_hidden_layers=layers), "config.json", f"= {layers}", "hold 21 tensors")
    with pytest.raises(CheckpointError, match="21 tensors"):                     # before anything counts parameters
        toys.make_engine(copy_of(toy(), num_hidden_layers=10**9))
    assert time.monotonic() - start < 5


def test_a_long_header_is_refused(monkeypatch):
    monkeypatch.setattr(checkpoint, "LONGEST_HEADER", 1000)
    refused(toy(), "model.safetensors", "limit: 1,000")


@pytest.mark.parametrize("intermediate, size, possible", [(90, 4, "1, 2"), (96, 3, "1, 2, 4"), (98, 4, "1, 2")])
def test_intermediate_size_that_does_not_divide(intermediate, size, possible):
    config = LlamaConfig.from_dict({**BASE, "model_type": "llama", "intermediate_size": intermediate})
    with pytest.raises(ValueError, match=f"size {size} .*intermediate size {intermediate}; possible: {possible}$"):
        config.check_tensor_parallel(size)


def test_what_is_fetched(monkeypatch):
    """Of a repository: what is read, and none of it twice. One without safetensors is told from one out of reach."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects
    read = ["config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
            "chat_template.jinja"]
    more = ["consolidated.safetensors", "consolidated.00.safetensors", "consolidated.safetensors.index.json", "model.bin",
            "original/params.json", "onnx/config.json", "fp16/model.safetensors", "README.md", "model.gguf", "x.pth"]
    bare = toys.new_folder()
    (bare / "config.json").write_text("{}")

    def download(repo, **patterns):
        assert list(filter_repo_objects(read + more, **patterns)) == read
        return str(bare if "bin" in repo else toy())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoint.find_checkpoint("owner/name") == toy()
    with pytest.raises(CheckpointError, match="owner/bin: no safetensors in this repository"):
        checkpoint.find_checkpoint("owner/bin")


def test_the_worked_example():
    """`python checkpoint.py`: the plan of rank 1 of 2, as its rows are in the file."""
    result = subprocess.run([sys.executable, "checkpoint.py"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and not result.stderr and len(result.stdout.splitlines()) == 10
    assert "rows 64:128      → qkv_proj.weight from 128" in result.stdout


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
