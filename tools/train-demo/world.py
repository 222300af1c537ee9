"""The words of the demo world: who lives in it, where, and what things there are.

Everything here is a plain table; the other files draw from it with a seeded
`random.Random`, so the same seed gives the same text.
"""

import hashlib
import itertools
import random

FEMALE = """Ada Alba Alice Alma Amelia Amy Anna Anya Astrid Aurora Bella Beth Betty Bonnie Bridget Camille Carla Carmen
Cecilia Chloe Clara Cleo Cora Daisy Dalia Dana Daphne Della Diana Dora Edith Effie Elena Elin Eliza Ella Elsa Elsie Emily
Emma Erin Esme Esther Etta Eva Evie Fatima Faye Fern Fiona Flora Freya Frida Gaia Gemma Georgia Gerda Gia Gilda Gina Gloria
Grace Greta Gwen Hana Hanna Harriet Hazel Heidi Helen Hilda Holly Hope Ida Ilse Imani Ines Ingrid Iris Irma Isabel Isla Ivy
Jana Jane Jasmine Jenny Jessie Jill Joan Josie Joy Judith Julia June Kaia Karen Kate Kira Klara Lara Laura Layla Lea Leila
Lena Leona Lila Lina Lisa Liv Liza Lola Lotte Lucy Luna Lydia Mabel Maggie Maia Mara Margot Maria Marta Mary Matilda Maud
Maya Meera Mia Mila Milly Mina Minna Mira Moira Molly Mona Myra Nadia Nancy Naomi Nell Nina Nora Odette Olga Olive Olivia
Opal Paula Pearl Peggy Penny Petra Phoebe Pia Polly Poppy Priya Rania Rita Robin Roma Rosa Rose Rosie Ruby Ruth Sadie Sally
Sara Selma Signe Silvia Sofia Sonja Stella Sue Susan Sybil Tara Tess Tessa Thea Tilda Tilly Tina Trudy Ula Una Uma Vera
Viola Wanda Wendy Wilma Willa Winnie Yara Yoko Zara Zelda Zoe""".split()

MALE = """Abel Adam Alan Albert Alec Alfie Ali Amir Andy Anton Archie Arlo Arthur Asher Axel Barney Basil Ben Benno Bernard
Bert Bill Billy Bob Boris Bruno Caleb Carl Casper Cecil Chester Chris Clyde Colin Conrad Cyril Dan Daniel Darius David Dennis
Dexter Diego Dirk Dominic Duncan Dylan Eddie Edgar Edwin Eli Elliot Elmer Emil Enzo Eric Ernest Ethan Ezra Felix Finn Floyd
Frank Franz Fred Freddie Fritz Gabriel George Gil Gordon Gus Gustav Hamid Hans Harald Harry Hassan Hector Henry Herman Hugo
Ian Igor Ike Isaac Ivan Jack Jacob Jake James Jan Jasper Jay Jim Joe Joel John Jonas Jonah Josef Jude Julian Kai Karim Karl
Keith Ken Kim Kurt Lars Leo Leon Lewis Liam Linus Lloyd Lorenz Louis Luca Lucas Luke Malik Manuel Marco Mark Martin Marvin Mateo
Max Melvin Milo Mo Morris Moss Ned Neil Nico Niels Noah Oakley Odin Olaf Oliver Omar Oscar Otis Otto Owen Pablo Patrick Paul Percy
Pete Peter Philip Pierre Pip Quentin Quinn Rafi Ralph Ramon Ravi Ray Reuben Rex Rico Robert Roger Roland Rolf Roman Ron Rory
Rufus Rupert Sam Samir Samuel Sasha Saul Sean Seth Sid Simon Stan Steve Sven Tariq Ted Theo Thomas Tim Timmy Tobias Toby Tom
Tony Tristan Tycho Ulf Umar Victor Vince Walter Wesley Will Wolf Xavier Yann Yusuf Zack Zeno""".split()

