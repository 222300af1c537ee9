"""Conversations with tools: schemas, calls with arguments, results, and what is said about them.

A domain gives, for one draw: the function (name, description, parameters), the arguments that the user's words ask for, the words,
the tool's result and the final answer. Names of functions and parameters vary, so that they have to be read from the schema.
"""

import json

import world as W

PEOPLE = lambda rng: W.name(rng)[0]


def city(rng):
    return W.made_up_word(rng).capitalize() if rng.random() < 0.12 else rng.choice(W.CITIES)


def param(kind, text, **more):
    return {"type": kind, "description": text, **more}


# Each domain: rng -> (function names, descriptions, {role: ([parameter names], schema, value, required)}, user forms, result, answers).
# In user forms and answers, {role} is the value.

def weather(rng):
    c = city(rng)
    unit = rng.choice(["celsius", "fahrenheit"])
    t, sky = rng.randint(-10, 35), rng.choice(["sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "clear"])
    use_unit = rng.random() < 0.2
    roles = {"c": (["city", "location", "place", "town", "city_name"], param("string", rng.choice(["The city", "Name of the city", "The city, e.g. Paris"])), c, True)}
    if rng.random() < 0.4 or use_unit:
        roles["u"] = (["unit", "units"], param("string", "Unit of the temperature", enum=["celsius", "fahrenheit"]), unit if use_unit else None, False)
    users = ["What is the weather in {c}?", "How is the weather in {c}?", "What's the weather like in {c} today?", "Weather in {c}?", "Is it warm in {c}?", "Tell me the weather in {c}.", "Do I need an umbrella in {c}?",
             "weather in {c}", "how is the weather in {c} now", "Please check the weather for {c}."]
    users = [u.rstrip("?.") + f" in {unit}?" for u in users[:5]] if use_unit else users
    result = rng.choice([{"temperature": t, "condition": sky}, {"city": c, "temp": t, "sky": sky}, f"{t} degrees, {sky}", f"{sky}, {t} degrees"])
    return (["get_weather", "weather", "current_weather", "get_current_weather", "weather_lookup", "fetch_weather", "getWeather", "weather_report", "look_up_weather"],
            ["Get the weather for a city.", "Returns the current weather.", "Look up the current weather in a city", "Get the current weather in a given location"], roles, users, result,
            [f"In {{c}} it is {sky} with {t} degrees.", f"It is {t} degrees and {sky} in {{c}}."])


def calculator(rng):
    op = rng.choice("+-*")
    a, b = rng.randint(2, 999), rng.randint(2, 999)
    c = {"+": a + b, "-": a - b, "*": a * b}[op]
    e = f"{a} {op} {b}"
    word = {"+": "plus", "-": "minus", "*": "times"}[op]
    return (["calculator", "calculate", "calc", "evaluate", "compute", "math"], ["Evaluate an arithmetic expression.", "A calculator.", "Calculates the value of an expression"],
            {"e": (["expression", "expr", "input", "formula"], param("string", rng.choice(["The expression", "Arithmetic expression, e.g. 2 + 3"])), e, True)},
            [f"What is {e}?", f"Calculate {e}.", f"How much is {a} {word} {b}?", f"{e}", f"Use the calculator: {e}", f"Please compute {e}."], rng.choice([str(c), {"result": c}]), [f"{e} = {c}.", f"The result is {c}."])


def clock(rng):
    c, t = city(rng), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return (["get_time", "current_time", "time_in", "get_local_time", "world_clock", "getTime"], ["Get the local time in a city.", "Returns the current time", "Tells what time it is in a place"],
            {"c": (["city", "location", "place", "timezone_city"], param("string", "The city"), c, True)},
            ["What time is it in {c}?", "How late is it in {c}?", "Tell me the time in {c}.", "time in {c}?", "What is the local time in {c}?"], rng.choice([t, {"time": t}, {"city": c, "local_time": t}]),
            [f"It is {t} in {{c}}.", f"In {{c}} it is {t} now."])


def timer(rng):
    n = rng.randint(1, 90)
    return (["set_timer", "start_timer", "timer", "startTimer", "create_timer"], ["Start a timer.", "Sets a timer for some minutes", "Start a countdown"],
            {"n": (["minutes", "duration", "duration_minutes", "mins"], param("integer", rng.choice(["Minutes", "How many minutes"])), n, True)},
            ["Set a timer for {n} minutes.", "Start a timer: {n} minutes.", "Timer for {n} minutes, please.", "Wake me in {n} minutes.", "set a {n} minute timer", "Can you set a timer for {n} minutes?"],
            rng.choice(["ok", {"status": "started"}, {"ok": True}, "Timer started."]), ["The timer is set for {n} minutes.", "Done, the timer runs for {n} minutes."])


def reminder(rng):
    t = f"{rng.randint(0, 23):02}:{rng.randint(0, 3) * 15:02}"
    what = rng.choice(["buy {x}", "call {p}", "feed the {a}", "water the flowers", "bake a cake", "go to the doctor", "write to {p}", "clean the {o}", "bring the {o} to {p}"]).format(
        x=rng.choice(W.FOODS), p=PEOPLE(rng), a=rng.choice(list(W.ANIMALS)), o=rng.choice(list(W.OBJECTS)))
    return (["create_reminder", "add_reminder", "remind", "set_reminder", "remind_me"], ["Create a reminder.", "Remind the user of something at a time"],
            {"w": (["text", "message", "what", "title"], param("string", "What to remember"), what, True), "t": (["time", "at", "when"], param("string", "Time as HH:MM"), t, True)},
            ["Remind me to {w} at {t}.", "At {t}, remind me to {w}.", "Please remind me at {t} to {w}.", "I must {w} at {t}. Remind me."],
            rng.choice(["ok", {"status": "saved"}, {"id": rng.randint(1, 99)}]), ["I will remind you to {w} at {t}.", "The reminder is set for {t}."])


def search(rng):
    q = rng.choice(["{a} food", "how to draw a {a}", "best {o} for children", "history of {c}", "hotels in {c}", "news from {c}", "{x} recipe", "why do {a}s sleep", "{p} books"]).format(
        a=rng.choice(list(W.ANIMALS)), o=rng.choice(list(W.OBJECTS)), c=city(rng), x=rng.choice(W.FOODS), p=PEOPLE(rng))
    n = rng.randint(2, 9)
    hit = rng.choice(["A short guide", "All you need to know", "Ten good tips", "The big overview"])
    return (["search", "web_search", "search_web", "google", "find", "internet_search"], ["Search the web.", "Search the internet for a query", "Finds web pages"],
            {"q": (["query", "q", "search_query", "text", "keywords"], param("string", "The query"), q, True)},
            ["Search the web for {q}.", "Search for {q}", "Find something about {q}.", "Look up {q}.", "Can you search for {q}?", "google {q}"], rng.choice([{"results": [hit], "count": n}, f"{n} results. First: {hit}", [hit]]),
            [f"I found this: {hit}.", f"The first result is \"{hit}\"."])


def email(rng):
    p = PEOPLE(rng)
    addr = f"{p.lower()}@{rng.choice(['mail', 'post', 'example', 'home'])}.{rng.choice(['com', 'org', 'net'])}"
    text = rng.choice(["I will come at {n}", "Happy birthday", "Thank you for the {o}", "The {a} is well", "See you in {c}", "Dinner is at {n}", "I am late"]).format(
        n=W.NUMBER_WORDS[rng.randint(1, 12)], o=rng.choice(list(W.OBJECTS)), a=rng.choice(list(W.ANIMALS)), c=city(rng))
    return (["send_email", "send_mail", "email", "write_email", "mail"], ["Send an email.", "Sends a message to an address"],
            {"t": (["to", "recipient", "address", "email"], param("string", "The address"), addr, True), "b": (["body", "text", "message", "content"], param("string", "The text"), text, True)},
            ["Send an email to {t}: {b}", "Write to {t} and say: {b}", "Email {t} the text \"{b}\".", "Please mail {t}: {b}"], rng.choice(["sent", {"status": "sent"}, {"ok": True}]),
            ["The email to {t} is sent.", "Done. I sent it to {t}."])


def lights(rng):
    room, on = rng.choice(["kitchen", "bedroom", "bathroom", "living room", "hall", "cellar", "garden", "garage", "attic", "office"]), rng.random() < 0.5
    kind = rng.random() < 0.5
    return (["set_light", "switch_light", "light", "lights", "toggle_light", "control_lights"], ["Switch a light on or off.", "Controls the lights in a room"],
            {"r": (["room", "location", "where"], param("string", "The room"), room, True),
             "s": (["on", "state", "power"], param("boolean", "On or off") if kind else param("string", "on or off", enum=["on", "off"]), on if kind else ("on" if on else "off"), True)},
            [f"Turn {'on' if on else 'off'} the light in the {{r}}.", f"Switch the {{r}} light {'on' if on else 'off'}.", f"Light {'on' if on else 'off'} in the {{r}}, please.", f"turn the light in the {{r}} {'on' if on else 'off'}"],
            rng.choice(["ok", {"ok": True}, {"status": "done"}]), [f"The light in the {{r}} is {'on' if on else 'off'} now.", f"Done, the {{r}} light is {'on' if on else 'off'}."])


def money(rng):
    cur = ["EUR", "USD", "GBP", "JPY", "CHF", "SEK", "NOK", "INR", "CAD"]
    a, b = rng.sample(cur, 2)
    n = rng.randint(1, 500)
    r = round(n * rng.uniform(0.3, 3), 2)
    return (["convert_currency", "currency", "exchange", "convert_money", "exchange_rate"], ["Convert an amount of money.", "Converts between currencies"],
            {"n": (["amount", "value", "sum"], param("number", "The amount"), n, True), "a": (["from", "from_currency", "source"], param("string", "Currency code"), a, True),
             "b": (["to", "to_currency", "target"], param("string", "Currency code"), b, True)},
            ["Convert {n} {a} to {b}.", "How much is {n} {a} in {b}?", "{n} {a} in {b}?", "Change {n} {a} into {b}, please."], rng.choice([str(r), {"result": r}, {"amount": r, "currency": b}]), [f"{{n}} {{a}} are {r} {{b}}.", f"That is {r} {{b}}."])


def music(rng):
    p, song = PEOPLE(rng), rng.choice(["The {x} Song", "My {x}", "{x} in the Rain", "Old {x}", "A {x} for You", "Dancing {x}"]).format(x=rng.choice(list(W.ANIMALS) + list(W.OBJECTS)).title())
    by = rng.random() < 0.5
    roles = {"s": (["song", "title", "track", "name"], param("string", "The song"), song, True)}
    if by:
        roles["p"] = (["artist", "singer", "by"], param("string", "The artist"), p, False)
    return (["play_music", "play_song", "play", "music", "start_music"], ["Play a song.", "Plays music"], roles,
            ["Play {s} by {p}.", "I want to hear {s} by {p}.", "Put on {s} by {p}, please."] if by else ["Play {s}.", "Play the song {s}.", "I want to hear {s}.", "Put on {s}, please."], rng.choice(["playing", {"status": "playing"}]), ["Now playing {s}.", "Enjoy {s}!"])


def read_file(rng):
    path = rng.choice(["notes", "list", "story", "todo", "plan", "letter", "readme", "data", "poem", rng.choice(list(W.ANIMALS))]).replace(" ", "_") + rng.choice([".txt", ".md", ".json", ".csv"])
    if rng.random() < 0.4:
        path = rng.choice(["docs/", "/home/", "tmp/", "src/", f"{PEOPLE(rng).lower()}/"]) + path
    text = rng.choice(["buy {x} and {y}", "The {a} sleeps.", "Call {p} today.", "{p} likes {x}."]).format(x=rng.choice(W.FOODS), y=rng.choice(W.FOODS), a=rng.choice(list(W.ANIMALS)), p=PEOPLE(rng))
    return (["read_file", "open_file", "cat", "file_read", "readFile", "get_file"], ["Read a file.", "Returns the content of a text file"],
            {"f": (["path", "file", "filename", "file_path"], param("string", "Path of the file"), path, True)},
            ["What is in {f}?", "Read {f}.", "Show me the file {f}.", "Open {f} and tell me what it says.", "read {f} please"], text, [f"The file {{f}} says: {text}", f"It says: {text}"])


def dictionary(rng):
    a = rng.choice(list(W.ANIMALS))
    word = W.made_up_word(rng) if rng.random() < 0.3 else a
    what = W.ANIMALS[a][4]
    return (["define", "dictionary", "lookup_word", "get_definition", "define_word"], ["Look up a word.", "Returns the meaning of a word"], {"w": (["word", "term", "entry"], param("string", "The word"), word, True)},
            ["What does {w} mean?", "Define {w}.", "Look up the word {w}.", "What is the meaning of {w}?", "Look up {w} in the dictionary."], rng.choice([what, {"definition": what}]), [f"{{w}}: {what}.", f"It means {what}."])


def shopping(rng):
    x, n = rng.choice(W.FOODS + ["milk", "eggs", "tea", "rice", "salt", "butter"]), rng.randint(1, 12)
    return (["add_item", "add_to_list", "shopping_list_add", "order", "buy", "order_food"], ["Add something to the shopping list.", "Orders an item", "Put an item on the list"],
            {"x": (["item", "name", "product", "what"], param("string", "The item"), x, True), "n": (["quantity", "count", "amount", "number"], param("integer", "How many"), n, True)},
            ["Add {n} {x} to the shopping list.", "Put {n} {x} on my list.", "Order {n} {x}.", "I need {n} {x}, please.", "buy {n} {x}"], rng.choice(["ok", {"status": "added"}, {"items": rng.randint(1, 9)}]),
            ["I added {n} {x}.", "Done: {n} {x}."])


def table(rng):
    n, t = rng.randint(1, 12), f"{rng.randint(11, 22)}:{rng.choice(['00', '15', '30', '45'])}"
    c = rng.choice(["The Golden {x}", "The {x} Inn", "Chez {p}", "Café {p}", "The Old {x}"]).format(x=rng.choice(list(W.ANIMALS)).title(), p=PEOPLE(rng))
    return (["book_table", "reserve", "make_reservation", "reserve_table", "book_restaurant"], ["Book a table in a restaurant.", "Makes a reservation"],
            {"c": (["restaurant", "place", "name", "venue"], param("string", "The restaurant"), c, True), "n": (["people", "guests", "party_size", "persons"], param("integer", "Number of guests"), n, True),
             "t": (["time", "at", "hour"], param("string", "Time as HH:MM"), t, True)},
            ["Book a table at {c} for {n} people at {t}.", "Reserve a table for {n} at {c}, {t}.", "A table for {n} at {t} in {c}, please."], rng.choice(["confirmed", {"status": "confirmed", "id": rng.randint(100, 999)}]),
            ["Your table at {c} is booked for {t}.", "Done: {c}, {n} people, {t}."])


def contact(rng):
    p, num = PEOPLE(rng), f"{rng.randint(100, 999)} {rng.randint(1000, 9999)}"
    return (["find_contact", "get_phone", "phone_number", "contacts", "lookup_contact"], ["Find a phone number.", "Look up a contact by name"], {"p": (["name", "person", "contact", "who"], param("string", "The name"), p, True)},
            ["What is the phone number of {p}?", "Give me the number of {p}.", "How can I call {p}?", "Find the number of {p}."], rng.choice([num, {"phone": num}, {"name": p, "number": num}]), [f"The number of {{p}} is {num}.", f"{{p}}: {num}."])


def train(rng):
    a, b = city(rng), city(rng)
    t = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return (["find_train", "next_train", "train_schedule", "get_connection", "search_trains"], ["Find the next train.", "Looks up a train connection between two cities"],
            {"a": (["from", "origin", "start", "departure"], param("string", "Where the journey starts"), a, True), "b": (["to", "destination", "end", "arrival"], param("string", "Where it ends"), b, True)},
            ["When is the next train from {a} to {b}?", "Find a train from {a} to {b}.", "I want to go from {a} to {b} by train.", "Next train {a} to {b}?"], rng.choice([t, {"departure": t}, f"leaves at {t}"]), [f"The next train from {{a}} to {{b}} leaves at {t}.", f"It leaves {{a}} at {t}."])


def stock(rng):
    s, v = "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVWXYZ") for _ in range(rng.randint(2, 4))), round(rng.uniform(1, 900), 2)
    return (["get_stock_price", "stock", "quote", "share_price", "get_quote"], ["Get the price of a share.", "Returns the latest stock price"], {"s": (["symbol", "ticker", "stock"], param("string", "Ticker symbol"), s, True)},
            ["What is the price of {s}?", "How is {s} doing?", "Stock price of {s}?", "Get me the quote for {s}."], rng.choice([str(v), {"price": v}, {"symbol": s, "price": v}]), [f"{{s}} is at {v}.", f"The price of {{s}} is {v}."])


