"""Make the problems of question G: short articles under nine constraints that `examples/constraints_reward.py` checks.

    python experiments/evidence/g-graded/make_data.py

writes train.jsonl.gz and test.jsonl.gz beside this file, the same ones every time. No topic of a test problem is one of training.
"""

import gzip
import json
import random
from pathlib import Path

HERE = Path(__file__).parent
TOPICS = """the tides, bread, a lighthouse, the moon, bicycles, a railway station, coffee, glaciers, honey bees, an old library, volcanoes,
chess, a fishing village, the postal service, rain, a city park, clocks, sailing ships, a football match, the alphabet, deserts, soap,
a hospital at night, bridges, paper, wolves, a chemistry lesson, the violin, potatoes, an airport, salt, maps, a rose garden, earthquakes,
a bakery, the telescope, swimming, a market place, glass, an orchestra, mountains, wool, a fire brigade, the calendar, rivers, tea, robots,
a wedding, mirrors, elephants, a school trip, the compass, cheese, an island, thunder, windmills, a theatre, the printing press, snow,
a night train, gold, owls, the harbour, a vegetable soup, kites, the equator, an apple tree, radio, a tailor, caves, the marathon, ink,
a zoo, satellites, pepper, the opera, a castle, spiders, ice cream, the subway""".replace("\n", " ").split(", ")
WORDS = """lantern ledger velvet copper harvest signal basket marble thunderous pocket orchard ribbon engine quarry feather kettle anchor pillar
tunnel whistle canvas barrel meadow cabinet pebble chimney saddle barley fountain ladder magnet needle oyster parcel quilt rudder
satchel timber umbrella vessel walnut yarn zipper button candle drawer envelope furnace goblet hammer""".replace(
    "\n", " "
).split(" ")
STARTS = ["Today", "Imagine", "Long", "People", "Somewhere", "Look", "Once", "Nobody", "Everyone", "Yesterday"]
ENDS = ["That is all.", "Think about it.", "Now you know.", "See for yourself.", "It was worth it."]
AVOIDS = ["also", "important", "many", "however", "because", "world", "history", "people"]


def problem(rng: random.Random, topic: str) -> dict:
    least = rng.randrange(110, 160, 10)
    most, bullets = least + 60, rng.randint(2, 5)
    start, end, avoided = rng.choice(STARTS), rng.choice(ENDS), rng.choice(AVOIDS)
    used = rng.sample(WORDS, 3)
    prompt = (
        f"Write a short article about {topic}. Follow every instruction:\n- between {least} and {most} words\n"
        f'- the first word is "{start}"\n- use the words {used[0]}, {used[1]} and {used[2]}\n- never write "{avoided}"\n'
        f'- exactly {bullets} bullet points, each on a line that starts with "- "\n- the last sentence is "{end}"'
    )
    constraints = [("min_words", least), ("max_words", most), ("starts_with", start), *(("contains", word) for word in used)]
    constraints += [("avoids", avoided), ("bullets", bullets), ("ends_with", end)]
    return {"prompt": prompt, "constraints": [{"kind": kind, "value": value} for kind, value in constraints]}


def main() -> None:
    rng = random.Random(0)
    topics = rng.sample(TOPICS, len(TOPICS))
    for name, count, taken in (("train", 1500, topics[16:]), ("test", 400, topics[:16])):
        lines = [json.dumps(problem(rng, rng.choice(taken))) + "\n" for _ in range(count)]
        with gzip.GzipFile(HERE / f"{name}.jsonl.gz", "wb", mtime=0) as file:
            file.write("".join(lines).encode())


if __name__ == "__main__":
    main()