# kind: (habitat, how it moves, where it lives, what it eats, what it is)
ANIMALS = {
    "fox": ("land", "ran", "den", "mice and berries", "a wild animal with red fur and a long, bushy tail"),
    "mouse": ("land", "scurried", "hole in the wall", "seeds and cheese", "a very small animal with round ears and a thin tail"),
    "rabbit": ("land", "hopped", "burrow", "grass and carrots", "a soft animal with long ears and strong back legs"),
    "hare": ("land", "hopped", "hollow in the grass", "grass and herbs", "a fast animal like a big rabbit with very long ears"),
    "bear": ("land", "walked", "cave", "berries, fish and honey", "a big, strong animal with thick fur"),
    "wolf": ("land", "ran", "den", "meat", "a wild animal that looks like a big grey dog"),
    "dog": ("land", "ran", "basket by the door", "meat and bones", "a friendly animal that lives with people"),
    "puppy": ("land", "ran", "basket by the door", "milk and soft food", "a young dog"),
    "cat": ("land", "walked", "warm house", "fish and mice", "a small animal with soft fur that likes to sleep in the sun"),
    "kitten": ("land", "ran", "warm house", "milk and fish", "a young cat"),
    "hedgehog": ("land", "walked", "pile of leaves", "beetles and worms", "a small animal covered with sharp spines"),
    "squirrel": ("land", "jumped", "nest in an oak", "nuts and seeds", "a small animal with a bushy tail that climbs trees"),
    "badger": ("land", "walked", "burrow", "worms and roots", "an animal with black and white stripes on its face"),
    "otter": ("water", "swam", "river bank", "fish", "a playful animal that swims very well"),
    "beaver": ("land", "walked", "lodge of sticks", "bark and leaves", "an animal with a flat tail that builds dams"),
    "mole": ("land", "crawled", "tunnel", "worms", "a small animal with soft black fur that digs tunnels"),
    "deer": ("land", "ran", "forest", "grass and leaves", "a shy animal with long, thin legs"),
    "horse": ("land", "ran", "stable", "hay and oats", "a big, strong animal that people can ride"),
    "pony": ("land", "ran", "stable", "hay and apples", "a small horse"),
    "donkey": ("land", "walked", "stable", "hay and thistles", "an animal like a small horse with long ears"),
    "cow": ("land", "walked", "barn", "grass", "a big farm animal that gives milk"),
    "sheep": ("land", "walked", "meadow", "grass", "a farm animal with thick wool"),
    "lamb": ("land", "jumped", "meadow", "milk and grass", "a young sheep"),
    "goat": ("land", "jumped", "barn", "grass and leaves", "a farm animal with horns and a beard"),
    "pig": ("land", "ran", "sty", "roots and apples", "a pink farm animal with a curly tail"),
    "hen": ("land", "walked", "hen house", "corn and seeds", "a farm bird that lays eggs"),
    "rooster": ("land", "walked", "hen house", "corn and seeds", "a farm bird that crows in the morning"),
    "duck": ("land", "waddled", "nest by the pond", "water plants and bread", "a bird with flat feet that swims on ponds"),
    "duckling": ("land", "waddled", "nest by the pond", "water plants", "a young duck"),
    "goose": ("land", "waddled", "nest by the pond", "grass", "a big white bird with a long neck"),
    "swan": ("land", "walked", "nest by the lake", "water plants", "a large white bird with a long, thin neck"),
    "owl": ("land", "flew", "hollow tree", "mice", "a bird with big eyes that hunts at night"),
    "crow": ("land", "flew", "nest in a tall tree", "seeds and worms", "a clever black bird"),
    "raven": ("land", "flew", "nest on a cliff", "seeds and meat", "a large, clever black bird"),
    "robin": ("land", "flew", "nest in a hedge", "worms and berries", "a small bird with a red breast"),
    "sparrow": ("land", "flew", "nest under the roof", "seeds and crumbs", "a small brown bird"),
    "eagle": ("land", "flew", "nest on a mountain", "fish and small animals", "a large bird with very sharp eyes"),
    "parrot": ("land", "flew", "tall tree", "fruit and nuts", "a colourful bird that can learn to speak"),
    "penguin": ("land", "waddled", "icy shore", "fish", "a black and white bird that swims but cannot fly"),
    "stork": ("land", "flew", "nest on a chimney", "frogs", "a tall white bird with long red legs"),
    "bat": ("land", "flew", "cave", "insects", "a small animal that flies at night"),
    "bee": ("land", "flew", "hive", "nectar", "a small insect that makes honey"),
    "butterfly": ("land", "flew", "flower meadow", "nectar", "an insect with large, colourful wings"),
    "ladybird": ("land", "flew", "rose bush", "tiny insects", "a small red beetle with black spots"),
    "beetle": ("land", "crawled", "old log", "leaves", "an insect with a hard shell"),
    "ant": ("land", "crawled", "ant hill", "crumbs and seeds", "a tiny insect that works together with many others"),
    "spider": ("land", "crawled", "web", "flies", "a small animal with eight legs that spins webs"),
    "grasshopper": ("land", "hopped", "tall grass", "grass", "a green insect that can jump very far"),
    "firefly": ("land", "flew", "meadow", "nectar", "a small beetle that glows in the dark"),
    "snail": ("land", "crawled", "own shell", "leaves", "a slow animal that carries its house on its back"),
    "worm": ("land", "crawled", "soft earth", "old leaves", "a long, thin animal that lives in the earth"),
    "caterpillar": ("land", "crawled", "green leaf", "leaves", "a small animal that turns into a butterfly"),
    "frog": ("land", "hopped", "pond", "flies", "a small green animal that jumps and swims"),
    "toad": ("land", "hopped", "damp garden", "flies and worms", "an animal like a frog with rough skin"),
    "turtle": ("land", "crawled", "pond", "plants and worms", "a slow animal with a hard shell"),
    "tortoise": ("land", "crawled", "dry garden", "leaves and fruit", "a slow land animal with a hard shell"),
    "lizard": ("land", "crawled", "warm stone wall", "insects", "a small animal with a long tail that loves the sun"),
    "snake": ("land", "crawled", "hollow log", "mice", "a long animal without legs"),
    "crocodile": ("land", "crawled", "river", "fish", "a large animal with a long mouth full of teeth"),
    "lion": ("land", "walked", "dry grassland", "meat", "a big wild cat that is called the king of animals"),
    "tiger": ("land", "walked", "jungle", "meat", "a big wild cat with orange and black stripes"),
    "leopard": ("land", "ran", "jungle", "meat", "a big wild cat with dark spots"),
    "elephant": ("land", "walked", "dry grassland", "leaves and grass", "the largest land animal, with a long trunk"),
    "giraffe": ("land", "walked", "dry grassland", "leaves", "the tallest animal, with a very long neck"),
    "zebra": ("land", "ran", "dry grassland", "grass", "an animal like a horse with black and white stripes"),
    "hippo": ("land", "walked", "river", "grass", "a very heavy animal that spends the day in the water"),
    "rhino": ("land", "walked", "dry grassland", "grass", "a heavy animal with a horn on its nose"),
    "monkey": ("land", "jumped", "jungle", "fruit and nuts", "a clever animal that climbs trees"),
    "gorilla": ("land", "walked", "jungle", "leaves and fruit", "a very large and strong ape"),
    "camel": ("land", "walked", "desert", "dry plants", "an animal with humps that lives in the desert"),
    "kangaroo": ("land", "hopped", "grassland", "grass", "an animal that jumps and carries its young in a pouch"),
    "koala": ("land", "climbed", "tall tree", "leaves", "a grey animal that sleeps in trees most of the day"),
    "panda": ("land", "walked", "bamboo forest", "bamboo", "a black and white bear"),
    "raccoon": ("land", "ran", "hollow tree", "fruit and fish", "an animal with a dark mask around its eyes"),
    "skunk": ("land", "walked", "burrow", "berries and insects", "a black and white animal with a strong smell"),
    "moose": ("land", "walked", "northern forest", "leaves and bark", "a very large deer with wide antlers"),
    "seal": ("water", "swam", "rocky shore", "fish", "a sea animal with flippers and soft fur"),
    "walrus": ("water", "swam", "icy shore", "clams", "a large sea animal with long tusks"),
    "dolphin": ("water", "swam", "open sea", "fish", "a clever sea animal that likes to jump"),
    "whale": ("water", "swam", "deep sea", "tiny sea animals", "the largest animal in the sea"),
    "shark": ("water", "swam", "deep sea", "fish", "a large fish with many sharp teeth"),
    "fish": ("water", "swam", "lake", "water plants", "an animal with fins that lives in water"),
    "crab": ("water", "crawled", "rock pool", "small fish", "a sea animal with a hard shell and two claws"),
    "octopus": ("water", "swam", "reef", "crabs", "a soft sea animal with eight arms"),
    "seahorse": ("water", "swam", "reef", "tiny sea animals", "a small fish with a head like a horse"),
    "starfish": ("water", "crawled", "rock pool", "mussels", "a sea animal in the shape of a star"),
    "dragon": ("land", "flew", "cave in the mountains", "hot soup", "a creature of stories with wings and fiery breath"),
    "unicorn": ("land", "ran", "silver forest", "moon flowers", "a creature of stories, a white horse with one horn"),
    "dinosaur": ("land", "walked", "green valley", "leaves", "a large animal that lived very long ago"),
    "troll": ("land", "walked", "place under the bridge", "mushrooms", "a big creature of stories that lives under bridges"),
    "giant": ("land", "walked", "castle in the clouds", "huge pies", "a very, very tall person of stories"),
    "mermaid": ("water", "swam", "palace under the sea", "sea fruit", "a creature of stories, half girl and half fish"),
    "ghost": ("land", "floated", "old castle", "nothing at all", "a pale spirit of stories"),
    "fairy": ("land", "flew", "flower meadow", "honey and dew", "a tiny creature of stories with wings"),
    "monster": ("land", "walked", "dark cave", "cookies", "a strange creature of stories"),
}

