"""Arithmetic, comparisons and counting as (question, thinking, answer) turns."""

from dataclasses import dataclass

import world as W


@dataclass
class Turn:
    user: str
    think: str
    answer: str


ADD = ["What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "{a}+{b}=", "How much is {a} plus {b}?", "Add {a} and {b}.",
       "What is the sum of {a} and {b}?", "Calculate {a} + {b}.", "Can you tell me what {a} + {b} is?", "Please add {a} and {b}.",
       "what is {a}+{b}", "What's {a} + {b}?", "{a} plus {b}?", "Compute {a} + {b}", "How much is {a}+{b}?", "What do you get when you add {a} and {b}?",
       "Tell me {a} + {b}.", "what is {a} plus {b}?", "Solve {a} + {b}."]
SUB = ["What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "How much is {a} minus {b}?", "Subtract {b} from {a}.", "Calculate {a} - {b}.",
       "What's {a} - {b}?", "{a} minus {b}?", "what is {a}-{b}"]
MUL = ["What is {a} * {b}?", "{a} * {b}", "{a} x {b}", "How much is {a} times {b}?", "Multiply {a} by {b}.", "Calculate {a} * {b}.",
       "What is {a} times {b}?", "what is {a}*{b}"]
DIV = ["What is {a} / {b}?", "{a} / {b}", "How much is {a} divided by {b}?", "Divide {a} by {b}."]
COLUMNS = ["Ones", "Tens", "Hundreds", "Thousands"]


def held_out_pair(a, b):
    """Two-digit sums that training never shows, in either order: one pair in five."""
    return a >= 10 and b >= 10 and a < 100 and b < 100 and W.bucket(f"sum:{min(a, b)},{max(a, b)}", 5) == 0


def held_out_prompt(form, a, b):
    """One-digit sums: the pair is known, but not in this wording."""
    return a < 10 and b < 10 and W.bucket(f"prompt:{form},{a},{b}", 5) == 0


def add_think(a, b):
    if a < 10 and b < 10:
        return f"I add {a} and {b}. {a} + {b} = {a + b}."
    steps, carry, da, db = [], 0, str(a)[::-1], str(b)[::-1]
    n = max(len(da), len(db))
    for i in range(n):
        x, y = (int(d[i]) if i < len(d) else 0 for d in (da, db))
        s = x + y + carry
        text = f"{COLUMNS[i]}: {x} + {y}" + (f" + {carry}" if carry else "") + f" = {s}"
        carry = s // 10
        steps.append(text + (f", write {s % 10}, carry 1." if carry and i < n - 1 else f", write {s}."))
    return " ".join(steps) + f" The sum is {a + b}."


def sub_think(a, b):
    if a < 10:
        return f"I take {b} from {a}. {a} - {b} = {a - b}."
    steps, borrow, da, db = [], 0, str(a)[::-1], str(b)[::-1]
    for i in range(len(da)):
        x, y = int(da[i]) - borrow, int(db[i]) if i < len(db) else 0
        if x < y:
            steps.append(f"{COLUMNS[i]}: {x} is less than {y}, borrow: {x + 10} - {y} = {x + 10 - y}.")
            borrow = 1
        else:
            steps.append(f"{COLUMNS[i]}: {x} - {y} = {x - y}.")
            borrow = 0
    return " ".join(steps) + f" The result is {a - b}."


def operands(rng, digits=None):
    """Operands of a sum that training may show."""
    while True:
        d = digits or rng.choices(["1", "2", "12", "3", "34"], [18, 58, 10, 8, 6])[0]
        lo, hi = {"1": (0, 9), "2": (10, 99), "12": (0, 99), "3": (100, 999), "34": (10, 9999)}[d]
        a, b = rng.randint(lo, hi), rng.randint(lo, hi)
        if not held_out_pair(a, b):
            return a, b


def addition(rng):
    while True:
        a, b = operands(rng)
        form = rng.choice(ADD)
        if not held_out_prompt(form, a, b):
            break
    return Turn(form.format(a=a, b=b), add_think(a, b), f"{a} + {b} = {a + b}.")


def sheet(rng):
    """Several sums in one answer."""
    rows, n = [], rng.randint(2, 9)
    op = rng.choices("+-*", [80, 14, 6])[0]
    for _ in range(n):
        if op == "+":
            a, b = operands(rng, rng.choices(["1", "2", "12"], [2, 6, 2])[0])
            rows.append((a, b, a + b))
        elif op == "-":
            a, b = sorted((rng.randint(0, 99), rng.randint(0, 99)), reverse=True)
            rows.append((a, b, a - b))
        else:
            a, b = rng.randint(0, 12), rng.randint(0, 12)
            rows.append((a, b, a * b))
    asked = rng.choice(["Solve these: ", "Calculate: ", "What are ", "Please work these out: ", "Sums: ", ""]) + ", ".join(f"{a} {op} {b}" for a, b, _ in rows)
    return Turn(asked, f"There are {n} of them. I do them one by one.", "\n".join(f"{a} {op} {b} = {c}" for a, b, c in rows))


def other_operation(rng):
    kind = rng.choice("---**/")
    if kind == "-":
        a, b = sorted((rng.randint(0, rng.choice([9, 20, 99, 99])), rng.randint(0, 60)), reverse=True)
        return Turn(rng.choice(SUB).format(a=a, b=b), sub_think(a, b), f"{a} - {b} = {a - b}.")
    a, b = rng.randint(0, 12), rng.randint(1, 12)
    if kind == "*":
        return Turn(rng.choice(MUL).format(a=a, b=b), f"I multiply {a} by {b}. {a} * {b} = {a * b}.", f"{a} * {b} = {a * b}.")
    return Turn(rng.choice(DIV).format(a=a * b, b=b), f"{a} * {b} = {a * b}, so {a * b} / {b} = {a}.", f"{a * b} / {b} = {a}.")


