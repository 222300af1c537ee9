"""The eighteen plots: each lets a `stories.Teller` write one story, and keeps its plan, gist, title, moral and facts.

Sentences come as alternatives separated by `|`; the names in braces are what the teller has planned.
"""

import world as W


def lost(t):
    """Something is lost; they look in two wrong places, and find it in the third."""
    t.s.plan = t.fill("{H} loses {athing}. {F} {f} helps to look for it. They find it {spot3}.")
    t.s.gist = t.fill("{H} {h} lost {athing}, and {F} {f} helped to find it {spot3}.")
    t.s.title = t.fill("The Lost " + t.s.slots["thingk"].capitalize())
    t.opening()
    t.say("{H} had {athing} that {he} loved very much.|More than anything, {H} loved {his} {thing}.|{H} owned {athing}. It was a gift from {his} grandfather.")
    t.para()
    t.say("One {weather} morning the {thing} was gone.|One day {H} could not find the {thing}.|But one {weather} day {he} woke up and the {thing} was not there.")
    t.more("\"Where is my {thing}?\" cried {H}.|\"Oh no!\" said {H}. \"My {thing} is gone!\"|{H} looked everywhere in {his} home and found nothing.")
    t.meet()
    t.say("\"Why are you so sad?\" asked {F}.|\"What is wrong, {H}?\" asked {F}.|\"You look sad, {H}. What happened?\" said {F}.")
    t.say("\"I lost my {thing},\" said {H}.|\"My {thing} is lost,\" said {H}, \"and I do not know where to look.\"")
    t.say("\"Do not cry. I will help you,\" said {F}.|\"Two can look better than one,\" said {F}.|\"Then let us look together,\" said {F} kindly.")
    t.para()
    t.say("First they looked {spot1}, but it was not there.|They looked {spot1}. There was nothing.|First they searched {spot1}, but they only found some dust and an old leaf.")
    t.say("Then they looked {spot2}, but it was not there either.|Then they searched {spot2}. Again they found nothing.")
    t.more("{H} was tired and wanted to give up, but {F} said, \"Let us try one more time.\"|\"We must not give up,\" said {F}.")
    t.say("At last they looked {spot3}, and there it was!|Then {F} had an idea. They looked {spot3}, and there was the {thing}!|Finally {F} called, \"Come here!\" The {thing} was {spot3}.")
    t.para()
    t.say("{H} jumped for joy. \"Thank you, {F}!\" {he} said.|\"You are a true friend,\" said {H}.|{H} hugged {F} and laughed. \"Thank you for your help!\"")
    t.closing("With a friend's help, lost things are found.|A good friend helps you look.")
    t.fact("What did {H} lose?|What was lost in the story?|Which thing did {H} lose?", "{H} lost {athing}.")
    t.fact("Where did they find the {thingk}?|Where was the {thingk}?", "They found it {spot3}.")
    t.fact("Who helped {H}?|Who helped {H} to look for the {thingk}?", "{F} {f} helped {H}.")
    t.fact("Where did they look first?", "They looked {spot1} first.")


def fear(t):
    """The hero is afraid of something and learns to bear it."""
    f = t.wish.deed or t.rng.choice(list(W.FEARS))
    if t.s.hero.place == "water" and f in ("deep water", "high places", "the old forest", "the big dog"):
        f = "the dark"
    t.s.slots["fear"] = f
    t.s.plan = t.fill("{H} is afraid of {fear}. {F} {f} shows that it is not so bad. In the end {H} is brave.")
    t.s.gist = t.fill("{H} {h} was afraid of {fear}, but with the help of {F} {f} {he} became brave.")
    t.s.title = t.fill("{H} Is Not Afraid")
    t.opening()
    t.say("There was one thing that nobody knew: {H} was afraid of {fear}.|But {H} was afraid of {fear}.|{H} had one problem. {he} was very afraid of {fear}.")
    t.more("{his} heart beat fast when {he} only thought of it.|When the others laughed, {H} hid {his} face.|Because of that {he} often stayed at home.")
    t.para()
    t.meet()
    t.say("\"Come and play with me,\" said {F}.|\"Will you come with me tonight?\" asked {F}.|\"Why do you stay at home?\" asked {F}.")
    t.say("\"I cannot,\" said {H}. \"I am afraid of {fear}.\"|{H} looked at the ground. \"I am afraid of {fear},\" {he} said softly.")
    t.say("{F} did not laugh. \"I was afraid too when I was little,\" {fe} said.|\"Everybody is afraid of something,\" said {F}. \"I am afraid of spiders.\"|\"That is not a shame,\" said {F}. \"Shall I stay with you?\"")
    t.para()
    how = {"night": "That night they sat together and counted the stars.", "storm": "When the next storm came, they sat side by side and counted the seconds after each flash.",
           "flood": "They went to the water together, first with one foot, then with two.", "climb": "They climbed a small hill first, then a bigger one.",
           "feast": "They made a loud noise themselves, with two pots and a spoon.", "visit": "Together they said hello to one stranger, then to another.",
           "forest": "They went into the old forest hand in hand, first ten steps, then twenty.", "alone": "{H} stayed alone for one minute, then for five, and {F} waited outside.",
           "dog": "They went to the big dog slowly, and it only wanted to lick their noses."}.get(W.FEARS.get(f), "They went to look at it together, first from far away, then from near.")
    t.say(how)
    t.say("{H} held {fis} hand and took a deep breath.|At first {H} was trembling, but {F} stayed close.|{H} closed {his} eyes, and then {he} opened them again.")
    t.say("And nothing bad happened.|It was not so bad at all.|Little by little the fear became smaller.")
    t.more("\"Look, you did it!\" said {F}.|\"I did it!\" shouted {H}.|\"I am still a little afraid,\" said {H}, \"but now I know what to do.\"")
    t.say("\"Thank you, {F},\" said {H}. \"Now I am not afraid any more.\"|After that, {H} was not afraid of {fear} any more.|\"To be brave means to do it even when you are afraid,\" said {F}.")
    t.closing("To be brave means to try even when you are afraid.|A friend makes the fear small.")
    t.fact("What was {H} afraid of?", "{H} was afraid of {fear}.")
    t.fact("Who helped {H}?|Who was with {H}?", "{F} {f} helped {H}.")
    t.fact("How did {H} feel at the end?|Was {H} brave in the end?", "In the end {H} was brave.")


