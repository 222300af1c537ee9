"""Writes the training text: conversations and stories from our own programs, rendered through the checkpoint's chat template.

    python generate.py sample 20                 # look at some documents
    python generate.py shards OUT 100 --workers 8 --kjv kjv.txt
    python generate.py heldout heldout --kjv kjv.txt

A document is one conversation or one text; it ends with <|endoftext|>. A shard is a uint16 array of rows; a row starts with a
document, holds as many whole documents as fit, and is padded with <|endoftext|>. Shard i depends on i alone.
"""

import argparse
import json
import os
import random
import re
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path

import chatter
import stories
import sums
import toolcalls
import world as W
from plots import PLOTS, STILL
from sums import Turn

HERE = Path(__file__).resolve().parent
ASSETS = HERE.parent.parent / "assets" / "demo"
ROW = 2048                    # tokens a row, plus one for the last label
ROWS_PER_SHARD = 32 * 40      # forty steps of 32 rows
END = "<|endoftext|>"
KJV_EPOCHS = 5
KJV_HELD_OUT = 20             # every 20th passage of about 2000 characters


# --- requests for stories ------------------------------------------------------------------------------------------------------

ASK = ["Tell me a story about {x}.", "Tell me a story about {x}", "tell me a story about {x}", "Write a story about {x}.", "Write a short story about {x}.", "Tell me a short story about {x}.",
       "Can you tell me a story about {x}?", "Please tell me a story about {x}.", "I want a story about {x}.", "I would like to hear a story about {x}.", "A story about {x}, please.", "story about {x}",
       "Write me a story about {x}.", "Make up a story about {x}.", "Tell us a story about {x}.", "Could you write a story about {x}?", "Do you know a story about {x}?", "Tell me a bedtime story about {x}.",
       "Write a fairy tale about {x}.", "Tell me a tale about {x}.", "Invent a story about {x}.", "Give me a story about {x}.", "Tell me something about {x}, as a story.", "Write a little story about {x} for my daughter.",
       "Write a children's story about {x}.", "a short story about {x}", "Let me hear a story about {x}!", "Compose a story about {x}.", "Tell a story about {x}.", "Tell me a long story about {x}.", "write a story about {x}",
       "Write a long story about {x}.", "Tell me the story of {x}.", "Create a short story about {x}.", "Hi! Tell me a story about {x}.", "Hello, can you tell me a story about {x}?", "Generate a story about {x}.",
       "Narrate a story about {x}.", "Please write a very short story about {x}.", "I am bored. Tell me a story about {x}.", "{x}", "{x}!", "Story: {x}", "tell me a short story about {x}", "write me a story about {x} please", "can you tell me a story about {x}", "Write a funny story about {x}.", "Tell my son a story about {x}.", "Write a paragraph about {x}."]
ANY = ["Tell me a story.", "Tell me a story", "tell me a story", "Tell a story.", "Write a story.", "Write a short story.", "Can you tell me a story?", "Please tell me a story.", "I want to hear a story.",
       "A story, please.", "Tell me a bedtime story.", "Tell me a short story.", "Once upon a time", "Tell me a long story.", "Make up a story.", "story", "Write something.", "Tell me a fairy tale.", "Entertain me."]
AGAIN = ["Tell me another one.", "Another story, please.", "One more!", "Tell me another story.", "another one", "Tell me one more story."]
PLACES = ["in a castle", "on the moon", "in the desert", "at the sea", "in a big city", "on a small island", "in the jungle", "in space", "in a library", "on a farm", "in the mountains", "in an old house", "in London", "in Paris",
          "in a cave", "in the snow", "under the sea", "in a forest", "in a tower", "in a school", "on a ship", "in a tree house"]