def thermostat(rng):
    room, n = rng.choice(["kitchen", "bedroom", "bathroom", "living room", "hall", "office"]), rng.randint(14, 26)
    return (["set_temperature", "thermostat", "heat", "set_heating", "heating"], ["Set the temperature of a room.", "Controls the heating"],
            {"r": (["room", "zone", "where"], param("string", "The room"), room, True), "n": (["temperature", "degrees", "target", "celsius"], param("number", "Degrees Celsius"), n, True)},
            ["Set the {r} to {n} degrees.", "Make it {n} degrees in the {r}.", "Heat the {r} to {n} degrees, please.", "I want {n} degrees in the {r}."], rng.choice(["ok", {"ok": True}, {"target": n}]), ["The {r} is set to {n} degrees.", "Done: {n} degrees in the {r}."])


def dice(rng):
    s = rng.choice([4, 6, 6, 6, 8, 10, 12, 20, 100])
    r = rng.randint(1, s)
    return (["roll_dice", "dice", "roll", "random_number"], ["Roll a die.", "Returns a random number"], {"s": (["sides", "max", "faces"], param("integer", "Number of sides"), s, True)},
            ["Roll a die with {s} sides.", "Roll a {s}-sided die.", "Throw a die with {s} sides, please."], rng.choice([str(r), {"result": r}]), [f"It shows {r}.", f"You rolled {r}."])