def rescue(t):
    """The hero helps a stranger, who later helps in return."""
    trouble, way = t.rng.choice([("had a thorn in {fis} foot", "pulled the thorn out"), ("was caught in a net", "bit and tore the net until it broke"),
                                 ("was stuck in the mud", "pulled with all {his} strength"), ("had fallen into a deep hole", "let down a long branch"),
                                 ("was lost and cold", "shared {his} blanket and showed the way"), ("was very hungry", "gave {fim} half of {his} {food}")]
                                if t.s.hero.place != "water" else
                                [("was caught in a net", "bit and tore the net until it broke"), ("was stuck under a rock", "pushed the rock away"),
                                 ("was very hungry", "gave {fim} half of {his} {food}"), ("was lost", "showed {fim} the way")])
    danger = t.pick("a big storm came|{H} fell into the river|{H} lost the way in the fog|a great wind broke {his} roof" if t.s.hero.place != "water" else
                    "a big storm came|{H} lost the way in the dark water|{H} was caught in a strong current")
    t.s.slots.update(trouble=trouble.format(**t.s.slots), way=way.format(**t.s.slots), danger=danger.format(**t.s.slots))
    t.s.plan = t.fill("{H} meets {F}, {af} who {trouble}. {H} helps. Later {F} helps {H} too.")
    t.s.gist = t.fill("{H} {h} helped {F} {f}, and later {F} helped {H}.")
    t.s.title = t.fill("{H} and {F}")
    t.opening()
    t.para()
    t.say("One {weather} day {H} heard somebody crying.|One day {he} {move} along the path when {he} heard a weak voice.|One {weather} morning {H} heard a call for help.|\"Help!\" called somebody one {weather} day.")
    t.say("It was {af} named {F}, who {trouble}.|It was {F} {f}. {fe} {trouble}.")
    t.more("\"Please help me,\" said {F}. \"I have waited here all day.\"|The others went by, but {H} stopped.|{H} was in a hurry, but {he} stopped at once.")
    t.say("\"Wait, I will help you,\" said {H}, and {he} {way}.|{H} did not think long. {he} {way}.|Without a word {H} {way}.")
    t.say("\"I will never forget this,\" said {F}.|\"Thank you,\" said {F}. \"One day I will help you too.\"|{F} smiled. \"You have a good heart,\" {fe} said.")
    t.more("{H} laughed. \"That was nothing,\" {he} said, and {he} {move} home.|Then they said goodbye.")
    t.para()
    t.say("Some weeks later, {danger}.|Many days went by. Then, one evening, {danger}.|Not long after that, {danger}.")
    t.say("{H} called for help, but nobody came.|\"What shall I do now?\" cried {H}.|{H} was cold and alone.")
    t.say("Then {he} heard a voice that {he} knew. It was {F}!|Suddenly {F} was there. \"Now it is my turn,\" said {F}.|But {F} had heard {him} and came at once.")
    t.say("{F} brought {him} to a safe and warm place.|Together they were strong enough, and soon {H} was safe.|{F} did not leave until {H} was safe.")
    t.closing("If you help others, they will help you.|No good deed is ever lost.|Kindness comes back.")
    t.fact("What was wrong with {F}?|Why did {F} need help?|What happened to {F}?", "{F} {trouble}.")
    t.fact("Who helped {F}?", "{H} {h} helped {F}.")
    t.fact("Who helped {H} later?|Who saved {H}?", "{F} {f} helped {H}.")


def sharing(t):
    """The hero keeps the food, is alone with it, and shares in the end."""
    t.s.plan = t.fill("{H} has a lot of {food} and does not want to share with {F} {f}. {H} feels lonely. Then {he} shares, and both are happy.")
    t.s.gist = t.fill("{H} {h} did not want to share {his} {food}, but then {he} shared with {F} {f} and was happy.")
    t.s.title = t.fill("{H} Learns to Share")
    t.opening()
    t.say("One day {H} found a big basket of {food}.|One {weather} day {he} had a whole table full of {food}.|In {season}, {H} gathered more {food} than ever before.")
    t.say("\"All this is mine,\" {he} said. \"I will not give any of it away.\"|\"Mine, mine, mine!\" sang {H}.|{he} hid the {food} {spot1}, so that nobody could see it.")
    t.para()
    t.meet()
    t.say("\"I am so hungry,\" said {F}. \"May I have some {food}?\"|\"May I have just a little?\" asked {F}.|\"Will you share your {food} with me?\" asked {F}.")
    t.say("\"No,\" said {H}. \"I need it all.\"|\"No! It is all mine,\" said {H}.|But {H} shook {his} head and turned away.")
    t.say("So {F} went away with an empty stomach.|{F} said nothing and went home.|{F} looked sad and left.")
    t.para()
    t.say("{H} sat down and began to eat, all alone.|That evening {H} ate and ate.|{H} ate until {his} stomach hurt.")
    t.say("But the {food} did not taste good, because nobody was there to laugh with {him}.|It was a good meal, but {he} felt lonely.|It was very quiet, and {H} felt more and more sad.")
    t.more("\"What good is all this if I am alone?\" {he} thought.|{he} thought of {F} and could not sleep.")
    t.say("The next morning {H} took the basket and went to {F}.|So {he} got up and {move} to {F} as fast as {he} could.|In the morning {he} knocked at {fis} door.")
    t.say("\"I am sorry,\" said {H}. \"Please eat with me.\"|\"I was wrong,\" {he} said. \"Let us share.\"|\"Half of it is for you,\" said {H}, \"and I am sorry.\"")
    t.say("They ate together, and it tasted better than ever.|{F} smiled, and they ate until the sun went down.|They sat in the sun, ate {food} and told each other jokes.")
    t.closing("Things taste better when you share them.|Sharing makes everybody happy.")
    t.fact("What food did {H} have?|What did {H} not want to share?", "{H} had a lot of {food}.")
    t.fact("Who was hungry?|Who asked {H} for food?", "{F} {f} was hungry.")
    t.fact("What did {H} learn?", "{H} learned to share.")