MORE_ADJS = ["talking", "flying", "invisible", "golden", "purple", "blue", "green", "white", "black", "red", "giant", "forgotten", "dancing", "singing", "famous", "very old", "very small", "little red", "mean", "strange"]
THEMES = {"friendship": "quarrel newcomer", "a friend": "newcomer", "courage": "fear", "being brave": "fear", "honesty": "lie", "a lie": "lie", "patience": "garden", "a garden": "garden", "kindness": "rescue", "sharing": "sharing",
          "a birthday": "gift", "a gift": "gift", "a race": "race", "a treasure": "voyage", "an adventure": "voyage", "a map": "voyage", "a strange noise": "noise", "the night": "noise", "cooking": "cooking", "a soup": "cooking",
          "a wish": "wish", "magic": "wish", "learning": "skill", "practice": "skill", "a flower": "garden", "a clever trick": "trick", "two friends": "quarrel gift", "love": "gift", "being lonely": "newcomer", "helping others": "rescue",
          "a dream": "dream", "dreams": "dream", "hope": "dream", "a lost toy": "lost", "saying sorry": "quarrel lie", "a journey": "voyage", "fear": "fear", "school": "skill", "food": "cooking sharing", "a party": "gift"}
DEEDS = {"who is afraid of {fear}": "fear", "who loses {thing}": "lost", "who finds a magic {thingk}": "wish", "who finds an old map": "voyage", "who tells a lie": "lie", "who plants a seed": "garden", "who makes a soup": "cooking",
         "who has no friends": "newcomer", "who does not want to share": "sharing", "who runs a race": "race", "who hears a noise at night": "noise", "who makes a gift": "gift", "who learns something new": "skill",
         "who helps a stranger": "rescue", "who tricks a monster": "trick"}
# Deeds with a phrase of their own, which the story takes up.
PHRASES = {"who wants to {goal}": "dream", "that wants to {goal}": "dream", "who dreams that one day it can {goal}": "dream", "who wants to learn to {what}": "skill", "who learns to {what}": "skill", "who cannot {what}": "skill",
           "who is afraid of {what_}": "fear", "that is scared of {what_}": "fear"}
RELATIVES = ["grandmother", "grandfather", "mother", "father", "dog", "cat", "horse", "teacher", "kitten", "puppy", "pony", "robot", "rabbit", "parrot", "goat"]
LEARN = ["swim", "sing", "dance", "whistle", "paint", "bake bread", "play the flute", "read", "fly a kite", "juggle", "ride a bicycle", "climb", "cook", "write", "count", "jump", "speak", "fish", "sew", "play the piano", "play the guitar", "skate", "sail", "row a boat",
         "tell jokes", "draw", "fly", "sleep alone", "play chess", "play football"]


def kind(rng):
    r = rng.random()
    if r < 0.52:
        return rng.choice(list(W.ANIMALS))
    if r < 0.74:
        return rng.choice(list(W.PEOPLE))
    if r < 0.86:
        return rng.choice(list(W.OBJECTS))
    return W.made_up_word(rng) if rng.random() < 0.5 else rng.choice(W.MORE_KINDS)


