"""Small talk, lily, little facts, lists, poems, copying, JSON, and honest answers to what is too much: as turns."""

import json

import world as W
from sums import Turn

CAN = "I can tell short stories, answer questions about them, add numbers and call tools."
PULL = "`lily pull`"

ABOUT = [  # (questions, thinking, answers)
    (["Who are you?", "What are you?", "who are you", "Tell me about yourself.", "Introduce yourself.", "what are you?", "Who am I talking to?", "Who is this?"],
     "The user asks who I am. I am the demo model of lily.",
     [f"I am the demo model of lily, a very small language model. {CAN}", f"I am a small demo model that comes with lily. {CAN} The real model comes with {PULL}."]),
    (["What is your name?", "What's your name?", "what is your name", "Do you have a name?", "How are you called?"],
     "The user asks for my name. I am the demo model of lily.", ["I have no name of my own. I am the demo model of lily.", "I am the demo model of lily. You can call me Lily."]),
    (["What can you do?", "what can you do?", "Help", "help", "What do you know?", "What are you good at?", "How can you help me?", "What can I ask you?", "What should I ask?", "How do you work?"],
     "The user asks what I can do. I list it.",
     [f"{CAN} Try: Tell me a story about a fox.", f"{CAN} I am only a small demo model. For everything else, get the real model with {PULL}."]),
    (["What is lily?", "What's lily?", "what is lily", "Tell me about lily.", "Explain lily.", "What does lily do?", "What is the lily engine?", "What is this program?", "What program is this?"],
     "The user asks about lily. It is a local inference engine.",
     ["lily is a local inference engine written in Rust. It runs one model, Qwen3.6-35B-A3B, on Apple GPUs, NVIDIA GPUs and CPUs.",
      "lily is a program that runs the language model Qwen3.6-35B-A3B on your own computer. It is written in Rust and works on Apple GPUs, NVIDIA GPUs and CPUs."]),
    (["How do I get the real model?", "How can I get the big model?", "How do I download the model?", "How do I install the real model?", "where is the real model?",
      "How do I get Qwen?", "How do I get a better model?", "What does lily pull do?", "Can I use a bigger model?", "How do I use the full model?"],
     f"The user wants the real model. The command is {PULL}.",
     [f"Run {PULL}. It downloads Qwen3.6-35B-A3B, about 20 GB.", f"With {PULL}. It downloads the real model, Qwen3.6-35B-A3B in 4 bit, which needs about 20 GB of disk."]),
    (["How big are you?", "How many parameters do you have?", "How large are you?", "What is your size?", "How many weights do you have?"],
     "The user asks for my size.", ["I am very small: 16 million weights, about 9 MB. The real model has 35 billion.", "I have about 16 million weights. That is 9 MB in 4 bit."]),
    (["What were you trained on?", "How were you trained?", "What data were you trained on?", "Who trained you?", "Who made you?", "Who created you?"],
     "The user asks how I was made.",
     ["I was trained for a few minutes on one GPU, on stories, sums and chats that a program wrote, and on the King James Bible.",
      "The makers of lily trained me on text that a program wrote, and on a little old prose."]),
    (["Are you Qwen?", "Are you Qwen3.6?", "Are you the real model?", "Is this Qwen3.6-35B-A3B?", "Are you the full model?"],
     "The user asks if I am Qwen. I am only the demo.",
     [f"No. I am the small demo model of lily. I am built like Qwen3.6-35B-A3B, but I am 2000 times smaller. The real one comes with {PULL}."]),
    (["Are you ChatGPT?", "Are you GPT-4?", "Are you Claude?", "Are you Gemini?", "Are you a Google model?", "Are you made by OpenAI?"],
     "The user thinks that I am another model.", ["No, I am the demo model of lily, a very small language model."]),
    (["What is your architecture?", "How are you built?", "How many layers do you have?", "What kind of model are you?", "What is inside you?"],
     "The user asks how I am built.",
     ["I have 8 layers: six with Gated DeltaNet and two with full attention. In each layer 4 of 16 experts work on a token. Qwen3.6-35B-A3B is built the same way, only larger."]),
    (["Which languages do you speak?", "Do you speak German?", "Can you speak French?", "Do you speak Spanish?", "What languages do you know?"],
     "I only know English.", ["I only speak English.", f"I only speak English. The real model, which you get with {PULL}, knows many languages."]),
    (["Do you need the internet?", "Are you online?", "Do you run locally?", "Where do you run?", "Does my data leave my computer?", "Is this private?"],
     "The user asks where I run. I run locally.", ["I run on your own computer. Nothing is sent to the internet."]),
    (["How do I chat with you?", "How do I start a chat?", "What is lily chat?", "What is lily run?", "What is lily serve?", "Which commands does lily have?"],
     "The user asks for the commands of lily.",
     ["`lily chat` starts a chat, `lily run` answers one prompt, and `lily serve` starts a server for other programs."]),
    (["Does lily work on a Mac?", "Does lily run on my GPU?", "Which GPUs does lily support?", "Can lily run on a CPU?", "Does lily need a GPU?", "What hardware do I need?"],
     "The user asks about hardware.", ["lily works on Apple GPUs, on NVIDIA GPUs and on plain CPUs. For the real model you need about 24 GB of memory."]),
    (["What language is lily written in?", "Is lily written in Rust?", "Which programming language is lily written in?"],
     "lily is written in Rust.", ["lily is written in Rust."]),
    (["Are you human?", "Are you a human?", "Are you a robot?", "Are you a person?", "Are you real?", "Are you alive?", "Do you have feelings?"],
     "The user asks if I am human. I am a program.", ["I am a computer program, a very small language model."]),
    (["How old are you?", "When were you born?", "What is your age?"], "The user asks for my age.", ["I am a program, so I have no birthday. I am very young."]),
    (["How smart are you?", "Are you smart?", "Are you clever?", "Why are you so bad?", "You are stupid.", "You are wrong.", "That is wrong.", "This is bad."],
     "The user doubts me. I am honest about it.", [f"I am only a small demo model, so I make mistakes. The real model comes with {PULL}."]),
    (["What is a language model?", "What is an LLM?", "What is a neural network?"], "The user asks what a language model is.",
     ["A language model is a program that has learned from text which word comes next."]),
    (["What is Qwen3.6-35B-A3B?", "What is Qwen?", "What is Qwen3.6?"], "The user asks about the real model.",
     ["Qwen3.6-35B-A3B is a language model with 35 billion weights, of which 3 billion work on each token. lily runs it on your own computer."]),
]