def skill(t):
    """The hero learns something by trying again and again."""
    what = t.pick("swim|sing|dance|whistle|paint|bake bread|play the flute|read|fly a kite|juggle|ride a bicycle|climb" if t.s.hero.place != "water" else
                  "sing|dance|jump out of the water|swim backwards|blow big bubbles|read")
    t.s.slots["what"] = what = t.wish.deed or what
    t.s.plan = t.fill("{H} wants to learn to {what}. It goes wrong {n} times. {F} {f} helps, and {H} practises until it works.")
    t.s.gist = t.fill("{H} {h} wanted to learn to {what}, and with practice and the help of {F} {f} {he} did it.")
    t.s.title = t.fill("{H} Learns to " + what.title())
    t.opening()
    t.say("{H} had a big wish: {he} wanted to learn to {what}.|More than anything, {H} wanted to {what}.|Everybody else could {what}, but {H} could not.")
    t.para()
    t.say("{he} tried it on Monday, and it went wrong.|The first time {he} tried, everybody laughed.|{he} tried it once, and {he} fell on {his} nose.")
    t.say("{he} tried it again on Tuesday, and it went wrong again.|The second time was not better.|{he} tried it a second time, and it was even worse.")
    t.say("\"I will never learn it,\" said {H}.|\"It is too hard for me,\" {he} sighed.|{H} sat down {spot1} and cried a little.")
    t.para()
    t.meet()
    t.say("{fe} could {what} very well.|\"I will show you,\" said {F}. \"I needed a whole year to learn it.\"|\"Do you know how often I tried?\" said {F}. \"A hundred times!\"")
    t.say("\"Do it slowly, and do it every day,\" said {F}.|\"Just a little every day,\" said {F}. \"That is the secret.\"|\"Try again, and I will count,\" said {F}.")
    t.say("So {H} practised every day, in sun and in rain.|Every morning {H} practised with {F}.|{H} tried again the next day, and the day after that.")
    t.more("Slowly, very slowly, it went better.|After {n} days {he} could do a little.|Sometimes {he} was tired, but {he} did not stop.")
    t.para()
    t.say("Then, one {weather} morning, it worked!|And one day {H} could {what}!|After {n} weeks {H} could {what} as well as {F}.")
    t.say("\"I can do it!\" shouted {H}.|Everybody clapped, and {F} clapped the loudest.|\"Look at me!\" called {H}, and {F} laughed with joy.")
    t.closing("Who tries again and again will learn it.|Practice makes it easy.")
    t.fact("What did {H} want to learn?|What did {H} want to do?", "{H} wanted to learn to {what}.")
    t.fact("Who helped {H}?|Who was the teacher?", "{F} {f} helped {H}.")
    t.fact("How did {H} learn it?", "{H} practised every day.")


def newcomer(t):
    """A lonely newcomer finds a friend through a thing they both like."""
    like = t.pick("collecting stones|singing songs|looking at the stars|telling jokes|playing hide and seek|drawing pictures|dancing in the rain|eating {food}").format(**t.s.slots)
    t.s.slots["like"] = like
    t.s.plan = t.fill("{H} is new and has no friends. {F} {f} likes {like} too. They become friends.")
    t.s.gist = t.fill("{H} {h} was new and lonely, but {he} found a friend in {F} {f}, because both liked {like}.")
    t.s.title = "A New Friend"
    t.opening()
    t.say("{H} was new there and did not know anybody.|{he} had come from far away and had no friends yet.|{H} had moved there only {n} days ago.")
    t.say("Every day {he} sat {spot1} and watched the others play.|When the others played, {H} stood {spot1} and was too shy to ask.|{he} ate alone, {he} played alone, and {he} talked to {his} {thing}.")
    t.para()
    t.say("One {weather} day {H} was {like} all alone.|To forget {his} sadness, {H} began {like}.|One afternoon {he} was {like} when {he} heard a laugh.")
    t.meet()
    t.say("\"Do you like {like}?\" asked {F}. \"I like it too!\"|\"I love {like}!\" said {F}. \"May I join you?\"|\"Can I do that with you?\" asked {F}.")
    t.say("{H} could not believe {his} ears.|{H} smiled for the first time in days.|\"Yes, please!\" said {H}.")
    t.para()
    t.say("From then on they met every day {spot2}.|The two were {like} until the sun went down.|They forgot the time and did not stop before dark.")
    t.more("{F} showed {him} the whole place, from {spot2} to {spot3}.|{F} told {him} {n} secrets, and {H} told {fim} one.|{H} gave {F} {athing}, and {F} was very happy.")
    t.say("Soon the others came too, and {H} was never lonely again.|\"I am glad that you came here,\" said {F}.|\"Now this is my home,\" said {H}.")
    t.closing("A friend can be closer than you think.|One friend is enough to make a place your home.")
    t.fact("What did {H} and {F} both like?|What did {F} like?", "They both liked {like}.")
    t.fact("Why was {H} sad?|Why was {H} lonely?", "{H} was new and had no friends.")
    t.fact("Who became {his} friend?|Who is the friend of {H}?", "{F} {f} became {his} friend.")