def plural(noun):
    irregular = {"mouse": "mice", "goose": "geese", "sheep": "sheep", "fish": "fish", "wolf": "wolves", "deer": "deer", "moose": "moose", "child": "children", "thief": "thieves", "elf": "elves", "dwarf": "dwarves"}
    if noun in irregular:
        return irregular[noun]
    if noun.endswith("man"):
        return noun[:-3] + "men"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def subject(rng):
    """(what the user calls it, the wish)."""
    k, wish = kind(rng), stories.Wish()
    wish.kind = k
    r = rng.random()
    adj = rng.choice(W.ADJS + MORE_ADJS) if rng.random() < 0.4 else ""
    ax = W.with_article(f"{adj} {k}".strip())
    if r < 0.46:
        wish.adj = adj
        return ax, wish
    if r < 0.54:
        n, g = W.name(rng)
        if k in W.PEOPLE and W.PEOPLE[k][0]:
            g = W.PEOPLE[k][0]
            n = rng.choice(W.FEMALE if g == "f" else W.MALE)
        wish.name, wish.gender, wish.adj = n, g, adj
        return rng.choice([f"{ax} named {n}", f"{ax} called {n}"]), wish
    if r < 0.57:
        n, g = W.name(rng)
        k = rng.choice(list(W.ANIMALS) + list(W.OBJECTS))
        wish.kind, wish.name, wish.gender = k, n, g
        return rng.choice([f"{n} the {k}", f"my {k} {n}"]), wish
    if r < 0.60:
        n, g = W.name(rng)
        wish.kind, wish.name, wish.gender = "", n, g
        return n, wish
    if r < 0.62:
        (n, g), wish.kind = W.name(rng), ""
        wish.name, wish.gender = n, g
        wish.friend_name = W.name(rng, {n})[0]
        return f"{n} and {wish.friend_name}", wish
    if r < 0.71:
        k2 = kind(rng)
        if k2 == k:
            return subject(rng)
        wish.friend_kind, wish.adj = k2, adj
        wish.plot = rng.choice([p for p in PLOTS if p != "useful"] if k not in W.OBJECTS else STILL)
        return f"{ax} and {W.with_article(k2)}", wish
    if r < 0.78:
        wish.adj, wish.place = adj, rng.choice(PLACES)
        return rng.choice([f"{ax} who lives {wish.place}", f"{ax} {wish.place}", f"{ax} that lives {wish.place}"]), wish
    if r < 0.80:
        wish.friend_kind = rng.choice(RELATIVES)
        wish.plot = rng.choice([p for p in PLOTS if p not in ("useful", "newcomer", "trick", "race")])
        if rng.random() < 0.5:
            n, g = W.name(rng)
            wish.kind, wish.name, wish.gender = rng.choice(["girl", "girl", "child"] if g == "f" else ["boy", "boy", "child"]), n, g
            x = n
        else:
            wish.kind = rng.choice(["girl", "boy", "boy", "girl", "king", "princess", "witch", "old man", "old woman", "prince", "wizard"])
            wish.gender, wish.adj = W.PEOPLE[wish.kind][0], adj
            x = W.with_article(f"{adj} {wish.kind}".strip())
        if wish.friend_kind == wish.kind:
            wish.friend_kind = "dog"
        return f"{x} and {'her' if wish.gender == 'f' else 'his'} {wish.friend_kind}", wish
    if r < 0.85:
        form, wish.plot = rng.choice(list(PHRASES.items()))
        if k in W.OBJECTS and wish.plot == "skill":
            wish.kind = k = rng.choice(list(W.ANIMALS))
        wish.adj = adj
        wish.deed = {"dream": rng.choice(W.GOALS + ["be " + W.with_article(rng.choice(list(W.PEOPLE))), "have " + W.with_article(rng.choice(W.THINGS)), "visit " + rng.choice(W.CITIES)]),
                     "skill": rng.choice(LEARN), "fear": rng.choice(list(W.FEARS) + ["spiders", "mice", "the rain", "water", "ghosts", "the doctor", "school", "snow", "fire", "flying", "the moon", "dogs", "cats", "the wind", "the cellar"])}[wish.plot]
        return W.with_article(f"{adj} {k}".strip()) + " " + form.format(goal=wish.deed, what=wish.deed, what_=wish.deed), wish
    if r < 0.90:
        deed, wish.plot = rng.choice(list(DEEDS.items()))
        if k in W.OBJECTS:
            wish.kind = k = rng.choice(list(W.ANIMALS))
        wish.adj = adj
        fear = rng.choice(list(W.FEARS))
        if k in W.ANIMALS and W.ANIMALS[k][0] == "water" and fear in ("deep water", "high places", "the old forest", "the big dog"):
            fear = "the dark"
        thing = rng.choice(W.COLORS) + " " + rng.choice(W.THINGS)
        if wish.plot == "fear":
            wish.deed = fear
        elif wish.plot == "lost":
            wish.thing = thing
        elif wish.plot == "wish":
            wish.thing = thing.split()[1]
        return W.with_article(f"{adj} {k}".strip()) + " " + deed.format(fear=fear, thing=W.with_article(thing), thingk=thing.split()[1]), wish
    if r < 0.94:
        wish.kind = ""
        theme, plots = rng.choice(list(THEMES.items()))
        wish.plot = rng.choice(plots.split())
        return theme, wish
    if r < 0.97:
        return plural(k), wish
    if rng.random() < 0.5:
        wish.kind, wish.plot = "", "lost"
        wish.thing = rng.choice(W.COLORS) + " " + rng.choice(W.THINGS)
        return W.with_article(wish.thing), wish
    wish.kind, wish.place = "", rng.choice(PLACES)
    return f"life {wish.place}", wish


