"""Prompts of seven kinds, made by recipe from passages and topics: build/smollm2/prompts.jsonl and heldout.jsonl.

    python recipes/smollm2/prompts.py --count 60000

Kinds: question, chat (several turns), rewrite, summary, code, json, list. A prompt is held out if its passage or topic
is; held-out ones are never trained on. A line: {"kind", "turns": [what the user says, turn by turn], "temperature"}.
Passages stand under licences that texts.py names; topics and wordings are this project's own.
"""

import argparse
import json
import random
from collections.abc import Callable
from typing import NamedTuple

from texts import BUILD, held_out

SUBJECTS = """the water cycle|black holes|photosynthesis|the French Revolution|how vaccines work|plate tectonics|the stock market
supply and demand|compound interest|the Roman Empire|ancient Egypt|the silk road|renewable energy|solar panels|wind turbines
nuclear power|electric cars|how airplanes fly|how a refrigerator works|how bread rises|the human heart|the immune system|DNA
evolution|dinosaurs|volcanoes|earthquakes|tides|the moon|Mars|the speed of light|gravity|magnetism|electricity|batteries|lasers
radio waves|sound|rainbows|clouds|snow|hurricanes|deserts|rain forests|coral reefs|whales|bees|ants|spiders|birds of prey|dogs|cats
horses|gardening|composting|growing tomatoes|house plants|coffee|tea|chocolate|cheese|wine|pasta|sushi|soup|baking bread|salads
breakfast|healthy eating|sleep|stress|meditation|yoga|running|swimming|cycling|hiking|camping|chess|poker|football|basketball|tennis
the Olympic games|painting|photography|poetry|writing a novel|public speaking|learning a language|playing the guitar|the piano
classical music|jazz|movies|theatre|architecture|bridges|castles|museums|travel on a budget|Japan|Italy|Brazil|Kenya|Norway|Australia
New York|London|Paris|democracy|human rights|the printing press|the internet|email|passwords|computer viruses|encryption|databases
search engines|machine learning|neural networks|robots|3D printing|virtual reality|video games|smartphones|satellites|GPS
operating systems|compilers|recursion|binary search|sorting algorithms|hash tables|linked lists|graphs|unit tests|version control
web servers|HTTP|JSON|regular expressions|Python decorators|Python generators|object-oriented programming|functional programming
time management|job interviews|writing a resume|team work|leadership|negotiation|small businesses|marketing|budgeting|saving money
insurance|taxes|mortgages|inflation|banks|money|trade|recycling|plastic waste|climate change|air pollution|clean water|forests|rivers
mountains|oceans|islands|maps|calendars|clocks|the alphabet|numbers|fractions|algebra|geometry|probability|statistics|prime numbers
Isaac Newton|Albert Einstein|Marie Curie|Charles Darwin|Ada Lovelace|Alan Turing|Leonardo da Vinci|William Shakespeare|Mozart
Cleopatra|Julius Caesar|Napoleon|Abraham Lincoln|Nelson Mandela|Mahatma Gandhi|friendship|honesty|courage|kindness|happiness|patience
birthdays|weddings|holidays|schools|libraries|hospitals|firefighters|farmers|teachers|engineers|astronauts|pilots|sailors|trains
bicycles|ships|submarines|helicopters|rockets|telescopes|microscopes|thermometers|cameras|paper|glass|steel|concrete|wood|gold|salt
sugar|rice|wheat|corn|potatoes|apples|bananas|oranges|grapes|honey|milk|eggs|fish|chicken|vegetarian food|spices|garlic|onions|knots
first aid|fire safety|road safety|the five senses|memory|dreams|emotions|habits|creativity|curiosity|critical thinking|ethics|philosophy"""
TOPICS = SUBJECTS.replace("\n", "|").split("|")