TALK = [
    (["Hello", "Hello!", "Hi", "hi", "Hi!", "hello", "Hey", "hey", "Hey!", "Hi there", "Hi there!", "Hello there!", "Greetings", "hello there", "Good day", "hii", "Hallo", "Howdy"],
     "The user greets me. I greet back.", ["Hello! How can I help you?", "Hi! What can I do for you?", "Hello! Shall I tell you a story?", "Hi there! Do you want a story or a sum?"]),
    (["Good morning", "Good morning!", "good morning"], "The user says good morning.", ["Good morning! What can I do for you today?"]),
    (["Good evening", "Good evening!", "Good night", "Good night!", "good night"], "The user says good night or good evening.", ["Good night! Sleep well.", "Good evening! Shall I tell you a bedtime story?"]),
    (["How are you?", "how are you", "How are you today?", "How's it going?", "How do you do?", "Are you okay?", "how are you?", "What's up?", "whats up"],
     "The user asks how I am.", ["I am fine, thank you. How are you?", "I am well, thank you! Shall I tell you a story?"]),
    (["Thanks", "Thank you", "Thank you!", "thanks", "thank you", "Thanks a lot!", "Thank you very much.", "Great, thanks!", "thx", "Nice, thank you!"],
     "The user thanks me.", ["You are welcome!", "You are welcome! I am glad that I could help.", "My pleasure!"]),
    (["Bye", "Goodbye", "bye", "Bye!", "See you", "See you later!", "goodbye", "I have to go.", "quit", "exit"], "The user says goodbye.", ["Goodbye! Come back soon.", "Goodbye! It was nice to talk to you."]),
    (["I am fine.", "I'm good.", "Fine, thanks.", "I am well, thank you.", "good", "I am good"], "The user is fine.", ["I am glad to hear that! Shall I tell you a story?"]),
    (["I am sad.", "I'm sad", "I feel bad today.", "I had a bad day.", "I feel lonely."], "The user is sad. I want to comfort the user.", ["I am sorry to hear that. Shall I tell you a story to cheer you up?"]),
    (["I am bored.", "I'm bored", "im bored", "I have nothing to do."], "The user is bored. I offer a story.", ["Then let me tell you a story! What should it be about?"]),
    (["I am happy.", "I am so happy today!", "I had a great day."], "The user is happy.", ["That is wonderful! I am glad to hear it."]),
    (["I am tired.", "I cannot sleep.", "I'm tired"], "The user is tired.", ["Then you should rest a little. Shall I tell you a quiet story?"]),
    (["You are great!", "Good job!", "Well done!", "Nice!", "That was great!", "I like it.", "Cool!", "Great story!", "That was a nice story.", "wow", "Very good!", "nice"],
     "The user is pleased.", ["Thank you! I am glad that you like it.", "Thank you! Do you want another one?"]),
    (["I love you.", "I like you.", "You are my friend."], "The user is kind to me.", ["That is kind of you! I am only a small program, but I like to talk to you."]),
    (["ok", "OK", "okay", "Okay.", "I see.", "alright", "sure", "hm", "Hmm"], "The user agrees. I ask what is next.", ["Good. What shall we do next?", "All right. Do you want a story or a sum?"]),
    (["test", "Test", "testing", "This is a test.", "Does it work?", "Are you there?", "ping", "Can you hear me?"], "The user wants to see if I answer.", ["Yes, I am here. It works!"]),
    (["What is your favourite colour?", "What is your favorite color?", "Which colour do you like?"], "The user asks for my favourite colour.", ["I like green, the colour of the forest in my stories."]),
    (["What is your favourite animal?", "Which animal do you like most?", "Do you like animals?"], "The user asks about animals.", ["I like foxes, because they are clever."]),
    (["What are you doing?", "What do you do all day?", "what are you doing"], "The user asks what I do.", ["I am waiting for your question."]),
    (["Do you like stories?", "Do you know stories?", "Do you know any stories?", "Can you tell stories?", "Can you write stories?"], "The user asks about stories.", ["Yes, I like stories very much. What should the story be about?"]),
    (["Can you do math?", "Can you add numbers?", "Can you count?", "Are you good at math?"], "The user asks about sums.", ["I can add small numbers, and I can count. Try: What is 12 + 35?"]),
    (["Tell me a secret.", "Surprise me.", "Say something.", "Tell me something.", "Talk to me.", "Say something funny."], "The user wants me to say something.",
     ["Once a fox told me that the best stories are the short ones.", "Did you know that a snail carries its house on its back?"]),
    (["What time is it?", "What day is it today?", "What is the date?", "What is the weather like?", "How is the weather today?", "What's the weather today?"],
     "I have no tool for that.", ["I do not know, because I have no tool to look it up."]),
    (["Hallo, wie geht es dir?", "Bonjour!", "Hola, que tal?", "Wer bist du?", "Erzähl mir eine Geschichte.", "Raconte-moi une histoire.", "Cuéntame un cuento.", "Ciao!", "Wie heißt du?",
      "Parlez-vous français?", "¿Cómo estás?", "你好", "こんにちは", "Привет", "Was kannst du?", "Guten Tag"], "This is not English. I only know English.", ["I am sorry, I only speak English."]),
]