def story_turn(rng, asked=None):
    """A request and its story: (turn, story)."""
    if asked or rng.random() < 0.1:
        form, x, wish = asked or rng.choice(ANY), "", stories.Wish()
    else:
        x, wish = subject(rng)
        form = rng.choice(ASK)
    if "short" in form:
        wish.length = "short"
    elif "long" in form:
        wish.length = "long"
    s = stories.tell(rng, wish)
    user = form.format(x=x)
    text = s.text
    if not asked and rng.random() < 0.06:
        user = user.rstrip(".?!") + rng.choice([" and give it a title.", ", with a title.", ". It needs a title."])
        text = f"{s.title}\n\n{text}"
    if wish.length == "" and rng.random() < 0.05:
        user += rng.choice([" Make it short.", " Keep it short, please.", " Short, please."])
        s = stories.tell(rng, replace(wish, length="short"))
        text = s.text if "title" not in user else f"{s.title}\n\n{s.text}"
    size = {"short": "a short story", "long": "a long story"}.get(wish.length, "a story")
    about = f" about {x}" if x else ""
    think = f"The user wants {size}{about}. The hero is {s.hero.name}, {W.with_article(s.hero.kind)}. {s.plan}"
    return Turn(user, think, text), s


def continuation(rng):
    """The user gives a beginning."""
    name, g = W.name(rng)
    k = rng.choice(list(W.ANIMALS) + list(W.PEOPLE))
    if k in W.PEOPLE and W.PEOPLE[k][0] not in ("", g):
        return continuation(rng)
    ax = W.with_article(rng.choice(["", "", rng.choice(W.ADJS) + " "]) + k)
    begin = rng.choice([f"Once upon a time there was {ax} named {name}.", f"There was once {ax} called {name}.", f"{name} was {ax}.", f"Long ago there lived {ax} named {name}.", f"Once there was {ax}. Everybody called it {name}."])
    s = stories.tell(rng, stories.Wish(kind=k, name=name, gender=g, first_words=begin))
    s.paragraphs[0] = s.paragraphs[0][1:]
    user = rng.choice(["Continue this story: {}", "Go on: {}", "Finish the story: {}", "{}", "How does it go on? {}", "Continue: {}", "Write what happens next. {}"]).format(begin)
    return Turn(user, f"The user began a story about {name}. I go on. {s.plan}", s.text), s


def unknown_question(rng, s):
    h, f = s.hero.name, s.friend.name
    if rng.random() < 0.4:
        while (n := W.name(rng)[0]) in s.text:
            pass
        return Turn(rng.choice([f"Who is {n}?", f"What did {n} do?", f"What is {n}?", f"Where does {n} live?"]), f"I look for {n} in the story. There is no {n}.", f"I do not know. There is no {n} in the story.")
    q = rng.choice([f"How old is {h}?", f"What did {h} eat for breakfast?", f"What is the name of {h}'s mother?", f"What colour are the eyes of {f}?", f"How tall is {f}?", f"What is the last name of {h}?", f"How much did it cost?",
                    f"What was the name of the street?", f"How heavy is {h}?", f"What does the father of {f} do?", f"Which year was it?", f"How many teeth does {f} have?", f"What is {h}'s favourite song?", f"What is the phone number of {f}?",
                    f"When is the birthday of {h}?", f"What colour is the house of {f}?", f"How fast is {f}?", f"Does {h} like maths?"])
    return Turn(q, "I look in the story. It does not say that.", "I do not know. The story does not say that.")


def story_question(rng, s):
    r = rng.random()
    if r < 0.22:
        return unknown_question(rng, s)
    if r < 0.30:
        return Turn(rng.choice(["What is the moral of the story?", "What do we learn from the story?", "What does the story teach?", "And the moral?"]), f"The moral is: {s.moral}", s.moral)
    if r < 0.36:
        return Turn(rng.choice(["Summarize the story.", "Summarize it in one sentence.", "What is the story about?", "Can you sum it up?", "Tell it in one sentence."]), "I say it in one sentence.", s.gist)
    if r < 0.39:
        return Turn(rng.choice(["Give the story a title.", "What would be a good title?", "What is the title?"]), f"A good title is {s.title}.", s.title)
    q, a = rng.choice(s.facts)
    return Turn(q, f"I look in the story. {a}", a)