QUESTIONS = (
    "What is {}?", "What are the most important facts about {}?", "Explain {} to a ten-year-old.", "Why does {} matter?",
    "Explain {} in simple words.", "How would you describe {} to someone who has never heard of it?",
    "Write a short paragraph about {}.", "What should a beginner know about {}?", "Tell me something interesting about {}.",
    "What are common misconceptions about {}?", "Write an introduction to an essay about {}.",
    "What are the advantages and disadvantages of {}?", "Describe the history of {} in a few sentences.",
    "Write a short story that has to do with {}.", "Write a poem about {}.", "Write an email to a friend about {}.",
    "How did {} change the world?", "Compare {} and {}.", "What do {} and {} have in common?", "Can you help me understand {}?",
    "Give me a detailed explanation of {}.", "What questions do people often ask about {}, and what are the answers?",
)  # fmt: skip
LISTS = (
    "List five facts about {}.", "Give me ten ideas that have to do with {}.", "Make a bulleted list of tips about {}.",
    "List the steps to get started with {}.", "Name seven words that people associate with {}.",
    "Write a numbered list of common mistakes people make with {}.", "Write a checklist for someone interested in {}.",
    "Give three examples of {} in everyday life.", "Make a list of pros and cons of {}.", "List good questions about {} for a quiz.",
)  # fmt: skip
FOLLOW_UPS = (
    "Can you give an example?", "Explain that more simply.", "Why is that?", "Tell me more.", "Summarize that in one sentence.",
    "What is the most important point?", "How does this compare with {}?", "What else should I know?", "Write that as a list.",
    "Are there any risks?", "And what about {}?", "How can I learn more about it?", "Thanks! What would you do first?",
)  # fmt: skip
REWRITES = (
    "Rewrite the following text in simple English:", "Rewrite this text so that it is more formal:", "Correct the grammar of this text:",
    "Rewrite the following in the first person:", "Paraphrase this:", "Make this text shorter without losing information:",
    "Rewrite this as a friendly email:", "Repeat the following text exactly:", "Rewrite this text for a child:",
    "Turn the following into a dialogue:", "Improve the style of this text:", "Rewrite the text below in the past tense:",
)  # fmt: skip
SUMMARIES = (
    "Summarize the following text:", "Summarize this in one sentence:", "What are the main points of the text below?",
    "Write a title and a short summary for this text:", "Give me the key facts of this text as bullet points:",
    "What is this text about?", "Explain this text:", "Write three questions that this text answers, with the answers:",
)  # fmt: skip
CODE_OF = (
    "What does this function do?", "Explain this code step by step:", "Add comments to this code:", "Write a docstring for this function:",
    "Rewrite this function with type hints:", "Write unit tests for this function:", "Are there any bugs in this code?",
    "Simplify this code:", "Translate this Python function into JavaScript:", "Repeat this code, but rename its variables:",
)  # fmt: skip
TASKS = """reverses a string|checks whether a number is prime|computes the factorial of a number|returns the Fibonacci sequence up to n
counts the words of a text|finds the largest number of a list|sorts a list without using sort|merges two sorted lists
removes duplicates from a list|checks whether a word is a palindrome|counts vowels|converts Celsius to Fahrenheit
computes the greatest common divisor|flattens a nested list|reads a CSV file|writes a dictionary to a JSON file
downloads a web page|validates an email address|generates a random password|computes the mean and median of a list
implements a stack|implements a queue|implements a binary search|implements a linked list|implements a binary tree
computes the distance of two points|multiplies two matrices|finds anagrams in a list of words|counts the lines of a file
lists all files of a folder|measures how long a function takes|retries a function that fails|caches the results of a function
parses command line arguments|converts Roman numerals to integers|converts an integer to binary|rotates a list by n places
groups words by their first letter|finds the most common element|checks balanced parentheses|draws a triangle of stars
plays rock, paper, scissors|implements tic-tac-toe|computes compound interest|converts a date to a weekday|splits a list in chunks
zips two lists into a dictionary|finds the longest common prefix|computes the sum of digits|prints a multiplication table
simulates rolling dice|implements bubble sort|implements quicksort|implements merge sort|computes a moving average
capitalizes every word|encrypts a text with a Caesar cipher|counts how often each character occurs|finds missing numbers"""
LANGUAGES = ("Python",) * 6 + ("JavaScript", "C", "Java", "Go", "SQL", "Bash")
SHAPES = (
    'with the keys "name", "description" and "tags" (a list)', 'with the keys "title", "summary" and "year"',
    'as a list of objects with "name" and "value"', 'with the keys "question", "options" (four) and "answer"',
    'with the keys "id", "name", "properties" (an object) and "related" (a list)', 'as an object that maps five words to definitions',
    'with the keys "pros" and "cons", both lists', 'with the keys "steps" (a list of strings) and "minutes" (a number)',
)  # fmt: skip
JSON_OF = (
    "Extract the most important facts of this text as JSON {}:", "Convert the following text to JSON {}:",
    "Answer only with JSON {}. The text:",
)  # fmt: skip
SHARES = {"question": 25, "chat": 16, "rewrite": 12, "summary": 12, "code": 18, "json": 9, "list": 8}


