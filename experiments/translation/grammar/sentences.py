"""Random clauses and sentences."""

from experiments.translation.grammar import lexicon as lex
from experiments.translation.grammar import phrases
from experiments.translation.grammar.derivation import Adjunct, Clause, NounPhrase, Sentence
from experiments.translation.grammar.lexicon import Case, FixedPhrase, Preposition, Pronoun
from experiments.translation.grammar.phrases import Rng, Style, pick

PRESENT = ("present",) * 6 + ("can", "must", "want to", "should", "may", "will")
PAST = ("past",) * 4 + ("perfect",) * 3 + ("could", "had to", "wanted to")
FULL = Style(PRESENT + PAST)
SHORT = Style(PRESENT + PAST, adjectives=0.2, times=0.15, coordinations=0.0)
TIMELESS = SHORT._replace(times=0.0)
TIMELESS_PRESENT = TIMELESS._replace(tenses=PRESENT)
CONDITION = TIMELESS._replace(tenses=("present",) * 6 + ("can", "must", "want to", "may"))

# Two conjunctions, the probability of the first one, and the styles of the two clauses.
LINKED = {
    "reason": ("because", 0.65, "although", SHORT, TIMELESS),
    "condition": ("when", 0.5, "if", TIMELESS_PRESENT, CONDITION),
    "coordinated": ("and", 0.6, "but", TIMELESS, TIMELESS),
}
# The tenses of a frame that does not allow all of them.
FRAME_TENSES = {
    "copula": ("present", "past"),
    "price": ("present",),
    "age": ("present",),
    "possession": ("past", "wanted to", *PRESENT),
}
MEASURES = ("price", "age")  # frames without negation and time
# The verbs of food and drink come twice, because few verbs take their nouns.
TRANSITIVE = lex.VERBS["transitive"]
MASS_VERBS = tuple(verb for verb in TRANSITIVE if set(verb.objects) & set(lex.MASS))
VERBS = lex.VERBS | {"transitive": TRANSITIVE + MASS_VERBS}
SIMPLE_TRANSITIVE = [verb for verb in TRANSITIVE if not verb.particle and not verb.preposition]
LOCATIONS = tuple(p for p in lex.PREPOSITIONS.values() if p.role == "location")
COMPANY = tuple(p for p in lex.PREPOSITIONS.values() if p.role == "company")
DIRECTIONS = tuple(lex.PREPOSITIONS[name] for name in ("into", "into", "out of", "to", "to"))


def sample_sentence(rng: Rng) -> Sentence:
    """Return a random derivation."""
    kind = phrases.pick_weighted(rng, lex.SENTENCE_WEIGHTS)
    if kind in LINKED:
        return _two_clauses(rng, *LINKED[kind])
    sample = {"relative": _with_relative, "reported": _reported, "question": _question}
    return sample.get(kind, _plain)(rng)


def _plain(rng: Rng) -> Sentence:
    main = sample_clause(rng, FULL)
    if main.time and rng.random() < 0.4:
        return Sentence(main._replace(time=None), fronted=main.time)
    is_place = isinstance(main.adjunct, Adjunct) and main.adjunct.preposition.role == "location"
    if main.verb.frame == "activity" and is_place and not main.negated and rng.random() < 0.35:
        return Sentence(main._replace(adjunct=None), fronted=main.adjunct)
    return Sentence(main)


def _two_clauses(
    rng: Rng, usual: str, probability: float, other: str, first: Style, second: Style
) -> Sentence:
    conjunction = lex.CONJUNCTIONS[usual if rng.random() < probability else other]
    second_first = conjunction.subordinating and rng.random() < 0.4
    main = sample_clause(rng, first)
    linked = sample_clause(rng, second)
    return Sentence(main, conjunction=conjunction, second=linked, second_first=second_first)


def _reported(rng: Rng) -> Sentence:
    is_asked = rng.random() < 0.25
    verb = VERBS["interrogative"][0] if is_asked else pick(rng, VERBS["clausal"])
    negated = verb.english == "know" and rng.random() < 0.5
    subject = phrases.sample_subject(
        rng, verb.subjects, SHORT, "definite" if negated else "subject"
    )
    tense = "past" if rng.random() < 0.35 else "present"
    conjunction = lex.CONJUNCTIONS["whether" if is_asked or negated else "that"]
    main = Clause(subject, verb, tense, negated)
    return Sentence(main, conjunction=conjunction, second=sample_clause(rng, SHORT))


def _question(rng: Rng) -> Sentence:
    question = pick(rng, ("yes-no", "yes-no", "yes-no", "why", "when", "where"))
    if question == "where":
        verb = pick(rng, VERBS["activity"] + VERBS["location"])
        subject = phrases.sample_subject(rng, verb.subjects, SHORT, "definite")
        return Sentence(Clause(subject, verb, pick(rng, SHORT.tenses)), question=question)
    style = (TIMELESS if question == "when" else SHORT)._replace(negations=0.0)
    main = sample_clause(rng, style)
    while question == "when" and main.verb.frame in ("copula", *MEASURES):
        main = sample_clause(rng, style)
    return Sentence(main, question=question)