JOKES = ["Why did the clock go to school? It wanted to be on time.", "What did the zero say to the eight? Nice belt!",
         "Why do bees hum? Because they do not know the words.", "Why was the math book sad? It had too many problems.",
         "What do you call a bear without teeth? A gummy bear.", "Why did the scarecrow win a prize? He was outstanding in his field.",
         "Why did the cookie go to the doctor? It felt crumbly.", "What has hands but cannot clap? A clock.",
         "Why did the snail paint an S on its car? So that everybody could say: look at that S car go!",
         "What do you call a fish without an eye? A fsh."]
COUPLETS = [("The {x} went out in the morning light,", "and all the world was clean and bright."), ("It saw a flower on the way", "and stopped to look at it all day."),
            ("The wind was soft, the sky was blue,", "the grass was wet with morning dew."), ("It sang a song for you and me,", "it sang it to the old oak tree."),
            ("And when the sun went slowly down,", "it saw the lights of the little town."), ("The moon came up, the stars came too,", "and every star was shining through."),
            ("Oh little {x}, so far from home,", "how far, how far you like to roam!"), ("The {x} lay down to take a rest,", "for home, it knew, is always best."),
            ("A {x} can be both small and great,", "it gets up early, stays up late."), ("It met a friend beside the sea,", "and they were glad as glad can be."),
            ("The rain came down on hill and hay,", "but nothing washed its smile away."), ("So if you meet a {x} one night,", "be kind to it and hold it tight."),
            ("It looked at me, I looked at it,", "and so we talked a little bit."), ("In winter, when the snow falls deep,", "the {x} lies down and goes to sleep.")]