def lie(t):
    """A lie, its trouble, and an apology."""
    t.s.plan = t.fill("{H} breaks {fis} {thing} and tells a lie. {F} {f} is sad. {H} tells the truth and is forgiven.")
    t.s.gist = t.fill("{H} {h} broke the {thing} of {F} {f} and lied about it, but then {he} told the truth and was forgiven.")
    t.s.title = t.fill("The Broken " + t.s.slots["thingk"].capitalize())
    t.opening()
    t.say("{his} friend was {F}, {af}.|{H} often played with {F} {f}.|Next door lived {F}, {af}.")
    t.say("{F} had {athing} and was very proud of it.|{F} owned {athing}, the most beautiful one in the world.")
    t.para()
    t.say("One day {H} played with the {thing} and it fell down and broke.|One {weather} day, when {F} was away, {H} dropped the {thing}. It broke.")
    t.say("{H} was scared and hid the pieces {spot1}.|Quickly {he} put the broken {thing} {spot1}.")
    t.say("\"Have you seen my {thing}?\" asked {F} in the evening.|When {F} came back, {fe} asked, \"Where is my {thing}?\"")
    t.say("\"No,\" said {H}. \"Maybe the wind took it.\"|\"I do not know,\" said {H}, and that was a lie.|\"A thief must have taken it,\" said {H}, but {his} face was red.")
    t.para()
    t.say("{F} looked for it all day and was very sad.|{F} searched everywhere and cried.")
    t.say("{H} could not eat and could not sleep.|The lie lay in {his} stomach like a stone.|That night {H} lay awake for a long time.")
    t.say("In the morning {he} went to {F} and said, \"I broke it, and I lied. I am sorry.\"|At last {he} said, \"{F}, it was me. I broke it. I am so sorry.\"")
    t.say("{F} was quiet for a while. Then {fe} said, \"Thank you for telling me the truth.\"|\"I am sad about the {thing},\" said {F}, \"but I am glad that you told me.\"")
    t.say("Together they glued the {thing}, and it was almost like new.|They repaired the {thing} together, and it took {n} hours.|{H} worked for {n} days to buy {fim} a new one.")
    t.closing("It is better to tell the truth.|A lie is heavy, and the truth makes you light.")
    t.fact("What did {H} break?|What was broken?", "{H} broke the {thing}.")
    t.fact("Who told a lie?|Who lied?", "{H} {h} told a lie.")
    t.fact("Where were the pieces?|Where did {H} hide the {thingk}?", "{H} hid the {thing} {spot1}.")
    t.fact("Whose {thingk} was it?", "It was the {thing} of {F} {f}.")


def gift(t):
    """A birthday gift that costs nothing but care."""
    made = t.pick("a song|a little boat of bark|a picture|a crown of flowers|a warm scarf|a cake|a poem|a small box" if t.s.hero.place != "water" else
                  "a song|a crown of shells|a necklace of pearls|a poem|a bed of soft sea grass")
    t.s.slots["made"] = made
    t.s.plan = t.fill("It is the birthday of {F} {f}. {H} has no money for a gift and makes {made}. {F} loves it most of all.")
    t.s.gist = t.fill("{H} {h} had no money, so {he} made {made} for the birthday of {F} {f}, and {F} loved it.")
    t.s.title = t.fill("A Gift for {F}")
    t.opening()
    t.say("{his} best friend was {F}, {af}.|{H} had a good friend, {af} named {F}.")
    t.say("Soon it was {fis} birthday.|In {n} days {F} would have {fis} birthday.|\"Tomorrow is my birthday,\" said {F}. \"Will you come?\"")
    t.para()
    t.say("{H} wanted to give {fim} something nice, but {he} had no money.|In the shop {H} saw {athing}, but it cost too much.|{H} turned out {his} pockets, and they were empty.")
    t.say("{he} thought and thought. Then {he} had an idea.|\"I have no money,\" thought {H}, \"but I have time.\"|{he} sat down {spot1} and thought about it.")
    t.say("All night {he} worked, and in the morning {made} was ready.|{H} began to work and made {made}.|{he} made {made} with {his} own hands, and it took {n} hours.")
    t.more("It was not perfect, but it was made with love.|{H} looked at it again and again. Was it good enough?")
    t.para()
    t.say("Many guests came to the feast and brought big gifts.|At the feast the others gave {F} gold and silver things.|The guests came with large boxes and bright ribbons.")
    t.say("{H} came last and was a little ashamed.|{H} waited until the end. \"Mine is only small,\" {he} said.")
    t.say("But when {F} saw {made}, {fis} eyes began to shine.|{F} looked at it for a long time and could not speak.")
    t.say("\"This is the best gift of all,\" said {F}, \"because you made it for me.\"|\"Nobody ever made {made} for me before,\" said {F}. \"Thank you!\"")
    t.closing("The best gift comes from the heart.|A gift need not be big to be good.")
    t.fact("What did {H} make?|What was the gift?|What did {H} give to {F}?", "{H} made {made} for {F}.")
    t.fact("Whose birthday was it?", "It was the birthday of {F} {f}.")
    t.fact("Why did {H} not buy a gift?", "{H} had no money.")


def noise(t):
    """A strange noise at night turns out to be a small visitor."""
    sound = t.pick("a soft scratching|a strange humming|a knock at the door|a long, low whistle|a little cough")
    t.s.slots["sound"] = sound
    t.s.plan = t.fill("At night {H} hears {sound}. {he} is scared but goes to look. It is only {F}, {af}. They become friends.")
    t.s.gist = t.fill("{H} {h} heard {sound} at night, and it was only {F} {f}, who wanted company.")
    t.s.title = "The Noise in the Night"
    t.opening()
    t.para()
    t.say("One {weather} night {H} woke up. There was {sound}.|In the middle of the night {H} heard {sound}.|One night, when everybody was asleep, {H} heard {sound}.")
    t.say("\"Who is there?\" whispered {H}, but nobody answered.|{H} pulled the blanket over {his} head.|{his} heart began to beat fast.")
    t.more("\"Maybe it is a monster,\" {he} thought.|\"It is only the wind,\" {he} told {him}self, but it was not the wind.")
    t.say("The sound came again.|There it was again!|Then it came a second time, and it was closer.")
    t.para()
    t.say("{H} took {his} {thing} and went to look.|At last {H} took all {his} courage and went out.|\"I must know what it is,\" said {H}, and {he} got up.")
    t.say("{he} looked {spot1}. Nobody was there.|{he} looked {spot1} and saw only the moonlight.")
    t.say("Then {he} looked {spot2} and saw two big eyes.|Then something moved {spot2}.")
    t.say("It was {af}! \"I am {F},\" {fe} said. \"I did not want to wake you.\"|\"Please do not be angry,\" said {af}. \"My name is {F}, and I cannot sleep.\"")
    t.say("{H} began to laugh. \"And I thought you were a monster!\"|\"You scared me,\" said {H}, \"but now I am glad that it is you.\"")
    t.para()
    t.say("{H} made warm milk, and they talked until the morning.|They sat together, ate {food} and looked at the moon.|{H} gave {F} some {food}, and {F} told {him} a story.")
    t.closing("What we fear is often small when we look at it.|Look first, and then be afraid.")
    t.fact("What did {H} hear?", "{H} heard {sound}.")
    t.fact("Who made the noise?|Who was there in the night?", "It was {F}, {af}.")
    t.fact("Where was {F}?", "{F} was {spot2}.")