PEOPLE = {  # role: (gender or "", where the person works or lives)
    "girl": ("f", "village"), "boy": ("m", "village"), "princess": ("f", "castle"), "prince": ("m", "castle"),
    "queen": ("f", "castle"), "king": ("m", "castle"), "knight": ("", "castle"), "wizard": ("m", "tower"), "witch": ("f", "forest"),
    "baker": ("", "town"), "farmer": ("", "farm"), "fisherman": ("m", "shore"), "sailor": ("", "harbour"), "pirate": ("", "harbour"),
    "gardener": ("", "garden"), "teacher": ("", "school"), "doctor": ("", "town"), "nurse": ("", "town"), "painter": ("", "town"),
    "musician": ("", "town"), "singer": ("", "town"), "dancer": ("", "town"), "tailor": ("", "town"), "shoemaker": ("", "town"),
    "blacksmith": ("", "village"), "miller": ("", "village"), "shepherd": ("", "meadow"), "hunter": ("", "forest"), "cook": ("", "town"),
    "carpenter": ("", "village"), "clockmaker": ("", "town"), "postman": ("m", "village"), "librarian": ("", "town"),
    "astronaut": ("", "town"), "pilot": ("", "city"), "engineer": ("", "city"), "programmer": ("", "city"), "scientist": ("", "city"),
    "inventor": ("", "town"), "detective": ("", "city"), "policeman": ("m", "city"), "firefighter": ("", "city"), "driver": ("", "city"),
    "student": ("", "city"), "writer": ("", "town"), "poet": ("", "town"), "actor": ("", "city"), "clown": ("", "town"),
    "magician": ("", "city"), "explorer": ("", "harbour"), "captain": ("", "harbour"), "soldier": ("", "castle"), "monk": ("m", "hill"),
    "grandmother": ("f", "village"), "grandfather": ("m", "village"), "mother": ("f", "village"), "father": ("m", "village"),
    "child": ("", "village"), "old man": ("m", "village"), "old woman": ("f", "village"), "little girl": ("f", "village"),
    "little boy": ("m", "village"), "lighthouse keeper": ("", "shore"), "robot": ("", "city"), "alien": ("", "hill"), "elf": ("", "forest"),
    "dwarf": ("", "mountain"), "gnome": ("", "garden"), "ninja": ("", "city"), "cowboy": ("m", "farm"), "beekeeper": ("", "farm"),
    "chef": ("", "city"), "goalkeeper": ("", "town"), "juggler": ("", "town"), "mechanic": ("", "town"), "weaver": ("", "village"),
}

