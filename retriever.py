"""The environment of sapo_min.py: documents, questions, and an exact TF-IDF search engine on numpy.

1 a fictional world, 2 files and their formats, 3 what a run shows and writes, 4 TF-IDF.
"""
import argparse
import hashlib
import itertools
import json
import math
import os
import pickle
import random
import re
import sys
import time
import zipfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import lru_cache, partial, wraps
from pathlib import Path
from statistics import fmean

import numpy as np


class UserError(ValueError):
    """Something the user can mend, told in one sentence; the command line prints it and exits with 2."""


def remember(function: Callable[..., list]) -> Callable[..., list]:
    """Keep the results of the last calls; every caller gets a list of its own."""
    cached = lru_cache(10_000)(lambda *args: tuple(function(*args)))
    return wraps(function)(lambda *args: list(cached(*args)))


def require(condition, sentence: str) -> None:
    """Raise `sentence` as a UserError unless the condition holds."""
    if not condition:
        raise UserError(sentence)


LIMIT = re.compile(r"\((\w+ \| [\w| ]+)\)|\(at least (\d)\)|\((above 0)\)")


def check_limits(values: Mapping, sentences: Mapping[str, str]) -> None:
    """UserError for the first setting that breaks the limit in its sentence, as (a | b) or (at least 1)."""
    for name, sentence in sentences.items():
        value, limit = values[name], LIMIT.search(sentence)
        choices, least, above = limit.groups() if limit else (None, None, None)
        fits = (value in choices.split(" | ") if choices else int(least) <= value < math.inf if least else
                0 < value < math.inf if above else True)
        require(fits, f"--{name} {value}: it must be {limit and limit[0][1:-1]}.")


def read_flags(argv: Sequence[str], description: str, config: type, sentences: Mapping[str, str]) -> dict:
    """The command line -> the flags given, of --preset, --ask and one for every field of the dataclass."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    parser.add_argument("--preset", help="The settings to start from (tiny | qwen).")
    parser.add_argument("--ask", metavar="QUESTION", help="Let the agent of --resume RUN_FOLDER answer it.")
    for f in fields(config):
        how = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
        parser.add_argument(f"--{f.name}", help=f"{sentences[f.name]} [{f.default!r}]", **how)
    parser.error = lambda message: require(False, f"{message}; --help lists the flags.")
    return vars(parser.parse_args(argv))


# ==== 1. The built-in world =================================================================================
@dataclass(frozen=True)
class Document:
    title: str
    text: str


@dataclass(frozen=True)
class Example:
    question: str
    answers: tuple[str, ...]
    searches: tuple[str, ...] = ()  # the queries that lead to the answer, one a hop, where they are known
    kind: str = ""  # the type of question, where the data tells one


# Every name is a pair of these words and every pair is a name: half a name finds the wrong document, and no
# pair stands out to be learnt by heart. In order: novels, writers, cities, countries.
WORDS = (
    ("Silver Golden Broken Silent Hidden Burning Frozen Crimson Empty Wild Pale Bitter Hollow Secret Lonely",
     "River Garden Tower Mirror Winter Bridge Island Lamp Forest Harvest Crown Letter Shadow Rose Gate Sky"),
    ("Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karla Leon Maria Nils Olga Pavel",
     "Adler Brandt Corvin Dorn Ekman Falk Gruber Holm Ivers Jansen Keller Lindt Moreau Novak Orlov"),
    ("North South Old New Port Fort Upper Lower Saint Lake Grand Little Mount Cape Bad",
     "Luma Kessel Bryne Talos Orvik Dunmar Selby Vanta Corin Hadley Mirel Norden Pella Rusk Arden Tolm"),
    ("Greater Lesser Inner Outer Royal Free Western Eastern",
     "Valdoria Tarsk Elmeria Quorin Zandia Morovia Istria Belmark Caldora Lunevia"))
QUESTIONS = {  # (first, last) link in the chain novel > writer > city > country > capital; last - first hops
    (0, 1): "Who wrote {}?", (1, 2): "In which city was {} born?", (2, 3): "In which country is {}?",
    (3, 4): "What is the capital of {}?", (0, 2): "In which city was the author of {} born?",
    (1, 3): "In which country was {} born?", (2, 4): "What is the capital of the country of {}?",
    (0, 3): "In which country was the author of {} born?",
    (1, 4): "What is the capital of the country where {} was born?"}


def make_world(seed: int = 0) -> tuple[list[Document], list[Example], list[Example]]:
    """A fictional encyclopaedia: 800 documents, 1,080 training and 240 test questions, a third a hop count.

    A country belongs, with all in it, to the training or to the test questions: no document serves both.
    """
    rng = random.Random(seed)
    novels, writers, cities, countries = (rng.sample(names, len(names)) for names in (
        [f"{one} {two}" for one in ones.split() for two in twos.split()] for ones, twos in WORDS))
    facts, asked = [], ({}, {})  # asked: question -> Example, for training and for test
    for c, country in enumerate(countries):
        capital, *others = cities[3 * c: 3 * c + 3]
        facts += [(country, f"is a country whose capital is {capital}")]
        facts += [(city, f"is a city in {country}") for city in (capital, *others)]
        for w in range(3 * c, 3 * c + 3):
            chain = (f"The {novels[w]}", writers[w], others[w % 2], country, capital)
            facts += [(chain[0], f"is a novel by {chain[1]}"), (chain[1], f"is a writer born in {chain[2]}")]
            for (first, last), template in QUESTIONS.items():
                question = template.format(chain[first])
                asked[c >= 60][question] = Example(question, (chain[last],), chain[first:last])
    splits = [[example for hops in (1, 2, 3) for example in
               rng.sample([e for e in part.values() if len(e.searches) == hops], each)]
              for part, each in zip(asked, (360, 80))]
    documents = [Document(title, f"{title} {fact}.") for title, fact in facts]
    for part in (documents, *splits):
        rng.shuffle(part)
    return documents, *splits


def demonstration(example: Example, others: Sequence[Example], rng: random.Random) -> list[tuple[str, str]]:
    """The turns, ("search" or "answer", text), of one who knows tags and can copy, but guesses, asks sloppily
    and stops too soon. What is left for RL: when to search, what to ask, when to stop.
    """
    path, turns = example.searches or (example.question,), []
    guess = ("answer", rng.choice(others).answers[0])
    if rng.random() < 0.1:
        return [guess]
    for query, found in zip(path, (*path[1:], example.answers[0])):
        if rng.random() < 0.25:
            turns.append(("search", rng.choice(query.split())))  # half a name finds anything
            if rng.random() < 0.5:
                return [*turns, guess]
        turns.append(("search", query))
        if rng.random() < 0.6:
            break
    return [*turns, ("answer", found)]  # what was found last, be it the answer or not


# ==== 2. Files ==============================================================================================
def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Whenever the process is killed, `path` holds the old content or the new, never half of it."""
    part = path.with_name(f"{path.name}.tmp")
    write(part)
    os.replace(part, path)