def garden(t):
    """Patience with a seed."""
    grows = t.pick("a tall sunflower|a small apple tree|a big pumpkin|a rose bush|a bean plant that reached the roof|a field of poppies" if t.s.hero.place != "water" else
                   "a garden of sea grass|a pink coral|a big water lily")
    t.s.slots["grows"] = grows
    t.s.plan = t.fill("{H} plants a seed and waits. {he} wants to give up, but {F} {f} tells {him} to be patient. In the end there is {grows}.")
    t.s.gist = t.fill("{H} {h} planted a seed, waited with {F} {f}, and at last there was {grows}.")
    t.s.title = t.fill("The Seed of {H}")
    t.opening()
    t.say("One day {H} found a little seed {spot1}.|In {season} {H} got a seed as a gift from {F}, {af}." if t.rng.random() < .5 else "One {weather} day {H} found a seed that nobody wanted.")
    t.say("{he} put it into the ground and waited.|{he} made a small hole, put the seed in and covered it.")
    t.para()
    t.say("The next morning {he} looked, but there was nothing.|On the first day nothing happened.")
    t.say("{he} waited two days, three days, four days. Still nothing.|A week went by, and nothing came out.")
    t.say("\"This seed is no good,\" said {H}.|\"I will dig it out and throw it away,\" said {H}.|{H} wanted to give up.")
    t.say("\"Wait,\" said {F} {f}. \"Good things need time.\"|\"Be patient,\" said {F} {f}. \"It is working under the ground.\"|But {F} {f} said, \"Give it light and care, and wait a little longer.\"")
    t.para()
    t.say("So {H} cared for it every day and even sang to it.|{H} came back every morning and told the seed a story.")
    t.say("Then, after {n} weeks, something small and green looked out.|And one {weather} morning there was a tiny green leaf.")
    t.more("{H} was so happy that {he} ran to tell everybody." if t.s.hero.place == "land" else "{H} was so happy that {he} told everybody.")
    t.say("It grew and grew, and at the end of the year it was {grows}.|Day by day it grew, until it was {grows}.|It became {grows}, the most beautiful {place}.")
    t.say("\"You were right,\" said {H} to {F}. \"It only needed time.\"|{H} and {F} sat beside it and were proud.")
    t.closing("Good things need time.|Be patient, and it will grow.")
    t.fact("What did {H} plant?|What did {H} find?", "{H} planted a seed.")
    t.fact("What grew from the seed?|What did the seed become?", "It became {grows}.")
    t.fact("Who told {H} to wait?|Who was patient?", "{F} {f} told {H} to wait.")


def trick(t):
    """A small clever hero escapes a big hungry one."""
    big = t.pick("wolf|giant|troll|lion|bear|dragon|crocodile" if t.s.hero.place != "water" else "shark|giant crab|sea monster")
    while big in (t.s.hero.kind, t.s.friend.kind):
        big = t.pick("wolf|giant|troll|lion")
    t.s.slots["big"] = big
    trick_ = t.pick("\"Look behind you!\" {he} said. \"There is a much bigger dinner.\"|\"I am too thin now,\" {he} said. \"Wait until I have eaten more.\"|"
                    "\"Do you want to hear a song before you eat me?\" {he} asked, and {he} sang until the {big} fell asleep.|"
                    "\"You are strong,\" {he} said, \"but can you count all the stars?\" And the {big} looked up and began to count.").format(**t.s.slots)
    t.s.plan = t.fill("A big {big} wants to eat {H}. {H} is clever and tricks the {big}. {F} {f} hears about it.")
    t.s.gist = t.fill("{H} {h} tricked a big {big} that wanted to eat {him}, and told {F} {f} about it.")
    t.s.title = t.fill("{H} and the " + big.title())
    t.opening()
    t.say("{place} there was also a big {big}, and everybody was afraid of it.|Not far away lived a big, hungry {big}.|But a terrible {big} lived nearby.")
    t.para()
    t.say("One {weather} day {H} was looking for {food} when the {big} stood before {him}.|One day the {big} caught {H} {spot1}.|One {weather} morning {H} came home, and there sat the {big}, waiting.")
    t.say("\"Now I will eat you!\" said the {big}.|\"You look good,\" said the {big}. \"You will be my dinner.\"")
    t.say("{H} was frightened, but {he} did not run away. {he} thought quickly.|{H} trembled a little. But then {he} had an idea.")
    t.say(trick_)
    t.para()
    t.say("The {big} was big, but not very clever.|The {big} believed it.")
    t.say("And when it did not look, {H} slipped away {spot2}.|And {H} was already far away when the {big} noticed.")
    t.say("The {big} was so ashamed that it left and never came back.|The {big} roared with anger, but it was too late.|From that day on the {big} ate only soup.")
    t.say("{H} {move} to {F} {f} and told {fim} everything.|When {F}, {af}, heard about it, {fe} laughed until {fe} cried.")
    t.more("\"You are small, but you have a big head on your shoulders,\" said {F}.|\"How clever you are!\" said {F}.")
    t.closing("Being clever is better than being strong.|A quick mind can beat a big mouth.")
    t.fact("Who wanted to eat {H}?", "The {big} wanted to eat {H}.")
    t.fact("Who was clever?|Who won in the end?", "{H} {h} was clever and tricked the {big}.")
    t.fact("Whom did {H} tell about it?", "{H} told {F} {f} about it.")


