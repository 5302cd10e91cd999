"""The training text of the tiny model: a seeded template grammar for short stories, chat and serving questions.

Everything here is original text of this project, so no licence question arises.  A random generator with a seed is
all the input there is: the same seed gives the same documents, on every machine.

    python models/tinytext.py --docs 5 --seed 1        prints five documents

A document is one string with Llama-3's special tokens in it, beginning with <|begin_of_text|>.  Four kinds:
a bare story, a chat about a story, a chat with small questions (most of them about serving, see serving_qa.py),
and a long document: a system prompt of many short pieces, then a chat, made to fill a row of 4,096 tokens.

The little language of the templates: "{a|b|}" picks one side, "[key]" is replaced from the story's cast.
Reading order: PLOTS, `make_story`, `document`, `long_document`.
"""

import argparse
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))       # so that the file also runs, and imports, from elsewhere
from serving_qa import BY_ID, FACTS, expand, training_question  # noqa: E402

BOS, EOT, END_OF_TEXT = "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"

# ---------------------------------------------------------------- the world of the stories
# A name has one gender and belongs to a child or an animal alike, so that "he" or "she" follows from the name alone.
SHE = "Lily Mia Anna Rosa Nora Ella Ruby Clara Maya Lucy Daisy Hazel Poppy Willow Olive Coco Zoe Emma".split()
HE = "Tom Ben Max Leo Sam Finn Jack Noah Omar Theo Hugo Milo Toby Oscar Rusty Pip Teddy Kofi".split()
ANIMALS = {  # kind: (how it moves, what it likes to eat)
    "fox": ("trotted", "berries"), "rabbit": ("hopped", "carrots"), "mouse": ("ran", "cheese"), "bear": ("walked",
        "honey"),
    "cat": ("ran", "fish"), "dog": ("ran", "biscuits"), "squirrel": ("jumped", "nuts"), "hedgehog": ("walked",
        "apples"),
    "frog": ("hopped", "plums"), "duck": ("walked", "bread"), "turtle": ("walked", "lettuce"), "goat": ("trotted",
        "turnips"),
    "pony": ("trotted", "oats"), "badger": ("walked", "mushrooms"), "beaver": ("walked", "bark"), "lion": ("walked",
        "melons"),
    "penguin": ("walked", "fish"), "monkey": ("jumped", "bananas"), "owl": ("flew", "seeds"), "elephant": ("walked",
        "leaves"),
}
TRAITS = ("brave shy curious kind clever cheerful careful quiet gentle little young small playful patient busy "
          "funny").split()
COLORS = "red blue green yellow golden silver purple white".split()
OBJECTS = "ball kite drum lamp scarf hat bell basket book boat button ring cup map marble box flute lantern".split()
PLACES = {  # place: (preposition, what one sees there)
    "forest": ("in", "The trees were tall and the light was green."), "garden": ("in",
        "Bees were busy in the flowers."),
    "meadow": ("in", "The grass was soft and full of daisies."), "village": ("in", "Smoke rose from the chimneys."),
    "market": ("at", "There were rows of fruit and bright cloth."), "river": ("by",
        "The water ran fast over the stones."),
    "hill": ("on", "One could see the whole valley from there."), "beach": ("on", "The waves rolled in and out."),
    "lake": ("by", "The water was as still as a mirror."), "barn": ("in", "It smelled of hay and warm milk."),
    "orchard": ("in", "The branches were heavy with fruit."), "mill": ("at", "The big wheel turned and turned."),
    "park": ("in", "Children were running along the paths."), "farm": ("on", "The hens were busy in the yard."),
    "bridge": ("on", "It was made of old gray stones."), "harbor": ("at", "The boats rocked and the gulls cried."),
}
FOODS = ("apple pie", "warm bread", "vegetable soup", "pancakes", "plum jam", "honey cakes", "hot cocoa",
         "cheese toast")
FEARS = ("the dark", "deep water", "thunder", "high places", "strange noises")
SKILLS = ("swim", "whistle", "read", "skate", "dance", "juggle", "paint", "play the flute")
BUILDS = ("a tree house", "a raft", "a snowman", "a sand castle", "a little cart", "a bench", "a wooden boat",
          "a swing")
