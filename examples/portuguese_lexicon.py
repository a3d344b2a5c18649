# SPDX-License-Identifier: Apache-2.0
"""The grammar's words, Brazilian Portuguese and English, with forms for agreement."""

from __future__ import annotations

from typing import NamedTuple


class Noun(NamedTuple):
    gender: str  # "m" or "f"
    one_pt: str
    many_pt: str
    one_en: str
    many_en: str

    def pt(self, n: int) -> str:
        return self.one_pt if n == 1 else self.many_pt

    def en(self, n: int) -> str:
        return self.one_en if n == 1 else self.many_en


class Adjective(NamedTuple):
    # Masculine singular and plural, feminine singular and plural.
    forms_pt: tuple[str, str, str, str]
    en: str

    def pt(self, gender: str, n: int) -> str:
        return self.forms_pt[2 * (gender == "f") + (n != 1)]


class Verb(NamedTuple):
    """Forms by person: I, he or she, we, they."""

    present_pt: tuple[str, str, str, str]
    past_pt: tuple[str, str, str, str]
    en: str
    third_en: str
    past_en: str


class Person(NamedTuple):
    pt: str
    en: str
    form: int  # index of the verb form

    @property
    def third(self) -> bool:
        """Return True for the third person singular, which English marks."""
        return self.form == 1


class Place(NamedTuple):
    inside_pt: str
    inside_en: str
    to_pt: str
    to_en: str


NOUNS = tuple(
    Noun(*line.split())
    for line in """\
m livro livros book books
m gato gatos cat cats
m carro carros car cars
m copo copos glass glasses
m prato pratos plate plates
m relógio relógios watch watches
m jornal jornais newspaper newspapers
m pão pães loaf loaves
m chapéu chapéus hat hats
m lápis lápis pencil pencils
m espelho espelhos mirror mirrors
m cavalo cavalos horse horses
f casa casas house houses
f mesa mesas table tables
f cadeira cadeiras chair chairs
f flor flores flower flowers
f maçã maçãs apple apples
f janela janelas window windows
f chave chaves key keys
f camisa camisas shirt shirts
f faca facas knife knives
f caixa caixas box boxes
f luz luzes light lights
f vaca vacas cow cows""".splitlines()
)


def _adjective(line: str) -> Adjective:
    """Return an adjective; "preto black" has four forms, "grande big" two.

    Irregular ones list all four.
    """
    *forms, en = line.split()
    if len(forms) == 4:
        return Adjective((forms[0], forms[1], forms[2], forms[3]), en)
    stem = forms[0][:-1]
    ends = ("o", "os", "a", "as") if forms[0].endswith("o") else ("e", "es", "e", "es")
    return Adjective((stem + ends[0], stem + ends[1], stem + ends[2], stem + ends[3]), en)


ADJECTIVES = tuple(
    _adjective(line)
    for line in """\
preto black
branco white
vermelho red
amarelo yellow
novo new
velho old
pequeno small
grande big
verde green
bonito beautiful
caro expensive
limpo clean
azul azuis azul azuis blue
bom bons boa boas good""".splitlines()
)


def _verb(line: str) -> Verb:
    """Return a regular verb from a line such as "comprar buy buys bought"."""
    infinitive, en, third_en, past_en = line.split()
    stem = infinitive[:-2]
    if infinitive.endswith("ar"):
        present, past = ("o", "a", "amos", "am"), ("ei", "ou", "amos", "aram")
    else:
        present, past = ("o", "e", "emos", "em"), ("i", "eu", "emos", "eram")
    forms = [tuple(stem + end for end in ends) for ends in (present, past)]
    return Verb(forms[0], forms[1], en, third_en, past_en)  # type: ignore[arg-type]


VERBS = tuple(
    _verb(line)
    for line in """\
comprar buy buys bought
vender sell sells sold
encontrar find finds found
usar use uses used
lavar wash washes washed
guardar keep keeps kept
pintar paint paints painted
esconder hide hides hid
mostrar show shows showed
receber receive receives received
levar take takes took
desenhar draw draws drew""".splitlines()
)

SUBJECTS = (
    Person("eu", "I", 0),
    Person("ele", "he", 1),
    Person("ela", "she", 1),
    Person("nós", "we", 2),
    Person("eles", "they", 3),
    Person("o médico", "the doctor", 1),
    Person("a professora", "the teacher", 1),
    Person("os alunos", "the students", 3),
    Person("as crianças", "the children", 3),
)

NAMES = tuple("Ana Pedro Maria João Luísa Carlos Beatriz Tiago Clara Rui Sofia Miguel".split())

PLACES = (
    Place("na cidade", "in the city", "à cidade", "to the city"),
    Place("no mercado", "in the market", "ao mercado", "to the market"),
    Place("na escola", "in the school", "à escola", "to the school"),
    Place("no jardim", "in the garden", "ao jardim", "to the garden"),
    Place("na cozinha", "in the kitchen", "à cozinha", "to the kitchen"),
    Place("na praia", "on the beach", "à praia", "to the beach"),
    Place("no hotel", "in the hotel", "ao hotel", "to the hotel"),
    Place("na loja", "in the shop", "à loja", "to the shop"),
)

MONTHS = tuple(
    zip(
        (
            "janeiro fevereiro março abril maio junho julho"
            " agosto setembro outubro novembro dezembro"
        ).split(),
        (
            "January February March April May June July August September October November December"
        ).split(),
    )
)

WEEKDAYS = tuple(
    zip(
        "segunda-feira terça-feira quarta-feira quinta-feira sexta-feira sábado domingo".split(),
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    )
)