def useful(t):
    """A thing that nobody needs, until the day comes. Heroes from OBJECTS."""
    stand, good, day = W.OBJECTS.get(t.s.hero.kind, ("corner", "helping", "somebody needed help"))
    t.s.slots.update(stand=stand, good=good, day=day)
    t.s.plan = t.fill("{H} is {ah} that nobody needs. Then {day}, and {F} {f} remembers {H}. {H} is proud to help.")
    t.s.gist = t.fill("{H} {h} thought that nobody needed {him}, but when {day}, {H} could help.")
    t.s.title = t.fill("{H} the " + t.s.hero.kind.title())
    t.opening()
    t.say("{H} was made for {good}.|There was nothing {he} loved more than {good}.|{H} was very good at {good}.")
    t.say("But nobody had needed {him} for a long time.|But the years went by, and everybody forgot {him}.|But the others were newer and shinier, and nobody looked at {him}.")
    t.more("\"You are old and useless,\" said the others.|\"Will anybody ever need me again?\" {he} asked {him}self at night.")
    t.para()
    t.say("Then, one {weather} evening, {day}.|But one {weather} day {day}.|One day in {season}, {day}.")
    t.say("Nobody knew what to do.|Everybody ran around and was frightened.|\"Who can help us?\" they cried.")
    t.say("Then {F} {f} remembered {H}.|\"Wait!\" said {F}, {af}. \"I know who can help.\"|But {F}, {af}, had an idea. \"We still have {H}!\" {fe} said.")
    t.say("\"I am ready,\" said {H}, and {his} heart beat with joy.|\"Will you help us, {H}?\" asked {F}. \"Oh yes!\" said {H}.")
    t.para()
    t.say("{H} did {his} best, and it worked.|And {H} did what {he} could do best.|It was hard work, but {H} did not give up.")
    t.say("Soon everything was well again.|Soon everybody was laughing again.|And so {H} saved the day.")
    t.say("\"What would we do without you?\" said {F}.|\"Thank you, {H},\" they all said.|From then on {H} got a place of honour, and {F} came to see {him} every day.")
    t.closing("Everybody is good for something.|Your day will come, too.")
    t.fact("What was {H} good at?|What was {H} made for?", "{H} was good at {good}.")
    t.fact("What happened one day?", "One day {day}.")
    t.fact("Who remembered {H}?", "{F} {f} remembered {H}.")


def wish(t):
    """A magic thing grants one wish, and it goes to the friend."""
    need = t.pick("could not walk|had lost {fis} voice|was very ill|was always cold|could not find {fis} way home").format(**t.s.slots)
    t.s.slots["need"] = need
    t.s.plan = t.fill("{H} finds a magic {thing} with one wish. {H} could have anything, but {F} {f} {need}. {H} gives the wish to {F}.")
    t.s.gist = t.fill("{H} {h} found a magic {thing} with one wish and used it for {F} {f}.")
    t.s.title = "The Last Wish"
    t.opening()
    t.say("One {weather} day {he} found {athing} {spot1}.|One day {H} saw something shine {spot1}. It was {athing}.")
    t.say("\"I am magic,\" said the {thing}. \"You have one wish.\"|When {he} touched it, a voice said, \"You may make one wish.\"")
    t.para()
    t.say("\"I could have a palace,\" thought {H}, \"or all the {food} in the world.\"|{H} thought of gold, of a castle and of {food} for every day.")
    t.meet()
    t.say("{F} {need}, and {fe} was very sad.|But {F} did not smile, because {fe} {need}.")
    t.say("{H} looked at the {thing}, and then {he} looked at {F}.|{H} was quiet for a moment.")
    t.say("\"I know my wish,\" {he} said. \"Help my friend!\"|\"I do not need a palace,\" said {H}. \"I wish that {F} is well again.\"")
    t.para()
    t.say("There was a bright light, and then everything was different. {F} laughed and danced.|The {thing} glowed once, and {F} was well.")
    t.more("\"But now your wish is gone,\" said {F}. \"No,\" said {H}, \"it came true.\"|\"Why did you do that for me?\" asked {F}. \"Because you are my friend,\" said {H}.")
    t.say("The {thing} never spoke again, but {H} kept it for ever.|After that the {thing} was just {athing} again, but {H} did not mind.")
    t.closing("The best wish is one for somebody else.|A friend is worth more than gold.")
    t.fact("What did {H} find?|What was magic?", "{H} found {athing}, and it was magic.")
    t.fact("What did {H} wish for?|For whom was the wish?", "{H} used the wish to help {F}.")
    t.fact("What was wrong with {F}?", "{F} {need}.")