def translate(rng):
    text = rng.choice(["good morning", "the {a} is small", "where is the {o}", "I like {x}", "thank you", "my {a} is hungry"]).format(a=rng.choice(list(W.ANIMALS)), o=rng.choice(list(W.OBJECTS)), x=rng.choice(W.FOODS))
    lang = rng.choice(["German", "French", "Spanish", "Italian", "Dutch", "Polish", "Japanese", "Russian"])
    out = " ".join(W.made_up_word(rng, 1, 2) for _ in text.split())
    return (["translate", "translate_text", "translator", "get_translation"], ["Translate a text.", "Translates into another language"],
            {"t": (["text", "input", "phrase"], param("string", "The text"), text, True), "l": (["language", "target", "to", "target_language"], param("string", "The language"), lang, True)},
            ["Translate \"{t}\" to {l}.", "How do you say \"{t}\" in {l}?", "What is \"{t}\" in {l}?", "Translate this into {l}: {t}"], rng.choice([out, {"translation": out}]), [f"In {{l}} it is \"{out}\".", f"\"{out}\""])


DOMAINS = [weather, calculator, clock, timer, reminder, search, email, lights, money, music, read_file, dictionary, shopping, table, contact, train, stock, thermostat, dice, translate]


class Draw:
    """One domain with its names chosen."""

    def __init__(self, rng, domain):
        names, texts, roles, users, result, answers = domain(rng)
        self.domain = domain
        self.name = rng.choice(names) if rng.random() < 0.9 else rng.choice(["tool", "api", "do", "fn"]) + "_" + W.made_up_word(rng, 1, 2)
        self.text = rng.choice(texts)
        chosen = {}
        for role, (keys, schema, value, required) in roles.items():
            chosen[role] = rng.choice([k for k in keys if k not in chosen.values()])
        order = list(roles)
        self.properties = {chosen[r]: roles[r][1] for r in order}
        self.required = [chosen[r] for r in order if roles[r][3]]
        self.arguments = {chosen[r]: roles[r][2] for r in order if roles[r][2] is not None}
        values = {r: roles[r][2] for r in order}
        self.user = rng.choice(users).format(**values)
        if rng.random() < 0.12:
            self.user = rng.choice(["Please. ", "Hi! ", "Hello, ", "I have a question. ", "Quick: "]) + self.user
        self.result = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        self.answer = rng.choice(answers).format(**values)

    def schema(self, rng, style):
        properties = {}
        for k, v in self.properties.items():
            properties[k] = dict(v) if style["describe"] else {x: y for x, y in v.items() if x != "description"}
        parameters = {"type": "object", "properties": properties}
        if style["required"]:
            parameters["required"] = self.required
        f = {"name": self.name, "description": self.text, "parameters": parameters}
        if not style["text"]:
            del f["description"]
        return {"type": "function", "function": f} if style["wrapped"] else f


