"""The kinds of word, and all words but the verbs; an entry holds English and German forms."""

from typing import NamedTuple

NOMINATIVE, ACCUSATIVE, DATIVE = 0, 1, 2

LIVING = ("person", "animal")
OBJECTS = ("thing", "text", "vehicle")
PLACES = ("building", "area")
MASS = ("drink", "staple")


class Noun(NamedTuple):
    """Singular and plural in both languages, gender m, f or n, and what kind of thing it names."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str
    kind: str
    weak: bool = False  # "den Jungen": the singular looks plural except as a subject


class Adjective(NamedTuple):
    """An adjective, the kinds of noun it may describe, and its stem before endings if special."""

    english: str
    german: str
    kinds: tuple[str, ...]
    stem: str = ""


class Pronoun(NamedTuple):
    """A personal pronoun; `person` counts I, you, he or she, we, they from 0."""

    english: str
    english_object: str
    german: tuple[str, str, str]
    person: int


class Preposition(NamedTuple):
    """A preposition with the case that it takes in German."""

    english: str
    german: str
    case: int


class Verb(NamedTuple):
    """A verb, its forms in both languages, and what may stand beside it."""

    english: str
    english_past: str
    english_participle: str
    german: str
    german_participle: str
    subjects: tuple[str, ...] = ("person",)
    objects: tuple[str, ...] = ()
    changed: str = ""  # the stem of "du siehst, er sieht"
    prefix: str = ""  # separable: "steht ... auf"
    auxiliary: str = "haben"
    particle: str = ""  # English, after the object: "throws it away"
    english_preposition: str = ""  # English, before the object: "looks for it"
    case: int = ACCUSATIVE
    governs: Preposition | None = None


class Modal(NamedTuple):
    """A modal verb in the present or the past; `support` is do or did where English needs it."""

    english: str
    english_third: str
    german: tuple[str, str, str, str, str]
    past: bool = False
    base: str = ""
    support: str = ""
    support_only_if_negated: bool = False


class Link(NamedTuple):
    """A conjunction; a subordinating one sends the German verb to the end of its clause."""

    english: str
    german: str
    subordinating: bool
    english_comma: bool = False
    german_comma: bool = True


NOUNS = (
    Noun("man", "men", "Mann", "Männer", "m", "person"),
    Noun("woman", "women", "Frau", "Frauen", "f", "person"),
    Noun("child", "children", "Kind", "Kinder", "n", "person"),
    Noun("girl", "girls", "Mädchen", "Mädchen", "n", "person"),
    Noun("boy", "boys", "Junge", "Jungen", "m", "person", weak=True),
    Noun("doctor", "doctors", "Arzt", "Ärzte", "m", "person"),
    Noun("teacher", "teachers", "Lehrer", "Lehrer", "m", "person"),
    Noun("student", "students", "Student", "Studenten", "m", "person", weak=True),
    Noun("neighbor", "neighbors", "Nachbar", "Nachbarn", "m", "person", weak=True),
    Noun("friend", "friends", "Freund", "Freunde", "m", "person"),
    Noun("daughter", "daughters", "Tochter", "Töchter", "f", "person"),
    Noun("son", "sons", "Sohn", "Söhne", "m", "person"),
    Noun("mother", "mothers", "Mutter", "Mütter", "f", "person"),
    Noun("father", "fathers", "Vater", "Väter", "m", "person"),
    Noun("sister", "sisters", "Schwester", "Schwestern", "f", "person"),
    Noun("brother", "brothers", "Bruder", "Brüder", "m", "person"),
    Noun("aunt", "aunts", "Tante", "Tanten", "f", "person"),
    Noun("uncle", "uncles", "Onkel", "Onkel", "m", "person"),
    Noun("dog", "dogs", "Hund", "Hunde", "m", "animal"),
    Noun("cat", "cats", "Katze", "Katzen", "f", "animal"),
    Noun("horse", "horses", "Pferd", "Pferde", "n", "animal"),
    Noun("bird", "birds", "Vogel", "Vögel", "m", "animal"),
    Noun("cow", "cows", "Kuh", "Kühe", "f", "animal"),
    Noun("bear", "bears", "Bär", "Bären", "m", "animal", weak=True),
    Noun("mouse", "mice", "Maus", "Mäuse", "f", "animal"),
    Noun("duck", "ducks", "Ente", "Enten", "f", "animal"),
    Noun("apple", "apples", "Apfel", "Äpfel", "m", "food"),
    Noun("cake", "cakes", "Kuchen", "Kuchen", "m", "food"),
    Noun("egg", "eggs", "Ei", "Eier", "n", "food"),
    Noun("pear", "pears", "Birne", "Birnen", "f", "food"),
    Noun("potato", "potatoes", "Kartoffel", "Kartoffeln", "f", "food"),
    Noun("tomato", "tomatoes", "Tomate", "Tomaten", "f", "food"),
    Noun("sausage", "sausages", "Wurst", "Würste", "f", "food"),
    Noun("water", "", "Wasser", "", "n", "drink"),
    Noun("milk", "", "Milch", "", "f", "drink"),
    Noun("coffee", "", "Kaffee", "", "m", "drink"),
    Noun("tea", "", "Tee", "", "m", "drink"),
    Noun("bread", "", "Brot", "", "n", "staple"),
    Noun("cheese", "", "Käse", "", "m", "staple"),
    Noun("book", "books", "Buch", "Bücher", "n", "text"),
    Noun("letter", "letters", "Brief", "Briefe", "m", "text"),
    Noun("card", "cards", "Karte", "Karten", "f", "text"),
    Noun("picture", "pictures", "Bild", "Bilder", "n", "thing"),
    Noun("key", "keys", "Schlüssel", "Schlüssel", "m", "thing"),
    Noun("cup", "cups", "Tasse", "Tassen", "f", "thing"),
    Noun("bag", "bags", "Tasche", "Taschen", "f", "thing"),
    Noun("clock", "clocks", "Uhr", "Uhren", "f", "thing"),
    Noun("hat", "hats", "Hut", "Hüte", "m", "thing"),
    Noun("table", "tables", "Tisch", "Tische", "m", "thing"),
    Noun("chair", "chairs", "Stuhl", "Stühle", "m", "thing"),
    Noun("lamp", "lamps", "Lampe", "Lampen", "f", "thing"),
    Noun("coat", "coats", "Mantel", "Mäntel", "m", "thing"),
    Noun("shirt", "shirts", "Hemd", "Hemden", "n", "thing"),
    Noun("shoe", "shoes", "Schuh", "Schuhe", "m", "thing"),
    Noun("knife", "knives", "Messer", "Messer", "n", "thing"),
    Noun("bottle", "bottles", "Flasche", "Flaschen", "f", "thing"),
    Noun("flower", "flowers", "Blume", "Blumen", "f", "thing"),
    Noun("ball", "balls", "Ball", "Bälle", "m", "thing"),
    Noun("car", "cars", "Auto", "Autos", "n", "vehicle"),
    Noun("train", "trains", "Zug", "Züge", "m", "vehicle"),
    Noun("bus", "buses", "Bus", "Busse", "m", "vehicle"),
    Noun("bicycle", "bicycles", "Fahrrad", "Fahrräder", "n", "vehicle"),
    Noun("ship", "ships", "Schiff", "Schiffe", "n", "vehicle"),
    Noun("house", "houses", "Haus", "Häuser", "n", "building"),
    Noun("school", "schools", "Schule", "Schulen", "f", "building"),
    Noun("church", "churches", "Kirche", "Kirchen", "f", "building"),
    Noun("hotel", "hotels", "Hotel", "Hotels", "n", "building"),
    Noun("museum", "museums", "Museum", "Museen", "n", "building"),
    Noun("library", "libraries", "Bibliothek", "Bibliotheken", "f", "building"),
    Noun("castle", "castles", "Schloss", "Schlösser", "n", "building"),
    Noun("garden", "gardens", "Garten", "Gärten", "m", "area"),
    Noun("kitchen", "kitchens", "Küche", "Küchen", "f", "area"),
    Noun("city", "cities", "Stadt", "Städte", "f", "area"),
    Noun("forest", "forests", "Wald", "Wälder", "m", "area"),
    Noun("park", "parks", "Park", "Parks", "m", "area"),
    Noun("village", "villages", "Dorf", "Dörfer", "n", "area"),
    Noun("room", "rooms", "Zimmer", "Zimmer", "n", "area"),
)

ADJECTIVES = (
    Adjective("old", "alt", LIVING + OBJECTS + PLACES),
    Adjective("big", "groß", LIVING + OBJECTS + PLACES + ("food",)),
    Adjective("small", "klein", LIVING + OBJECTS + PLACES + ("food",)),
    Adjective("new", "neu", OBJECTS + PLACES),
    Adjective("beautiful", "schön", OBJECTS + PLACES),
    Adjective("young", "jung", LIVING),
    Adjective("happy", "glücklich", LIVING),
    Adjective("sad", "traurig", LIVING),
    Adjective("tired", "müde", LIVING, stem="müd"),
    Adjective("strong", "stark", LIVING),
    Adjective("hungry", "hungrig", LIVING),
    Adjective("clever", "klug", LIVING),
    Adjective("sick", "krank", LIVING),
    Adjective("red", "rot", OBJECTS),
    Adjective("green", "grün", OBJECTS),
    Adjective("blue", "blau", OBJECTS),
    Adjective("black", "schwarz", OBJECTS),
    Adjective("white", "weiß", OBJECTS),
    Adjective("expensive", "teuer", OBJECTS + ("food",), stem="teur"),
    Adjective("dirty", "schmutzig", OBJECTS + PLACES),
    Adjective("quiet", "ruhig", PLACES),
    Adjective("dark", "dunkel", PLACES, stem="dunkl"),
    Adjective("cold", "kalt", MASS),
    Adjective("warm", "warm", MASS),
    Adjective("fresh", "frisch", MASS + ("food",)),
    Adjective("good", "gut", MASS + ("food", "text")),
)

PRONOUNS = (
    Pronoun("I", "me", ("ich", "mich", "mir"), 0),
    Pronoun("you", "you", ("du", "dich", "dir"), 1),
    Pronoun("he", "him", ("er", "ihn", "ihm"), 2),
    Pronoun("she", "her", ("sie", "sie", "ihr"), 2),
    Pronoun("we", "us", ("wir", "uns", "uns"), 3),
    Pronoun("they", "them", ("sie", "sie", "ihnen"), 4),
)

POSSESSIVES = {
    "my": "mein",
    "your": "dein",
    "his": "sein",
    "her": "ihr",
    "our": "unser",
    "their": "ihr",
}

STATIC = (
    Preposition("in", "in", DATIVE),
    Preposition("in front of", "vor", DATIVE),
    Preposition("behind", "hinter", DATIVE),
    Preposition("next to", "neben", DATIVE),
)
COMPANY = (
    Preposition("with", "mit", DATIVE),
    Preposition("without", "ohne", ACCUSATIVE),
    Preposition("for", "für", ACCUSATIVE),
)
INTO = Preposition("into", "in", ACCUSATIVE)
OUT_OF = Preposition("out of", "aus", DATIVE)
TO = Preposition("to", "zu", DATIVE)

AND = Link("and", "und", subordinating=False, german_comma=False)
BUT = Link("but", "aber", subordinating=False, english_comma=True)
BECAUSE = Link("because", "weil", subordinating=True)
ALTHOUGH = Link("although", "obwohl", subordinating=True)
WHEN = Link("when", "wenn", subordinating=True)
IF = Link("if", "wenn", subordinating=True)
THAT = Link("that", "dass", subordinating=True)
WHETHER = Link("whether", "ob", subordinating=True)

DAYS = {
    "Monday": "Montag",
    "Tuesday": "Dienstag",
    "Wednesday": "Mittwoch",
    "Thursday": "Donnerstag",
    "Friday": "Freitag",
    "Saturday": "Samstag",
    "Sunday": "Sonntag",
}
QUESTION_WORDS = {"where": "wo", "when": "wann", "why": "warum"}