def quarrel(t):
    """Two friends quarrel about a thing and make up."""
    t.s.plan = t.fill("{H} and {F} {f} both want {athing}. They quarrel and it is no fun alone. They say sorry and use it together.")
    t.s.gist = t.fill("{H} {h} and {F} {f} quarrelled about {athing}, but in the end they said sorry.")
    t.s.title = t.fill("The Quarrel")
    t.opening()
    t.say("{his} best friend was {F}, {af}.|{H} and {F} {f} were the best of friends.|Every day {H} played with {F}, {af}.")
    t.para()
    t.say("One {weather} day they found {athing} {spot1}.|One day there was {athing} {spot1}, and both saw it at once.")
    t.say("\"I saw it first!\" said {H}. \"No, I did!\" said {F}.|\"It is mine!\" cried {H}. \"No, it is mine!\" cried {F}.")
    t.say("They pulled and they shouted, and then each went home alone.|They quarrelled until {F} turned around and left.")
    t.more("\"I do not need {F},\" said {H}.|\"I will never speak to {fim} again,\" said {H}.")
    t.para()
    t.say("The next day {H} had the {thing}, but nobody to play with.|For {n} days they did not speak a word.")
    t.say("It was so quiet. {H} missed the laugh of {F}.|{H} played alone, and it was no fun at all.")
    t.say("At last {H} went to {F}. \"I am sorry,\" {he} said. \"You are more important than the {thing}.\"|Then there was a knock at the door. It was {F}. \"I am sorry,\" {fe} said. \"I am sorry, too,\" said {H}.")
    t.say("From then on {H} had the {thing} one day and {F} the next.|They put the {thing} {spot2} and used it together.|They laughed, and they shared the {thing} from then on.")
    t.closing("A friend is more important than a thing.|It is good to say sorry.")
    t.fact("What did they quarrel about?|What did they find?", "They quarrelled about {athing}.")
    t.fact("With whom did {H} quarrel?", "{H} quarrelled with {F} {f}.")
    t.fact("Where was the {thingk}?|Where did they find it?", "It was {spot1}.")


def voyage(t):
    """A map, a journey, and an unexpected treasure."""
    chest = t.pick("a letter that said: The journey was the treasure|a big loaf of bread and two cups|seeds for a whole garden|{n} old books full of stories|a small mirror that showed two friends").format(**t.s.slots)
    t.s.slots["chest"] = chest
    t.s.plan = t.fill("{H} finds a map. {he} goes with {F} {f} to look for the treasure. In the chest there is {chest}. They are happy all the same.")
    t.s.gist = t.fill("{H} {h} and {F} {f} followed a map, and in the chest they found {chest}.")
    t.s.title = "The Old Map"
    t.opening()
    t.say("One {weather} day {H} found an old map {spot1}.|One morning there was an old map {spot1}, with a big red cross on it.")
    t.say("\"A treasure!\" {he} called. \"I must find it.\"|{his} hands trembled. \"This is a treasure map!\" {he} whispered.")
    t.para()
    t.say("{he} showed it to {F}, {af}, and they set off together.|{F}, {af}, wanted to come along, and so they went together.|\"Come with me,\" {he} said to {F} {f}, and {F} said yes.")
    if t.s.hero.place == "water":
        t.say("They swam through the dark caves and over the reef.|They swam all day, and at night they slept among the water plants.")
    else:
        t.say("They went over {n} hills and through a dark forest.|They crossed a river, climbed a mountain and slept under the stars.|They walked for {n} days, and it rained on every one of them.")
    t.more("When {H} was tired, {F} sang a song. When {F} was hungry, {H} shared {his} {food}.|Once they lost the way, but {F} asked an old stranger.|\"Is it still far?\" asked {F}. \"Not far,\" said {H}.")
    t.say("At last they came to the place with the cross. It was {spot2}.|Then they saw it: the red cross was {spot2}.")
    t.para()
    t.say("They dug and dug, and they found a chest.|There lay a small chest, and it was not locked.")
    t.say("They opened it. There was no gold in it, but {chest}.|Inside was {chest}.")
    t.say("{H} was quiet at first. Then {he} began to laugh, and {F} laughed, too.|\"No gold,\" said {H}. \"But what a journey!\" said {F}.")
    t.closing("The journey was the real treasure.|A good journey is worth more than gold.")
    t.fact("What did {H} find?|What did {H} find first?", "{H} found an old map.")
    t.fact("What was in the chest?", "In the chest there was {chest}.")
    t.fact("Who went with {H}?", "{F} {f} went with {H}.")
    t.fact("Where was the treasure?|Where was the chest?", "It was {spot2}.")


def cooking(t):
    """A soup that is nothing without the others."""
    third, _ = W.name(t.rng, {t.s.hero.name, t.s.friend.name}, cast=None if t.wish.strange else "friend")
    t.s.slots["T"] = third
    soup = t.pick("soup|cake|pie|stew") if t.s.hero.place != "water" else "seaweed stew"
    t.s.slots["dish"] = soup
    t.s.plan = t.fill("{H} wants to make a {dish} but has almost nothing. {F} {f} brings {food}, and {T} brings salt. They eat together.")
    t.s.gist = t.fill("{H} {h} made a {dish} together with {F} {f} and {T}, because everybody brought something.")
    t.s.title = t.fill("The Best " + soup.title())
    t.opening()
    t.say("One {weather} day {H} wanted to make a {dish}.|\"Today I will make a {dish},\" said {H} one morning.")
    t.say("But the cupboard was almost empty.|But {he} had only water and one old onion.")
    t.para()
    t.say("{F}, {af}, came by and asked, \"What are you doing?\"|Then {F} {f} knocked at the door.")
    t.say("\"I am making a {dish},\" said {H}, \"but something is missing.\"|\"I have nothing to put into it,\" said {H} sadly.")
    t.say("\"I have some {food},\" said {F}. \"Let us put that in.\"|{F} went home and came back with {food}.")
    t.say("Then {T} came, smelled it and brought some salt.|After a while {T} came, too. \"I have salt,\" said {T}.")
    t.more("\"May I help to stir?\" asked {T}.|Everybody stirred a little, first to the left and then to the right.")
    t.para()
    t.say("At noon the {dish} was ready, and it smelled wonderful.|It was ready just when the sun went down.")
    t.say("\"Who made this wonderful {dish}?\" asked {F}. \"We all did,\" said {H}.|They ate until nothing was left. \"Tomorrow again!\" said {T}.")
    t.closing("Together even a little becomes a lot.|If everybody brings something, there is enough for all.")
    t.fact("What did {H} make?|What did {H} cook?", "{H} made a {dish}.")
    t.fact("What did {F} bring?", "{F} brought {food}.")
    t.fact("Who brought salt?", "{T} brought salt.")


