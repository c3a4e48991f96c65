"""Seeded prompts for the teacher: stories, simple questions, small talk and follow-ups.

Each draw returns (kind, what the student sees as the user's text, what the teacher is told).
"""

import random

NAMES = """Tom Lily Max Anna Ben Mia Sam Lucy Jack Emma Leo Zoe Finn Ruby Oscar Ella Noah Ivy Henry Daisy
Peter Rose George Molly Arthur Nina Hugo Clara Felix Sara Oliver Maya Theo Alice Simon Grace Jonas Nora Paul
Hannah Adam Julia Eric Martha Luke Eva Carl Sofia David Ada Victor Amy Robin Tina Walter Olive Frank Stella
Albert Penny Ralph Hazel Otto Flora Toby Iris Milo Bella Rufus Pearl Barney Willow Casper Fern Dylan Maple
Edgar Poppy Gus Violet Harvey Luna Isaac Marla Jasper Nell Kit Opal Lionel Pippa Marvin Quinn Nelson Rita
Owen Sally Percy Tess Quentin Una Rory Vera Silas Wendy Tim Yara Ulric Zelda Vince Abby Wes Betty Alfie
Cora Bruno Dora Cyril Edith Dexter Faye Elmer Greta Fred Holly Gavin Ida Homer June Ian Kate Jim Lola""".split()
WHO = """rabbit;fox;little bear;mouse;cat;dog;frog;duck;owl;turtle;hedgehog;squirrel;pony;lamb;pig;elephant;
lion cub;monkey;penguin;whale;dolphin;crab;bee;ant;ladybug;butterfly;snail;robin;crow;goose;goat;donkey;cow;
boy;girl;farmer;baker;fisherman;king;queen;princess;knight;giant;wizard;pirate;sailor;teacher;painter;gardener;
robot;dragon;snowman;toy soldier;doll;teddy bear;little train;old boat;cloud;star;tree;scarecrow;clockmaker;
grandmother;grandfather;shepherd;postman;doctor;cook;tailor;miller;beaver;otter;badger;deer;wolf;parrot""".replace(
    "\n", ""
).split(";")
TRAIT = """brave;shy;kind;lazy;curious;sleepy;clever;hungry;lonely;happy;sad;tiny;noisy;quiet;gentle;proud;
funny;grumpy;careful;forgetful;honest;greedy;playful;patient;worried;friendly;stubborn;cheerful;clumsy;young;
old;poor""".replace("\n", "").split(";")
PLOT = """finds a lost key;gets lost in the forest;learns to swim;wants to see the sea;plants a seed;makes a new
 friend;bakes a cake;loses a red hat;helps an old neighbor;is afraid of the dark;builds a small boat;finds a map;
shares a meal;learns to say sorry;tells a lie and feels bad;wants to fly;hears a strange sound at night;saves a
 bird;goes to the market;cannot sleep;finds a magic stone;wins a race;loses a race;gives away a toy;cleans the
 house;looks for treasure;waits for the rain;climbs a hill;meets a stranger;breaks a window;learns to read;sings a
 song;misses a friend;has a birthday;goes fishing;finds a hidden door;follows the moon;catches a cold;makes a kite;
opens a shop;learns to share;learns to be patient;wants to be tall;builds a house;crosses a river;gets a letter;
finds an egg;visits grandmother;paints a picture;falls into a hole;saves the village;tries something new;
travels by train;keeps a secret;wakes up very early;plays in the snow;looks at the stars;loses a tooth;
forgets a promise;brings home a puppy;hides from a storm;grows a giant pumpkin""".replace("\n", "").split(";")
PLACE = """a quiet forest;a small village;a farm;the sea;a big city;a garden;a snowy mountain;a river;an island;
a castle;a school;a meadow;a lake;a cave;a desert;a barn;a kitchen;a park;a library;a harbor;an old mill;the moon;
a market;a bakery;a toy shop;a lighthouse;a valley;a train;a windy hill;a warm house""".replace("\n", "").split(";")
THING = """apple;ball;bell;blanket;book;boat;bread;bridge;bucket;cake;candle;chair;clock;coat;coin;cup;drum;
feather;flower;flute;garden;gate;hat;honey;kite;ladder;lamp;leaf;letter;mirror;nest;pie;ring;rope;sand;shell;
shoe;soup;spoon;stone;stick;table;umbrella;wagon;wheel;window;basket;button;crown;box""".replace("\n", "").split(";")
TOPIC = """the sun;the moon;a star;rain;snow;wind;a cloud;a rainbow;thunder;a river;a lake;the sea;a mountain;
a volcano;a desert;a forest;an island;a beach;a tree;a flower;grass;a seed;a leaf;an apple;a banana;bread;milk;
cheese;honey;salt;sugar;rice;soup;tea;water;ice;fire;air;light;sound;a shadow;a magnet;gold;iron;glass;paper;
wood;stone;a dog;a cat;a horse;a cow;a sheep;a pig;a chicken;a duck;a frog;a snake;a turtle;a fish;a shark;
a whale;a dolphin;a bird;an eagle;an owl;a penguin;a bee;a butterfly;an ant;a spider;a lion;a tiger;an elephant;
a monkey;a bear;a wolf;a fox;a rabbit;a mouse;a dinosaur;a car;a bus;a train;a plane;a ship;a bicycle;a rocket;
a bridge;a house;a castle;a school;a hospital;a library;a museum;a farm;a market;a city;a village;a country;
a king;a doctor;a teacher;a farmer;a baker;a painter;a writer;a scientist;a friend;a family;a baby;a birthday;
a dream;sleep;love;anger;fear;courage;kindness;honesty;patience;a promise;a joke;a song;music;a piano;a drum;
dancing;a game;football;chess;swimming;running;reading;writing;drawing;cooking;gardening;a book;a story;a poem;
a letter;a word;a number;zero;a circle;a triangle;a map;a clock;a calendar;a year;spring;summer;autumn;winter;
morning;night;the heart;the brain;a bone;blood;skin;teeth;the eyes;the ears;health;a computer;a robot;the internet;
a phone;a camera;electricity;a battery;an engine;a wheel;gravity;energy;the earth;the planets;space;history;
science;mathematics;art;money;work;a shop;trade;a law;peace;recycling;the weather;a storm;an earthquake""".replace(
    "\n", ""
).split(";")
ASK = """What is {t}?;Tell me about {t}.;Can you explain {t} to me?;Why is {t} important?;Describe {t}.;
What do you know about {t}?;Give me three facts about {t}.;What can you tell me about {t}?;How would you explain
 {t} to a child?;I want to learn about {t}.;What is special about {t}?;Where can I find {t}?;Do you like {t}?;
Write a short poem about {t}.;What does {t} make you think of?;Why do people talk about {t}?;
Please explain {t} in simple words.;What should I know about {t}?;Write two sentences about {t}.;
Is {t} good for us?;How does {t} help people?""".replace("\n", "").split(";")
TALK = """I feel {f} today.;I am {f}. What should I do?;My friend is {f}. How can I help?;Why do people feel {f}?;
I feel {f} because of my {p}.;My {p} made me feel {f}.;What can I do when I feel {f}?""".replace("\n", "").split(";")
FEEL = """sad;happy;tired;angry;bored;lonely;nervous;excited;afraid;proud;confused;sick;hungry;worried;
hopeful;shy;jealous;calm;grateful;sleepy""".replace("\n", "").split(";")
PERSON = "friend;brother;sister;mother;father;teacher;dog;cat;neighbor;boss;test;job;school;team".split(";")
DO = """make a sandwich;learn to cook;bake bread;make tea;grow tomatoes;plant a tree;clean my room;wash my hands;
learn to swim;learn to read faster;write a letter;write a story;make a friend;say sorry;fall asleep;wake up early;
save money;save water;stay healthy;eat better;learn a language;draw a cat;paint a wall;fix a bike;build a birdhouse;
take care of a dog;take care of a cat;feed birds;learn the piano;sing better;study for a test;remember names;
be more patient;be kind;stop worrying;pack a bag;plan a trip;plan a party;choose a gift;make soup;boil an egg;
cook rice;ride a horse;catch a fish;climb a hill;run faster;stay warm;stay cool;count to ten;tell the time;
read a map;tie my shoes;fold a paper boat;make a snowman;fly a kite;find my keys;thank my teacher""".replace(
    "\n", ""
).split(";")
HOW = "How do I {d}?;How can I {d}?;Can you help me {d}?;I want to {d}.;What do I need to {d}?;Teach me to {d}.".split(
    ";"
)
FOLLOW = """Can you tell me more?;Why?;Can you give me an example?;Can you say that in simpler words?;
Thank you!;That is interesting. What else?;I do not understand.;What is the most important part?;How do you know?;
Can you say it in one sentence?;Is that always true?;What should I do next?""".replace("\n", "").split(";")
FOLLOW_STORY = """What happened next?;Who was in the story?;Tell me another one.;What did we learn from the story?;
I liked the story. Thank you!;Why did that happen?;What is a good title for the story?""".replace("\n", "").split(";")
TEACHER_QA = "You are a helpful assistant. You give short and clear answers."
TEACHER_STORY = "You write very short stories for young children. You use short sentences and simple words."