OBJECTS = {  # a thing that can be a hero: (where it stands, what it is good for, the day it is needed)
    "lamp": ("shelf", "giving light", "all the lights in the house went out"),
    "lantern": ("shed", "giving light", "a traveller got lost in the dark"),
    "candle": ("drawer", "giving light", "the power failed in the storm"),
    "teapot": ("kitchen shelf", "making tea", "a cold and tired guest came to the door"),
    "cup": ("kitchen shelf", "holding warm milk", "a thirsty child came in"),
    "spoon": ("drawer", "stirring soup", "a big pot of soup had to be stirred"),
    "clock": ("hall", "telling the time", "everybody in the house overslept"),
    "bell": ("tower", "ringing", "a fire started in the village"),
    "umbrella": ("corner", "keeping the rain away", "a great rain began"),
    "kite": ("attic", "flying in the wind", "the children wanted to send a message over the river"),
    "boat": ("shore", "carrying people over the water", "a child was alone on the little island"),
    "ship": ("harbour", "sailing over the sea", "the islanders needed food"),
    "train": ("station", "pulling wagons", "the mountain village needed medicine"),
    "car": ("garage", "driving", "somebody had to be brought to the doctor"),
    "truck": ("yard", "carrying heavy things", "a fallen tree blocked the road"),
    "bicycle": ("shed", "riding fast", "an important letter had to be brought to the next village"),
    "bus": ("yard", "carrying people", "all the children were late for school"),
    "tractor": ("barn", "pulling heavy things", "a wagon was stuck in the mud"),
    "airplane": ("old hangar", "flying", "a ship was lost at sea"),
    "rocket": ("workshop", "flying high", "a little star had lost its way"),
    "balloon": ("box", "floating in the air", "the children had to find the lost sheep from above"),
    "pencil": ("desk", "drawing", "a child wanted to draw a map"),
    "book": ("library", "telling stories", "a sad child could not sleep"),
    "key": ("hook by the door", "opening a door", "the garden gate was locked"),
    "broom": ("corner", "sweeping", "the wind blew leaves into the whole house"),
    "hat": ("hook by the door", "keeping a head warm", "the first snow fell"),
    "shoe": ("cupboard", "walking", "a traveller came with only one shoe"),
    "sock": ("drawer", "keeping a foot warm", "a very cold night came"),
    "coat": ("cupboard", "keeping somebody warm", "a freezing child knocked at the door"),
    "blanket": ("chest", "keeping somebody warm", "a freezing night came"),
    "pillow": ("bed", "soft dreams", "a little child had bad dreams"),
    "chair": ("corner", "sitting", "an old guest came and there was no seat left"),
    "table": ("kitchen", "holding a dinner", "the whole village came to eat"),
    "piano": ("hall", "making music", "the feast had no music"),
    "violin": ("attic", "making music", "the feast had no music"),
    "drum": ("attic", "making a loud sound", "the hikers got lost in the fog"),
    "doll": ("toy box", "being a friend", "a new child came who had no toys"),
    "teddy bear": ("toy box", "hugs", "a small child was afraid at night"),
    "toy soldier": ("toy box", "standing guard", "a cat wanted to steal the cake"),
    "ball": ("garden", "playing", "the children were bored"),
    "snowman": ("garden", "standing in the cold", "a lost bird needed a place to rest"),
    "scarecrow": ("field", "guarding the corn", "the crows came in great numbers"),
    "windmill": ("hill", "turning in the wind", "the village had no flour left"),
    "lighthouse": ("shore", "showing ships the way", "a ship came in the fog"),
    "bridge": ("river", "carrying people across", "a mother with a sick child had to cross the river"),
    "tree": ("hill", "giving shade", "a very hot day came"),
    "apple tree": ("garden", "giving apples", "a hungry child came by"),
    "flower": ("garden", "smelling sweet", "the tired bees were looking for food"),
    "rose": ("garden", "being beautiful", "the gardener needed a gift for his mother"),
    "mushroom": ("forest", "being a little roof", "it began to rain on the ants"),
    "stone": ("road", "lying still", "the river needed one more stepping stone"),
    "cloud": ("sky", "giving rain", "the fields were dry and thirsty"),
    "star": ("sky", "shining", "a little boat was lost at night"),
    "moon": ("sky", "shining", "a traveller was lost at night"),
    "raindrop": ("cloud", "watering plants", "a little seed was thirsty"),
    "snowflake": ("cloud", "dancing in the wind", "the children were waiting for snow"),
    "leaf": ("tree", "being a little boat", "an ant fell into the brook"),
    "seed": ("pocket", "growing", "the garden was empty"),
    "pumpkin": ("field", "making soup", "the whole village was hungry"),
    "potato": ("cellar", "making soup", "the soup pot was empty"),
    "carrot": ("garden", "making soup", "the snowman needed a nose"),
    "pancake": ("pan", "making people happy", "a hungry child came in"),
    "cookie": ("jar", "making people happy", "a sad child came in"),
    "cake": ("kitchen", "making people happy", "it was the birthday of the oldest woman in the village"),
    "coin": ("pocket", "buying things", "a poor child wanted a piece of bread"),
    "button": ("sewing box", "closing a coat", "a coat could not be closed in the cold wind"),
    "needle": ("sewing box", "sewing", "the big sail had a hole"),
    "ladder": ("shed", "reaching high places", "a kitten sat on the roof"),
    "rope": ("shed", "pulling", "somebody fell into the well"),
    "bucket": ("shed", "carrying water", "the flowers were thirsty"),
    "computer": ("desk", "solving problems", "nobody could count the stars"),
    "phone": ("table", "calling people", "somebody needed help at night"),
    "camera": ("shelf", "taking pictures", "the whole family came together"),
    "mirror": ("hall", "showing faces", "a sad girl had forgotten how to smile"),
    "compass": ("chest", "showing the way", "the sailors got lost in the fog"),
    "fridge": ("kitchen", "keeping things cold", "the began to melt"),
    "washing machine": ("cellar", "washing", "the children fell into the mud"),
}

