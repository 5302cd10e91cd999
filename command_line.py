"""The command line (chapter 3): `python nano_serve.py`. Questions in, answers out, each step on the record.

Promises  a line, a question or an option that is wrong costs only itself and is named; Ctrl-C keeps what is finished
          (exit code 130). Where stdout is no terminal, it is plain text, with what the model says byte for byte.
Order     1 The options.  2 Jobs: what is to be answered.  3 answer_all, chat_loop: the two ways to answer.
          4 Report: what is shown and kept.  5 shard_report: what each rank holds.  6 main.  Beside it terminal.py.
"""
import argparse
import dataclasses
import json
import math
import os
import re
import sys
import time
from pathlib import Path

from engine_args import EngineArgs
from request import RequestOutput, SamplingParams
from terminal import Patience, Typist, WordWrap, columns, folded, visible


# -- 1. The options ---------------------------------------------------------------------------------------------------

QUESTIONS = ("What is a KV cache?", "Tell me a story about a fox named Ruby.", "How does continuous batching work?",
             "What is TTFT?", "Tell me a story about a little dragon and a key.")
SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "ignore_eos")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"error: {visible(message)}\n`python nano_serve.py --help` lists the options\n")


def make_parser():
    parser = Parser(prog="nano_serve.py", usage="python nano_serve.py [options]", description=(
        "Llama-3 serving in a handful of files. Without arguments: a few questions to the embedded model."))
    add = parser.add_argument_group("what to answer").add_argument
    add("--prompt", action="append", help="a prompt (repeatable)")
    add("--prompts", metavar="FILE", help="prompts, one a line; in a .jsonl file objects with prompt, messages or "
                                          "prompt_token_ids, SamplingParams fields of their own, and a priority "
                                          "(the lower the earlier, with --scheduling-policy priority)")
    add("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add("--chat", action="store_true", help="talk with the model; /help says how")
    add("--shards", action="store_true", help="print what each rank of --tensor-parallel-size holds, and stop; "
        "--model may also be " + ", ".join(PUBLISHED))
    add = parser.add_argument_group("how to answer (vLLM's SamplingParams)").add_argument
    add("--max-tokens", type=int, default=300, help="[300]")
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--min-p", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)
    add("--stop", action="append", help="end at this text (repeatable)")
    add("--ignore-eos", action="store_true")
    add = parser.add_argument_group("what to keep").add_argument
    add("--steps", action="store_true", help="print each step's record as a line")
    add("--records", metavar="FILE", help="write each step's record as a JSON line")
    add("--output", metavar="FILE", help="write each answer as a JSON line")
    EngineArgs.add_cli_args(parser.add_argument_group("the engine"))
    return parser


# -- 2. Jobs ----------------------------------------------------------------------------------------------------------

def read_jobs(args):
    """What is to be answered: dicts with prompt, prompt_token_ids or messages, and perhaps SamplingParams fields; for a
    line that can't be read the ValueError that says why, so that it costs only itself."""
    jobs = [{"prompt": p} for p in args.prompt or ()]
    # A line ends at a newline and nowhere else: JSON may hold U+2028 and its like, at which str.splitlines would cut.
    lines = () if args.prompts is None else Path(args.prompts).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8-sig").rstrip("\r")
            job = json.loads(text) if args.prompts.endswith(".jsonl") else {"prompt": text}
            if not isinstance(job, dict) or len(job.keys() & {"prompt", "prompt_token_ids", "messages"}) != 1:
                raise ValueError("a line is an object with exactly one of prompt, prompt_token_ids, messages")
        except (ValueError, RecursionError) as error:
            job = ValueError(f"{args.prompts}, line {number}: {error}")
        jobs.append(job)
    return jobs if args.prompt or args.prompts is not None else [{"prompt": q} for q in QUESTIONS]


def prepare(job, defaults, use_template):
    """A job  →  (prompt for the engine, SamplingParams). Raises ValueError for this job alone."""
    if isinstance(job, ValueError):
        raise job
    (form,) = job.keys() & {"prompt", "prompt_token_ids", "messages"}
    fields = {name: value for name, value in job.items() if name not in (form, "priority", "cache_salt")}
    if unknown := fields.keys() - {f.name for f in dataclasses.fields(SamplingParams)}:
        raise ValueError(f"unknown field {min(unknown)!r}; besides the prompt, a line holds SamplingParams fields, "
                         "a priority, a cache_salt")
    params = dataclasses.replace(defaults, **fields)
    prompt = {name: job[name] for name in (form, "cache_salt") if name in job}
    if form == "prompt" and isinstance(job[form], str) and use_template:
        prompt["messages"] = [{"role": "user", "content": prompt.pop("prompt")}]
    return prompt, params


def question_of(job):
    """What stands above the answer: the text, the last message, or whatever there is."""
    forms = {} if isinstance(job, ValueError) else job
    asked = next((forms[form] for form in ("prompt", "messages", "prompt_token_ids") if form in forms), "?")
    if isinstance(asked, list) and asked and isinstance(asked[-1], dict):
        asked = asked[-1].get("content")
    return asked if isinstance(asked, str) else f"{asked!s:.60}"


# -- 3. Answering -----------------------------------------------------------------------------------------------------

def answer_all(llm, jobs, args, defaults, report):
    """Run all jobs at once. Returns an exit code: 0, 1 if a prompt was refused or failed, 130 after Ctrl-C. What is
    finished has been shown and written by then, whatever happens."""
    questions, code, started = [question_of(job) for job in jobs], 0, time.perf_counter()
    numbers, prompts, params = [], [], []                # of the jobs that can be handed to the engine
    try:
        with report.showing(lambda: progress_of(llm.engine)):
            for number, job in enumerate(jobs):
                try:
                    prompt, p = prepare(job, defaults, not args.raw and llm.engine.codec.chat_template)
                    numbers.append(number)
                    prompts.append(prompt)
                    params.append(p)
                except ValueError as error:
                    report.update(number, questions[number], RequestOutput.ended(None, "error", error=str(error)))
            priorities = [jobs[number].get("priority", 0) for number in numbers]
            for index, output in llm.stream(prompts, params, priorities):
                report.keep_steps(llm.engine)
                report.update(numbers[index], questions[numbers[index]], output)
    except KeyboardInterrupt:
        code = 130
    report.keep_steps(llm.engine)
    good, elapsed = [o for o in report.done if o.error is None], time.perf_counter() - started
    tokens, ttft = sum(len(o.outputs[0].token_ids) for o in good), sorted(o.metrics.ttft for o in good)
    wanted, failed = sum(p.n for p in params) + len(jobs) - len(params), len(report.done) - len(good)
    report.print(f"{len(good)} of {wanted} answers, ",
                 f"{tokens} tokens in {elapsed:.2f} s: {tokens / elapsed:.0f} tokens/s",
                 f", TTFT mean {sum(ttft) / len(ttft) * 1000:.0f} ms, max {ttft[-1] * 1000:.0f} ms" if ttft else "",
                 f"; {failed} refused or failed" if failed else "", "; interrupted" if code else "")
    return code or (1 if failed else 0)


def progress_of(engine):
    """What the engine is at, for who waits. Planning has counted this step's tokens already."""
    running, waiting = list(engine.scheduler.running), len(engine.scheduler.waiting)
    reading = [r for r in running if not r.output_token_ids]
    done = sum(min(r.num_computed_tokens, r.num_prompt_tokens) for r in reading)
    parts = [f"reading prompts: {done:,} of {sum(r.num_prompt_tokens for r in reading):,} tokens"] if reading else []
    parts += [f"answers growing: {len(running) - len(reading)}"] if len(running) > len(reading) else []
    return "; ".join(parts + ([f"waiting: {waiting}"] if waiting else [])) or "working"


HELP = """/help          this
/new, /clear   start over
/quit, Ctrl-D  end
Ctrl-C         stop this answer
Arrow keys edit, and bring back what you typed before. What you paste is one message, with its line breaks."""


def chat_loop(llm, defaults, report):
    """A conversation. The whole of it is sent each time; with the prefix cache only the new turn is computed.
    Returns an exit code: 0, or 1 if a message was refused or failed."""
    report.print("Talk with the model; /help says how, /quit or Ctrl-D ends.")
    messages, number, code, typist = [], 0, 0, Typist()
    while True:
        try:
            text = typist.read("you> ").strip()
        except (EOFError, RuntimeError):             # the latter where there is no standard input at all
            report.print(*["\n"] * typist.own_line, end="")
            return code
        if not text:
            continue
        if not typist.own_line:                      # nobody sees otherwise what was read
            report.print(f"you> {text}")
        if text == "/quit":
            return code
        if text in ("/new", "/clear"):
            messages = []
            report.print(*["(a new conversation)\n"] * typist.own_line, end="")
        elif re.fullmatch("/[a-z]+", text):
            report.print(HELP if text == "/help" else f"{text} is no command; /help lists them")
        else:
            messages.append({"role": "user", "content": text})
            reply = answer_turn(llm, messages, defaults, report)
            if reply is None or not reply.finished or reply.error:
                messages.pop()                       # as if the question had not been asked
                code = 1 if reply and reply.error else code
                continue
            _write_line(report.output, answer_record(number, text, reply))
            messages.append({"role": "assistant", "content": reply.outputs[0].text})
            number += 1


def answer_turn(llm, messages, defaults, report):
    """Show the answer as it comes. Returns the last RequestOutput, or None if Ctrl-C came before any."""
    reply, wrap = None, WordWrap()
    try:
        with Patience(lambda: progress_of(llm.engine)) as patience:
            for _, reply in llm.stream([{"messages": messages}], defaults):
                if reply.outputs[0].delta or reply.finished:
                    patience.stop()
                report.piece(reply.outputs[0].delta, wrap)
        report.print(f"error: {reply.error}" if reply.error else "")
    except KeyboardInterrupt:                        # this answer only
        report.print(" (interrupted)")
    report.keep_steps(llm.engine)
    return reply


# -- 4. What is shown and kept ----------------------------------------------------------------------------------------

class Report:
    """Shows and keeps what happens. In a terminal the answers being written grow in place, and those done stand above
    them, wrapped at words, control characters made visible; elsewhere each is printed when it is done, as it is.
    --output and --records are opened before anything is computed, and written a line at a time, so that an interruption
    loses nothing."""

    def __init__(self, args):
        self.terminal = sys.stdout is not None and sys.stdout.isatty()
        if self.terminal:
            if os.name == "nt":
                os.system("")                        # from here on an older Windows console obeys escape sequences
            from rich.console import Console
            self.console = Console(highlight=False)
        self.growing, self.done = {}, []
        paths = [Path(p).resolve() for p in (args.prompts, args.output, args.records) if p]
        if len(set(paths)) < len(paths):
            raise ValueError("--prompts, --output and --records must be different files")
        # A lone surrogate, which UTF-8 can't hold, becomes \udxxx: within a JSON string that is its proper escape.
        self.output, self.records = (open(path, "a", encoding="utf-8", errors="backslashreplace") if path else None
                                     for path in (args.output, args.records))
        self.steps, self.num_steps = args.steps, 0

    def empty_files(self):
        """Once the engine stands: until then a run that can't start leaves what an earlier one wrote."""
        for file in (self.output, self.records):
            if file and Path(file.name).is_file():
                file.truncate(0)

    def showing(self, progress):
        """A context in which answers grow, and who waits is told by `progress()` what is under way."""
        if not self.terminal or self.console.is_dumb_terminal:
            return Patience(progress)
        from rich.live import Live
        self.progress, self.last_sign = progress, time.monotonic()
        return Live(get_renderable=self._view, console=self.console, refresh_per_second=12, transient=True)

    def print(self, *parts, end="\n"):
        """Parts are strings or (string, style)."""
        if self.terminal:
            from rich.text import Text
            parts = [part if isinstance(part, tuple) else (part, "") for part in parts]
            self.console.print(Text.assemble(*((visible(text), style) for text, style in parts)), end=end)
        else:
            self._write("".join(part if isinstance(part, str) else part[0] for part in parts) + end)

    def piece(self, text, wrap):
        """The next piece of an answer. wrap: its WordWrap."""
        self._write(wrap.feed(visible(text), columns()) if self.terminal else text)

    def _write(self, text):
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:                      # `| head -1` has enough; what is still to be flushed goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None

    def keep_steps(self, engine):
        for record in engine.records_since(self.num_steps):
            self.num_steps = record.step + 1
            _write_line(self.records, dataclasses.asdict(record))
            if self.steps:
                self.print(step_line(record))

    def update(self, number, question, output):
        """An answer to job `number` has grown, or ended."""
        answer, key = output.outputs[0], (number, output.outputs[0].index)
        title = f"[{number + 1}] " + (question if len(question) <= 500 else f"{question[:500]} …")
        self.growing[key], self.last_sign = (title, answer.text), time.monotonic()
        if output.finished:
            del self.growing[key]
            self.done.append(output)
            _write_line(self.output, answer_record(number, question, output))
            end = output.error or f"{len(answer.token_ids)} tokens, {answer.finish_reason}"
            self.print((title, "bold"), f"\n{answer.text}\n", (f"({end})\n", "dim"))

    def _view(self):
        """What grows, in half of the screen: a line of the question, and the last lines of the answer."""
        from rich.console import Group
        from rich.text import Text
        growing, height, lines = list(self.growing.values()), self.console.height, []
        shown = growing[:max(height // 6, 1)]
        for title, text in shown:
            lines.append(Text(visible(title).replace("\n", " "), "bold", no_wrap=True, overflow="ellipsis"))
            start = max(len(text) // 1000 - 1, 0) * 1000                 # not all of a long text, nor words that jump
            wrapped = Text(visible(text[start:])).wrap(self.console, self.console.width)
            lines += list(wrapped)[-max(height // (2 * len(shown)) - 1, 1):]
        if time.monotonic() - self.last_sign > Patience.FIRST:
            lines.append(Text(self.progress(), "dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)


def _write_line(file, record):
    if file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()


def answer_record(index, question, output):
    answer, m = output.outputs[0], output.metrics
    return {"index": index, "answer": answer.index, "prompt": question, "text": answer.text,
            "token_ids": answer.token_ids, "finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason,
            "error": output.error, "num_prompt_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
            "logprobs": answer.logprobs and [{i: lp.logprob for i, lp in step.items()} for step in answer.logprobs],
            "ttft": m and m.ttft, "tpot": m and m.tpot, "e2e": m and m.e2e}


def step_line(record):
    """A step in as many lines as it takes; in 80 columns, for example:

    step 3  4.1 ms  budget 65/2048  running 2  waiting 0  free 120/128  A 12+1→88
        B 0+64 (hit 2)"""
    parts = [f"step {record.step}", f"{record.duration * 1000:.1f} ms", f"budget {record.used}/{record.budget}",
             f"running {record.running}", f"waiting {record.waiting}",
             f"free {record.free_blocks}/{record.total_blocks}"]
    parts += [f"{r.request_id} {r.computed}+{r.scheduled}" + (f"→{r.sampled}" if r.sampled is not None else "")
              + (f" (hit {r.hit_blocks})" if r.hit_blocks else "") for r in record.requests]
    parts += [f"preempted {i}" for i in record.preempted] + [f"finished {i}" for i in record.finished]
    return folded(parts, columns())


# -- 5. --shards: what each rank holds --------------------------------------------------------------------------------

# Layers, hidden size, intermediate size, query heads, KV heads, vocabulary: from config.json of Meta-Llama-3-8B,
# Meta-Llama-3-70B and Llama-3.1-405B at huggingface.co/meta-llama. In none of them is the head tied to the embedding.
PUBLISHED = {"Llama-3-8B": (32, 4096, 14336, 32, 8, 128256), "Llama-3-70B": (80, 8192, 28672, 64, 8, 128256),
             "Llama-3-405B": (126, 16384, 53248, 128, 8, 128256)}
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "vocab_size")


def published_config(name):
    """The LlamaConfig of a model in PUBLISHED: enough to count its bytes, without its weights."""
    from checkpoint import LlamaConfig
    return LlamaConfig.from_dict({**dict(zip(SIZES, PUBLISHED[name])), "model_type": "llama", "dtype": "bfloat16",
                                  "rope_theta": 500000.0})


def shard_report(config, size, dtype=None):
    """How a model lies on `size` ranks, computed from its LlamaConfig alone; a dict that json can dump.

    weights: a row for each kind: kind, count (layers that have one), cut ("output" rows, "input" columns or "whole"),
    full and rank (shapes), bytes (of all of them on one rank); weight_bytes: their sum; kv_heads of a rank, kv_replicas
    (ranks that hold the same), kv_bytes_per_token (a rank, all layers); collectives: name, count a step, bytes that one
    token adds to a message. dtype: of weights, KV and messages; None: the checkpoint's. ValueError for a size that
    doesn't divide.
    """
    from checkpoint import DTYPES, param_shapes
    config.check_tensor_parallel(size)
    c, L, b = config, config.num_hidden_layers, (dtype or DTYPES[config.dtype]).itemsize
    rank, weights = param_shapes(config, 0, size), []
    for param, full in param_shapes(config).items():
        if param.startswith("layers.") and not param.startswith("layers.0."):
            continue                                                 # all layers are alike
        count, part = L if param.startswith("layers.") else 1, rank[param]
        cut = "whole" if part == full else "output" if part[0] != full[0] else "input"
        weights.append({"kind": param.removeprefix("layers.0."), "count": count, "cut": cut,
                        "full": list(full), "rank": list(part), "bytes": count * math.prod(part) * b})
    kv_heads, message = max(c.num_key_value_heads // size, 1), c.hidden_size * b
    collectives = [("all-reduce after embed_tokens", 1, message), ("all-reduce after o_proj", L, message),
                   ("all-reduce after down_proj", L, message),
                   ("gather of the logits", 1, c.padded_vocab(size) // size * b)]
    return {"size": size, "weights": weights, "weight_bytes": sum(w["bytes"] for w in weights), "kv_heads": kv_heads,
            "kv_replicas": kv_heads * size // c.num_key_value_heads,
            "kv_bytes_per_token": 2 * L * kv_heads * c.head_dim * b,
            "collectives": [{"name": n, "count": k if size > 1 else 0, "bytes": m} for n, k, m in collectives]}


def format_shard_report(config, size, dtype=None):
    """The report as text, 80 columns wide."""
    report, shape = shard_report(config, size, dtype), lambda dims: "x".join(map(str, dims))
    row = "{:30}{:6}{:>14}{:>14}{:>16}".format
    lines = [f"tensor parallel size {size}: {report['weight_bytes']:,} bytes of weights a rank",
             row("weight x layers", "cut by", "whole", "on a rank", "bytes a rank")]
    for w in report["weights"]:
        name = w["kind"].removesuffix(".weight") + (f" x{w['count']}" if w["count"] > 1 else "")
        lines.append(row(name, w["cut"], shape(w["full"]), shape(w["rank"]), f"{w['bytes']:,}"))
    held = f", each on {report['kv_replicas']} ranks" if report["kv_replicas"] > 1 else ""
    lines.append(f"KV heads a rank: {report['kv_heads']}{held}; {report['kv_bytes_per_token']:,} bytes of KV a token")
    for c in report["collectives"]:
        lines.append(f"{c['name']}: {c['count']} a step, {c['bytes']:,} bytes a token")
    return "\n".join(lines)


# -- 6. All together --------------------------------------------------------------------------------------------------

def main(argv=None):
    for stream in (sys.stdout, sys.stderr):          # an encoding without a character gets a "?", not an exception
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace", newline="\n")
    parser = make_parser()
    args = parser.parse_args(argv)
    if (args.chat or args.shards) and (args.prompt or args.prompts is not None):
        parser.error("--chat and --shards take no --prompt or --prompts")
    try:
        if args.shards:
            return print_shards(args)
        # What is wrong with the options, the prompts' file or a path is said before a model is loaded.
        defaults = SamplingParams(**{name: getattr(args, name) for name in SAMPLING_OPTIONS})
        jobs, report, engine_args = read_jobs(args), Report(args), EngineArgs.from_cli_args(args)
        with start(engine_args) as llm:
            report.empty_files()
            return chat_loop(llm, defaults, report) if args.chat else answer_all(llm, jobs, args, defaults, report)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError) as error:     # the last: a dead rank's, and torch's
        text = f"error: {error or type(error).__name__}"
        print(visible(text) if sys.stderr.isatty() else text, file=sys.stderr)
        return 2


def print_shards(args):
    with Patience("importing PyTorch"):
        from checkpoint import LlamaConfig, find_checkpoint
    known = args.model in PUBLISHED                  # Llama-3-70B and the like: from published sizes, nothing is loaded
    config = published_config(args.model) if known else LlamaConfig.from_folder(find_checkpoint(args.model))
    print(format_shard_report(config, args.tensor_parallel_size))
    return 0


def start(engine_args):
    """An LLM, with a word about what takes long: it is imported here and not at the top, for it brings torch."""
    with Patience("importing PyTorch"):
        from checkpoint import find_checkpoint
        from nano_serve import LLM
    folder = find_checkpoint(engine_args.model)      # a hub id: the hub's own bars say how far the download is
    size, tp = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors")), engine_args.tensor_parallel_size
    ranks = f", on {tp} ranks" + ("" if sys.platform == "linux" else "; each starts a Python and imports PyTorch")
    text = f"loading {Path(engine_args.model).name}, {size / 1e9:.1f} GB{ranks if tp > 1 else ''}"
    options = {f.name: getattr(engine_args, f.name) for f in dataclasses.fields(EngineArgs)}
    with Patience(text):
        return LLM(**{**options, "model": str(folder)})


if __name__ == "__main__":
    sys.exit(main())
