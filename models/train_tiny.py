"""Make models/tiny-llama3 from nothing: text, tokenizer, training, checkpoint, loss log.  One command:

    python models/train_tiny.py                     about TOKENS tokens; the minutes are in models/README.md

Everything is seeded.  The text comes from tinytext.py as it is needed, so no document is seen twice; the model is the
engine's own `model.Llama`, walked here row by row with ordinary causal attention instead of the paged cache.
An interrupted run goes on with --resume, to the same weights.  Left out: data parallelism and mixed precision.

Reading order: `train_tokenizer`, `Rows`, `hidden_states`, `Muon`, `main`.
"""

import argparse
import json
import math
import random
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import kernels  # noqa: E402
import tinytext  # noqa: E402
from checkpoint import LlamaConfig, load_model, weight_plan  # noqa: E402
from model import Llama  # noqa: E402

TOKENS = 7_200_000               # the budget: tokens, not minutes, so that a slow machine makes the same model
LENGTH, LONG_LENGTH = 320, 4096   # tokens a row: about two documents, or one long system prompt and a chat
# The curriculum.  From so many tokens on: short rows a step, one long row every so many steps, the share of copying
# exercises among the short documents, a factor of the learning rate.  First the templates; then long rows; then, since
# copying does not come by itself soon enough, exercises in it, with quieter steps (more rows, a lower rate).
CURRICULUM = (
    (0, 6, None, 0.0, 1.0),
    (2_000_000, 6, 12, 0.0, 1.0),
    (2_752_000, 6, 12, 0.2, 1.0),
    (3_382_000, 12, 6, 0.2, 0.6),
    (3_965_000, 12, 6, 0.8, 0.6),
    (4_500_000, 12, 6, 0.15, 0.6),
    (4_935_000, 12, 6, 0.5, 0.6),
    (6_000_000, 12, 6, 0.15, 0.6),
)
# Then a short second descent on rows that hold the longest answer whole; in the short ones its end was always cut off.
POLISH_STEPS, POLISH_LENGTH, POLISH_RATE = 120, 480, 6e-4
VALIDATION = (8, 512), 2          # rows, and how many batches of them are held out for the loss log
LEARNING_RATE = 4e-3
WARM_UP_STEPS = 100
DECAY_FROM = 0.45                # constant until this share of the budget, then linear to zero
SEED = 20

VOCAB_SIZE = 2048
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
RESERVED = "<|reserved_special_token_{}|>"
SPECIAL_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", RESERVED.format(0), RESERVED.format(1),
                  "<|finetune_right_pad_id|>",
                  RESERVED.format(2), "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
                  "<|python_tag|>"] + [RESERVED.format(i) for i in range(3, 8)]
CHAT_TEMPLATE = ("{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
                 "'<|end_header_id|>\n\n'"
                 " + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
                 "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif "
                 "%}")


# ---------------------------------------------------------------- 1. the tokenizer
def train_tokenizer(documents: int = 12_000) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE entries, Llama-3's way: its split pattern, its special tokens, BOS in front."""
    rng = random.Random(f"tokenizer {SEED}")
    texts = (part for _ in range(documents) for part in re.split(r"<\|\w+\|>", tinytext.document(rng)) if part)
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False,
                                                           use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    # Should the text give fewer merges than there is room for, reserved tokens fill it: the matrices keep their size.
    missing = VOCAB_SIZE - len(SPECIAL_TOKENS) - tokenizer.get_vocab_size()
    special = SPECIAL_TOKENS + [RESERVED.format(i) for i in range(8, 8 + missing)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos,
            tokenizer.token_to_id(bos))])])
    return tokenizer


def config_json(tokenizer: Tokenizer) -> dict:
    """The shape of the 70B in miniature: 16 query heads over 8 KV heads, so TP=8 gives each rank one KV head."""
    ids = tokenizer.token_to_id
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 16,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": 500000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "dtype": "bfloat16",
        "bos_token_id": ids("<|begin_of_text|>"), "eos_token_id": [ids("<|end_of_text|>"), ids("<|eot_id|>")],
        "pad_token_id": ids("<|finetune_right_pad_id|>")}