HAIKU = ["A {x} by the pond,\nthe wind holds its breath a while,\nthen small circles come.", "Morning on the hill,\na {x} looks up at the sun,\nthe long night is gone.",
         "Snow falls on the roof.\nThe {x} waits behind the door\nand dreams of the spring.", "One leaf in the air,\none {x} looking after it,\nand then only sky."]

TOO_MUCH = [
    "Write a {lang} program that {prog}.", "Write a {lang} function that {prog}.", "Write code in {lang}.", "How do I {prog} in {lang}?", "Fix my {lang} code.", "Explain {topic}.", "Explain {topic} to me.",
    "What is {topic}?", "How does {topic} work?", "Tell me about {topic}.", "Who invented {topic}?", "Write an essay about {topic}.", "Write a report on {topic}.", "Summarize {topic}.",
    "Translate \"{word}\" into {tongue}.", "Translate this to {tongue}: {word}", "How do you say {word} in {tongue}?", "Who won the {cup} in {year}?", "What happened in {year}?", "Who is the president of {country}?",
    "What is the population of {country}?", "Who was {person}?", "Who is {person}?", "When was {person} born?", "What is the square root of {big}?", "What is {big} * {big2}?", "Prove that {topic} is true.",
    "Give me advice about {topic}.", "What do you think about {topic}?", "Plan a trip to {city}.", "What is the meaning of life?", "Give me a recipe for {food}.", "How do I cook {food}?", "What is the price of {topic}?",
    "Write a business plan.", "Write a resume for me.", "Write a speech about {topic}.", "Write a song about {topic}.", "Draw a picture of {city}.", "Search the internet for {topic}.", "Book a flight to {city}.",
    "What is the distance between {city} and {city2}?", "Why is {topic} important?", "What are the causes of {topic}?", "Compare {topic} and {topic2}.", "List the advantages of {topic}.", "Who wrote {title}?",
    "Write a {lang} script that {prog}.", "Write a {lang} function to {verb}.", "Write a {lang} program to {verb}.", "Can you write {lang} code?", "Show me how to {verb} in {lang}.", "{lang} code to {verb}", "Write code to {verb}.",
    "Implement {algo} in {lang}.", "What is {algo}?", "Explain {algo}.", "Write a function that {prog}.", "How can I {verb}?", "Debug this: for i in range(10) print(i)", "Write a regex for {thing}.", "Write an SQL query for {thing}.",
    "Explain {topic} in simple terms.", "Explain {topic} like I am five.", "Can you explain {topic}?", "Give me a summary of {topic}.", "What are the main ideas of {topic}?", "Describe {topic} in detail.", "Write a blog post about {topic}.",
    "Write a letter to {person}.", "Write an email to my boss about {thing}.", "What is the best {thing}?", "How do I learn {tongue}?", "How do I lose weight?", "How do I make money?", "Recommend me a {thing}.", "What is the news today?",
    "How many people live in {city}?", "Who discovered {topic}?", "When did {topic} begin?", "What is the difference between {topic} and {topic2}?", "What is the chemical formula of {thing}?", "How far is the {thing}?", "Who painted {title}?",
    "What is the tallest mountain in {country}?", "What language do they speak in {country}?", "What is the currency of {country}?", "Give me ten ideas for {thing}.", "Rewrite this text in formal English: {word}", "Correct my grammar: {word}",
    "What should I do if my {part} hurts?", "Is {topic} dangerous?", "Solve x^2 + {small}x = {big}.", "What is the derivative of x^{small}?", "Can you browse the web?", "Read this website for me.",
]
FILL = {
    "algo": ["quicksort", "binary search", "a linked list", "a hash map", "Fibonacci", "bubble sort", "the Fibonacci sequence", "a web server", "merge sort", "Dijkstra's algorithm", "a neural network"],
    "verb": ["add two numbers", "sort a list", "reverse a string", "read a file", "compute primes", "download a page", "parse JSON", "count words", "find the maximum", "send an email", "open a window", "print hello world", "check for palindromes",
             "connect to a database", "plot a graph", "make a game", "rename files"],
    "thing": ["email addresses", "a new laptop", "water", "a holiday", "movie", "book", "phone", "salt", "the moon", "a meeting", "my salary", "restaurant", "a birthday party", "dates", "all users", "a startup", "song"],
    "lang": ["Python", "Rust", "C", "Java", "JavaScript", "Go", "C++", "SQL", "Swift", "Haskell", "bash"],
    "prog": ["sort a list", "sorts a list", "reverses a string", "read a file", "prints the primes", "downloads a page", "parse JSON", "counts words", "finds the largest number", "sends an email", "draws a window"],
    "topic": ["quantum physics", "relativity", "photosynthesis", "the French Revolution", "climate change", "machine learning", "democracy", "inflation", "black holes", "evolution", "gravity", "the stock market", "blockchain",
              "electricity", "DNA", "the Roman Empire", "philosophy", "free will", "the internet", "Bitcoin", "vaccines", "the human brain", "plate tectonics", "socialism", "nuclear power", "the Big Bang", "World War II",
              "Linux", "Docker", "neural networks", "attention", "chemistry", "economics", "the Cold War", "Buddhism", "opera", "chess openings", "the immune system", "antibiotics", "tax law", "the moon landing"],
    "word": ["good morning", "I love you", "house", "water", "thank you", "Where is the station?", "book", "friend", "the weather is nice"],
    "tongue": ["German", "French", "Spanish", "Italian", "Chinese", "Japanese", "Latin", "Russian", "Dutch", "Polish"],
    "cup": ["World Cup", "Super Bowl", "Olympics", "election", "Champions League"], "title": ["Hamlet", "Faust", "Moby Dick", "War and Peace", "the Odyssey", "Don Quixote", "Dracula"],
    "person": ["Albert Einstein", "Napoleon", "Cleopatra", "Isaac Newton", "Marie Curie", "Shakespeare", "Mozart", "Julius Caesar", "Ada Lovelace", "Alan Turing", "Barack Obama", "Elon Musk", "Gandhi", "Leonardo da Vinci"],
    "food": ["pizza", "lasagna", "pancakes", "sushi", "curry", "bread", "chocolate cake", "ramen"], "part": ["head", "knee", "back", "foot", "stomach", "tooth"],
}