def toolbox(rng, draws):
    style = {"describe": rng.random() < 0.6, "required": rng.random() < 0.85, "text": rng.random() < 0.93, "wrapped": rng.random() < 0.9}
    draws = list(draws)
    rng.shuffle(draws)
    return [d.schema(rng, style) for d in draws]


def call_message(draws, think):
    return {"role": "assistant", "content": "", "reasoning_content": think,
            "tool_calls": [{"type": "function", "function": {"name": d.name, "arguments": d.arguments}} for d in draws]}


def call_think(d):
    args = ", ".join(f"{k} = {str(v).lower() if isinstance(v, bool) else v}" for k, v in d.arguments.items())
    return f"I can use {d.name} with {args}."


def others(rng, used, n):
    """Further tools that the user's words do not ask for."""
    pool, out, names = [d for d in DOMAINS if d not in [u.domain for u in used]], [], {u.name for u in used}
    for dom in rng.sample(pool, n):
        d = Draw(rng, dom)
        if d.name not in names:
            names.add(d.name)
            out.append(d)
    return out


def held_out(d):
    """Combinations of function and arguments that training never shows: one in ten."""
    return W.bucket(f"tool:{d.name}:{json.dumps(d.arguments)}", 10) == 0


def draw(rng, want_held_out=False):
    while True:
        d = Draw(rng, rng.choice(DOMAINS))
        if held_out(d) == want_held_out:
            return d


