"""Short stories in a small consistent world.

`tell(rng, wish)` plans one story: it fixes the hero, the friend, the place and the things, and lets one of plots.py speak.
Besides the text a `Story` keeps what a reader could be asked: the plan, a one-sentence gist, the moral, and facts as
(question, answer) pairs. Alternatives in a sentence are separated by `|`, and names in braces are the planned things.
"""

import re
from dataclasses import dataclass, field

import world as W
from plots import PLOTS, STILL

PRONOUNS = {"f": ("she", "her", "her"), "m": ("he", "his", "him"), "n": ("it", "its", "it")}


@dataclass
class Wish:
    """What was asked for. Empty fields are free."""
    kind: str = ""          # "fox", "baker", "lamp", or a word not in our tables
    name: str = ""
    gender: str = ""
    adj: str = ""
    friend_kind: str = ""
    friend_name: str = ""
    place: str = ""         # "in a forest"
    thing: str = ""         # "a red key"
    plot: str = ""
    length: str = ""        # "", "short", "long"
    deed: str = ""          # what the hero is afraid of, wants to learn, or dreams of
    strange: bool = False   # names may be made up
    first_words: str = ""   # a given beginning, ending before the next sentence


@dataclass
class Character:
    kind: str
    name: str
    gender: str
    adj: str = ""

    @property
    def animal(self):
        return W.ANIMALS.get(self.kind)

    @property
    def place(self):
        if self.animal:
            return self.animal[0]
        return "thing" if self.kind in W.OBJECTS else "land"


@dataclass
class Story:
    hero: Character = None
    friend: Character = None
    slots: dict = field(default_factory=dict)
    paragraphs: list = field(default_factory=lambda: [[]])
    plan: str = ""
    gist: str = ""
    moral: str = ""
    facts: list = field(default_factory=list)
    title: str = ""

    @property
    def text(self):
        return "\n\n".join(" ".join(p) for p in self.paragraphs if p)