def story(r: random.Random) -> tuple[str, str, str]:
    name, who, plot, place = r.choice(NAMES), r.choice(WHO), r.choice(PLOT), r.choice(PLACE)
    trait, thing = r.choice(TRAIT), r.choice(THING)
    article = "an" if trait[0] in "aeiou" else "a"
    asked = r.choice(
        [
            f"Tell me a story about a {who} named {name}.",
            f"Write a short story about {article} {trait} {who}.",
            f"Can you tell me a story about {name} the {who}?",
            f"Please tell me a story about a {who} who {plot}.",
            f"I would like a story about a {who} and a {thing}.",
            f"Tell me a short story about {name}.",
            f"Write a story in {place}.",
        ]
    )
    told = (
        f"Write a short story for young children about {article} {trait} {who} named {name} who {plot}. "
        f"The story happens in {place}."
    )
    if r.random() < 0.5:
        told += f" Use the word {thing}."
    if r.random() < 0.3:
        told += f" {name} talks with a {r.choice(WHO)}."
    return "story", asked, told + " Write about 120 words. Use short sentences and simple words."


def question(r: random.Random) -> tuple[str, str, str]:
    draw = r.random()
    if draw < 0.6:
        text = r.choice(ASK).format(t=r.choice(TOPIC))
    elif draw < 0.82:
        text = r.choice(HOW).format(d=r.choice(DO))
    else:
        text = r.choice(TALK).format(f=r.choice(FEEL), p=r.choice(PERSON))
    return "chat", text, text


def teacher_text(kind: str, turns: list[str]) -> str:
    """The teacher's chat format; turns alternate user, assistant and end with the user."""
    text = f"<|im_start|>system\n{TEACHER_STORY if kind == 'story' else TEACHER_QA}<|im_end|>\n"
    for n, turn in enumerate(turns):
        if kind == "chat" and n % 2 == 0:
            turn += " Answer in two or three short sentences."
        text += f"<|im_start|>{('user', 'assistant')[n % 2]}\n{turn}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"