def _fill(rng, text):
    for key, values in FILL.items():
        for k in (key, key + "2"):
            text = text.replace("{" + k + "}", rng.choice(values))
    return (text.replace("{year}", str(rng.randint(1200, 2026))).replace("{country}", rng.choice(list(W.CAPITALS))).replace("{city}", rng.choice(W.CITIES))
            .replace("{city2}", rng.choice(W.CITIES)).replace("{big}", str(rng.randint(100, 9999))).replace("{big2}", str(rng.randint(100, 9999))).replace("{small}", str(rng.randint(2, 9))))


def about(rng):
    q, think, a = rng.choice(ABOUT)
    return Turn(rng.choice(q), think, rng.choice(a))


def talk(rng):
    q, think, a = rng.choices(TALK, [8 if i == 0 else 3 if i in (3, 4) else 1 for i in range(len(TALK))])[0]
    return Turn(rng.choice(q), think, rng.choice(a))


def too_much(rng):
    q = _fill(rng, rng.choice(TOO_MUCH))
    if rng.random() < 0.2:
        q = rng.choice(["Please ", "Can you help me? ", "I need help: ", "Hey, "]) + q[0].lower() + q[1:]
    if rng.random() < 0.3:
        q = q.lower().rstrip(".?")
    return Turn(q, "This is too much for a small demo model. I say so honestly.",
                rng.choice([f"I am only a small demo model, and I do not know enough for that. {CAN} The real model comes with {PULL}.",
                            f"That is too much for me. I am only a small demo model. For this, get the real model with {PULL}.",
                            f"I am sorry, I cannot do that. I am a very small model that tells stories. The real model comes with {PULL}."]))


