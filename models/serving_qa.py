"""Questions about LLM serving: the wordings that the tiny model is trained on, and those it is examined with.

Both are made from the facts of serving_facts.py: its own questions, and general patterns filled with its names.  The
two sets are disjoint: no held-out question occurs in the training text, alone or as a part (tests/test_tiny_model.py).

Reading order: CORES, `training_question`, `held_out_questions`.
"""

import random
import re

from serving_facts import BY_ID, FACTS, LIFE_OF_A_REQUEST, Fact  # noqa: F401  (handed on to those who import from here)

_CHOICE = re.compile(r"\{([^{}]*)\}")


def expand(rng: random.Random, template: str) -> str:
    """Pick one side of every "{a|b|}", innermost first, then tidy up the spaces.

    >>> expand(random.Random(0), "{Explain|Define} it.") in ("Explain it.", "Define it.")
    True
    """
    while (m := _CHOICE.search(template)) is not None:
        template = template[:m.start()] + rng.choice(m.group(1).split("|")) + template[m.end():]
    return re.sub(r" +(?=[.?!,])", "", re.sub(r" +", " ", template)).strip()


# The patterns that a name fills.  X is the name, B is "is" or "are"; "X:" at the start of a sentence gets a capital.
CORES = (
    "What B X?", "What B X?", "What's X?", "What does X mean?", "What exactly B X?", "What is meant by X?", "X?",
    "X: what is it?",
    "{Explain|Describe|Define} X{.| to me.| briefly.| in simple words.| in one or two sentences.| in short.| please.}",
    "{Can|Could} you {explain|describe|define} X{?| to me?| briefly?| in simple words?}",
    "{Can|Could|Would} you {please |}tell me what X B?", "Please {explain|define|describe} X{.| to me.}",
    "{Please tell|Tell|Teach} me {about X|what X B|something about X}.", "What do you know about X?",
    "I {want|would like|need} to {understand|know about|learn about|know what is meant by} X.",
    "I {do not|don't} {understand|know} {X|what X B}.{ Can you help me?| Please explain.| Please help.|}",
    "{Give|Write} {me|us} {a definition|an explanation|a description|a {short|simple|clear} "
    "{definition|explanation}} of X.",
    "Help me {understand X|with X}.", "In {short|simple words|one sentence|a few words}, what B X?",
    "How {would|do} you {define|explain|describe} X{ to a friend|}?", "Do you know what X B?",
    "{Remind me|Say it again|One question|A question about serving|Just a moment}: what B X?", "Let us talk about X.",
    "{The|Our|My} {next|first|last} {question|topic} is X.", "I {read|hear} about X{ today|}. What B it?",
    "{So what|And what|But what|Now, what|Well, what} B X?", "What B X in {LLM |}serving?",
    "What would you tell me about X?", "Who can explain X{ to me|}?", "My {friend|sister|boss} asks what X B.",
    "Why B X {important|useful|needed|there}?", "What B X {good|used|needed} for?",
    "What is the {idea|point|purpose|role} of X?", "What is the {idea|point} behind X?",
)
HELD_CORES = (
    "May I ask what X B?", "I keep hearing about X. What B it all about?", "My teacher wants to know what X B.",
    "Is there an easy way to describe X?", "For my notes: what B X?", "Say what X B, if you can.",
    "What should a student know about X?", "What B X supposed to be?", "Give the class an idea of X.",
    "Suppose I have never heard of X. How would you put it?",
)
BEFORE = ("",) * 8 + (
    "Hi!", "Hello!", "Hello, Tiny.", "One more question.", "Thank you.", "I am new to this.",
    "I have a test tomorrow.", "We talked about serving today.", "I am reading a book about serving.",
    "Sorry, I forgot this.", "My friend asked me this.", "Here is my question.", "Good morning!",
    "Now something else.", "Next question.",
)
AFTER = ("",) * 10 + (
    "Thanks!", "Please be brief.", "I am a beginner.", "Thank you!", "Two sentences are enough.",
    "I want to learn it.",
)
_PLURAL = {"KV blocks", "CUDA graphs", "logits", "the logits", "rotary embeddings"}


def fill(pattern: str, name: str) -> str:
    """Put a name into a pattern of CORES or HELD_CORES.  fill("What B X?", "the logits") == "What are the logits?" """
    text = re.sub(r"\bB\b", "are" if name in _PLURAL else "is", pattern)
    text = re.sub(r"\bX\b", lambda _: name, text)
    return text[0].upper() + text[1:] if pattern[0] == "X" and not name.startswith(("max_", "vLLM", "nano")) else text


def training_question(rng: random.Random, fact: Fact) -> str:
    """One question for `fact`, in one of very many wordings; never one of `held_out_questions`."""
    if fact.ask and (not fact.names or rng.random() < 0.35):
        core = expand(rng, rng.choice(fact.ask))
    else:
        core = fill(expand(rng, rng.choice(CORES)), rng.choice(fact.names.split("|")))
    text = " ".join(part for part in (rng.choice(BEFORE), core, rng.choice(AFTER)) if part)
    return text.lower() if rng.random() < 0.04 else text


def held_out_questions() -> list[tuple[Fact, str]]:
    """The examination: per fact its own held questions and, if it has names, three of HELD_CORES in turn."""
    questions = []
    for i, fact in enumerate(FACTS):
        questions += [(fact, question) for question in fact.held]
        names = fact.names.split("|") if fact.names else []
        questions += [(fact, fill(HELD_CORES[(3 * i + j) % len(HELD_CORES)], names[j % len(names)]))
                      for j in range(3) if names]
    return questions