def save_checkpoint(folder: Path, model: Llama, tokenizer: Tokenizer, config: dict, log: list[dict]) -> None:
    """Write the ordinary Hugging Face layout.  The weight plan that the loader follows is followed backwards here."""
    folder.mkdir(parents=True, exist_ok=True)
    params = dict(model.named_parameters())
    tensors = {p.name: params[p.param].detach().narrow(p.dim, p.offset,
        p.stop - p.start).to(torch.bfloat16).contiguous()
               for p in weight_plan(model.config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>",
                        "eos_token": "<|eot_id|>",
                        "pad_token": "<|finetune_right_pad_id|>", "model_max_length": config["max_position_embeddings"],
                        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    files = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": tokenizer_config}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    rows = ",\n".join(json.dumps(entry) for entry in log)
    (folder / "loss_log.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


# ---------------------------------------------------------------- 2. rows of tokens
class Rows:
    """An endless, seeded supply of rows; each starts with <|begin_of_text|>; the last document may be cut."""

    def __init__(self, tokenizer: Tokenizer, seed: str):
        self.tokenizer, self.rng, self.exercises = tokenizer, random.Random(seed), 0.0

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def row(self, length: int) -> list[int]:
        ids = self.encode(tinytext.long_document(self.rng, min_chars=5 * length)) if length > 1024 else []
        while len(ids) < length:
            ids += self.encode(tinytext.document(self.rng, self.exercises))
        return ids[:length]

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """[rows, length] int64"""
        return torch.tensor([self.row(length) for _ in range(rows)])


# ---------------------------------------------------------------- 3. the model, walked for training
def hidden_states(model: Llama, ids: torch.Tensor) -> torch.Tensor:
    """ids [N, L]  →  the last layer's normed output [N * L, D].  The layers are the engine's, attention is F's: in
    training all positions of a row are there at once, so there is nothing to cache.  Rows do not see each other."""
    N, L = ids.shape
    eps = model.config.rms_norm_eps
    cos, sin = (table.repeat(N, 1) for table in model.rope_cos_sin(torch.arange(L)))          # [N*L, d] each
    x, residual = model.embed(ids.flatten()), None                                            # [N*L, D]
    for layer in model.layers:
        x, residual = kernels.rms_norm(x, layer.input_layernorm.weight, eps, residual)
        qk, v = model.qkv(layer, x)                                                           # [N*L, H + Hkv, d], …
        q, k = kernels.apply_rope(qk, cos, sin).split((model.num_heads, model.num_kv_heads), dim=1)
        q, k, v = (t.unflatten(0, (N, L)).transpose(1, 2) for t in (q, k, v))                 # [N, heads, L, d]
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)          # [N, H, L, d]
        x = model.row_parallel(layer.o_proj, x.transpose(1, 2).reshape(N * L, -1))            # [N*L, D]
        x, residual = kernels.rms_norm(x, layer.post_attention_layernorm.weight, eps, residual)
        gate_up = F.linear(x, layer.gate_up_proj.weight)                                      # [N*L, 2I]
        x = model.row_parallel(layer.down_proj, kernels.silu_and_mul(gate_up))                # [N*L, D]
    return kernels.rms_norm(x, model.norm.weight, eps, residual)[0]


def token_losses(model: Llama, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [N, L]  →  cross entropy in nats, and whether the likeliest token was right: [N, L-1], entry p on p + 1."""
    logits = model.logits(hidden_states(model, ids)).unflatten(0, ids.shape)[:, :-1]          # [N, L-1, V]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return losses, logits.argmax(-1) == ids[:, 1:]


def initialise(model: Llama, seed: int) -> None:
    """Normal weights of 0.02; those that write to the residual stream smaller, by the square root of their number."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in sorted(model.named_parameters()):
        if param.ndim == 1:
            param.data.fill_(1.0)
        else:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * model.config.num_hidden_layers) if writes else 0.02
            param.data.normal_(0.0, std, generator=generator)
        param.requires_grad_(True)


class Muon:
    """Momentum whose update is made orthogonal: every direction of a matrix moves equally far (Jordan et al., 2024).

    `parts` are views of the weight matrices: each of the checkpoint's own matrices counts by itself, so the query, key
    and value rows of one fused matrix are three updates.
    """

    def __init__(self, parts: list[tuple[torch.nn.Parameter, int, int]], momentum=0.95, weight_decay=0.1):
        self.momentum, self.weight_decay = momentum, weight_decay
        self.parts = [(param, start, stop, torch.zeros_like(param.data[start:stop])) for param, start, stop in parts]

    def averages(self) -> list[torch.Tensor]:
        return [average for *_, average in self.parts]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        by_shape: dict[tuple, list] = {}
        for param, start, stop, average in self.parts:
            grad = param.grad[start:stop]
            average.lerp_(grad, 1 - self.momentum)
            update = grad.lerp(average, self.momentum)
            wide = update.T if update.shape[0] > update.shape[1] else update                  # rows <= columns
            by_shape.setdefault(wide.shape, []).append((param.data[start:stop], wide))
        for shape, group in by_shape.items():
            x = torch.stack([wide for _,
                             wide in group])                                      # [matrices, rows, columns]
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):         # Newton-Schulz: a polynomial of x that drives all its singular values towards 1
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            for (weight, _), update in zip(group, x):
                weight.mul_(1 - lr * self.weight_decay)
                weight.sub_(update if update.shape == weight.shape else update.T,
                            alpha=lr * 0.2 * math.sqrt(max(shape)))


def make_optimisers(model: Llama) -> tuple[Muon, torch.optim.Optimizer]:
    params = dict(model.named_parameters())
    matrices = [p for p in weight_plan(model.config) if len(p.shape) == 2 and p.param != "embed_tokens.weight"]
    others = [p for name, p in params.items() if p.ndim == 1 or name == "embed_tokens.weight"]
    return (Muon([(params[p.param], p.offset, p.offset + p.shape[0]) for p in matrices]),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True))