class Made(NamedTuple):
    """A prompt. turns: what the user says, one after another. held: its passage or topic is held out."""

    turns: list[str]
    held: bool


class Maker:
    """Makes prompts, at random."""

    def __init__(self, passages: list[dict], seed: int) -> None:
        self._random = random.Random(seed)
        self._prose = [p for p in passages if p["source"] != "code"]
        self._code = [p for p in passages if p["source"] == "code"]
        self._topics = TOPICS
        self._tasks = [task for line in TASKS.splitlines() for task in line.split("|")]
        self.kinds: dict[str, Callable[[], Made]] = {
            "question": lambda: self._about(QUESTIONS),
            "list": lambda: self._about(LISTS),
            "chat": self._chat,
            "rewrite": lambda: self._of_passage(REWRITES),
            "summary": lambda: self._of_passage(SUMMARIES),
            "code": self._of_code,
            "json": self._json,
        }

    def _about(self, wordings: tuple[str, ...]) -> Made:
        pick = self._random
        if pick.random() < 0.2:  # about a passage's subject rather than a topic of the list
            return self._of_passage((pick.choice(("Continue this text:", "What does this mean?", "Discuss this:")),))
        topics = pick.sample(self._topics, 2)
        return Made([pick.choice(wordings).format(*topics)], any(held_out(topic) for topic in topics))

    def _chat(self) -> Made:
        pick, first = self._random, self._random.choice((lambda: self._about(QUESTIONS), self._of_code, self._json))()
        rest = [pick.choice(FOLLOW_UPS).format(pick.choice(self._topics)) for _ in range(pick.choice((1, 1, 2)))]
        return Made([*first.turns, *rest], first.held)

    def _of_passage(self, wordings: tuple[str, ...]) -> Made:
        passage = self._random.choice(self._prose)
        return Made([f"{self._random.choice(wordings)}\n\n{passage['text']}"], passage["held_out"])

    def _of_code(self) -> Made:
        pick = self._random
        if pick.random() < 0.5:
            task, language = pick.choice(self._tasks), pick.choice(LANGUAGES)
            wording = pick.choice(
                (
                    "Write a {} function that {}.",
                    "Write {} code that {}, with an example.",
                    "How do I write {} code that {}?",
                )
            )
            return Made([wording.format(language, task)], held_out(task))
        passage = pick.choice(self._code)
        return Made([f"{pick.choice(CODE_OF)}\n\n```python\n{passage['text']}\n```"], passage["held_out"])

    def _json(self) -> Made:
        pick = self._random
        if pick.random() < 0.6:
            topic = pick.choice(self._topics)
            wording = pick.choice(
                ("Describe {} as JSON {}.", "Give me data about {} in JSON format, {}.", "Write JSON about {} {}.")
            )
            return Made([wording.format(topic, pick.choice(SHAPES))], held_out(topic))
        return self._of_passage((pick.choice(JSON_OF).format(pick.choice(SHAPES)),))


def main() -> None:
    """Write `count` prompts to train on, and `heldout` of each kind that are not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60000)
    parser.add_argument("--heldout", type=int, default=60, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with (BUILD / "passages.jsonl").open(encoding="utf-8") as file:
        maker = Maker([json.loads(line) for line in file], args.seed)
    pick = random.Random(args.seed + 1)
    train, kept = [], {kind: [] for kind in SHARES}
    seen: set[str] = set()
    while len(train) < args.count or any(len(rows) < args.heldout for rows in kept.values()):
        kind = pick.choices(list(SHARES), list(SHARES.values()))[0]
        made = maker.kinds[kind]()
        if "\n".join(made.turns) in seen:
            continue
        row = {"kind": kind, "turns": made.turns, "temperature": pick.choice((0.0, 0.0, 0.0, 0.7, 0.7, 1.0))}
        if made.held and len(kept[kind]) < args.heldout:
            kept[kind].append(row)
        elif not made.held and len(train) < args.count:
            train.append(row)
        seen.add("\n".join(made.turns))
    for name, rows in (("prompts", train), ("heldout", [row for each in kept.values() for row in each])):
        with (BUILD / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{name}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