def open_folder(chosen: str, kind: str) -> str:
    """Make the run folder, never one that holds anything -> its path."""
    out = Path(chosen or time.strftime(f"runs/%Y%m%d-%H%M%S-{kind}"))
    try:
        while not chosen and out.exists():
            out = out.with_name(out.name + "+")
        out.mkdir(parents=True, exist_ok=True)
        require(not any(out.iterdir()), f"--out {out}: it is in use; give a new folder, or --resume it.")
    except OSError as error:
        raise UserError(f"--out {out}: it cannot be written ({error.strerror}); give another.") from error
    return str(out)


def begin(out: Path, settings: Mapping) -> None:
    """Write down a run's settings, and start its episodes.jsonl unless it has been."""
    replace_file(out / "config.json", partial(write_json, settings))
    (out / "episodes.jsonl").touch()


def keep(path: Path, write: Callable[[Path], object]) -> None:
    """Put a file into a cache; that it cannot be written is worth a line, not the end."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two runs may start cold at the same time
        write(part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        print(f"{path}: it cannot be written ({type(error).__name__}), so the next run starts cold again.")


def cache_file(parts: Sequence, arrays: Iterable[np.ndarray]) -> Path:
    """A file of the disk cache, named by a hash of all that shapes what is kept in it."""
    key = hashlib.sha256(repr(parts).encode())
    for values in arrays:
        key.update(values.tobytes())
    folder = Path(os.environ.get("SAPO_MIN_CACHE") or Path.home() / ".cache" / "sapo_min")
    return folder / f"{key.hexdigest()[:32]}.pt"


@contextmanager
def intact(path: str | Path):
    """What goes wrong inside means that the file is missing, damaged or foreign: one sentence says so."""
    try:
        if Path(path).suffix == ".pt":  # a zip archive; loading does not look at its check sums
            require(zipfile.ZipFile(path).testzip() is None, f"{path}: it is damaged; delete it.")
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError,
            pickle.PickleError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: it is missing, damaged or not sapo_min's ({type(error).__name__}); "
                        "give another or start anew.") from error


@contextmanager
def told(sentence: str):
    """What cannot be read or reached inside is told in this sentence, the kind of error put in for {}."""
    try:
        yield
    except Exception as error:  # `datasets` wraps what goes wrong in a bare Exception of its own
        raise UserError(sentence.format(type(error).__name__)) from error


def check_resume(path: Path, wanted: Mapping, saved: Mapping, history: Sequence, looks: Mapping) -> None:
    """UserError unless a run with the `saved` settings can go on with the `wanted` ones."""
    for name, value in wanted.items():
        require(name in ("steps", "device", "out", "resume") or saved.get(name) == value,
                f"{path}: it was made with --{name} {saved.get(name)}, not {value}; leave that as it was.")
    steps, done = wanted["steps"], history[-1]["step"]
    require(steps > done or steps in looks, f"--steps {steps}: {done} are done; give more.")
    if steps != saved["steps"]:
        print(f"--steps {saved['steps']} -> {steps}: from here on lr falls as if that had been planned.")


def how_to_go_on(folder: str) -> str:
    if folder and (Path(folder) / "checkpoint.pt").exists():
        return f"go on with: python sapo_min.py --resume {folder}"
    return "no step was done."


def as_answers(value) -> tuple[str, ...]:
    """Gold answers come as text, number, list, array or dict of these: here, as a tuple of texts (report 39).

    >>> as_answers("Paris"), as_answers({"aliases": ["NYC", "New York"]})
    (('Paris',), ('NYC', 'New York'))
    """
    if isinstance(value, str | int) or isinstance(value, float) and math.isfinite(value):
        return (str(value),)
    if isinstance(value, np.ndarray | np.generic):
        return as_answers(value.tolist())
    value = list(value.values()) if isinstance(value, Mapping) else value
    require(isinstance(value, list | tuple), f"an answer must be text or a list of texts, not {value!r}.")
    return tuple(answer for part in value for answer in as_answers(part))


def write_json(value, path: Path) -> None:
    path.write_text(json.dumps(value, indent=1))


def write_table(rows: Sequence[Mapping], path: Path) -> None:
    """Dicts of numbers as CSV that reads back exactly; None is an empty field."""
    lines = [rows[0].keys()] + [["" if x is None else str(x) for x in row.values()] for row in rows]
    path.write_text("".join(",".join(line) + "\n" for line in lines))


def read_table(path: Path) -> list[dict[str, float | None]]:
    """What write_table wrote. ValueError if it is damaged."""
    names, *rows = [line.split(",") for line in path.read_text().splitlines()]
    return [{name: (int if name == "step" else float)(value) if value else None
             for name, value in zip(names, row, strict=True)} for row in rows]


def read_json(where: str, text: bytes):
    """One JSON value. UserError names its place."""
    try:
        value = json.loads(text.decode("utf-8-sig"))
        if b"\\u" in text:  # half a surrogate pair is legal JSON, but no text
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: it is not JSON in UTF-8 ({error}); write one object a line, "
                        "or one array of objects.") from error


def read_rows(path: str) -> list[tuple[str, dict]]:
    """The rows of a JSON file, an array or one object a line, each with its place in words, for an error.

    Not by `datasets`: its columns would turn dates into timestamps and could not tell the line of a mistake.
    """
    require(Path(path).is_file(), f"{path}: there is no such file; give the path of a .json or .jsonl file.")
    content = Path(path).read_bytes()
    if content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        rows = [(f"{path}, row {n}", row) for n, row in enumerate(read_json(path, content), 1)]
    else:
        rows = [(f"{path}, line {n}", read_json(f"{path}, line {n}", line))
                for n, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    for where, row in rows:
        require(isinstance(row, dict), f"{where}: it must be a JSON object, "
                'as in {"question": "...", "golden_answers": ["..."]}.')
    require(rows, f"{path}: the file is empty; it needs at least one row.")
    return rows


def read_document(where: str, row: Mapping) -> Document:
    """FlashRAG / Search-R1 form, {"contents": "\\"Title\\"\\nText"}, or {"title", "text"}."""
    title, text = row.get("title") or "", row.get("text")
    if isinstance(row.get("contents"), str):
        title, newline, text = row["contents"].partition("\n")
        title, text = (re.sub('^"(.*)"$', r"\1", title.strip()), text) if newline else ("", title)
    require(isinstance(title, str) and isinstance(text, str) and text.strip(),
            f'{where}: a document needs a text, in "contents" or in "title" and "text"; mend or remove it.')
    return Document(title.strip(), text.strip())


def read_example(where: str, row: Mapping) -> tuple[Example, list[Document]]:
    """FlashRAG form, {"question", "golden_answers"}, or HotpotQA's, with the documents of its "context"."""
    try:
        question = row["question"].strip()
        answers = as_answers(row["golden_answers"] if "golden_answers" in row else row["answer"])
        facts, context = row.get("supporting_facts") or [], row.get("context") or []
        titles = dict.fromkeys(facts["title"] if isinstance(facts, Mapping) else [fact[0] for fact in facts])
        require(all(title.strip() for title in titles), "a title in supporting_facts is empty")
        if isinstance(context, Mapping):  # the hub's form; the file of HotpotQA's authors has a list of pairs
            context = list(zip(context["title"], context["sentences"], strict=True))
        context = [part if isinstance(part, Mapping) else {"title": part[0], "text": "".join(part[1])}
                   for part in context]
        documents = [read_document(where, part) for part in context if str(part.get("text")).strip()]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise UserError(f'{where}: it needs "question" (text) and "golden_answers" (texts), a "context" '
                        f"as in HotpotQA or none ({type(error).__name__}: {error}).") from error
    require(question and any(answers), f"{where}: the question or its answers are empty; fill or remove it.")
    return Example(question, answers, tuple(titles), str(row.get("type") or "")), documents


