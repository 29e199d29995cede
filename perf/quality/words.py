# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of the generated tasks."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words("""
Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karla Leo Mia Noah Olga Paul Rosa Sam Tina Uwe Vera
Walter Yara Zoe Adam Bella Carl Dora Erik Frida Georg Helga Igor Julia Kurt Lena Max Nina Oskar Petra Ralf
Sara Tom Ursula Viktor Wanda Xaver Yusuf Alice Bruno Cora Dirk Elsa Finn Gina Hans Ines Jan Kira Lars Mona
Nils Otto Pia Rita Sven Thea Udo Vito Wim Zara""")

ADJECTIVES = _words("""
red blue green yellow black white grey brown old new small big long short round square heavy light warm cold
dry wet loud quiet fast slow sharp soft hard clean dusty bright dark plain silver golden wooden paper glass
stone hidden broken empty full narrow wide tall low early late sweet bitter rough smooth strange quick calm
brave""")

NOUNS = _words("""
fox door lamp river table box clock boat garden key horse tower book chair bridge stone bird cup window coat
drum map ship tree wheel bell shoe knife mirror candle basket ring wall road letter engine bottle piano ladder
tent flag coin rope glove hammer pencil kettle blanket camera compass feather lantern magnet needle orange
pillow rocket saddle spoon statue sword ticket trumpet umbrella violin wagon whistle anchor barrel cabin desk""")

CITIES = _words("""
Paris London Berlin Rome Madrid Vienna Prague Oslo Lisbon Dublin Athens Warsaw Cairo Delhi Tokyo Lima Quito
Havana Boston Denver Austin Seattle Chicago Toronto Sydney Perth Nairobi Accra Dakar Tunis Riga Bern Basel
Bonn Turin Milan Naples Porto Lyon Nice Ghent Bergen Malmo Krakow Zagreb Sofia Minsk Kyiv Baku Hanoi Seoul
Osaka Manila Jakarta Bogota Caracas""")

PLACES = _words("""
kitchen cellar attic garage library office hallway stable market school museum station harbor chapel workshop
bakery theater hospital prison palace cottage tunnel forest meadow island""")

THINGS = _words("""
apples coins books stamps eggs cards pens shells marbles tickets plums nuts candles bottles buttons flowers""")

VERBS = _words("""
watches finds moves paints carries follows opens hides lifts breaks holds sells cleans turns covers leaves
pushes draws needs keeps""")

FUNCTIONS: list[tuple[str, str, list[tuple[str, str, str]]]] = [
    ("get_weather", "Current weather of a city", [("city", "string", "city name")]),
    ("get_time", "Local time of a city", [("city", "string", "city name")]),
    ("add_event", "Add an event to the calendar", [("title", "string", "what"), ("hour", "integer", "0 to 23")]),
    ("send_message", "Send a text message", [("to", "string", "name"), ("text", "string", "message")]),
    ("convert_money", "Convert money", [("amount", "integer", "how much"), ("currency", "string", "target currency")]),
    ("set_timer", "Start a timer", [("minutes", "integer", "length in minutes")]),
    ("play_music", "Play music of an artist", [("artist", "string", "name"), ("loud", "boolean", "at full volume")]),
    ("book_table", "Reserve a table", [("city", "string", "city name"), ("people", "integer", "number of guests")]),
    ("find_route", "Route between two cities", [("start", "string", "city"), ("goal", "string", "city")]),
    ("switch_light", "Switch a lamp", [("room", "string", "room name"), ("on", "boolean", "on or off")]),
]
"""name, description, parameters (name, JSON type, description)."""

CURRENCIES = _words("euro dollar pound yen franc krone")
