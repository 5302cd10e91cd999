"""From a folder to weights (chapters 8 and 10): what the checkpoint says it is, which piece goes where, the loader.

Mirrors   vLLM: model_executor/layers/linear.py:419 ColumnParallelLinear,
          vLLM: model_executor/models/llama.py:441 LlamaModel.load_weights
Promises  every dense checkpoint of the families in FAMILIES: Llama 1 to 3.2, TinyLlama, SmolLM2, Mistral without a
          sliding window. What isn't known is refused by name, before any weight is read.
Leaves out quantised weights, pipeline parallelism, other architectures.
Order     1 LlamaConfig: the fields of config.json.  2 weight_plan: which piece of which tensor goes where, on which
          rank; loader, checks and shard report follow that one list (`python checkpoint.py` shows it).  3 load_model.

Tensor parallel (TP, 张量并行): rank r of `size` holds a slice of every matrix. QKV and gate+up are cut by output (column
parallel), O and down by input (row parallel), so a layer needs just two all-reduces: after O and after down.
"""
import json
import math
import re
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model import Llama

# A family: the classes it goes by, and what its config means by a field that isn't there, as in transformers' class for
# it (LlamaConfig, MistralConfig): that isn't the same in each. Another family is another row.
LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None,
         "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": None, "eos_token_id": 2}
SIZES, FAMILIES = tuple(LLAMA)[:6], {
    "llama": (("LlamaForCausalLM", "LLaMAForCausalLM"), LLAMA),
    "mistral": (("MistralForCausalLM",), {**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8,
                                          "max_position_embeddings": 131072, "sliding_window": 4096})}

# Fields that from_dict reads. Any other is either bookkeeping (use_cache, unsloth_fixed, auto_map: checkpoints carry
# dozens, and new ones every year) or a change of the computation (Granite's residual_multiplier, Gemma's softcapping).
# No list can hold all of either, but the second kind says in its name what it does, so names with such a word in them
# are refused, unless the value switches the thing off. HARMLESS: training's, or how a result is computed, not which.
READ = {*LLAMA, "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_scaling", "rope_parameters"}
COMPUTES = re.compile("multiplier|scal(e|ing)|softcap|clip|window|rope|rotary|alibi|attn|attention|bias|residual|"
                      "expert|moe|qk_|norm_type|layernorm|causal|quant|compress|lora|adapter")
HARMLESS = re.compile("^_|dropout|implementation|flash|output_attentions|original_max_position_embeddings")
OFF = (None, False, 0, 1, "", [], {})            # 1: a multiplier that changes nothing
NEUTRAL = {"hidden_act": ("silu",), "layer_types": ("full_attention", None, []), "is_causal": (None, True),
           "attention_multiplier": (None,), "query_pre_attn_scalar": (None,)}

# vLLM: config/model.py:2174 _get_and_verify_dtype
DTYPES = {"float32": torch.float32, "float": torch.float32, "float16": torch.float16, "half": torch.float16,
          "bfloat16": torch.bfloat16}


def parse_dtype(value, name="--dtype"):
    """The torch.dtype that a spelling of vLLM's or a torch.dtype means; None for "auto". Raises CheckpointError."""
    known = DTYPES.get(value.lower()) if isinstance(value, str) else value
    if known not in DTYPES.values() and not (isinstance(value, str) and value.lower() == "auto"):
        raise CheckpointError(f"{name} = {value!r} is not one of auto, {', '.join(DTYPES)}")
    return known


# -- 1. The configuration ---------------------------------------------------------------------------------------------