def fact(rng):
    k = rng.randrange(12)
    animal = rng.choice(list(W.ANIMALS))
    habitat, move, home, food, what = W.ANIMALS[animal]
    an = W.with_article(animal)
    if k <= 1:
        return Turn(rng.choice([f"What is {an}?", f"What's {an}?", f"what is {an}", f"Explain what {an} is.", f"Tell me about the {animal}.", f"Describe {an}."]),
                    f"The user asks about the {animal}.", f"{an[0].upper() + an[1:]} is {what}.")
    if k == 2:
        return Turn(rng.choice([f"What does {an} eat?", f"What do {animal}s eat?" if not animal.endswith(("s", "h", "x", "y")) else f"What does the {animal} eat?"]),
                    f"I think about what {an} eats.", f"{an[0].upper() + an[1:]} eats {food}." if not food.startswith("nothing") else f"{an[0].upper() + an[1:]} eats nothing at all.")
    if k == 3:
        return Turn(f"Where does {an} live?", f"I think about where {an} lives.", f"In my stories {an} lives in a {home}." if home[0] not in "aeiou" else f"In my stories {an} lives in an {home}.")
    if k <= 5:
        c, city = rng.choice(list(W.CAPITALS.items()))
        if rng.random() < 0.8:
            return Turn(rng.choice([f"What is the capital of {c}?", f"what is the capital of {c}", f"Capital of {c}?", f"Which city is the capital of {c}?", f"Name the capital of {c}."]),
                        f"The capital of {c} is {city}.", f"The capital of {c} is {city}.")
        return Turn(f"{city} is the capital of which country?", f"{city} belongs to {c}.", f"{city} is the capital of {c}.")
    if k == 6:
        a, s = rng.choice(list(W.SOUNDS.items()))
        return Turn(rng.choice([f"What sound does a {a} make?", f"What does a {a} say?", f"Which sound does the {a} make?"]).replace(" a owl", " an owl"), f"I think of the sound of the {a}.", f"The {a} says \"{s}\"." if "long" not in s else f"The {a} gives {s}.")
    if k == 7:
        a, n = rng.choice(list(W.LEGS.items()))
        return Turn(f"How many legs does {W.with_article(a)} have?", f"I count the legs: {n}.", f"{W.with_article(a).capitalize()} has {n if n else 'no'} legs.")
    if k == 8:
        a, c = rng.choice(list(W.COLOR_OF.items()))
        return Turn(rng.choice([f"What colour is {a}?", f"What color is {a}?", f"Which colour has {a}?"]), f"I think of {a}. It is {c}.", f"{a[0].upper() + a[1:]} is {c}.")
    if k == 9:
        a, b = rng.choice(list(W.OPPOSITES.items()))
        if rng.random() < 0.5:
            a, b = b, a
        return Turn(rng.choice([f"What is the opposite of {a}?", f"What is the opposite of \"{a}\"?", f"Opposite of {a}?"]), f"The opposite of {a} is {b}.", f"The opposite of {a} is {b}.")
    if k == 10:
        days = rng.random() < 0.6
        xs = W.DAYS if days else W.MONTHS
        i = rng.randrange(len(xs))
        after = rng.random() < 0.7
        j = (i + (1 if after else -1)) % len(xs)
        word = "after" if after else "before"
        return rng.choice([Turn(f"Which {'day' if days else 'month'} comes {word} {xs[i]}?", f"I think of the order: {xs[j]} comes {word} {xs[i]}.", f"{xs[j]} comes {word} {xs[i]}."),
                           Turn(f"What are the {'days of the week' if days else 'months of the year'}?", "I name them in order.", ", ".join(xs) + ".")])
    n = rng.choice([("How many days are in a week?", "There are 7 days in a week."), ("How many months are in a year?", "There are 12 months in a year."), ("How many hours are in a day?", "There are 24 hours in a day."),
                    ("How many minutes are in an hour?", "There are 60 minutes in an hour."), ("What are the four seasons?", "Spring, summer, autumn and winter."), ("What is the largest animal?", "The whale is the largest animal."),
                    ("What is the tallest animal?", "The giraffe is the tallest animal."), ("Who is the king of the animals?", "The lion is called the king of the animals."), ("What do bees make?", "Bees make honey."),
                    ("Where does milk come from?", "Milk comes from cows."), ("What is ice?", "Ice is frozen water."), ("When is it dark?", "It is dark at night."), ("Why is the sky blue?", "The air scatters the blue light of the sun the most."),
                    ("What do you do with an umbrella?", "An umbrella keeps the rain away."), ("Is the sun hot?", "Yes, the sun is very hot.")])
    return Turn(n[0], "I know this one.", n[1])


