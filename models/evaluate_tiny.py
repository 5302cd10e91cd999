"""The examination of the tiny model: what models/README.md says about it, measured.

    python models/evaluate_tiny.py [--model models/tiny-llama3] [--only names positions stories facts long]

facts      every held-out wording of a serving question (serving_qa.held_out_questions): greedy answer, key words decide
stories    50 greedy stories: do they end by themselves, is every word a word, does no sentence come twice
positions  the loss of held-out text at positions 300-500 against that at 2,000-2,400
names      loss on held-out rows, and how many repeated names are predicted right
long       the running example: 2,050 tokens of prompt, 300 tokens beyond, words and sentences checked

Everything is greedy, in fp32, on the weights as they are shipped (bf16).  Answers come from a small batched loop over
the training forward with its own cache of keys and values, so this file needs the model class, not the engine.
"""

import argparse
import json
import random
import re
import sys
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import kernels  # noqa: E402
import tinytext  # noqa: E402
from checkpoint import load_model  # noqa: E402
from model import Llama  # noqa: E402
from serving_qa import FACTS, held_out_questions  # noqa: E402
from train_tiny import Rows, name_tokens, token_losses, validate  # noqa: E402

EXAM_SEED = "examination"        # no seed of the training


# ---------------------------------------------------------------- greedy text
def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@torch.inference_mode()
def generate(model: Llama, tokenizer: Tokenizer, prompt: str, max_tokens: int, ignore_eos: bool = False) -> tuple[str,
    bool, int]:
    """prompt, special tokens written out  →  (greedy text, did it end by itself, output tokens)."""
    config, eps = model.config, model.config.rms_norm_eps
    ids = encode(tokenizer, prompt)
    new, output = ids, []
    keys: list = [None] * config.num_hidden_layers                                    # each [Hkv, tokens so far, d]
    values = list(keys)
    while len(output) < max_tokens:
        past = len(ids) + len(output) - len(new)
        cos, sin = model.rope_cos_sin(torch.arange(past, past + len(new)))
        x, residual = model.embed(torch.tensor(new)), None                            # [T, D]
        for i, layer in enumerate(model.layers):
            x, residual = kernels.rms_norm(x, layer.input_layernorm.weight, eps, residual)
            qk, v = model.qkv(layer, x)
            q, k = kernels.apply_rope(qk, cos, sin).split((model.num_heads, model.num_kv_heads), dim=1)
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))                          # [heads, T, d]
            keys[i] = k if past == 0 else torch.cat((keys[i], k), 1)
            values[i] = v if past == 0 else torch.cat((values[i], v), 1)
            x = F.scaled_dot_product_attention(q[None], keys[i][None], values[i][None], is_causal=past == 0,
                                               enable_gqa=True)[0]   # [H, T, d]
            x = model.row_parallel(layer.o_proj, x.transpose(0, 1).flatten(1))        # [T, D]
            x, residual = kernels.rms_norm(x, layer.post_attention_layernorm.weight, eps, residual)
            x = model.row_parallel(layer.down_proj, kernels.silu_and_mul(F.linear(x, layer.gate_up_proj.weight)))
        last = kernels.rms_norm(x[-1:], model.norm.weight, eps, residual[-1:])[0]     # [1, D]
        token = model.logits(last).argmax().item()
        output.append(token)
        new = [token]
        if token in config.eos_token_ids and not ignore_eos:
            return tokenizer.decode(output[:-1]), True, len(output)
    return tokenizer.decode(output), False, len(output)


def ask(question: str, system: str | None = None) -> str:
    """The chat template, applied: a prompt that ends where the answer begins."""
    opening = tinytext.turn("system", system) if system else ""
    return tinytext.BOS + opening + tinytext.turn("user", question) + tinytext.turn("assistant",
        "").removesuffix(tinytext.EOT)


# ---------------------------------------------------------------- what counts as right
@lru_cache
def known_words() -> frozenset[str]:
    """Every word of 20,000 fresh training documents, lower case: a word outside is taken for broken."""
    rng = random.Random("words")
    text = " ".join(tinytext.document(rng) for _ in range(20_000))
    return frozenset(re.findall(r"[a-z]+", re.sub(r"<\|\w+\|>", " ", text).lower()))


def broken_words(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z]+", text.lower()) if word not in known_words() | {"system", "user",
        "assistant"}]


def repeated_sentences(text: str) -> list[str]:
    sentences = [part.strip(' "') for part in re.split(r"[.!?]+\"?\s+", text) if part.strip(' "')]
    return sorted({sentence for sentence in sentences if sentences.count(sentence) > 1})


# ---------------------------------------------------------------- the four parts
def examine_facts(model: Llama, tokenizer: Tokenizer, every: int = 1) -> dict:
    exact = right = 0
    questions, wrong = held_out_questions()[::every], []
    for fact, question in questions:
        answer, ended, _ = generate(model, tokenizer, ask(question), 450)
        good = ended and fact.is_stated_in(answer)
        right += good
        exact += answer.strip() == fact.answer
        if not good:
            wrong.append((fact.id, question, answer))
    for fact_id, question, answer in wrong:
        print(f"  wrong  [{fact_id}] {question}\n         {answer[:160]!r}")
    return {"held-out questions": len(questions), "facts": len(FACTS), "right (key words)": right / len(questions),
            "the taught wording": exact / len(questions)}