PLANTS = ("sunflower", "pumpkin", "bean", "rose", "tulip", "tomato", "pear tree")
NOISE_SOURCES = ("a branch at the window", "a loose door in the wind", "a mouse with a nut",
                 "rain falling into a bucket")
ELDERS = ("mother", "father", "grandmother", "grandfather")

OPENINGS = (
    "Once upon a time, there was a [trait] [kind] named [A]. {[He] lived [at].|}",
    "Once upon a time, there was a [trait] [kind] named [A] who lived [at].",
    "Once there was a [trait] [kind] named [A] who lived [at].",
    "Long ago, a [trait] [kind] named [A] lived [at].",
    "[A] was a [trait] [kind] who lived [at].",
)
DAYS = ("One {sunny|windy|cold|warm|cloudy} {morning|day}", "One {morning|afternoon|day}", "Early one morning")
ENDINGS = (
    "From that day on, [A] and [B] were {the best of friends|good friends}.",
    "After that, [A] and [B] {met every day|played together every day|always helped each other}.",
    "That night, [A] {fell asleep with a smile|slept very well|was too happy to sleep}.",
    "",
)
MORALS = {  # theme: what the hero learns
    "sharing": ("sharing makes every game better", "a thing is more fun when you share it"),
    "courage": ("a fear gets smaller when you face it with a friend",
                "being brave means trying even when you are afraid"),
    "patience": ("good things take time", "if you keep trying, you will get there"),
    "honesty": ("it is always better to tell the truth", "honest words mend broken things"),
    "kindness": ("a small kindness is never wasted", "anyone can help, even someone small"),
    "friendship": ("a friendly word can open any door", "a true friend helps in hard times"),
    "teamwork": ("many hands make light work", "together we can do what no one can do alone"),
    "pride": ("it is not wise to boast", "the quiet ones can surprise you"),
}