def _with_relative(rng: Rng) -> Sentence:
    main = sample_clause(rng, SHORT)
    while not isinstance(main.subject, NounPhrase):
        main = sample_clause(rng, SHORT)
    kind = main.subject.noun.kind
    determiners = lex.DETERMINERS["antecedent"][main.subject.plural]
    antecedent = main.subject._replace(determiner=pick(rng, determiners), number=0)
    if kind in lex.LIVING and rng.random() < 0.6:
        clause = sample_clause(rng, TIMELESS, antecedent)
        return Sentence(main._replace(subject=clause.subject), relative=clause)
    verb = pick(rng, [verb for verb in SIMPLE_TRANSITIVE if kind in verb.objects])
    subject = phrases.sample_subject(rng, ("person",), TIMELESS, "definite")
    clause = Clause(subject, verb, pick(rng, TIMELESS.tenses))
    main = main._replace(subject=antecedent)
    return Sentence(main, relative=clause, relative_is_object=True)


def sample_clause(rng: Rng, style: Style, subject: NounPhrase | None = None) -> Clause:
    """Return a clause, about the given subject if there is one."""
    verbs: list[lex.Verb] = []
    while not verbs:
        frame = phrases.pick_weighted(rng, lex.FRAME_WEIGHTS)
        verbs = [v for v in VERBS[frame] if not subject or subject.noun.kind in v.subjects]
    verb = pick(rng, verbs)
    tense = pick(rng, style.tenses)
    if tense not in FRAME_TENSES.get(verb.frame, style.tenses):
        tense = "present"
    is_measure = verb.frame in MEASURES
    negated = not is_measure and rng.random() < style.negations
    determiners = "definite" if negated else "subject"
    who = subject or phrases.sample_subject(rng, verb.subjects, style, determiners)
    clause = Clause(who, verb, tense, negated)
    if not is_measure and rng.random() < style.times:
        clause = clause._replace(time=phrases.sample_time(rng, clause))
    return _complete(rng, clause, style)


def _complete(rng: Rng, clause: Clause, style: Style) -> Clause:
    """Return the clause with the objects, complement or adjunct of its frame."""
    match clause.verb.frame:
        case "transitive" | "possession":
            return clause._replace(direct=_direct_object(rng, clause, style, pronouns=0.25))
        case "ditransitive":
            return _with_two_objects(rng, clause, style)
        case "copula":
            return _with_adjective(rng, clause)
        case "price":
            price = phrases.with_number(phrases.sample_number(rng, 999), "{} euros", "{} Euro")
            return clause._replace(complement=price)
        case "age":
            number = phrases.sample_number(rng, 99 if _subject_kind(clause) == "person" else 999)
            age = phrases.with_number(number, "{} years old", "{} Jahre alt")
            return clause._replace(complement=age)
    return clause._replace(adjunct=_adjunct(rng, clause, style))


def _direct_object(rng: Rng, clause: Clause, style: Style, pronouns: float) -> NounPhrase | Pronoun:
    determiners = "negated" if clause.negated else "object"
    if clause.negated and clause.verb.case == Case.DATIVE:
        determiners = "definite"
    return phrases.sample_other(rng, clause, clause.verb.objects, style, determiners, pronouns)


def _with_two_objects(rng: Rng, clause: Clause, style: Style) -> Clause:
    determiners = "definite" if clause.negated else "oblique"
    indirect = phrases.sample_other(rng, clause, ("person",), style, determiners, 0.45)
    # German puts two pronouns in another order than two nouns; the grammar does without them.
    direct = _direct_object(rng, clause, style, pronouns=0.0)
    is_her = isinstance(indirect, Pronoun) and indirect.english_object == "her"
    if is_her and isinstance(direct, NounPhrase) and not direct.determiner:
        # "Shows her pictures" has two meanings.
        direct = direct._replace(determiner="the", number=0)
    return clause._replace(indirect=indirect, direct=direct)


def _with_adjective(rng: Rng, clause: Clause) -> Clause:
    subject = clause.subject
    adjective = pick(rng, phrases.adjectives_of(_subject_kind(clause)))
    if isinstance(subject, NounPhrase) and subject.adjective == adjective:
        subject = subject._replace(adjective=None)
    return clause._replace(subject=subject, complement=adjective)


def _subject_kind(clause: Clause) -> str:
    subject = clause.subject
    if isinstance(subject, Pronoun):
        return "person"
    return (subject if isinstance(subject, NounPhrase) else subject.first).noun.kind


def _adjunct(rng: Rng, clause: Clause, style: Style) -> Adjunct | FixedPhrase | None:
    verb = clause.verb
    kinds: phrases.Kinds = lex.PLACES
    pronouns, preposition = 0.0, None
    if verb.frame == "prepositional":
        preposition = Preposition(verb.preposition, verb.german_preposition, verb.case)
        kinds, pronouns = verb.objects, 0.3
    elif verb.frame == "motion":
        preposition = pick(rng, DIRECTIONS)
        if preposition.english == "to":
            kinds, pronouns = ("person",) if rng.random() < 0.5 else ("building",), 0.3
    elif verb.english == "live" and rng.random() < 0.2:
        number = phrases.sample_number(rng, 999, is_count=False)
        return phrases.with_number(number, "in room {}", "in Zimmer {}")
    elif verb.frame == "intransitive" or (verb.frame == "activity" and rng.random() >= 0.75):
        return None
    # "Sleep with" has a second meaning in both languages.
    elif verb.frame == "location" or rng.random() < 0.6 or verb.english == "sleep":
        preposition = pick(rng, LOCATIONS)
    else:
        kinds, pronouns = ("person",), 0.4
    phrase = phrases.sample_other(rng, clause, kinds, style, "oblique", pronouns)
    return Adjunct(preposition or pick(rng, COMPANY), phrase)