PLACES = ["forest", "village", "valley", "meadow", "small town", "farm", "garden", "park", "mountain village", "quiet town",
          "green hill", "old mill", "river bank", "deep forest", "orchard", "island", "harbour town", "castle", "big city"]
WATER_PLACES = ["lake", "bay", "deep sea", "reef", "river", "warm sea", "cold sea", "lagoon", "pond", "quiet bay"]
LAND_SPOTS = ["under the old bridge", "behind the barn", "beside the well", "under a big leaf", "in a hollow tree", "near the river",
              "behind the mill", "under the stairs", "in the tall grass", "on top of the hill", "beside the garden gate",
              "under a pile of leaves", "behind the school", "at the edge of the forest", "beside the pond", "under the apple tree",
              "in an empty basket", "on the window sill", "behind a big stone", "between two roots"]
WATER_SPOTS = ["behind a big rock", "under a shell", "in an old shipwreck", "between the water plants", "on the white sand",
               "in a small cave", "near the reef", "beside an old anchor", "under a flat stone", "in a broken pot"]
COLORS = ["red", "blue", "green", "yellow", "white", "black", "brown", "silver", "golden", "orange", "purple", "grey", "pink"]
THINGS = ["button", "key", "ball", "hat", "ring", "bell", "scarf", "lantern", "map", "book", "feather", "shell", "coin", "ribbon",
          "spoon", "drum", "flute", "kite", "cup", "stone", "star", "box", "boat", "pencil", "marble", "whistle", "mitten", "basket",
          "mirror", "necklace", "letter", "umbrella", "crown", "clock", "compass", "blanket", "doll", "acorn", "candle", "violin"]