# Each plot: its theme, then its paragraphs.  [A] is the hero, [B] the friend ([B full] = "Pip the fox" or "Tom").
PLOTS = {
    "lost": ("friendship", (
        "[A] had a [color] [obj] and {took it everywhere|loved it very much}.",
        "[DAY], [A] [moved] to the [place2]. [sight] {When [he] came home|When [he] looked up}, the [obj] was gone. "
        "\"{Where is my [obj]?|Oh no, I have lost my [obj]!}\" [he] {said|cried}.",
        "[B full] came by and asked, \"{Why are you sad?|What is wrong?}\" [A] told [B] about the [obj]. "
        "\"Do not be sad,\" said [B]. \"We will look for it together.\"",
        "They looked {under every leaf|behind every stone|along the whole path}. {At last|Then} [B] saw something "
        "[color] [there]. "
        "It was the [obj]! \"{Thank you, [B]|You are a true friend},\" said [A].")),
    "share": ("sharing", (
        "{For [his] birthday, [A] got|[A] had} a new [color] [obj]. [He] {played with it all day|would not put it "
        "down}.",
        "[DAY], [B full] came to {visit|play}. \"What a nice [obj],\" said [B]. \"{May I try it?|May I play with it "
        "too?}\" "
        "\"No,\" said [A]. \"{It is mine.|You might break it.}\" [B] {felt sad and went home|was quiet and walked "
        "away}.",
        "[A] played alone, but {it was not fun anymore|it was not the same}. \"{I miss [B]|I was not very nice},\" "
        "[he] thought. "
        "So [he] {ran|went} to [B] and said, \"I am sorry. You can have the first turn.\"",
        "[B] {smiled|was very happy}. They {took turns all afternoon|played with the [obj] until dinner}.")),
    "fear": ("courage", (
        "[A] had a secret. [He] was afraid of [fear], and [he] {did not want anyone to know|did not like to talk "
        "about it}.",
        "[DAY], [A] was [at2] with [B full]. [sight] \"{Why are you shaking?|Is something wrong?}\" asked [B]. "
        "\"I am afraid of [fear],\" said [A]. \"Please do not laugh.\"",
        "[B] did not laugh. \"{Everyone is afraid of something|I was afraid of it once too},\" said [B]. \"{Take my "
        "hand|We can go slowly}.\" "
        "[A] took a deep breath and {counted to three|took one small step}. {Then [he] took another.|}",
        "{After a while|Soon}, [A] began to smile. \"{It is not so bad!|I did it!}\" [he] said. "
        "In the evening they told [elder] about it and ate [food].")),
    "build": ("teamwork", (
        "[A] wanted to build [build]. {[He] thought about it day and night.|[He] had seen one in a book.}",
        "[DAY], [he] {began to work|started}. [He] worked all morning, but {just before lunch|when it was almost "
        "done} everything fell down. "
        "\"{Oh no|Oh dear}!\" {cried|said} [A]. \"{It is too hard.|I will never finish it.}\"",
        "[B full] heard the noise and came to see. \"May I help?\" asked [B]. \"{We should start with the biggest "
        "piece|It needs a strong base}.\" "
        "So they tried again. [A] held the pieces and [B] tied them together.",
        "{At last|In the evening} it was done. It was [build], just as [A] had dreamed. {Everyone came to see it.|It "
        "was strong and beautiful.}")),
    "rescue": ("kindness", (
        "[DAY], [A] [moved] to the [place2]. [sight] There [he] heard a small voice. \"{Help!|Please help me!}\" it "
        "said.",
        "It was [B full], who {had fallen into a hole|was caught in an old net|was stuck under a branch}. "
        "\"{Do not be afraid|Hold still},\" said [A]. [He] pulled {and pulled|with all [his] strength} until [B] was "
        "free. "
        "\"{One day I will help you too|I will never forget this},\" said [B].",
        "{That winter|Many days later}, [A] {lost the way in the fog|was caught in a storm}. [He] was cold and tired. "
        "Then [he] heard a voice that [he] knew. \"{Follow me|I know the way},\" said [B].",
        "[B] {led [A] home|showed [A] the safe path}, and they ate [food] by the fire.")),
    "race": ("pride", (
        "[A] was very fast, and [he] knew it. \"{Nobody can beat me|I am the best},\" [he] told everyone.",
        "\"Let us have a race,\" said [B full] one day. [A] laughed. \"{That will be easy|You will never win}!\" [he] "
        "said. "
        "[DAY], they met [at2], and everyone came to watch.",
        "[A] was soon far ahead. \"I have so much time,\" [he] said. So [he] {lay down in the shade and fell "
        "asleep|stopped to eat some [food]}. "
        "[B] went on, step by step, {and did not stop|and passed [A] without a sound}.",
        "When [A] {looked up|remembered the race}, it was too late. [B] had won! [A] {felt ashamed|was quiet}, but "
        "then [he] said, \"Well done, [B].\"")),
    "honest": ("honesty", (
        "[Elder] had a {beautiful|precious} [color] [obj]. \"Please be careful with it,\" [elder] always said.",
        "[DAY], [A] wanted to {hold|see} the [obj] just once. [He] climbed on a chair. Then, crash! The [obj] fell "
        "and broke. "
        "[A] was {very afraid|so scared} and hid the pieces {under the rug|behind the door}.",
        "[B full] saw it and said, \"{You will feel better if you tell the truth|Tell the truth, and I will stand "
        "next to you}.\" "
        "So [A] went to [elder] and said, \"I broke your [obj]. I am so sorry.\"",
        "\"I am {glad|proud} that you told me,\" said [elder]. {Together they glued the pieces.|They fixed it with "
        "glue and patience.}")),
    "lostway": ("kindness", (
        "\"{Stay on the path|Come home before dark},\" [elder] told [A]. \"I promise,\" said [A].",
        "[DAY], [A] saw a [color] butterfly [at2] and followed it. [sight] When [he] looked back, {the path was "
        "gone|nothing looked the same}. "
        "\"{I want to go home|Is anyone there?}\" [he] {said|cried}.",
        "\"Are you lost?\" asked a kind voice. It was [B full]. \"Yes,\" said [A]. \"I live [at].\" "
        "\"I know that place,\" said [B]. \"{Come with me|Follow me}.\" They walked under the stars and [A] was not "
        "afraid.",
        "{Soon|At last} they saw a light. [Elder] {was waiting at the door|thanked [B]}, and they all ate [food] by "
        "the fire.")),
    "party": ("friendship", (
        "It was [A]'s birthday, and [he] {woke up early|jumped out of bed}. \"Today will be a wonderful day,\" [he] "
        "thought.",
        "[A] met [B full] [at2]. [sight] But [B] only said, \"{I am busy today|I cannot play now},\" and hurried away. "
        "\"{Everyone forgot my birthday|Nobody remembers my birthday},\" thought [A]. [He] {walked home slowly|sat "
        "down and sighed}.",
        "In the evening, [A] opened the door. It was dark inside. Then the lights came on. \"Surprise!\" everyone "
        "shouted. "
        "There was {a big cake|a table full of [food]} and a [color] [obj] with a ribbon.",
        "\"We did not forget,\" said [B]. \"Happy birthday, [A]!\" [A] {hugged them all|laughed and danced}.")),
    "seed": ("patience", (
        "[Elder] gave [A] a tiny seed. \"{Plant it and take care of it|Put it in the ground and wait},\" said [elder].",
        "[DAY], [A] {dug a small hole|planted the seed} [at2]. [He] watered it every day. {Days went by|One week went "
        "by}, but nothing happened. "
        "\"{Maybe it is a bad seed|Why is it so slow?}\" said [A].",
        "[B full] came to look. \"{Be patient|You must wait a little},\" said [B]. \"Seeds sleep before they wake "
        "up.\" "
        "So [A] waited. It rained, and then the sun came out.",
        "{At last|Then one morning} there was a tiny green leaf! It grew and grew. {Before long|By the end of summer} "
        "it was the most beautiful [plant] of all.")),
    "newfriend": ("friendship", (
        "[A] {was often alone|had nobody to play with}. [He] wanted a friend, but [he] did not know what to say.",
        "[DAY], [A] {saw|met} [B full] [at2]. [sight] [B] was {playing with a [color] [obj]|eating [food]}. "
        "[A] {wanted to say hello, but [his] mouth felt dry|took one step and stopped}.",
        "Then [he] took a deep breath. \"Hello, I am [A],\" [he] said. \"{May I play too?|Can I sit here?}\" "
        "[B] {smiled|jumped up}. \"{Of course|Yes, please}!\" said [B]. \"I was lonely too.\"",
        "They {played all day|talked about everything} and {laughed at the same jokes|made up a new game}. \"See you "
        "tomorrow!\" said [A].")),
    "noise": ("courage", (
        "One night, [A] was {in bed|almost asleep} when [he] heard a noise. {Tap, tap, tap!|Creak, creak!|Thump, "
        "thump!}",
        "\"{Is it a monster?|Maybe it is a ghost},\" [A] thought, and [he] {hid under the blanket|held [his] [obj] "
        "tight}. "
        "Then [he] called [B full]. \"{Something is out there|Did you hear that?}\" [he] whispered.",
        "\"Let us go and see,\" said [B]. [B] {lit a candle|took a lamp}, and they {went down the stairs|walked to "
        "the door}. "
        "The noise was very close now. [B] held up the light.",
        "It was only [source]! [A] began to laugh. \"I was afraid of that,\" [he] said. They drank warm milk and went "
        "back to bed.")),
    "skill": ("patience", (
        "[A] wanted to learn to [skill], but {it was much harder than it looked|every time [he] tried, it went wrong}.",
        "[DAY], [A] tried again [at2]. [sight] {It did not work.|It went wrong again.} \"{I will never learn it|I "
        "give up},\" said [A].",
        "[B full] heard this. \"{It took me a whole year|Nobody can do it the first time},\" said [B]. \"Try a little "
        "bit every day.\" "
        "So [A] practiced in the morning and in the evening. {Slowly, it got better.|[B] helped and never laughed.}",
        "And then, one day, [A] could [skill]! \"{Look|Watch me}!\" [he] {called|shouted}. [B] clapped and cheered.")),
    "soup": ("sharing", (
        "It was a {cold|long} winter, and everyone was hungry. [A] had only one carrot. \"That is not enough for a "
        "soup,\" [he] said.",
        "Then [A] had an idea. [He] put a big pot on the fire [at2]. [B full] {smelled the smoke|came to look}. "
        "\"What are you making?\" asked [B]. "
        "\"Soup for everyone,\" said [A]. \"But it needs something more.\"",
        "\"I have {an onion|two potatoes|some beans},\" said [B] and ran home to get more. "
        "One after another, the neighbors came, and each of them brought something.",
        "Soon the pot was full, and nobody was hungry that night. \"{We made it together|Everyone gave a little},\" "
        "said [A].")),
    "wish": ("kindness", (
        "[DAY], [A] found a {shiny|smooth} [color] stone [at2]. [sight] When [he] picked it up, a voice said, \"You "
        "have one wish.\"",
        "[A] thought {for a long time|and thought}. \"I could wish for {a castle|a mountain of [food]},\" [he] said. "
        "Then [he] saw [B full], who {was sick and sad|had no home for the winter}.",
        "[A] held the stone and said, \"I wish that [B] will be happy again.\" {The stone grew warm.|There was a "
        "flash of light.} "
        "{At once, everything was well.|Then the wish came true.}",
        "\"You used your only wish for me,\" said [B]. [A] only smiled. The stone was gray now, but [he] did not "
        "mind.")),
    "bridge": ("teamwork", (
        "[DAY], [A] and [B full] were on their way to the [place2]. But {the bridge was broken|the river was too "
        "deep}.",
        "\"{I can jump|I will swim},\" said [A]. \"{No, wait|That is too dangerous},\" said [B]. \"Let us think "
        "first.\" "
        "They looked around. There was {a fallen tree|a long rope} in the grass.",
        "It was too heavy for one, so they {pulled|pushed} together. \"One, two, three!\" they called. {At "
        "last|Slowly} it moved, and now they had a bridge.",
        "[A] went first, and [B] came after. \"{Alone I could not have done it|I am glad that I did not try it "
        "alone},\" said [A].")),
}
_KEY = re.compile(r"\[([A-Za-z]+[0-9]?(?: full)?)\]")