def read_questions(tables: Sequence[Sequence[tuple[str, Mapping]]], seed: int) -> tuple[list, list, list]:
    """One table, or one for training and one for test -> (documents, training examples, test examples)."""
    tables = [[read_example(*row) for row in rows] for rows in tables]
    if len(tables) == 1:  # no splits: a seeded fifth becomes the test set
        rows, cut = tables[0], max(1, len(tables[0]) // 5)
        require(len(rows) > 1, "--data: one question cannot be both training and test set; give two or more.")
        random.Random(seed).shuffle(rows)
        tables = [rows[cut:], rows[:cut]]
    documents = list(dict.fromkeys(document for rows in tables for _, found in rows for document in found))
    return documents, *([example for example, _ in rows] for rows in tables)


def found(documents: Sequence[Document]) -> list[str]:
    """Documents as a search shows them."""
    return [f"Doc {n}(Title: {d.title}) {d.text}" for n, d in enumerate(documents, 1)]


# ==== 3. What a run shows and writes ========================================================================
def pull_apart(text: str, marks: Iterable[str]) -> str:
    """Put a space behind the first character of every mark in the text, so that it is none any more.

    >>> pull_apart("Not </information> yet", ["</information>"])
    'Not < /information> yet'
    """
    marks = sorted(map(re.escape, marks), key=len, reverse=True)
    return re.sub("|".join(marks), lambda mark: f"{mark[0][0]} {mark[0][1:]}", text) if marks else text


METRICS = [
    "step", "reward", "em", "f1", "searches", "duplicate_queries", "answered", "invalid", "truncated",
    "out_of_turns", "zero_spread", "ratio_mean", "ratio_min", "ratio_positive", "clip_frac", "gate_frac",
    "isdd", "kl_old", "entropy", "grad_norm", "lr", "tokens_per_s", "eval_em", "eval_f1", "eval_searches"]
STATUSES = ("answered", "invalid", "truncated", "out_of_turns")  # how an episode can end


def spans(episode, tokenizer) -> list[dict[str, str]]:
    """The episode's text, cut where the writer changes: [{"by": "model" or "environment", "text"}, ...]."""
    return [{"by": "model" if by else "environment", "text": tokenizer.decode([token for token, _ in part])}
            for by, part in itertools.groupby(zip(episode.tokens, episode.mask), lambda pair: pair[1])]


def show_longest(episodes: Sequence, tokenizer) -> str:
    """The transcript of the first question with the most hops."""
    return transcript(max(episodes, key=lambda e: len(e.example.searches)), tokenizer)


def append_episodes(path: Path, step: int, episodes: Sequence, tokenizer) -> None:
    """One JSON line for each episode."""
    with open(path, "a") as file:
        for e in episodes:
            record = {"step": step, "text": spans(e, tokenizer), "status": e.status, "queries": e.queries,
                      "answer": e.answer, "gold": e.example.answers, "reward": e.reward}
            file.write(json.dumps(record) + "\n")


def transcript(episode, tokenizer) -> str:
    """For people: what the model wrote is green on a terminal and marked ">>>" elsewhere."""
    green, grey, end = ("\033[32m", "\033[90m", "\033[0m") if sys.stdout.isatty() else (">>> ", "    ", "")
    lines = [(green if span["by"] == "model" else grey) + line.strip() + end
             for span in spans(episode, tokenizer) for line in span["text"].split("\n") if line.strip()]
    gold = f", gold: {' / '.join(episode.example.answers)}" if episode.example.answers else ""
    return "\n".join([*lines, f"    [{episode.status}: {episode.answer or 'no answer'}{gold}]"])


def summary(episodes: Sequence) -> dict[str, float]:
    """Means over the episodes, em and f1 also by the question's kind, or hops where the data tells none."""
    asked, groups = sum(len(e.queries) for e in episodes), defaultdict(list)
    for e in sorted(episodes, key=lambda e: len(e.example.searches)):
        groups[e.example.kind or f"{len(e.example.searches)} hops"].append(e)
    parts = {"": episodes} | ({f", {kind}": part for kind, part in groups.items()} if len(groups) > 1 else {})
    repeats = sum(len(e.queries) - len(set(e.queries)) for e in episodes)
    return {"reward": fmean(e.reward for e in episodes),
            **{f"{name}{kind}": fmean(getattr(e, name) for e in part)
               for name in ("em", "f1") for kind, part in parts.items()},
            "searches": asked / len(episodes), "duplicate_queries": repeats / max(1, asked),
            **{status: fmean(e.status == status for e in episodes) for status in STATUSES},
            **{f"questions{kind}": len(part) for kind, part in parts.items()}}


def interval(mean: float, n: int) -> tuple[float, float]:
    """The 95% interval (Wilson's) of a share seen in n questions; for a mean F1 it is a little too wide.

    >>> [round(end, 2) for end in interval(0.5, 100)], [round(end, 2) for end in interval(0.0, 20)]
    ([0.4, 0.6], [0.0, 0.16])
    """
    z = 1.96
    middle, width = mean + z * z / (2 * n), z * math.sqrt(mean * (1 - mean) / n + (z / (2 * n)) ** 2)
    return max(0.0, (middle - width) / (1 + z * z / n)), (middle + width) / (1 + z * z / n)


def compare(before: Mapping, after: Mapping, guess: float, bound: float) -> str:
    """Two summaries as a table, and below it the exact match of a guess and of one fixed search."""
    def show(name, result):
        metric, comma, kind = name.partition(", ")
        if metric not in ("em", "f1"):
            return f"{result[name]:.2f}"
        low, high = interval(result[name], result[f"questions{comma}{kind}"])
        return f"{result[name]:.2f} [{low:.2f}, {high:.2f}]"
    lines = [f"{'':20}{'before':20}after [95% interval]"]
    sizes = [name for name in before if name.startswith("questions")]
    lines += [f"{name:20}{show(name, before):20}{show(name, after)}" for name in before if name not in sizes]
    lines += [", ".join(f"{name.removeprefix('questions, ')} {after[name]}" for name in sizes)]
    lines += [f"Baselines: em {guess:.2f} without search, at most {bound:.2f} by one search for the question"]
    return "\n".join(lines)


def costs(cold_seconds: float, seconds: float, history: Sequence[Mapping], gpu_bytes: int) -> str:
    """What a run took. Without a GPU, memory is the process's, where the system tells it (not on Windows)."""
    peak = gpu_bytes / 2**30
    with suppress(ImportError):
        import resource
        unit = 2**30 if sys.platform == "darwin" else 2**20
        peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    speed = fmean([row["tokens_per_s"] for row in history[1:]] or [0.0])
    return (f"Cold start {cold_seconds:.0f} s, all {seconds:.0f} s, {speed:,.0f} tokens/s written and learnt "
            f"from, peak memory {peak:.2f} GB, run folder")


def complaints(row: Mapping, warned: set[str]) -> list[str]:
    """What is plainly wrong with a training step, and what to do (reports 12, 30), each said once a run."""
    signs = {"every episode is cut off; raise max_new_tokens or max_length.": row["truncated"] == 1,
             "no group has different rewards, nothing is learnt; raise group_size.": row["zero_spread"] == 1,
             "nobody searches; raise cold_start_steps.": row["searches"] == 0}
    new = [advice for advice, wrong in signs.items() if wrong and advice not in warned]
    warned.update(new)
    return new


# ==== 4. TF-IDF =============================================================================================
# The textbook weights, those of scikit-learn's TfidfVectorizer(token_pattern=r"(?u)\b\w+\b"): tf = raw count,
# idf = ln((1 + N) / (1 + df)) + 1, every document scaled to length 1; the score is the cosine. What it does
# not do: stemming, stop words, phrases. "Novels" does not find "novel".
WORD = re.compile(r"\w+")


class TfidfRetriever:
    """An inverted index (word -> its documents): a query reads only the postings of its own words.

    It keeps 12 bytes a posting; building 100,000 passages of 90 words peaks below 1 GB.

    >>> TfidfRetriever(["a red fox", "a red hen"]).search("which fox?")[0][0]
    0
    """

    def __init__(self, documents: Sequence[str]):
        """ValueError when there is nothing to index: no documents, or no word in any of them."""
        self.size = len(documents)
        vocabulary: defaultdict[str, int] = defaultdict()
        vocabulary.default_factory = vocabulary.__len__  # an unseen word gets the next free number
        words, lengths = array("i"), np.zeros(self.size, np.int64)
        for row, text in enumerate(documents):
            found = WORD.findall(text.lower())
            lengths[row] = len(found)
            words.extend(map(vocabulary.__getitem__, found))
        require(words, "The retriever has nothing to index: give it at least one document with a word in it.")
        self.vocabulary = dict(vocabulary)

        # One sort brings equal (word, document) pairs together; the lengths of the runs are the term counts.
        keys = np.frombuffer(words, np.int32) * np.int64(self.size)
        keys += np.repeat(np.arange(self.size), lengths)
        keys.sort()
        first = np.flatnonzero(np.diff(keys, prepend=-1))  # [postings] where each pair's run begins
        counts = np.diff(first, append=len(keys))
        word, self.docs = np.divmod(keys[first], self.size)  # [postings] ordered by word, then document
        df = np.bincount(word)  # [words] how many documents hold the word
        self.idf = np.log((1 + self.size) / (1 + df)) + 1
        weights = counts * self.idf[word]
        norms = np.sqrt(np.bincount(self.docs, weights * weights, minlength=self.size))
        self.weights = (weights / norms[self.docs]).astype(np.float32)  # [postings]
        self.start = np.concatenate([[0], np.cumsum(df)])  # word w owns postings start[w] : start[w + 1]

    def search(self, query: str, k: int = 3) -> list[tuple[int, float]]:
        """The min(k, N) best documents, (index, cosine), best first, ties by lower index, cosines above 0.

        An empty query, or one of unknown words only, gives [].
        """
        counts = Counter(self.vocabulary[w] for w in WORD.findall(query.lower()) if w in self.vocabulary)
        if not counts or k < 1:
            return []
        weights = {w: n * self.idf[w] for w, n in counts.items()}
        length = np.sqrt(sum(weight * weight for weight in weights.values()))
        scores = np.zeros(self.size, np.float32)
        for w, weight in weights.items():
            own = slice(self.start[w], self.start[w + 1])
            np.add.at(scores, self.docs[own], self.weights[own] * np.float32(weight / length))
        k = min(k, self.size)
        # subtle: a partial sort breaks ties at random, so take all documents that reach the k-th best score
        least = np.partition(scores, self.size - k)[self.size - k]
        best = np.flatnonzero(scores >= least) if least > 0 else np.flatnonzero(scores)
        best = best[np.argsort(-scores[best], kind="stable")][:k]
        return [(int(i), float(scores[i])) for i in best]


def one_search(retriever, documents: Sequence[Document], examples: Sequence[Example], k: int) -> float:
    """The share of questions whose answer stands in what one search for the question finds, the most that
    a fixed search could reach, however well its results were read."""
    def words(text):
        return f" {' '.join(WORD.findall(text.lower()))} "
    found = [words(" ".join(documents[i].text for i, _ in retriever.search(e.question, k))) for e in examples]
    return fmean(any(words(answer) in text for answer in e.answers) for e, text in zip(examples, found))