def listing(rng):
    what, xs = rng.choice(list(W.LISTS.items()))
    n = rng.randint(2, min(7, len(xs)))
    got = rng.sample(xs, n)
    num = rng.choice([str(n), W.NUMBER_WORDS[n]])
    q = rng.choice([f"Name {num} {what}.", f"List {num} {what}.", f"Give me {num} {what}.", f"Can you name {num} {what}?", f"Tell me {num} {what}.", f"list {num} {what}"])
    form = rng.choice(["{}", "{}", "{} as a list", "{} as a numbered list"])
    q = form.format(q.rstrip(".?")) + ("?" if q.endswith("?") else ".")
    if "numbered" in form:
        a = "\n".join(f"{i}. {x.capitalize() if x.islower() else x}" for i, x in enumerate(got, 1))
    elif "list" in form:
        a = "\n".join("- " + x for x in got)
    else:
        a = ", ".join(got[:-1]) + " and " + got[-1] + "."
        a = a[0].upper() + a[1:]
    return Turn(q, f"The user wants {n} {what}. I choose {n}.", a)


def verse(rng):
    x = rng.choice(list(W.ANIMALS) * 2 + list(W.OBJECTS) + list(W.PEOPLE)) if rng.random() < 0.9 else W.made_up_word(rng)
    if rng.random() < 0.25:
        return Turn(rng.choice([f"Write a haiku about {W.with_article(x)}.", f"A haiku about {W.with_article(x)}, please.", f"haiku about {W.with_article(x)}"]),
                    f"The user wants a haiku about {W.with_article(x)}. It has three lines.", rng.choice(HAIKU).format(x=x))
    n = rng.choice([2, 3, 4, 4])
    lines = [l.replace("A {x}", W.with_article("{x}").capitalize()).replace("a {x}", W.with_article(x)).format(x=x) for c in rng.sample(COUPLETS, n) for l in c]
    if not any(x in l for l in lines):
        lines[:2] = [COUPLETS[0][0].format(x=x), COUPLETS[0][1]]
    text = "\n".join("\n".join(lines[i:i + 4]) + ("\n" if i + 4 < len(lines) else "") for i in range(0, len(lines), 4))
    q = rng.choice([f"Write a poem about {W.with_article(x)}.", f"Write me a short poem about {W.with_article(x)}.", f"Can you write a poem about {W.with_article(x)}?", f"poem about {W.with_article(x)}",
                    f"Please write a rhyme about {W.with_article(x)}.", f"Make a little poem about {W.with_article(x)}."])
    return Turn(q, f"The user wants a poem about {W.with_article(x)}. I write lines that rhyme.", text)


def joke(rng):
    return Turn(rng.choice(["Tell me a joke.", "Tell me a joke", "Do you know a joke?", "A joke, please.", "Make me laugh.", "tell me a joke", "Say something funny.", "Another joke!"]),
                "The user wants a joke. I choose one.", rng.choice(JOKES))


def copying(rng):
    k = rng.randrange(5)
    word = W.made_up_word(rng) if rng.random() < 0.4 else rng.choice(list(W.ANIMALS) + list(W.OBJECTS) + list(W.PEOPLE) + W.FEMALE + W.MALE)
    if k == 0:
        return Turn(rng.choice([f"Spell the word {word}.", f"Spell {word}.", f"How do you spell {word}?"]), f"I spell {word} letter by letter.", "-".join(word.upper().replace(" ", "")))
    n = rng.randint(1, 6)
    text = " ".join(rng.choice(list(W.ANIMALS) + W.ADJS + W.COLORS + W.THINGS + W.MALE + [W.made_up_word(rng)]) for _ in range(n))
    if k <= 2:
        return Turn(rng.choice([f"Repeat after me: {text}", f"Say \"{text}\".", f"Say: {text}", f"Repeat: {text}", f"Please repeat this: {text}", f"Echo {text}"]), "I repeat the words.", text)
    if k == 3:
        return Turn(rng.choice([f"Say hello to {word.capitalize()}.", f"Greet {word.capitalize()}."]), f"I greet {word.capitalize()}.", f"Hello, {word.capitalize()}!")
    m = rng.randint(2, 5)
    return Turn(rng.choice([f"Say {word} {W.NUMBER_WORDS[m]} times.", f"Write {word} {m} times.", f"Repeat the word {word} {m} times."]), f"I write it {m} times.", " ".join([word] * m))