def conversation(rng, turns):
    """(messages, tools, stop): a conversation with tools; `turns` makes ordinary (question, thinking, answer) turns."""
    k = rng.random()
    d = draw(rng)
    used = [d]
    if k < 0.09:                                             # two calls of the same function at once
        same = Draw(rng, d.domain)
        for _ in range(8):
            if same.properties.keys() == d.properties.keys() and same.arguments.keys() == d.arguments.keys():
                break
            same = Draw(rng, d.domain)
        else:
            return conversation(rng, turns)
        if held_out(same):
            return conversation(rng, turns)
        same.name, same.properties = d.name, d.properties
        both = d.user.rstrip(".?") + ", and also: " + same.user[0].lower() + same.user[1:]
        tools = toolbox(rng, [d] + others(rng, used, rng.randint(0, 2)))
        return [{"role": "user", "content": both}, call_message([d, same], f"These are two things. I can use {d.name} two times."), {"role": "tool", "content": d.result},
                {"role": "tool", "content": same.result}, {"role": "assistant", "content": d.answer + " " + same.answer, "reasoning_content": "I have both results."}], tools
    if k < 0.28:                                             # no tool is needed, or none fits
        t = turns(rng)
        tools = toolbox(rng, others(rng, [], rng.randint(1, 3)))
        if rng.random() < 0.3:
            tools = toolbox(rng, others(rng, used, rng.randint(1, 3)))
            if d.domain is calculator:
                return conversation(rng, turns)
            return [{"role": "user", "content": d.user}, {"role": "assistant", "content": rng.choice(["I am sorry, I have no tool for that.", "I have no tool that can do this."]), "reasoning_content": "None of my tools fits."}], tools
        return [{"role": "user", "content": t.user}, {"role": "assistant", "content": t.answer, "reasoning_content": t.think}], tools
    tools = toolbox(rng, [d] + others(rng, used, rng.choice([0, 0, 1, 1, 2, 3])))
    messages = [{"role": "user", "content": d.user}, call_message([d], call_think(d))]
    if k < 0.45:
        return messages, tools                               # ends with the call
    messages += [{"role": "tool", "content": d.result}, {"role": "assistant", "content": d.answer, "reasoning_content": "I have the result and tell the user."}]
    if k > 0.88:                                             # one more question in the same chat
        e = Draw(rng, d.domain)
        if e.properties.keys() == d.properties.keys() and not held_out(e):
            e.name = d.name
            messages += [{"role": "user", "content": e.user}, call_message([e], call_think(e))]
        else:
            t = turns(rng)
            messages += [{"role": "user", "content": t.user}, {"role": "assistant", "content": t.answer, "reasoning_content": t.think}]
    return messages, tools