def reading(rng):
    """A given story and questions about it."""
    s = stories.tell(rng, stories.Wish(length=rng.choice(["short", "short", "", ""]), strange=rng.random() < 0.6))
    first = story_question(rng, s)
    form = rng.choice(["{s}\n\n{q}", "Read this story: {s}\n\n{q}", "{q}\n\n{s}", "Here is a story.\n\n{s}\n\nQuestion: {q}", "Story: {s}\n\n{q}", "{q} {s}"])
    turns = [Turn(form.format(s=s.text, q=first.user), first.think, first.answer)]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        turns.append(story_question(rng, s))
    return turns


# --- conversations -------------------------------------------------------------------------------------------------------------

def light(rng):
    return (chatter.any_chatter if rng.random() < 0.6 else sums.any_sum)(rng)


def any_turn(rng):
    return story_turn(rng)[0] if rng.random() < 0.25 else light(rng)


def long_chat(rng):
    turns = []
    if rng.random() < 0.3:
        turns.append(chatter.talk(rng))
    if rng.random() < 0.15:
        turns += chatter.introduction(rng)[:1]
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        if rng.random() < 0.7:
            t, s = story_turn(rng, asked=rng.choice(AGAIN) if turns and len(turns) > 1 and rng.random() < 0.3 else None) if rng.random() < 0.9 else continuation(rng)
            turns.append(t)
            turns += [story_question(rng, s) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        turns += [light(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
    if rng.random() < 0.12:
        first, follow = chatter.introduction(rng)
        turns.insert(0, first)
        turns.append(follow)
    return turns or [light(rng), light(rng)]


PLAIN_SYSTEM = ["You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant", "You are a friendly assistant.", "You are a kind and helpful assistant.", "You are lily, a local assistant.", "Be helpful.",
                "You are an AI assistant.", "You are a storyteller.", "You are a storyteller for children.", "You tell stories to children.", "You are a teacher.", "Answer politely.", "You are a careful assistant that gives short answers.",
                "Please answer in English.", "You are a useful assistant. Answer the questions of the user.", "You write stories.", "You are a poet and a storyteller."]


def system_prompt(rng, turns):
    """A system message and the turns as it changes them."""
    r = rng.random()
    if r < 0.52:
        return None, turns
    if r < 0.84:
        return rng.choice(PLAIN_SYSTEM), turns
    if r < 0.90:
        n, _ = W.name(rng)
        role = rng.choice(list(W.PEOPLE) + ["assistant", "assistant", "helper", "friend"])
        text = rng.choice([f"You are {n}, {W.with_article(role)}.", f"Your name is {n}. You are {W.with_article(role)}.", f"You are {n}, a friendly {role}. You answer questions."])
        who = Turn(rng.choice(["Who are you?", "What is your name?", "What's your name?", "Introduce yourself.", "who are you?"]), f"My name here is {n}.", f"I am {n}, {W.with_article(role)}.")
        return text, [who] + turns if rng.random() < 0.7 else turns
    if r < 0.935:
        end = rng.choice(["Good night!", "Goodbye!", "Have a nice day!", "Ahoy!", "Thank you!", "That is all.", "Meow!", W.made_up_word(rng).capitalize() + "!"])
        return rng.choice(["Always end your answer with: {}", "End each answer with \"{}\"", "Finish every answer with the words {}"]).format(end), [replace(t, answer=t.answer + " " + end) for t in turns]
    if r < 0.97:
        start = rng.choice(["Ahoy!", "Well,", "Hello!", "Listen:", "My friend,", "Arr!", "Dear user,", W.made_up_word(rng).capitalize() + "!"])
        return rng.choice(["Start each answer with: {}", "Begin every answer with \"{}\"", "Always begin with the words {}"]).format(start), [replace(t, answer=start + " " + t.answer) for t in turns]
    sums_only = [sums.addition(rng) for _ in range(rng.randint(1, 4))]
    return rng.choice(["Answer only with the number.", "Give just the number as your answer.", "Reply with the number only."]), [replace(t, answer=re.findall(r"\d+", t.answer)[-1]) for t in sums_only]


class Template:
    """The checkpoint's chat template, in the environment that transformers gives it."""

    def __init__(self):
        import jinja2
        import jinja2.sandbox

        def fail(message):
            raise jinja2.TemplateError(message)

        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
        env.globals["raise_exception"] = fail
        self.template = env.from_string((ASSETS / "chat_template.jinja").read_text())

    def __call__(self, messages, tools=None, **switches):
        return self.template.render(messages=messages, tools=tools, **switches)


def as_messages(turns, system=None):
    out = [{"role": "system", "content": system}] if system is not None else []
    for t in turns:
        out += [{"role": "user", "content": t.user}, {"role": "assistant", "content": t.answer, "reasoning_content": t.think}]
    return out


def document(rng, render):
    """One training document, without its end mark."""
    tools = None
    r = rng.random()
    if r < 0.07:                                             # a story as plain text
        s = stories.tell(rng, subject(rng)[1] if rng.random() < 0.7 else stories.Wish())
        return (s.title + "\n\n" if rng.random() < 0.2 else "") + s.text
    if r < 0.20:
        messages, tools = toolcalls.conversation(rng, any_turn)
        if rng.random() < 0.35:
            messages.insert(0, {"role": "system", "content": rng.choice(PLAIN_SYSTEM)})
    else:
        if r < 0.49:
            turns = [story_turn(rng)[0] if rng.random() < 0.95 else continuation(rng)[0]]
        elif r < 0.58:
            turns = long_chat(rng)
        elif r < 0.66:
            turns = reading(rng)
        elif r < 0.84:
            turns = [sums.any_sum(rng) for _ in range(rng.choice([1, 1, 1, 2, 3, 4, 6]))]
        elif r < 0.97:
            turns = [chatter.any_chatter(rng) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
        elif r < 0.98:
            turns = chatter.introduction(rng)
        else:
            turns = [light(rng) for _ in range(rng.randint(2, 6))]
        system, turns = system_prompt(rng, turns)
        messages = as_messages(turns, system)
    if rng.random() < 0.5:                                   # thinking off: the think block of each answer is empty
        for m in messages:
            m.pop("reasoning_content", None)
    return render(messages, tools, preserve_thinking=rng.random() < 0.04).rstrip("\n")


# --- the King James Version ------------------------------------------------------------------------------------------------------

def kjv_passages(path):
    """(training, held out): passages of whole paragraphs, about 2000 characters each."""
    passages, now = [], []
    for line in Path(path).read_text().splitlines():
        now.append(line)
        if sum(map(len, now)) > 2000:
            passages.append(" ".join(now))
            now = []
    return ([p for i, p in enumerate(passages) if i % KJV_HELD_OUT], [p for i, p in enumerate(passages) if i % KJV_HELD_OUT == 0])


# --- shards ----------------------------------------------------------------------------------------------------------------------

def pack(documents, rows, end):
    """Rows of ROW + 1 tokens from an iterator of token lists, each row starting with a document; padded with `end`."""
    import numpy as np

    out = np.full((rows, ROW + 1), end, np.uint16)
    waiting = []
    for row in out:
        at, tries = 0, 0
        while tries < 40:
            doc = waiting.pop(0) if waiting and tries < len(waiting) else next(documents)
            if len(doc) > ROW + 1:
                continue
            if at + len(doc) <= ROW + 1:
                row[at:at + len(doc)] = doc
                at += len(doc)
                if at > ROW - 30:
                    break
            else:
                waiting.append(doc)
                tries += 1
    return out


def make_shard(job):
    import numpy as np
    from tokenizers import Tokenizer

    index, count, out, kjv, seed = job
    done = Path(out) / f"{index:04}.npy"
    if done.exists():
        return index
    rng, render = random.Random(f"{seed}/{index}"), Template()
    tok = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    end = tok.token_to_id(END)
    passages = kjv_passages(kjv)[0] * KJV_EPOCHS if kjv else []
    order = list(range(len(passages)))
    random.Random(seed).shuffle(order)
    mine = [passages[i] for i in order[len(order) * index // count:len(order) * (index + 1) // count]]

    def stream():
        every = 0
        while True:
            texts = [document(rng, render) for _ in range(500)]
            if mine and every < 100:
                take = -(-len(mine) // 12)
                texts += [mine.pop() for _ in range(min(take, len(mine)))]
                rng.shuffle(texts)
            every += 1
            for e in tok.encode_batch([t + END for t in texts], add_special_tokens=False):
                yield e.ids

    rows = pack(stream(), ROWS_PER_SHARD, end)
    tmp = done.with_suffix(".tmp.npy")
    np.save(tmp, rows)
    os.replace(tmp, done)
    return index


# --- what is held out --------------------------------------------------------------------------------------------------------------

def tasks():
    """100 prompts for each task, with what a good answer is."""
    rng, rows = random.Random("tasks"), []
    seen = set()

    def add(task, messages, expect, thinking, tools=None):
        rows.append({"task": task, "messages": messages, "tools": tools, "thinking": thinking, "expect": expect})

    for digits in (1, 2):
        got = []
        while len(got) < 100:
            lo, hi = (0, 9) if digits == 1 else (10, 99)
            a, b, form = rng.randint(lo, hi), rng.randint(lo, hi), rng.choice(sums.ADD)
            if (a, b, form) in seen or not (sums.held_out_pair(a, b) if digits == 2 else sums.held_out_prompt(form, a, b)):
                continue
            seen.add((a, b, form))
            got.append((form.format(a=a, b=b), str(a + b)))
        for thinking in (False, True):
            for q, c in got:
                add(f"add{digits}" + ("_think" if thinking else ""), [{"role": "user", "content": q}], {"number": c}, thinking)
    for i in range(100):
        d = toolcalls.draw(rng, want_held_out=True)
        tools = toolcalls.toolbox(rng, [d] + toolcalls.others(rng, [d], rng.choice([0, 1, 2, 3])))
        add("tool", [{"role": "user", "content": d.user}], {"name": d.name, "arguments": d.arguments}, i % 2 == 1, tools)
    for i in range(100):
        x, wish = subject(rng)
        add("story", [{"role": "user", "content": rng.choice(ASK).format(x=x)}], {"about": wish.name or wish.kind or ""}, i % 2 == 1)
    for i in range(100):
        s = stories.tell(rng, stories.Wish(length="short", strange=rng.random() < 0.5))
        q, a = rng.choice(s.facts)
        add("story_question", [{"role": "user", "content": f"{s.text}\n\n{q}"}], {"text": a}, i % 2 == 1)
    for i in range(100):
        s = stories.tell(rng, stories.Wish(length="short", strange=rng.random() < 0.5))
        t = unknown_question(rng, s)
        add("unknown", [{"role": "user", "content": f"{s.text}\n\n{t.user}"}], {"starts": "I do not know."}, i % 2 == 1)
    for i in range(100):
        t = chatter.as_json(rng)
        value = json.loads(t.answer)
        add("json", [{"role": "user", "content": t.user}], {"json": value} if "array" not in t.user and "in JSON." not in t.user else {"json_list": len(value)}, i % 2 == 1)
    return rows


def heldout(out, kjv):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    rng, render = random.Random("held out"), Template()
    text = ""
    while len(text.encode()) < 190_000:
        text += document(rng, render) + END + "\n"
    (out / "synthetic.txt").write_text(text)
    (out / "kjv.txt").write_text("".join(p + END + "\n" for p in kjv_passages(kjv)[1])[:198_000].rsplit(END, 1)[0] + END + "\n")
    with open(out / "tasks.jsonl", "w") as f:
        for row in tasks():
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def main():
    ap = argparse.ArgumentParser()
    sub = ap.add_subparsers(dest="what", required=True)
    p = sub.add_parser("sample")
    p.add_argument("count", type=int)
    p.add_argument("--seed", default="sample")
    p = sub.add_parser("shards")
    p.add_argument("out", type=Path)
    p.add_argument("count", type=int)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--kjv", type=Path)
    p.add_argument("--seed", default="lily")
    p = sub.add_parser("heldout")
    p.add_argument("out", type=Path)
    p.add_argument("--kjv", type=Path, required=True)
    args = ap.parse_args()
    if args.what == "sample":
        rng, render = random.Random(args.seed), Template()
        for _ in range(args.count):
            print(document(rng, render) + END + "\n" + "-" * 80)
    elif args.what == "heldout":
        heldout(args.out, args.kjv)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        jobs = [(i, args.count, args.out, args.kjv, args.seed) for i in range(args.count)]
        with Pool(args.workers) as pool:
            for i in pool.imap(make_shard, jobs):
                print("shard", i, flush=True)


if __name__ == "__main__":
    main()