def take_step(model: Llama, ids: torch.Tensor, muon: Muon, adam: torch.optim.Optimizer, lr: float) -> float:
    """One step on ids [N, L]  →  its loss."""
    loss = token_losses(model, ids)[0].mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    muon.step(lr)
    adam.param_groups[0]["lr"] = lr
    adam.step()
    model.zero_grad(set_to_none=True)
    return loss.item()


def learning_rate(progress: float, step: int, factor: float) -> float:
    """Warm up, hold, fall in a straight line to zero.  progress: the share of the token budget that is spent."""
    return LEARNING_RATE * factor * min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (1 - progress) / (1 - DECAY_FROM))


# ---------------------------------------------------------------- 4. what the log says
def name_tokens(tokenizer: Tokenizer) -> torch.Tensor:
    """[V] bool: the tokens that are a hero's whole name, with a space in front or without."""
    mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    for name in tinytext.SHE + tinytext.HE:
        for text in (name, " " + name):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == 1:
                mask[ids[0]] = True
    return mask


@torch.no_grad()
def validate(model: Llama, batches: list[torch.Tensor], names: torch.Tensor) -> tuple[float, float]:
    """Loss in nats a token, and the share of name tokens predicted right where the same token stood earlier in the row.

    The second figure is the one to watch: names are learned late, and suddenly, when the model has learned to copy."""
    losses, right, total = [], 0, 0
    for ids in batches:
        loss, hit = token_losses(model, ids)
        losses.append(loss.mean().item())
        for row, hits in zip(ids.tolist(), hit.tolist()):
            seen = set()
            for token, correct in zip(row[1:], hits):
                if names[token]:
                    total, right = total + (token in seen), right + (token in seen and correct)
                    seen.add(token)
                elif token == row[0]:              # a new document: names from before do not count
                    seen.clear()
    return sum(losses) / len(losses), right / max(total, 1)