class CheckpointError(ValueError):
    """The folder can't be served; the message names the file, the tensor or the field, and what would be right."""


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of config.json that change what is computed, under Hugging Face's names.

    Two spellings exist: the old one (`rope_theta` beside `rope_scaling`, `torch_dtype`) and that of transformers 5 (all
    of RoPE in `rope_parameters`, `dtype`). Either is read; where a file has both, they must agree."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None           # None, or the `llama3` block
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: frozenset = frozenset()

    @classmethod
    def from_folder(cls, folder):
        """Read config.json, and generation_config.json's EOS ids where there are any: the instruct models of Llama-3
        name <|eot_id|> only there, and run on past it if that file is not read. Raises CheckpointError."""
        folder = Path(folder)
        file, generation = folder / "config.json", folder / "generation_config.json"
        if not file.is_file():
            hint = " (a Meta-format checkpoint: use the Hugging Face one)" if (folder / "params.json").exists() else ""
            raise CheckpointError(f"{folder} holds no config.json, so it is no checkpoint folder{hint}")
        more_eos = _id_set(read_json(generation).get("eos_token_id") if generation.is_file() else None)
        try:
            config = cls.from_dict(read_json(file), more_eos)
        except (TypeError, AttributeError, OverflowError) as error:      # a list where a number belongs, and the like
            raise CheckpointError(f"{file} has a field of an impossible type: {error}") from None
        # Here, since a plan of a billion layers would be an hour's work before the first of them is missed.
        has_weights = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
        if has_weights and config.num_hidden_layers * 9 > (held := len(checkpoint_tensors(folder))):
            raise CheckpointError(f"{file}: num_hidden_layers = {config.num_hidden_layers}, of nine tensors or more, "
                                  f"but the weight files hold {held} tensor{'s'[:held != 1]}")
        return config

    @classmethod
    def from_dict(cls, raw, more_eos=frozenset()):
        """raw: the content of a config.json; more_eos: ids that end a sequence besides the config's own."""
        default = _family(raw)
        _refuse_what_is_not_known(raw)
        get = lambda key: raw.get(key, default[key])     # a field that is there and null is not one that is missing
        theta, rope = _rope(raw, default["rope_theta"])
        size = {key: _positive(key, get(key), int) for key in SIZES}
        H = size["num_attention_heads"]
        Hkv = size["num_key_value_heads"] = _positive("num_key_value_heads", get("num_key_value_heads") or H, int)
        d = size["head_dim"] = _positive("head_dim", get("head_dim") or size["hidden_size"] // H, int)
        if H % Hkv or d % 2:
            raise CheckpointError(f"config.json: {H} query heads, {Hkv} KV heads of size {d}: no multiple, or not even")
        window = get("sliding_window")
        if window is not None and _positive("sliding_window", window, int) < size["max_position_embeddings"]:
            raise CheckpointError(f"config.json: sliding_window = {window} (the default, where the field is missing) "
                                  "is not supported: only null, or max_position_embeddings and more")
        dtypes = (raw.get(key) and parse_dtype(raw[key], "config.json: dtype") for key in ("dtype", "torch_dtype"))
        dtype = _agree("dtype", *dtypes, torch.float32)
        eos = _id_set(raw.get("eos_token_id", None if more_eos else default["eos_token_id"])) | more_eos
        flags = {key: bool(raw.get(key, False)) for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")}
        return cls(**size, **flags, dtype=str(dtype).removeprefix("torch."), rope_scaling=rope,
                   rope_theta=_positive("rope_theta", theta),
                   rms_norm_eps=_positive("rms_norm_eps", get("rms_norm_eps")),
                   eos_token_ids=frozenset(i for i in eos if 0 <= i < size["vocab_size"]))   # others can't be met

    def padded_vocab(self, size):
        """The vocabulary rounded up to a multiple of `size` ranks; the padding's logits are cut off before sampling."""
        return -(-self.vocab_size // size) * size

    def vocab_rows(self, rank, size):
        """The range of the vocabulary's rows that rank `rank` of `size` holds; the last ranks' may be shorter."""
        return range(self.vocab_size)[(rows := self.padded_vocab(size) // size) * rank:rows * (rank + 1)]

    def check_tensor_parallel(self, size):
        """Raise ValueError unless the model can be cut into `size` ranks, naming the sizes that would work."""
        H, Hkv, I = self.num_attention_heads, self.num_key_value_heads, self.intermediate_size
        fits = lambda n: H % n == 0 and I % n == 0 and (Hkv % n == 0 or n % Hkv == 0)   # n > Hkv: n / Hkv ranks a head
        if size < 1 or not fits(size):
            possible = ", ".join(str(n) for n in range(1, H + 1) if fits(n))
            raise ValueError(f"--tensor-parallel-size {size} doesn't divide this model's {H} query heads, "
                             f"{Hkv} KV heads and intermediate size {I}; possible: {possible}")


def _family(raw):
    """The defaults of the family that a config belongs to. model_type tells, as in transformers; where it is missing,
    the class does. Both are checked: what calls itself granite is no Llama, whatever its tensors' names."""
    by_class = {name: family for family, (names, _) in FAMILIES.items() for name in names}
    names, family = raw.get("architectures") or [], raw.get("model_type")
    for name in names if isinstance(names, list) else [names]:
        if name not in by_class:
            raise CheckpointError(f"architecture {name!r} is not supported; supported: {', '.join(by_class)}")
        family = _agree("its family (model_type, architectures)", family, by_class[name])
    if family not in FAMILIES:
        raise CheckpointError(f"config.json: model_type {family!r} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[family][1]


def _refuse_what_is_not_known(raw):
    """Refuse by name each field that would change what is computed, and isn't read here: see COMPUTES."""
    for key, value in raw.items():
        value = value[0] if key == "layer_types" and value and value == value[:1] * len(value) else value
        off = value in NEUTRAL[key] if key in NEUTRAL else value in OFF and value is not True            # True == 1
        computes = COMPUTES.search(key.lower()) and not HARMLESS.search(key.lower()) and key not in READ
        if (computes or key in NEUTRAL) and not off:
            raise CheckpointError(f"config.json: {key} = {value!r:.80} is not supported: it changes what is computed")


def _rope(raw, default_theta):
    """rope_theta, and the fields of the llama3 scaling or None, from whichever spelling the config has."""
    new, old = (raw.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    rope = {key: _agree(key, new.get(key), old.get(key)) for key in {**new, **old}}
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"config.json: rope_parameters a layer type ({', '.join(rope)}) are not supported")
    theta = _agree("rope_theta", raw.get("rope_theta"), rope.pop("rope_theta", None), default_theta)
    rope_type = _agree("rope_type", rope.pop("rope_type", None), rope.pop("type", None), "default")
    if rope_type not in ("default", "llama3"):
        raise CheckpointError(f"rope type {rope_type!r} is not supported; supported: default, llama3")
    _refuse_what_is_not_known({key: rope[key] for key in rope if key == "partial_rotary_factor"})
    if rope_type == "default":
        return theta, None
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        rope[key] = _positive(f"rope type llama3: {key}", rope.get(key))
    if rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise CheckpointError("config.json: rope type llama3: low_freq_factor {low_freq_factor} must be below "
                              "high_freq_factor {high_freq_factor}".format(**rope))
    return theta, rope


def _agree(key, a, b, default=None):
    """The value of a field that a config may spell in two places."""
    if a is not None and b is not None and a != b:
        raise CheckpointError(f"config.json gives {key} twice, as {a!r} and as {b!r}")
    return a if a is not None else b if b is not None else default


def _positive(key, value, kind=(int, float)):
    """A field's value, if it is a finite number above 0: NaN in a config makes fluent nonsense, not an error."""
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
        what = "whole number" if kind is int else "number"
        raise CheckpointError(f"config.json: {key} = {value!r}; a positive {what} is needed")
    return value


def _id_set(value):
    """eos_token_id as a set: it may be missing, one id, or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"eos_token_id = {value!r}; a token id or a list of token ids is needed")
    return frozenset(ids)


def read_json(path):
    try:
        if isinstance(content := json.loads(Path(path).read_text(encoding="utf-8")), dict):
            return content
        raise ValueError(f"not an object, but {content!r:.40}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from None


# -- 2. The weight plan -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Piece:
    """One cut: rows (dim 0) or columns (dim 1) start:stop of the checkpoint's tensor `name`, whose whole shape is
    `shape`, become the rows or columns from `offset` on of the model's parameter `param`.

    Example (4 query heads, 2 KV heads, head size 16, hidden 64; rank 1 of 2): the rank's QKV matrix [64, 64] is made of
    q_proj rows 32:64 at offset 0, k_proj rows 16:32 at 32, v_proj rows 16:32 at 48."""
    param: str
    name: str
    shape: tuple
    dim: int
    start: int
    stop: int
    offset: int


def weight_plan(config, rank=0, size=1):
    """Every piece that rank `rank` of `size` needs, layer by layer. KV heads are replicated as in vLLM, where a layer
    class has a weight_loader instead of this list.  vLLM: model_executor/layers/linear.py:1022 QKVParallelLinear"""
    c, D, I, d = config, config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = c.num_attention_heads * d, c.num_key_value_heads * d
    cut = lambda n: (n * rank // size, n * (rank + 1) // size)
    # More ranks than KV heads: 2 heads over 8 ranks → ranks 0-3 hold head 0, ranks 4-7 head 1. Their query heads are
    # just those of that KV head, so nothing else changes.
    head = c.num_key_value_heads * rank // size
    kv = cut(kv_rows) if size <= c.num_key_value_heads else (d * head, d * (head + 1))
    vocab = c.vocab_rows(rank, size)
    plan = [Piece("embed_tokens.weight", "model.embed_tokens.weight", (c.vocab_size, D), 0, vocab.start, vocab.stop, 0)]

    def fused(param, base, parts, n_in, bias):
        """Output-cut matrices that are one parameter here: `parts` is [(checkpoint name, rows, (start, stop))]."""
        offset = 0
        for part, n_out, (start, stop) in parts:
            plan.append(Piece(param + ".weight", f"{base}.{part}.weight", (n_out, n_in), 0, start, stop, offset))
            if bias:
                plan.append(Piece(param + ".bias", f"{base}.{part}.bias", (n_out,), 0, start, stop, offset))
            offset += stop - start

    def input_cut(param, name, n_in, bias):
        plan.append(Piece(param + ".weight", name + ".weight", (D, n_in), 1, *cut(n_in), 0))
        if bias:                                                     # whole on every rank, added by rank 0 alone
            plan.append(Piece(param + ".bias", name + ".bias", (D,), 0, 0, D, 0))

    for i in range(c.num_hidden_layers):
        at, hf = f"layers.{i}", f"model.layers.{i}"
        plan.append(Piece(f"{at}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (D,), 0, 0, D, 0))
        qkv = [("q_proj", q_rows, cut(q_rows)), ("k_proj", kv_rows, kv), ("v_proj", kv_rows, kv)]
        fused(f"{at}.qkv_proj", f"{hf}.self_attn", qkv, D, c.attention_bias)
        input_cut(f"{at}.o_proj", f"{hf}.self_attn.o_proj", q_rows, c.attention_bias)
        norm = "post_attention_layernorm.weight"
        plan.append(Piece(f"{at}.{norm}", f"{hf}.{norm}", (D,), 0, 0, D, 0))
        fused(f"{at}.gate_up_proj", f"{hf}.mlp", [("gate_proj", I, cut(I)), ("up_proj", I, cut(I))], D, c.mlp_bias)
        input_cut(f"{at}.down_proj", f"{hf}.mlp.down_proj", I, c.mlp_bias)
    plan.append(Piece("norm.weight", "model.norm.weight", (D,), 0, 0, D, 0))
    if not c.tie_word_embeddings:
        plan.append(Piece("lm_head.weight", "lm_head.weight", (c.vocab_size, D), 0, vocab.start, vocab.stop, 0))
    return plan


def param_shapes(config, rank=0, size=1):
    """{parameter: its shape on this rank}, read off the plan: the last of a parameter's pieces ends where it does."""
    shapes = {}
    for p in weight_plan(config, rank, size):
        shape = list(p.shape)
        shape[p.dim] = p.offset + p.stop - p.start
        if p.param in ("embed_tokens.weight", "lm_head.weight"):
            shape[0] = config.padded_vocab(size) // size
        shapes[p.param] = tuple(shape)
    return shapes


# -- 3. Loading -------------------------------------------------------------------------------------------------------

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000                             # bytes, as in the safetensors library
ROTARY_CACHE = re.compile(r"(^|\.)rotary_(pos_)?emb\.[^.]+$")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def find_checkpoint(model):
    """A folder's path, or a hub id like "meta-llama/Llama-3.2-1B", looked up in (or fetched into) the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    if Path(model).exists() or str(model).count("/") != 1 or str(model)[0] in "./~":
        raise CheckpointError(f"{model} is no folder with a checkpoint, and no hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    try:    # nothing is read from subfolders, and consolidated*.safetensors are the same weights under Meta's names
        folder = Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                                        ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:          # offline, gated, misspelt: the hub has a class for each, the remedy is the same
        raise CheckpointError(f"{model} is neither a folder here nor to be had from the hub ({type(error).__name__}). "
                              f"With a connection: `hf download {model}`, then name it again") from error
    if any(folder.glob("*.safetensors")):
        return folder
    raise CheckpointError(f"{model}: no safetensors in this repository, and other weight files are not read")


def weight_files(folder):
    """(the file that says which tensors there are, {tensor name: file name} or None for all of it). One whole
    model.safetensors goes before an index, as in transformers."""
    index, single = Path(folder) / INDEX, Path(folder) / SINGLE
    if single.is_file():
        if index.is_file():
            warnings.warn(f"{folder} holds both {SINGLE} and {INDEX}: the single file is taken", stacklevel=2)
        return single, None
    if not index.is_file():
        found = sorted(p.name for p in index.parent.iterdir() if p.suffix in (".bin", ".pth", ".safetensors", ".gguf"))
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor its index (found: {', '.join(found) or 'none'})")
    wanted = read_json(index).get("weight_map")
    inside = lambda file: isinstance(file, str) and file == Path(file).name     # no path out of the folder
    if not wanted or not isinstance(wanted, dict) or not all(map(inside, wanted.values())):
        raise CheckpointError(f"{index} holds no weight_map that tells for each tensor a file of this folder")
    return index, wanted


def read_header(path):
    """{tensor name: (dtype, shape, where it ends in the file)}. A safetensors file opens with 8 bytes (the header's
    length), then JSON with each tensor's place; one that ends before its last tensor does was cut off in a download."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if length > min(size, LONGEST_HEADER):
            raise CheckpointError(f"{path} is not a safetensors file, or is truncated within its header: {length:,} "
                                  f"bytes in a file of {size:,} (limit: {LONGEST_HEADER:,})")
        try:
            return {name: (info["dtype"], tuple(info["shape"]), 8 + length + info["data_offsets"][1])
                    for name, info in json.loads(f.read(length)).items() if name != "__metadata__"}
        except (ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError) as error:
            deep = f": nested over the limit of {sys.getrecursionlimit()}" if isinstance(error, RecursionError) else ""
            raise CheckpointError(f"{path} is no safetensors file, or is truncated within its header{deep}") from None


def checkpoint_tensors(folder):
    """{tensor name: (file, shape)} of a checkpoint, from the index where that decides and the files' headers. Files
    and places that the index doesn't name are ignored, and so are rotary caches (inv_freq, cos_cached, ...): what is
    in them is computed here.  vLLM: model_executor/models/utils.py:173 AutoWeightsLoader"""
    source, wanted = weight_files(folder)
    tensors = {}
    for file in sorted(set(wanted.values())) if wanted else [source.name]:
        path = source.parent / file
        if not path.is_file():
            raise CheckpointError(f"{source} names {file}, which is missing")
        for name, (dtype, shape, end) in read_header(path).items():
            if wanted is not None and wanted.get(name) != file or ROTARY_CACHE.search(name):
                continue
            if end > path.stat().st_size:
                raise CheckpointError(f"{path} is truncated: tensor {name} ends beyond the end of the file")
            if dtype not in ("F32", "F16", "BF16", "F64"):
                raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}; only float weights are supported")
            tensors[name] = path, shape
    for name in wanted or ():
        if name not in tensors and not ROTARY_CACHE.search(name):
            raise CheckpointError(f"tensor {name} is missing from {wanted[name]}, where the index says it is")
    return tensors


def load_model(folder, dtype, device="cpu", tp_rank=0, tp_size=1, comm=None, attention_backend="auto"):
    """A Llama with its weights: each piece goes from the mapped file straight to its place, converted on the way, so
    that at most one tensor exists twice. Names and shapes are checked first. Raises CheckpointError naming the tensor.
    vLLM: model_executor/models/llama.py:441 LlamaModel.load_weights"""
    config, tensors = LlamaConfig.from_folder(folder), checkpoint_tensors(folder)
    config.check_tensor_parallel(tp_size)
    file = weight_files(folder)[0]
    try:
        if config.tie_word_embeddings and HEAD in tensors and EMBEDDING in tensors:
            # Tools save the tied head too. If it differs, the file is right and the config wrong, as in transformers.
            tied = _same_rows(tensors, config.vocab_rows(tp_rank, tp_size), dtype)
            config = replace(config, tie_word_embeddings=tied)
        plan = weight_plan(config, tp_rank, tp_size)
        if config.tie_word_embeddings and EMBEDDING not in tensors and HEAD in tensors:    # saved under the other name
            plan = [replace(p, name=HEAD) if p.name == EMBEDDING else p for p in plan]
        for p in plan:
            if p.name not in tensors:
                raise CheckpointError(f"tensor {p.name} {list(p.shape)} is missing from {file}")
            if (shape := tensors[p.name][1]) != p.shape:
                raise CheckpointError(f"tensor {p.name} is {list(shape)}; the config asks for {list(p.shape)}")
        if unused := set(tensors) - {p.name for p in plan} - ({HEAD} if config.tie_word_embeddings else set()):
            n = f"{len(unused)} tensor{'s'[:len(unused) > 1]}"
            raise CheckpointError(f"{n} of {folder} without a place in this model; first: {min(unused)}")
        model = Llama(config, dtype, device, tp_rank, tp_size, comm, attention_backend)
        params = dict(model.named_parameters())
        for file in sorted({path for path, _ in tensors.values()}):
            with safe_open(file, framework="pt") as f:
                for p in plan:
                    if tensors[p.name][0] == file:
                        rows = f.get_slice(p.name)[(slice(None),) * p.dim + (slice(p.start, p.stop),)]
                        params[p.param].narrow(p.dim, p.offset, p.stop - p.start).copy_(rows)
    except SafetensorError as error:                                                 # places that don't fit the shapes
        raise CheckpointError(f"{file} can't be read: {error}") from None
    return model


def _same_rows(tensors, rows, dtype, step=4096):
    """Whether the stored head is the embedding, in the rows that this rank holds: where they are equal, tied or not is
    the same, so ranks need not agree. Few rows at a time: neither is ever whole in memory."""
    with safe_open(tensors[HEAD][0], "pt") as f, safe_open(tensors[EMBEDDING][0], "pt") as g:
        cut = lambda file, name, i: file.get_slice(name)[i:min(i + step, rows.stop)].to(dtype)
        return tensors[HEAD][1] == tensors[EMBEDDING][1] and all(
            torch.equal(cut(f, HEAD, i), cut(g, EMBEDDING, i)) for i in rows[::step])


def auto_dtype(config, device):
    """`--dtype auto`: the file's own on a GPU. On a CPU fp32 up to 2 billion parameters: it is exact, and the faster
    one on CPUs without bf16 instructions; with them (avx512_bf16, ARM's bf16) `--dtype bfloat16` is faster. Larger
    models keep the file's dtype, for they would not fit."""
    small = sum(math.prod(shape) for shape in param_shapes(config).values()) <= 2e9
    return torch.float32 if device == "cpu" and small else DTYPES[config.dtype]


if __name__ == "__main__":       # Piece's example played with models/tiny-llama3: what rank 1 of 2 takes of a layer
    c = LlamaConfig.from_folder(Path(__file__).resolve().parent / "models" / "tiny-llama3")
    print(f"{c.num_attention_heads} query and {c.num_key_value_heads} KV heads, head size {c.head_dim}; rank 1 of 2:")
    for p in weight_plan(c, 1, 2):
        if p.param.startswith("layers.0."):
            cut = f"{'rows' if p.dim == 0 else 'columns'} {p.start}:{p.stop}"
            print(f"  {p.name[15:]:<32} {str(list(p.shape)):<11} {cut:<16} → {p.param[9:]} from {p.offset}")