def story_prompts(count: int = 50) -> list[str]:
    """Different requests, three of four in the chat format, the rest a bare beginning of a story."""
    rng, prompts = random.Random(EXAM_SEED), []
    while len(prompts) < count:
        if len(prompts) % 4 == 3:
            opening = tinytext.make_story(rng)[0].split(".")[0] + "."
            prompt = tinytext.BOS + opening
        else:
            prompt = ask(tinytext.story_request(rng)[0])
        if prompt not in prompts:
            prompts.append(prompt)
    return prompts


def examine_stories(model: Llama, tokenizer: Tokenizer, count: int = 50, show: int = 0) -> dict:
    good = ended_ = whole = once = tokens = 0
    for i, prompt in enumerate(story_prompts(count)):
        text, ended, n = generate(model, tokenizer, prompt, 260)
        broken, twice = broken_words(text), repeated_sentences(text)
        ended_, whole, once, tokens = ended_ + ended, whole + (not broken), once + (not twice), tokens + n
        good += ended and not broken and not twice
        if i < show or not ended or broken or twice:
            print(f"  story {i}: ended {ended}, broken {broken}, twice {twice}\n{prompt} -> {text}\n")
    return {"stories": count, "good in all three": good / count, "end by themselves": ended_ / count,
            "no broken word": whole / count,
            "no sentence twice": once / count, "mean tokens": tokens / count}


@torch.no_grad()
def examine_positions(model: Llama, tokenizer: Tokenizer, rows: int = 40) -> dict:
    """The same 150 tokens of a held-out chat, read early (positions 300-500) and late (2,000-2,400).

    Only what stands before them changes, so the comparison is not blurred by one text being harder than another.  That
    is a system prompt of many short pieces, or a chat so far, or (never in serving) other documents in the row."""
    figures = {}
    for kind in ("after a system prompt", "after a chat", "after other documents"):
        rng, losses = random.Random(f"{EXAM_SEED} {kind}"), []
        opening, more, closing = {
            "after a system prompt": (tinytext.BOS + tinytext.turn("system", "").removesuffix(tinytext.EOT),
                                      lambda: tinytext.piece(rng) + "\n\n", tinytext.EOT),
            "after a chat": (tinytext.BOS, lambda: tinytext.chat(rng, 0.5), ""),
            "after other documents": ("", lambda: tinytext.document(rng), tinytext.BOS)}[kind]
        for _ in range(rows):
            probe, text = [], opening
            while len(probe) < 150:
                probe += encode(tokenizer, tinytext.chat(rng, 0.5))
            for start in (300, 2000, 2200):
                while len(encode(tokenizer, text)) < start:
                    text += more()
                prefix = encode(tokenizer, text + closing)
                row = torch.tensor([prefix + probe[:150]])
                losses.append(token_losses(model, row)[0][0, len(prefix) - 1:].mean().item())
        near = sum(losses[0::3]) / rows
        far = (sum(losses[1::3]) + sum(losses[2::3])) / (2 * rows)
        figures[kind] = {"300-500": near, "2000-2400": far, "far / near": far / near}
    return figures


def examine_long(model: Llama, tokenizer: Tokenizer) -> dict:
    example = json.loads((HERE / "running_example.json").read_text(encoding="utf-8"))
    prompt = ask(example["question"], example["system"])
    text, _, n = generate(model, tokenizer, prompt, 300, ignore_eos=True)
    print(f"{text}\n")
    return {"prompt tokens": len(encode(tokenizer, prompt)), "output tokens": n,
            "broken words": broken_words(text), "sentences twice": repeated_sentences(text)}


def main() -> None:
    parser = argparse.ArgumentParser(description="examine the tiny model")
    parser.add_argument("--model", type=Path, default=HERE / "tiny-llama3")
    parser.add_argument("--only", nargs="*", default=["names", "positions", "stories", "facts", "long"])
    parser.add_argument("--every", type=int, default=1, help="ask only every n-th held-out question")
    parser.add_argument("--show", type=int, default=0, help="print that many stories, good ones too")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = load_model(args.model, torch.float32)
    if "names" in args.only:
        rows = Rows(tokenizer, EXAM_SEED + " names")
        loss, copied = validate(model, [rows.batch(8, 512) for _ in range(6)], name_tokens(tokenizer))
        print(f"names: loss {loss:.4f} nats a token, repeated names right {copied:.1%}")
    parts = {"positions": lambda: examine_positions(model, tokenizer), "stories": lambda: examine_stories(model,
        tokenizer, show=args.show),
             "facts": lambda: examine_facts(model, tokenizer, args.every), "long": lambda: examine_long(model,
                 tokenizer)}
    for name, part in parts.items():
        if name in args.only:
            figures = part()
            print(f"{name}: " + json.dumps(figures, default=str), flush=True)


if __name__ == "__main__":
    main()