def word_problem(rng):
    who, g = W.name(rng)
    he = "she" if g == "f" else "he"
    thing = rng.choice(["apples", "nuts", "shells", "coins", "books", "eggs", "flowers", "stones", "cookies", "marbles", "pears"])
    a, b = rng.randint(1, 12), rng.randint(1, 9)
    if rng.random() < 0.5:
        other, _ = W.name(rng, {who})
        q = rng.choice([f"{who} has {a} {thing} and gets {b} more. How many {thing} does {who} have now?",
                        f"{who} has {a} {thing}. {other} gives {who} {b} {thing}. How many does {he} have?",
                        f"There are {a} {thing} on the table. {who} puts {b} more there. How many are there now?",
                        f"{who} finds {a} {thing} and then {b} {thing}. How many {thing} are that?"])
        c, op = a + b, "+"
    else:
        a += b
        q = rng.choice([f"{who} has {a} {thing} and gives away {b}. How many {thing} are left?",
                        f"{who} had {a} {thing} but lost {b} of them. How many does {he} have now?",
                        f"There are {a} {thing}. {who} eats {b}. How many {thing} are left?".replace("eats", "takes")])
        c, op = a - b, "-"
    there = q.startswith("There")
    return Turn(q, f"{'More' if op == '+' else 'Less'}: {a} {op} {b} = {c}.", f"{a} {op} {b} = {c}. " + (f"There are {c} {thing}." if there else f"{who} has {c} {thing}."))


def comparison(rng):
    k = rng.randrange(9)
    hi = rng.choice([9, 20, 99, 99, 999])
    a, b = rng.sample(range(hi + 1), 2)
    if k <= 2:
        big = rng.random() < 0.6
        word = rng.choice(["larger", "bigger", "greater"] if big else ["smaller", "less"])
        c, d = (max(a, b), min(a, b)) if big else (min(a, b), max(a, b))
        q = rng.choice([f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?", f"What is {word}, {a} or {b}?", f"{a} or {b}: which is {word}?"])
        return Turn(q, f"I compare {a} and {b}. {max(a, b)} is larger than {min(a, b)}.", f"{c} is {word} than {d}.")
    if k == 3:
        big = rng.random() < 0.5
        yes = (a > b) == big
        word = "larger" if big else "smaller"
        return Turn(f"Is {a} {word} than {b}?", f"I compare {a} and {b}. {max(a, b)} is larger than {min(a, b)}.",
                    f"Yes, {a} is {word} than {b}." if yes else f"No, {a} is not {word} than {b}.")
    if k == 4:
        xs = rng.sample(range(hi + 1), rng.randint(3, 6))
        down = rng.random() < 0.3
        ys = sorted(xs, reverse=down)
        q = rng.choice(["Sort these numbers{}: {}", "Put these numbers in order{}: {}", "Sort{}: {}"]).format(" from large to small" if down else "", ", ".join(map(str, xs)))
        return Turn(q, f"The {'largest' if down else 'smallest'} is {ys[0]}, then {ys[1]}.", ", ".join(map(str, ys)))
    if k == 5:
        xs = rng.sample(range(hi + 1), rng.randint(3, 5))
        big = rng.random() < 0.6
        y = max(xs) if big else min(xs)
        word = rng.choice(["largest", "biggest"] if big else ["smallest"])
        return Turn(f"What is the {word} of these numbers: {', '.join(map(str, xs))}?", f"I look at each number. The {word} is {y}.", f"The {word} number is {y}.")
    if k == 6:
        n = rng.randint(0, 200)
        even = n % 2 == 0
        return Turn(rng.choice([f"Is {n} even or odd?", f"Is the number {n} odd or even?"]), f"The last digit of {n} is {n % 10}. That is {'even' if even else 'odd'}.",
                    f"{n} is {'even' if even else 'odd'}.")
    if k == 7:
        n = rng.randint(1, 200)
        after = rng.random() < 0.6
        c = n + 1 if after else n - 1
        q = rng.choice([f"What comes after {n}?", f"Which number comes after {n}?", f"What is the next number after {n}?"]) if after else f"Which number comes before {n}?"
        return Turn(q, f"I count: {c} comes {'after' if after else 'before'} {n}.", f"{c} comes {'after' if after else 'before'} {n}.")
    lo = rng.choice([1, 1, 1, rng.randint(0, 80)])
    n = lo + rng.randint(2, 19)
    down = rng.random() < 0.2
    xs = list(range(lo, n + 1))[::-1 if down else 1]
    q = rng.choice([f"Count from {xs[0]} to {xs[-1]}.", f"Can you count from {xs[0]} to {xs[-1]}?", f"count from {xs[0]} to {xs[-1]}"] + ([f"Count to {n}.", f"count to {n}"] if lo == 1 and not down else []))
    return Turn(q, f"I start at {xs[0]} and stop at {xs[-1]}.", ", ".join(map(str, xs)))


def number_word(rng):
    n = rng.randrange(21)
    w = W.NUMBER_WORDS[n]
    return rng.choice([Turn(f"Write {n} as a word.", f"The word for {n} is {w}.", w.capitalize() + "."),
                       Turn(f"Which number is \"{w}\"?", f"The word {w} means {n}.", f"{n}"),
                       Turn(f"How do you write {n} in letters?", f"The word for {n} is {w}.", f"{n} is written \"{w}\".")])


def any_sum(rng):
    return rng.choices([addition, sheet, other_operation, word_problem, comparison, number_word], [40, 22, 12, 8, 16, 2])[0](rng)