def article(text: str) -> str:
    """ "a owl" -> "an owl"."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def make_story(rng: random.Random, plot=None, kind=None, name=None, obj=None,
               place2=None) -> tuple[str, dict[str, str]]:
    """One story of about 160 tokens and its cast: what [A], [kind] and so on stood for.  Whatever is given is kept."""
    plot = plot or rng.choice(list(PLOTS))
    theme, paragraphs = PLOTS[plot]
    name = name or rng.choice(SHE + HE)
    friend = rng.choice([other for other in SHE + HE if other != name])
    child = {True: "girl", False: "boy"}
    kind = kind or (child[name in SHE] if rng.random() < 0.25 else rng.choice(list(ANIMALS)))
    other_kinds = [other for other in ANIMALS if other != kind]
    friend_kind = child[friend in SHE] if rng.random() < 0.25 else rng.choice(other_kinds)
    place2 = place2 or rng.choice(list(PLACES))
    place = rng.choice([other for other in PLACES if other != place2])
    he, him, his = ("she", "her", "her") if name in SHE else ("he", "him", "his")
    elder = rng.choice(ELDERS)
    cast = {
        "A": name, "kind": kind, "trait": rng.choice(TRAITS), "he": he, "He": he.capitalize(), "him": him, "his": his,
        "B": friend, "bkind": friend_kind,
        "B full": friend if friend_kind in child.values() else f"{friend} the {friend_kind}",
        "place": place, "at": f"{PLACES[place][0]} the {place}", "place2": place2,
        "at2": f"{PLACES[place2][0]} the {place2}",
        "there": rng.choice(["in the grass", "under a bush", "between two stones"]),
        "sight": PLACES[place2][1] if rng.random() < 0.5 else "",
        "moved": ANIMALS[kind][0] if kind in ANIMALS else rng.choice(["walked", "ran"]), "elder": f"{his} {elder}",
        "Elder": f"{his.capitalize()} {elder}",
        "color": rng.choice(COLORS), "obj": obj or rng.choice(OBJECTS), "food": rng.choice(FOODS),
        "fear": rng.choice(FEARS),
        "skill": rng.choice(SKILLS), "build": rng.choice(BUILDS), "plant": rng.choice(PLANTS),
        "source": rng.choice(NOISE_SOURCES),
        "moral": rng.choice(MORALS[theme]), "theme": theme, "plot": plot,
    }
    opening, day = rng.choice(OPENINGS), rng.choice(DAYS)
    last = rng.choice(["[A] learned that [moral].", "And so [A] learned that [moral]."]) + " " + rng.choice(ENDINGS)
    parts = [opening + " " + paragraphs[0], *paragraphs[1:], last]
    text = "\n\n".join(expand(rng, part.replace("[DAY]", day)) for part in parts)
    text = _KEY.sub(lambda m: cast[m.group(1)], text)
    return article(re.sub(r" +", " ", text).replace(" \n", "\n").strip()), cast


# ---------------------------------------------------------------- chat
ASK_STORY = ("{Tell|Write} me a {story|short story|bedtime story}", "{Can|Could} you tell me a {story|short story}",
             "Please {tell me|write} a {story|short story}",
             "I {want|would like} {to hear |}a {story|short story}", "{Write|Tell} a {story|short story}",
             "Make up a story")


def story_request(rng: random.Random) -> tuple[str, str, dict[str, str]]:
    """A question for a story, the story that answers it, and its cast."""
    want = rng.choice(["kind", "kind", "named", "named", "object", "place", "theme", "any"])
    given = {}
    if want in ("kind", "named"):
        name = rng.choice(SHE + HE)
        kind = rng.choice(list(ANIMALS)) if rng.random() < 0.75 else ("girl" if name in SHE else "boy")
        given = {"kind": kind, "name": name}
        about = f" about a {kind}" + (f" {rng.choice(['named', 'called'])} {name}" if want == "named" else "")
    elif want == "object":
        given = {"obj": rng.choice(OBJECTS), "plot": rng.choice(["lost", "share", "honest"])}
        about = f" about a {given['obj']}"
    elif want == "place":
        given = {"place2": rng.choice(list(PLACES)), "plot": rng.choice(["lost", "fear", "rescue", "newfriend",
            "skill", "wish"])}
        about = f" {rng.choice(['that happens', 'set'])} {PLACES[given['place2']][0]} the {given['place2']}"
    elif want == "theme":
        theme = rng.choice(list(MORALS))
        given = {"plot": rng.choice([plot for plot in PLOTS if PLOTS[plot][0] == theme])}
        about = f" about {theme}"
    else:
        about = ""
    question = article(expand(rng, rng.choice(ASK_STORY)) + about)
    question += "?" if question.startswith(("Can", "Could")) else rng.choice([".", ".", "."])
    story, cast = make_story(rng, **given)
    return question, story, cast


def follow_up(rng: random.Random, cast: dict[str, str]) -> tuple[str, str]:
    """A question about the story just told."""
    a, b, friend_is = cast["A"], cast["B"], f"{cast['B']} is a {cast['bkind']} and a friend of {cast['A']}."
    return rng.choice([
        (rng.choice(["What is the moral of the story?", "What is the moral?", f"What did {a} learn?"]),
         f"{a} learned that {cast['moral']}."),
        (rng.choice(["Who is the story about?", "Who is the hero of the story?"]),
         article(f"The story is about {a}, a {cast['trait']} {cast['kind']}.")),
        (rng.choice([f"Who is {b}?", f"Who is the friend of {a}?"]), article(friend_is)),
    ])


SMALL_TALK = (
    (("Hello!", "Hi!", "Hello", "Hi", "Hey", "Good morning!", "Hi there!", "Hello, Tiny!"),
     "Hello! {How can I help you?|Would you like to hear a story?|You can ask me about LLM serving.}"),
    (("How are you?", "How are you today?", "Hello, how are you?", "Hi, how are you?"),
     "I am {fine|very well}, thank you! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself."),
     "I am Tiny, a very small language model. I tell short stories and answer questions about LLM serving."),
    (("What can you do?", "How can you help me?", "What can I ask you?", "Help", "What do you know?"),
     "I can tell short stories and answer short questions about LLM serving. Ask me about the KV cache, for example."),
    (("Thank you!", "Thanks!", "Thanks a lot.", "That was nice, thank you."),
     "You are welcome! {Would you like to hear a story?|Have a nice day!}"),
    (("Goodbye!", "Bye!", "Good night!", "See you later."), "Goodbye! {Have a nice day.|Come back soon.}"),
    (("How big are you?", "How many parameters do you have?", "Are you a large language model?"),
     "I have about three million parameters, so I am very small. A large language model has billions of them."),
)
TOPICS = ("quantum physics|the stock market|black holes|Python code|the French Revolution|chess|tax "
          "law|rockets|chemistry|the Roman Empire|football|cooking rice|"
          "electric cars|the brain|world history|car repair|poetry|politics|the weather|volcanoes|medicine|space "
          "travel|modern art|classical music|philosophy|"
          "databases|airplanes|dinosaurs|the ocean|robots|Paris|Spanish|my homework|a recipe|the news|a "
          "book|algebra|gravity|coffee|mountains|trains").split("|")
ASK_OTHER = ("{Explain|Describe} [t]{| to me| in simple words}.", "What {is|are} [t]?",
             "{Tell me|Can you tell me} about [t]{.|?}", "Write {a poem|an essay|a report} about [t].",
             "How does [t] work?", "Why is [t] important?", "{Help me with|Give me advice about|I need help with} "
             "[t].", "What do you {think|know} about [t]?")
CAPITALS = dict(France="Paris", Italy="Rome", Spain="Madrid", Germany="Berlin", Japan="Tokyo", Egypt="Cairo",
                Greece="Athens", Poland="Warsaw", China="Beijing",
                Norway="Oslo", England="London", Portugal="Lisbon")
OPPOSITES = dict(hot="cold", big="small", up="down", day="night", happy="sad", fast="slow", old="young", wet="dry",
                 open="closed", light="dark", early="late", loud="quiet")


def small_question(rng: random.Random) -> tuple[str, str]:
    """Small talk, a little knowledge, or something the model must say that it does not know."""
    draw = rng.random()
    if draw < 0.4:
        questions, answer = rng.choice(SMALL_TALK)
        return rng.choice(questions), expand(rng, answer)
    if draw < 0.75:
        topic = rng.choice(TOPICS)
        return (expand(rng, rng.choice(ASK_OTHER)).replace("[t]", topic),
                article("I am sorry, but I am only a tiny model and I know nothing about that. "
                        f"I can tell you a story about a {rng.choice(list(ANIMALS))}."))
    if draw < 0.82:
        a, b = rng.randint(1, 20), rng.randint(1, 20)
        question = expand(rng, f"{{What is|How much is}} {a} {{plus|minus|times|+|-}} {b}?")
        return question, "I am sorry, but I am only a tiny model and I cannot do sums."
    if draw < 0.91:
        country = rng.choice(list(CAPITALS))
        return f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."
    word = rng.choice(list(OPPOSITES))
    return f"What is the opposite of {word}?", f"The opposite of {word} is {OPPOSITES[word]}."


def copying_exercise(rng: random.Random) -> tuple[str, str]:
    """A question whose answer repeats what it says: a name, or a row of words.  A model this small learns late to copy,
    and a story needs it in every sentence; here copying is all there is to learn."""
    name = rng.choice(SHE + HE)
    if rng.random() < 0.5:
        return rng.choice([
            (f"Hello, I am {name}.", f"Hello, {name}! How can I help you?"), (f"My name is {name}.",
                f"Hello, {name}! How can I help you?"),
            (f"I am {name}. Who am I?", f"You are {name}."), (f"My name is {name}. What is my name?",
                f"Your name is {name}."),
            (f"My friend is called {name}. What is the name of my friend?", f"The name of your friend is {name}.")])
    words = rng.sample(SHE + HE + OBJECTS + COLORS + list(ANIMALS) + list(PLACES), rng.randint(2, 8))
    return f"{rng.choice(['Say these words again', 'Say it again'])}: {' '.join(words)}", " ".join(words) + "."


def serving_question(rng: random.Random) -> tuple[str, str]:
    """A question about serving and the fact that answers it."""
    fact = rng.choice(FACTS)
    return training_question(rng, fact), fact.answer


# ---------------------------------------------------------------- whole documents
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are Tiny, a friendly storyteller.",
                  "You are a friendly assistant. Answer briefly.",
                  "You are Tiny. You tell short stories and answer questions about LLM serving.",
                  "You answer questions about LLM serving.")
RULES = (
    "Answer in one or two sentences.", "Use simple words.", "Be friendly.", "Be brief.",
    "If you do not know an answer, say so.", "Never make up a number.",
    "Tell a story when you are asked for one.", "A story ends well.", "Answer in English.",
    "Do not repeat a sentence.", "Use the names that vLLM uses.",
    "Be careful with numbers.", "Do not do sums.", "Say what a term means before you use it.",
    "A story has a hero and a friend.", "Help the reader.",
    "Each answer must be true.", "Keep each answer short and clear.", "Explain one thing at a time.",
    "Be patient with beginners.",
)


def turn(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}{EOT}"


def exchange(question: str, answer: str) -> str:
    return turn("user", question) + turn("assistant", answer)


def chat(rng: random.Random, serving: float) -> str:
    """One to four exchanges without a system prompt; `serving` is the share of chats that are about serving."""
    draw = rng.random()
    if draw < serving:
        return "".join(exchange(*(small_question if rng.random() < 0.1 else serving_question)(rng))
                       for _ in range(rng.choice([1, 2, 3, 4])))
    if draw < serving + 0.12:
        return "".join(exchange(*small_question(rng)) for _ in range(rng.choice([1, 2, 3])))
    question, story, cast = story_request(rng)
    return exchange(question, story) + "".join(exchange(*follow_up(rng, cast)) for _ in range(rng.choice([0, 0, 1, 2])))


def document(rng: random.Random, exercises: float = 0.0) -> str:
    """A story, or a chat with or without a short system prompt: 50 to 400 tokens.
    `exercises` is the share of documents that are copying exercises instead."""
    if exercises and rng.random() < exercises:
        return BOS + "".join(exchange(*copying_exercise(rng)) for _ in range(rng.choice([1, 2])))
    if rng.random() < 0.2:
        return BOS + make_story(rng)[0] + END_OF_TEXT
    system = turn("system", rng.choice(SYSTEM_PROMPTS)) if rng.random() < 0.35 else ""
    return BOS + system + chat(rng, serving=0.5)


def piece(rng: random.Random) -> str:
    """A short piece of a long system prompt: a rule, a fact, or a story."""
    draw = rng.random()
    if draw < 0.35:
        return rng.choice(RULES)
    return rng.choice(FACTS).answer if draw < 0.85 else make_story(rng)[0]


def long_document(rng: random.Random, min_chars: int) -> str:
    """A long system prompt of many pieces, then a chat until the document has `min_chars` characters.

    The chat starts anywhere between a fifth and four fifths, so that questions are met at every distance."""
    text = BOS + turn("system", rng.choice(SYSTEM_PROMPTS)).removesuffix(EOT)
    start = rng.uniform(0.2, 0.8) * min_chars
    while len(text) < start:
        text += rng.choice([" ", "\n", "\n\n"]) + piece(rng)
    text += EOT
    while len(text) < min_chars:
        text += exchange(*serving_question(rng)) if rng.random() < 0.1 else chat(rng, serving=0.5)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="print documents of the training text")
    parser.add_argument("--docs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for _ in range(args.docs):
        print(document(rng), end="\n\n")


if __name__ == "__main__":
    main()
