"""English text for loads: short chat questions, and a passage long enough for any prompt length."""

from __future__ import annotations

import numpy as np

QUESTIONS = (
    "What is a good way to learn the names of trees in my neighbourhood?",
    "My bread comes out flat and dense every time. What am I most likely doing wrong?",
    "Explain to a ten-year-old why the sky is blue at noon and red in the evening.",
    "I have two hours in the city before my train leaves. How should I spend them?",
    "Write a short, friendly note to a neighbour whose dog barks at night.",
    "What is the difference between a violin and a viola?",
    "Can you suggest a simple dinner with lentils, carrots and rice?",
    "How do ships stay afloat when they are made of steel?",
    "Give me three reasons to keep a diary, and one reason not to.",
    "What should I check before buying a used bicycle?",
    "Why do cats sleep so much during the day?",
    "Describe the smell of rain on dry ground without using the word fresh.",
    "How can I politely leave a meeting that runs over time?",
    "What happens inside a piano when I press a key?",
    "Tell me a very short story about a lighthouse keeper and a letter.",
    "Which vegetables grow well in a shady garden?",
    "How do I explain to my team that the deadline has moved forward by a week?",
    "What makes some glass break into small cubes and other glass into long splinters?",
    "I want to start running. How should my first two weeks look?",
    "Why is it colder on a mountain, although the mountain is closer to the sun?",
    "Name a few habits that make a shared kitchen easier to live with.",
    "How did people tell the time before there were clocks?",
    "What is the best way to store fresh herbs so that they last?",
    "Summarise in two sentences what a librarian does all day.",
)

PASSAGE = """\
The ferry leaves the old harbour twice a day, once before the fishing boats return and once when the \
light begins to fade. It carries the post, a few crates of vegetables, and anyone who has business on \
the islands. The crossing takes a little under an hour when the water is calm. In winter it can take \
three, and on some days the captain looks at the sky, shakes his head, and ties the ropes again.

Nobody remembers who built the first house on the largest island. The walls are of grey stone, fitted \
without mortar, and so thick that the windows look like tunnels. Inside it is cool in summer and never \
quite cold in winter, because the kitchen stove burns from October until May. Above the stove hangs a \
row of copper pans, polished by four generations, and beside the door there is a barometer that \
everybody taps on the way out, although nobody has trusted it since the great storm.

The school has eleven pupils and one teacher. She arrived for a single year and stayed for twenty. In \
the mornings she teaches arithmetic, grammar and geography; in the afternoons, if the weather allows, \
the whole class walks to the northern cliffs to count birds. The results are written into a thick green \
book and sent to a university on the mainland, where a professor compares them with those of earlier \
years. Thanks to the children it is known that the puffins return four days earlier than they used to, \
and that the kittiwakes have moved from the western face to the eastern one.

Electricity came late. For a long time there was a diesel generator behind the shop, which ran from six \
until eleven in the evening, and its hum belonged to the sound of supper. Now two windmills and a field \
of panels supply more than the islanders can use. A cable as thick as an arm carries the rest to the \
mainland, and in exchange there is money for the road, the clinic and a new roof on the hall. When the \
wind drops for several days the current flows the other way, and nobody notices the difference except \
the engineer, who keeps a careful record of every hour.

Letters are still important, because the telephone works only on the hill. The postman, who is also the \
barber, reads the addresses aloud as he sorts them, and by noon everyone knows who has heard from whom. \
He says that he could write a history of the place from the stamps alone: first the sons who went to \
sea, then the daughters who went to the city, then the grandchildren who send parcels with coffee and \
batteries, and lately the scientists, who receive instruments packed in straw and complain about the \
salt in the air.

On the last Saturday of August there is a dance. The tables are carried out of the hall, the fiddles \
are tuned, and the oldest couple opens the floor. Visitors are welcome, provided that they bring \
something to eat and are willing to learn the steps. Around midnight the lamps are put out for a moment \
so that everybody may look at the stars, which are brighter there than anywhere on the coast. Then the \
music begins again, and it does not stop until the first boat sounds its horn across the bay.

A young man once asked the captain why he had never moved to a larger ship. The captain thought about \
it for most of the crossing. A larger ship, he said at last, goes to places where nobody is waiting for \
it. Here there is always a small crowd on the pier: a child who expects a bicycle, a cook who needs \
flour, a woman who wants to know whether her sister is on board. He pulled the cord of the whistle, and \
from the shore somebody waved a white cloth in reply.
"""

LONG_TEXT = PASSAGE + "\n".join(QUESTIONS)


def exact_prompts(
    ids: tuple[int, ...], length_tokens: int, count: int, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """`count` prompts of exactly `length_tokens` tokens, cut from `ids` read as a ring.

    Each starts at another place of the ring, so that no prefix cache can serve one from another.
    Raises ValueError when there are fewer places than prompts.
    """
    if not 0 < count <= len(ids):
        raise ValueError(f"{count} distinct prompts can't be cut from {len(ids)} tokens")
    ring = ids * (length_tokens // len(ids) + 2)
    starts = rng.choice(len(ids), size=count, replace=False)
    return [ring[start : start + length_tokens] for start in (int(s) for s in starts)]