class Teller:
    """Holds one story while a plot writes it."""

    def __init__(self, rng, wish):
        self.rng, self.wish, self.s = rng, wish, Story()
        self.cast()

    def pick(self, options):
        return self.rng.choice(options.split("|"))

    def fill(self, text):
        out = text.format(**self.s.slots)
        out = re.sub(r"(?<=[.!?] )[a-z]", lambda m: m.group().upper(), out)   # a pronoun that opens a sentence
        out = re.sub(r"(^|\s)\"([a-z])", lambda m: m[1] + '"' + m[2].upper(), out)          # or an opening quote
        return out[0].upper() + out[1:]

    def say(self, options, chance=1.0):
        if chance >= 1.0 or self.rng.random() < chance:
            if self.wish.length == "short" and chance < 1.0:
                return
            self.s.paragraphs[-1].append(self.fill(self.pick(options)))

    def more(self, options):
        """A sentence that long stories have, others sometimes, short ones never."""
        self.say(options, 1.0 if self.wish.length == "long" else 0.45)

    def para(self):
        if self.wish.length != "short":
            self.s.paragraphs.append([])

    def fact(self, question, answer):
        self.s.facts.append((self.fill(self.pick(question)), self.fill(answer)))

    def cast(self):
        rng, wish, s = self.rng, self.wish, self.s
        kind = wish.kind
        if not kind:
            if wish.name:
                kind = rng.choice(["girl" if wish.gender == "f" else "boy", rng.choice(list(W.ANIMALS))])
            else:
                kind = rng.choice(list(W.ANIMALS) + ["girl", "boy"] * 8 + rng.sample(list(W.PEOPLE), 12))
        gender = wish.gender or (W.PEOPLE[kind][0] if kind in W.PEOPLE else "")
        name = wish.name
        while not name:
            name, g = W.name(rng, {wish.friend_name}, cast=None if wish.strange else "hero")
            if gender and g != gender:
                name = ""
        gender = gender or (g if not wish.name else rng.choice("fm"))
        s.hero = Character(kind, name, gender, wish.adj or ("" if wish.first_words or rng.random() < 0.3 else rng.choice(W.ADJS)))
        home = s.hero.place
        fk = wish.friend_kind
        while not fk or (fk == kind and not wish.friend_kind):
            pool = W.PEOPLE if kind in W.PEOPLE and rng.random() < 0.55 else W.ANIMALS
            fk = rng.choice(list(pool))
            if pool is W.ANIMALS and home == "water" and W.ANIMALS[fk][0] != "water":
                fk = ""
            elif pool is W.ANIMALS and home != "water" and W.ANIMALS[fk][0] == "water" and fk != "otter":
                fk = ""
        fg = W.PEOPLE[fk][0] if fk in W.PEOPLE else ""
        fname = wish.friend_name
        while not fname:
            fname, g = W.name(rng, {name}, cast=None if wish.strange else "friend")
            if fg and g != fg:
                fname = ""
            fg2 = g
        s.friend = Character(fk, fname, fg or (fg2 if not wish.friend_name else rng.choice("fm")))
        water = home == "water"
        spots = rng.sample(W.WATER_SPOTS if water else W.LAND_SPOTS, 3)
        color = rng.choice(W.COLORS)
        thing = wish.thing or f"{color} {rng.choice(W.THINGS)}"
        place = wish.place or self.home_place()
        slots = s.slots
        for key, c in (("h", s.hero), ("f", s.friend)):
            he, his, him = PRONOUNS[c.gender]
            slots.update({key.upper(): c.name, key: "the " + c.kind, key + "k": c.kind, "a" + key: W.with_article(c.kind),
                          key + "e": he, key + "is": his, key + "im": him})
        slots.update(hadj=(s.hero.adj + " ") if s.hero.adj else "", aah=W.with_article(f"{s.hero.adj} {s.hero.kind}".strip()),
                     place=place, thing=thing, athing=W.with_article(thing), thingk=thing.split()[-1],
                     food=rng.choice(W.WATER_FOODS if water else W.FOODS), spot1=spots[0], spot2=spots[1], spot3=spots[2],
                     move=s.hero.animal[1] if s.hero.animal else "walked", weather=rng.choice(W.WEATHER), season=rng.choice(W.SEASONS),
                     home=s.hero.animal[2] if s.hero.animal else "house", n=W.NUMBER_WORDS[rng.randint(2, 9)])
        if s.hero.animal and s.hero.animal[1] == "flew" and water:
            slots["move"] = "swam"

    def home_place(self):
        rng, hero = self.rng, self.s.hero
        if hero.kind in W.OBJECTS:
            return "in an old house" if rng.random() < 0.4 else f"in a {rng.choice(['small town', 'quiet village', 'little house', 'green valley'])}"
        if hero.kind in W.PEOPLE and rng.random() < 0.6:
            return f"in {W.with_article(rng.choice(['small ', 'old ', 'quiet ', 'little ', 'green ']) + W.PEOPLE[hero.kind][1])}"
        if hero.place == "water":
            return f"in {W.with_article(rng.choice(W.WATER_PLACES))}"
        p = rng.choice(W.PLACES)
        return f"{'on' if p in ('farm', 'island', 'green hill', 'meadow', 'river bank') else 'in'} {W.with_article(p)}"

    def opening(self):
        """Who and where; then a sentence about the hero."""
        if self.wish.first_words:
            self.s.paragraphs[-1].append(self.wish.first_words)
        else:
            self.say("Once upon a time there was {aah} named {H}.|Once upon a time, {place}, there lived {aah} named {H}.|"
                     "{place} there lived {aah} named {H}.|There was once {aah} called {H} who lived {place}.|"
                     "{H} was {aah} who lived {place}.|Long ago, {place}, there was {aah} named {H}.|"
                     "Once there was {aah} whose name was {H}.|One {season}, {aah} named {H} lived {place}.|"
                     "This is the story of {H}, {aah} who lived {place}.|A long time ago there lived {aah} named {H}.")
        last = self.s.paragraphs[-1][-1]
        if self.s.slots["place"] not in last and self.s.slots["place"][1:] not in last:
            self.say("{H} lived {place}.|{he} lived {place}.|{H} had {his} home {place}.")
        trait = {
            "brave": "{H} was not afraid of anything, or almost anything.", "clever": "{H} had a good idea for every problem.",
            "shy": "{H} did not like to speak to strangers.", "curious": "{H} wanted to know everything.",
            "lazy": "{H} liked nothing better than a long nap.", "proud": "{H} thought that nobody was better than {him}.",
            "lonely": "{H} often wished for somebody to play with.", "hungry": "{H} could eat all day long.",
            "sleepy": "{H} yawned even at noon.", "clumsy": "{H} dropped nearly everything {he} touched.",
            "greedy": "{H} always wanted more than {he} had.", "grumpy": "{H} hardly ever smiled.",
            "kind": "{H} had a good word for everyone.", "tiny": "{H} was so small that nobody noticed {him}.",
            "stubborn": "When {H} said no, it was no.", "honest": "{H} never told a lie.",
        }.get(self.s.hero.adj)
        if trait and self.wish.adj:
            self.say(trait)
        elif trait:
            self.more(trait)
        else:
            self.more("Every morning {he} looked at the sky and smiled.|Everybody {place} knew {him}.|{H} liked {food} more than anything else.|"
                      "{H} loved to sing in the morning.|{his} best days were the {weather} ones.|{H} lived there with {his} grandmother.|"
                      "{H} had {n} brothers and sisters.")
        if self.s.hero.animal:
            self.say("{he} had a cosy home in a {home}.|{his} home was a warm {home}.", 0.12)

    def closing(self, moral):
        self.s.moral = self.fill(moral)
        adj = self.s.hero.adj
        if self.wish.adj and adj in ("brave", "clever", "kind", "honest", "wise", "smart", "strong", "funny", "gentle"):
            self.say(f"From that day on everybody knew how {adj} {{H}} {{h}} was.|And that is the story of the {adj} {{hk}}.", 0.6)
        self.say("{H} went home and slept well that night.|That night {H} fell asleep with a smile.|And they lived happily ever after.|"
                 "From that day on, {H} and {F} were the best of friends.|And if you go there today, you may still see {H} and {F} together.|"
                 "It was the best day of the whole {season}.|{H} and {F} still tell this story today.|"
                 "When the moon came up, the two friends were still laughing.")
        if self.rng.random() < 0.35:
            self.say(f"{self.s.moral}|{{H}} had learned something: {self.s.moral[0].lower() + self.s.moral[1:]}" if not self.s.moral.startswith(
                self.s.hero.name) else self.s.moral)

    def meet(self):
        self.say("On the way {he} met {F}, {af}.|Then {F} {f} came by.|Just then {he} met {af} named {F}.|"
                 "{H} went to see {F} {f}.|Soon {he} met {af} whose name was {F}.|Not far away lived {F}, {af}.|"
                 "There {he} saw {F} {f}.")


def tell(rng, wish):
    t = Teller(rng, wish)
    plot = wish.plot
    if not plot and t.s.hero.kind in W.OBJECTS:
        plot = "useful" if rng.random() < 0.6 else rng.choice(STILL)
    if not plot:
        plot = rng.choice([p for p in PLOTS if p != "useful"])
    if plot == "race" and t.s.hero.kind in W.OBJECTS:
        plot = "useful"
    PLOTS[plot](t)
    s = t.s
    t.fact("Who is the story about?|Who is the main character?|What is the name of {h}?|Who is the hero of the story?", "The story is about {H}, {aah}.")
    t.fact("Who is {F}?|What is {F}?|What kind of character is {F}?", "{F} is {af}.")
    t.fact("What is {H}?|What kind of character is {H}?", "{H} is {ah}.")
    if t.s.slots["place"][1:] in s.text:
        t.fact("Where did {H} live?|Where does the story take place?", "{H} lived {place}.")
    return s