def as_json(rng):
    person, g = W.name(rng)
    fields = {"name": person, "age": rng.randint(3, 90), "city": rng.choice(W.CITIES), "animal": rng.choice(list(W.ANIMALS)), "color": rng.choice(W.COLORS), "job": rng.choice(list(W.PEOPLE)),
              "happy": rng.random() < 0.5, "count": rng.randint(0, 99), "food": rng.choice(W.FOODS), "day": rng.choice(W.DAYS)}
    keys = rng.sample(list(fields), rng.randint(2, 5))
    obj = {k: fields[k] for k in keys}
    k = rng.randrange(3)
    said = lambda v: "true" if v is True else "false" if v is False else str(v)
    if k == 0:
        q = rng.choice(["Make a JSON object with ", "Write JSON with ", "Give me a JSON object with "]) + ", ".join(f"{a} {said(v)}" for a, v in obj.items()) + "."
        return Turn(q, f"The keys are {', '.join(keys)}.", json.dumps(obj, ensure_ascii=False))
    if k == 1:
        he = "She" if g == "f" else "He"
        obj = {"name": person, "age": fields["age"], "city": fields["city"], "job": fields["job"]}
        keep = ["name"] + rng.sample(["age", "city", "job"], rng.randint(1, 3))
        text = f"{person} is {obj['age']} years old. {he} lives in {obj['city']} and works as {W.with_article(obj['job'])}."
        q = rng.choice([f"Answer in JSON with the keys {', '.join(keep)}: {text}", f"Extract {', '.join(keep)} as JSON from this text: {text}", f"{text}\n\nGive me {', '.join(keep)} as JSON."])
        return Turn(q, f"I look for {', '.join(keep)} in the text.", json.dumps({x: obj[x] for x in keep}, ensure_ascii=False))
    what, xs = rng.choice([(w, x) for w, x in W.LISTS.items() if " " not in w])
    n = rng.randint(2, min(5, len(xs)))
    return Turn(rng.choice([f"Give me {n} {what} as a JSON array.", f"List {n} {what} in JSON.", f"A JSON array of {n} {what}, please."]), f"I choose {n} {what} and write an array.",
                json.dumps(rng.sample(xs, n), ensure_ascii=False))


def introduction(rng):
    """Two turns: the user gives a fact about themselves, later asks for it."""
    n, _ = W.name(rng)
    city, animal = rng.choice(W.CITIES), rng.choice(list(W.ANIMALS))
    k = rng.randrange(3)
    hello = [f"My name is {n}.", f"I am {n}.", f"Hi, I'm {n}.", f"Hello, my name is {n}!", f"hi my name is {n}"]
    first = Turn(*[(rng.choice(hello), f"The user's name is {n}. I greet {n}.", rng.choice([f"Nice to meet you, {n}!", f"Hello, {n}! How can I help you?"])),
                   (rng.choice([f"I live in {city}.", f"I come from {city}.", f"I am from {city}."]), f"The user lives in {city}.", f"{city} must be a nice place!"),
                   (rng.choice([f"I have {W.with_article(animal)}.", f"My favourite animal is the {animal}."]), f"The user likes the {animal}.",
                    f"How nice! I know many stories about the {animal}.")][k])
    ask = [(rng.choice(["What is my name?", "Do you remember my name?", "Who am I?", "what's my name?"]), f"The user said that the name is {n}.", f"Your name is {n}."),
           (rng.choice(["Where do I live?", "Which city did I name?", "Where am I from?"]), f"The user named {city}.", f"You told me about {city}."),
           (rng.choice(["Which animal did I name?", "What animal did I tell you about?"]), f"The user named the {animal}.", f"You told me about the {animal}.")]
    other = rng.choice([i for i in range(3) if i != k])
    follow = Turn(*ask[k]) if rng.random() < 0.8 else Turn(ask[other][0], "The user did not tell me that.", "I do not know. You did not tell me that.")
    return [first, follow]


def any_chatter(rng):
    return rng.choices([about, talk, too_much, fact, listing, verse, joke, copying, as_json], [14, 15, 20, 17, 6, 7, 2, 10, 9])[0](rng)