FOODS = ["apples", "berries", "nuts", "honey", "bread", "cheese", "pears", "plums", "carrots", "soup", "pancakes", "cookies",
         "cherries", "mushrooms", "cake", "porridge", "corn", "pie"]
WATER_FOODS = ["sea fruit", "water plants", "sweet sea grass", "tiny shrimps", "sea berries", "seaweed cakes"]
ADJS = ["small", "little", "young", "old", "brave", "clever", "shy", "kind", "curious", "lazy", "proud", "lonely", "happy", "quiet",
        "gentle", "funny", "careful", "cheerful", "hungry", "sleepy", "clumsy", "stubborn", "friendly", "tiny", "grumpy", "poor",
        "wise", "silly", "greedy", "magical", "lost", "sad", "big", "strong", "honest", "polite", "fat", "naughty", "smart", "bored"]
FEARS = {"the dark": "night", "thunder": "storm", "deep water": "flood", "high places": "climb", "loud noises": "feast",
         "strangers": "visit", "the old forest": "forest", "storms": "storm", "being alone": "alone", "the big dog": "dog"}
WEATHER = ["sunny", "rainy", "windy", "cold", "warm", "foggy", "snowy", "cloudy"]
SEASONS = ["spring", "summer", "autumn", "winter"]

CITIES = """Paris London Berlin Madrid Rome Vienna Oslo Bergen Stockholm Helsinki Copenhagen Dublin Lisbon Porto Athens Prague
Warsaw Krakow Budapest Zagreb Sofia Bucharest Tallinn Riga Vilnius Kyiv Istanbul Ankara Cairo Nairobi Lagos Accra Tunis Algiers
Rabat Dakar Tokyo Osaka Kyoto Seoul Beijing Shanghai Taipei Hanoi Bangkok Manila Jakarta Singapore Delhi Mumbai Chennai Karachi
Lahore Dhaka Colombo Tehran Baghdad Amman Beirut Doha Dubai Riyadh Sydney Melbourne Perth Auckland Wellington Toronto Montreal
Vancouver Boston Chicago Denver Seattle Dallas Houston Miami Atlanta Phoenix Portland Havana Lima Bogota Quito Santiago Caracas
Munich Hamburg Cologne Dresden Leipzig Zurich Geneva Basel Lyon Nice Bordeaux Lille Milan Turin Naples Venice Florence Seville
Valencia Barcelona Glasgow Leeds Bristol Cardiff Belfast Antwerp Ghent Bruges Utrecht Rotterdam Amsterdam Brussels""".split()

CAPITALS = {
    "France": "Paris", "England": "London", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome", "Austria": "Vienna",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin",
    "Portugal": "Lisbon", "Greece": "Athens", "Poland": "Warsaw", "Hungary": "Budapest", "Turkey": "Ankara", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Japan": "Tokyo", "South Korea": "Seoul", "China": "Beijing", "Vietnam": "Hanoi", "Thailand": "Bangkok",
    "India": "New Delhi", "Iran": "Tehran", "Iraq": "Baghdad", "Australia": "Canberra", "New Zealand": "Wellington",
    "Canada": "Ottawa", "the United States": "Washington", "Mexico": "Mexico City", "Brazil": "Brasilia", "Argentina": "Buenos Aires",
    "Chile": "Santiago", "Peru": "Lima", "Cuba": "Havana", "Switzerland": "Bern", "Belgium": "Brussels", "the Netherlands": "Amsterdam",
    "Russia": "Moscow", "Ukraine": "Kyiv", "Iceland": "Reykjavik", "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius",
    "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb",
}

SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink", "owl": "hoo", "rooster":
          "cock-a-doodle-doo", "frog": "ribbit", "bee": "buzz", "mouse": "squeak", "horse": "neigh", "lion": "roar", "crow": "caw",
          "snake": "hiss", "wolf": "a long howl"}
LEGS = {"dog": 4, "cat": 4, "horse": 4, "bird": 2, "spider": 8, "ant": 6, "bee": 6, "cow": 4, "chicken": 2, "snake": 0, "fish": 0,
        "person": 2, "table": 4, "octopus": 8, "beetle": 6}
COLOR_OF = {"the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a lemon": "yellow", "blood": "red",
            "coal": "black", "milk": "white", "a strawberry": "red", "an orange": "orange", "the sun": "yellow", "a frog": "green",
            "a fox": "red", "a tomato": "red", "chocolate": "brown", "a carrot": "orange", "the night": "black", "the sea": "blue",
            "a leaf in summer": "green", "an elephant": "grey", "a raven": "black", "a pig": "pink"}
OPPOSITES = {"big": "small", "hot": "cold", "day": "night", "up": "down", "fast": "slow", "happy": "sad", "old": "young",
             "light": "dark", "good": "bad", "open": "closed", "full": "empty", "long": "short", "wet": "dry", "hard": "soft",
             "rich": "poor", "strong": "weak", "early": "late", "high": "low", "near": "far", "left": "right", "yes": "no",
             "black": "white", "loud": "quiet", "clean": "dirty", "first": "last", "love": "hate", "begin": "end", "win": "lose",
             "thick": "thin", "heavy": "light", "north": "south", "east": "west", "summer": "winter", "in": "out", "true": "false"}
LISTS = {
    "animals": list(ANIMALS)[:60], "colours": ["red", "blue", "green", "yellow", "white", "black", "brown", "orange", "purple", "pink"],
    "colors": ["red", "blue", "green", "yellow", "white", "black", "brown", "orange", "purple", "pink"],
    "fruits": ["apple", "pear", "plum", "cherry", "banana", "orange", "lemon", "grape", "peach", "melon"],
    "vegetables": ["carrot", "potato", "onion", "cabbage", "pumpkin", "bean", "pea", "tomato", "leek", "spinach"],
    "cities": CITIES[:60], "countries": [c for c in CAPITALS if not c.startswith("the ")],
    "birds": ["owl", "crow", "robin", "sparrow", "eagle", "parrot", "penguin", "stork", "swan", "goose", "duck", "raven"],
    "farm animals": ["cow", "sheep", "goat", "pig", "hen", "horse", "donkey", "duck", "goose", "rooster"],
    "sea animals": ["seal", "dolphin", "whale", "shark", "crab", "octopus", "seahorse", "starfish", "walrus"],
    "insects": ["bee", "butterfly", "beetle", "ant", "grasshopper", "firefly", "ladybird"],
    "names": ["Anna", "Tom", "Lucy", "Max", "Nora", "Felix", "Ella", "Oscar", "Ruth", "Leo"],
    "seasons": SEASONS, "jobs": ["baker", "farmer", "teacher", "doctor", "nurse", "painter", "cook", "pilot", "tailor", "sailor"],
    "tools": ["hammer", "saw", "drill", "axe", "shovel", "rake", "knife", "needle"],
    "musical instruments": ["piano", "violin", "drum", "flute", "guitar", "trumpet", "harp"],
    "flowers": ["rose", "tulip", "daisy", "lily", "violet", "poppy"], "trees": ["oak", "birch", "pine", "maple", "willow", "beech"],
    "toys": ["ball", "doll", "kite", "puzzle", "teddy bear", "drum", "train"],
    "things in a kitchen": ["spoon", "pot", "pan", "cup", "plate", "knife", "fork", "kettle"],
}
NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty""".split()
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]

_ONSETS = ["b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n", "p", "pl", "qu", "r", "s", "sh",
           "sl", "sn", "st", "t", "tr", "th", "v", "w", "y", "z", "x"]
_VOWELS = ["a", "e", "i", "o", "u", "ee", "oo", "ai", "ou", "y"]
_CODAS = ["", "", "", "n", "m", "l", "r", "s", "t", "k", "p", "x", "nd", "ck", "b", "g", "ff", "lt", "rm"]


def made_up_word(rng, lo=2, hi=3):
    """A word nobody has seen, so that the model learns to copy what it is given."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.randint(lo, hi)))