def race(t):
    """The slow one wins, or loses happily."""
    wins = t.rng.random() < 0.6
    t.s.slots["prize"] = t.pick("a golden cup|a big cake|{athing}|a crown of leaves").format(**t.s.slots)
    end = "wins because {F} stops to sleep" if wins else "stops to help {F}, who has fallen, and both cross the line together"
    t.s.plan = t.fill("There is a race between {H} and {F} {f}. {F} is faster. {H} " + end + ".")
    t.s.gist = t.fill("{H} {h} and {F} {f} ran a race, and " + ("{H} won because {he} did not stop." if wins else "they crossed the line together."))
    t.s.title = "The Great Race"
    t.opening()
    t.say("Once a year there was a great race, and the prize was {prize}.|One {weather} day there was a big race. The winner would get {prize}.")
    t.say("The fastest of all was {F}, {af}.|Everybody knew that {F} {f} would win.")
    t.say("\"You are too slow, {H},\" laughed {F}.|\"Go home, {H}!\" said {F}. \"You cannot win.\"")
    t.more("\"I will try it all the same,\" said {H}.|{H} did not answer. {he} only looked at the road.")
    t.para()
    t.say("\"One, two, three, go!\" And {F} was gone like the wind.|The race began, and soon {F} was far ahead.")
    t.say("{H} {move} on, step by step.|{H} did not hurry and did not stop.")
    if wins:
        t.say("{F} looked back and saw nobody. \"I have time for a nap,\" {fe} said, and {fe} lay down {spot1}.|Halfway {F} stopped {spot1}, ate some {food} and fell asleep.")
        t.say("{H} went past {fim} quietly.|When {F} woke up, {H} was already at the goal.")
        t.say("Everybody cheered, and {H} got {prize}.|\"The winner is {H}!\" they called.")
        t.say("\"I was too proud,\" said {F}. \"You have earned it.\"|{F} gave {him} {fis} hand. \"Next time I will not sleep,\" {fe} said.")
        t.closing("Slow and steady wins the race.|Do not stop, and you will get there.")
        t.fact("Who won the race?", "{H} {h} won the race.")
    else:
        t.say("Then {he} saw {F}. {fe} had fallen and could not get up.|{spot1} lay {F}, who had hurt {fis} foot.")
        t.say("{H} could have won. But {he} stopped and helped {F} up.|\"Go on and win,\" said {F}. \"No,\" said {H}, \"come with me.\"")
        t.say("Together they crossed the line, and nobody clapped more than the ones behind them.|So they came to the goal side by side, and they shared {prize}.")
        t.closing("Helping is better than winning.|There are things more important than winning.")
        t.fact("Who won the race?", "They crossed the line together.")
    t.fact("What was the prize?", "The prize was {prize}.")
    t.fact("Who was faster at first?|Who laughed at {H}?", "It was {F} {f}.")


def dream(t):
    """Everybody says it cannot be done; with a friend it can. The goal is any phrase."""
    goal = t.wish.deed or t.rng.choice(W.GOALS)
    t.s.slots["goal"] = goal
    t.s.plan = t.fill("{H} wants to {goal}. Everybody says that it is impossible. {F} {f} helps, and the dream comes true.")
    t.s.gist = t.fill("{H} {h} wanted to {goal}, and with the help of {F} {f} the dream came true.")
    t.s.title = t.fill("The Dream of {H}")
    t.opening()
    t.say("{H} had a dream: {he} wanted to {goal}.|There was one thing {he} wanted more than anything: to {goal}.|Every night {H} had the same dream. {he} wanted to {goal}.")
    t.say("\"You will never do that,\" said the others.|\"{ah} cannot do that!\" laughed the neighbours.|Everybody said that it was impossible.|\"Nobody can do that,\" {his} mother said.")
    t.more("But {H} did not stop dreaming.|{H} went {spot1} and thought about it all day.|{H} drew a picture of it and put it over {his} bed.")
    t.para()
    t.meet()
    t.say("\"What are you thinking about?\" asked {F}.|\"You look so serious,\" said {F}. \"What is it?\"")
    t.say("\"I want to {goal},\" said {H}. \"But everybody laughs.\"|\"I want to {goal},\" {he} whispered, \"but I do not know how.\"")
    t.say("{F} did not laugh. \"Then let us begin today,\" {fe} said.|\"Why not?\" said {F}. \"Every big thing begins with a small step.\"|\"I know somebody who did it,\" said {F}. \"I will help you.\"")
    t.para()
    t.say("They made a plan and worked on it for {n} weeks.|Every day they did one small thing.|For {n} months they tried, in sun and in rain.")
    t.say("Once it went wrong, and {H} wanted to give up. But {F} said, \"One more time.\"|It was not easy. Sometimes {H} was tired, but {F} made {him} laugh.|Some days were good, and some days were bad.")
    t.say("Then, one {weather} morning, it happened. The dream of {H} came true!|And one {weather} day the dream came true.|And at last the great day came, and everything went well.")
    t.para()
    t.say("\"I wanted to {goal}, and I did it!\" called {H}.|The others came and looked, and nobody laughed any more.|{H} was so happy that {he} could not speak.")
    t.say("\"You did it,\" said {F}. \"No,\" said {H}, \"we did it.\"|{H} hugged {F}. \"Thank you for your help,\" {he} said.")
    t.closing("Never give up your dream.|Every big thing begins with a small step.")
    t.fact("What did {H} want to do?|What was the dream of {H}?|What did {H} dream of?", "{H} wanted to {goal}.")
    t.fact("Who helped {H}?", "{F} {f} helped {H}.")
    t.fact("Did the dream come true?", "Yes, the dream of {H} came true.")


PLOTS = {f.__name__: f for f in (lost, fear, rescue, sharing, skill, newcomer, lie, gift, noise, garden, trick, useful, wish, quarrel,
                                 voyage, cooking, race, dream)}
STILL = ("useful", "newcomer", "quarrel", "fear", "wish", "dream")   # plots that also suit a thing as hero