# ---------------------------------------------------------------- 5. training
def polish(folder: Path, tokenizer: Tokenizer) -> None:
    """The second descent.  It starts from the saved (bf16) checkpoint, with averages and text of its own."""
    model = load_model(folder, torch.float32).requires_grad_(True)
    muon, adam = make_optimisers(model)
    rows, held_out = Rows(tokenizer, f"polish {SEED}"), Rows(tokenizer, f"validation {SEED}")
    running, tokens, started = None, 0, time.monotonic()
    for step in range(POLISH_STEPS):
        ids = rows.batch(1, LONG_LENGTH) if step % 6 == 0 else rows.batch(8, POLISH_LENGTH)
        loss = take_step(model, ids, muon, adam, POLISH_RATE * min(1, (step + 1) / 10) * (1 - step / POLISH_STEPS))
        running = loss if running is None else 0.95 * running + 0.05 * loss
        tokens += ids.numel()
    validation = [held_out.batch(*VALIDATION[0]) for _ in range(VALIDATION[1])]
    val, copied = validate(model, validation, name_tokens(tokenizer))
    log = json.loads((folder / "loss_log.json").read_text(encoding="utf-8"))
    log.append({"step": log[-1]["step"] + POLISH_STEPS, "tokens": log[-1]["tokens"] + tokens,
                "minutes": round(log[-1]["minutes"] + (time.monotonic() - started) / 60, 1),
                "train_loss": round(running, 4), "val_loss": round(val, 4), "names_copied": round(copied, 4)})
    print(f"polished: {tokens:,} tokens  train {running:.3f}  val {val:.4f}  names copied {copied:.1%}", flush=True)
    save_checkpoint(folder, model, tokenizer, config_json(tokenizer), log)


def main() -> None:
    parser = argparse.ArgumentParser(description="train the tiny Llama-3 from nothing")
    parser.add_argument("--out", type=Path, default=HERE / "tiny-llama3")
    parser.add_argument("--tokens", type=int, default=TOKENS,
                        help="the budget; the learning rate falls to zero at its end")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true",
                        help="go on from the training state that an interrupted run left in --out")
    parser.add_argument("--log-every", type=int, default=200,
                        help="steps between two lines of the log; the checkpoint is saved then, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    tokenizer = train_tokenizer()
    config = config_json(tokenizer)
    model = Llama(LlamaConfig.from_dict(config))
    initialise(model, SEED)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {tokenizer.get_vocab_size():,}",
          flush=True)

    muon, adam = make_optimisers(model)

    short, long = Rows(tokenizer, f"short {SEED}"), Rows(tokenizer, f"long {SEED}")
    held_out = Rows(tokenizer, f"validation {SEED}")
    validation, names = [held_out.batch(*VALIDATION[0]) for _ in range(VALIDATION[1])], name_tokens(tokenizer)
    log, running, step, seen, started = [], None, 0, 0, time.monotonic()
    state_file = args.out / "training_state.pt"
    if args.resume:
        state = torch.load(state_file, weights_only=False)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        for average, saved in zip(muon.averages(), state["muon"]):
            average.copy_(saved)
        short.rng, long.rng = state["rngs"]
        log, running = state["log"], state["running"]
        step, seen = log[-1]["step"], log[-1]["tokens"]
        started -= 60 * log[-1]["minutes"]
    while seen < args.tokens:
        _, rows, long_every, short.exercises, factor = max(stage for stage in CURRICULUM if stage[0] <= seen)
        is_long = long_every is not None and step % long_every == 0
        ids = long.batch(1, LONG_LENGTH) if is_long else short.batch(rows, LENGTH)            # [1, 4096] or [rows, 320]
        lr = learning_rate(seen / args.tokens, step, factor)
        loss = take_step(model, ids, muon, adam, lr)
        running = loss if running is None else 0.95 * running + 0.05 * loss
        step, seen = step + 1, seen + ids.numel()
        if step % args.log_every == 0 or seen >= args.tokens:
            val, copied = validate(model, validation, names)
            minutes = (time.monotonic() - started) / 60
            log.append({"step": step, "tokens": seen, "minutes": round(minutes, 1), "train_loss": round(running, 4),
                        "val_loss": round(val, 4), "names_copied": round(copied, 4)})
            print(f"step {step}  {seen / 1e6:.2f} M tokens  {minutes:.1f} min  {seen / minutes / 60:.0f} tokens/s  "
                  f"lr {lr:.1e}  train {running:.3f}  val {val:.4f}  names copied {copied:.1%}", flush=True)
            save_checkpoint(args.out, model, tokenizer, config, log)
            torch.save({"model": model.state_dict(), "adam": adam.state_dict(), "muon": muon.averages(),
                        "rngs": (short.rng, long.rng), "log": log, "running": running}, state_file)
    state_file.unlink()
    polish(args.out, tokenizer)


if __name__ == "__main__":
    main()