def _cast(role):
    """The names, genders and cumulative weights that the model's own choices come from, for heroes or for their friends.

    The two casts share no name: where one is chosen freely for both, a small model now and then takes the hero's name for the friend
    (one story in ten). Some names are common, so that the likeliest one is a real one and well ahead.
    """
    names = [(n, g) for g, pool in (("f", FEMALE), ("m", MALE)) for n in pool if bucket("cast:" + n, 2) == role]
    random.Random(f"cast {role}").shuffle(names)
    return names, list(itertools.accumulate(1 / (i + 1.5) for i in range(len(names))))


def name(rng, avoid=(), cast=None):
    """A first name and its gender, never one of `avoid`: from the "hero" or "friend" cast, or any if it is given to the model.

    One in eight of those is made up: it has to be copied.
    """
    while True:
        if cast:
            names, weights = CASTS[cast]
            got = rng.choices(names, cum_weights=weights)[0]
        elif rng.random() < 0.12:
            got = made_up_word(rng, 2, 2).capitalize(), rng.choice("fm")
        else:
            got = (rng.choice(FEMALE), "f") if rng.random() < 0.5 else (rng.choice(MALE), "m")
        if got[0] not in avoid:
            return got


def with_article(noun):
    return ("an " if noun[0].lower() in "aeiou" and not noun.startswith(("uni", "one")) else "a ") + noun


def bucket(text, n):
    """A stable hash bucket in [0, n): what is held out does not depend on seeds."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % n


# Words that need no table, because a hero of that kind only has to be named.
MORE_KINDS = """platypus flamingo hamster llama yak bison lynx puma jaguar cheetah hyena jackal weasel ferret mink stoat vole
shrew gerbil chinchilla armadillo anteater sloth lemur baboon chimpanzee tapir okapi antelope gazelle buffalo ram ewe calf foal colt
chick turkey peacock pheasant quail dove pigeon magpie jay wren finch canary nightingale lark swallow gull albatross pelican heron crane
vulture hawk falcon kingfisher woodpecker cuckoo toucan ostrich emu gecko chameleon salamander newt tadpole salmon trout carp eel squid
lobster shrimp clam jellyfish moth wasp cricket dragonfly mosquito cockroach centipede scorpion flea tick slug goblin ogre vampire
werewolf zombie skeleton mummy yeti phoenix griffin centaur genie nymph leprechaun superhero butcher barber plumber electrician lawyer
judge banker waiter dentist surgeon nun priest spy thief burglar jester emperor duke duchess baron tinker beggar merchant
trader miner lumberjack ranger lifeguard surfer skier runner boxer wrestler golfer toaster kettle fork plate
bottle jar vase carpet curtain window door wall roof chimney fence gate bench swing slide sandcastle tent backpack suitcase wallet purse
ring watch glasses scarf glove belt tie sweater typewriter printer keyboard laptop tablet television radio guitar trumpet flute harp
scooter motorbike submarine helicopter spaceship tram ambulance volcano river ocean lake island desert canyon
waterfall rainbow thunderstorm comet planet galaxy sunflower tulip cactus oak pine acorn strawberry banana lemon cherry onion tomato
pepper sandwich pizza donut muffin waffle""".replace("\n", " ").split(" ")


# What a hero may dream of: "wants to ...".
GOALS = [g for g in """fly|see the sea|see the snow|travel to the moon|touch the stars|find a friend|build a boat|build a house|become a king|write a book|see the world|win a medal|climb the highest mountain|cross the river|
visit the big city|fly over the clouds|catch a star|sleep on a cloud|swim across the lake|make everybody laugh|sing on a stage|dance at the feast|grow the biggest pumpkin|bake the best cake in the world|drive a train|ride a horse|
fly a plane|speak with the animals|find a treasure|live on an island|see the sunrise from the hill|meet a dragon|be brave|be strong|be tall|be famous|go to school|learn everything|run faster than the wind|jump over the moon|
play in an orchestra|paint the sky|live in a castle|own a bakery|open a shop|cook for the king|travel around the world|go home|find the end of the rainbow|stay awake all night|be the fastest of all|help everybody|stop the rain|
eat an ice cream|have a birthday party|see a whale|live in a tree|count all the stars|read every book|make music|find a new home|be a hero|invent a machine|build a robot|explore the cave|sail around the world|
become a knight|be a painter|be a singer|be a doctor|be a pilot|be a pirate|be an astronaut|become a wizard|become a chef|become a teacher|be a detective""".replace("\n", "").split("|")]

CASTS = {"hero": _cast(0), "friend": _cast(1)}
